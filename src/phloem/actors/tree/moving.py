"""Pages that move: the same data in another place of the same memory.

Only what nobody uses moves: the page tables of requests name pages of nodes that they protect. The
tree protects what is being copied, names the new places when the copy has ended, and looks again
then: what somebody has come to use in between keeps its old ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cached_property

from phloem.actors.actions import Ids
from phloem.actors.tree.keys import TokenKey
from phloem.actors.tree.leases import Lease, protected
from phloem.actors.tree.loading import LoadingTree
from phloem.actors.tree.node import Node

__all__ = ["MovingTree"]

_NO_KEY = TokenKey(b"")


class MovingTree(LoadingTree):
    """A tree whose device pages can be moved, once `track_pages` was called."""

    @cached_property
    def _holds(self) -> dict[int, list[Lease]]:
        """By operation: the leases that protect the pages that it copies."""
        return {}

    def track_pages(self, count: int) -> None:
        """Note from now on which node holds which of the pages below `count`; before any insert."""
        assert not self.radix.nodes, "the tree holds pages already"
        self.radix.track_pages(count)

    def movable(self, pages: Ids) -> bool:
        """Whether nobody uses any of these pages of the tree."""
        holders = self.radix.holders
        assert holders is not None
        self.leases.settle()
        seen: set[int] = set()
        for page in pages:
            node = holders[page]
            if node is None or (node.id not in seen and not _is_idle(node)):
                return False
            seen.add(node.id)
        return True

    def begin_move(self, number: int, pages: Ids) -> None:
        """Operation `number` is going to copy these pages, which are `movable`, to others."""
        holders = self.radix.holders
        assert holders is not None and number not in self._holds
        nodes = {node.id: node for page in pages if (node := holders[page]) is not None}
        self._holds[number] = [
            self.leases.take(node, _NO_KEY, f"op {number}", self.generation, with_state=False)
            for node in nodes.values()
        ]

    def end_move(self, number: int, pages: Ids, to: Ids, *, ok: bool) -> Ids:
        """The copy has ended; if it is `ok`, the data of `pages[i]` are in `to[i]`, too.

        Returns the indices of the pages whose nodes name the others from now on: all that nobody
        has come to use.
        """
        holds = self._holds.pop(number)
        former = False
        for lease in holds:
            former = lease.generation != self.generation
            self.leases.end(lease, 0, former=former)
            if former:
                self.former.released(lease.anchor)
        return self._relocate(pages, to) if ok and not former else array("i")

    def _relocate(self, pages: Ids, to: Ids) -> Ids:
        holders = self.radix.holders
        assert holders is not None and len(pages) == len(to)
        self.leases.settle()
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
            ids[at[page]] = to[number]
            moved.append(number)
        for node, ids, _ in runs.values():
            self.radix.rename_pages(node, ids)
        return moved

    def holds(self) -> Iterator[Lease]:
        """The leases of operations, by which nobody but they reads anything."""
        yield from (one.hold for one in self.operations if one.hold is not None)
        for leases in self._holds.values():
            yield from leases

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
