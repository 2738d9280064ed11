"""The production tree, served a trace one request after another.

A request is looked up, then everything that exists after it is inserted: no concurrency, and no
memory for requests that run. What is on its own way is never evicted by an insert. Where KV and
states share bytes, an insert that does not fit after eviction is skipped; where KV has pages of its
own, as much of a sequence is kept as fits.
"""

from __future__ import annotations

from array import array
from time import perf_counter

from phloem.actors.actions import FreeDeviceSlots, Ids
from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.core import Actions
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.policies import Policy, policy_of
from phloem.actors.tree.results import Match
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.admission import Admission, AsPlaced, Spot
from phloem.runtime.replay.memory import Memory, OneBudget
from phloem.runtime.replay.requests import ReplayRequest
from phloem.runtime.replay.served import Decision, Totals

__all__ = ["Places", "ReplayCache", "Watching"]

_USES_BITS = 12  # uses of a request: its number is a node's stamp without these bits


class Places:
    """Ids of pages or slots: never two owners of one, as many as there have to be."""

    def __init__(self) -> None:
        self.free = array("i")
        self.made = 0

    def take(self, count: int) -> Ids:
        """So many ids."""
        missing = count - len(self.free)
        if missing > 0:
            self.free.extend(range(self.made + missing, self.made, -1))
            self.made += missing
        keep = len(self.free) - count
        taken = self.free[keep:]
        del self.free[keep:]
        return taken


class Watching(Policy):
    """A policy that wants to know more than the tree tells policies.

    It gives up states of inner nodes; those on a request's own way are kept from it.
    """

    def matched(self, node: Node) -> None:
        """A request starts from the state at the end of `node`."""

    def made(self, node: Node) -> None:
        """A state was made at the end of `node`."""

    def before_eviction(self, tree: Tree, request: int) -> bool:  # noqa: ARG002 # for others
        """An eviction begins, for that request; True when every candidate has to be scored anew."""
        return False

    @staticmethod
    def request_of(stamp: int) -> int:
        """The number of the request in which something was stamped."""
        return stamp >> _USES_BITS


