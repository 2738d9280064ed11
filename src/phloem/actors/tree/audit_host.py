"""The audit of the host tier: copies, pins, what is leaving, and operations over nodes."""

from __future__ import annotations

from collections import Counter

from phloem.actors.actions import Component
from phloem.actors.tree.checks import AuditFailed, check
from phloem.actors.tree.core import TreeCore
from phloem.actors.tree.host import HostTier, has_or_awaits_kv
from phloem.actors.tree.leases import protected
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, HostPart, Node

__all__ = ["audit_host"]


def audit_host(tree: TreeCore, host: HostTier) -> None:
    """Check what the tree keeps about its host tier; raises `AuditFailed`."""
    totals: Counter[str] = Counter()
    owned: dict[Component, set[int]] = {"kv": set(), "state": set()}
    marks: dict[int, set[tuple[str, int]]] = {}
    for node in tree.radix:
        part = node.host
        if part is None:
            continue
        check(not part.empty, f"node {node.id} has a part on the host for nothing")
        _audit_data(tree, node, part, owned)
        _audit_below(node, part)
        _audit_pins(node, part)
        _audit_marks(tree, node, part, marks)
        count = len(part.page_ids) // ID_BYTES
        totals["pages"] += count
        totals["pages_pinned"] += count if part.pins else 0
        totals["states"] += part.state != NO_SLOT
        only_copy = node.state == NO_SLOT
        stays = node.state_leases > 0 if only_copy else part.leaving
        totals["states_pinned"] += part.state != NO_SLOT and stays
        totals["pages_leaving"] += node.page_count if part.leaving else 0
        totals["states_leaving"] += part.state_leaving
        for index in (host.kv_index, host.state_index):
            if index.eligible(node):
                check(node.id in index, f"copy of {node.id} may go and is in no index")
    for name in (
        *("pages", "pages_pinned", "states", "states_pinned"),
        *("pages_leaving", "states_leaving"),
    ):
        kept = getattr(host, name)
        check(kept == totals[name], f"host {name}: kept {kept}, counted {totals[name]}")
    _audit_operations(tree, marks)
    if tree.host_closed:
        _audit_closed(tree, host)


def _audit_data(
    tree: TreeCore, node: Node, part: HostPart, owned: dict[Component, set[int]]
) -> None:
    parent = node.parent
    assert parent is not None
    if part.page_ids:
        check(
            len(part.page_ids) * tree.radix.page_bytes == len(node.edge) * ID_BYTES,
            f"node {node.id} has host pages for another length",
        )
        above = parent.host
        check(
            parent.parent is None
            or tree.write_policy == "write_back"
            or (above is not None and bool(above.page_ids)),
            f"node {node.id} has KV on the host, its parent has none",
        )
    for page in memoryview(part.page_ids).cast("i"):
        if page <= 0 or page in owned["kv"]:
            raise AuditFailed(f"host page {page} of {node.id} is reserved, or another node's, too")
        owned["kv"].add(page)
    if part.state != NO_SLOT:
        check(node.end % tree.grid == 0, f"host state of {node.id} is off the grid")
        check(part.state not in owned["state"], f"host state {part.state} stands at two nodes")
        owned["state"].add(part.state)
    check(
        not part.leaving or (bool(node.page_ids) and not protected(node)),
        f"node {node.id} is leaving, but protected or gone",
    )
    check(
        not part.state_leaving or (node.state != NO_SLOT and not node.state_leases),
        f"the state of {node.id} is leaving, but protected or gone",
    )


def _audit_below(node: Node, part: HostPart) -> None:
    stays = len(node.children or {}) - node.gone_children
    check(not part.leaving or not stays, f"node {node.id} is leaving, {stays} children are not")
    parts = [one.host for one in (node.children or {}).values() if one.host is not None]
    below = sum(has_or_awaits_kv(one) for one in parts)
    check(part.kv_children == below, f"node {node.id} counts {part.kv_children} copies of {below}")
    leaving = sum(one.leaving for one in parts)
    check(part.leaving_children == leaving, f"node {node.id} miscounts its leaving children")


