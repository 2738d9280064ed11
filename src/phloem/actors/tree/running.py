"""Requests that are computing: where their keys leave what the tree knows.

When a request opens whose key runs along another one's for a while and then leaves it, the point
where they part is worth a state. The one that computes there first is told, so that the others can
continue from it instead of computing the common part again.
"""

from __future__ import annotations

from phloem.actors.tree.keys import TOKEN_BYTES, common_bytes
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.placement import Wanted, within_budget
from phloem.actors.tree.radix import RootName

__all__ = ["Running"]

_Place = tuple[RootName, int, bytes]


class Running:
    """A side table from (namespace, position, next page) to the requests that compute there.

    An entry lives as long as its request's lease; there are at most as many as open requests.
    """

    def __init__(self, page_bytes: int, grid: int) -> None:
        self._page_bytes = page_bytes
        self._grid = grid
        self._at: dict[_Place, list[Lease]] = {}

    def meet(self, lease: Lease, position: int, budget: int) -> None:
        """Enter `lease`, whose key is unknown from `position` on.

        Its leader, if any, is asked for a state where they part, within `budget` (0: not asked).
        """
        place = self._place(lease, position)
        if place is None:
            return
        waiting = self._at.setdefault(place, [])
        if waiting and budget:
            leader = waiting[0]
            shared = self._shared_grid(leader, lease, position)
            if shared > leader.anchor.end:
                _want(leader, shared, budget)
        waiting.append(lease)
        lease.running_at = place

    def join(self, lease: Lease, position: int) -> None:
        """Enter `lease` again after it has published up to `position`."""
        place = self._place(lease, position)
        if place is not None:
            self._at.setdefault(place, []).insert(0, lease)
            lease.running_at = place

    def leave(self, lease: Lease, *, ended: bool = False) -> None:
        """Take `lease` out; what it was asked to keep and did not reach passes on if it `ended`."""
        place = lease.running_at
        if place is None:
            return
        lease.running_at = None
        waiting = self._at[place]
        led = waiting[0] is lease
        waiting.remove(lease)
        if not waiting:
            del self._at[place]
        elif led and ended:
            self._pass_on(lease, waiting[0], place[1] // TOKEN_BYTES)

    def _pass_on(self, lease: Lease, heir: Lease, position: int) -> None:
        shared = self._shared_grid(lease, heir, position)
        known = {wanted.position for wanted in heir.wanted}
        heir.wanted = sorted(
            heir.wanted
            + [
                wanted
                for wanted in lease.wanted
                if wanted.why == "branch"
                and heir.anchor.end < wanted.position <= shared
                and wanted.position not in known
            ]
        )

    def clear(self) -> None:
        """Forget everybody: the cache was reset."""
        for waiting in self._at.values():
            for lease in waiting:
                lease.running_at = None
        self._at.clear()

    def __len__(self) -> int:
        return len(self._at)

    def _place(self, lease: Lease, position: int) -> _Place | None:
        key = lease.key
        offset = position * TOKEN_BYTES
        page = key.data[offset : offset + self._page_bytes]
        if len(page) < self._page_bytes:
            return None
        return key.root, offset, page

    def leader_of(self, lease: Lease) -> tuple[Lease, int] | None:
        """Who computes what `lease` needs, if anybody, and up to which grid position."""
        place = lease.running_at
        if place is None:
            return None
        leader = self._at[place][0]
        if leader is lease:
            return None
        return leader, self._shared_grid(leader, lease, place[1] // TOKEN_BYTES)

    def _shared_grid(self, leader: Lease, other: Lease, position: int) -> int:
        """The deepest grid position up to which both keys are equal; 0 when they part earlier.

        Both are known to have the same page at `position`; what comes before it may differ.
        """
        mine, theirs = leader.key.data, other.key.data
        offset = min(position * TOKEN_BYTES, len(mine), len(theirs))
        if mine[:offset] != theirs[:offset]:
            return 0
        shared = offset + common_bytes(mine, offset, len(mine), theirs, self._page_bytes, offset)
        return shared // TOKEN_BYTES // self._grid * self._grid


def _want(leader: Lease, position: int, budget: int) -> None:
    if all(wanted.position != position for wanted in leader.wanted):
        leader.wanted = within_budget([*leader.wanted, Wanted(position, "branch")], budget)
