"""Which node goes next: candidate indexes kept up to date by every change.

An index is a queue of entries: a score, and behind it in the same whole number a node's id, so that
the smallest number goes first. A score is fixed when its own node is touched; an entry that is
popped while its node's score has risen is put back, one whose node is no candidate any more is
dropped. A node has one entry (its `queued` flag), or more when its score was lowered, so an index
costs O(log n) for each change and nothing grows with the number of leaves.

A list of a million entries would cost the garbage collector a pause at each full collection. So
only the entries that go soon are Python objects, in a heap; the others lie in sorted runs of plain
bytes, and nodes are found by id in a dictionary of numbers and nodes, neither of which it visits.

When the policy changes, no former entry counts. To score all candidates anew at once would take a
second in a large tree, so only some are, those first that became candidates first; the next victims
are chosen among these, and with each of them more are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import KEEP, SCORE_BYTES, Score

__all__ = ["CandidateIndex", "Remains"]

_ENTRIES, _SLACK = 3, 64  # an index is swept when it has so many for each live one, and these
_REFRESHED = 1 << 13  # so many, through the candidates there are, are scored anew for each victim
_REFRESHED_MIN, _REFRESHED_MAX = 1, 32
_REFRESHED_FEW = _REFRESHED // _REFRESHED_MIN
_ID_BITS = 64
_ID = (1 << _ID_BITS) - 1
_ENTRY = SCORE_BYTES + _ID_BITS // 8

Remains = list[dict[int, Node] | dict[int, int]]  # of candidates, by node id


class _Run:
    """A sorted run of entries, packed, read from the front."""

    __slots__ = ("_at", "_data")

    def __init__(self, entries: Iterable[int]) -> None:
        self._at = 0
        self._data = b"".join(entry.to_bytes(_ENTRY, "big") for entry in entries)

    def next(self) -> int | None:
        """Take the smallest entry out; None when there is none."""
        at, data = self._at, self._data
        if at == len(data):
            return None
        self._at = end = at + _ENTRY
        return int.from_bytes(data[at:end], "big")

    def left(self) -> Iterator[int]:
        """The entries that are left; they stay."""
        data = self._data
        for at in range(self._at, len(data), _ENTRY):
            yield int.from_bytes(data[at : at + _ENTRY], "big")


class CandidateIndex:
    """The candidates of one kind of data, smallest score first.

    `bit` is the index's own bit in `Node.queued`. `eligible` says whether a node's data may go now.
    """

    run_size = 2048  # entries of a run when it is made
    scored_at_once = 512  # when the policy changes; so many more with each victim and eviction:
    scored_a_victim = 32

    def __init__(
        self, bit: int, score: Callable[[Node], Score], eligible: Callable[[Node], bool]
    ) -> None:
        self.bit = bit
        self.score = score
        self.eligible = eligible
        self._expiring: list[tuple[int, int, Node]] = []
        self._nodes: dict[int, Node] = {}
        self._entries: dict[int, int] = {}  # the one of each node that counts
        self.clear()

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return self._size

    def __contains__(self, number: int) -> bool:
        """Whether the node of that id is noted as a candidate."""
        return number in self._nodes

    def push(self, node: Node) -> None:
        """Note that `node` has become a candidate."""
        if not node.queued & self.bit:
            node.queued |= self.bit
            number = node.id
            self._nodes[number] = node
            self._enter(self.score(node), number)
            if node.keep_until:
                self.watch(node)

    def pop(self) -> tuple[Score, Node] | None:
        """Take out the candidate with the smallest score, or None when there is none."""
        first = self.first()
        if first is not None:
            self.take(first)
        return first

    def first(self, below: Score | None = None) -> tuple[Score, Node] | None:
        """What `pop` would take out, if its score is `below` that; it stays."""
        entries, soon, heads = self._entries, self._soon, self._heads
        while True:
            if soon and (not heads or soon[0] <= heads[0][0]):
                entry = soon[0]
            elif heads:
                entry = heads[0][0]
            elif self._unscored:
                self._score_some(self.scored_a_victim)
                continue
            else:
                return None
            noted = entry >> _ID_BITS
            if below is not None and noted >= below:
                return None
            if noted == KEEP and self._unscored:
                self._score_some(self.scored_a_victim)
                continue
            number = entry & _ID
            if entries.get(number) == entry:
                node = self._nodes[number]
                if not self.eligible(node):
                    self._forget(node)
                elif (score := self.score(node)) <= noted:
                    return noted, node
                else:
                    self._next()
                    self._enter(score, number)
                    continue
            self._next()

    def take(self, first: tuple[Score, Node]) -> None:
        """Take out what `first` has just answered."""
        _, node = first
        number = self._next() & _ID
        assert number == node.id, "something came between"
        self._forget(node)
        if self._unscored:
            self._score_some(self.scored_a_victim)

    def lower(self, node: Node) -> None:
        """The score of `node` may have fallen: then its former entry will be passed over."""
        if node.queued & self.bit:
            self._score_anew(node)

    def refresh(self) -> None:
        """Score some candidates anew, round after round: time alone may have lowered them.

        The more, the fewer there are: each one that goes is then a larger part of them.
        """
        nodes, order = self._nodes, self._round
        there = len(nodes)
        count = _REFRESHED_MIN
        if there <= _REFRESHED_FEW:
            count = min(_REFRESHED // (there + 1), there, _REFRESHED_MAX)
        for _ in range(count):
            if not order:
                order.extend(nodes)
            number = order.pop()
            node = nodes.get(number)
            if node is None:
                continue
            if not self.eligible(node):
                self._forget(node)
                continue
            self._score_anew(node)

    def watch(self, node: Node) -> None:
        """The score of `node` may fall when its `keep_until` has come.

        One that is no candidate yet need not be remembered: `push` watches it again.
        """
        heappush(self._expiring, (node.keep_until, node.id, node))
        if len(self._expiring) > 2 * len(self._nodes) + _SLACK:
            self._watch_candidates()

    def expire(self, time: int) -> None:
        """Lower the nodes whose `keep_until` has come."""
        expiring = self._expiring
        while expiring and expiring[0][0] <= time:
            self.lower(heappop(expiring)[2])

    def shrink(self, live: int) -> None:
        """An eviction has ended: sweep one run when far more entries are dead than alive.

        `live` bounds the candidates. Since the policy changed some are scored, whether or not a
        victim was one of them.
        """
        if self._unscored:
            self._score_some(self.scored_a_victim)
        if self._size > _ENTRIES * live + _SLACK:
            self._sweep()
        if len(self._expiring) > 2 * live + _SLACK:
            self._watch_candidates()

    def rescore(self, score: Callable[[Node], Score]) -> None:
        """The policy has changed: score some candidates anew, and the others with the victims."""
        self.score = score
        self._forget_order()
        self._unscored.extend(reversed(self._nodes))
        self._score_some(self.scored_at_once)

    def rebuild(self) -> None:
        """Score every candidate anew at once."""
        self.rescore(self.score)
        self._score_some(len(self._unscored))

    def clear(self) -> Remains:
        """Forget everything: the tree was reset. To let go of what is returned takes long."""
        remains: Remains = [self._nodes, self._entries]
        self._expiring.clear()
        self._nodes, self._entries = {}, {}
        self._forget_order()
        return remains

    def _forget_order(self) -> None:
        self._unscored: list[int] = []  # nodes whose entries may be of a former policy
        self._round: list[int] = []
        self._soon: list[int] = []  # a heap
        self._heads: list[tuple[int, int]] = []  # a heap: the next entry of each run
        self._runs: dict[int, _Run] = {}
        self._next_run = 0
        self._size = 0

    def entries(self) -> Iterator[tuple[Score, Node]]:
        """Every entry whose node is known, in no order; for audits."""
        entries = [*self._soon, *(entry for entry, _ in self._heads)]
        for run in self._runs.values():
            entries.extend(run.left())
        for entry in entries:
            node = self._nodes.get(entry & _ID)
            if node is not None:
                yield entry >> _ID_BITS, node

    def _score_some(self, count: int) -> None:
        """Up to so many nodes get entries by the policy that there is now."""
        nodes, unscored = self._nodes, self._unscored
        for _ in range(min(count, len(unscored))):
            number = unscored.pop()
            node = nodes.get(number)
            if node is None:
                continue
            if self.eligible(node):
                self._enter(self.score(node), number)
            else:
                self._forget(node)

    def _score_anew(self, node: Node) -> None:
        """The score of a node may have fallen, or may be of a former policy."""
        score, number = self.score(node), node.id
        if score < self._entries[number] >> _ID_BITS or self._unscored:
            self._enter(score, number)

    def _enter(self, score: Score, number: int) -> None:
        soon = self._soon
        entry = self._entries[number] = score << _ID_BITS | number
        heappush(soon, entry)
        self._size += 1
        if len(soon) >= 2 * self.run_size:
            soon.sort()
            self._add_run(_Run(soon[self.run_size :]))
            del soon[self.run_size :]

    def _watch_candidates(self) -> None:
        """Watch each candidate once, and nothing else."""
        self._expiring = [
            (node.keep_until, node.id, node) for node in self._nodes.values() if node.keep_until
        ]
        heapify(self._expiring)

    def _next(self) -> int:
        """Take the smallest entry out; there is one."""
        soon, heads = self._soon, self._heads
        self._size -= 1
        if soon and (not heads or soon[0] <= heads[0][0]):
            return heappop(soon)
        entry, run = heads[0]
        following = self._runs[run].next()
        if following is None:
            heappop(heads)
            del self._runs[run]
        else:
            heapreplace(heads, (following, run))
        return entry

    def _add_run(self, run: _Run) -> None:
        first = run.next()
        if first is not None:
            self._next_run += 1
            self._runs[self._next_run] = run
            heappush(self._heads, (first, self._next_run))

    def _forget(self, node: Node) -> None:
        number = node.id
        node.queued &= ~self.bit
        del self._nodes[number], self._entries[number]

    def _sweep(self) -> None:
        """Drop the dead entries of the oldest run, or of the heap when there is none."""
        if not self._runs:
            soon = self._soon
            self._size -= len(soon)
            soon[:] = self._living(soon)
            heapify(soon)
            self._size += len(soon)
            return
        number = next(iter(self._runs))
        (head,) = [head for head in self._heads if head[1] == number]
        self._heads.remove(head)
        heapify(self._heads)
        had = [head[0], *self._runs.pop(number).left()]
        kept = self._living(had)
        self._size += len(kept) - len(had)
        self._add_run(_Run(kept))

    def _living(self, had: Iterable[int]) -> list[int]:
        """The entries that count; a node that is no candidate any more is forgotten."""
        nodes, entries, eligible, kept = self._nodes, self._entries, self.eligible, list[int]()
        for entry in had:
            number = entry & _ID
            if entries.get(number) == entry:
                node = nodes[number]
                if eligible(node):
                    kept.append(entry)
                else:
                    self._forget(node)
        return kept
