"""Which nodes may not be evicted: leases, each counted at the node that it is anchored at.

A node is protected while leases are anchored at it or while it has protected children. Counts move
up only when a node goes from unprotected to protected or back, so a lease costs as many steps as
there are nodes whose protection it changes, whatever the depth.

Without a host tier even that waits until somebody asks: what is above a leased node has a child on
the device and cannot go anyway, and most leases end before the figures are wanted. Until then the
leased node is *unsettled*: its parent does not count it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phloem.actors.tree.components import SpanComponent
from phloem.actors.tree.eviction import CandidateIndex
from phloem.actors.tree.host import HostTier
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey
from phloem.actors.tree.node import ID_BYTES, Node
from phloem.actors.tree.placement import Refused, Wanted
from phloem.actors.tree.radix import RootName
from phloem.actors.tree.sessions import Session

__all__ = ["Lease", "Leases", "protected"]

_UNSETTLED_MAX = 64  # so that to settle them all never takes long


def protected(node: Node) -> bool:
    """True while the node's KV must stay; above an unsettled node only once that is settled."""
    return node.leases > 0 or node.protected_children > 0


class Lease(msgspec.Struct, eq=False, gc=False):
    """The right to read one boundary: the KV path to `anchor` and, if taken, the state at it.

    It belongs to the tree; whoever holds it only reads it and names it in later calls.
    """

    id: int
    owner: str
    generation: int
    key: TokenKey  # the path to the anchor and, for a request, what it computes from there
    anchor: Node
    has_state: bool
    live: bool = True
    running_at: tuple[RootName, int, bytes] | None = None
    wanted: list[Wanted] = []
    refused: list[Refused] = []  # positions that will not be kept
    session: Session | None = None
    priority: int = 0
    keep_until: int = 0
    turn: int = 0  # as of a node that its request makes
    prompt_end: int = 0
    load: int = 0  # the operation that it waits for, 0: none
    why_not: str = ""  # why what it was promised from a lower tier did not come
    # For each span component: where the first node begins at which the lease is counted.
    spans: tuple[int, ...] = ()

    @property
    def boundary(self) -> int:
        """Tokens that the lease protects."""
        return self.anchor.end

    @property
    def root(self) -> RootName:
        """The name of the tree, one of a namespace, that the boundary belongs to."""
        return self.key.root

    def leads_into(self, key: TokenKey) -> bool:
        """True when `key`, of the same root, starts with the tokens up to the boundary."""
        mine, theirs = self.key.data, key.data
        if mine is theirs or theirs.startswith(mine):
            return True
        covered = self.anchor.end * TOKEN_BYTES
        if covered <= len(theirs) and mine.startswith(theirs):
            return True
        return theirs[:covered] == mine[:covered]

    def __repr__(self) -> str:
        state = "live" if self.live else "released"
        return f"Lease({self.id}, owner={self.owner!r}, boundary={self.anchor.end}, {state})"


