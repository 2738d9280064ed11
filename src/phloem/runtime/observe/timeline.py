"""A log as a timeline, in the trace-event format that Perfetto and chrome://tracing open.

A track for each actor (its turns), copy queue, request, and pass; counters for the pools; arrows
from the turn that sent a message to the turn that handled it, and from the plan of a copy to the
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias

import msgspec

from phloem.events import (
    CopyEnded,
    CopySubmitted,
    Event,
    Freed,
    Granted,
    Parked,
    Refused,
    RuntimeStarted,
    StepChanged,
    Waited,
)
from phloem.runtime.observe.figures import CopySpan, Figures, RequestSpan, Span
from phloem.runtime.tracing import Entry

__all__ = ["TraceEvent", "timeline"]

_PROCESSES = {1: "actors", 2: "copies", 3: "requests", 4: "passes", 5: "pools"}
_ACTORS = {"tree": 1, "allocator": 2, "transfer": 3}
_RUN = 10  # process ids from one run to the next
_LEAST_US = 1.0  # arrows begin and end at slices, which must have some width
Us: TypeAlias = Callable[[float], float]
Value: TypeAlias = str | int | float | dict[str, int] | list[int] | None


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the format; `ts` and `dur` are microseconds."""

    name: str
    ph: Literal["X", "C", "M", "s", "f"]
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | None = None
    cat: str | None = None
    id: str | None = None
    bp: str | None = None
    args: dict[str, Value] | None = None


class _Turn(msgspec.Struct):
    actor: str
    number: int
    cause: int
    start: float
    end: float
    what: list[str]
    request: str


def timeline(entries: Iterable[Entry]) -> bytes:
    """The trace as JSON; times begin at the first entry."""
    events: list[TraceEvent] = []
    run: list[Entry] = []
    first, number = None, 0
    for entry in entries:
        first = entry.time if first is None else first
        if isinstance(entry.event, RuntimeStarted):
            events.extend(_of_run(run, first, number))
            run, number = [], number + 1
        run.append(entry)
    events.extend(_of_run(run, first or 0.0, number))
    encoded: bytes = msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})
    return encoded


def _of_run(run: list[Entry], first: float, number: int) -> Iterator[TraceEvent]:
    if not run:
        return
    figures = Figures()
    for entry in run:
        figures.add(entry.time, entry.event)
    if figures.started is None:
        return  # only that a log was opened
    base = _RUN * (number - 1)
    end = run[-1].time

    def us(seconds: float) -> float:
        return round((seconds - first) * 1e6, 3)

    for pid, name in _PROCESSES.items():
        shown = name if number == 1 else f"{name} (run {number})"
        yield TraceEvent("process_name", "M", base + pid, 0, args={"name": shown})
    yield from _actors(run, base + 1, us)
    yield from _copies(figures.copies, base, end, us)
    for tid, request in enumerate(figures.requests, 1):
        yield from _request(request, base + 3, tid, end, us)
    yield from _passes(figures.steps, base + 4, end, us)
    for time, pools in figures.occupancy:
        for name, held in pools.items():
            counts: dict[str, Value] = {str(holder): count for holder, count in held.items()}
            yield TraceEvent(name, "C", base + 5, 0, us(time), args=counts)


def _named(pid: int, tid: int, name: str) -> TraceEvent:
    return TraceEvent("thread_name", "M", pid, tid, args={"name": name})


# -- actors ---------------------------------------------------------------------------------------


def _actor_of(event: Event) -> str | None:
    if isinstance(event, Granted | Freed | Parked | Waited):
        return "allocator"
    if isinstance(event, CopySubmitted | CopyEnded):
        return "transfer"
    if isinstance(event, Refused):
        return "allocator" if event.what == "room" else None
    if isinstance(event, StepChanged) or not event.turn:
        return None
    return "tree"


