"""Where requests leave the ways of others: learned, to keep a state there before anybody needs it.

A branch point is seen only when somebody leaves an existing way, too late for a state. But requests
of one kind often leave at the same distance before the end of an earlier prompt: a document with
another question, a conversation whose last message is asked again. So it is noted how far before
the end of the earlier prompt each request left, and what a state there would have saved.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from phloem.actors.tree.node import Walk, state_anywhere
from phloem.actors.tree.results import Match

__all__ = ["Departures"]

_KEPT = 32  # of the latest departures
_CHOOSE_EVERY = 16  # departures
_WORTH = 512  # a place has to save this share of a mean prompt for each request


class _Departure(NamedTuple):
    back: int  # tokens between the place and the end of the prompt that made the way
    saved: int  # tokens that a state there saves
    request: int  # at which request


def _boundary_before(walk: Walk, at: int) -> int:
    """Where the deepest state before `at` is on the way, 0 if there is none."""
    for node in reversed(walk.path):
        if node.end < at and state_anywhere(node):
            return node.end
    return 0


class Departures:
    """The latest departures, and the distances before a prompt's end that are worth a state."""

    def __init__(self) -> None:
        self.backs: list[int] = []  # the best first
        self._latest: deque[_Departure] = deque(maxlen=_KEPT)
        self._requests = 0
        self._tokens = 0
        self._noted = 0

    def ahead(self, prompt_end: int, known: int) -> list[int]:
        """Where others will probably leave the way of a prompt, beyond its `known` tokens."""
        return [prompt_end - back for back in self.backs if prompt_end - back > known]

    def visited(self, walk: Walk, match: Match, grid: int, places: int) -> None:
        """Learn from a request that opens, if it is the first to leave another's way at a point.

        Up to `places` distances are wanted. What a state saves begins at the nearest one above.
        """
        self._requests += 1
        self._tokens += match.looked_up
        last = walk.partial if walk.inside else (walk.path[-1] if walk.path else None)
        if last is None or (not walk.inside and (last.children is None or len(last.children) > 1)):
            return
        at = match.kv_prefix // grid * grid
        back = last.prompt_end - at
        saved = at - _boundary_before(walk, at)
        if saved > 0 and back >= 0:
            self._latest.append(_Departure(back, saved, self._requests))
            self._noted += 1
            if self._noted % _CHOOSE_EVERY == 0:
                self._choose(places)

    def _choose(self, places: int) -> None:
        """Take the distance that saves most, then the one that saves most beside it, and so on.

        A state further back than needed saves what is left of the way to it.
        """
        latest = self._latest
        requests = self._requests - latest[0].request + 1
        least = requests * self._tokens / self._requests / _WORTH
        saving = [0] * len(latest)
        self.backs = []
        for _ in range(places):
            best, best_gain, best_saving = 0, 0, saving
            for back in sorted({each.back for each in latest}):
                with_it = [
                    max(old, each.saved - (back - each.back)) if each.back <= back else old
                    for old, each in zip(saving, latest, strict=True)
                ]
                gain = sum(with_it) - sum(saving)
                if gain > best_gain:
                    best, best_gain, best_saving = back, gain, with_it
            if best_gain <= least:
                return
            self.backs.append(best)
            saving = best_saving
