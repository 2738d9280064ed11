"""Steps within a budget of time, a row for each, and JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

__all__ = ["Figures", "Outcome", "Row", "Skip", "Step", "failed", "run_steps", "write_json"]

Figures = dict[str, float | str]
Bed = TypeVar("Bed")


class Skip(Exception):
    """A step cannot be done here; says why."""


@dataclass
class Outcome:
    """What a step found: figures to read, and what is wrong."""

    figures: Figures = field(default_factory=dict[str, float | str])
    wrong: list[str] = field(default_factory=list[str])

    def expect(self, holds: bool, what: str) -> None:
        """Note `what` as wrong unless it holds."""
        if not holds:
            self.wrong.append(what)


@dataclass(frozen=True)
class Step(Generic[Bed]):
    """One step; `seconds` is what it is expected to take."""

    name: str
    seconds: float
    run: Callable[[Bed], Awaitable[Outcome]]


@dataclass(frozen=True)
class Row:
    """How a step went."""

    step: str
    status: Literal["ok", "failed", "skipped"]
    seconds: float
    figures: Figures
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = "  ".join(f"{name} {_short(value)}" for name, value in self.figures.items())
        notes = "".join(f"\n{'':10}{note}" for note in self.notes)
        return f"{self.status:8}{self.seconds:6.1f} s  {self.step:14}{shown}{notes}"


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_steps(
    steps: Sequence[Step[Bed]],
    bed: Bed,
    *,
    budget_s: float,
    clock: Callable[[], float],
    tell: Callable[[Row], None],
) -> list[Row]:
    """Run each step in a loop of its own, in order, as long as it can be expected to fit.

    A step that raises has failed, whatever it is for; one that takes four times as long as it
    should (and half a minute), or outlives the budget, is given up and has failed too.
    """
    begun, rows = clock(), list[Row]()
    for step in steps:
        started = clock()
        left = budget_s - (started - begun)
        if step.seconds > left:
            row = Row(step.name, "skipped", 0.0, {}, ("the time is spent",))
        else:
            row = replace(_run(step, bed, left), seconds=clock() - started)
        rows.append(row)
        tell(row)
    return rows


def _run(step: Step[Bed], bed: Bed, left: float) -> Row:
    async def within() -> Outcome:
        async with asyncio.timeout(min(left, max(30.0, 4 * step.seconds))):
            return await step.run(bed)

    try:
        outcome = asyncio.run(within())
    except Skip as why:
        return Row(step.name, "skipped", 0.0, {}, (str(why),))
    except Exception as error:  # noqa: BLE001  the other steps are still worth running
        return Row(step.name, "failed", 0.0, {}, (f"{type(error).__name__}: {error}",))
    status: Literal["ok", "failed"] = "failed" if outcome.wrong else "ok"
    return Row(step.name, status, 0.0, outcome.figures, tuple(outcome.wrong))


def failed(rows: Sequence[Row]) -> bool:
    """Whether some check did not hold."""
    return any(row.status == "failed" for row in rows)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """The rows as one object by step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({row.step: asdict(row) for row in rows}, indent=1) + "\n")
