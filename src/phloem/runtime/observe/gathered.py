"""What a report shows of a log, gathered in memory that does not grow with its length.

A first look at the log finds from when to when it goes; then all is counted into intervals of that
time. What grows is small: a few numbers for each copy, pass and request, a line for each session.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappush, heappushpop
from pathlib import Path

import msgspec

from phloem.errors import InvalidRequest
from phloem.events import Event, RuntimeStarted
from phloem.runtime.observe.charts import Bar
from phloem.runtime.observe.figures import (
    CopySpan,
    Eviction,
    Figures,
    Holder,
    Lookup,
    RequestSpan,
    Span,
)
from phloem.runtime.observe.history import History
from phloem.runtime.tracing import read_heads, read_log

__all__ = ["AVOIDABLE", "BUCKETS", "Gathered", "Queue", "SessionSums", "gather"]

BUCKETS = 96
PIXELS = 900  # what is shorter than one of these cannot be told apart
AVOIDABLE = (
    *("no_state", "no_window", "evicted", "forgotten"),
    *("no_room", "copy_failed", "timed_out", "tier_failed"),
)
_WORST = 40


class SessionSums(msgspec.Struct):
    """The requests of one session together."""

    requests: int = 0
    tokens: int = 0
    reused: int = 0
    loaded: int = 0
    evicted: int = 0
    no_state: int = 0
    last: float = 0.0


class Queue:
    """What a queue of copies, or the passes, did: bars to draw, times to add up."""

    def __init__(self, pixel: float) -> None:
        self.bars: list[Bar] = []
        self.starts, self.ends = array("d"), array("d")
        self.bytes = 0
        self.failed = 0
        self.late = array("d")  # from submission to begin
        self._pixel = pixel
        self._together = 1

    def __len__(self) -> int:
        return len(self.starts)

    def spans(self) -> list[tuple[float, float]]:
        """From when to when."""
        return list(zip(self.starts, self.ends, strict=True))

    def add(self, bar: Bar, name: str) -> None:
        """One more, that ended after those before; `name` is for several that look like one."""
        self.starts.append(bar.start)
        self.ends.append(bar.end)
        last = self.bars[-1] if self.bars else None
        if (
            last is None
            or last.css != bar.css
            or bar.end - bar.start > self._pixel
            or not last.start <= bar.start <= last.end + self._pixel / 2
        ):
            self.bars.append(bar)
            self._together = 1
            return
        self._together += 1
        end = max(last.end, bar.end)
        self.bars[-1] = Bar(last.start, end, bar.css, f"{self._together} {name}")


class Gathered(Figures):
    """The figures of a report about so many seconds from `first` on."""

    def __init__(self, first: float, last: float) -> None:
        super().__init__(kept=0)
        self.begin = first
        self.length = max(last - first, 1e-6)
        self.edges = [self.length * n / BUCKETS for n in range(BUCKETS + 1)]
        self.prompts = 0
        self.reused = {"device": [0.0] * BUCKETS, "host": [0.0] * BUCKETS}
        self.lost: dict[str, list[float]] = {}
        # Tier and `pages`, `states` or those of a span component, as `window pages`: by reason.
        self.gone: dict[tuple[str, str], dict[str, list[float]]] = {}
        self.held: list[dict[str, dict[Holder, int]]] = []  # at the edges: pools by holder
        self.sizes: dict[str, int] = {}  # of the pools
        self.pixel = self.length / PIXELS
        self.queues: dict[str, Queue] = {}
        self.passes = Queue(self.pixel)
        self.took: dict[str, array[float]] = {}  # seconds, by what took them
        self.sessions: dict[str, SessionSums] = {}
        self.requests_seen = 0
        self._worst: list[tuple[int, int, RequestSpan]] = []  # a heap, the least first

    def add(self, time: float, event: Event) -> None:
        """See `Figures`; up to now the pools were held as they are."""
        self._hold(self._bucket(time) + 1)
        super().add(time, event)
        if isinstance(event, RuntimeStarted):
            for name, pool in self.pools.items():
                self.sizes[name] = max(pool.size, self.sizes.get(name, 0))

    def finish(self) -> None:
        """The log is at its end: what still runs counts as far as it came."""
        for request in list(self.running.values()):
            self._count(request)
        for copy in self.in_flight.values():
            self._draw(copy, self.last)
        for step in self.open_steps.values():
            self._draw_step(step, self.last)
        self._hold(BUCKETS + 1)

    def worst(self) -> list[RequestSpan]:
        """Requests that lost most of what they need not have lost, those first."""
        return [request for _, _, request in sorted(self._worst, reverse=True)]

    def _bucket(self, time: float) -> int:
        return max(0, min(int((time - self.begin) / self.length * BUCKETS), BUCKETS - 1))

    def _hold(self, edges: int) -> None:
        while self.pools and len(self.held) < edges:
            self.held.append({name: dict(pool.held) for name, pool in self.pools.items()})

    # -- what the figures tell -----------------------------------------------------------------

    def note_pools(self) -> None:
        """See `Figures`; what counts is how they were at the edges."""

    def note_lookup(self, lookup: Lookup) -> None:
        """See `Figures`."""
        row = self._bucket(lookup.time)
        self.prompts += lookup.prompts
        self.reused["device"][row] += lookup.device
        self.reused["host"][row] += lookup.host
        for why, tokens in lookup.lost.items():
            self.lost.setdefault(why, [0.0] * BUCKETS)[row] += tokens

    def note_eviction(self, eviction: Eviction) -> None:
        """See `Figures`."""
        row = self._bucket(eviction.time)
        counts = {"pages": eviction.pages, "states": eviction.states}
        counts |= {f"{name} pages": pages for name, pages in eviction.spans.items()}
        for what, count in counts.items():
            if count:
                by_reason = self.gone.setdefault((eviction.tier, what), {})
                by_reason.setdefault(eviction.why, [0.0] * BUCKETS)[row] += count

    def note_request(self, request: RequestSpan) -> None:
        """See `Figures`."""
        self._count(request)
        for wait in request.waits:
            if wait.end is not None:
                self._took("waits for room", wait.end - wait.start)
        if request.first_step is not None:
            self._took("opened to first pass", request.first_step - request.start)
        if request.end is not None:
            self._took("opened to end", request.end - request.start)

    def note_copy(self, copy: CopySpan) -> None:
        """See `Figures`."""
        end = self.last if copy.end is None else copy.end
        self._draw(copy, end)
        self._took(copy.kind, end - copy.start)

    def note_step(self, step: Span) -> None:
        """See `Figures`."""
        end = self.last if step.end is None else step.end
        self._draw_step(step, end)
        self._took("forward pass", end - step.start)

    # -- sums ----------------------------------------------------------------------------------

    def _took(self, what: str, seconds: float) -> None:
        self.took.setdefault(what, array("d")).append(seconds)

    def _draw(self, copy: CopySpan, end: float) -> None:
        queue = self.queues.setdefault(copy.queue, Queue(self.pixel))
        title = f"{copy.kind} {copy.op}, {copy.bytes} B"
        title += f" for {copy.request}" if copy.request else ""
        title += f": {copy.error}" if copy.error else ""
        css = "failed" if copy.error else copy.kind
        queue.add(Bar(copy.start - self.begin, end - self.begin, css, title), copy.kind)
        queue.bytes += copy.bytes
        queue.failed += bool(copy.error)
        queue.late.append(copy.start - copy.submitted)

    def _draw_step(self, step: Span, end: float) -> None:
        start = step.start - self.begin
        bar = Bar(start, end - self.begin, "pass", f"{step.name}, {step.outcome}")
        self.passes.add(bar, "forward passes")

    def _count(self, request: RequestSpan) -> None:
        sums = self.sessions.setdefault(request.session, SessionSums())
        sums.requests += 1
        sums.tokens += request.tokens
        sums.reused += request.usable
        sums.loaded += request.loaded
        sums.evicted += request.lost.get("evicted", 0)
        sums.no_state += request.lost.get("no_state", 0)
        sums.last = max(sums.last, request.start)
        self.requests_seen += 1
        avoidable = sum(request.lost.get(why, 0) for why in AVOIDABLE)
        entry = avoidable, -self.requests_seen, request  # the earlier of equals is the worse
        if len(self._worst) < _WORST:
            heappush(self._worst, entry)
        else:
            heappushpop(self._worst, entry)


def gather(path: str | Path, run: int | None = None) -> tuple[Gathered, History]:
    """The figures of a log, or of one of its runs (from 1 on), and the state at its end.

    Raises `InvalidRequest` when there is no such run.
    """
    times = list(_ends(path, run))
    if not times:
        raise InvalidRequest(f"{path} has no RuntimeStarted of run {run or 1}: nothing to report")
    gathered, history = Gathered(times[0], times[-1]), History()
    for entry in read_log(path):
        if isinstance(entry.event, RuntimeStarted) and history.run == run:
            break
        history.add(entry.time, entry.event)
        if history.run and (run is None or history.run == run):
            gathered.add(entry.time, entry.event)
    gathered.finish()
    return gathered, history


def _ends(path: str | Path, run: int | None) -> Iterator[float]:
    """When the first and the last event happened that count."""
    number, latest = 0, None
    for head in read_heads(path):
        if head.event == RuntimeStarted.__name__:
            if number == run:
                break
            number += 1
        if number and (run is None or number == run):
            if latest is None:
                yield head.time
            latest = head.time
    if latest is not None:
        yield latest
