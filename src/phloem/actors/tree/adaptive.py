"""The policy that follows whichever of some others does best on a sample of the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from phloem.actors.tree.node import Node
from phloem.actors.tree.scoring import Policy, Score, Visit, Watched
from phloem.actors.tree.shadows import Shadows

if TYPE_CHECKING:
    from phloem.actors.tree.tree import Tree

__all__ = ["Adaptive"]

_PAUSE = 32  # sampled requests between two changes
_BETTER = 1.1  # another must have saved so much more than the first, to be followed instead


class Adaptive(Policy):
    """The first of `kinds`, or for a while another that does clearly better.

    Each is served a sample of the requests in a small tree of its own (`Shadows`). When another has
    saved clearly more than the first lately, it decides, until it has saved less. What is cached
    stays, and the candidates are scored anew little by little. Those that learn do so all the time.
    """

    name = "adaptive"
    rises_only = False
    by_shape = True
    learns = True

    def __init__(self, kinds: Sequence[Callable[[], Policy]]) -> None:
        self._kinds = kinds
        self.policies = [kind() for kind in kinds]
        self.followed = self.policies[0]
        self.bits = max(policy.bits for policy in self.policies)
        self._learning = [policy for policy in self.policies if policy.learns]
        self._tree: Watched | None = None
        self._shadows: Shadows | None = None
        self._changed_at = 0

    def attach(self, tree: Watched, /) -> None:
        """The shadows are like this tree."""
        self._tree = tree
        self._shadows = Shadows(tree, self._kinds)
        self._changed_at = 0

    def shadows(self) -> Iterable[Tree]:
        """Those of the policies that it may follow."""
        return () if self._shadows is None else self._shadows.trees

    def serve(self, page_bytes: int, state_weight: int, now: int, /) -> None:
        """Hand on to all."""
        for policy in self.policies:
            policy.serve(page_bytes, state_weight, now)

    def kv_score(self, node: Node, /) -> Score:
        """As the policy that is followed."""
        return self.followed.kv_score(node)

    def state_score(self, node: Node, /) -> Score:
        """As the policy that is followed."""
        return self.followed.state_score(node)

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """As the policy that is followed."""
        return self.followed.span_score(node, stamp)

    def visited(self, visit: Visit, /) -> int:
        """Learn, and perhaps follow another from now on."""
        turn = max((policy.visited(visit) for policy in self._learning), default=0)
        shadows = self._shadows
        if shadows is not None and shadows.visited(visit):
            self._choose(shadows)
        return turn

    def _choose(self, shadows: Shadows) -> None:
        if shadows.sampled < self._changed_at + _PAUSE:
            return
        saved = shadows.saved
        best = self.policies[saved.index(max(saved))]
        if max(saved) <= _BETTER * saved[0]:
            best = self.policies[0]
            if saved[self.policies.index(self.followed)] >= saved[0]:
                return  # no worse, as long as it is not clear which is the best
        if best is not self.followed:
            self.followed = best
            self._changed_at = shadows.sampled
            if self._tree is not None:
                self._tree.rescore()

    def rested(self, node: Node, now: int, /) -> None:
        """Hand on to those that learn."""
        for policy in self._learning:
            policy.rested(node, now)

    def lost(self, leaf: Node, place: int, now: int, /) -> None:
        """Hand on to those that learn."""
        for policy in self._learning:
            policy.lost(leaf, place, now)

    def forget(self) -> None:
        """All data have gone; the shadows' too."""
        for policy in self._learning:
            policy.forget()
        if self._tree is not None:
            self.attach(self._tree)

    def evicted(self, score: Score, now: int, /) -> None:
        """Hand on to all."""
        for policy in self.policies:
            policy.evicted(score, now)
        if self._shadows is not None:
            self._shadows.evicted()

    def tick(self, time: int, /) -> None:
        """Hand on to all."""
        self.time = time
        for policy in self.policies:
            policy.tick(time)
