"""Judicious trees under known policies, in the plainest way: to compare with, request by request.

A block's id stands for the whole prefix that it ends. So a node is the block at its end, with a
state there, and a tree is two tables: of nodes, and of the node whose edge each block lies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phloem.runtime.costs.model import Geometry


@dataclass
class Node:
    depth: int
    parent: int | None
    edge: list[int]
    children: int = 0
    used: int = 0  # the request that made it or started from it last
    uses: int = 0
    priority: float = 0.0


class Reference:
    """`serve` gives the hit of each request in blocks."""

    def __init__(
        self,
        geometry: Geometry,
        block: int,
        capacity: int,
        policy: Literal["judicious", "marconi", "gdsf"],
        alpha: float = 0.0,
    ) -> None:
        self.geometry, self.block, self.capacity = geometry, block, capacity
        self.policy, self.alpha = policy, alpha
        self.nodes: dict[int, Node] = {}
        self.on: dict[int, int] = {}
        self.bytes = 0
        self.age = 0.0
        self.request = 0

    def serve(self, ids: Sequence[int], matchable: int) -> int:
        self.request += 1
        known = next((at for at, one in enumerate(ids) if one not in self.on), len(ids))
        path = [one for one in ids[:known] if one in self.nodes]
        hit = max((one for one in path if self.nodes[one].depth <= matchable), default=None)
        if self.policy == "judicious":
            for one in path:
                self.nodes[one].used = self.request
        elif hit is not None:
            self.use(hit)
        found = 0 if hit is None else self.nodes[hit].depth
        self.insert(ids, known, path)
        return found

    def insert(self, ids: Sequence[int], known: int, path: list[int]) -> None:
        new, inside = ids[known:], known > 0 and ids[known - 1] not in self.nodes
        states = bool(new) + inside
        need = self.weight(len(new), states)
        if need > self.capacity:
            return
        kept = {*path, self.on[ids[known - 1]]} if inside else {*path}
        if not self.make_room(need, kept):
            return
        self.bytes += need
        above = ids[known - 1] if known else None
        if inside and above is not None:
            low = self.nodes[self.on[above]]
            cut = low.edge.index(above) + 1
            self.nodes[above] = Node(known, low.parent, low.edge[:cut], children=1)
            low.edge, low.parent = low.edge[cut:], above
            self.on.update(dict.fromkeys(self.nodes[above].edge, above))
        if new:
            if above is not None:
                self.nodes[above].children += 1
            self.nodes[ids[-1]] = Node(len(ids), above, [*new])
            self.on.update(dict.fromkeys(new, ids[-1]))
        if inside and above is not None:
            self.use(above)
        if new:
            self.use(ids[-1])

    def use(self, one: int) -> None:
        node = self.nodes[one]
        node.used, node.uses = self.request, node.uses + 1
        node.priority = self.age + node.uses * self.saved(node) / self.freed(node)

    def weight(self, blocks: int, states: int) -> int:
        kv, state = self.geometry.kv_bytes, self.geometry.state_bytes
        return blocks * self.block * kv + states * state

    def freed(self, node: Node) -> int:
        return self.weight(0 if node.children else len(node.edge), 1)

    def saved(self, node: Node) -> float:
        above = 0 if node.parent is None else self.nodes[node.parent].depth
        return self.geometry.flops(node.depth * self.block, above * self.block)

    def recency(self, node: Node) -> float:
        return 1 / (self.request - node.used + 1)

    def efficiency(self, node: Node) -> float:
        return self.saved(node) / self.weight(node.depth, 1)

    def candidates(self, kept: set[int]) -> list[int]:
        most = 0 if self.policy == "judicious" else 1
        return [
            one for one, node in self.nodes.items() if node.children <= most and one not in kept
        ]

    def make_room(self, need: int, kept: set[int]) -> bool:
        if self.bytes + need <= self.capacity:
            return True
        start = [self.nodes[one] for one in self.candidates(kept)]
        spans = [
            (min(values), max(values) - min(values) or 1.0)
            for values in (
                [self.recency(node) for node in start] or [0.0],
                [self.efficiency(node) for node in start] or [0.0],
            )
        ]
        scores: dict[int, float] = {}  # as they were when they were first asked for

        def score(one: int) -> tuple[float, int]:
            node = self.nodes[one]
            if self.policy == "judicious":
                return node.used, -node.depth
            if self.policy == "gdsf":
                return node.priority, node.children
            if one not in scores:
                (low, wide), (least, span) = spans
                recency = (self.recency(node) - low) / wide
                scores[one] = recency + self.alpha * (self.efficiency(node) - least) / span
            return max(0.0, scores[one]), node.children

        while self.bytes + need > self.capacity:
            victim = min(self.candidates(kept), key=score, default=None)
            if victim is None:
                return False
            self.age = max(self.age, self.nodes[victim].priority)
            self.remove(victim)
        return True

    def remove(self, one: int) -> None:
        node = self.nodes[one]
        self.bytes -= self.freed(node)
        del self.nodes[one]
        if not node.children:
            for block in node.edge:
                del self.on[block]
            if node.parent is not None:
                self.nodes[node.parent].children -= 1
            return
        child = next(other for other, below in self.nodes.items() if below.parent == one)
        self.nodes[child].edge[:0] = node.edge
        self.nodes[child].parent = node.parent
        self.on.update(dict.fromkeys(node.edge, child))
