"""The order in which data goes: eviction policies.

A policy gives a node's KV and its state a score each; the smallest goes first, ties by node id
(age). A score may depend only on the node and on integers, never on clocks, randomness or hashes.
Changing the policy of a tree keeps its content: only the candidates are scored anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from phloem.actors.tree.adaptive import Adaptive
from phloem.actors.tree.benefit import Benefit
from phloem.actors.tree.node import Node
from phloem.actors.tree.scoring import KEEP, SCORE_BYTES, STAMP_BITS, Policy, Score, Visit, Watched
from phloem.errors import InvalidRequest

if TYPE_CHECKING:
    from phloem.actors.tree.tree import Tree

__all__ = [
    "POLICY_NAMES",
    "Adaptive",
    "Benefit",
    "Fifo",
    "KEEP",
    "Lfu",
    "Lru",
    "Policy",
    "PriorityFirst",
    "SCORE_BYTES",
    "Score",
    "SessionFirst",
    "Slru",
    "policy_named",
    "policy_of",
]


class Lru(Policy):
    """Least recently used first."""


class Fifo(Policy):
    """First cached first; a state is as old as its node."""

    name = "fifo"

    def kv_score(self, node: Node, /) -> Score:
        """When the node's data were first cached."""
        return node.born

    state_score = kv_score

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """As old as the node."""
        del stamp
        return node.born


class Lfu(Policy):
    """Least often used first, among equals least recently."""

    name = "lfu"

    def kv_score(self, node: Node, /) -> Score:
        """Hits, then recency."""
        return node.hits << STAMP_BITS | node.stamp

    def state_score(self, node: Node, /) -> Score:
        """Hits of the node, then the state's recency."""
        return node.hits << STAMP_BITS | node.state_stamp

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """Hits of the node, then the span's recency."""
        return node.hits << STAMP_BITS | stamp


class Slru(Policy):
    """Segmented: what was used once goes before what was used `twice` times or more."""

    name = "slru"

    def __init__(self, twice: int = 2) -> None:
        self.twice = twice

    def kv_score(self, node: Node, /) -> Score:
        """The segment, then recency."""
        return (node.hits >= self.twice) << STAMP_BITS | node.stamp

    def state_score(self, node: Node, /) -> Score:
        """The segment of the node, then the state's recency."""
        return (node.hits >= self.twice) << STAMP_BITS | node.state_stamp

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """The segment of the node, then the span's recency."""
        return (node.hits >= self.twice) << STAMP_BITS | stamp


class _First(Policy):
    """A class of its own before another policy's score."""

    class_bits = 0

    def __init__(self, within: Policy | None = None) -> None:
        self.within = within or Lru()
        self.rises_only, self.learns = self.within.rises_only, self.within.learns
        self.apart, self.by_shape = self.within.apart, self.within.by_shape
        self.bits = self.within.bits + self.class_bits
        if self.bits > 8 * SCORE_BYTES:
            raise InvalidRequest(f"a score of {self.bits} bits; {8 * SCORE_BYTES} at most")

    def class_of(self, node: Node, /) -> int:
        """The class of a node, in `class_bits` bits."""
        raise NotImplementedError

    def kv_score(self, node: Node, /) -> Score:
        """The class, then the other policy's score."""
        return self.class_of(node) << self.within.bits | self.within.kv_score(node)

    def state_score(self, node: Node, /) -> Score:
        """The class, then the other policy's score."""
        return self.class_of(node) << self.within.bits | self.within.state_score(node)

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """The class, then the other policy's score."""
        return self.class_of(node) << self.within.bits | self.within.span_score(node, stamp)

    def serve(self, page_bytes: int, state_weight: int, now: int, /) -> None:
        """Hand on to the other policy."""
        self.within.serve(page_bytes, state_weight, now)

    def attach(self, tree: Watched, /) -> None:
        """Hand on to the other policy."""
        self.within.attach(tree)

    def shadows(self) -> Iterable[Tree]:
        """Those of the other policy."""
        return self.within.shadows()

    def visited(self, visit: Visit, /) -> int:
        """Hand on to the other policy."""
        return self.within.visited(visit)

    def rested(self, node: Node, now: int, /) -> None:
        """Hand on to the other policy."""
        self.within.rested(node, now)

    def lost(self, leaf: Node, place: int, now: int, /) -> None:
        """Hand on to the other policy."""
        self.within.lost(leaf, place, now)

    def forget(self) -> None:
        """Hand on to the other policy."""
        self.within.forget()

    def evicted(self, score: Score, now: int, /) -> None:
        """Hand on to the other policy."""
        self.within.evicted(score & ((1 << self.within.bits) - 1), now)

    def tick(self, time: int, /) -> None:
        """Hand on to the other policy."""
        self.time = time
        self.within.tick(time)


class PriorityFirst(_First):
    """The lowest priority (0 to 100) first, within one by another policy; soft and with an end."""

    name = "priority"
    class_bits = 7

    def class_of(self, node: Node, /) -> int:
        """The priority, as long as it lasts."""
        ended = 0 < node.keep_until <= self.time
        return 0 if ended else node.priority


class SessionFirst(_First):
    """What no open session stands on goes first, within that by another policy."""

    name = "session"
    class_bits = 1

    def class_of(self, node: Node, /) -> int:
        """Whether a session stands on the node."""
        return int(node.sessions > 0)


def _adaptive() -> Policy:
    return Adaptive([Benefit, Lru, Slru])


_NAMED: dict[str, Callable[[], Policy]] = {
    **{
        policy.name: policy
        for policy in (Lru, Lfu, Slru, Fifo, PriorityFirst, SessionFirst, Benefit)
    },
    Adaptive.name: _adaptive,
}


POLICY_NAMES: tuple[str, ...] = tuple(_NAMED)


def policy_of(policy: object) -> Policy:
    """A policy by its name, or one that was made. Raises `InvalidRequest` for anything else."""
    if isinstance(policy, str):
        return policy_named(policy)
    if isinstance(policy, Policy):
        return policy
    raise InvalidRequest(f"{policy!r} is neither the name of a policy nor an instance of Policy")


def policy_named(name: str) -> Policy:
    """The policy called `name`; raises `InvalidRequest` for an unknown one."""
    kind = _NAMED.get(name)
    if kind is None:
        raise InvalidRequest(f"no eviction policy {name!r}; there are {', '.join(_NAMED)}")
    return kind()