def _audit_pins(node: Node, part: HostPart) -> None:
    pins = 0
    if part.page_ids:
        pins += part.leaving or (not node.page_ids and protected(node))
    for child in (node.children or {}).values():
        below = child.host
        if below is not None:
            pins += below.kv_backup > 0 or (bool(below.page_ids) and below.pins > 0)
    check(part.pins == pins, f"node {node.id} has {part.pins} pins, {pins} reasons for them")


def _audit_marks(
    tree: TreeCore, node: Node, part: HostPart, marks: dict[int, set[tuple[str, int]]]
) -> None:
    for what, number, kind in (
        ("kv", part.kv_backup, "backup"),
        ("state", part.state_backup, "backup"),
        ("kv", part.kv_load, "load"),
        ("state", part.state_load, "load"),
    ):
        if number:
            operation = tree.operations.live.get(number)
            check(operation is not None, f"node {node.id} expects data of {number}, which ended")
            assert operation is not None
            check(operation.kind == kind, f"{operation} is to bring {what} of {node.id}")
            marks.setdefault(number, set()).add((what, node.id))
    check(not (part.kv_backup and part.page_ids), f"node {node.id} copies KV that the host has")
    check(not (part.kv_load and node.page_ids), f"node {node.id} loads KV that the device has")
    check(not (part.state_backup and part.state), f"node {node.id} copies its state twice")
    check(not (part.state_load and node.state), f"node {node.id} loads its state twice")
    awaits = part.kv_backup or part.state_backup or part.leaving_children
    check(
        not part.leaving or awaits > 0,
        f"node {node.id} waits for nothing to leave",
    )


def _audit_closed(tree: TreeCore, host: HostTier) -> None:
    """Nothing waits for a closed tier, so what may go is exactly what nothing protects."""
    leaving = host.pages_leaving + host.states_leaving
    check(not leaving, "something is leaving for a tier that is closed")
    for operation in tree.operations:
        check(operation.phase != "planned", f"{operation} is planned, and its tier is closed")
        reads = operation.pieces or operation.state_node is not None
        check(not reads or operation.hold is not None, f"nothing protects what {operation} reads")


def _audit_operations(tree: TreeCore, marks: dict[int, set[tuple[str, int]]]) -> None:
    for operation in tree.operations:
        expected = {("kv", node.id) for node, _, _ in operation.pieces.values()}
        if operation.state_node is not None:
            expected.add(("state", operation.state_node.id))
        check(
            marks.pop(operation.number, set()) == expected,
            f"{operation} and the nodes that expect it disagree",
        )
        at = 0
        for node, first, count in operation.top_down():
            check(node.parent is not None, f"{operation} names a node that has gone")
            check(first == at, f"{operation} has a gap at page {at}")
            check(
                count * tree.radix.page_bytes == len(node.edge),
                f"{operation} brings {count} pages for node {node.id}",
            )
            at = first + count
        check(not expected or at == operation.pages, f"{operation} has lost pages")
        for lease in operation.waiters.values():
            check(lease.live and lease.load == operation.number, f"{lease} does not wait")
        for number in operation.dependants:
            check(
                tree.operations.live[number].requires == operation.number,
                f"operation {number} does not require {operation}",
            )
        check(
            operation.kind == "backup"
            or operation.phase != "planned"
            or bool(operation.waiters or operation.dependants),
            f"nobody waits for {operation}",
        )
    check(not marks, f"operations {sorted(marks)} have ended, but nodes expect them")
    for lease in tree.leases.live.values():
        awaited = tree.operations.live.get(lease.load)
        check(
            not lease.load or (awaited is not None and lease.id in awaited.waiters),
            f"{lease} waits for an operation that does not know it",
        )
