"""The tree of a history as blocks to draw: the paths that were used last, from the top down."""

from __future__ import annotations

from phloem.runtime.observe.charts import Block
from phloem.runtime.observe.history import History, Node

__all__ = ["LEAVES_MAX", "blocks_of"]

LEAVES_MAX = 400


def blocks_of(history: History) -> tuple[list[Block], float, int]:
    """Every node over the rows of its leaves, those used last on top; rows; leaves left out."""
    nodes = [node for node in history.nodes.values() if node.parent is not None]
    parents = {node.parent.id for node in nodes if node.parent is not None}
    leaves = [node for node in nodes if node.id not in parents]
    shown = sorted(leaves, key=lambda leaf: -leaf.used)[:LEAVES_MAX]
    # By use would tear siblings apart: the path decides, branches in the order of latest use.
    latest: dict[int, float] = {}
    paths = {leaf.id: history.path(leaf.id) for leaf in shown}
    for leaf in shown:
        for node in paths[leaf.id]:
            latest[node.id] = max(latest.get(node.id, 0.0), leaf.used)
    shown.sort(key=lambda leaf: [(-latest[node.id], node.id) for node in paths[leaf.id]])
    rows: dict[int, tuple[int, int]] = {}
    for row, leaf in enumerate(shown):
        for node in paths[leaf.id]:
            rows[node.id] = (rows.get(node.id, (row, row))[0], row + 1)
    leased = {lease.node for lease in history.leases.values()}
    coldest, hottest = min(latest.values()), max(latest.values())
    blocks: list[Block] = []
    for name, (top, bottom) in rows.items():
        node = history.nodes[name]
        css = " ".join(_classes(node)) + (" leased" if node.id in leased else "")
        heat = (latest[name] - coldest) / max(hottest - coldest, 1e-9)
        blocks.append(Block(node.start, node.end, top, bottom, css.strip(), heat, _title(node)))
    return blocks, float(len(shown)), len(leaves) - len(shown)


def _classes(node: Node) -> list[str]:
    classes: list[str] = []
    if node.host_pages:
        classes.append("both" if node.pages else "host")
    if node.state or node.host_state:
        classes.append("stateful" if node.state else "hoststateful")
    return classes


def _title(node: Node) -> str:
    where = {
        (True, True): "on the device and the host",
        (True, False): "on the device",
        (False, True): "on the host",
        (False, False): "without data",
    }[bool(node.pages), bool(node.host_pages)]
    tiers = [tier for tier, slot in (("device", node.state), ("host", node.host_state)) if slot]
    state = f"state on the {' and the '.join(tiers)}" if tiers else "no state"
    return f"node {node.id}: tokens {node.start} to {node.end}, {where}, {state}"
