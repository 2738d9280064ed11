"""Serving without a cache: every request has pages and a slot of its own and shares nothing.

It has the part of the runtime's interface that `HybridServer` uses, and none of its code, so that
the same server gives the outputs and the times to compare the cache with.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Literal

from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.landing import Landing
from phloem.errors import NoRoom, PoolFigures

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

    from phloem.cuda_streams.pools import DevicePools
    from phloem.cuda_streams.workers import WorkerStream

__all__ = ["BareCache", "BareRequest"]


class BareRequest:
    """A request that computes all of its prompt; see `Request` of the runtime for the names."""

    def __init__(self, cache: BareCache, tokens: int) -> None:
        self.computed = 0
        self.state_slot: int | None = None
        self._cache = cache
        self._tokens = tokens
        self._pages: list[int] = []

    async def allocate(self, tokens: int, *, wait: bool = True) -> None:
        """Takes pages for `tokens` and a slot; raises `NoRoom` if they can never be had."""
        self._pages, self.state_slot = await self._cache.take(tokens, wait)

    async def ready(self) -> None:
        """Return at once: nothing is loaded, and the slot was cleared when it was taken."""

    async def landing(self) -> Landing:
        """A landing of nothing, since nothing is on its way."""
        return Landing((), ())

    async def advance(self) -> None:
        """Do nothing: nobody publishes."""

    async def checkpoint(self) -> None:
        """Nothing is kept."""

    async def finish(self, *, publish: Literal["all", "prompt", "none"] = "none") -> None:
        """Do nothing: nothing is kept, whatever `publish` says."""

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens to compute."""
        self._tokens += len(tokens)

    def next_stop(self, limit: int) -> tuple[int, int]:
        """The next chunk; it ends at a multiple of `limit`."""
        return self.computed, min((self.computed // limit + 1) * limit, self._tokens)

    def try_snapshot_slot(self, position: int) -> None:
        """Nothing is kept."""

    def page_table(self) -> list[int]:
        """Its page ids from position 0 on."""
        return self._pages

    def give_back(self) -> None:
        """Returns pages and slot once the worker has done what it was given before."""
        self._cache.give_back(self._pages, self.state_slot)
        self._pages, self.state_slot = [], None


class BareStep:
    """One forward pass; `fence` passes when the worker is done with it."""

    def __init__(self, stream: WorkerStream) -> None:
        self.fence = Fence()
        self._stream = stream

    def launched(self, ends: Mapping[BareRequest, int]) -> None:
        """Everything is enqueued; counts the tokens that it computes."""
        self.fence = self._stream.record()
        for request, end in ends.items():
            request.computed = end


class BareCache:
    """Hands out the pages and slots of `pools`, first come, first served."""

    def __init__(self, pools: DevicePools, stream: WorkerStream) -> None:
        self.pools = pools
        self._stream = stream
        self._pages = list(range(pools.pages - 1, 0, -1))
        self._slots = list(range(pools.slots - 1, 0, -1))
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def request(
        self,
        tokens: Sequence[int],
        *,
        id: str | None = None,  # noqa: ARG002  as the runtime has it
    ) -> AsyncGenerator[BareRequest]:
        """A request; it gives everything back when the block is left, in whatever way."""
        request = BareRequest(self, len(tokens))
        try:
            yield request
        finally:
            request.give_back()

    @contextmanager
    def step(
        self,
        requests: Sequence[BareRequest],  # noqa: ARG002  as the runtime has it
        *,
        stream: WorkerStream,
    ) -> Generator[BareStep]:
        """A forward pass of `requests` on `stream`."""
        yield BareStep(stream)

    async def take(self, tokens: int, wait: bool) -> tuple[list[int], int | None]:
        """Pages for `tokens` and a cleared slot, when there are enough."""
        count = -(-tokens // self.pools.page_size)
        fits = count < self.pools.pages
        while len(self._pages) < count or (self.pools.states and not self._slots):
            if not (wait and fits):
                raise NoRoom(self._figures(count))
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        pages = [self._pages.pop() for _ in range(count)]
        slot = self._slots.pop() if self.pools.states else None
        if slot is not None:
            self._stream.run(self._clear, slot)
        return pages, slot

    def give_back(self, pages: list[int], slot: int | None) -> None:
        """Pages and slot are free as soon as the worker is done with what it has."""

        def free() -> None:
            self._pages += pages
            if slot is not None:
                self._slots.append(slot)
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)

        self._stream.record().add_callback(free)

    @property
    def free(self) -> tuple[int, int]:
        """Free pages and slots."""
        return len(self._pages), len(self._slots)

    def _clear(self, slot: int) -> None:
        for states in self.pools.states.values():
            for state in states.values():
                state[slot].zero_()

    def _figures(self, pages: int) -> tuple[PoolFigures, ...]:
        needs = [("kv", pages, self.pools.pages - 1, len(self._pages))]
        if self.pools.states:
            needs.append(("state", 1, self.pools.slots - 1, len(self._slots)))
        return tuple(
            PoolFigures(
                component=component,
                asked=asked,
                size=size,
                free=free,
                parked=0,
                evictable=0,
                protected=0,
                granted=size - free,
                in_flight=0,
            )
            for component, asked, size, free in needs
        )
