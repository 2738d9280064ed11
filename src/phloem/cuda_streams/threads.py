"""The CPU engine: real bytes, moved by one worker thread for each channel; and worker streams."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from phloem.cuda_streams.batches import CHANNELS, Channel, Clear, Copy, CopyItem
from phloem.cuda_streams.dispatch import Dispatcher, Fault
from phloem.cuda_streams.engine import CopyFailed, Ticket
from phloem.cuda_streams.fences import Fence, Post
from phloem.errors import EngineDead, RuntimeClosed

__all__ = ["RowMover", "ThreadEngine", "WorkerStream"]

P = ParamSpec("P")
R = TypeVar("R")


class RowMover:
    """Copies rows between pools with few calls of about `call_bytes`, each without the GIL.

    Runs of `run_bytes` or more on average go in one pass over memory, many to a call. Shorter ones
    are gathered into a buffer of `stage_bytes` and scattered from there. (Many calls much shorter
    than the interpreter's switch interval collapse when the loop is busy.) One mover a thread.
    """

    def __init__(
        self, *, stage_bytes: int = 8 << 20, run_bytes: int = 32 << 10, call_bytes: int = 4 << 20
    ) -> None:
        self.run_bytes = run_bytes
        self.call_bytes = call_bytes
        # int64: its storage begins at an 8-byte boundary, so it can be seen in any word.
        self._stage = torch.empty(max(stage_bytes, run_bytes) // 8, dtype=torch.int64)

    def apply(self, item: CopyItem, layer: int) -> None:
        """Carry out one layer of an item."""
        if not item.target_ids:
            return
        if isinstance(item, Clear):
            for part in item.target.parts(layer):
                part.index_fill_(0, item.index, 0)
            return
        for target, source in item.target.pairs(layer, item.source):
            row_bytes = target.shape[1] * target.element_size()
            if len(item.target_ids) * row_bytes >= len(item.runs) * self.run_bytes:
                self._in_runs(item, source, target, row_bytes)
            else:
                self._staged(item, source, target, row_bytes)

    def _in_runs(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        group_to: list[Tensor] = []
        group_from: list[Tensor] = []
        size = 0
        for run in item.runs:
            group_to.append(target[run.target : run.target + run.length])
            group_from.append(source[run.source : run.source + run.length])
            size += run.length * row_bytes
            if size >= self.call_bytes:
                _copy_all(group_to, group_from)
                group_to, group_from, size = [], [], 0
        if group_to:
            _copy_all(group_to, group_from)

    def _staged(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        stage = self._stage.view(target.dtype)
        source_index, target_index = item.index
        step = stage.numel() * stage.element_size() // row_bytes
        assert step > 0, "a row longer than a run goes in runs"
        for start in range(0, len(item.target_ids), step):
            chunk = slice(start, start + step)
            rows = source_index[chunk]
            held = stage[: len(rows) * target.shape[1]].view(len(rows), target.shape[1])
            torch.index_select(source, 0, rows, out=held)
            target.index_copy_(0, target_index[chunk], held)


def _copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    # The only public spelling of "copy these to those in one call" has an underscore.
    torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class ThreadEngine(Dispatcher):
    """`CopyEngine` over pools in CPU memory. `close()` waits for the running layer of each worker.

    `fault` is for tests and simulations; see `Fault`.
    """

    def __init__(
        self,
        post: Post,
        *,
        fault: Fault | None = None,
        mover: Callable[[], RowMover] = RowMover,
    ) -> None:
        super().__init__(post)
        self.fault = fault
        self._wakes = {channel: threading.Event() for channel in CHANNELS}
        self._threads = [
            threading.Thread(
                target=self._work, args=(channel, mover), name=f"phloem-{channel}", daemon=True
            )
            for channel in CHANNELS
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """See `CopyEngine.close`. Blocks until the workers have ended."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _woken(self, channel: Channel) -> None:
        self._wakes[channel].set()

    def _work(self, channel: Channel, new_mover: Callable[[], RowMover]) -> None:
        mover = new_mover()
        wake = self._wakes[channel]
        # Pools may be used by models that run in inference mode; so must their writers.
        with torch.inference_mode():
            while True:
                wake.wait()
                wake.clear()  # before taking: whatever becomes ready from now on wakes us again
                while (ticket := self.take(channel)) is not None:
                    self.finish(ticket, self._run(ticket, mover))
                if self._closed:
                    return

    def _run(self, ticket: Ticket, mover: RowMover) -> BaseException | None:
        batch = ticket.batch
        for layer in range(batch.layers):
            if (why := self.interrupted(ticket)) is not None:
                return why
            try:
                if self.fault is not None:
                    self.fault(ticket, layer)
                for item in batch.items:
                    mover.apply(item, layer)
            except EngineDead as error:
                return error
            except Exception as error:  # noqa: BLE001  a worker outlives whatever a copy throws
                failure = CopyFailed(f"{ticket!r} failed at layer {layer}: {error}")
                failure.__cause__ = error
                return failure
            if batch.by_layer:
                ticket.progress(layer + 1)
        return None


class WorkerStream:
    """A `Stream` on the CPU: one named thread that runs functions in the order given.

    Its functions may use torch; they must not touch what belongs to the loop.
    """

    def __init__(self, name: str, post: Post) -> None:
        """`post` brings results and fences to the loop, see `LoopPoster`."""
        self.name = name
        self._post = post
        self._changed = threading.Condition()
        # Under the condition: (what to do, what to do instead once closed), in order. `_busy` is
        # true while the thread does something that it has taken out.
        self._queue: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"phloem-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"WorkerStream({self.name!r})"

    def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Enqueue `fn(*args)`; never blocks. The future's `cancel()` works until it has begun.

        Raises RuntimeClosed after `close`; so does the future of what `close` kept from running.
        """
        future: Future[R] = Future()

        def begin() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  whoever holds the future gets it
                future.set_exception(error)
            else:
                future.set_result(value)

        def refuse() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeClosed(f"stream {self.name!r} was closed"))

        with self._changed:
            if self._closed:
                raise RuntimeClosed(f"stream {self.name!r} is closed")
            self._enqueue(begin, refuse)
        return future

    async def call(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Enqueue `fn(*args)` and wait for its result or exception.

        A cancelled caller leaves the function where it is: it runs to its end, and fences recorded
        behind it pass only then. Raises RuntimeClosed like `run`.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        work = self.run(fn, *args, **kwargs)
        work.add_done_callback(lambda _: self._post(wake))
        await ended
        return work.result()

    def record(self) -> Fence:
        """A fence that passes when all that was enqueued has ended; passed already when idle."""
        with self._changed:
            if not self._busy and not self._queue:
                return Fence.settled(self.name)
            fence = Fence(self._post, self.name)
            self._enqueue(fence.mark_passed, fence.mark_passed)
        return fence

    def wait(self, fence: Fence) -> None:
        """Let what is enqueued from now on begin only after `fence`; never blocks the caller."""

        def hold() -> None:
            with self._changed:
                self._changed.wait_for(lambda: fence.passed or self._closed)

        if not fence.passed:
            with self._changed:
                self._enqueue(hold, lambda: None)
            fence.add_hook(self._notify)

    def close(self) -> None:
        """Let what runs end, keep the rest from running, end the thread. Blocks; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _enqueue(self, act: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._queue.append((act, refuse))
        self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                act, refuse = self._queue.popleft()
                self._busy = True
                do = refuse if self._closed else act
            do()
