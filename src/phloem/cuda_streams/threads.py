"""The CPU engine: real bytes, moved by one worker thread for each channel; and worker streams."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import monotonic_ns
from typing import ParamSpec, TypeVar

import torch

from phloem.cuda_streams.batches import CHANNELS, Channel, CopyBatch, CopyItem
from phloem.cuda_streams.dispatch import Dispatcher, Fault
from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.fences import Fence, Post
from phloem.cuda_streams.mover import RowMover
from phloem.cuda_streams.remains import Remains
from phloem.errors import RuntimeClosed

__all__ = ["ThreadEngine", "WorkerStream"]

P = ParamSpec("P")
R = TypeVar("R")


class ThreadEngine(Dispatcher):
    """`CopyEngine` over pools in CPU memory. `close()` waits for the running layer of each worker.

    Each worker copies with one thread, whatever number torch is set to for others.
    `fault` is for tests and simulations; see `Fault`.
    """

    def __init__(
        self,
        post: Post,
        *,
        fault: Fault | None = None,
        mover: Callable[[], RowMover] = RowMover,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        super().__init__(post, fault, now_ns)
        self._wakes = {channel: threading.Event() for channel in CHANNELS}
        alone = threading.Barrier(len(CHANNELS) + 1)
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(channel, mover, alone),
                name=f"phloem-{channel}",
                daemon=True,
            )
            for channel in CHANNELS
        ]
        for thread in self._threads:
            thread.start()
        # A thread's own number of torch threads is also what threads made later begin with: these
        # are to have the caller's, as before.
        threads = torch.get_num_threads()
        alone.wait()
        torch.set_num_threads(threads)

    def close(self) -> None:
        """See `CopyEngine.close`. Blocks until the workers have ended."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _woken(self, channel: Channel) -> None:
        self._wakes[channel].set()

    def _work(
        self, channel: Channel, new_mover: Callable[[], RowMover], alone: threading.Barrier
    ) -> None:
        # A copy is bound by memory: more than one thread would only take others' cores. Asking
        # first makes the number this thread's own; otherwise its first use takes the caller's.
        torch.get_num_threads()
        torch.set_num_threads(1)
        alone.wait()
        mover = new_mover()
        wake = self._wakes[channel]
        # Pools may be used by models that run in inference mode; so must their writers.
        with torch.inference_mode():
            while True:
                wake.wait()
                wake.clear()  # before taking: whatever becomes ready from now on wakes us again
                while (ticket := self.take(channel)) is not None:
                    error = self._run(ticket, mover)
                    mover.drop()
                    self.finish(ticket, error)
                if self._closed:
                    return

    def _run(self, ticket: Ticket, mover: RowMover) -> BaseException | None:
        batch, remains = ticket.batch, Remains(ticket.batch)
        for layer in range(batch.layers):
            if (why := self.interrupted(ticket)) is not None:
                return why
            copy = partial(self._copy, batch, mover, layer)
            if error := self.one_layer(ticket, layer, remains, copy):
                return error
            if batch.by_layer and remains.error is None:
                ticket.progress(layer + 1)
        return remains.error

    def _copy(
        self, batch: CopyBatch, mover: RowMover, layer: int, items: Sequence[CopyItem]
    ) -> None:
        for item in items:
            mover.add(item, layer)
        if batch.by_layer or layer == batch.layers - 1:
            mover.flush()


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
                with self._around():
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
        if not fence.passed:
            with self._changed:
                self._enqueue(lambda: self.hold(fence), lambda: None)

    def hold(self, fence: Fence, *, unless: Fence | None = None) -> None:
        """For functions that run on this stream: go on only after `fence`.

        Or at once when `unless` has passed, or the stream is closed.
        """
        if not fence.passed:
            self._hold_until(fence, lambda: fence.passed, unless)

    @property
    def closing(self) -> bool:
        """`close` was called: what runs is to come to an end."""
        return self._closed

    def close(self) -> None:
        """Let what runs end, keep the rest from running, end the thread. Blocks; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _around(self) -> AbstractContextManager[None]:
        """What each function runs in."""
        return nullcontext()

    def _hold_until(
        self, fence: Fence, reached: Callable[[], bool], unless: Fence | None = None
    ) -> None:
        """Block the thread until `reached`, which a hook of `fence` makes true, or as `hold`."""
        fence.add_hook(self._notify)
        if unless is not None:
            unless.add_hook(self._notify)
        with self._changed:
            self._changed.wait_for(
                lambda: reached() or self._closed or (unless is not None and unless.passed)
            )

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
