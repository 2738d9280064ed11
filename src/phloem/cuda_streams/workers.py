"""Where a model's functions run: in the order given, apart from the loop."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from phloem.cuda_streams.fences import Fence, Post
from phloem.errors import RuntimeClosed

__all__ = ["ThreadWorker", "WorkerStream"]

P = ParamSpec("P")
R = TypeVar("R")


class WorkerStream(ABC):
    """A `Stream` that runs functions in the order given, one at a time.

    Its functions may use torch; they must not touch what belongs to the loop.
    """

    def __init__(self, name: str, post: Post) -> None:
        """`post` brings results and fences to the loop, see `LoopPoster`."""
        self.name = name
        self._post = post

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Enqueue `fn(*args)`; never blocks. The future's `cancel()` works until it has begun.

        Raises RuntimeClosed after `close`; so does the future of what `close` kept from running.
        """
        future = self._future_of(fn)

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

        self._give(begin, refuse)
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

    @abstractmethod
    def record(self) -> Fence:
        """A fence that passes when all that was enqueued has ended; passed already when idle."""

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """Let what is enqueued from now on begin only after `fence`; never blocks the caller."""

    @abstractmethod
    def hold(self, fence: Fence, *, unless: Fence | None = None) -> None:
        """For functions that run on this stream: go on only after `fence`.

        Or at once when `unless` has passed, or the stream is closed.
        """

    @property
    @abstractmethod
    def closing(self) -> bool:
        """`close` was called: what runs is to come to an end."""

    @abstractmethod
    def close(self) -> None:
        """Let what runs end and keep the rest from running. Blocks; idempotent."""

    def _future_of(self, fn: Callable[P, R]) -> Future[R]:
        del fn  # only its type is asked for
        return Future()

    def _around(self) -> AbstractContextManager[None]:
        """What each function runs in."""
        return nullcontext()

    @abstractmethod
    def _give(self, act: Callable[[], None], refuse: Callable[[], None]) -> None:
        """Enqueue what to do, and what to do instead once closed. Raises RuntimeClosed then."""

    def _closed_error(self) -> RuntimeClosed:
        return RuntimeClosed(f"stream {self.name!r} is closed")


class ThreadWorker(WorkerStream):
    """A worker stream on one named thread."""

    def __init__(self, name: str, post: Post) -> None:
        super().__init__(name, post)
        self._changed = threading.Condition()
        # Under the condition: (what to do, what to do instead once closed), in order. `_busy` is
        # true while the thread does something that it has taken out.
        self._queue: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"phloem-{name}", daemon=True)
        self._thread.start()

    def record(self) -> Fence:
        """See `WorkerStream.record`."""
        with self._changed:
            if not self._busy and not self._queue:
                return Fence.settled(self.name)
            fence = Fence(self._post, self.name)
            self._enqueue(fence.mark_passed, fence.mark_passed)
        return fence

    def wait(self, fence: Fence) -> None:
        """See `WorkerStream.wait`."""
        if not fence.passed:
            with self._changed:
                self._enqueue(lambda: self.hold(fence), lambda: None)

    def hold(self, fence: Fence, *, unless: Fence | None = None) -> None:
        """See `WorkerStream.hold`; the thread waits."""
        if not fence.passed:
            self._hold_until(fence, lambda: fence.passed, unless)

    @property
    def closing(self) -> bool:
        """See `WorkerStream.closing`."""
        return self._closed

    def close(self) -> None:
        """See `WorkerStream.close`; ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

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

    def _give(self, act: Callable[[], None], refuse: Callable[[], None]) -> None:
        with self._changed:
            if self._closed:
                raise self._closed_error()
            self._enqueue(act, refuse)

    def _enqueue(self, act: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._queue.append((act, refuse))
        self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:  # a function of its own, so that nothing is held while waiting
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
            act, refuse = self._queue.popleft()
            self._busy = True
            do = refuse if self._closed else act
        do()
        return True
