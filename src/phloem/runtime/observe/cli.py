"""The commands that read logs: `phloem trace`, `explain`, `report` and `top`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from phloem.errors import InvalidRequest
from phloem.runtime.arguments import from_one
from phloem.runtime.observe.explain import explain_request, readable
from phloem.runtime.observe.history import entries_until, replay
from phloem.runtime.observe.report import report as report_page
from phloem.runtime.observe.state import CacheState
from phloem.runtime.observe.summary import summary
from phloem.runtime.observe.timeline import timeline
from phloem.runtime.output import add_json_option, write, write_json
from phloem.runtime.tracing import ends_torn, read_log

__all__ = ["explain", "report", "top", "trace"]

_OK, _MISUSE = 0, 2


def trace(arguments: Sequence[str]) -> int:
    """`phloem trace LOG`: the state at a time, or a timeline."""
    parser = _parser(
        "trace",
        "Rebuilds the state of tree, leases and pools from a log of level debug, or writes the log "
        "as a timeline that ui.perfetto.dev and chrome://tracing open.",
    )
    parser.add_argument(
        "--at",
        metavar="TIME",
        help="seconds since the log began (+2.5) or the epoch, or an ISO time; default: the end",
    )
    parser.add_argument(
        "--run", type=from_one, metavar="N", help="of several in the log; default: last"
    )
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write the timeline there")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    _tell_torn(options.log)
    until = None if options.at is None else _time(options.at, options.log)
    if options.perfetto is not None:
        write(options.perfetto, timeline(entries_until(options.log, until)))
        return _OK
    state = replay(options.log, until=until, run=options.run).state()
    if options.json is not None:
        write_json(options.json, state)
    else:
        print(_readable(state))
    return _OK


def explain(arguments: Sequence[str]) -> int:
    """`phloem explain LOG --request ID`."""
    parser = _parser(
        "explain",
        "Says how far the prompt of a request was cached, why no further, what would have made it "
        "a hit, and what became of the request.",
    )
    parser.add_argument("--request", required=True, metavar="ID", help="its name in the log")
    parser.add_argument(
        "--run", type=from_one, metavar="N", help="of several in the log; default: last"
    )
    add_json_option(parser)
    options = parser.parse_args(arguments)
    _tell_torn(options.log)
    explanation = explain_request(options.log, options.request, options.run)
    if options.json is not None:
        write_json(options.json, explanation)
    else:
        print(readable(explanation))
    return _OK


def report(arguments: Sequence[str]) -> int:
    """`phloem report LOG -o FILE`."""
    parser = _parser("report", "Writes a log as one page of HTML that needs no network.")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--run", type=from_one, metavar="N", help="of several in the log; default: all"
    )
    parser.add_argument("--text", action="store_true", help="print the main figures, no page")
    options = parser.parse_args(arguments)
    _tell_torn(options.log)
    if options.text:
        print(summary(options.log, options.run))
        return _OK
    write(options.output, [report_page(options.log, options.run).encode()])
    return _OK


def top(arguments: Sequence[str]) -> int:
    """`phloem top LOG`: until interrupted."""
    parser = _parser(
        "top",
        "Shows pools, rates, queues and requests of a cache at work: from a log that it writes, or "
        "from the socket at which it serves (serve_top).",
        "events as JSON lines, or a socket",
    )
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds; default: 1")
    parser.add_argument("--once", action="store_true", help="show what is there and end")
    options = parser.parse_args(arguments)
    try:
        from phloem.runtime.observe.top import watch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        print("phloem top needs rich: pip install 'phloem[cli]'", file=sys.stderr)
        return _MISUSE
    watch(options.log, every_s=options.every, once=options.once)
    return _OK


def _parser(
    command: str, description: str, log: str = "events as JSON lines"
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"phloem {command}", description=description)
    parser.add_argument("log", type=Path, metavar="LOG", help=log)
    return parser


def _tell_torn(log: Path) -> None:
    if ends_torn(log):
        print(f"phloem: the last line of {log} has no end yet; it is left out", file=sys.stderr)


def _time(text: str, log: Path) -> float:
    """Seconds since the epoch. Raises `InvalidRequest` for what is no time."""
    try:
        if text.startswith("+"):
            if math.isnan(later := float(text)):
                raise ValueError("not a number")
            return next(read_log(log)).time + later
        if text.replace(".", "", 1).isdigit():
            return float(text)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, StopIteration) as error:
        raise InvalidRequest(f"--at {text} is no time: {error}") from None


def _readable(state: CacheState) -> str:
    lines = [f"generation {state.generation}, {len(state.nodes)} nodes, {len(state.leases)} leases"]
    for name, runs in state.pools.items():
        counts: dict[str, int] = {}
        for owner, count in runs:
            counts[owner] = counts.get(owner, 0) + count
        held = ", ".join(f"{count} {owner}" for owner, count in sorted(counts.items()))
        lines.append(f"{name}: {held or 'no places'}")
    lines.append(
        f"{len(state.copies)} copies in flight, {state.waiting} allocations wait, requests: "
        + (", ".join(state.requests) or "none")
    )
    leases: dict[int, list[str]] = {}
    for lease in state.leases:
        leases.setdefault(lease.node, []).append(lease.owner + (" (state)" if lease.state else ""))
    below: dict[int, list[int]] = {}
    nodes = {node.id: node for node in state.nodes}
    for node in state.nodes:
        below.setdefault(node.parent, []).append(node.id)
    for root in state.roots:
        name = f"namespace {root.namespace}" if any(root.namespace) else "default namespace"
        lines.append(f"{name}{_held_by(leases.get(root.node, []))}")
        waiting = [(child, 1) for child in reversed(below.get(root.node, []))]
        while waiting:
            number, depth = waiting.pop()
            node = nodes[number]
            mark = f", state {node.state}" if node.state else ""
            mark += "".join(f", {len(held)} {name} pages" for name, held in node.spans.items())
            lines.append(
                f"{'  ' * depth}{node.start}..{node.end} (node {node.id}, {len(node.pages)} pages"
                f"{mark}){_held_by(leases.get(node.id, []))}"
            )
            waiting.extend((child, depth + 1) for child in reversed(below.get(number, [])))
    return "\n".join(lines)


def _held_by(owners: list[str]) -> str:
    return f"  <- {', '.join(sorted(owners))}" if owners else ""
