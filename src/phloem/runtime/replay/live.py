"""A replay that takes room as a live runtime does: pools, in which running requests have their own.

A request reserves pages for all it computes and one working state, publishes where the tree wants a
state, with a copy in a further slot if one can be had, and hands the working state over at its end.
For requests whose tokens fill whole pages it hits, for each one, what a runtime hits that serves
them one after another.
"""

from __future__ import annotations

from phloem.actors.actions import FreeDeviceSlots
from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.core import Actions
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT
from phloem.actors.tree.placement import Placement
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.cache import Places
from phloem.runtime.replay.requests import ReplayRequest
from phloem.runtime.replay.served import Decision, Totals

__all__ = ["LiveReplay"]


class LiveReplay:
    """One tree over so many pages and states, running requests included."""

    def __init__(
        self,
        geometry: Geometry,
        block_size: int,
        *,
        pages: int,
        states: int,
        policy: str = "lru",
        placement: Placement | None = None,
    ) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.pages = pages
        self.states = states
        self.tree = Tree(
            page_size=1,
            policy=policy,
            placement=placement,
            state_weight=max(1, round(geometry.state_bytes / (geometry.kv_bytes * block_size))),
        )
        self.places = {"kv": Places(), "state": Places()}
        self.totals = Totals()
        self.number = 0

    def serve(self, request: ReplayRequest) -> Decision:
        """Serve one request from its opening to its end; skipped when it has no room to run."""
        tree = self.tree
        tree.tick(round(request.at_s * 1000))
        key = TokenKey(request.data)
        lease, match = tree.open(key, owner="replay", limit=request.matchable)
        need = request.blocks - match.usable
        before = tree.radix.pages, tree.radix.states
        fits = self._make_room(need, 1)
        after = tree.radix.pages, tree.radix.states
        states: list[int] = []
        if fits:
            tree.release_state(lease)  # it has a copy of its own
            states = self._publish(key, lease, need)
        tree.release(lease)
        decision = Decision(
            request=self.number,
            hit=match.usable * self.block_size,
            prefix=match.kv_prefix * self.block_size,
            states=tuple(at * self.block_size for at in states),
            skipped=not fits,
            evicted=(before[0] - after[0], before[1] - after[1]),
        )
        self.number += 1
        self.totals.count(request.tokens, decision, self.geometry)
        return decision

    def _publish(self, key: TokenKey, lease: Lease, pages: int) -> list[int]:
        """Compute and publish from one wanted position to the next, then to the end.

        `pages` are reserved, and one state; returns where states were left.
        """
        tree, made = self.tree, list[int]()
        for at in [one.position for one in lease.wanted if one.position < key.length]:
            state = self._take_state(pages)
            if state:
                made.append(at)
            pages -= self._insert(key, lease, at, state)
        end = key.length
        wanted = tree.wanted_at_end(lease, end) is not None
        wanted = wanted or any(one.position == end for one in lease.wanted)
        if wanted:
            made.append(end)
        self._insert(key, lease, end, self.places["state"].take(1)[0] if wanted else NO_SLOT)
        return made

    def _take_state(self, pages: int) -> int:
        """A slot beside the working one, or none."""
        fits = self._make_room(pages, 2)
        return self.places["state"].take(1)[0] if fits else NO_SLOT

    def _insert(self, key: TokenKey, lease: Lease, at: int, state: int) -> int:
        """Publish up to a position; returns how many pages that took or gave back."""
        count = at - lease.boundary
        pages = self.places["kv"].take(count)
        self._carry_out(self.tree.insert(key, pages, state, lease, length=at)[1])
        return count

    def _make_room(self, pages: int, states: int) -> bool:
        """Evict what is missing for so many beside what the tree holds, if that is enough."""
        tree = self.tree
        pages = max(0, tree.radix.pages + pages - self.pages)
        states = max(0, tree.radix.states + states - self.states)
        if not tree.can_evict(pages, states):
            return False
        self._carry_out(tree.evict(pages, states)[1])
        return tree.radix.pages <= self.pages and tree.radix.states <= self.states

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, FreeDeviceSlots):
                self.places[action.component].free.extend(action.ids)
