"""Which node goes next: candidate indexes kept up to date by every change, and policies.

An index is a heap of `(score, node id, node)` with lazy entries. A score is fixed when its own node
is touched; an entry that is popped while its node's score has risen is put back, one whose node is
no candidate any more is dropped. Each node has at most one entry (its `queued` flag), so an index
costs O(log n) for each change and nothing grows with the number of leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from phloem.actors.tree.node import NO_SLOT, Node

__all__ = ["CandidateIndex", "Lru", "Policy", "Score", "kv_may_go", "policy_named", "state_may_go"]

Score = int
_SLACK = 64  # entries an index may keep beyond twice its live ones before it is rebuilt


class Policy(Protocol):
    """The order in which data goes: the smallest score first, ties by node id (age).

    A score may depend only on the node and on integers the tree keeps; it must not fall while the
    node is not touched.
    """

    name: str

    def kv_score(self, node: Node, /) -> Score:
        """The score of a node's KV."""
        ...

    def state_score(self, node: Node, /) -> Score:
        """The score of a node's state."""
        ...


class Lru:
    """Least recently used first."""

    name = "lru"

    def kv_score(self, node: Node, /) -> Score:
        """The latest use of any key through the node."""
        return node.stamp

    def state_score(self, node: Node, /) -> Score:
        """The latest use of the state itself."""
        return node.state_stamp


def policy_named(name: str) -> Policy:
    """The policy called `name`; raises `KeyError` for an unknown one."""
    return {"lru": Lru}[name]()


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

    def push(self, node: Node) -> None:
        """Note that `node` has become a candidate."""
        if not node.queued & self.bit:
            node.queued |= self.bit
            heappush(self.heap, (self.score(node), node.id, node))

    def pop(self) -> Node | None:
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
                return node
            node.queued &= ~self.bit
        return None

    def shrink(self, live: int) -> None:
        """Rebuild when more entries are dead than can be alive; `live` bounds the candidates."""
        if len(self.heap) > 2 * live + _SLACK:
            self.rebuild()

    def rebuild(self) -> None:
        """Score every entry anew and drop the dead ones."""
        kept: list[tuple[Score, int, Node]] = []
        for _, _, node in self.heap:
            if self.eligible(node):
                kept.append((self.score(node), node.id, node))
            else:
                node.queued &= ~self.bit
        heapify(kept)
        self.heap = kept


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
