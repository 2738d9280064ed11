"""A device in CPU memory for the device engine: streams are threads, everything is late.

Divergence from CUDA: a stream runs each torch operation at once where a device would also overlap
them; memory is one address space; an operation that raises poisons the device only if it is told.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from phloem.cuda_streams.driver import Addresses, BatchCopy
from phloem.cuda_streams.host import PinnedMemory
from phloem.cuda_streams.numa import Nearby
from phloem.errors import EngineDead, InvalidRequest


class FakeStream:
    """A thread that runs what it is given, in order, now and then after a pause."""

    def __init__(self, name: str, seed: int) -> None:
        self.error: Exception | None = None
        self.capturing = False
        self._ended = False
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        threading.Thread(target=self._serve, name=f"fake-{name}", daemon=True).start()

    def put(self, fn: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(fn)
            self._changed.notify_all()

    def end(self) -> None:
        self._ended = True

    def settle(self) -> None:
        """Wait until it has come to the end of what it holds now."""
        reached = threading.Event()
        self.put(reached.set)
        while not self._ended and not reached.wait(0.01):
            pass

    def _serve(self) -> None:
        with torch.inference_mode():
            while not self._ended:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue)
                    fn = self._queue.popleft()
                if self._rng.random() < 0.3:
                    time.sleep(self._rng.random() * 0.001)
                try:
                    fn()
                except Exception as error:  # noqa: BLE001  as a device would keep it
                    self.error = error


class FakeEvent:
    """Happens when its stream comes to it; carries what went wrong there before."""

    def __init__(self) -> None:
        self.flag = threading.Event()
        self.error: Exception | None = None


class FakeDriver:
    """See `phloem.cuda_streams.driver.Driver`."""

    def __init__(self, *, batched: bool = True) -> None:
        self.device = torch.device("cpu")
        self.batch_copy: BatchCopy | None = self._batch_copy if batched else None
        self.near = Nearby(frozenset(), "a fake")
        self.lost = False
        self.closed = 0
        self.threads: list[str] = []
        self.streams: list[FakeStream] = []
        self.waits: list[FakeEvent] = []
        self._worked_for: dict[int, FakeStream] = {}  # by thread: the stream whose work it does
        self.pinned: dict[int, int] = {}

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def settle(self) -> None:
        if self.lost:
            raise RuntimeError("fake device lost")
        for stream in tuple(self.streams):
            stream.settle()

    def pinned_memory(self) -> PinnedMemory:
        return PinnedMemory(self.pinned.__setitem__, self.pinned.__delitem__)

    def new_stream(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(name, seed=len(name) + len(self.threads)))
        return self.streams[-1]

    def check_stream(self, stream: object) -> None:
        if not isinstance(stream, FakeStream):
            raise InvalidRequest(f"{stream!r} is no fake stream")
        if self.lost:
            raise EngineDead("fake device lost")
        if stream.capturing:
            raise InvalidRequest(f"{stream!r} is capturing a graph")

    def close_stream(self, stream: object) -> None:
        assert isinstance(stream, FakeStream)
        self.closed += 1
        self.streams.remove(stream)
        stream.put(stream.end)

    def empty(self, stream: object, nbytes: int) -> torch.Tensor:
        assert isinstance(stream, FakeStream)
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def current(self, stream: object) -> Generator[None]:
        """The stream waits while the calling thread does its work for it."""
        assert isinstance(stream, FakeStream)
        reached, left = threading.Event(), threading.Event()
        stream.put(lambda: (reached.set(), left.wait(), None)[2])
        reached.wait()
        self._worked_for[threading.get_ident()] = stream
        try:
            yield
        finally:
            del self._worked_for[threading.get_ident()]
            left.set()

    def enqueue(self, stream: object, fn: Callable[[], None]) -> None:
        assert isinstance(stream, FakeStream)
        if self.lost:
            raise RuntimeError("fake device lost")
        stream.put(fn)

    def record(self, stream: object) -> object:
        assert isinstance(stream, FakeStream)
        if self.lost:
            raise RuntimeError("fake device lost")
        event = FakeEvent()

        def happen() -> None:
            event.error = stream.error
            event.flag.set()

        stream.put(happen)
        return event

    def wait_event(self, stream: object, event: object) -> None:
        assert isinstance(stream, FakeStream)
        if not isinstance(event, FakeEvent):
            raise InvalidRequest(f"{event!r} is no fake event")
        self.waits.append(event)
        if self._worked_for.get(threading.get_ident()) is stream:
            event.flag.wait()  # what the thread does next stands for what would come behind it
        else:
            stream.put(lambda: (event.flag.wait(), None)[1])

    def synchronize(self, event: object) -> None:
        assert isinstance(event, FakeEvent)
        event.flag.wait()
        if self.lost:
            raise RuntimeError("fake device lost")
        if event.error is not None:
            raise event.error

    def alive(self) -> bool:
        return not self.lost

    def _batch_copy(
        self, stream: object, targets: Addresses, sources: Addresses, sizes: Addresses
    ) -> None:
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def copy() -> None:
            for target, source, size in pieces:
                ctypes.memmove(target, source, size)

        self.enqueue(stream, copy)
