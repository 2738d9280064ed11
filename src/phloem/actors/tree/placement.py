"""Where states are worth keeping.

A state weighs as much as hundreds or thousands of tokens of KV, so where to keep one is decided
when a request opens, not afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from phloem.errors import InvalidRequest

__all__ = ["Placement", "Wanted", "Why", "choose_positions", "end_of_prompt"]

Why = Literal["branch", "end_of_prompt", "breakpoint"]
_WORTH: dict[Why, int] = {"breakpoint": 0, "branch": 1, "end_of_prompt": 2}


class Wanted(NamedTuple):
    """A grid position at which a state is worth keeping, and why."""

    position: int
    why: Why


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which positions are wanted.

    `branch`: where known KV outlives the usable prefix, or where another request that still runs
    takes another way. `end_of_prompt`: the deepest position that an identical prompt can use.
    `budget`: at most so many for each request, a caller's breakpoints first, then branches.
    `max_states_per_path`: after an insert, shallow states beyond so many on its path go; None: all
    stay.
    """

    branch: bool = True
    end_of_prompt: bool = True
    budget: int = 8
    max_states_per_path: int | None = None

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise InvalidRequest(f"the budget of wanted positions is {self.budget}, below 0")
        if self.max_states_per_path is not None and self.max_states_per_path < 1:
            raise InvalidRequest(
                f"max_states_per_path is {self.max_states_per_path}; None keeps all, else 1 or more"
            )


def end_of_prompt(length: int, grid: int) -> int:
    """The largest grid position at or below `length - 1`, since one token is always computed."""
    return max(length - 1, 0) // grid * grid


def choose_positions(
    placement: Placement,
    *,
    length: int,
    usable: int,
    branch_point: int | None,
    breakpoints: Sequence[int],
    grid: int,
) -> list[Wanted]:
    """The wanted positions of a request in ascending order, all beyond `usable`.

    Breakpoints are moved down to the grid. Where two reasons meet, the stronger one is kept.
    """
    candidates: list[Wanted] = [Wanted(at // grid * grid, "breakpoint") for at in breakpoints]
    if placement.branch and branch_point is not None:
        candidates.append(Wanted(branch_point, "branch"))
    if placement.end_of_prompt:
        candidates.append(Wanted(end_of_prompt(length, grid), "end_of_prompt"))
    return within_budget((c for c in candidates if usable < c.position), placement.budget)


def within_budget(candidates: Iterable[Wanted], budget: int) -> list[Wanted]:
    """The strongest `budget` candidates, one for each position, in ascending order."""
    by_worth = sorted(candidates, key=lambda wanted: (_WORTH[wanted.why], -wanted.position))
    chosen: dict[int, Wanted] = {}
    for wanted in by_worth:
        if len(chosen) < budget:
            chosen.setdefault(wanted.position, wanted)
    return sorted(chosen.values())
