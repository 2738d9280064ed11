"""Small sums for reports: percentiles, overlaps, distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["overlap", "percentile", "sparks"]

_STEPS = 24


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def overlap(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """How long one of `ours` and one of `theirs` ran together, and how long one of `ours` ran."""
    edges: list[tuple[float, int, int]] = []
    for which, spans in enumerate((ours, theirs)):
        for start, end in spans:
            edges.append((start, which, 1))
            edges.append((end, which, -1))
    edges.sort()
    running = [0, 0]
    together = whole = before = 0.0
    for time, which, change in edges:
        if running[0]:
            whole += time - before
            together += (time - before) if running[1] else 0.0
        running[which] += change
        before = time
    return together, whole


def sparks(values: Sequence[float]) -> str:
    """The distribution as a small picture, over powers of ten from the least to the largest."""
    positive = [max(value, 1e-7) for value in values]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    width = max(high - low, 1e-9) / _STEPS
    counts = [0] * _STEPS
    for value in positive:
        counts[min(int((math.log10(value) - low) / width), _STEPS - 1)] += 1
    most = max(counts)
    bars = "".join(
        f'<rect class="a" x="{n * 6}" y="{24 - 24 * count / most:.1f}" width="5" '
        f'height="{24 * count / most:.1f}"/>'
        for n, count in enumerate(counts)
        if count
    )
    label = f"from {10**low:.2g} to {10**high:.2g} seconds, on a logarithmic scale"
    return (
        f'<svg width="{_STEPS * 6}" height="24" viewBox="0 0 {_STEPS * 6} 24" role="img" '
        f'aria-label="{label}">{bars}</svg>'
    )
