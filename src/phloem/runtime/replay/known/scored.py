"""Policies that score nodes by the FLOPs they save: Marconi's, and GreedyDual-Size-Frequency.

Both keep a judicious tree (each node has a state) and give up nodes with at most one child: a leaf
with its edge of KV, of an inner node the state, whose KV its child takes over.
"""

from __future__ import annotations

from collections.abc import Sequence

from phloem.actors.tree import Tree
from phloem.actors.tree.components import kv_may_go, state_may_go
from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import KEEP, Score
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.cache import ReplayCache, Watching
from phloem.runtime.replay.known.judicious import Judicious
from phloem.runtime.replay.requests import ReplayRequest
from phloem.runtime.replay.served import Decision

__all__ = ["ALPHAS", "Gdsf", "Marconi", "TunedMarconi"]

ALPHAS = (0.0, 0.1, 0.5, 2.0)
_UNIT = 1 << 60  # of Marconi's scores, which lie between 0 and 1 + alpha


class _OneChildAtMost(Watching):
    """Candidates are unprotected nodes with at most one child."""

    by_shape = True

    def __init__(self, geometry: Geometry, block_size: int) -> None:
        self.geometry = geometry
        self.block_size = block_size

    def score(self, node: Node) -> Score:
        """The score of a candidate; the lowest goes first."""
        raise NotImplementedError

    def kv_score(self, node: Node, /) -> Score:
        """The score of a leaf; among equals it goes before an inner node."""
        return self.score(node)

    def state_score(self, node: Node, /) -> Score:
        """The score of a state; for a leaf that of its KV, since they go together."""
        if node.children is not None and len(node.children) > 1:
            return KEEP
        return self.score(node)

    def flops_saved(self, node: Node) -> float:
        """FLOPs that the state at the node's end saves beyond those up to its parent's end."""
        above = node.parent.end if node.parent is not None else 0
        return self.geometry.flops(node.end * self.block_size, above * self.block_size)


class Marconi(_OneChildAtMost):
    """FLOP-aware eviction (arXiv 2411.19379): recency plus `alpha` times FLOPs saved for each byte.

    Both are scaled to 0..1 over the candidates when an eviction starts. Recency is one through the
    age in requests, counted from one, of the last that started from the node; bytes are of the
    whole prefix.
    """

    name = "marconi"

    def __init__(self, geometry: Geometry, block_size: int, alpha: float) -> None:
        super().__init__(geometry, block_size)
        self.alpha = alpha
        self._request = 0
        self._scores: dict[int, Score] = {}
        self._recency = self._efficiency = (0.0, 1.0)

    def before_eviction(self, tree: Tree, request: int) -> bool:
        """Scale by what the candidates are now."""
        self._request = request
        self._scores.clear()
        recency: list[float] = []
        efficiency: list[float] = []
        for node in tree.radix:
            one_child = node.children is not None and len(node.children) == 1
            if kv_may_go(node) or (one_child and state_may_go(node)):
                recency.append(self._recency_of(node))
                efficiency.append(self._efficiency_of(node))
        self._recency, self._efficiency = _span(recency), _span(efficiency)
        return True

    def score(self, node: Node) -> Score:
        """As scaled when the eviction started."""
        score = self._scores.get(node.id)
        if score is None:
            least, span = self._recency
            value = (self._recency_of(node) - least) / span
            if self.alpha:
                least, span = self._efficiency
                value += self.alpha * (self._efficiency_of(node) - least) / span
            score = self._scores[node.id] = max(0, round(value * _UNIT))
        return score

    def _recency_of(self, node: Node) -> float:
        return 1 / max(1, self._request - self.request_of(node.state_stamp) + 1)

    def _efficiency_of(self, node: Node) -> float:
        weight = self.geometry.state_bytes + self.geometry.kv_bytes * node.end * self.block_size
        return self.flops_saved(node) / weight


class TunedMarconi(ReplayCache):
    """Marconi with alpha 0 until five times the requests seen before the first eviction.

    Those requests are then replayed from empty with each alpha; it goes on with the one that saved
    most FLOPs.
    """

    def __init__(self, geometry: Geometry, block_size: int, capacity: int) -> None:
        self._bytes = capacity
        self._window: list[ReplayRequest] = []
        self._first: int | None = None
        self.alpha: float | None = None
        self._marconi = Marconi(geometry, block_size, 0.0)
        super().__init__(
            geometry,
            block_size,
            capacity=capacity,
            policy=self._marconi,
            admission=Judicious(),
        )

    def serve(self, request: ReplayRequest) -> Decision:
        """Tune once the window is over."""
        if self._first is None and self.totals.evictions:
            self._first = self.number
        if self.alpha is None:
            if self._first is not None and self.number >= 5 * self._first:
                self._tune()
            else:
                self._window.append(request)
        return super().serve(request)

    def _tune(self) -> None:
        saved: dict[float, float] = {}
        for alpha in ALPHAS:
            other = ReplayCache(
                self.geometry,
                self.block_size,
                capacity=self._bytes,
                policy=Marconi(self.geometry, self.block_size, alpha),
                admission=Judicious(),
            )
            for request in self._window:
                other.serve(request)
            saved[alpha] = other.totals.flops_saved
        self._window.clear()
        self.alpha = self._marconi.alpha = max(ALPHAS, key=lambda alpha: saved[alpha])


class Gdsf(_OneChildAtMost):
    """GreedyDual-Size-Frequency: age + frequency x FLOPs saved for each byte that goes.

    A priority is set when a node is made or a request starts from it; the age is the highest
    priority that had to go.
    """

    name = "gdsf"

    _UNIT = 1 << 20
    _SLACK = 1024

    def __init__(self, geometry: Geometry, block_size: int) -> None:
        super().__init__(geometry, block_size)
        self._age = 0
        self._known: dict[int, tuple[int, Score]] = {}  # by node: uses and priority

    def score(self, node: Node) -> Score:
        """The priority that was set last."""
        known = self._known.get(node.id)
        return known[1] if known is not None else self._age

    def made(self, node: Node) -> None:
        """The first use."""
        self._set(node, 1)

    def matched(self, node: Node) -> None:
        """One use more."""
        self._set(node, self._known.get(node.id, (0, 0))[0] + 1)

    def evicted(self, score: Score, now: int, /) -> None:
        """The age rises to what had to go."""
        del now
        self._age = max(self._age, score)

    def before_eviction(self, tree: Tree, request: int) -> bool:
        """Forget what has gone, now and then."""
        del request
        if len(self._known) > 2 * tree.radix.nodes + self._SLACK:
            live = {node.id for node in tree.radix}
            self._known = {at: known for at, known in self._known.items() if at in live}
        return False

    def _set(self, node: Node, uses: int) -> None:
        freed = self.geometry.state_bytes
        if node.children is None:
            freed += node.page_count * self.block_size * self.geometry.kv_bytes
        worth = uses * self.flops_saved(node) / freed
        self._known[node.id] = uses, self._age + round(worth * self._UNIT)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The least value and how far the largest is from it, never nothing."""
    least = min(values, default=0.0)
    return least, (max(values, default=0.0) - least) or 1.0
