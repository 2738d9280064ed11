"""The runtime without `await`: in a thread without an event loop, or from another thread.

Both facades run the very same turns. `SyncCacheRuntime` belongs to one thread and has no event
loop: what takes time ends in worker threads and is taken in by `poll()`, or while a call waits for
it. `BlockingCacheRuntime` calls a runtime that lives on the event loop of another thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import torch

from phloem.actors.actions import Ids
from phloem.actors.allocator import Grant
from phloem.actors.domain import Parked
from phloem.actors.tree.dump import Dump
from phloem.actors.tree.keys import Namespace, Tokens
from phloem.actors.tree.placement import Wanted
from phloem.actors.tree.tree import Evicted, InsertResult, Match
from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.engine import LoopPoster, Stream
from phloem.cuda_streams.landing import Landing
from phloem.cuda_streams.lockstep import SimulatedLoop
from phloem.cuda_streams.pools import DevicePools
from phloem.errors import InvalidRequest, NoRoom, RuntimeClosed
from phloem.events import Sink
from phloem.runtime.cache import CacheRuntime, Stats
from phloem.runtime.config import CacheConfig
from phloem.runtime.devices import EngineFactory
from phloem.runtime.lease import Lease
from phloem.runtime.lifetime import running_loop
from phloem.runtime.opening import RequestOptions
from phloem.runtime.request import Publish, Request
from phloem.runtime.step import Step

__all__ = ["BlockingCacheRuntime", "SyncCacheRuntime", "SyncRequest"]

T = TypeVar("T")


class _Drive(Protocol):
    """Runs a coroutine of the runtime to its end and returns its result."""

    def __call__(self, work: Coroutine[object, None, T], /) -> T: ...


class _CallHere(Protocol):
    """Runs a plain function where the runtime lives."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


class QueuePoster:
    """A post for a thread without a loop: functions wait until that thread serves them."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._posted = threading.Condition()

    def __call__(self, fn: Callable[[], None]) -> None:
        with self._posted:
            self._queue.append(fn)
            self._posted.notify()

    def serve(self) -> int:
        """Call what was posted so far, in order; returns how many."""
        count = 0
        while self._queue:
            self._queue.popleft()()
            count += 1
        return count

    def wait(self, timeout: float | None) -> bool:
        """Block until something is posted; False when `timeout` seconds have passed first.

        As long as it takes if that is None.
        """
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)  # `inf` seconds are a time-out, too
        with self._posted:
            return self._posted.wait_for(lambda: bool(self._queue), timeout)


class SyncRequest:
    """`Request` without `await`; see there."""

    def __init__(self, inner: Request, drive: _Drive, here: _CallHere) -> None:
        self.inner = inner
        self._drive = drive
        self._here = here

    @property
    def id(self) -> str:
        """The name of the request."""
        return self.inner.id

    @property
    def match(self) -> Match:
        """The match it stands on."""
        return self.inner.match

    @property
    def usable(self) -> int:
        """Tokens that needed no compute when it was opened."""
        return self.inner.usable

    @property
    def computed(self) -> int:
        """Tokens computed or reused so far."""
        return self.inner.computed

    @property
    def state_slot(self) -> int | None:
        """The working state slot, None until it is allocated."""
        return self.inner.state_slot

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """Positions at which a checkpoint is worth a state."""
        return self.inner.wanted

    def page_table(self) -> Ids:
        """The device page ids, in order; a copy."""
        return self.inner.page_table()

    def next_stop(self, limit: int) -> tuple[int, int]:
        """Where the next chunk starts and should end."""
        return self.inner.next_stop(limit)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens."""
        self._here(lambda: self.inner.extend(tokens))

    def allocate(self, tokens: int, *, wait: bool = True) -> None:
        """Room for `tokens` more tokens and the working state."""
        self._drive(self.inner.allocate(tokens, wait=wait))

    def ready(self, *, layer: int | None = None) -> Match:
        """Wait until the private copy of the state is complete, or so many layers of it."""
        return self._drive(self.inner.ready(layer=layer))

    def wait_on(self, stream: Stream | torch.Stream, *, layer: int | None = None) -> None:
        """Have a stream wait instead; what runs on it is provisional."""
        self._drive(self.inner.wait_on(stream, layer=layer))

    def landing(self) -> Landing:
        """The copies that a pass can wait for, layer by layer; what it computes is provisional."""
        return self._drive(self.inner.landing())

    def advance(self) -> Match:
        """Take over what others have published meanwhile."""
        return self._drive(self.inner.advance())

    def checkpoint(self, *, state: bool | None = None) -> InsertResult | None:
        """Publish what is settled."""
        return self._drive(self.inner.checkpoint(state=state))

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        self._drive(self.inner.rollback(position))

    def suspend(self, *, keep_lease: bool = False) -> None:
        """Give back room and state, to go on later."""
        self._drive(self.inner.suspend(keep_lease=keep_lease))

    def resume(self) -> Match:
        """Open a suspended request again."""
        return self._drive(self.inner.resume())

    def fork(self, name: str | None = None) -> SyncRequest:
        """A second request that continues from here."""
        return SyncRequest(self._drive(self.inner.fork(name)), self._drive, self._here)

    def finish(self, *, publish: Publish = "all") -> None:
        """Publish the rest, give back what is left."""
        self._drive(self.inner.finish(publish=publish))

    def abort(self) -> None:
        """Give everything back; idempotent."""
        self._here(self.inner.abort)

    def __repr__(self) -> str:
        return repr(self.inner)


