"""Where requests leave the ways of others: learned, to keep a state there before anybody needs it.

A branch point is seen only when somebody leaves an existing way, too late for a state. But requests
of one kind often leave at the same distance before the end of an earlier prompt: a document with
another question, a conversation whose last message is asked again. So it is noted how far before
the end of the earlier prompt each request left, and what a state there would have saved.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["Departures"]

_KEPT = 32  # of the latest departures
_CHOOSE_EVERY = 16  # departures
_WORTH = 512  # a place has to save this share of a mean prompt for each request


class _Departure(NamedTuple):
    back: int  # tokens between the place and the end of the prompt that made the way
    saved: int  # tokens that a state there saves
    request: int  # at which request


class Departures:
    """The latest departures, and the distances before a prompt's end that are worth a state."""

    def __init__(self) -> None:
        self.backs: list[int] = []  # the best first
        self._latest: deque[_Departure] = deque(maxlen=_KEPT)
        self._requests = 0
        self._tokens = 0
        self._noted = 0

    def opened(self, tokens: int) -> None:
        """A request of so many tokens has opened."""
        self._requests += 1
        self._tokens += tokens

    def note(self, back: int, saved: int, places: int) -> None:
        """The latest request has left another's way; up to `places` distances are wanted."""
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