class Leases:
    """The live leases, and the protection they give, in all tiers."""

    def __init__(
        self,
        kv_index: CandidateIndex,
        state_index: CandidateIndex,
        host: HostTier | None = None,
        spans: Sequence[tuple[SpanComponent, CandidateIndex]] = (),
    ) -> None:
        self._kv_index = kv_index
        self._state_index = state_index
        self._host = host
        self._spans = tuple(spans)
        self.live: dict[int, Lease] = {}
        self.owners: dict[str, int] = {}  # how many live leases on data, not on a root, each has
        self.pages_protected = 0  # without what is above unsettled nodes
        self.states_protected = 0
        self.spans_protected = [0] * len(self._spans)
        self.unsettled: dict[int, Node] = {}  # leased nodes that their parents do not count
        self.unsettled_tokens = 0  # of their paths, together: at most so many more are protected
        self._next_id = 0

    def take(
        self, anchor: Node, key: TokenKey, owner: str, generation: int, *, with_state: bool
    ) -> Lease:
        """A new lease at `anchor`; `with_state` also protects the state there, now or later."""
        self._next_id = number = self._next_id + 1
        lease = self.live[number] = Lease(number, owner, generation, key, anchor, with_state)
        if anchor.end:
            self.owners[owner] = self.owners.get(owner, 0) + 1
        self._protect(anchor)
        if with_state:
            self._protect_state(anchor)
        if self._spans:
            self._protect_spans(lease)
        return lease

    def forget_totals(self) -> None:
        """The tree was reset: what live leases protect, all settled, is counted elsewhere."""
        assert not self.unsettled
        self.pages_protected = self.states_protected = 0
        self.spans_protected = [0] * len(self._spans)

    def end(self, lease: Lease, now: int, *, former: bool = False) -> None:
        """End a live lease; its anchor counts as used at `now`, unless that is 0.

        `former`: the lease is of an older generation, whose nodes are no candidates any more.
        """
        assert lease.live
        anchor = lease.anchor
        if lease.has_state:
            self.end_state(lease, now, former=former)
        if self._spans:
            self._unprotect_spans(anchor, lease.spans, now, former)
        self._unprotect(anchor, now, former)
        lease.live = False
        del self.live[lease.id]
        if anchor.end:
            self._owns_less(lease.owner)

    def end_state(self, lease: Lease, now: int, *, former: bool = False) -> None:
        """Give up the state part of a live lease."""
        assert lease.live and lease.has_state
        lease.has_state = False
        anchor = lease.anchor
        if now:
            anchor.state_stamp = now
        anchor.state_leases -= 1
        assert anchor.state_leases >= 0
        if not anchor.state_leases and not former:
            if anchor.state:
                self.states_protected -= 1
                self._state_index.push(anchor)
            if anchor.host is not None and self._host is not None:
                self._host.state_unprotected(anchor)

    def take_state(self, lease: Lease, *, former: bool = False) -> None:
        """Add the state part to a live lease that has none."""
        assert lease.live and not lease.has_state
        lease.has_state = True
        if former:  # its states are in no total any more
            lease.anchor.state_leases += 1
        else:
            self._protect_state(lease.anchor)

    def move(self, lease: Lease, anchor: Node, now: int, *, with_state: bool) -> None:
        """Move a live lease to another boundary; at no time is the path unprotected."""
        before = lease.anchor
        self._protect(anchor)
        if before.counted:  # or the counts above would go down now, and up again later
            self._count(anchor)
        if lease.has_state:
            self.end_state(lease, now)
        self._unprotect(before, 0, former=False)
        if not before.end:
            if anchor.end:
                self.owners[lease.owner] = self.owners.get(lease.owner, 0) + 1
        elif not anchor.end:
            self._owns_less(lease.owner)
        lease.anchor = anchor
        if with_state:
            lease.has_state = True
            self._protect_state(anchor)
        if self._spans:
            spans = lease.spans
            self._protect_spans(lease)
            self._unprotect_spans(before, spans, now, former=False)

    def state_appeared(self, node: Node) -> None:
        """A state was put at `node`: it counts as protected at once when it is leased."""
        if node.state_leases:
            self.states_protected += 1
        else:
            self._state_index.push(node)
        if self._host is not None:
            self._host.state_came(node)

    def kv_appeared(self, node: Node) -> None:
        """A node that was in the host tier only has KV on the device, too."""
        if protected(node):
            self.pages_protected += len(node.page_ids) // ID_BYTES
        if self._host is not None:
            self._host.kv_came(node, protected=protected(node))

    def span_appeared(self, node: Node, number: int, count: int) -> None:
        """So many more pages of a span are at `node`: protected at once if a lease counts there."""
        if node.spans[number].leases:
            self.spans_protected[number] += count
        else:
            self._spans[number][1].push(node)

    def _owns_less(self, owner: str) -> None:
        others = self.owners[owner] - 1
        if others:
            self.owners[owner] = others
        else:
            del self.owners[owner]

    def settle(self) -> None:
        """Have all protection counted: `pages_protected` and `protected` are exact now."""
        for node in list(self.unsettled.values()):
            self._count(node)

    def pages_not_counted(self) -> int:
        """What `settle` would add to `pages_protected`; changes nothing."""
        met: set[int] = set()
        size = 0
        for unsettled in list(self.unsettled.values()):
            node = unsettled
            while not node.counted and node.id not in met:
                parent = node.parent
                if parent is None:
                    break
                met.add(node.id)
                size += len(node.page_ids)
                node = parent
        return size // ID_BYTES

    def _protect(self, node: Node) -> None:
        leases = node.leases = node.leases + 1
        if node.counted or leases > 1 or node.parent is None:
            return
        if self._host is not None:
            self._count(node)
        else:
            unsettled = self.unsettled
            unsettled[node.id] = node
            self.unsettled_tokens += node.end
            if len(unsettled) > _UNSETTLED_MAX:
                self._count(next(iter(unsettled.values())))

    def _count(self, node: Node) -> None:
        """A protected node is counted by its parent, and that by its own, if they are not yet."""
        host, unsettled, size = self._host, self.unsettled, 0
        while not node.counted:
            parent = node.parent
            if parent is None:
                break
            node.counted = True
            if unsettled and unsettled.pop(node.id, None) is not None:
                self.unsettled_tokens -= node.end
            size += len(node.page_ids)
            if host is not None and node.host is not None:
                host.protected(node)
            parent.protected_children += 1
            node = parent
        self.pages_protected += size // ID_BYTES

    def _unprotect(self, node: Node, now: int, former: bool) -> None:
        left = node.leases = node.leases - 1
        assert left >= 0
        if now > node.stamp:
            node.stamp = now
        if left:
            return
        if node.counted:
            self._count_less(node, former)
        elif node.parent is not None:
            del self.unsettled[node.id]
            self.unsettled_tokens -= node.end
            if node.children is None:
                self._kv_index.push(node)

    def _count_less(self, node: Node, former: bool) -> None:
        """Take `node` and those above it that nothing protects now out of the protected ones.

        The walk stops at the first that has a lease or another protected child. On its way it
        passes the time of the latest use up; a node that was never counted passes that on when it
        is evicted. With `former`, for a tree from before a reset, no index and no sum changes.
        """
        stamp, size = node.stamp, 0
        while not node.leases and not node.protected_children:
            parent = node.parent
            if parent is None:
                break
            if not former:
                size += len(node.page_ids)
                if node.children is None or node.gone_children:
                    self._kv_index.push(node)
                if node.host is not None and self._host is not None:
                    self._host.unprotected(node)
            if stamp > parent.stamp:
                parent.stamp = stamp
            else:
                stamp = parent.stamp
            node.counted = False
            parent.protected_children -= 1
            node = parent
        self.pages_protected -= size // ID_BYTES

    def _protect_state(self, node: Node) -> None:
        node.state_leases += 1
        if node.state_leases == 1:
            if node.state:
                self.states_protected += 1
            if node.host is not None and self._host is not None:
                self._host.state_protected(node)

    def _protect_spans(self, lease: Lease) -> None:
        """Count the lease at the nodes whose spans its boundary needs, whole nodes each."""
        anchor = lease.anchor
        lease.spans = tuple(
            self._count_span(number, anchor, component.needs_from(anchor.end))
            for number, (component, _) in enumerate(self._spans)
        )

    def protect_spans(self, lease: Lease, start: int) -> None:
        """Count a live lease at the spans from `start` on, too, though its boundary needs less."""
        starts: list[int] = []
        for number, first in enumerate(lease.spans):
            node = lease.anchor
            while node.parent is not None and node.end > first:
                node = node.parent
            starts.append(self._count_span(number, node, start))
        lease.spans = tuple(starts)

    def _count_span(self, number: int, node: Node, start: int) -> int:
        """One lease more at the spans from `start` up to `node`; where the first of them begins."""
        while node.parent is not None and node.end > start:
            span = node.spans[number]
            span.leases += 1
            if span.leases == 1:
                self.spans_protected[number] += len(span.page_ids) // ID_BYTES
            node = node.parent
        return node.end

    def _unprotect_spans(
        self, anchor: Node, starts: tuple[int, ...], now: int, former: bool
    ) -> None:
        """A lease at `anchor` counts no more. Splits since have left both parts counted."""
        for number, start in enumerate(starts):
            node = anchor
            while node.parent is not None and node.end > start:
                span = node.spans[number]
                span.leases -= 1
                assert span.leases >= 0
                if now > span.stamp:
                    span.stamp = now
                if not span.leases and not former and span.page_ids:
                    self.spans_protected[number] -= len(span.page_ids) // ID_BYTES
                    self._spans[number][1].push(node)
                node = node.parent
