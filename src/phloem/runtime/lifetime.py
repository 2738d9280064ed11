"""A runtime's life: its parts made, opened in a loop, closed again, and what it still owned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Self

import anyio
import torch

from phloem.cuda_streams.device_streams import CallerStreams
from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.engine import CopyEngine, LoopPoster, Post
from phloem.cuda_streams.host import ordinary_memory
from phloem.cuda_streams.lockstep import SimulatedLoop
from phloem.cuda_streams.pools import DevicePools
from phloem.errors import InvalidRequest, RuntimeClosed
from phloem.events import RuntimeStarted, RuntimeStopped, Sink
from phloem.runtime.config import CacheConfig
from phloem.runtime.core import Core
from phloem.runtime.devices import (
    EngineFactory,
    HostMemoryFactory,
    driver_for,
    engine_for,
    host_pools_for,
    pools_for,
)
from phloem.runtime.nowait import Nowait
from phloem.runtime.observe.counts import Counts
from phloem.runtime.tracing import caller_context, several

__all__ = ["OpenRuntime", "running_loop"]


class OpenRuntime:
    """What `CacheRuntime` is made of, and its way from `open` to `close`."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        device: str | torch.device | None = None,
        pools: DevicePools | None = None,
        events: Sink | None = None,
        metrics: bool = False,
        engine: EngineFactory | None = None,
        driver: Driver | None = None,
        host_memory: HostMemoryFactory | None = None,
    ) -> None:
        self.config = config
        self.pools = pools_for(config, device, pools)
        self._driver = driver or driver_for(self.pools.device)
        self._pinned = None
        if host_memory is None and self._driver is not None:
            host_memory = self._pinned = self._driver.pinned_memory()
        self.host_pools = host_pools_for(config, self.pools, host_memory or ordinary_memory)
        self._counts = Counts() if metrics else None
        if events is not None and not callable(events):
            raise InvalidRequest(f"events is {events!r}, not a sink such as open_log makes")
        self._events = several(events, self._counts)
        self._new_engine = engine
        self._core: Core | None = None
        self._engine: CopyEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nowait: Nowait | None = None
        self._closed = False
        self._last_words: RuntimeStopped | None = None
        self._steps = 0

    # -- opening and closing -------------------------------------------------------------------

    async def open(self) -> Self:
        """Start the actors. Raises `InvalidRequest` when it was opened before."""
        loop = asyncio.get_running_loop()
        self.start(LoopPoster(loop), loop)
        return self

    def start(
        self,
        post: Post,
        loop: asyncio.AbstractEventLoop | None,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        """`open` for whoever brings a way to be called back; without a loop, from one thread.

        `seconds`: the clock by which sessions and priorities end; if not the loop's, or a real one.
        """
        if self._core is not None or self._closed:
            raise InvalidRequest("the runtime was opened before")
        self._loop = loop
        new_engine = self._new_engine or engine_for(self._driver, loop)
        self._engine = new_engine(post)
        try:
            core = Core(
                self.config,
                self.pools,
                self._engine,
                CallerStreams(self._driver, post, loop),
                post,
                self._events,
                self._crashed,
                caller_context,
                seconds or (monotonic if loop is None else loop.time),
                self.host_pools,
                None if loop is None else loop.call_later,
            )
            core.domain.loop = loop
            if self._events is not None:
                self._events(self._started(core))
        except BaseException:
            self._engine.close()
            raise
        self._core = core
        self._nowait = Nowait(core)

    def _started(self, core: Core) -> RuntimeStarted:
        layout, host = self.config.layout, core.host_ledger
        return RuntimeStarted(
            page_size=self.config.page_size,
            grid=core.grid,
            pages=core.ledger.kv.size,
            states=core.ledger.state.size,
            layout=layout.fingerprint,
            page_bytes=layout.page_bytes(self.config.page_size),
            state_bytes=layout.slot_bytes,
            policy=self.config.eviction,
            host_pages=0 if host is None else host.kv.size,
            host_states=0 if host is None else host.state.size,
            spans={pool.component: pool.size for pool in core.ledger.spans},
        )

    async def close(self) -> None:
        """Refuse new calls, abort what still runs, let copies end, stop the actors. Idempotent.

        Waits for copies at most `close_timeout_s`; what was still owned is in the last event. If
        the caller is cancelled by `Task.cancel` it waits no longer, but all is stopped all the
        same; a thread of its own then sees the copies that have not ended to their ends.
        """
        if not self.begin_closing():
            return
        assert self._engine is not None
        stuck = True
        try:
            # Shielded from cancel scopes around it; a native cancellation goes through shields.
            with anyio.move_on_after(self.config.close_timeout_s, shield=True) as patience:
                await self._engine.drain()
                if self._core is not None:
                    await self._core.streams.settled()
            stuck = patience.cancelled_caught
        finally:
            self.end_closing(stuck=stuck)

    def begin_closing(self) -> bool:
        """Refuse new calls and abort what runs; False when there is nothing left to close."""
        if self._closed or self._core is None:
            self._closed = True
            return False
        self._closed = True
        core = self._core
        core.closing = True
        self._last_words = self._still_owned("closed")
        for request in list(core.requests.values()):
            request.abort()
        return True

    def end_closing(self, *, stuck: bool = False) -> None:
        """Stop the actors and the engine; then unpin the host tier's memory, if it is our own.

        `stuck`: copies have not ended in time. Then a thread of its own waits for them, holding the
        pools that they may still write, and nobody else does.
        """
        core, engine = self._core, self._engine
        assert core is not None and engine is not None
        core.domain.stop(RuntimeClosed("the runtime is closed"))
        core.transfer.stop_watching()

        def stop(pools: DevicePools = self.pools) -> None:
            engine.close()
            core.streams.close()
            if self._pinned is not None:
                self._pinned.close()  # nothing copies from or to it any more
            del pools

        if stuck and not isinstance(self._loop, SimulatedLoop):
            Thread(target=stop, name="phloem-close", daemon=True).start()
        else:
            stop()
        if self._events is not None and self._last_words is not None:
            self._events(self._last_words)

    def _crashed(self, error: BaseException) -> None:
        if self._events is not None:
            self._events(self._still_owned(f"crashed: {error!r}"))

    def _still_owned(self, why: str) -> RuntimeStopped:
        assert self._core is not None
        return RuntimeStopped(
            why=why,
            leases=[lease.owner for lease in self._core.tree.leases.live.values()],
            pages=self._core.ledger.kv.granted,
            states=self._core.ledger.state.granted,
        )

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def copies_in_flight(self) -> int:
        """Copies that have not ended, also while it is being closed and after a crash."""
        return 0 if self._core is None else self._core.transfer.in_flight

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`, as long as no invariant has broken."""
        return self._core is not None and not self._closed and not self._core.stopped

    @property
    def core(self) -> Core:
        """The wired actors; raises `RuntimeClosed` before `open` and after `close`."""
        core = self._core
        if core is None or self._closed:
            raise RuntimeClosed("the runtime is not open")
        self._check_loop()
        core.check_open()
        return core

    def _core_of_handles(self) -> Core:
        """`core` also after `close`: what was got before it can be given back at any time."""
        if self._core is None:
            raise RuntimeClosed("the runtime is not open")
        self._check_loop()
        return self._core

    def check_lives_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise `InvalidRequest` if it was opened in another event loop than `loop`."""
        if self._loop is not None and self._loop is not loop:
            raise InvalidRequest("the runtime was opened in another event loop than the one given")

    def _check_loop(self) -> None:
        if self._loop is not None and running_loop() is not self._loop:
            raise InvalidRequest(
                "a runtime belongs to the event loop it was opened in; other threads call it "
                "through phloem.runtime.sync.BlockingCacheRuntime"
            )

    @property
    def nowait(self) -> Nowait:
        """The forms without `await`; raises `RuntimeClosed` before `open`."""
        if self._nowait is None:
            raise RuntimeClosed("the runtime is not open")
        return self._nowait

    @property
    def grid(self) -> int:
        """States can be kept at multiples of so many tokens."""
        return self.core.grid


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread; None where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
