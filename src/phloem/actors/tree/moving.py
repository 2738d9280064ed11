"""Pages that move: the same data in another place of the same memory.

Only what nobody uses moves: the page tables of requests name pages of nodes that they protect. The
tree changes nothing while a copy is made, and looks again at its end: what has been leased or has
gone in between keeps its place.
"""

from __future__ import annotations

from array import array

from phloem.actors.actions import Ids
from phloem.actors.tree.leases import protected
from phloem.actors.tree.loading import LoadingTree
from phloem.actors.tree.node import Node

__all__ = ["MovingTree"]


class MovingTree(LoadingTree):
    """A tree whose device pages can be moved, once `track_pages` was called."""

    def track_pages(self, count: int) -> None:
        """Note from now on which node holds which of the pages below `count`; before any insert."""
        assert not self.radix.nodes, "the tree holds pages already"
        self.radix.track_pages(count)

    def movable(self, pages: Ids) -> bool:
        """Whether nobody uses any of these pages of the tree."""
        holders = self.radix.holders
        assert holders is not None
        seen: set[int] = set()
        for page in pages:
            node = holders[page]
            if node is None or (node.id not in seen and not _is_idle(node)):
                return False
            seen.add(node.id)
        return True

    def relocate(self, pages: Ids, to: Ids) -> Ids:
        """The data of `pages[i]` are in `to[i]`, too: name those instead, where nobody uses them.

        Returns the indices of the pages that were replaced; the others stay what they are.
        """
        holders = self.radix.holders
        assert holders is not None and len(pages) == len(to)
        moved: Ids = array("i")
        runs: dict[int, tuple[Node, Ids, dict[int, int]]] = {}
        for number, page in enumerate(pages):
            node = holders[page]
            if node is None or not _is_idle(node):
                continue
            if node.id not in runs:
                ids = node.pages
                runs[node.id] = node, ids, {place: at for at, place in enumerate(ids)}
            _, ids, at = runs[node.id]
            if page in at:
                ids[at[page]] = to[number]
                moved.append(number)
        for node, ids, _ in runs.values():
            self.radix.rename_pages(node, ids)
        return moved

    def reset(self) -> None:
        """See `SheddingTree.reset`: what a former generation holds does not move."""
        super().reset()
        if self.radix.holders is not None:
            self.radix.track_pages(len(self.radix.holders))


def _is_idle(node: Node) -> bool:
    """Whether a node of the tree is not leased, and no copy between the tiers reads its pages."""
    part = node.host
    copied = part is not None and (part.kv_backup or part.kv_load or part.leaving)
    return node.parent is not None and not protected(node) and not copied
