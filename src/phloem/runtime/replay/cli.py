"""`phloem replay`: what a cache would have done with a trace.

Exit status: 0, or 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phloem.actors.tree.core import BACKUP_HITS
from phloem.actors.tree.placement import Placement
from phloem.errors import InvalidRequest
from phloem.runtime.costs.published import geometry_named
from phloem.runtime.output import STDOUT, write, write_json
from phloem.runtime.replay.chart import draw
from phloem.runtime.replay.named import KNOWN
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.replay.runs import Report, Settings, replay
from phloem.runtime.replay.table import show
from phloem.runtime.traces import SAMPLES, Sessions, read_sessions, read_trace
from phloem.runtime.traces.readers import is_sessions

__all__ = ["run"]

_OK, _MISUSE = 0, 2


def run(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=options.json == STDOUT)
    try:
        report = _report(options, console)
        for trace in report.traces:
            show(report, trace, console)
        if options.decisions is not None:
            write(options.decisions, _decisions(report))
        if options.json is not None:
            _write_without_decisions(report, options.json)
        if options.plot is not None:  # last: what cannot be drawn is written all the same
            draw(report, options.plot)
    except BrokenPipeError:
        raise
    except (InvalidRequest, OSError) as error:
        print(f"phloem replay: {error}", file=sys.stderr)
        return _MISUSE
    return _OK


def _parser() -> argparse.ArgumentParser:
    known = "; ".join(f"{name}: {text}" for name, (_, text) in KNOWN.items())
    parser = argparse.ArgumentParser(
        prog="phloem replay",
        description="Serves traces from the real tree, one request after another, under any policy "
        "at any capacity, and says what was hit, beside what an unbounded cache and those who know "
        "the future would have hit.",
        epilog=f"Known policies, with an admission of states and a memory of their own: {known}.",
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="a file, or a sample: " + ", ".join(SAMPLES))
    add("--geometry", default="qwen3-next-80b-a3b", metavar="NAME", help="(default: %(default)s)")
    add(
        "--capacity",
        action="append",
        metavar="SIZE",
        help="bytes, like 16GiB, or a share of the KV of all distinct tokens, like 5%% (default)",
    )
    add(
        "--policy", action="append", metavar="NAME", help="of the tree, or known (default: benefit)"
    )
    add(
        "--placement",
        metavar="WHERE",
        help="states, with commas: branch, end_of_prompt, end_of_response, departures=N, "
        "periodic=TOKENS, budget=N, gain_min=TOKENS, max_states_per_path=N (default: the first "
        "three and departures=2)",
    )
    add("--states-share", type=float, metavar="X", help="of the bytes in a pool of states")
    add(
        "--host-capacity",
        metavar="SIZE",
        help="a host tier, of so many bytes or such a share: replays a whole runtime",
    )
    add(
        "--write-policy",
        choices=[*BACKUP_HITS],
        help="when data are copied to the host (default: write_through)",
    )
    add(
        "--one-memory",
        action="store_true",
        help="replay a whole runtime over one memory, cut into frames, also without a host tier",
    )
    add("--sessions", action="store_true", help="tell the tree which requests belong together")
    add("--block", type=int, metavar="TOKENS", help="of a page (default: the trace's, or 32)")
    add("--limit", type=int, metavar="N", help="the first N requests of each trace")
    add("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    add("--no-bounds", action="store_true", help="leave those who know the future out")
    add("--json", nargs="?", const=STDOUT, type=Path, metavar="FILE", help="write the results")
    add("--plot", type=Path, metavar="FILE", help="draw the curves (PNG, SVG, PDF)")
    add("--decisions", type=Path, metavar="FILE", help="write each decision as a line of JSON")
    laid = parser.add_argument_group("traces of sessions without a common clock")
    add = laid.add_argument
    add("--first", type=int, metavar="N", help="only so many sessions")
    add("--every", type=float, default=30.0, metavar="S", help="seconds from start to start")
    add("--seed", type=int, metavar="N", help="draw the starts, so many seconds apart on average")
    add("--pause", type=float, metavar="S", help="draw the pauses, with this mean")
    add("--pause-max", type=float, default=300.0, metavar="S", help="cut recorded pauses to this")
    add("--prompt-max", type=int, metavar="TOKENS", help="leave sessions with longer ones out")
    add("--prompt-cut", type=int, metavar="TOKENS", help="end sessions before longer ones")
    add("--turns-max", type=int, metavar="N", help="end sessions after so many")
    add("--turns-min", type=int, default=1, metavar="N", help="leave shorter sessions out")
    return parser


def _names(traces: Sequence[str]) -> dict[str, str]:
    """What each trace is called: its file's name without endings, or its path where names repeat.

    A trace that is given twice is one.
    """
    stems = {trace: Path(trace).name.partition(".")[0] for trace in traces}
    told = list(stems.values())
    return {
        trace: stem if told.count(stem) == 1 and stem else trace for trace, stem in stems.items()
    }


def _workload(name: str, called: str, options: argparse.Namespace) -> Workload:
    path = SAMPLES.get(name) or Path(name)
    if is_sessions(path):
        layout = Sessions(
            first=options.first,
            every_s=options.every,
            seed=options.seed,
            pause_s=options.pause,
            pause_max_s=options.pause_max,
            prompt_max=options.prompt_max,
            prompt_cut=options.prompt_cut,
            turns_max=options.turns_max,
            turns_min=options.turns_min,
        )
        requests = read_sessions(path, layout)
    else:
        requests = read_trace(path, empty=True)
    return prepare(requests, name=called, block=options.block, limit=options.limit)


def _placement(text: str | None) -> Placement | None:
    if text is None:
        return None
    named: dict[str, bool | int] = dict.fromkeys(
        ("branch", "end_of_prompt", "end_of_response"), False
    )
    named["departures"] = 0
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            named[name] = int(value) if equals else True
        except ValueError:
            raise InvalidRequest(f"{part!r} is no placement") from None
    try:
        return msgspec.convert(named, Placement)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"placement {text!r}: {error}") from error


def _report(options: argparse.Namespace, console: Console) -> Report:
    if options.write_policy and options.host_capacity is None:
        raise InvalidRequest("--write-policy is for a host tier: --host-capacity")
    settings = Settings(
        geometry=geometry_named(options.geometry),
        placement=_placement(options.placement),
        states_share=options.states_share,
        sessions=options.sessions,
        host=options.host_capacity,
        write_policy=options.write_policy or "write_through",
        one_memory=options.one_memory,
        bounds=not options.no_bounds,
        decisions=options.decisions is not None,
    )
    with _progress(console) as progress:
        names = _names(options.traces)
        task = progress.add_task("reading", total=len(names))
        workloads: list[Workload] = []
        for name, called in names.items():
            workloads.append(_workload(name, called, options))
            progress.advance(task)

        def told(ended: int, total: int, which: str) -> None:
            progress.update(task, completed=ended, total=total, description=which)

        return replay(
            workloads,
            settings,
            options.policy or ["benefit"],
            options.capacity or ["5%"],
            jobs=options.jobs,
            told=told,
        )


@contextmanager
def _progress(console: Console) -> Generator[Progress, None, None]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def _decisions(report: Report) -> Iterator[bytes]:
    """A line that names the run, then one for each of its requests, run by run."""
    for run in report.runs:
        head = {
            "trace": run.trace,
            "geometry": report.geometry.name,
            "policy": run.policy,
            "capacity": run.capacity,
        }
        yield msgspec.json.encode(head) + b"\n"
        yield run.decisions


def _write_without_decisions(report: Report, path: Path) -> None:
    for number, run in enumerate(report.runs):
        report.runs[number] = msgspec.structs.replace(run, decisions=b"")
    write_json(path, report)
