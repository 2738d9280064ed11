"""Clocks, samples and memory. Imports nothing of phloem: the peers' workers use it too."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

__all__ = [
    "Clock",
    "GcWatch",
    "Summary",
    "cpu_clock",
    "involuntary_switches",
    "resident_bytes",
    "summary",
    "wall_clock",
]

Clock = Callable[[], int]
Summary = dict[str, float]

wall_clock: Clock = time.perf_counter_ns
cpu_clock: Clock = time.thread_time_ns


def involuntary_switches() -> int:
    """How often the kernel has taken the core away from this thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def summary(samples_ns: Sequence[int]) -> Summary:
    """Samples in nanoseconds as microseconds: count, p50, p99, mean, max."""
    us = np.asarray(samples_ns, np.float64) / 1e3
    return {
        "n": float(len(us)),
        "p50_us": float(np.percentile(us, 50)),
        "p99_us": float(np.percentile(us, 99)),
        "mean_us": float(us.mean()),
        "max_us": float(us.max()),
    }


class GcWatch:
    """Counts the collector's pauses while it is open, in CPU time: others may have the core."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.longest_ns = 0
        self._begun = 0

    def __enter__(self) -> GcWatch:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        del info
        if phase == "start":
            self._begun = cpu_clock()
            return
        pause = cpu_clock() - self._begun
        self.total_ns += pause
        self.longest_ns = max(self.longest_ns, pause)

    def figures(self) -> dict[str, float]:
        """Milliseconds in all, and of the longest pause."""
        return {"total_ms": self.total_ns / 1e6, "longest_ms": self.longest_ns / 1e6}
