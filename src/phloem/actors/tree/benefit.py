"""The policy that keeps what will probably save the most work for its bytes."""

from __future__ import annotations

from collections import deque
from math import sqrt
from typing import TypeAlias
from zlib import crc32

from phloem.actors.tree.ghosts import mark_after, mark_of
from phloem.actors.tree.keys import TOKEN_BYTES
from phloem.actors.tree.node import NO_MARK, NO_SLOT, Node, state_anywhere
from phloem.actors.tree.returns import Returns
from phloem.actors.tree.scoring import Policy, Score, Visit

__all__ = ["Benefit"]

_UNIT = float(1 << 64)
_WALK_MAX = 64  # nodes looked at for the nearest state above; the farthest counts otherwise
_LEARN_EVERY = 64  # visits
_GONE_MAX = 4096
_INNER_MEMORY = 200  # visits over which the share of those is averaged that leave others' ways
_DEPARTURES_MAX = 32  # that count at one node
_EXPECTED = 0.3  # departures that what is expected of a node weighs as much as
_KINDS = 5  # of turns: the first, the second, the next two, the next four, later ones


_LATER = 1 << (_KINDS - 2)  # turns from here on are of the last kind
_KIND_OF = [turn.bit_length() for turn in range(_LATER)]


def _kind(turn: int) -> int:
    """The kind of what a request of that turn leaves."""
    return min(turn.bit_length(), _KINDS - 1)


# A leaf that was evicted, to be recognised: its place, the mark of the prefix up to the end of its
# first page; how long it was, the checksum of its last page, and the mark of the prefix up to its
# end, if that was known; its turn; when it began to rest, 0: it did not.
_Gone: TypeAlias = tuple[int, int, int, int, int, int]