class _Facade:
    """The calls that both facades share; each names the coroutine that it drives."""

    def __init__(self, inner: CacheRuntime, drive: _Drive, here: _CallHere) -> None:
        self.inner = inner
        self._drive = drive
        self._here = here

    @property
    def pools(self) -> DevicePools:
        """The device pools."""
        return self.inner.pools

    @contextmanager
    def request(self, tokens: Tokens, **options: Unpack[RequestOptions]) -> Generator[SyncRequest]:
        """Open a request; leaving the block without `finish` aborts it."""
        opened = self._drive(self.inner.open_request(tokens, **options))
        request = SyncRequest(opened, self._drive, self._here)
        try:
            yield request
        finally:
            request.abort()

    @contextmanager
    def step(
        self, requests: Sequence[SyncRequest], *, stream: Stream | torch.Stream | None = None
    ) -> Generator[Step]:
        """Open a forward pass; see `Step`. What it computes is told to `launched` of the facade."""
        inner = [request.inner for request in requests]
        step = self._here(lambda: self.inner.step(inner, stream=stream))
        self._opened(step)
        try:
            yield step
        except BaseException:
            self._here(lambda: step.__exit__(BaseException, None, None))
            raise
        self._here(lambda: step.__exit__(None, None, None))

    def _opened(self, step: Step) -> None:
        """Told of each step."""

    def launched(
        self,
        step: Step,
        ends: dict[SyncRequest, int],
        *,
        states_at: dict[SyncRequest, int] | None = None,
    ) -> None:
        """`step.launched` for the requests of this facade, said where the runtime lives."""
        inner = {request.inner: end for request, end in ends.items()}
        late = {request.inner: at for request, at in (states_at or {}).items()}
        self._here(lambda: step.launched(inner, states_at=late))

    def match(
        self, tokens: Tokens, *, namespace: Namespace | None = None, whole: bool = False
    ) -> Match:
        """How far a prompt is cached."""
        return self._drive(self.inner.match(tokens, namespace=namespace, whole=whole))

    def acquire(
        self, tokens: Tokens, *, namespace: Namespace | None = None, owner: str = ""
    ) -> Lease:
        """Lease the deepest boundary."""
        return self._drive(self.inner.acquire(tokens, namespace=namespace, owner=owner))

    def prefetch(
        self, tokens: Tokens, *, namespace: Namespace | None = None, whole: bool = False
    ) -> int:
        """Bring what the host has of a prompt to the device, ahead of the request for it."""
        return self._drive(self.inner.prefetch(tokens, namespace=namespace, whole=whole))

    def allocate(
        self, *, pages: int = 0, states: int = 0, owner: str = "", wait: bool = True
    ) -> Grant:
        """Reserve pages and states, all or nothing."""
        return self._drive(self.inner.allocate(pages=pages, states=states, owner=owner, wait=wait))

    def insert(
        self,
        tokens: Tokens,
        *,
        pages: Ids | Sequence[int],
        state: int = 0,
        lease: Lease | None = None,
        namespace: Namespace | None = None,
        release: bool = False,
    ) -> InsertResult:
        """Publish data; `release` gives the lease back in the same turn."""
        return self._drive(
            self.inner.insert(
                tokens,
                pages=pages,
                state=state,
                lease=lease,
                namespace=namespace,
                release=release,
            )
        )

    def evict(self, *, pages: int = 0, states: int = 0) -> Evicted:
        """Free at least so much, if nothing protects it."""
        return self._drive(self.inner.evict(pages=pages, states=states))

    def release(self, handle: Lease | Grant) -> None:
        """Give back a lease or a grant."""
        self._here(lambda: self.inner.release(handle))

    def stats(self) -> Stats:
        """The runtime in numbers."""
        return self._here(self.inner.stats)

    def close_session(self, name: str) -> bool:
        """End a session."""
        return self._drive(self.inner.close_session(name))

    def dump(self, limit: int = 1000) -> Dump:
        """Up to `limit` nodes of the tree as data."""
        return self._drive(self.inner.dump(limit))

    def audit(self) -> None:
        """Check every invariant."""
        self._drive(self.inner.audit())

    def reset(self) -> int:
        """Start a new generation, empty."""
        return self._drive(self.inner.reset())


