"""phloem as a scheduler uses it: the `nowait` forms of an open runtime, turns inline.

Namespaces, leases with owners, ownership checks and the ledger are all in place; events are off, as
the peers' are.
"""

# ruff: noqa: ARG002  the protocol's arguments are not all of use to each library

from __future__ import annotations

import numpy as np

from benchmarks.peers.protocol import Adapter as Protocol
from benchmarks.peers.protocol import Match, Place, Tokens
from phloem.actors.actions import Ids
from phloem.actors.allocator import Grant
from phloem.actors.tree.keys import TokenKey
from phloem.errors import NoRoom
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.layout import ModelLayout, StateSpec
from phloem.runtime.lease import Lease

_LAYOUT = ModelLayout.hybrid(
    kv_layers=1, kv_heads=1, head_dim=1, states=[StateSpec("state", (1,), "float32", layers=1)]
)


class Adapter(Protocol):
    """One grant holds the pages and the state of a step; an allocation evicts what is short."""

    title = "phloem, nowait"

    def __init__(self, page_size: int, tokens: int, states: int, longest: int) -> None:
        super().__init__(page_size, tokens, states, longest)
        self._cache = CacheRuntime(self.config(page_size, tokens, states))
        self._grant: Grant | None = None
        self._checked = False

    @classmethod
    def config(cls, page_size: int, tokens: int, states: int) -> CacheConfig:
        """The state at a request's end is kept at any page, as the peers keep theirs."""
        return CacheConfig(
            layout=_LAYOUT,
            page_size=page_size,
            state_chunk=1,
            device_pages=tokens // page_size,
            device_states=states,
            eviction="lru",  # the peers', too
        )

    async def open(self) -> None:
        await self._cache.open()
        self._nowait = self._cache.nowait

    async def close(self) -> None:
        if self._checked:
            await self._cache.audit()
        await self._cache.close()

    def slots_to_numpy(self, slots: Ids) -> Tokens:
        pages = np.frombuffer(slots, np.int32).astype(np.int64) if slots else np.empty(0, np.int64)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def check(self) -> None:
        self._checked = True
        stats = self._cache.stats()
        for pool in (stats.kv, stats.state):
            if pool.free + pool.tree != pool.size:
                raise AssertionError(f"places are neither free nor cached: {pool}")

    def nodes(self) -> int | None:
        return self._cache.stats().tree.nodes

    def key(self, tokens: Tokens) -> TokenKey:
        return TokenKey.of(tokens[: len(tokens) // self.page_size * self.page_size])

    def cut(self, key: TokenKey, length: int) -> TokenKey:
        return key.cut(length)

    def match(self, key: TokenKey) -> Match:
        match = self._nowait.match(key, whole=True)
        return Match(match.usable, key, match.branch_point or 0)

    def wanted(self, match: Match, breakpoints: tuple[int, ...]) -> tuple[int, ...]:
        page = self.page_size
        positions = {at // page * page for at in breakpoints} | {match.branch}
        return tuple(sorted(at for at in positions if at > match.hit))

    def lock(self, handle: TokenKey) -> Lease:
        return self._nowait.acquire(handle, whole=True)

    def unlock(self, receipt: Lease) -> None:
        self._nowait.release(receipt)

    def slots(self, match: Match, receipt: Lease) -> Ids:
        return receipt.pages

    def allocate(self, tokens: int) -> Ids | None:
        try:
            self._grant = self._nowait.allocate(pages=tokens // self.page_size, states=1)
        except NoRoom:
            return None
        return self._grant.pages

    def allocate_state(self) -> int:
        assert self._grant is not None
        return self._grant.states[0]

    def insert(self, key: TokenKey, length: int, slots: Ids, state: int, place: Place) -> None:
        if length != key.length:
            key = key.cut(length)
        self._nowait.insert(key, pages=slots, state=state, lease=place.receipt)

    def finish(self, key: TokenKey, length: int, slots: Ids, state: int, place: Place) -> None:
        if length != key.length:
            key = key.cut(length)
        self._nowait.insert(key, pages=slots, state=state, lease=place.receipt, release=True)

    def continue_from(self, key: TokenKey, place: Place) -> Place:
        lease: Lease = place.receipt  # it has moved along with the insert
        return Place(Match(lease.boundary, key), lease, None)

    def evict(self, tokens: int, states: int) -> tuple[int, int]:
        gone = self._nowait.evict(pages=tokens // self.page_size, states=states)
        return gone.pages * self.page_size, gone.states