class Benefit(Policy):
    """Expected tokens saved for each use and each token of KV that the data weigh.

    The chance of a return is learned for the conversation's turn and the age (`Returns`), from
    what is cached and from what was evicted lately. Of a leaf that comes back, the tokens since
    the nearest state above it are saved. The state of an inner node is used only when a request
    leaves the way that others took; how often that happens is learned, too: for each node by itself
    as soon as it has happened there.
    """

    name = "benefit"
    rises_only = False
    by_shape = True
    learns = True

    def __init__(self) -> None:
        self._returns = Returns(_KINDS)
        self._rates = self._returns.rates
        self._gone: dict[int, _Gone] = {}  # by place
        self._gone_in_order: deque[_Gone] = deque()  # those, and some that do not count any more
        self._now = 0
        self._visits = 0
        self._inner = 0.3  # share of the requests that leave others' ways
        self._inner_weight = sqrt(self._inner)
        self._page_bytes = TOKEN_BYTES
        self._state_weight = 0

    def serve(self, page_bytes: int, state_weight: int, now: int, /) -> None:
        """See `EvictionPolicy.serve`: sets the sizes that scores are reckoned by, and the time."""
        self._page_bytes, self._state_weight, self._now = page_bytes, state_weight, now

    # -- scores --------------------------------------------------------------------------------

    def kv_score(self, node: Node, /) -> Score:
        """The score of a leaf with its state.

        KV below which no state is left saves nothing. In a model without states all KV saves.
        """
        weight = self._state_weight
        if not weight:
            return int(self._rate(node, node.stamp) * _UNIT)
        if not node.state and not state_anywhere(node):
            return 0
        above = node.parent
        if above is not None and above.state:  # as mostly
            saved = alone = node.end - above.end
        else:
            saved, alone = self._spans(node)
        turn, age = node.turn, self._now - node.stamp  # `_rate`, once more: all wait for this
        rates = self._rates[_KIND_OF[turn] if turn < _LATER else _KINDS - 1]
        rate = rates[age.bit_length() if age > 0 else 0]
        return int(rate * saved / (alone + weight) * _UNIT)

    def state_score(self, node: Node, /) -> Score:
        """The score of a state; for a leaf that of the whole, since its KV goes with the state."""
        if node.children is None:
            return self.kv_score(node)
        saved, _ = self._spans(node)
        rate = self._rate(node, node.state_stamp) * self._inner_weight * len(node.children)
        if node.departures:
            rate = self._rate_seen(node, rate)
        return int(rate * saved / max(self._state_weight, 1) * _UNIT)

    def span_score(self, node: Node, stamp: int, /) -> Score:
        """The score of a span: it is needed whenever the state is, so only the rate counts."""
        return int(self._rate(node, stamp) * _UNIT)

    def _rate(self, node: Node, stamp: int) -> float:
        """The learned rate of return of what a node has, used last at `stamp`."""
        turn = node.turn
        age = self._now - stamp
        rates = self._rates[_KIND_OF[turn] if turn < _LATER else _KINDS - 1]
        return rates[age.bit_length() if age > 0 else 0]

    def _rate_seen(self, node: Node, expected: float) -> float:
        """How often requests leave others' ways at a node, by how often they did so far.

        The mean of a gamma distribution of rates, which before the first was at what was expected.
        """
        span = max(self._now - node.departures_since, 0)
        return (node.departures + _EXPECTED) * expected / (span * expected + _EXPECTED)

    def _spans(self, node: Node) -> tuple[int, int]:
        """Tokens since the nearest state above, and tokens of KV that nothing else needs."""
        above = node.parent
        alone: int | None = None
        for _ in range(_WALK_MAX):
            if above is None or above.parent is None or above.state != NO_SLOT:
                break
            if alone is None and above.children is not None and len(above.children) > 1:
                alone = node.end - above.end
            above = above.parent
        saved = node.end - (above.end if above is not None else 0)
        return saved, saved if alone is None else alone

    # -- what it learns from -------------------------------------------------------------------

    def evicted(self, score: Score, now: int, /) -> None:
        """Ages count to here."""
        del score
        self._now = now

    def visited(self, visit: Visit, /) -> int:
        """Whether what rested has come back; the turn of a conversation that this is."""
        walk, self._now = visit.walk, visit.now
        inside = walk.partial if walk.inside else None
        last = inside or visit.base
        reached, turn = walk.offset + walk.inside, -1
        if last is not None and reached:
            turn = last.turn
            leaves = inside is not None or (last.children is not None and len(last.children) == 1)
            self._inner += (leaves - self._inner) / _INNER_MEMORY
            if inside is None and last.children is not None:
                self._departs(last, visit.now)
            if inside is None or 2 * walk.inside >= len(inside.edge):
                self._comes_back(last, visit.stop - reached < self._page_bytes, visit.now)
        found = self._find_gone(visit, reached)
        if found is not None:
            reached, turn = found
        self._visits += 1
        if self._visits % _LEARN_EVERY == 0:
            self._returns.learn(visit.now)
            self._inner_weight = sqrt(self._inner)
        return turn + 1 if 2 * reached > visit.stop else 0

    def _departs(self, node: Node, now: int) -> None:
        """A request leaves others' ways at an inner node; what is long past counts less and less.

        The first to come that way was there when the node's data were first cached.
        """
        if not node.departures:
            node.departures_since = node.born
        node.departures += 1
        if node.departures > _DEPARTURES_MAX:
            node.departures //= 2
            node.departures_since += (now - node.departures_since) // 2

    def _comes_back(self, node: Node, looked_up_all: bool, now: int) -> None:
        """A request goes on from `node`, or is the one again whose last page is below it."""
        if looked_up_all and not node.rests and node.children is not None:
            node = next(iter(node.children.values()))
        if node.rests:
            self._returns.ended(_kind(node.turn), node.rests, now, returned=True)
            node.rests = 0

    def rested(self, node: Node, now: int, /) -> None:
        """A leaf begins to rest."""
        self._now = now
        if node.children is None and node.parent is not None and not node.rests:
            node.rests = now
            self._returns.rests(_kind(node.turn))

    def lost(self, leaf: Node, place: int, now: int, /) -> None:
        """Remember an evicted leaf for a while: that it is asked for again counts as a return."""
        edge, gone, in_order = leaf.edge, self._gone, self._gone_in_order
        last_page = crc32(edge[-self._page_bytes :])
        latest = place, len(edge), last_page, leaf.mark, leaf.turn, leaf.rests
        former = gone.setdefault(place, latest)
        if former is not latest:
            self._give_up(gone.pop(place), now)
            gone[place] = latest
        in_order.append(latest)
        if len(gone) > _GONE_MAX:
            while True:
                former = in_order.popleft()
                if gone.get(former[0]) is former:
                    break
            del gone[former[0]]
            self._give_up(former, now)
        elif len(in_order) > 2 * _GONE_MAX:
            self._gone_in_order = deque(gone.values())

    def forget(self) -> None:
        """Forget what rests and what was evicted; the learned rates stay."""
        self._gone.clear()
        self._gone_in_order.clear()
        self._returns.forget_resting()

    def _give_up(self, gone: _Gone, now: int) -> None:
        """Count an evicted leaf, remembered until now, as one that did not return."""
        *_, turn, since = gone
        if since:
            self._returns.ended(_kind(turn), since, now, returned=False)

    def _find_gone(self, visit: Visit, reached: int) -> tuple[int, int] | None:
        """How far the key leads through evicted leaves, and the turn of the last; None: nowhere.

        All of the key counts, looked up or not: a prompt that is asked again is the same.
        """
        walk, base, data = visit.walk, visit.base, visit.data
        if base is None or not self._gone:
            return None
        mark, size = mark_of(base), self._page_bytes
        if walk.partial is not None and walk.inside:
            mark = mark_after(mark, walk.partial.edge[: walk.inside])
        found: _Gone | None = None
        while reached < len(data):
            place = mark_after(mark, data[reached : reached + size])
            gone = self._gone.get(place)
            if gone is None:
                break
            _, length, last_page, after, _, _ = gone
            end = reached + length
            if end > len(data) or crc32(data[end - size : end]) != last_page:
                break
            del self._gone[place]
            if found is not None:
                self._give_up(found, visit.now)
            found = gone
            mark = after if after != NO_MARK else mark_after(mark, data[reached:end])
            reached = end
        if found is None:
            return None
        *_, turn, since = found
        if since:
            self._returns.ended(_kind(turn), since, visit.now, returned=True)
        return reached, turn
