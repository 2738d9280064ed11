"""Former generations: what a reset left behind, taken apart in slices."""

from __future__ import annotations

from array import array

from phloem.actors.actions import TREE, Action, FreeDeviceSlots, Ids
from phloem.actors.tree.leases import protected
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.radix import Radix

__all__ = ["Former"]


class Former:
    """The trees of former generations. What their leases protect stays until those end."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.nodes = 0
        self.pages = 0
        self.states = 0
        # A depth-first walk, suspended: each node with the children that have to stay.
        self._frames: list[tuple[Node, dict[bytes, Node]]] = []
        self._released: list[Node] = []

    @property
    def unfinished(self) -> bool:
        """True while `sweep` has something to do."""
        return bool(self._frames or self._released)

    def take_over(self, radix: Radix) -> None:
        """Take all that a generation which has just ended holds; `radix` starts empty."""
        self.nodes += radix.nodes
        self.pages += radix.pages
        self.states += radix.states
        self._frames.extend((root, {}) for root in radix.detach_roots())

    def released(self, anchor: Node) -> None:
        """A lease of a former generation has ended at `anchor`."""
        self._released.append(anchor)

    def sweep(self, limit: int) -> list[Action]:
        """Take apart up to `limit` nodes; their slots go back by action."""
        pages, states = array("i"), array("i")
        frames = self._frames
        while frames and limit > 0:
            limit -= 1
            self._step(frames, pages, states)
        while not frames and self._released and limit > 0:
            limit -= 1
            self._upwards(self._released.pop(), pages, states)
        actions: list[Action] = []
        if pages:
            actions.append(FreeDeviceSlots("kv", pages, TREE))
        if states:
            actions.append(FreeDeviceSlots("state", states, TREE))
        return actions

    def _step(self, frames: list[tuple[Node, dict[bytes, Node]]], pages: Ids, states: Ids) -> None:
        node, kept = frames[-1]
        if node.children:
            first, child = node.children.popitem()
            if child.children:
                frames.append((child, {}))
            elif protected(child):
                kept[first] = child
            else:
                self._take_apart(child, pages, states)
            return
        node.children = kept or None
        frames.pop()
        if node.parent is None:
            return
        if kept or protected(node):
            frames[-1][1][node.edge[: self._page_bytes]] = node
        else:
            self._take_apart(node, pages, states)

    def _upwards(self, node: Node, pages: Ids, states: Ids) -> None:
        """A former lease has ended: its path goes as far as nobody needs it."""
        while node.parent is not None and node.children is None and not protected(node):
            parent = node.parent
            assert parent.children is not None
            del parent.children[node.edge[: self._page_bytes]]
            if not parent.children:
                parent.children = None
            self._take_apart(node, pages, states)
            node = parent

    def _take_apart(self, node: Node, pages: Ids, states: Ids) -> None:
        pages.frombytes(node.page_ids)
        self.nodes -= 1
        self.pages -= node.page_count
        if node.state != NO_SLOT:
            states.append(node.state)
            self.states -= 1
        node.parent = None
        node.children = None
