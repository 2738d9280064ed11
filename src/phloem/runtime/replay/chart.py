"""Curves of hit rates over capacity: as a picture, and in a terminal."""

# matplotlib's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phloem.errors import InvalidRequest
from phloem.runtime.replay.runs import Report, TraceFigures

__all__ = ["bars", "draw", "gib"]

_WIDTH = 50  # characters of a bar for all tokens
_COLUMNS_MAX = 3  # traces beside each other
_BOUNDS = (("upper", "upper bound", "--"), ("clairvoyant", "clairvoyant", ":"))
_GIB = 2**30


def bars(report: Report, trace: TraceFigures) -> Iterator[str]:
    """Lines of a chart: a bar for each policy at each capacity, up to the bound on all of them."""
    runs = [run for run in report.runs if run.trace == trace.name]
    wide = max((len(run.policy) for run in runs), default=0)
    upper = {one.capacity: one.bounds.upper for one in report.bounds if one.trace == trace.name}
    bound = "the upper bound" if upper else "what an unbounded cache hits"
    yield f"hit rate; {_WIDTH} columns are all tokens, dots lead up to {bound}"
    for capacity in sorted({run.capacity for run in runs}):
        yield gib(capacity) + " GiB"
        most = round(upper.get(capacity, trace.ceiling) * _WIDTH)
        for run in runs:
            if run.capacity == capacity:
                full = round(run.hit_rate * _WIDTH)
                bar = "█" * full + "·" * (most - full)
                yield f"  {run.policy:{wide}} {bar:{_WIDTH}} {100 * run.hit_rate:5.1f} %"


def gib(nbytes: int) -> str:
    """Bytes in GiB, with two digits at least."""
    return f"{nbytes / _GIB:.{1 if nbytes >= _GIB else 2}f}"


def draw(report: Report, path: Path) -> None:
    """One picture with the curves of each trace beside each other; needs matplotlib.

    Raises `InvalidRequest` when it is not there, and for a kind of file that it does not write.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InvalidRequest("a picture needs matplotlib: pip install 'phloem[replay]'") from None
    columns = min(len(report.traces), _COLUMNS_MAX)
    rows = -(-len(report.traces) // columns)
    figure = Figure(figsize=(6 * columns, 4.5 * rows), layout="constrained")
    for number, trace in enumerate(report.traces, 1):
        axes = figure.add_subplot(rows, columns, number)
        capacities = sorted({run.capacity for run in report.runs if run.trace == trace.name})
        for policy in dict.fromkeys(run.policy for run in report.runs):
            points = sorted(
                (run.capacity / _GIB, 100 * run.hit_rate)
                for run in report.runs
                if (run.trace, run.policy) == (trace.name, policy)
            )
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=policy)
        for field, name, style in _BOUNDS:
            points = sorted(
                (one.capacity / _GIB, 100 * getattr(one.bounds, field))
                for one in report.bounds
                if one.trace == trace.name
            )
            if points:
                axes.plot(*zip(*points, strict=True), color="grey", linestyle=style, label=name)
        axes.axhline(100 * trace.ceiling, color="silver", linewidth=1, label="unbounded cache")
        axes.set_xscale("log")
        axes.set_xticks([one / _GIB for one in capacities], [gib(one) for one in capacities])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 100)
        axes.grid(axis="y", color="whitesmoke")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("cache, GiB")
        axes.set_ylabel("prompt tokens hit, %")
        axes.set_title(f"{trace.name}\n{report.geometry.name}", fontsize="medium")
        if number == len(report.traces):
            axes.legend(fontsize="small", frameon=False, loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise InvalidRequest(f"{path.name}: {error}") from error
