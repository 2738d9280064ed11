"""How soon what rests is used again: learned from what has come back and what has not.

What rests has a kind. For each kind and age (in uses, by powers of two) it is counted how many came
back at that age, and how many uses long something has been of that age, whether it came back or
not. The first over the second is the chance of a return with the next use, the hazard. What is
worth keeping is told by the best ratio of both over any stretch of ages that begins at the present
one: the index of Gittins for a single return. It makes no assumption about the distribution of
returns: under heavy tails it falls with age, so that the least recently used goes first; for
sessions that all come back after a pause it rises, so that those which have waited longest stay.
"""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Returns"]

_AGES = 64  # powers of two that an age may reach
_STARTS = [0, *(1 << power for power in range(_AGES))]  # where each range of ages begins
_WIDTHS = [1, *(1 << power for power in range(_AGES))]
_ENDED_MAX = 4096  # of a kind; then all that was counted is halved
_EPOCHS_MAX = 64
# As if one more had been seen for ever, that came back this often at each range of ages: with
# nothing learned the least recently used goes first.
_PRIOR = 0.1


class _Kind:
    """Counts of one kind, by the range of ages (bit length) at which its items ended."""

    def __init__(self) -> None:
        self.returned = [0.0] * (_AGES + 1)
        self.ended = [0.0] * (_AGES + 1)  # came back or was given up at that age
        self.spent = [0.0] * (_AGES + 1)  # uses that those were of their last range of ages
        self.total = 0.0

    def end(self, age: int, returned: bool) -> None:
        """Count an item that came back (`returned`) or was given up at `age`, in uses."""
        at = age.bit_length() if age < _STARTS[-1] else _AGES
        self.ended[at] += 1
        self.spent[at] += age - _STARTS[at]
        if returned:
            self.returned[at] += 1
        self.total += 1
        if self.total > _ENDED_MAX:
            self.total /= 2
            for counts in (self.returned, self.ended, self.spent):
                counts[:] = [count / 2 for count in counts]


def _indexes(
    returned: list[float], ended: list[float], spent: list[float], top: int
) -> list[float]:
    """For each range of ages up to `top`, the best ratio of returns to uses from there on."""
    exposure = [0.0] * (top + 1)
    reaching = 1.0
    for at in range(top, -1, -1):
        exposure[at] = spent[at] + _WIDTHS[at] * reaching
        reaching += ended[at]
    indexes: list[float] = []
    for first in range(top + 1):
        best = hits = uses = 0.0
        for at in range(first, top + 1):
            hits += returned[at] + _PRIOR
            uses += exposure[at]
            if hits > best * uses:
                best = hits / uses
        indexes.append(best)
    return indexes


class Returns:
    """The rates of return of `kinds` kinds. What still rests is counted by when it began to.

    `rates` has them by kind and the age's bit length, for ages below 2**64.
    """

    def __init__(self, kinds: int) -> None:
        self._kinds = [_Kind() for _ in range(kinds)]
        nothing = [0.0] * (_AGES + 1)
        self.rates = [_indexes(nothing, nothing, nothing, _AGES)] * kinds
        self._since = [0]  # when each epoch began
        self._resting = [[0] * kinds]  # and how many of each kind have rested since then

    def rate(self, kind: int, age: int) -> float:
        """Expected returns for each use that an item of that kind and age is kept longer."""
        return self.rates[kind][min(age.bit_length(), _AGES)]

    def rests(self, kind: int) -> None:
        """Count an item of `kind` that begins to rest now."""
        self._resting[-1][kind] += 1

    def ended(self, kind: int, since: int, now: int, *, returned: bool) -> None:
        """Count an item that rested from `since` to `now`: it came back, or was given up."""
        epoch = bisect_right(self._since, since) - 1
        if epoch >= 0:
            resting = self._resting[epoch]
            if resting[kind]:
                resting[kind] -= 1
        self._kinds[kind].end(now - since if now > since else 0, returned)

    def learn(self, now: int) -> None:
        """Compute the rates anew; a new epoch begins."""
        top = min(now.bit_length(), _AGES)
        for number, kind in enumerate(self._kinds):
            ended, spent = kind.ended[:], kind.spent[:]
            for began, resting in zip(self._since, self._resting, strict=True):
                count = resting[number]
                if count:
                    age = now - began
                    at = min(age.bit_length(), _AGES)
                    ended[at] += count
                    spent[at] += count * (age - _STARTS[at])
            rates = _indexes(kind.returned, ended, spent, top)
            self.rates[number] = rates + rates[-1:] * (_AGES - top)
        self._since.append(now)
        self._resting.append([0] * len(self._kinds))
        if len(self._since) > _EPOCHS_MAX:
            self._join_epochs()

    def _join_epochs(self) -> None:
        """Join the older half of the epochs in pairs, so that their number stays bounded."""
        half = _EPOCHS_MAX // 2
        older = self._resting[:half]
        self._resting[:half] = [
            [first + second for first, second in zip(*pair, strict=True)]
            for pair in zip(older[::2], older[1::2], strict=True)
        ]
        self._since[:half] = self._since[:half:2]

    def forget_resting(self) -> None:
        """Forget all items that rest, which are gone; what was learned stays."""
        self._since, self._resting = self._since[-1:], [[0] * len(self._kinds)]
