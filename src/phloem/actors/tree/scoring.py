"""What an eviction policy is: the scores by which data go, and what it is told.

A policy gives a node's KV and its state a score each; the smallest goes first, ties by node id
(age). A score may depend only on the node and on integers, never on clocks, randomness or hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from phloem.actors.tree.node import Node, Walk

if TYPE_CHECKING:
    from phloem.actors.tree.tree import Tree

__all__ = ["KEEP", "SCORE_BYTES", "STAMP_BITS", "Policy", "Score", "Visit", "Watched"]

Score = int  # not negative, of at most so many bytes
SCORE_BYTES = 24
KEEP: Score = 2 ** (8 * SCORE_BYTES) - 1  # no candidate: goes only when room is asked for by kind
STAMP_BITS = 64  # left for a stamp below a class of scores


class Visit(NamedTuple):
    """A request that opens: where its key leads, before anything is changed for it.

    `base` is the last node on the way, the root if there is none, None without a root. The key is
    looked up as far as `stop` bytes. `now` is the tree's count of uses.
    """

    walk: Walk
    base: Node | None
    data: bytes
    stop: int
    now: int


class Watched(Protocol):
    """What a policy may know of the tree it is for, and ask of it."""

    page_size: int
    shared: bool
    """Pages and states come from one memory."""

    def held(self) -> tuple[int, int]:
        """Pages and states on the device."""
        ...

    def twin(self, policy: Policy) -> Tree:
        """An empty tree like this one, without a host tier, under another policy."""
        ...

    def rescore(self) -> None:
        """Score all candidates anew; what is cached stays."""
        ...


class Policy:
    """Least recently used first; the base of the others.

    `rises_only`: while nobody touches a node its score never falls. Where it may fall, an entry
    keeps its score until the next touch, or until its turn has come to be scored anew, so that such
    data go somewhat later than scored. `time` is the latest message's, set by the tree. `bits`: how
    many a score has at most.
    `apart`: a leaf's state goes without its KV and its KV page by page, not the leaf as a whole.
    `by_shape`: scores of states depend on how many children a node has; they may fall when it loses
    one.
    `learns`: it is told of visits, of what comes to rest and of what is lost.
    """

    name = "lru"
    rises_only = True
    apart = False
    by_shape = False
    learns = False
    bits = 2 * STAMP_BITS  # a score has no more
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

    def serve(self, page_bytes: int, state_weight: int, now: int, /) -> None:
        """Told of the tree it is for.

        `page_bytes` of a key are a page. One state weighs as much as the KV of `state_weight`
        tokens; 0: there are no states. `now` is the tree's count of uses.
        """

    def attach(self, tree: Watched, /) -> None:
        """Told, after `serve`, which tree it is for, if it wants to know more of it."""

    def shadows(self) -> Iterable[Tree]:
        """Trees of its own, which an audit looks at, too; their pages and states are nowhere."""
        return ()

    def visited(self, visit: Visit, /) -> int:
        """Told of each request that opens, if it `learns`.

        Returns which turn of a conversation it is: how many requests in a row went on from one
        another.
        """
        del visit
        return 0

    def rested(self, node: Node, now: int, /) -> None:
        """Told of each node, if it `learns`, when a lease that was anchored there ends."""

    def lost(self, leaf: Node, place: int, now: int, /) -> None:
        """Told of each leaf that goes for good, if it `learns`.

        `place` is the mark of the prefix up to the end of its first page.
        """

    def forget(self) -> None:
        """Told when all data have gone at once."""

    def evicted(self, score: Score, now: int, /) -> None:
        """Told of each victim's score; `now` is the tree's count of uses."""

    def tick(self, time: int, /) -> None:
        """Told of the time whenever it has changed."""
        self.time = time
