"""Streams of a device as the runtime sees them: a caller's own, and workers that feed one.

The event behind a fence must be recorded after the work it stands for is on the stream, or it
stands for nothing. A caller that launches on the loop's thread does so by itself (`DeviceStream`);
where a worker thread launches, the same thread records, behind what it was given (`DeviceWorker`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch

from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.fences import Fence, Post, Stream
from phloem.cuda_streams.lockstep import new_worker
from phloem.cuda_streams.workers import ThreadWorker, WorkerStream
from phloem.errors import EngineDead, InvalidRequest

__all__ = ["CallerStreams", "DeviceStream", "DeviceWorker", "EventWaiter"]


class EventWaiter:
    """A thread that blocks on the events of one stream in order and acts on each."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._changed = threading.Condition()
        self._queue: deque[tuple[object, Callable[[Exception | None], None]]] = deque()
        self._closed = False
        self._name = f"phloem-{name}"
        self._start()

    def _start(self) -> None:
        self._serving = True
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    def after(self, event: object, fn: Callable[[Exception | None], None]) -> None:
        """Call `fn(error)` in the waiter's thread once the event has happened or cannot."""
        with self._changed:
            self._queue.append((event, fn))
            if self._serving:
                self._changed.notify_all()
            else:
                self._start()  # it was closed, but what was recorded since has to be told, too

    def close(self) -> None:
        """End the thread once all that it was given has happened. Blocks; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        self._driver.enter_thread()
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:  # a function of its own, so that nothing is held while waiting
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                self._serving = False
                return False
            event, fn = self._queue.popleft()
        error: Exception | None = None
        try:
            self._driver.synchronize(event)
        except Exception as caught:  # noqa: BLE001  drivers raise what they like
            error = caught
        fn(error)
        return True


class DeviceStream:
    """A caller's stream of the device as a `Stream`. Raises InvalidRequest for anything else."""

    def __init__(self, name: str, stream: object, driver: Driver, post: Post) -> None:
        driver.check_stream(stream)
        self.name = name
        self.stream = stream
        self.driver = driver
        self._post = post
        self._waiter = EventWaiter(driver, name)
        self._last = Fence.settled(name)

    def __repr__(self) -> str:
        return f"DeviceStream({self.name!r})"

    def record(self) -> Fence:
        """See `Stream.record`. If the device is lost the fence passes: nothing runs any more.

        Raises InvalidRequest while the stream's work is being captured into a graph: its event
        would be a node of the graph.
        """
        fence = Fence(self._post, self.name)
        try:
            self.driver.check_stream(self.stream)
            event = self.driver.record(self.stream)
        except (RuntimeError, EngineDead):
            if self.driver.alive():
                raise
            fence.mark_passed()
            return fence
        fence.mark_recorded(event)
        self._waiter.after(event, lambda _: fence.mark_passed())
        self._last = fence
        return fence

    async def settled(self) -> None:
        """Wait until what was recorded so far has ended; a cancelled caller leaves nothing."""
        await self._last.reached()

    def wait(self, fence: Fence) -> None:
        """See `Stream.wait`: the device waits, not the caller.

        Raises InvalidRequest when the fence is not recorded yet, that is while its copy has not
        been launched (see `Ticket.placed`): there is no event that the device could wait for.
        """
        event = fence.event
        if event is not None:
            self.driver.wait_event(self.stream, event)
        elif not fence.passed:
            raise InvalidRequest(f"{fence!r} is not recorded: await its launch first")

    def close(self) -> None:
        """End the stream's thread, after what was recorded has ended. Blocks; idempotent."""
        self._waiter.close()


