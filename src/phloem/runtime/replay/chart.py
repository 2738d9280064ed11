"""Curves of hit rates over capacity: as a picture, and in a terminal."""

# matplotlib's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phloem.errors import InvalidRequest
from phloem.runtime.replay.runs import Report, TraceFigures

__all__ = ["bars", "draw"]

_WIDTH = 50  # characters of a bar for all tokens
_GIB = 2**30


def bars(report: Report, trace: TraceFigures) -> Iterator[str]:
    """Lines of a chart: a bar for each policy at each capacity, up to the bound on all of them."""
    capacities = sorted({run.capacity for run in report.runs if run.trace == trace.name})
    names = [run.policy for run in report.runs if run.trace == trace.name]
    wide = max(map(len, names), default=0)
    for capacity in capacities:
        upper = next(
            (
                one.bounds.upper
                for one in report.bounds
                if (one.trace, one.capacity) == (trace.name, capacity)
            ),
            trace.ceiling,
        )
        yield f"{capacity / _GIB:.1f} GiB"
        for run in report.runs:
            if (run.trace, run.capacity) != (trace.name, capacity):
                continue
            full = round(run.hit_rate * _WIDTH)
            rest = max(0, round(upper * _WIDTH) - full)
            yield f"  {run.policy:{wide}} {'█' * full}{'·' * rest}▏ {100 * run.hit_rate:.1f} %"


def draw(report: Report, path: Path) -> None:
    """One picture with the curves of each trace beside each other; needs matplotlib.

    Raises `InvalidRequest` when it is not there, and for a kind of file that it does not write.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InvalidRequest("a picture needs matplotlib: pip install 'phloem[replay]'") from None
    count = len(report.traces)
    figure = Figure(figsize=(6 * count, 4.5), layout="constrained")
    for number, trace in enumerate(report.traces, 1):
        axes = figure.add_subplot(1, count, number)
        for policy in dict.fromkeys(run.policy for run in report.runs):
            points = sorted(
                (run.capacity / _GIB, 100 * run.hit_rate)
                for run in report.runs
                if (run.trace, run.policy) == (trace.name, policy)
            )
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy)
        for name, style in (("upper", "--"), ("clairvoyant", ":")):
            points = sorted(
                (one.capacity / _GIB, 100 * getattr(one.bounds, name))
                for one in report.bounds
                if one.trace == trace.name
            )
            if points:
                axes.plot(*zip(*points, strict=True), color="grey", linestyle=style, label=name)
        axes.axhline(100 * trace.ceiling, color="lightgrey", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_ylim(0, 100)
        axes.set_xlabel(f"GiB, {report.geometry.name}")
        axes.set_ylabel("token hit rate, %")
        axes.set_title(trace.name)
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise InvalidRequest(f"{path.name}: {error}") from error
