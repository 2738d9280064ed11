"""`python -m benchmarks.peers`: the matrix, then the ratios against the targets.

One fresh process for each adapter and each group of jobs; repeats are interleaved (every adapter
once, then every adapter again), and medians over the repeats are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from benchmarks.peers.report import ratios, table, targets
from benchmarks.peers.setup import PEERS, interpreter
from benchmarks.peers.worker import RESULT

_ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _run(adapter: str, jobs: list[str], timeout: int, *flags: str) -> list[Row]:
    """One process; a job without a result is a row with an error."""
    python = interpreter(PEERS[adapter], _tell)
    command = [str(python), "-W", "ignore", "-m", "benchmarks.peers.worker", adapter]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [*command, ",".join(jobs), *flags],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        output, trouble = done.stdout, done.stderr[-400:]
    except subprocess.TimeoutExpired:
        output, trouble = "", f"no result within {timeout} s"
    rows: list[Row] = [
        json.loads(line.removeprefix(RESULT))
        for line in output.splitlines()
        if line.startswith(RESULT)
    ]
    for row in rows:
        if "error" in row:
            _tell(f"{adapter} {row['workload']}:{row['page']} {row['error']}")
    if not rows and trouble:
        _tell(f"{adapter}: {trouble}")
    _tell(f"{adapter} {','.join(jobs)} {time.monotonic() - begun:.0f} s")
    return rows


def _groups(arguments: argparse.Namespace) -> Iterable[list[str]]:
    """W3 and W5 fill the memory, so each of their jobs has a process of its own."""
    works, pages = arguments.work.split(","), arguments.pages.split(",")
    small = [f"{work}:{page}" for work in works if work not in ("W3", "W5") for page in pages]
    for _ in range(arguments.repeat if small else 0):
        yield small
    for page in pages:
        if "W3" in works:
            yield [f"W3:{page}"]
    if "W5" in works:
        for size in arguments.sizes.split(","):
            yield [f"W5:16:{size}"]


def _medians(rows: list[Row]) -> list[Row]:
    """One row for each adapter and job: the median of every figure."""
    groups: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in rows:
        if "error" not in row:
            key = (row["adapter"], row["workload"], row["page"], row["size"])
            groups.setdefault(key, []).append(row)
    return [_median(group) for group in groups.values()]


def _median(group: list[Any]) -> Any:
    first = group[0]
    if isinstance(first, dict):
        rows = cast("list[Row]", group)
        shared = [name for name in rows[0] if all(name in row for row in rows)]
        return {name: _median([row[name] for row in rows]) for name in shared}
    if isinstance(first, float):
        return statistics.median(group)
    return first


def main() -> None:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", default=",".join(PEERS), help="adapters, by comma")
    parser.add_argument("--work", default="W1,W2,W3,W4,W5,W6", help="by comma")
    parser.add_argument("--pages", default="1,16,64")
    parser.add_argument("--sizes", default="10000,100000", help="nodes, for W5")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one process")
    parser.add_argument("--verify", action="store_true", help="check every hit, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to FILE")
    parser.add_argument("--table", action="store_true", help="only print what FILE has")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if arguments.json is not None and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
    adapters: list[str] = arguments.only.split(",")
    if arguments.verify:
        jobs = [f"{work}:{page}" for work in ("W1", "W4") for page in arguments.pages.split(",")]
        verified = [_run(adapter, jobs, arguments.timeout, "--verify") for adapter in adapters]
        sys.exit(any("error" in row for found in verified for row in found) or not all(verified))
    groups: Iterable[list[str]] = () if arguments.table else _groups(arguments)
    for group in groups:
        for adapter in adapters:
            rows += _run(adapter, group, arguments.timeout)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(rows))
    shown = _medians(rows)
    print(table(shown))
    print(ratios(shown))
    print(targets(shown))


if __name__ == "__main__":
    main()