class DeviceWorker(ThreadWorker):
    """A named thread that runs functions in order, their torch operations on one device stream.

    For a model that is run by a worker thread. A function is over when its *launches* are; what it
    launched ends later, and a fence of `record` passes then. Everything that was on the device
    when the worker was made (weights on their way, say) has ended before its first function.
    Raises InvalidRequest for what is no stream of the device.
    """

    def __init__(self, name: str, stream: object, driver: Driver, post: Post) -> None:
        driver.check_stream(stream)
        driver.settle()
        self.stream = stream
        self.driver = driver
        self._waiter = EventWaiter(driver, f"{name}-events")
        self._last: Fence | None = None
        super().__init__(name, post)

    def __repr__(self) -> str:
        return f"DeviceWorker({self.name!r})"

    def record(self) -> Fence:
        """See `Stream.record`: what the worker was given has been launched, and has ended.

        The fence is recorded, so that the device can wait for it, once the thread comes to it.
        """
        fence = Fence(self._post, self.name)
        with self._changed:
            if self._closed and self._last is not None:
                return self._last
            self._enqueue(lambda: self._mark(fence), lambda: self._mark(fence))
        return fence

    def wait(self, fence: Fence) -> None:
        """See `Stream.wait`: the thread waits for the launch, the device for the event."""
        super().wait(fence)

    def hold(self, fence: Fence, *, unless: Fence | None = None) -> None:
        """See `WorkerStream.hold`; only what the function launches from now on waits."""
        if fence.passed:
            return
        fence.add_recorded_hook(self._notify)
        self._hold_until(fence, lambda: fence.event is not None or fence.passed, unless)
        event = fence.event
        if event is None:
            return
        try:
            self.driver.wait_event(self.stream, event)
        except Exception:  # noqa: BLE001  lost, or an event of another device
            self._hold_until(fence, lambda: fence.passed, unless)

    def close(self) -> None:
        """See `WorkerStream.close`; and wait until what was launched has ended."""
        if self._last is None:
            self._last = self.record()
        super().close()
        self._waiter.close()

    def _around(self) -> AbstractContextManager[None]:
        return self.driver.current(self.stream)

    def _mark(self, fence: Fence) -> None:
        """In the worker's thread, behind the launches that the fence stands for."""
        try:
            self.driver.check_stream(self.stream)
            event = self.driver.record(self.stream)
        except Exception:  # noqa: BLE001  no event to be had: wait for the device itself
            with suppress(Exception):  # lost: nothing runs any more
                self.driver.settle()
            fence.mark_passed()
            return
        fence.mark_recorded(event)
        self._waiter.after(event, lambda _: fence.mark_passed())


class CallerStreams:
    """The streams that callers name to one runtime. On the loop.

    With a driver there must be one, and it must be the device's: a fence of another would pass
    while the device still works. A stream of the driver's own kind is watched by a thread from the
    first time it is named; there are at most `most` of these. On a `loop` of virtual time workers
    keep that.
    """

    def __init__(
        self,
        driver: Driver | None,
        post: Post,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        most: int = 32,
    ) -> None:
        self._driver = driver
        self._post = post
        self._loop = loop
        self._most = most
        self._watched: dict[object, DeviceStream] = {}

    def named(self, stream: Stream | torch.Stream | None) -> Stream | None:
        """The stream that a caller means; None is for work that ends before it is told.

        Raises InvalidRequest, on a device also for None: there is no ambient current stream.
        """
        driver = self._driver
        if driver is None:
            if isinstance(stream, torch.Stream | DeviceStream | DeviceWorker):
                raise InvalidRequest(f"{stream!r} is a device's, and the pools are in CPU memory")
            return stream
        if stream is None:
            raise InvalidRequest(f"name a stream of {driver.device}: there is no ambient one")
        if isinstance(stream, DeviceStream | DeviceWorker):
            if stream.driver is not driver:
                raise InvalidRequest(f"{stream!r} was made for another runtime or device")
            return stream
        if isinstance(stream, WorkerStream):
            raise InvalidRequest(
                f"{stream!r} knows when functions return, not when {driver.device} is done"
            )
        watched = self._watched.get(stream)
        if watched is not None:
            return watched
        driver.check_stream(stream)
        if len(self._watched) == self._most:
            raise InvalidRequest(f"{self._most} streams are in use already; name one of them")
        watched = DeviceStream(f"caller-{len(self._watched)}", stream, driver, self._post)
        self._watched[stream] = watched
        return watched

    def worker(self, name: str, on: torch.Stream | None) -> WorkerStream:
        """A worker thread for a model; on a device it feeds the stream `on`.

        Raises InvalidRequest when one is missing on a device, or given without.
        """
        if self._driver is not None:
            if on is None:
                raise InvalidRequest(f"a worker on {self._driver.device} needs a stream to feed")
            return DeviceWorker(name, on, self._driver, self._post)
        if on is not None:
            raise InvalidRequest(f"{on!r} is a device's, and the pools are in CPU memory")
        return new_worker(name, self._post, self._loop)

    async def settled(self) -> None:
        """Wait until what was recorded so far has ended; a cancelled caller leaves nothing."""
        for watched in tuple(self._watched.values()):
            await watched.settled()

    def close(self) -> None:
        """End the threads that watch streams, after what was recorded. Blocks; idempotent."""
        while self._watched:
            self._watched.popitem()[1].close()
