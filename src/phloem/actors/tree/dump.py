"""The tree as data and as a picture, for people. Bounded, and without recursion."""

from __future__ import annotations

from array import array

import msgspec

from phloem.actors.tree.leases import protected
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, HostPart, Node
from phloem.actors.tree.radix import RootName
from phloem.actors.tree.tree import Tree, TreeFigures

__all__ = ["Dump", "NodeView", "dump_tree", "picture"]

_TOKENS_SHOWN = 4
_DEPTH_SHOWN = 24  # deeper nodes are drawn at this indentation


class NodeView(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One node. `depth` counts nodes from its root; `tokens` are the first of its edge.

    `device_pages` and `host_pages` count pages; `state` and `host_state` are the slots of the state
    at `end`, 0 for none. `moving` says what is under way: `backup`, `load`, `leaving`. `leases`
    lists the owners of the leases anchored here, `state_leases` how many of them took the state;
    `last` is true for the last child of its parent. `spans` counts pages of each span component.
    """

    id: int
    parent: int
    depth: int
    start: int
    end: int
    tokens: tuple[int, ...]
    device_pages: int
    state: int
    host_pages: int = 0
    host_state: int = NO_SLOT
    moving: tuple[str, ...] = ()
    leases: tuple[str, ...]
    state_leases: int
    protected: bool
    hits: int
    stamp: int
    priority: int
    sessions: int
    children: int
    last: bool
    spans: tuple[int, ...] = ()


class Dump(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A bounded view of a tree: its figures and the first nodes of each namespace, parents first.

    `left_out` counts the nodes beyond the limit.
    """

    figures: TreeFigures
    page_size: int
    grid: int
    policy: str
    host: bool
    now: int
    spaces: tuple[tuple[RootName, tuple[NodeView, ...]], ...]
    left_out: int
    spans: tuple[str, ...] = ()  # a letter for each span component


def dump_tree(tree: Tree, limit: int = 1000) -> Dump:
    """Look at up to `limit` nodes in the order of a depth-first walk, namespaces by name."""
    figures = tree.figures()  # first: they settle what is protected
    holders: dict[int, list[str]] = {}
    for lease in tree.leases.live.values():
        holders.setdefault(lease.anchor.id, []).append(lease.owner)
    spaces: list[tuple[RootName, tuple[NodeView, ...]]] = []
    room = limit
    for name in sorted(tree.radix.roots):
        if not room:
            break
        views = _views(tree.radix.roots[name], holders, room)
        room -= len(views)
        spaces.append((name, tuple(views)))
    return Dump(
        figures=figures,
        page_size=tree.page_size,
        grid=tree.grid,
        policy=tree.policy.name,
        host=tree.host is not None,
        now=tree.now,
        spaces=tuple(spaces),
        left_out=tree.radix.nodes - (limit - room),
        spans=tuple(span.letter for span in tree.spans),
    )


def _views(root: Node, holders: dict[int, list[str]], limit: int) -> list[NodeView]:
    views: list[NodeView] = []
    waiting = _children(root, 1)
    while waiting and len(views) < limit:
        node, depth, last = waiting.pop()
        views.append(_view(node, depth, last, holders))
        waiting.extend(_children(node, depth + 1))
    return views


def _children(node: Node, depth: int) -> list[tuple[Node, int, bool]]:
    """The children with their depth, to be popped in the order of their first pages."""
    children = node.children or {}
    ordered = [children[first] for first in sorted(children, reverse=True)]
    return [(child, depth, not number) for number, child in enumerate(ordered)]


def _view(node: Node, depth: int, last: bool, holders: dict[int, list[str]]) -> NodeView:
    parent = node.parent
    assert parent is not None
    tokens = array("I")
    tokens.frombytes(node.edge[: _TOKENS_SHOWN * tokens.itemsize])
    part = node.host or HostPart()
    return NodeView(
        id=node.id,
        parent=parent.id,
        depth=depth,
        start=parent.end,
        end=node.end,
        tokens=tuple(tokens),
        device_pages=node.page_count,
        state=node.state,
        host_pages=len(part.page_ids) // ID_BYTES,
        host_state=part.state,
        moving=_moving(part),
        leases=tuple(holders.get(node.id, ())),
        state_leases=node.state_leases,
        protected=protected(node),
        hits=node.hits,
        stamp=node.stamp,
        priority=node.priority,
        sessions=node.sessions,
        children=len(node.children or ()),
        last=last,
        spans=tuple(len(span.page_ids) // ID_BYTES for span in node.spans),
    )


def _moving(part: HostPart) -> tuple[str, ...]:
    under_way = {
        "backup": part.kv_backup or part.state_backup,
        "load": part.kv_load or part.state_load,
        "leaving": part.leaving or part.state_leaving,
    }
    return tuple(what for what, number in under_way.items() if number)


def picture(dump: Dump) -> str:
    """The dump as lines for a terminal.

    Each node shows its tokens, where it ends, its data (`F` KV and `S` a state on the device, `W`
    what it has of a window there, `f` and `s` on the host, `-` nothing) and, where there are any,
    what is under way, its lease holders, sessions and priority.
    """
    figures = dump.figures
    lines = [
        f"generation {figures.generation}: {figures.nodes} nodes, {figures.leaves} leaves, "
        f"{figures.leases} leases; page {dump.page_size}, grid {dump.grid}, {dump.policy}",
        f"pages {figures.pages} ({figures.pages_protected} protected), "
        f"states {figures.states} ({figures.states_protected} protected)",
    ]
    lines.extend(
        f"{span.component}: pages {span.pages} ({span.protected} protected)"
        for span in figures.spans
    )
    if dump.host:
        lines.append(
            f"host: pages {figures.host_pages} ({figures.host_pages_pinned} pinned), "
            f"states {figures.host_states} ({figures.host_states_pinned} pinned); "
            f"{figures.operations} operations"
        )
    for name, views in dump.spaces:
        lines.append(_space_line(name))
        lines.extend(_node_lines(views, dump))
    if dump.left_out > 0:
        lines.append(f"... and {dump.left_out} more nodes")
    return "\n".join(lines)


def _space_line(name: RootName) -> str:
    adapter, salt, extra = name
    parts = [f"adapter {adapter!r}" if adapter else "", f"salt {salt!r}" if salt else ""]
    parts.append(f"content of {len(extra)} bytes" if extra else "")
    return ", ".join(filter(None, parts)) or "default namespace"


def _node_lines(views: tuple[NodeView, ...], dump: Dump) -> list[str]:
    lines: list[str] = []
    bars: list[str] = []  # of the ancestors, one for each depth
    for view in views:
        del bars[view.depth - 1 :]
        drawn = bars[-_DEPTH_SHOWN:]
        branch = "└─ " if view.last else "├─ "
        lines.append("".join(drawn) + branch + _node_text(view, dump))
        bars.append("   " if view.last else "│  ")
    return lines


def _node_text(view: NodeView, dump: Dump) -> str:
    shown = " ".join(str(token) for token in view.tokens)
    if view.end - view.start > len(view.tokens):
        shown += " .."
    data = ("F" if view.device_pages else "-") + ("S" if view.state != NO_SLOT else "-")
    for letter, pages in zip(dump.spans, view.spans, strict=True):
        data += letter if pages else "-"
    if dump.host:
        data += ("f" if view.host_pages else "-") + ("s" if view.host_state != NO_SLOT else "-")
    text = f"[{shown}] {view.start}-{view.end} {data}"
    if view.moving:
        text += f" {' '.join(view.moving)}"
    if view.leases:
        text += f" held by {', '.join(view.leases)}"
    elif view.protected:
        text += " protected"
    if view.sessions:
        text += f" sessions {view.sessions}"
    if view.priority:
        text += f" priority {view.priority}"
    return text
