"""A log as a timeline, in the trace-event format that Perfetto and chrome://tracing open.

A track for each actor (its turns), copy queue, request, and pass; counters for the pools; arrows
from the turn that sent a message to the turn that handled it, and from the plan of a copy to the
copy. It is written while the log is read: nothing is remembered but what still lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
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
_ACTORS = {"tree": 1, "allocator": 2, "transfer": 3, "host allocator": 4}
_RUN = 10  # process ids from one run to the next
_LEAST_US = 1.0  # arrows begin and end at slices, which must have some width
_TURNS_OPEN = 4096  # turns that may yet have more events ...
_TURNS_KNOWN = 65_536  # ... and those from which arrows may yet begin
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


def timeline(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The trace as JSON, in pieces; times begin at the first entry."""
    tracks = _Tracks()
    encode = msgspec.json.Encoder().encode
    between = b'{"displayTimeUnit":"ms","traceEvents":['
    for entry in entries:
        tracks.add(entry.time, entry.event)
        for event in tracks.take():
            yield between + encode(event)
            between = b",\n"
    tracks.close_run()
    for event in tracks.take():
        yield between + encode(event)
        between = b",\n"
    yield b"]}" if between == b",\n" else between + b"]}"


class _Tracks(Figures):
    """Turns what happens into entries as it ends."""

    def __init__(self) -> None:
        super().__init__(kept=0)
        self._out: list[TraceEvent] = []
        self._run = 0
        self._turns: OrderedDict[tuple[int, str], _Turn] = OrderedDict()
        self._starts: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._begin_run()

    def _begin_run(self) -> None:
        self._turns.clear()
        self._starts.clear()
        self._queues: dict[str, int] = {}
        self._requests = 0
        self._passes_free: list[float] = []  # by track: when the latest pass there ended
        self._shown: dict[str, dict[str, Value]] = {}  # the latest counters

    def take(self) -> list[TraceEvent]:
        """The entries since it was asked last."""
        taken, self._out = self._out, []
        return taken

    def add(self, time: float, event: Event) -> None:
        """See `Figures`."""
        if isinstance(event, RuntimeStarted):
            self.close_run()
            self._begin_run()
            self._run += 1
            for pid, name in _PROCESSES.items():
                shown = name if self._run == 1 else f"{name} (run {self._run})"
                self._name("process_name", self._pid(pid), 0, shown)
            for name, tid in _ACTORS.items():
                self._name("thread_name", self._pid(1), tid, name)
        super().add(time, event)
        if self._run:
            self._turn(event)

    def close_run(self) -> None:
        """What still lasts is shown as far as it came."""
        while self._turns:
            self._show_turn(self._turns.popitem(last=False)[1])
        for copy in self.in_flight.values():
            self.note_copy(copy)
        for request in self.running.values():
            self.note_request(request)
        for step in self.open_steps.values():
            self.note_step(step)

    def _pid(self, process: int) -> int:
        return _RUN * (self._run - 1) + process

    def _us(self, seconds: float) -> float:
        return round((seconds - self.first) * 1e6, 3)

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._out.append(TraceEvent(what, "M", pid, tid, args={"name": name}))

    def _slice(
        self, name: str, process: int, tid: int, span: tuple[float, float], cat: str, **args: Value
    ) -> None:
        ts, pid = self._us(span[0]), self._pid(process)
        dur = max(_LEAST_US, self._us(span[1]) - ts)
        self._out.append(TraceEvent(name, "X", pid, tid, ts, dur, cat, args=args))

    def _arrow(self, number: str, name: str, origin: _Place, to: _Place) -> None:
        pid, tid, ts = origin
        self._out.append(TraceEvent(name, "s", pid, tid, ts, cat="flow", id=number))
        end = TraceEvent(name, "f", to[0], to[1], max(to[2], ts), cat="flow", id=number, bp="e")
        self._out.append(end)

    # -- turns ---------------------------------------------------------------------------------

    def _turn(self, event: Event) -> None:
        actor = _actor_of(event)
        if actor is None or not event.turn:
            return
        turn = self._turns.get((event.turn, actor))
        if turn is None:
            turn = self._turns[event.turn, actor] = _Turn(
                actor, event.turn, event.cause, self.last, self.last, [], event.request
            )
            self._starts.setdefault(event.turn, (actor, self.last))
            if len(self._starts) > _TURNS_KNOWN:
                self._starts.popitem(last=False)
            if len(self._turns) > _TURNS_OPEN:
                self._show_turn(self._turns.popitem(last=False)[1])
        turn.end = self.last
        turn.what.append(type(event).__name__)

    def _show_turn(self, turn: _Turn) -> None:
        names = list(dict.fromkeys(turn.what))
        name = next((n for n in names if n not in ("TreeChanged", "LeaseTaken")), names[0])
        tid = _ACTORS[turn.actor]
        self._slice(
            name,
            1,
            tid,
            (turn.start, turn.end),
            "turn",
            turn=turn.number,
            cause=turn.cause,
            request=turn.request,
            events=", ".join(names),
        )
        sender = self._starts.get(turn.cause)
        if sender is not None and turn.cause != turn.number:
            actor, start = sender
            pid = self._pid(1)
            number = f"turn {self._run} {turn.cause}-{turn.number} {turn.actor}"
            origin, to = (pid, _ACTORS[actor], self._us(start)), (pid, tid, self._us(turn.start))
            self._arrow(number, "message", origin, to)

    # -- what lasts ----------------------------------------------------------------------------

    def note_pools(self) -> None:
        """See `Figures`; the pools that have changed."""
        for name, pool in self.pools.items():
            counts: dict[str, Value] = {str(holder): n for holder, n in pool.held.items()}
            if self._shown.get(name) != counts:
                self._shown[name] = counts
                ts = self._us(self.last)
                self._out.append(TraceEvent(name, "C", self._pid(5), 0, ts, args=counts))

    def note_copy(self, copy: CopySpan) -> None:
        """See `Figures`."""
        tid = self._queues.get(copy.queue)
        if tid is None:
            tid = self._queues[copy.queue] = len(self._queues) + 1
            self._name("thread_name", self._pid(2), tid, copy.queue or "copies")
        span = copy.start, self.last if copy.end is None else copy.end
        self._slice(
            copy.kind,
            2,
            tid,
            span,
            "copy",
            op=copy.op,
            request=copy.request,
            bytes=copy.bytes,
            error=copy.error,
        )
        origin = self._pid(1), _ACTORS["tree"], self._us(copy.planned)
        to = self._pid(2), tid, self._us(copy.start)
        self._arrow(f"copy {self._run} {copy.op}", "copy", origin, to)

    def note_request(self, request: RequestSpan) -> None:
        """See `Figures`."""
        self._requests += 1
        tid, stop = self._requests, self.last if request.end is None else request.end
        self._name("thread_name", self._pid(3), tid, request.name)
        order: dict[str, Value] = {"sort_index": tid}
        self._out.append(TraceEvent("thread_sort_index", "M", self._pid(3), tid, args=order))
        self._slice(
            request.name,
            3,
            tid,
            (request.start, stop),
            "request",
            tokens=request.tokens,
            usable=request.usable,
            loaded=request.loaded,
            lost=request.lost,
            computed=request.computed,
            session=request.session,
            how=request.how or "running",
        )
        for wait in request.waits:
            span = wait.start, min(stop, self.last if wait.end is None else wait.end)
            outcome = wait.outcome or "granted"
            self._slice("waits for room", 3, tid, span, "wait", outcome=outcome)

    def note_step(self, step: Span) -> None:
        """See `Figures`. Passes that overlap lie on tracks of their own."""
        stop, free_at = self.last if step.end is None else step.end, self._passes_free
        tid = next((n for n, free in enumerate(free_at) if free <= step.start), len(free_at))
        if tid == len(free_at):
            free_at.append(stop)
            self._name("thread_name", self._pid(4), tid + 1, f"passes {tid + 1}")
        free_at[tid] = stop
        self._slice(step.name, 4, tid + 1, (step.start, stop), "pass", state=step.outcome)


_Place: TypeAlias = tuple[int, int, float]


def _actor_of(event: Event) -> str | None:
    if isinstance(event, Granted | Freed):
        return "allocator" if event.tier == "device" else "host allocator"
    if isinstance(event, Parked | Waited):
        return "allocator"
    if isinstance(event, CopySubmitted | CopyEnded):
        return "transfer"
    if isinstance(event, Refused):
        return "allocator" if event.what == "room" else None
    if isinstance(event, StepChanged) or not event.turn:
        return None
    return "tree"
