"""The part of the tree that the allocator may read."""

from __future__ import annotations

from collections.abc import Callable, Collection

from phloem.actors.tree.results import TreeFigures

__all__ = ["TreeView"]


class TreeView:
    """What the allocator may know of the tree: its figures, and the owners of leases on data.

    `arriving` counts the pages and states that its loads own. `sweeping` is true while something
    comes back without anybody's doing: a former generation's data, or what a copy lets go.
    `joiners` are the owners who wait for what another computes, as long as it takes.
    """

    def __init__(
        self,
        figures: Callable[[], TreeFigures],
        arriving: Callable[[], tuple[int, int]],
        owners: Collection[str],
        sweeping: Callable[[], bool],
        joiners: Callable[[], Collection[str]],
    ) -> None:
        self.figures = figures
        self.arriving = arriving
        self.lease_owners = owners  # as they are at any time
        self.sweeping = sweeping
        self.joiners = joiners
