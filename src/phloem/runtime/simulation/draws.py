"""The one source of randomness of a run, and the check that nothing else is random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, TypeVar

__all__ = ["Draw", "Draws", "NotDeterministic"]

Number = TypeVar("Number", int, float)


class Draw(NamedTuple):
    """One draw: which step of the loop asked, and what it got."""

    where: str
    value: float


class NotDeterministic(AssertionError):
    """Two runs of one seed drew differently: something outside the seed decides.

    Usual causes: the order of a set, `id()`, `hash()` of a string, real time, a thread, a
    finaliser. The message names the first draw that differs.
    """


class Draws(random.Random):
    """A generator that writes its draws down, or compares them with those of an earlier run."""

    def __init__(self, seed: int, *, expected: list[Draw] | None = None) -> None:
        self.drawn: list[Draw] = []
        self.where: Callable[[], str] = str
        self._expected = expected
        super().__init__(seed)

    def random(self) -> float:
        """See `random.Random.random`."""
        return self._note(super().random())

    def getrandbits(self, k: int, /) -> int:
        """See `random.Random.getrandbits`."""
        return self._note(super().getrandbits(k))

    def finish(self) -> None:
        """The run is over; raises `NotDeterministic` when the earlier one drew more."""
        if self._expected is not None and len(self._expected) > len(self.drawn):
            missing = self._expected[len(self.drawn)]
            raise NotDeterministic(
                f"draw {len(self.drawn) + 1} at {missing.where} was not made this time"
            )

    def _note(self, value: Number) -> Number:
        draw = Draw(self.where(), value)
        number = len(self.drawn)
        self.drawn.append(draw)
        if self._expected is not None and self._expected[number : number + 1] != [draw]:
            expected, self._expected = self._expected, None  # told once
            if number >= len(expected):
                raise NotDeterministic(f"draw {number + 1} at {draw.where} is new this time")
            first = expected[number]
            raise NotDeterministic(
                f"draw {number + 1} was {first.value} at {first.where}, "
                f"now {draw.value} at {draw.where}"
            )
        return value
