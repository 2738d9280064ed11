"""Where states are worth keeping.

A state weighs as much as hundreds or thousands of tokens of KV, so where to keep one is decided
when a request opens, not afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from phloem.errors import InvalidRequest

__all__ = [
    "Placement",
    "Refusal",
    "Refused",
    "Wanted",
    "Why",
    "choose_positions",
    "end_of_prompt",
    "end_of_response",
    "within_budget",
]

Why = Literal["breakpoint", "branch", "departure", "end_of_prompt", "end_of_response", "periodic"]
Refusal = Literal["off_grid", "exists", "budget", "no_slot", "low_benefit", "unsettled"]
_WORTH: dict[Why, int] = {
    "breakpoint": 0,
    "branch": 1,
    "departure": 2,
    "end_of_prompt": 3,
    "end_of_response": 4,
    "periodic": 5,
}


class Wanted(NamedTuple):
    """A grid position at which a state is worth keeping, and why."""

    position: int
    why: Why


class Refused(NamedTuple):
    """A position at which a state will not be kept, what would have asked for it, and why not."""

    position: int
    why: Why
    refusal: Refusal


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which positions are wanted.

    `branch`: where known KV outlives the usable prefix, or where another request that still runs
    takes another way. `end_of_prompt`: the deepest position that an identical prompt can use.
    `end_of_response`: the deepest that the working state has reached when the request finishes.
    `departures`: up to so many of the distances before a prompt's end at which requests have left
    the ways of others so far, where that saves enough; learned, so that the first to leave a way
    finds a state.
    `periodic`: every so many tokens of the prompt, moved up to the grid; None: not.
    `budget`: at most so many for each request, a caller's breakpoints first, then branches.
    `gain_min`: a state must save so many tokens beyond the one before it; breakpoints always may.
    `max_states_per_path`: after an insert, shallow states beyond so many on its path go; None: all
    stay.
    """

    branch: bool = True
    end_of_prompt: bool = True
    end_of_response: bool = True
    departures: int = 2
    periodic: int | None = None
    budget: int = 8
    gain_min: int = 0
    max_states_per_path: int | None = None

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise InvalidRequest(f"the budget of wanted positions is {self.budget}, below 0")
        if self.departures < 0:
            raise InvalidRequest(f"departures is {self.departures}, below 0")
        if self.gain_min < 0:
            raise InvalidRequest(f"gain_min is {self.gain_min} tokens, below 0")
        if self.periodic is not None and self.periodic < 1:
            raise InvalidRequest(f"periodic is {self.periodic}; None wants none, else 1 or more")
        if self.max_states_per_path is not None and self.max_states_per_path < 1:
            raise InvalidRequest(
                f"max_states_per_path is {self.max_states_per_path}; None keeps all, else 1 or more"
            )


def end_of_prompt(length: int, grid: int) -> int:
    """The largest grid position at or below `length - 1`, since one token is always computed."""
    return max(length - 1, 0) // grid * grid


def end_of_response(reached: int, grid: int) -> int:
    """The largest grid position that a state which has reached `reached` has passed."""
    return reached // grid * grid


def choose_positions(
    placement: Placement,
    *,
    length: int,
    usable: int,
    branch_point: int | None,
    breakpoints: Sequence[int],
    grid: int,
    departures: Sequence[int] = (),
) -> tuple[list[Wanted], list[Refused]]:
    """The wanted positions of a request in ascending order, all beyond `usable`, and the others.

    `departures` are positions at which others will probably leave, the likeliest first.
    Breakpoints are moved down to the grid. Where two reasons meet, the stronger one is kept.
    """
    wanted: list[Wanted] = []
    refused: list[Refused] = []
    for candidate in _candidates(
        placement, length, usable, branch_point, breakpoints, departures, grid
    ):
        position, why = candidate
        if any(position == chosen.position for chosen in wanted):
            continue
        if position <= usable:
            if why == "breakpoint":
                refused.append(Refused(position, why, "exists"))
        elif (
            placement.gain_min
            and why != "breakpoint"
            and _gain(candidate, wanted, usable) < (placement.gain_min)
        ):
            refused.append(Refused(position, why, "low_benefit"))
        elif len(wanted) >= placement.budget:
            refused.append(Refused(position, why, "budget"))
            if why == "periodic":
                break  # one stands for all that would follow
        else:
            wanted.append(candidate)
    wanted.sort()
    return wanted, refused


def _candidates(
    placement: Placement,
    length: int,
    usable: int,
    branch_point: int | None,
    breakpoints: Sequence[int],
    departures: Sequence[int],
    grid: int,
) -> Iterator[Wanted]:
    """All positions with a reason, the strongest reason first, within one the deepest first."""
    for at in sorted(breakpoints, reverse=True):
        yield Wanted(at // grid * grid, "breakpoint")
    if placement.branch and branch_point is not None:
        yield Wanted(branch_point, "branch")
    for at in departures:
        yield Wanted(at, "departure")
    if placement.end_of_prompt:
        yield Wanted(end_of_prompt(length, grid), "end_of_prompt")
    if placement.periodic is not None:
        step = -(-placement.periodic // grid) * grid
        for position in range(max(length - 1, 0) // step * step, usable, -step):
            yield Wanted(position, "periodic")


def _gain(candidate: Wanted, wanted: Iterable[Wanted], usable: int) -> int:
    """Tokens between a position and the nearest state below it, present or wanted."""
    below = [chosen.position for chosen in wanted if chosen.position < candidate.position]
    return candidate.position - max(below, default=usable)


def within_budget(candidates: Iterable[Wanted], budget: int) -> list[Wanted]:
    """The strongest `budget` candidates, one for each position, in ascending order."""
    by_worth = sorted(candidates, key=lambda wanted: (_WORTH[wanted.why], -wanted.position))
    chosen: dict[int, Wanted] = {}
    for wanted in by_worth:
        if len(chosen) < budget:
            chosen.setdefault(wanted.position, wanted)
    return sorted(chosen.values())
