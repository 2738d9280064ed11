"""Former generations: what a reset left behind, taken apart in slices."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from phloem.actors.actions import TREE, Action, FreeDeviceSlots, FreeHostSlots
from phloem.actors.tree.components import SpanComponent
from phloem.actors.tree.eviction import Remains
from phloem.actors.tree.host import HostTier
from phloem.actors.tree.leases import protected
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, Node
from phloem.actors.tree.radix import Radix

__all__ = ["Former"]


class _Freed:
    """Places of nodes that were taken apart."""

    def __init__(self, spans: Sequence[SpanComponent]) -> None:
        self.spans = [(span, array("i")) for span in spans]
        self.pages, self.states = array("i"), array("i")
        self.host_pages, self.host_states = array("i"), array("i")

    def actions(self) -> Iterator[Action]:
        """The actions that free them: first on the device, then on the host."""
        if self.pages:
            yield FreeDeviceSlots("kv", self.pages, TREE)
        if self.states:
            yield FreeDeviceSlots("state", self.states, TREE)
        for span, pages in self.spans:
            if pages:
                yield FreeDeviceSlots(span.name, pages, TREE)
        if self.host_pages:
            yield FreeHostSlots("kv", self.host_pages, TREE)
        if self.host_states:
            yield FreeHostSlots("state", self.host_states, TREE)


class Former:
    """The trees of former generations. What their leases protect stays until those end."""

    def __init__(self, page_bytes: int, spans: Sequence[SpanComponent] = ()) -> None:
        self._page_bytes = page_bytes
        self._spans = spans
        self.span_pages = [0] * len(spans)
        self.nodes = 0
        self.pages = 0
        self.states = 0
        self.host_pages = 0
        self.host_states = 0
        self._owed: list[Action] = []
        # A depth-first walk, suspended: each node with the children that have to stay.
        self._frames: list[tuple[Node, dict[bytes, Node]]] = []
        self._released: list[Node] = []
        self._remains: Remains = []  # to be let go of a little at a time

    @property
    def unfinished(self) -> bool:
        """True while `sweep` has something to do."""
        return bool(self._frames or self._released or self._owed or self._remains)

    def take_over(self, radix: Radix, host: HostTier | None) -> None:
        """Take all that a generation which has just ended holds; both start empty."""
        if host is not None:
            self.host_pages += host.pages
            self.host_states += host.states
            self.let_go(host.clear())
        self.nodes += radix.nodes
        self.pages += radix.pages
        self.states += radix.states
        for number, pages in enumerate(radix.span_pages):
            self.span_pages[number] += pages
        self._frames.extend((root, {}) for root in radix.detach_roots())

    def let_go(self, remains: Remains) -> None:
        """Let go of these together with the nodes, of which there are hardly fewer."""
        self._remains.extend(filter(None, remains))

    def owe(self, actions: list[Action]) -> None:
        """Carry these out with the next part that is taken apart."""
        self._owed.extend(actions)

    def released(self, anchor: Node) -> None:
        """A lease of a former generation has ended at `anchor`."""
        self._released.append(anchor)

    def sweep(self, limit: int) -> list[Action]:
        """Take apart up to `limit` nodes; their slots go back by action."""
        freed = _Freed(self._spans)
        frames = self._frames
        for known in self._remains:
            for _ in range(min(limit, len(known))):
                known.popitem()
        while frames and limit > 0:
            limit -= 1
            self._step(frames, freed)
        while not frames and self._released and limit > 0:
            limit -= 1
            self._upwards(self._released.pop(), freed)
        actions, self._owed = self._owed, []
        actions.extend(freed.actions())
        if not frames:
            self._remains.clear()
        return actions

    def _step(self, frames: list[tuple[Node, dict[bytes, Node]]], freed: _Freed) -> None:
        node, kept = frames[-1]
        if node.children:
            first, child = node.children.popitem()
            if child.children:
                frames.append((child, {}))
            elif protected(child):
                kept[first] = child
            else:
                self._take_apart(child, freed)
            return
        node.children, node.only = kept or None, None  # nobody walks here any more
        frames.pop()
        if node.parent is None:
            return
        if kept or protected(node):
            frames[-1][1][node.edge[: self._page_bytes]] = node
        else:
            self._take_apart(node, freed)

    def _upwards(self, node: Node, freed: _Freed) -> None:
        """A former lease has ended: its path goes as far as nobody needs it."""
        while node.parent is not None and node.children is None and not protected(node):
            parent = node.parent
            assert parent.children is not None
            del parent.children[node.edge[: self._page_bytes]]
            if not parent.children:
                parent.children = None
            self._take_apart(node, freed)
            node = parent

    def _take_apart(self, node: Node, freed: _Freed) -> None:
        self.nodes -= 1
        self.pages -= node.page_count
        freed.pages.frombytes(node.page_ids)
        if node.state != NO_SLOT:
            self.states -= 1
            freed.states.append(node.state)
        for span, pages in freed.spans:
            held = span.held(node)
            self.span_pages[span.number] -= len(held)
            pages.extend(held)
        part = node.host
        if part is not None:
            self.host_pages -= len(part.page_ids) // ID_BYTES
            freed.host_pages.frombytes(part.page_ids)
            if part.state != NO_SLOT:
                self.host_states -= 1
                freed.host_states.append(part.state)
        node.parent = None
        node.children = None
