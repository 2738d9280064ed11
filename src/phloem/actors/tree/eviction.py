"""Which node goes next: candidate indexes kept up to date by every change.

An index is a queue of entries `(score, node id)`. A score is fixed when its own node is touched; an
entry that is popped while its node's score has risen is put back, one whose node is no candidate
any more is dropped. A node has one entry (its `queued` flag), or more when its score was lowered,
so an index costs O(log n) for each change and nothing grows with the number of leaves.

A list of a million entries would cost the garbage collector a pause at each full collection. So
only the entries that go soon are Python objects, in a heap; the others lie in sorted runs of plain
bytes, and nodes are found by id in a dictionary of numbers and nodes, neither of which it visits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from struct import Struct

from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import SCORE_BYTES, Score

__all__ = ["CandidateIndex"]

_ENTRIES, _SLACK = 3, 64  # an index is swept when it has so many for each live one, and these
_REFRESHED = 1 << 13  # so many, through the candidates there are, are scored anew for each victim
_REFRESHED_MIN, _REFRESHED_MAX = 1, 32
_REFRESHED_FEW = _REFRESHED // _REFRESHED_MIN
_PACKED = Struct(f">{SCORE_BYTES}sQ")  # score, node id
_ENTRY = _PACKED.size

_Entry = tuple[Score, int]


class _Run:
    """A sorted run of entries, packed, read from the front."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._at = 0
        self._data = data

    def next(self) -> _Entry | None:
        """Take the smallest entry out; None when there is none."""
        at = self._at
        middle, end = at + SCORE_BYTES, at + _ENTRY
        if end > len(self._data):
            return None
        self._at = end
        score = int.from_bytes(self._data[at:middle], "big")
        return score, int.from_bytes(self._data[middle:end], "big")

    def left(self) -> Iterator[tuple[bytes, int]]:
        """The entries that are left, scores packed; they stay."""
        packed: Iterator[tuple[bytes, int]] = _PACKED.iter_unpack(self._data[self._at :])
        return packed


def _pack(entries: Iterable[_Entry]) -> bytes:
    return b"".join(
        score.to_bytes(SCORE_BYTES, "big") + number.to_bytes(8, "big") for score, number in entries
    )


