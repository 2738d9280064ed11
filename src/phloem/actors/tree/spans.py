"""What the tree does with spans: the components that are pages along a part of an edge."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.actors.actions import TREE, FreeDeviceSlots, Ids
from phloem.actors.tree.components import SpanComponent
from phloem.actors.tree.core import Actions, TreeCore
from phloem.actors.tree.node import ID_BYTES, Node

__all__ = ["SpanTree"]


class SpanTree(TreeCore):
    """A tree that takes pages of spans from inserts, and gives them up."""

    def _offer_spans(
        self, node: Node, spans: Sequence[Ids], owner: int, actions: Actions
    ) -> tuple[Ids, ...]:
        """Offer pages of each span component for the last tokens up to `node`'s end.

        Returns those that the tree took. What it has already goes back to `owner` (0: stays the
        caller's).
        """
        return tuple(
            self._offer_span(node, span, pages, owner, actions)
            for span, pages in zip(self.spans, spans, strict=False)
        )

    def _offer_span(
        self, node: Node, span: SpanComponent, pages: Ids, owner: int, actions: Actions
    ) -> Ids:
        """In a tree with states, what lies further back than the boundary needs goes back, too.

        No boundary will ever come there: it would need a state within the edge.
        """
        number, page_size = span.number, self.page_size
        needed = span.needs_from(node.end)
        taken, back = pages[:0], pages[:0]
        if self.has_states:
            far = max(0, len(pages) - (node.end - needed) // page_size)
            back, pages = pages[:far], pages[far:]
        while node.parent is not None and (pages or node.end > needed):
            own = node.spans[number]
            begin = max(0, len(pages) - (node.end - node.parent.end) // page_size)
            missing = max(0, len(pages) - begin - len(own.page_ids) // ID_BYTES)
            new, rest = pages[begin : begin + missing], pages[begin + missing :]
            if new:
                self.radix.put_span(node, span, new)
                self.leases.span_appeared(node, number, len(new))
                taken = new + taken
            own.stamp = self.now
            back += rest
            pages = pages[:begin]
            node = node.parent
        if back and owner:
            actions.append(FreeDeviceSlots(span.name, back, owner))
        return taken

    def _lose_span(self, node: Node, span: SpanComponent, count: int, actions: Actions) -> None:
        """A node loses up to `count` pages of a span component, the foremost; the rest stays."""
        number = span.number
        count = min(count, len(node.spans[number].page_ids) // ID_BYTES)
        taken = self.radix.take_span(node, span, count)
        actions.append(FreeDeviceSlots(span.name, taken, TREE))
        if span.may_go(node):
            self.span_indexes[number].push(node)
            return
        parent = node.parent
        self.radix.merge_into_child(node)
        if parent is not None:
            self.radix.merge_into_child(parent)

    def _cut_spans(self, leaf: Node, count: int) -> Actions:
        """A leaf is about to lose its last `count` pages: what goes with them."""
        cuts = [(span, self.radix.cut_span(leaf, span.number, count)) for span in self.spans]
        return [FreeDeviceSlots(span.name, cut, TREE) for span, cut in cuts if cut]

    def _free_spans(self, leaf: Node, actions: Actions) -> None:
        """A leaf is about to go: what it has of spans goes with it."""
        for span in self.spans:
            if held := span.held(leaf):
                actions.append(FreeDeviceSlots(span.name, held, TREE))

    def _spans_lost_since(self, before: Sequence[int]) -> tuple[int, ...]:
        """How many pages of each span component have gone; the indexes are swept if need be."""
        held = self.radix.span_pages
        for index, pages in zip(self.span_indexes, held, strict=True):
            index.shrink(min(pages, self.radix.nodes))
        return tuple(had - has for had, has in zip(before, held, strict=True))
