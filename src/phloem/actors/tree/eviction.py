"""Which node goes next: candidate indexes kept up to date by every change.

An index is a heap of `(score, node id, node)` with lazy entries. A score is fixed when its own node
is touched; an entry that is popped while its node's score has risen is put back, one whose node is
no candidate any more is dropped. A node has one entry (its `queued` flag), or more when its score
was lowered, so an index costs O(log n) for each change and nothing grows with the number of leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.policies import Score

__all__ = ["CandidateIndex", "kv_may_go", "state_may_go"]

_SLACK = 64  # entries an index may keep beyond twice its live ones before it is rebuilt


class CandidateIndex:
    """The candidates of one kind of data, smallest score first.

    `bit` is the index's own bit in `Node.queued`. `eligible` says whether a node's data may go now.
    """

    def __init__(
        self, bit: int, score: Callable[[Node], Score], eligible: Callable[[Node], bool]
    ) -> None:
        self.bit = bit
        self.score = score
        self.eligible = eligible
        self.heap: list[tuple[Score, int, Node]] = []
        self._expiring: list[tuple[int, int, Node]] = []

    def push(self, node: Node) -> None:
        """Note that `node` has become a candidate."""
        if not node.queued & self.bit:
            node.queued |= self.bit
            heappush(self.heap, (self.score(node), node.id, node))
            if node.keep_until:
                self.watch(node)

    def pop(self) -> tuple[Score, Node] | None:
        """Take out the candidate with the smallest score, or None when there is none."""
        heap, score, eligible = self.heap, self.score, self.eligible
        while heap:
            noted, _, node = heappop(heap)
            if eligible(node):
                now = score(node)
                if now > noted:
                    heappush(heap, (now, node.id, node))
                    continue
                node.queued &= ~self.bit
                return noted, node
            node.queued &= ~self.bit
        return None

    def lower(self, node: Node) -> None:
        """The score of `node` has fallen. Its former entry is passed over when its turn comes."""
        if node.queued & self.bit:
            heappush(self.heap, (self.score(node), node.id, node))

    def watch(self, node: Node) -> None:
        """The score of `node` may fall when its `keep_until` has come."""
        heappush(self._expiring, (node.keep_until, node.id, node))

    def expire(self, time: int) -> None:
        """Lower the nodes whose `keep_until` has come."""
        expiring = self._expiring
        while expiring and expiring[0][0] <= time:
            self.lower(heappop(expiring)[2])

    def shrink(self, live: int) -> None:
        """Rebuild when more entries are dead than can be alive; `live` bounds the candidates."""
        if len(self.heap) > 2 * live + _SLACK or len(self._expiring) > 2 * live + _SLACK:
            self.rebuild()

    def rebuild(self) -> None:
        """Score every candidate anew, once, and drop the dead entries."""
        former = self.heap
        for _, _, node in former:
            node.queued &= ~self.bit
        self.heap, self._expiring = [], []
        for _, _, node in former:
            if not node.queued & self.bit and self.eligible(node):
                node.queued |= self.bit
                self.heap.append((self.score(node), node.id, node))
                if node.keep_until:
                    self._expiring.append((node.keep_until, node.id, node))
        heapify(self.heap)
        heapify(self._expiring)

    def clear(self) -> None:
        """Forget everything: the tree was reset."""
        self.heap, self._expiring = [], []


def kv_may_go(node: Node) -> bool:
    """True when the node's KV may go now: no protection, nothing below, still in the tree."""
    return (
        node.children is None
        and not node.leases
        and not node.protected_children
        and node.parent is not None
    )


def state_may_go(node: Node) -> bool:
    """True when the node's state may go now: no lease has taken it."""
    return node.state != NO_SLOT and not node.state_leases and node.parent is not None