class CandidateIndex:
    """The candidates of one kind of data, smallest score first.

    `bit` is the index's own bit in `Node.queued`. `eligible` says whether a node's data may go now.
    """

    run_size = 2048  # entries of a run when it is made

    def __init__(
        self, bit: int, score: Callable[[Node], Score], eligible: Callable[[Node], bool]
    ) -> None:
        self.bit = bit
        self.score = score
        self.eligible = eligible
        self._expiring: list[tuple[int, int, Node]] = []
        self.clear()

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return self._size

    def __contains__(self, number: int) -> bool:
        """Whether the node of that id has an entry."""
        return number in self._nodes

    def push(self, node: Node) -> None:
        """Note that `node` has become a candidate."""
        if not node.queued & self.bit:
            node.queued |= self.bit
            self._nodes[node.id] = node
            self._enter(self.score(node), node.id)
            if node.keep_until:
                self.watch(node)

    def pop(self) -> tuple[Score, Node] | None:
        """Take out the candidate with the smallest score, or None when there is none."""
        nodes, score, eligible, scores = self._nodes, self.score, self.eligible, self._scores
        while (entry := self._next()) is not None:
            noted, number = entry
            if scores.get(number) != noted:
                continue
            node = nodes[number]
            if not eligible(node):
                self._forget(node)
            elif (now := score(node)) > noted:
                self._enter(now, number)
            else:
                self._forget(node)
                return noted, node
        return None

    def first(self, below: Score | None = None) -> tuple[Score, Node] | None:
        """What `pop` would take out next, if its score is `below` that; it stays."""
        nodes, score, eligible, scores = self._nodes, self.score, self.eligible, self._scores
        while (entry := self._soonest()) is not None:
            noted, number = entry
            if below is not None and noted >= below:
                return None
            node = nodes.get(number)
            counts = node is not None and noted == scores[number]
            if node is not None and counts and eligible(node) and score(node) <= noted:
                return noted, node
            self._next()
            if node is not None and counts:
                if eligible(node):
                    self._enter(score(node), number)
                else:
                    self._forget(node)
        return None

    def take(self, node: Node) -> None:
        """Take out what `first` has just answered."""
        _, number = self._next() or (0, 0)
        assert number == node.id, "something came between"
        self._forget(node)

    def lower(self, node: Node) -> None:
        """The score of `node` may have fallen: then its former entry will be passed over."""
        if node.queued & self.bit:
            score = self.score(node)
            if score < self._scores[node.id]:
                self._enter(score, node.id)

    def refresh(self) -> None:
        """Score some candidates anew, round after round: time alone may have lowered them.

        The more, the fewer there are: each one that goes is then a larger part of them.
        """
        nodes, scores, order = self._nodes, self._scores, self._round
        there = len(nodes)
        often = _REFRESHED_MIN if there > _REFRESHED_FEW else _REFRESHED // (there + 1)
        for _ in range(min(often, there, _REFRESHED_MAX)):
            if not order:
                order.extend(nodes)
            number = order.pop()
            node = nodes.get(number)
            if node is None:
                continue
            if not self.eligible(node):
                self._forget(node)
                continue
            score = self.score(node)
            if score < scores[number]:
                self._enter(score, number)

    def watch(self, node: Node) -> None:
        """The score of `node` may fall when its `keep_until` has come."""
        heappush(self._expiring, (node.keep_until, node.id, node))

    def expire(self, time: int) -> None:
        """Lower the nodes whose `keep_until` has come."""
        expiring = self._expiring
        while expiring and expiring[0][0] <= time:
            self.lower(heappop(expiring)[2])

    def shrink(self, live: int) -> None:
        """Sweep one run when far more entries are dead than alive; `live` bounds the candidates."""
        if self._size > _ENTRIES * live + _SLACK:
            self._sweep()
        if len(self._expiring) > 2 * live + _SLACK:
            self._expiring = [
                (node.keep_until, node.id, node) for node in self._nodes.values() if node.keep_until
            ]
            heapify(self._expiring)

    def rebuild(self) -> None:
        """Score every candidate anew: the policy has changed."""
        nodes = list(self._nodes.values())
        self.clear()
        for node in nodes:
            node.queued &= ~self.bit
            if self.eligible(node):
                self.push(node)

    def clear(self) -> None:
        """Forget everything: the tree was reset."""
        self._expiring.clear()
        self._nodes: dict[int, Node] = {}
        self._scores: dict[int, Score] = {}  # of the one entry of each node that counts
        self._round: list[int] = []
        self._soon: list[_Entry] = []  # a heap
        self._heads: list[tuple[Score, int, int]] = []  # a heap: the next entry of each run
        self._runs: dict[int, _Run] = {}
        self._next_run = 0
        self._size = 0

    def entries(self) -> Iterator[tuple[Score, Node]]:
        """Every entry whose node is known, in no order; for audits."""
        numbers = [*self._soon, *(head[:2] for head in self._heads)]
        for run in self._runs.values():
            numbers.extend((int.from_bytes(score, "big"), number) for score, number in run.left())
        for score, number in numbers:
            if number in self._nodes:
                yield score, self._nodes[number]

    def _enter(self, score: Score, number: int) -> None:
        self._scores[number] = score
        soon = self._soon
        heappush(soon, (score, number))
        self._size += 1
        if len(soon) >= 2 * self.run_size:
            soon.sort()
            self._add_run(_pack(soon[self.run_size :]))
            del soon[self.run_size :]

    def _soonest(self) -> _Entry | None:
        """The smallest entry; it stays."""
        soon, heads = self._soon, self._heads
        if soon and (not heads or soon[0] < heads[0]):
            return soon[0]
        return heads[0][:2] if heads else None

    def _next(self) -> _Entry | None:
        """Take the smallest entry out."""
        soon, heads = self._soon, self._heads
        if soon and (not heads or soon[0] < heads[0]):
            self._size -= 1
            return heappop(soon)
        if not heads:
            return None
        self._size -= 1
        score, number, run = heads[0]
        following = self._runs[run].next()
        if following is None:
            heappop(heads)
            del self._runs[run]
        else:
            heapreplace(heads, (*following, run))
        return score, number

    def _add_run(self, data: bytes) -> None:
        """A run of sorted entries, packed."""
        run = _Run(data)
        first = run.next()
        if first is not None:
            self._next_run += 1
            self._runs[self._next_run] = run
            heappush(self._heads, (*first, self._next_run))

    def _forget(self, node: Node) -> None:
        node.queued &= ~self.bit
        del self._nodes[node.id]
        del self._scores[node.id]

    def _sweep(self) -> None:
        """Drop the dead entries of the oldest run, or of the heap when there is none."""
        if not self._runs:
            kept = [entry for entry in self._soon if self._lives(*entry)]
            heapify(kept)
            self._size += len(kept) - len(self._soon)
            self._soon = kept
            return
        number = next(iter(self._runs))
        (head,) = [head for head in self._heads if head[2] == number]
        self._heads.remove(head)
        heapify(self._heads)
        packed = [(head[0].to_bytes(SCORE_BYTES, "big"), head[1]), *self._runs.pop(number).left()]
        data = b"".join(
            score + number.to_bytes(8, "big")
            for score, number in packed
            if number in self._nodes and self._lives(int.from_bytes(score, "big"), number)
        )
        self._size += len(data) // _ENTRY - len(packed)
        self._add_run(data)

    def _lives(self, score: Score, number: int) -> bool:
        """Whether an entry counts; a node that is no candidate any more is forgotten."""
        node = self._nodes.get(number)
        if node is None or self._scores[number] != score:
            return False
        if self.eligible(node):
            return True
        self._forget(node)
        return False