class SyncCacheRuntime(_Facade):
    """The cache for a framework without an event loop. Belongs to the thread that opened it.

        with SyncCacheRuntime(config) as cache:
            with cache.request(tokens) as request:
                ...

    A call that needs a copy waits for it, taking in completions meanwhile. A call that needs room
    waits only for what is in flight: in one thread nobody else can give anything back, so the rest
    is `NoRoom`. For what comes after a step that this thread has yet to end no call waits: that is
    `NoRoom`, too, or `InvalidRequest` if it is a copy. Call `poll()` between steps.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        device: str | torch.device | None = None,
        pools: DevicePools | None = None,
        events: Sink | None = None,
        engine: EngineFactory | None = None,
        driver: Driver | None = None,
    ) -> None:
        inner = CacheRuntime(
            config, device=device, pools=pools, events=events, engine=engine, driver=driver
        )
        super().__init__(inner, self._run_to_end, _call)
        self._poster = QueuePoster()
        self._thread = 0
        self._steps: list[Step] = []  # that are not over

    def open(self) -> Self:
        """Start the actors."""
        self._thread = threading.get_ident()
        self.inner.start(self._poster, None)
        return self

    def close(self) -> None:
        """Abort what runs, let copies end, stop. Idempotent.

        Waits for copies as long as one ends in `close_timeout_s`; a thread of its own waits for
        those that do not.
        """
        if self._thread:
            self._check_thread()
        if not self.inner.begin_closing():
            return
        self._poster.serve()
        while self.inner.copies_in_flight and self._poster.wait(self.inner.config.close_timeout_s):
            self._poster.serve()
        self.inner.end_closing(stuck=self.inner.copies_in_flight > 0)

    def poll(self) -> int:
        """Take in what has ended since the last call; never blocks. Returns how many posts."""
        self._check_thread()
        served = self._poster.serve()
        if self.inner.is_open:
            self.inner.core.domain.drain()
            self.inner.core.transfer.look_at_clock()
        return served

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            if not self._thread:
                raise RuntimeClosed("the runtime is not open")
            raise InvalidRequest("a runtime without a loop belongs to the thread that opened it")

    def _run_to_end(self, work: Coroutine[object, None, T]) -> T:
        try:
            self.poll()
            at = work.send(None)
            while True:
                assert isinstance(at, Parked)
                if at.done():
                    at = work.send(None)
                elif self._goes_on():
                    self._poster.wait(self.inner.core.transfer.next_look_s)
                    self.poll()
                else:
                    at = work.throw(self._in_vain())
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            work.close()

    def _opened(self, step: Step) -> None:
        self._steps = [one for one in self._steps if not one.fence.passed]
        self._steps.append(step)

    def _goes_on(self) -> bool:
        """Whether something in flight will end though this thread does nothing but wait."""
        core = self.inner.core
        left = [step for step in self._steps if not step.fence.passed]
        ours = [step.fence for step in left if step.state in ("opened", "launched")]
        if not ours:
            return core.in_flight
        return len(ours) < len(left) or core.transfer.goes_on_without(ours)

    def _in_vain(self) -> NoRoom | InvalidRequest:
        """The error for a call that would wait for ever."""
        allocator = self.inner.core.allocator
        asked = next(allocator.queue(), None)
        if asked is not None:
            return NoRoom(allocator.figures(asked.pages, asked.states, asked.spans))
        return InvalidRequest("what it waits for comes after a step that this thread has to end")

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockingCacheRuntime(_Facade):
    """A runtime on another thread's event loop, for threads that block.

    The runtime is opened and closed there; this facade may be used from any other thread. A thread
    that is interrupted while it waits cancels its call. Calls raise `InvalidRequest` in a task of
    that loop, which would wait for itself, and `RuntimeClosed` once the loop is closed.
    """

    def __init__(self, inner: CacheRuntime, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(inner, self._run_there, self._call_there)
        inner.check_lives_on(loop)
        self._loop = loop

    def _run_there(self, work: Coroutine[object, None, T]) -> T:
        loop = self._loop
        if loop.is_closed():
            work.close()
            raise RuntimeClosed("the event loop of the runtime is closed")
        try:
            self.inner.check_lives_on(loop)  # it may have been opened since
        except InvalidRequest:
            work.close()
            raise
        if running_loop() is loop:
            work.close()
            raise InvalidRequest("on the runtime's own event loop its calls are awaited")
        future = asyncio.run_coroutine_threadsafe(_as_task(work), loop)
        try:
            if isinstance(loop, SimulatedLoop):  # it stands still until this thread does
                loop.lockstep.pause(
                    lambda fn: future.add_done_callback(lambda _: fn()), post=LoopPoster(self._loop)
                )
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _call_there(self, work: Callable[[], T]) -> T:
        async def call() -> T:
            return work()

        return self._run_there(call())


async def _as_task(work: Coroutine[object, None, T]) -> T:
    return await work


def _call(work: Callable[[], T]) -> T:
    return work()