class ReplayCache:
    """One tree over a memory, given by its bytes or as one of `phloem.runtime.replay.memory`.

    Without one it is unbounded. `sessions`: the trace's sessions are told to the tree.
    """

    def __init__(
        self,
        geometry: Geometry,
        block_size: int,
        *,
        capacity: int | Memory | None = None,
        policy: str | Policy = "lru",
        admission: Admission | None = None,
        sessions: bool = False,
    ) -> None:
        self.geometry = geometry
        self.block_size = block_size
        if isinstance(capacity, int):
            capacity = OneBudget(capacity, geometry.kv_bytes * block_size, geometry.state_bytes)
        self.memory = capacity
        self.policy = policy_of(policy)
        self.admission = admission or AsPlaced()
        self.sessions = sessions
        with_states = self.memory is None or self.memory.has_states
        self.tree = Tree(
            page_size=1,
            components=("kv", "state") if with_states else ("kv",),
            policy=self.policy,
            placement=self.admission.placement,
            state_weight=max(1, round(geometry.state_bytes / (geometry.kv_bytes * block_size))),
        )
        self.tree.radix.whole_edges = isinstance(self.policy, Watching)
        self.places = {"kv": Places(), "state": Places()}
        self.totals = Totals()
        self.number = 0

    def serve(self, request: ReplayRequest) -> Decision:
        """Look a request up, then insert it."""
        tree, number = self.tree, self.number
        self.number += 1
        tree.now = max(tree.now, number << _USES_BITS)
        tree.tick(round(request.at_s * 1000))
        key = TokenKey(request.data)
        began = perf_counter()
        lease, match = tree.open(
            key,
            owner="replay",
            limit=request.matchable,
            session=request.session if self.sessions else None,
        )
        self.totals.lookup_s += perf_counter() - began
        if self.admission.from_copy:
            tree.release_state(lease)
        if isinstance(self.policy, Watching) and match.usable:
            self.policy.matched(lease.anchor)
            tree.kv_index.lower(lease.anchor)
            tree.state_index.lower(lease.anchor)
        decision = self._keep(request, key, lease, match)
        if self.sessions:
            tree.stand_on(lease)
        tree.release(lease)
        self.totals.count(request.tokens, decision, self.geometry)
        return decision

    def _keep(self, request: ReplayRequest, key: TokenKey, lease: Lease, match: Match) -> Decision:
        """Make room for what is new and insert it, where it fits."""
        tree, size, memory = self.tree, self.block_size, self.memory
        end = request.blocks if memory is None else memory.longest(request.blocks)
        walk = tree.radix.walk(key, 4 * end)
        walked = (walk.offset + walk.inside) // 4
        spot = Spot(
            match.usable, match.kv_prefix, walked, walk.inside > 0, end, end == request.blocks
        )
        has = {0, *(node.end for node in walk.path if node.state != NO_SLOT)}
        positions = self.admission.positions(tree, lease, spot)
        wanted = [at for at in dict.fromkeys(positions) if at not in has]
        guarded = walk.partial or (walk.path[-1] if walk.path else lease.anchor)
        if walk.partial is not None and self.policy.apart:
            guarded = tree.radix.split(walk.partial, walk.inside)
        guards = [tree.leases.take(guarded, key, "replay", tree.generation, with_state=False)]
        if isinstance(self.policy, Watching):
            guards += [
                tree.leases.take(node, key, "replay", tree.generation, with_state=True)
                for node in (*walk.path, guarded)
                if node.state != NO_SLOT
            ]
        evicted, fits = self._make_room(end - walked, len(wanted))
        if fits:
            self._insert(key, lease, wanted, end)
        for guard in guards:
            tree.leases.end(guard, 0)
        return Decision(
            request=self.number - 1,
            hit=match.usable * size,
            prefix=match.kv_prefix * size,
            states=tuple(at * size for at in sorted(wanted)) if fits else (),
            skipped=not fits,
            evicted=evicted,
        )

    def _make_room(self, pages: int, states: int) -> tuple[tuple[int, int], bool]:
        """Evict what is missing; returns the pages and states that went, and whether it helped.

        What no eviction could make room for evicts nothing.
        """
        tree, policy, memory = self.tree, self.policy, self.memory
        if memory is None or memory.fits(tree.radix, pages, states):
            return (0, 0), True
        if not memory.could_fit(pages, states):
            return (0, 0), False
        began = perf_counter()
        if isinstance(policy, Watching) and policy.before_eviction(tree, self.number - 1):
            tree.kv_index.rebuild()
            tree.state_index.rebuild()
        gone, actions = memory.evict(tree, pages, states)
        self.totals.eviction_s += perf_counter() - began
        self.totals.evictions += 1
        self._carry_out(actions)
        return (gone.pages, gone.states), memory.fits(tree.radix, pages, states)

    def _insert(self, key: TokenKey, lease: Lease, wanted: list[int], end: int) -> None:
        """Insert a key as its request would have: up to each position with a state, then whole."""
        tree, made = self.tree, dict[int, Node]()
        for at in sorted({*wanted, end}):
            state = self.places["state"].take(1)[0] if at in wanted else NO_SLOT
            pages = self.places["kv"].take(at - lease.boundary)
            self._carry_out(tree.insert(key, pages, state, lease, length=at)[1])
            made[at] = lease.anchor
            if state and isinstance(self.policy, Watching):
                self.policy.made(lease.anchor)
        if wanted != sorted(wanted):  # the tree had to make them from the front
            for at in wanted:
                tree.now += 1
                made[at].state_stamp = tree.now

    def _carry_out(self, actions: Actions) -> None:
        """What the tree gives back can be given out again."""
        for action in actions:
            if isinstance(action, FreeDeviceSlots):
                self.places[action.component].free.extend(action.ids)
