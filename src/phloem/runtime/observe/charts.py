"""Charts as SVG text. Colours come from classes that the page's style sheet knows.

Every chart is drawn in a box of `WIDTH` units (`HALF` beside another) and scales with the page.
Marks carry `data-row`: the number of the row, in the table beside the chart, that says the same in
figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

__all__ = [
    "Band",
    "Bar",
    "Block",
    "HALF",
    "Lane",
    "WIDTH",
    "gantt",
    "icicle",
    "stacked_area",
    "stacked_bars",
]

WIDTH = 960
HALF = 470  # of a chart beside another
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 8, 8, 26


class Band(NamedTuple):
    """One layer of a stack: a value for each point of time."""

    name: str
    css: str
    values: Sequence[float]


class Bar(NamedTuple):
    """Something that lasts, in a lane; times in seconds."""

    start: float
    end: float
    css: str
    title: str


class Lane(NamedTuple):
    """A named row of bars."""

    name: str
    bars: Sequence[Bar]


class Block(NamedTuple):
    """A node in an icicle: from token `start` to `end`, over rows `top` to `bottom`."""

    start: float
    end: float
    top: float
    bottom: float
    css: str
    heat: float
    title: str


def number(value: float) -> str:
    """A figure for an axis: 1200 is 1.2k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Round figures between two, at least so far apart; three to six of them where that fits."""
    span = max(high - low, 1e-12)
    unit = 10.0 ** floor(log10(span / 3))
    step = max(next(unit * size for size in (1, 2, 5, 10) if span / (unit * size) <= 6), least)
    first = ceil(low / step - 1e-9)
    return [step * n for n in range(first, floor(high / step + 1e-9) + 1)]


def _frame(
    height: float, label: str, body: Iterable[str], css: str = "", width: int = WIDTH
) -> str:
    return (
        f'<svg class="chart {css}" viewBox="0 0 {width} {height:g}" role="img" tabindex="0" '
        f'aria-label="{escape(label, quote=True)}">{"".join(body)}</svg>'
    )


def _axes(height: float, times: tuple[float, float], top: float, width: int) -> Iterable[str]:
    low, high = _TOP, height - _BOTTOM
    for value in _ticks(0.0, top, least=1.0):  # pages, slots, tokens: whole ones
        y = high - (high - low) * value / max(top, 1e-12)
        yield f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{number(value)}</text>"
        )
    yield from _time_axis(height, times, width)


def _time_axis(height: float, times: tuple[float, float], width: int) -> Iterable[str]:
    for seconds in _ticks(*times):
        x = _x(seconds, times, width)
        anchor = "end" if x > width - 30 else "middle"
        yield (
            f'<text class="tick" x="{x:.1f}" y="{height - 8:g}" text-anchor="{anchor}">'
            f"{seconds:.4g} s</text>"
        )


def _marks(
    times: Sequence[float], span: tuple[float, float], low: float, high: float, width: int
) -> Iterable[str]:
    """Dashed lines, where another run begins."""
    for time in times:
        x = _x(time, span, width)
        yield f'<line class="run" x1="{x:.1f}" x2="{x:.1f}" y1="{low:g}" y2="{high:g}"/>'


def _x(time: float, times: tuple[float, float], width: int) -> float:
    first, last = times
    return _LEFT + (width - _LEFT - _RIGHT) * (time - first) / max(last - first, 1e-9)


def stacked_area(
    label: str,
    times: Sequence[float],
    bands: Sequence[Band],
    top: float,
    marks: Sequence[float] = (),
    width: int = WIDTH,
) -> str:
    """Bands on top of each other over time, stepping at each point; `top` is the whole."""
    height = 190.0
    span = (times[0], times[-1])
    low, high = _TOP, height - _BOTTOM
    body = list(_axes(height, span, top, width))
    below = [0.0] * len(times)
    for band in bands:
        above = [base + value for base, value in zip(below, band.values, strict=True)]
        points: list[str] = []
        for line, order in ((above, 1), (below, -1)):
            corners: list[tuple[float, float]] = []
            for index, value in enumerate(line):
                y = high - (high - low) * min(value / max(top, 1e-9), 1.0)
                corners.append((_x(times[index], span, width), y))
                if index + 1 < len(line):
                    corners.append((_x(times[index + 1], span, width), y))
            points.extend(f"{x:.1f},{y:.1f}" for x, y in corners[::order])
        body.append(f'<polygon class="{band.css}" points="{" ".join(points)}"/>')
        below = above
    body.extend(_marks(marks, span, low, high, width))
    body.extend(_hits(times, span, low, high, width))
    return _frame(height, label, body, width=width)


def stacked_bars(
    label: str,
    edges: Sequence[float],
    bands: Sequence[Band],
    marks: Sequence[float] = (),
    width: int = WIDTH,
) -> str:
    """A stack for each interval between two of `edges`."""
    height = 190.0
    span = (edges[0], edges[-1])
    totals = [sum(values) for values in zip(*(band.values for band in bands), strict=True)]
    top = max([*totals, 1.0])
    low, high = _TOP, height - _BOTTOM
    body = list(_axes(height, span, top, width))
    below = [0.0] * len(totals)
    for band in bands:
        for row, value in enumerate(band.values):
            if value:
                x, end = _x(edges[row], span, width), _x(edges[row + 1], span, width)
                y = high - (high - low) * (below[row] + value) / top
                tall = (high - low) * value / top
                wide = max(end - x - 1, 0.8)
                body.append(
                    f'<rect class="{band.css}" x="{x:.1f}" y="{y:.2f}" width="{wide:.1f}" '
                    f'height="{tall:.2f}"/>'
                )
                below[row] += value
    body.extend(_marks(marks, span, low, high, width))
    body.extend(_hits(edges[:-1], span, low, high, width))
    return _frame(height, label, body, width=width)


def _hits(
    starts: Sequence[float], span: tuple[float, float], low: float, high: float, width: int
) -> Iterable[str]:
    """Invisible columns that the pointer and the keyboard find."""
    ends = [*starts[1:], span[1]]
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        x = _x(start, span, width)
        wide = max(_x(end, span, width) - x, 1.0)
        yield (
            f'<rect class="hit" data-row="{row}" x="{x:.1f}" y="{low}" width="{wide:.1f}" '
            f'height="{high - low:.1f}"/>'
        )


def gantt(
    label: str, lanes: Sequence[Lane], span: tuple[float, float], marks: Sequence[float] = ()
) -> str:
    """Bars in named lanes over time."""
    row, gap = 22.0, 6.0
    height = _TOP + len(lanes) * (row + gap) + _BOTTOM
    body: list[str] = list(_time_axis(height, span, WIDTH))
    for index, lane in enumerate(lanes):
        y = _TOP + index * (row + gap)
        body.append(
            f'<rect class="lane" x="{_LEFT}" y="{y:g}" width="{WIDTH - _LEFT - _RIGHT}" '
            f'height="{row:g}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 15:g}" text-anchor="end">'
            f"{escape(lane.name)}</text>"
        )
        for bar in lane.bars:
            x = _x(bar.start, span, WIDTH)
            wide = max(_x(bar.end, span, WIDTH) - x, 0.8)
            body.append(
                f'<rect class="{bar.css}" x="{x:.2f}" y="{y + 2:g}" width="{wide:.2f}" '
                f'height="{row - 4:g}"><title>{escape(bar.title)}</title></rect>'
            )
    body.extend(_marks(marks, span, _TOP, height - _BOTTOM, WIDTH))
    return _frame(height, label, body)


def icicle(label: str, blocks: Sequence[Block], tokens: float, rows: float) -> str:
    """A tree from left to right: the width of a block is its tokens, warmth is recency."""
    height = min(max(rows * 16.0, 60.0), 900.0)
    unit = (height - _TOP) / max(rows, 1e-9)
    scale = (WIDTH - _LEFT - _RIGHT) / max(tokens, 1.0)
    body: list[str] = []
    for position in _ticks(0.0, tokens):
        x = _LEFT + position * scale
        anchor = "end" if x > WIDTH - 30 else "middle"
        body.append(
            f'<text class="tick" x="{x:.1f}" y="{height + 16:g}" text-anchor="{anchor}">'
            f"{number(position)}</text>"
        )
    for block in blocks:
        x, y = _LEFT + block.start * scale, _TOP + block.top * unit
        wide = max((block.end - block.start) * scale - 1, 1.0)
        tall = max((block.bottom - block.top) * unit - 1, 1.0)
        body.append(
            f'<rect class="node {block.css}" style="--heat:{block.heat:.2f}" x="{x:.1f}" '
            f'y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}">'
            f"<title>{escape(block.title)}</title></rect>"
        )
        if "both" in block.css and tall > 6:
            body.append(
                f'<rect class="copied" x="{x:.1f}" y="{y + tall - 3:.1f}" width="{wide:.1f}" '
                'height="3"/>'
            )
        if "stateful" in block.css:
            css = "mark hollow" if "hoststateful" in block.css else "mark"
            body.append(
                f'<rect class="{css}" x="{x + wide - 4:.1f}" y="{y:.1f}" width="4" '
                f'height="{tall:.1f}"/>'
            )
    return _frame(height + _BOTTOM, label, body, "icicle")
