"""`python -m benchmarks.known_policies --traces DIR`: are the known policies what they should be?

`data/known_policies.csv` has the hit rates of known policies and of bounds at 49 points, computed
by a simulator of its own, without phloem, on the whole traces. This computes them again on the
production tree and prints ours, theirs and the difference. Exit status 1 when one is off by more
than a point. `clairvoyant` and `upper` are bounds, computed in another way here; where they differ
by more they must be tighter.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from phloem.runtime.costs.published import geometry_named
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.replay.runs import Settings, replay
from phloem.runtime.traces import Sessions, read_sessions, read_trace

TABLE = Path(__file__).parent / "data" / "known_policies.csv"
BOUNDS = ("kv_optimum", "clairvoyant", "upper")
CODING = Sessions(first=120, every_s=30.0, seed=0, prompt_max=200_000)
BURST = Sessions(
    first=100, every_s=0.2, seed=0, pause_s=10, prompt_cut=32_768, turns_max=51, turns_min=5
)


class Point(NamedTuple):
    """One cell of the table; rates in percent."""

    workload: str
    geometry: str
    share: float
    policy: str
    theirs: float


def points() -> Iterator[Point]:
    """All cells."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for policy, value in list(row.items())[3:]:
                yield Point(
                    row["workload"], row["geometry"], float(row["share"]), policy, float(value)
                )


@cache
def workload(name: str, traces: Path) -> Workload:
    """A request stream of the table."""
    if name not in ("coding", "coding_burst"):
        return prepare(read_trace(traces / f"{name}.jsonl.gz", empty=True), name=name)
    sessions = traces / "agentic_coding_sessions.jsonl.gz"
    if name == "coding":
        return prepare(read_sessions(sessions, CODING), name=name, block=512)
    return prepare(read_sessions(sessions, BURST), name=name, block=64)


def compare(
    name: str, geometry: str, shares: list[float], policies: list[str], traces: Path, jobs: int
) -> dict[tuple[float, str], float]:
    """Our rates of some policies and bounds on one workload, in percent."""
    work = workload(name, traces)
    settings = Settings(
        geometry=geometry_named(geometry), bounds=any(one in BOUNDS for one in policies)
    )
    known = [one for one in policies if one not in BOUNDS]
    report = replay([work], settings, known, [f"{share:g}%" for share in shares], jobs=jobs)
    runs, found = iter(report.runs), dict[tuple[float, str], float]()
    for share in shares:
        for policy in known:
            found[share, policy] = 100 * next(runs).hit_rate
    for share, one in zip(shares, report.bounds, strict=False):
        for bound in BOUNDS:
            found[share, bound] = 100 * float(getattr(one.bounds, bound))
    return found


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_policies")
    parser.add_argument(
        "--traces",
        type=Path,
        default=os.environ.get("PHLOEM_TRACES"),
        help="where the whole traces are (default: the environment variable PHLOEM_TRACES)",
    )
    parser.add_argument("--only", action="append", metavar="WORKLOAD", help="default: all")
    parser.add_argument("--policy", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.traces is None:
        parser.error("--traces, or PHLOEM_TRACES: where the whole traces are")
    cells = [
        point
        for point in points()
        if (not options.only or point.workload in options.only)
        and (not options.policy or point.policy in options.policy)
    ]
    off, rows = 0, list[dict[str, Any]]()
    for name, geometry in dict.fromkeys((point.workload, point.geometry) for point in cells):
        here = [point for point in cells if (point.workload, point.geometry) == (name, geometry)]
        shares = [*dict.fromkeys(point.share for point in here)]
        policies = [*dict.fromkeys(point.policy for point in here)]
        ours = compare(name, geometry, shares, policies, options.traces, options.jobs)
        print(f"\n{name}, {geometry}\n{'share':>6} {'policy':16}{'ours':>7}{'theirs':>8}")
        for point in here:
            mine = round(ours[point.share, point.policy], 1)
            difference = round(mine - point.theirs, 1)
            note = ""
            if abs(difference) > 1:
                good = {"clairvoyant": difference > 0, "upper": difference < 0}.get(point.policy)
                note = "tighter" if good else "OFF"
                off += not good
            change = f"{difference:+8.1f}" if difference else f"{'':8}"
            print(
                f"{point.share:5g}% {point.policy:16}{mine:7.1f}{point.theirs:8.1f}{change} {note}"
            )
            rows.append({**point._asdict(), "ours": mine})
        sys.stdout.flush()
    same = sum(round(abs(row["ours"] - row["theirs"]), 1) <= 0.1 for row in rows)
    print(f"\n{len(rows)} figures, {same} equal within 0.1, {off} off by more than a point")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
