"""What the tree's operations return: frozen snapshots that later changes do not alter."""

from __future__ import annotations

from itertools import zip_longest
from typing import Literal, TypeAlias

import msgspec

from phloem.actors.actions import Component, Ids, Tier
from phloem.actors.tree.choosing import Alternative
from phloem.actors.tree.components import SPANS

__all__ = [
    "LOST",
    "Ended",
    "Evicted",
    "InsertResult",
    "Kept",
    "Lost",
    "Match",
    "PagesChanged",
    "SpanFigures",
    "StateTier",
    "TreeFigures",
]

Lost: TypeAlias = str  # one of LOST
# Why tokens are not reused: a closed list, with a reason for each component that can be missing.
LOST: tuple[Lost, ...] = (
    *("last_token", "partial_page", "never_seen", "evicted", "forgotten", "no_state"),
    *("arriving", "tier_failed", "corrupt", "refused", "dearer"),
    *(f"no_{kind}" for kind in SPANS),
)
StateTier = Literal["", "device", "host"]


class Match(msgspec.Struct, frozen=True, gc=False):
    """How far a key is cached, in tokens; a snapshot, which later changes do not alter.

    `usable`: what can be reused: one boundary at which every component can be served. `device`: the
    deepest boundary that needs no load. `kv_prefix`: how far KV alone reaches. `branch_point`: the
    deepest grid position beyond `usable` at which a state would turn known KV into a hit. `evicted`
    tokens beyond `kv_prefix` were there and went, the first of them at use `evicted_at` of the tree
    to make room for `evicted_by`; `forgotten` ones were probably there, too long ago to say.
    `state_tier`: where the state at `usable` is, the device if it is there, too. `short` tokens
    beyond `usable` could be reused but for a span component, `short_of`, evicted in front of them.
    `alternatives`: the ways that were weighed when the match was opened, where their costs were
    known; `usable` is then what the chosen one reuses at once.
    `not_loaded` tokens beyond `usable` are in a lower tier and did not come from there, for the
    reason `why_not`: `refused`, there was no room, `tier_failed`, `dearer`, computing them takes
    less time, or `arriving`, another request computes them sooner and is waited for.
    """

    tokens: int
    looked_up: int
    usable: int
    device: int
    kv_prefix: int
    branch_point: int | None
    page_size: int
    state_tier: StateTier = ""
    evicted: int = 0
    forgotten: int = 0
    evicted_by: str = ""
    evicted_at: int = 0
    short: int = 0
    short_of: str = ""
    alternatives: tuple[Alternative, ...] = ()
    not_loaded: int = 0
    why_not: str = ""

    @property
    def host(self) -> int:
        """Tokens that a load from the host adds to what the device can serve alone."""
        return self.usable - self.device

    @property
    def lost(self) -> dict[Lost, int]:
        """Tokens not reused, by reason; they add up to `tokens - usable`."""
        whole = self.looked_up // self.page_size * self.page_size
        counts: dict[Lost, int] = {
            "last_token": self.tokens - self.looked_up,
            "partial_page": self.looked_up - whole,
            "never_seen": whole - self.kv_prefix - self.evicted - self.forgotten,
            "evicted": self.evicted,
            "forgotten": self.forgotten,
            "no_state": self.kv_prefix - self.usable - self.short - self.not_loaded,
        }
        if self.not_loaded:
            counts[self.why_not] = self.not_loaded
        if self.short:
            counts[f"no_{self.short_of}"] = self.short
        return {reason: count for reason, count in counts.items() if count}


class PagesChanged(msgspec.Struct, frozen=True, gc=False):
    """From token `start` on, later steps must read the tree's `pages` instead of the caller's."""

    start: int
    pages: Ids


class InsertResult(msgspec.Struct, frozen=True, gc=False):
    """What an insert did, in tokens: `reused` were there, `adopted` are the tree's from now on.

    `published`: how far the tree goes now; less than what was offered where the rest is on its way
    to the device already. Tokens may be both, if the tree had them on the host only. What is
    neither adopted nor a duplicate remains the caller's.
    `pages_changed` lists the pages of the caller's table that gave way to the tree's own. `state`
    says what became of the offered slot; in no case does the caller own it any longer. `spans` are
    the pages of each span component that the tree took.
    """

    reused: int
    published: int
    adopted: tuple[tuple[int, int], ...]
    state: Literal["adopted", "duplicate", "none"]
    pages_changed: tuple[PagesChanged, ...] = ()
    spans: tuple[Ids, ...] = ()


class Evicted(msgspec.Struct, frozen=True, gc=False):
    """What an eviction freed, in pages and state slots, and what it promised.

    Promised places are free when the copies that were planned for them have ended.
    """

    pages: int
    states: int
    pages_promised: int = 0
    states_promised: int = 0
    spans: tuple[int, ...] = ()  # pages of each span component

    def plus(self, other: Evicted) -> Evicted:
        """Both together."""
        return Evicted(
            self.pages + other.pages,
            self.states + other.states,
            self.pages_promised + other.pages_promised,
            self.states_promised + other.states_promised,
            tuple(map(sum, zip_longest(self.spans, other.spans, fillvalue=0))),
        )


class Kept(msgspec.Struct, frozen=True, gc=False):
    """Places that are the tree's from now on; they were those of an operation's `account`."""

    component: Component
    tier: Tier
    ids: Ids
    account: int


class Ended(msgspec.Struct, frozen=True, gc=False):
    """What the end of an operation led to.

    `operations`: those that have ended with it. `ready`: leases, by id, whose boundary is on the
    device now. `moved`: leases whose boundary is another one, since their load failed or found no
    room; those that wait for another load say so in `Lease.load`.
    """

    operations: tuple[int, ...]
    kept: tuple[Kept, ...]
    ready: tuple[int, ...]
    moved: tuple[int, ...]


class SpanFigures(msgspec.Struct, frozen=True, gc=False):
    """Pages of one span component on the device."""

    component: Component
    pages: int
    protected: int

    @property
    def evictable(self) -> int:
        """Those that no lease needs."""
        return self.pages - self.protected


class TreeFigures(msgspec.Struct, frozen=True, gc=False):
    """The tree in numbers: nodes, leases, and what it holds, protects and could give.

    `leaving` is on the device until it has been copied; `pinned` has to stay on the host.
    """

    generation: int
    namespaces: int
    nodes: int
    leaves: int
    leases: int
    pages: int
    pages_protected: int
    states: int
    states_protected: int
    pages_leaving: int = 0
    states_leaving: int = 0
    host_pages: int = 0
    host_pages_pinned: int = 0
    host_states: int = 0
    host_states_pinned: int = 0
    operations: int = 0
    spans: tuple[SpanFigures, ...] = ()

    @property
    def pages_evictable(self) -> int:
        """Device pages that nothing protects and that are not leaving yet."""
        return self.pages - self.pages_protected - self.pages_leaving

    @property
    def states_evictable(self) -> int:
        """Device states that nothing protects and that are not leaving yet."""
        return self.states - self.states_protected - self.states_leaving

    @property
    def host_pages_evictable(self) -> int:
        """Host pages that may go."""
        return self.host_pages - self.host_pages_pinned

    @property
    def host_states_evictable(self) -> int:
        """Host states that may go."""
        return self.host_states - self.host_states_pinned
