"""What the tree's operations return: frozen snapshots that later changes do not alter."""

from __future__ import annotations

from typing import Literal

import msgspec

from phloem.actors.actions import Ids

__all__ = ["Evicted", "InsertResult", "Lost", "Match", "PagesChanged", "TreeFigures"]

Lost = Literal["last_token", "partial_page", "never_seen", "evicted", "forgotten", "no_state"]


class Match(msgspec.Struct, frozen=True, gc=False):
    """How far a key is cached, in tokens; a snapshot, which later changes do not alter.

    `usable`: what can be reused: one boundary at which every component can be served. `device`: the
    deepest boundary that needs no load. `kv_prefix`: how far KV alone reaches. `branch_point`: the
    deepest grid position beyond `usable` at which a state would turn known KV into a hit. `evicted`
    tokens beyond `kv_prefix` were there and went, the first of them at use `evicted_at` of the tree
    to make room for `evicted_by`; `forgotten` ones were probably there, too long ago to say.
    """

    tokens: int
    looked_up: int
    usable: int
    device: int
    kv_prefix: int
    branch_point: int | None
    page_size: int
    evicted: int = 0
    forgotten: int = 0
    evicted_by: str = ""
    evicted_at: int = 0

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
            "no_state": self.kv_prefix - self.usable,
        }
        return {reason: count for reason, count in counts.items() if count}


class PagesChanged(msgspec.Struct, frozen=True, gc=False):
    """From token `start` on, later steps must read the tree's `pages` instead of the caller's."""

    start: int
    pages: Ids


class InsertResult(msgspec.Struct, frozen=True, gc=False):
    """What an insert did, in tokens: `reused` were there, `adopted` are the tree's from now on.

    `pages_changed` lists the pages of the caller's table that gave way to the tree's own. `state`
    says what became of the offered slot; in no case does the caller own it any longer.
    """

    reused: int
    published: int
    adopted: tuple[tuple[int, int], ...]
    state: Literal["adopted", "duplicate", "none"]
    pages_changed: tuple[PagesChanged, ...] = ()


class Evicted(msgspec.Struct, frozen=True, gc=False):
    """What an eviction freed, in pages and state slots."""

    pages: int
    states: int


class TreeFigures(msgspec.Struct, frozen=True, gc=False):
    """The tree in numbers: nodes, leases, and what it holds, protects and could give."""

    generation: int
    namespaces: int
    nodes: int
    leaves: int
    leases: int
    pages: int
    pages_protected: int
    states: int
    states_protected: int

    @property
    def pages_evictable(self) -> int:
        """Pages that no lease protects."""
        return self.pages - self.pages_protected

    @property
    def states_evictable(self) -> int:
        """States that no lease protects."""
        return self.states - self.states_protected
