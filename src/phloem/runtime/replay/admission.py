"""Where a replayed request leaves states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from phloem.actors.tree import Tree
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.placement import Placement

__all__ = ["Admission", "AsPlaced", "Spot"]


class Spot(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request before its data are kept; all positions in pages.

    `usable` and `prefix` are of the part that may be matched, `walked` of the whole sequence:
    how far KV reaches, `inside` an edge if the way parts from others' there. `end`: kept so far,
    all there is if `whole`.
    """

    usable: int
    prefix: int
    walked: int
    inside: bool
    end: int
    whole: bool


class Admission(Protocol):
    """Chooses the positions of states for each request."""

    placement: Placement
    """What the tree itself is told to want."""

    from_copy: bool
    """The state that was found is used when it is found, none at the end is: not held meanwhile."""

    def positions(self, tree: Tree, lease: Lease, spot: Spot) -> Sequence[int]:
        """Where to keep states, in pages from the start; later ones count as used later."""
        ...


class AsPlaced:
    """As the tree wants it when a request opens, and at the end of its answer."""

    from_copy = False

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement or Placement()

    def positions(self, tree: Tree, lease: Lease, spot: Spot) -> Sequence[int]:
        """The wanted positions."""
        wanted = [one.position for one in lease.wanted if one.position <= spot.end]
        last = tree.wanted_at_end(lease, spot.end)
        return wanted if last is None else [*wanted, last.position]