def _actors(run: list[Entry], pid: int, us: Us) -> Iterator[TraceEvent]:
    for name, tid in _ACTORS.items():
        yield _named(pid, tid, name)
    turns: dict[tuple[int, str], _Turn] = {}
    for entry in run:
        event, actor = entry.event, _actor_of(entry.event)
        if actor is None or not event.turn:
            continue
        turn = turns.get((event.turn, actor))
        if turn is None:
            turn = turns[event.turn, actor] = _Turn(
                actor, event.turn, event.cause, entry.time, entry.time, [], event.request
            )
        turn.end = entry.time
        turn.what.append(type(event).__name__)
    by_number = {turn.number: turn for turn in turns.values()}
    for turn in turns.values():
        tid, ts = _ACTORS[turn.actor], us(turn.start)
        dur = max(_LEAST_US, us(turn.end) - ts)
        names = list(dict.fromkeys(turn.what))
        name = next((n for n in names if n not in ("TreeChanged", "LeaseTaken")), names[0])
        args: dict[str, Value] = {
            "turn": turn.number,
            "cause": turn.cause,
            "request": turn.request,
            "events": ", ".join(names),
        }
        yield TraceEvent(name, "X", pid, tid, ts, dur, "turn", args=args)
        sender = by_number.get(turn.cause)
        if sender is not None and turn.number != sender.number:
            yield from _arrow(
                f"turn {sender.number}-{turn.number}",
                "message",
                (pid, _ACTORS[sender.actor], us(sender.start)),
                (pid, tid, ts),
            )


Place: TypeAlias = tuple[int, int, float]


def _arrow(number: str, name: str, origin: Place, to: Place) -> Iterator[TraceEvent]:
    yield TraceEvent(name, "s", origin[0], origin[1], origin[2], cat="flow", id=number)
    ts = max(to[2], origin[2])
    yield TraceEvent(name, "f", to[0], to[1], ts, cat="flow", id=number, bp="e")


# -- what lasts -----------------------------------------------------------------------------------


def _copies(copies: list[CopySpan], base: int, end: float, us: Us) -> Iterator[TraceEvent]:
    pid = base + 2
    queues = {name: tid for tid, name in enumerate(sorted({c.queue for c in copies}), 1)}
    for name, tid in queues.items():
        yield _named(pid, tid, name or "copies")
    for copy in copies:
        tid, ts = queues[copy.queue], us(copy.start)
        dur = max(_LEAST_US, us(end if copy.end is None else copy.end) - ts)
        args: dict[str, Value] = {
            "op": copy.op,
            "request": copy.request,
            "bytes": copy.bytes,
            "error": copy.error,
        }
        yield TraceEvent(copy.kind, "X", pid, tid, ts, dur, "copy", args=args)
        yield from _arrow(
            f"copy {base} {copy.op}",
            "copy",
            (base + 1, _ACTORS["tree"], us(copy.planned)),
            (pid, tid, ts),
        )


def _request(request: RequestSpan, pid: int, tid: int, end: float, us: Us) -> Iterator[TraceEvent]:
    yield _named(pid, tid, request.name)
    yield TraceEvent("thread_sort_index", "M", pid, tid, args={"sort_index": tid})
    ts = us(request.start)
    stop = us(end if request.end is None else request.end)
    args: dict[str, Value] = {
        "tokens": request.tokens,
        "usable": request.usable,
        "lost": request.lost,
        "computed": request.computed,
        "session": request.session,
        "how": request.how or "running",
    }
    dur = max(_LEAST_US, stop - ts)
    yield TraceEvent(request.name, "X", pid, tid, ts, dur, "request", args=args)
    for wait in request.waits:
        begun = us(wait.start)
        dur = max(_LEAST_US, min(stop, us(end if wait.end is None else wait.end)) - begun)
        outcome: dict[str, Value] = {"outcome": wait.outcome or "granted"}
        yield TraceEvent("waits for room", "X", pid, tid, begun, dur, "wait", args=outcome)


def _passes(steps: list[Span], pid: int, end: float, us: Us) -> Iterator[TraceEvent]:
    """Passes that overlap lie on tracks of their own."""
    free_at: list[float] = []
    for step in steps:
        stop = end if step.end is None else step.end
        tid = next((n for n, free in enumerate(free_at) if free <= step.start), len(free_at))
        if tid == len(free_at):
            free_at.append(stop)
            yield _named(pid, tid + 1, f"passes {tid + 1}")
        free_at[tid] = stop
        ts = us(step.start)
        args: dict[str, Value] = {"state": step.outcome}
        dur = max(_LEAST_US, us(stop) - ts)
        yield TraceEvent(step.name, "X", pid, tid + 1, ts, dur, "pass", args=args)
