"""What a cache is doing now, as a value: what `phloem top` draws, and what a socket carries."""

from __future__ import annotations

import msgspec

from phloem.runtime.observe.figures import Figures, Holder, RequestSpan

__all__ = ["PoolNow", "QueueNow", "RequestNow", "Snapshot", "WINDOWS", "snapshot"]

WINDOWS = 10  # rates are those of so many refreshes
_ROWS = 8


class PoolNow(msgspec.Struct, frozen=True):
    """Places of a pool by holder."""

    size: int
    held: dict[Holder, int]


class QueueNow(msgspec.Struct, frozen=True):
    """What a queue of copies has done within the window, and what is in flight."""

    copies: int
    bytes: int
    busy_s: float
    in_flight: int


class RequestNow(msgspec.Struct, frozen=True):
    """A request, for so many seconds in this state."""

    name: str
    tokens: int
    reused: int
    loaded: int
    seconds: float
    state: str
    over: bool


class Snapshot(msgspec.Struct, frozen=True):
    """The cache at `time`; rates are sums over the last `window_s` seconds.

    `started` is false as long as no runtime has been seen. `missed`: events that are missing here.
    `evicted` counts pages by tier, those of a span component by its name.
    """

    time: float
    window_s: float
    started: bool
    pools: dict[str, PoolNow]
    lookups: int
    device_tokens: int
    host_tokens: int
    lost: dict[str, int]
    evicted: dict[str, int]
    queues: dict[str, QueueNow]
    waiting: int
    passes: int
    requests: list[RequestNow]
    missed: int = 0


def snapshot(figures: Figures, every_s: float, *, missed: int = 0) -> Snapshot:
    """What `figures` say now, to be looked at every so many seconds."""
    window = max(WINDOWS * every_s, 1e-9)
    since = figures.last - window
    lookups = [lookup for lookup in figures.lookups if lookup.time > since]
    lost: dict[str, int] = {}
    for lookup in lookups:
        for why, tokens in lookup.lost.items():
            lost[why] = lost.get(why, 0) + tokens
    evicted: dict[str, int] = {}
    for gone in figures.evictions:
        if gone.time > since:
            evicted[gone.tier] = evicted.get(gone.tier, 0) + gone.pages
            for name, pages in gone.spans.items():
                evicted[name] = evicted.get(name, 0) + pages
    return Snapshot(
        time=figures.last,
        window_s=window,
        started=figures.started is not None,
        pools={name: PoolNow(pool.size, dict(pool.held)) for name, pool in figures.pools.items()},
        lookups=sum(lookup.prompts for lookup in lookups),
        device_tokens=sum(lookup.device for lookup in lookups),
        host_tokens=sum(lookup.host for lookup in lookups),
        lost=lost,
        evicted=evicted,
        queues=_queues(figures, since),
        waiting=len(figures.waiting),
        passes=len(figures.open_steps),
        requests=_requests(figures),
        missed=missed,
    )


def _queues(figures: Figures, since: float) -> dict[str, QueueNow]:
    queues: dict[str, QueueNow] = {}
    in_flight = [copy.queue for copy in figures.in_flight.values()]
    for name in sorted({copy.queue for copy in figures.copies}):
        ended = [
            copy
            for copy in figures.copies
            if copy.queue == name and copy.end is not None and copy.end > since
        ]
        queues[name] = QueueNow(
            len(ended),
            sum(copy.bytes for copy in ended),
            sum((copy.end or 0.0) - max(copy.start, since) for copy in ended),
            in_flight.count(name),
        )
    return queues


def _requests(figures: Figures) -> list[RequestNow]:
    """The oldest that run, then the latest that ended."""
    running = sorted(figures.running.values(), key=lambda request: request.start)[:_ROWS]
    ended = [request for request in figures.requests if request.end is not None][-_ROWS:]
    return [_shown(request, figures.last) for request in (*running, *reversed(ended))]


def _shown(request: RequestSpan, now: float) -> RequestNow:
    state = request.how
    if not state:
        state = "computes" if request.first_step is not None else "begins"
        if any(wait.end is None for wait in request.waits):
            state = "waits for room"
    return RequestNow(
        request.name,
        request.tokens,
        request.reused,
        request.loaded,
        (now if request.end is None else request.end) - request.start,
        state,
        over=request.end is not None,
    )
