"""Judicious admission, and least recently used leaves."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.actors.tree import Tree
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import Node
from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import KEEP, Policy, Score
from phloem.runtime.replay.admission import Spot

__all__ = ["NONE_WANTED", "Judicious", "LeafLru"]

NONE_WANTED = Placement(branch=False, end_of_prompt=False, end_of_response=False)
"""The tree is not asked: an admission decides."""


class Judicious:
    """At most two states a request: at its end, and where it parts from another inside an edge.

    The branch state is made at the second visit, so the third is the first to use it. From Marconi
    (arXiv 2411.19379). `every`: also at each multiple of so many pages of the new part.
    """

    placement = NONE_WANTED
    from_copy = True

    def __init__(self, every: int | None = None) -> None:
        self.every = every

    def positions(self, tree: Tree, lease: Lease, spot: Spot) -> Sequence[int]:
        """The end, the branch, and those in between."""
        del tree, lease
        found = [spot.end, spot.walked] if spot.inside else [spot.end]
        if self.every is not None:
            found += range(-(-(spot.walked + 1) // self.every) * self.every, spot.end, self.every)
        return found


class LeafLru(Policy):
    """Least recently used leaves go whole; states of inner nodes stay."""

    name = "leaf-lru"

    def state_score(self, node: Node, /) -> Score:
        """A state goes with its leaf only."""
        del node
        return KEEP
