"""The order in which data goes: eviction policies.

A policy gives a node's KV and its state a score each; the smallest goes first, ties by node id
(age). A score may depend only on the node and on integers, never on clocks, randomness or hashes.
Changing the policy of a tree keeps its content: only the candidates are scored anew.
"""

from __future__ import annotations

from bisect import bisect_right

from phloem.actors.tree.node import NO_SLOT, Node
from phloem.errors import InvalidRequest

__all__ = [
    "POLICY_NAMES",
    "BenefitPerByte",
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
]

Score = int  # not negative, of at most so many bytes
SCORE_BYTES = 24
KEEP: Score = 2 ** (8 * SCORE_BYTES) - 1  # no candidate: goes only when room is asked for by kind
_STAMP_BITS = 64  # left for a stamp below a class of scores


class Policy:
    """Least recently used first; the base of the others.

    `rises_only`: while nobody touches a node its score never falls. Where it may fall, an entry
    keeps the score of the last touch, so that such data go somewhat later than scored. `time` is
    the latest message's, set by the tree. `bits`: how many a score has at most.
    `apart`: a leaf's state goes without its KV and its KV page by page, not the leaf as a whole.
    `by_shape`: scores of states depend on how many children a node has; they may fall when it loses
    one.
    """

    name = "lru"
    rises_only = True
    apart = False
    by_shape = False
    bits = 2 * _STAMP_BITS  # a score has no more
    time = 0

    def kv_score(self, node: Node, /) -> Score:
        """The score of a node's KV."""
        return node.stamp

    def state_score(self, node: Node, /) -> Score:
        """The score of a node's state."""
        return node.state_stamp

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """The score of a node's part of a span component, which was used last at `stamp`."""
        del node
        return stamp

    def evicted(self, score: Score, now: int, /) -> None:
        """Told of each victim's score; `now` is the tree's count of uses."""

    def tick(self, time: int, /) -> None:
        """Told of the time whenever it has changed."""
        self.time = time


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
        return node.hits << _STAMP_BITS | node.stamp

    def state_score(self, node: Node, /) -> Score:
        """Hits of the node, then the state's recency."""
        return node.hits << _STAMP_BITS | node.state_stamp

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """Hits of the node, then the span's recency."""
        return node.hits << _STAMP_BITS | stamp


class Slru(Policy):
    """Segmented: what was used once goes before what was used `twice` times or more."""

    name = "slru"

    def __init__(self, twice: int = 2) -> None:
        self.twice = twice

    def kv_score(self, node: Node, /) -> Score:
        """The segment, then recency."""
        return (node.hits >= self.twice) << _STAMP_BITS | node.stamp

    def state_score(self, node: Node, /) -> Score:
        """The segment of the node, then the state's recency."""
        return (node.hits >= self.twice) << _STAMP_BITS | node.state_stamp

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """The segment of the node, then the span's recency."""
        return (node.hits >= self.twice) << _STAMP_BITS | stamp


class _First(Policy):
    """A class of its own before another policy's score."""

    class_bits = 0

    def __init__(self, within: Policy | None = None) -> None:
        self.within = within or Lru()
        self.rises_only = self.within.rises_only
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


class BenefitPerByte(Policy):
    """Tokens saved for each unit of memory, with ageing.

    A score is the age of the cache at the last touch plus the benefit: the tokens between a state
    and the nearest one above it, divided by what the data weigh, in tokens of KV. The age is the
    score of the last victim, so what is not used again is overtaken by newcomers in the end.
    `state_weight`: how many tokens of KV weigh as much as one state.
    """

    name = "benefit"
    rises_only = False

    _UNIT = 1 << 16
    _WALK_MAX = 16  # nodes looked at for the nearest state above; the farthest counts otherwise
    _AGES_MAX = 4096

    def __init__(self, state_weight: int = 1024) -> None:
        if state_weight < 1:
            raise InvalidRequest(f"a state weighs {state_weight} tokens of KV; it starts at 1")
        self.state_weight = state_weight
        self._since = [0]  # from these stamps on ...
        self._ages = [0]  # ... the cache was so old

    def kv_score(self, node: Node, /) -> Score:
        """Of a leaf with its state, if any; KV without a state saves nothing by itself."""
        if node.state == NO_SLOT:
            return self._age(node.stamp)
        parent = node.parent
        edge = node.end - (parent.end if parent is not None else 0)
        benefit = self._saved(node) * self._UNIT // (edge + self.state_weight)
        return self._age(node.stamp) + benefit

    def state_score(self, node: Node, /) -> Score:
        """Of the state alone."""
        return self._age(node.state_stamp) + self._saved(node) * self._UNIT // self.state_weight

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """By age alone: what a span saves is counted with the node's state or KV."""
        del node
        return self._age(stamp)

    def evicted(self, score: Score, now: int, /) -> None:
        """The cache is as old as the best that it has had to give up."""
        if score <= self._ages[-1]:
            return
        if self._since[-1] == now:
            self._ages[-1] = score
            return
        self._since.append(now)
        self._ages.append(score)
        if len(self._ages) > self._AGES_MAX:
            half = self._AGES_MAX // 2
            del self._since[:half], self._ages[:half]

    def _age(self, stamp: int) -> int:
        at = bisect_right(self._since, stamp) - 1
        return self._ages[max(at, 0)]

    def _saved(self, node: Node) -> int:
        above = node.parent
        for _ in range(self._WALK_MAX):
            if above is None or above.parent is None or above.state != NO_SLOT:
                break
            above = above.parent
        return node.end - (above.end if above is not None else 0)


_NAMED: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Lru, Lfu, Slru, Fifo, PriorityFirst, SessionFirst, BenefitPerByte)
}


POLICY_NAMES: tuple[str, ...] = tuple(_NAMED)


def policy_named(name: str) -> Policy:
    """The policy called `name`; raises `InvalidRequest` for an unknown one."""
    kind = _NAMED.get(name)
    if kind is None:
        raise InvalidRequest(f"no eviction policy {name!r}; there are {', '.join(_NAMED)}")
    return kind()
