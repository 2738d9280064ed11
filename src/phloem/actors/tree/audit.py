"""Recompute everything from the structure and compare; the invariants of the tree in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phloem.actors.actions import Component
from phloem.actors.tree.audit_host import audit_host
from phloem.actors.tree.checks import AuditFailed, check
from phloem.actors.tree.components import SpanComponent
from phloem.actors.tree.eviction import CandidateIndex
from phloem.actors.tree.keys import TOKEN_BYTES
from phloem.actors.tree.leases import Lease, protected
from phloem.actors.tree.node import NO_SLOT, Node, state_anywhere
from phloem.actors.tree.tree import Tree

__all__ = ["AuditFailed", "AuditRounds", "audit_tree"]

_Owned = dict[Component, set[int]]  # the places met so far


class _LeaseCounts:
    """What the live leases say that nodes count."""

    def __init__(self, tree: Tree) -> None:
        self.leases: Counter[int] = Counter()
        self.states: Counter[int] = Counter()
        self.spans: Counter[tuple[int, int]] = Counter()
        for lease in tree.leases.live.values():
            check(lease.live, f"{lease} is listed but ended")
            self.leases[lease.anchor.id] += 1
            self.states[lease.anchor.id] += lease.has_state
            for span in tree.spans:
                _count_span(lease, span, self.spans)


def audit_tree(tree: Tree, *, places: bool = True) -> None:
    """Check every invariant of the tree; raises `AuditFailed` naming the first that is broken.

    Walks all nodes without recursion; those of former generations are not looked at. Not `places`:
    its pages and states are nowhere, as in the shadows of a policy, which are audited with the tree
    that it is for.
    """
    counts = _LeaseCounts(tree)
    owners = Counter(lease.owner for lease in tree.leases.live.values() if lease.anchor.end)
    check(owners == tree.leases.owners, "the owners of leases are miscounted")
    totals: Counter[str] = Counter()
    owned = _nothing_owned(tree) if places else None
    for root in tree.radix.roots.values():
        check(root.parent is None and not root.edge and not len(root.page_ids), "a root has data")
        check(bool(root.children) or root.leases > 0, "a namespace is kept for nothing")
        _audit_links(tree, root)
        _audit_counts(root, counts)
    for node in tree.radix:
        _audit_node(tree, node, counts, owned, totals)
        totals["nodes"] += 1
        totals["leaves"] += node.children is None
        totals["pages"] += node.page_count
        totals["states"] += node.state != NO_SLOT
        totals["pages_protected"] += node.page_count if node.counted else 0
        totals["states_protected"] += node.state != NO_SLOT and node.state_leases > 0
    if tree.host is None:
        check(not len(tree.operations), "operations of a tree without a host tier")
    else:
        audit_host(tree, tree.host)
    unsettled = sum(node.end for node in tree.leases.unsettled.values())
    check(unsettled == tree.leases.unsettled_tokens, "the unsettled tokens are miscounted")
    for index in tree.indexes:
        _audit_index(index, tree.policy.rises_only)
    _audit_totals(tree, totals)
    _audit_sessions(tree)
    for shadow in tree.policy.shadows():
        check(not shadow.leases.live, "a request of a shadow has not ended")
        audit_tree(shadow, places=False)


class AuditRounds:
    """Audits a few nodes at a time, round after round, while the tree goes on changing.

    Cheap enough to follow every turn, and a node that is broken is noticed within a round. What
    only the whole can tell, totals and places that stand at two nodes, is left to `audit_tree`.
    """

    def __init__(self, tree: Tree, nodes: int) -> None:
        self._tree = tree
        self._nodes = nodes
        self._round: Iterator[Node] = iter(())
        self.rounds = 0

    def audit_some(self) -> None:
        """Audit the next nodes; raises `AuditFailed` naming the first thing that is broken."""
        tree = self._tree
        counts, owned = _LeaseCounts(tree), _nothing_owned(tree)
        for _ in range(self._nodes):
            node = next(self._round, None)
            if node is None:
                self._round = self._walk(tree.generation)
                self.rounds += 1
                return
            _audit_node(tree, node, counts, owned, Counter())

    def _walk(self, generation: int) -> Iterator[Node]:
        """The nodes, parents first; those that go or come between two steps may be missing."""
        tree = self._tree
        stack = list(tree.radix.roots.values())
        while stack and tree.generation == generation:
            node = stack.pop()
            if node.parent is not None:  # neither a root nor gone meanwhile
                yield node
            if node.children is not None:
                stack.extend(node.children.values())


def _nothing_owned(tree: Tree) -> _Owned:
    return {one.name: set() for one in tree.components.all}


def _audit_node(
    tree: Tree, node: Node, counts: _LeaseCounts, owned: _Owned | None, totals: Counter[str]
) -> None:
    """What a node says of itself, its children and its leases."""
    _audit_links(tree, node)
    _audit_data(tree, node)
    if owned is not None:
        _audit_places(tree, node, owned)
    _audit_counts(node, counts)
    unsettled = node.id in tree.leases.unsettled
    check(
        node.counted == protected(node) - unsettled,
        f"node {node.id} is {'counted' if node.counted else 'not counted'} as protected",
    )
    for span in tree.spans:
        _audit_span(span, node, counts.spans, totals)
    _audit_candidates(tree, node)


def _audit_links(tree: Tree, node: Node) -> None:
    children = tuple((node.children or {}).values())
    alone = children[0] if len(children) == 1 else None
    check(node.only is alone, f"node {node.id} is wrong about its only child")
    if node.children is None:
        return
    check(bool(node.children), f"node {node.id} has an empty table of children")
    for first, child in node.children.items():
        check(child.parent is node, f"child {child.id} does not know its parent {node.id}")
        check(
            child.edge[: tree.radix.page_bytes] == first,
            f"child {child.id} does not stand under its first page",
        )


def _audit_data(tree: Tree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    check(len(node.edge) > 0, f"node {node.id} has an empty edge")
    check(len(node.edge) % tree.radix.page_bytes == 0, f"edge of {node.id} is no whole pages")
    check(node.end - parent.end == len(node.edge) // TOKEN_BYTES, f"node {node.id} ends elsewhere")
    host_only = not node.page_ids and node.host is not None and node.host.page_ids
    check(
        bool(host_only) or node.page_count * tree.radix.page_bytes == len(node.edge),
        f"node {node.id} has {node.page_count} pages for {len(node.edge)} bytes",
    )
    check(
        not node.page_ids or parent.parent is None or bool(parent.page_ids),
        f"node {node.id} has KV on the device, its parent has none",
    )
    if node.state != NO_SLOT:
        check(tree.has_states, "a state in a tree without states")
        check(bool(node.page_ids), f"node {node.id} has a state on the device, but no KV")
        check(node.end % tree.grid == 0, f"state of {node.id} at {node.end} is off the grid")


def _audit_places(tree: Tree, node: Node, owned: _Owned) -> None:
    for component in tree.components.all:
        mine = owned[component.name]
        for place in component.held(node):
            if place <= 0 or place in mine:  # so many that a message for each would take long
                name = f"{component.name} place {place} of node {node.id}"
                raise AuditFailed(f"{name} is reserved, or another node's, too")
            mine.add(place)


def _count_span(lease: Lease, span: SpanComponent, spans_at: Counter[tuple[int, int]]) -> None:
    """Count a lease where it says that it is counted, which is at least where it needs to be."""
    start, node = lease.spans[span.number], lease.anchor
    needed = span.needs_from(node.end)
    check(start <= needed, f"{lease} protects {span.name} from {start} on, not {needed}")
    while node.parent is not None and node.end > start:
        spans_at[span.number, node.id] += 1
        node = node.parent
    check(node.end == start, f"{lease} protects {span.name} from {start} on, inside a node")


def _audit_span(
    span: SpanComponent,
    node: Node,
    spans_at: Counter[tuple[int, int]],
    totals: Counter[str],
) -> None:
    part, pages = node.spans[span.number], span.held(node)
    count = spans_at[span.number, node.id]
    check(part.leases == count, f"node {node.id} counts {part.leases} leases of {span.name}")
    check(len(pages) <= node.page_count, f"{span.name} of {node.id} is longer than its edge")
    totals[f"{span.name} pages"] += len(pages)
    totals[f"{span.name} pages protected"] += len(pages) if count else 0


def _audit_counts(node: Node, counts: _LeaseCounts) -> None:
    check(node.leases == counts.leases[node.id], f"node {node.id} counts {node.leases} leases")
    check(
        node.state_leases == counts.states[node.id],
        f"node {node.id} counts {node.state_leases} state leases",
    )
    children = tuple(node.children.values()) if node.children else ()
    below = sum(child.counted for child in children)
    gone = sum(not one.page_ids or (one.host is not None and one.host.leaving) for one in children)
    check(node.gone_children == gone, f"node {node.id} counts {node.gone_children} gone children")
    check(
        node.protected_children == below,
        f"node {node.id} counts {node.protected_children} protected children of {below}",
    )


def _audit_candidates(tree: Tree, node: Node) -> None:
    for index in tree.indexes:
        if index.eligible(node):
            check(node.id in index, f"candidate {node.id} is in no index")


def _audit_index(index: CandidateIndex, rises_only: bool) -> None:
    lowest: dict[int, int] = {}
    for score, node in index.entries():
        check(bool(node.queued & index.bit), f"node {node.id} is indexed without its mark")
        lowest[node.id] = min(score, lowest.get(node.id, score))
    for _, node in index.entries():
        if rises_only and index.eligible(node):
            check(lowest[node.id] <= index.score(node), f"the score of {node.id} has fallen")


def _audit_totals(tree: Tree, totals: Counter[str]) -> None:
    kept = {
        "nodes": tree.radix.nodes,
        "leaves": tree.radix.leaves,
        "pages": tree.radix.pages,
        "states": tree.radix.states,
        "pages_protected": tree.leases.pages_protected,
        "states_protected": tree.leases.states_protected,
    }
    for span in tree.spans:
        kept[f"{span.name} pages"] = tree.radix.span_pages[span.number]
        kept[f"{span.name} pages protected"] = tree.leases.spans_protected[span.number]
    for name, value in kept.items():
        check(value == totals[name], f"{name}: the tree counts {value}, its nodes {totals[name]}")


def _audit_sessions(tree: Tree) -> None:
    standing = Counter(
        session.anchor.id for session in tree.sessions.open.values() if session.anchor is not None
    )
    for node in tree.radix:
        check(
            node.sessions == standing.pop(node.id, 0),
            f"node {node.id} counts {node.sessions} sessions",
        )
        check(
            not node.sessions or state_anywhere(node) or not tree.has_states,
            f"a session stands on node {node.id}, which is no boundary",
        )
    check(not standing, "a session stands on a node that has gone")
