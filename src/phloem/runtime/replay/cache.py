"""The production tree, served a trace one request after another over one budget of bytes.

A request is looked up, then everything that exists after it is inserted: no concurrency, and no
memory for requests that run. An insert that does not fit after eviction is skipped. The path just
matched is never evicted by its own insert.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from time import perf_counter

from phloem.actors.actions import FreeDeviceSlots, Ids
from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.core import Actions
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.policies import Policy, policy_named
from phloem.actors.tree.results import Match
from phloem.errors import InvalidRequest
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.admission import Admission, AsPlaced, Spot
from phloem.runtime.replay.requests import ReplayRequest, Workload
from phloem.runtime.replay.served import Decision, Totals

__all__ = ["ReplayCache", "Watching"]

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
    """A policy that wants to know more than the tree tells policies."""

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
    """One tree over `capacity` bytes; None: without a bound."""

    def __init__(
        self,
        geometry: Geometry,
        block_size: int,
        *,
        capacity: int | None = None,
        policy: str | Policy = "lru",
        admission: Admission | None = None,
        sessions: bool = False,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise InvalidRequest(f"a cache of {capacity} bytes")
        self.geometry = geometry
        self.block_size = block_size
        self.capacity = capacity
        self.policy = policy_named(policy) if isinstance(policy, str) else policy
        self.admission = admission or AsPlaced()
        self.sessions = sessions
        self.page_bytes = geometry.kv_bytes * block_size
        self.state_bytes = geometry.state_bytes
        self.tree = Tree(page_size=1, policy=self.policy, placement=self.admission.placement)
        self.places = {"kv": Places(), "state": Places()}
        self.totals = Totals()
        self.number = 0

    @property
    def used(self) -> int:
        """Bytes of what the tree holds."""
        radix = self.tree.radix
        return radix.pages * self.page_bytes + radix.states * self.state_bytes

    def run(
        self, workload: Workload, decided: Callable[[Decision], object] | None = None
    ) -> Totals:
        """Serve every request of a workload; `decided` hears of each."""
        for request in workload.requests:
            decision = self.serve(request)
            if decided is not None:
                decided(decision)
        return self.totals

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
        if match.usable and isinstance(self.policy, Watching):
            self.policy.matched(lease.anchor)
        decision = self._keep(request, key, lease, match)
        if self.sessions:
            tree.stand_on(lease)
        tree.release(lease)
        self._count(request, decision)
        return decision

    def _keep(self, request: ReplayRequest, key: TokenKey, lease: Lease, match: Match) -> Decision:
        """Make room for what is new and insert it, where it fits."""
        tree, size = self.tree, self.block_size
        walk = tree.radix.walk(key, len(key.data))
        walked = (walk.offset + walk.inside) // 4
        spot = Spot(match.usable, match.kv_prefix, walked, walk.inside > 0, request.blocks)
        has = {node.end for node in walk.path if node.state != NO_SLOT}
        wanted = sorted({*self.admission.positions(tree, lease, spot)} - has - {0})
        upper: Node | None = None
        if walk.partial is not None and walk.inside:
            upper = tree.radix.split(walk.partial, walk.inside)
        guarded = upper or (walk.path[-1] if walk.path else lease.anchor)
        guard = tree.leases.take(guarded, key, "replay", tree.generation, with_state=False)
        need = (request.blocks - walked) * self.page_bytes + len(wanted) * self.state_bytes
        pages, states = self._make_room(need)
        fits = self.capacity is None or self.used + need <= self.capacity
        if fits:
            self._insert(key, lease, wanted)
        tree.leases.end(guard, 0)
        if upper is not None and upper.parent is not None and not upper.leases:
            tree.radix.merge_into_child(upper)
        return Decision(
            request=self.number - 1,
            hit=match.usable * size,
            prefix=match.kv_prefix * size,
            states=tuple(at * size for at in wanted) if fits else (),
            skipped=not fits,
            evicted=(pages, states),
        )

    def _make_room(self, need: int) -> tuple[int, int]:
        """Evict what is missing for `need` bytes; returns the pages and states that went."""
        if self.capacity is None or self.used + need <= self.capacity:
            return 0, 0
        tree, policy = self.tree, self.policy
        began = perf_counter()
        if isinstance(policy, Watching) and policy.before_eviction(tree, self.number - 1):
            tree.kv_index.rebuild()
            tree.state_index.rebuild()
        gone, actions = tree.evict_bytes(
            self.used + need - self.capacity,
            page_bytes=self.page_bytes,
            state_bytes=self.state_bytes,
        )
        self.totals.eviction_s += perf_counter() - began
        self.totals.evictions += 1
        self._carry_out(actions)
        return gone.pages, gone.states

    def _insert(self, key: TokenKey, lease: Lease, wanted: list[int]) -> None:
        """Insert a key as its request would have: up to each position with a state, then whole."""
        tree = self.tree
        whole = key.length
        for at in wanted if wanted and wanted[-1] == whole else [*wanted, whole]:
            state = self.places["state"].take(1)[0] if at in wanted else NO_SLOT
            pages = self.places["kv"].take(at - lease.boundary)
            self._carry_out(tree.insert(key, pages, state, lease, length=at)[1])
            if state and isinstance(self.policy, Watching):
                self.policy.made(lease.anchor)

    def _carry_out(self, actions: Actions) -> None:
        """What the tree gives back can be given out again."""
        for action in actions:
            if isinstance(action, FreeDeviceSlots):
                self.places[action.component].free.extend(action.ids)

    def _count(self, request: ReplayRequest, decision: Decision) -> None:
        totals, flops = self.totals, self.geometry.flops
        totals.requests += 1
        totals.lookups += 1
        totals.tokens += request.tokens
        totals.hit_tokens += decision.hit
        totals.flops += flops(request.tokens)
        totals.flops_saved += flops(decision.hit)
        totals.states_made += len(decision.states)
        totals.states_restored += decision.hit > 0
        totals.skipped += decision.skipped
        totals.pages_evicted += decision.evicted[0]
        totals.states_evicted += decision.evicted[1]
