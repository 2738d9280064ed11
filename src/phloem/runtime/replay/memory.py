"""What a replayed tree may hold: bytes that KV and states share, or pools of their own."""

from __future__ import annotations

from typing import Protocol

from phloem.actors.tree import Tree
from phloem.actors.tree.core import Actions
from phloem.actors.tree.radix import Radix
from phloem.actors.tree.results import Evicted
from phloem.errors import InvalidRequest

__all__ = ["Memory", "OneBudget", "Pools"]


class Memory(Protocol):
    """How much a tree may hold, and how room is made in it."""

    has_states: bool

    def longest(self, pages: int) -> int:
        """How much of a sequence of so many pages may be kept."""
        ...

    def could_fit(self, pages: int, states: int) -> bool:
        """Whether an empty memory would have room for so much."""
        ...

    def fits(self, radix: Radix, pages: int, states: int) -> bool:
        """Whether so much fits beside what the tree holds."""
        ...

    def evict(self, tree: Tree, pages: int, states: int) -> tuple[Evicted, Actions]:
        """Have the tree give up what is missing."""
        ...


class OneBudget:
    """`capacity` bytes for both: whole sequences, or nothing of them."""

    has_states = True

    def __init__(self, capacity: int, page_bytes: int, state_bytes: int) -> None:
        if capacity < 1:
            raise InvalidRequest(f"a cache of {capacity} bytes")
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.state_bytes = state_bytes

    def bytes_of(self, pages: int, states: int) -> int:
        """The bytes of so many pages and states."""
        return pages * self.page_bytes + states * self.state_bytes

    def longest(self, pages: int) -> int:
        """The pages of `pages` to try to keep: all; whether they fit is seen later."""
        return pages

    def could_fit(self, pages: int, states: int) -> bool:
        """Whether it is no more than the capacity."""
        return self.bytes_of(pages, states) <= self.capacity

    def fits(self, radix: Radix, pages: int, states: int) -> bool:
        """Whether both together are no more than the capacity."""
        return self.bytes_of(radix.pages + pages, radix.states + states) <= self.capacity

    def evict(self, tree: Tree, pages: int, states: int) -> tuple[Evicted, Actions]:
        """The missing bytes, whatever holds them."""
        radix = tree.radix
        missing = self.bytes_of(radix.pages + pages, radix.states + states) - self.capacity
        return tree.evict_bytes(missing, page_bytes=self.page_bytes, state_bytes=self.state_bytes)


class Pools:
    """So many pages and so many states; of a sequence, as much as there are pages for.

    Without `states` the model has none: attention only.
    """

    def __init__(self, pages: int, states: int | None = None) -> None:
        if pages < 1 or (states is not None and states < 0):
            raise InvalidRequest(f"a cache of {pages} pages and {states} states")
        self.pages = pages
        self.states = states or 0
        self.has_states = states is not None

    def longest(self, pages: int) -> int:
        """No more than there are."""
        return min(pages, self.pages)

    def could_fit(self, pages: int, states: int) -> bool:
        """Whether there are so many."""
        return pages <= self.pages and states <= self.states

    def fits(self, radix: Radix, pages: int, states: int) -> bool:
        """Whether so many are left."""
        return radix.pages + pages <= self.pages and radix.states + states <= self.states

    def evict(self, tree: Tree, pages: int, states: int) -> tuple[Evicted, Actions]:
        """The missing pages and states."""
        radix = tree.radix
        return tree.evict(
            max(0, radix.pages + pages - self.pages), max(0, radix.states + states - self.states)
        )
