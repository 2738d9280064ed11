"""Figures from events: what the timeline, the report and the live view show.

They need no whole log: what is not told does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from phloem.actors.actions import TREE
from phloem.actors.places import PARKED
from phloem.events import (
    Acquired,
    CopyDropped,
    CopyEnded,
    CopyPlanned,
    CopySubmitted,
    Event,
    Evicted,
    FellBack,
    Freed,
    Granted,
    Inserted,
    Kept,
    LeaseEnded,
    Parked,
    Refused,
    RequestEnded,
    RequestForked,
    RequestOpened,
    RequestSuspended,
    RuntimeStarted,
    StepChanged,
    Waited,
)

__all__ = [
    "CopySpan",
    "Eviction",
    "Figures",
    "HOLDERS",
    "Holder",
    "Lookup",
    "PoolCounts",
    "RequestSpan",
    "Span",
    "pool_of",
]

T = TypeVar("T")
Holder = Literal["free", "parked", "tree", "granted"]
HOLDERS: tuple[Holder, ...] = ("tree", "granted", "parked", "free")


def pool_of(component: str, tier: str) -> str:
    """The name of a pool: `kv`, `state`, `host_kv`, `host_state`, that of a span component."""
    return component if tier == "device" else f"{tier}_{component}"


class PoolCounts:
    """Places of one pool by who holds them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[Holder, int] = dict.fromkeys(HOLDERS, 0)
        self.held["free"] = size

    def move(self, count: int, origin: Holder, to: Holder) -> None:
        """So many places change hands."""
        self.held[origin] -= count
        self.held[to] += count


class Span(msgspec.Struct):
    """Something that lasts, from `start` to `end` in seconds (None: it has not ended)."""

    name: str
    start: float
    end: float | None = None
    outcome: str = ""


class CopySpan(msgspec.Struct):
    """A copy: asked for at `planned`, handed to its queue at `submitted`, running from `start`.

    Where the log does not tell, `start` is when its queue was free for it, since a queue carries
    out one copy at a time.
    """

    op: int
    kind: str
    request: str
    queue: str
    bytes: int
    planned: float
    submitted: float
    start: float
    end: float | None = None
    error: str = ""


class RequestSpan(msgspec.Struct):
    """A request through its life. Times in seconds; `first_step`: when its first pass was sent.

    Of its prompt's `tokens`, `usable` were reused, `loaded` of these from the host, and the others
    `lost` by reason; all this changes when a load fails.
    """

    name: str
    session: str
    namespace: tuple[str, str]
    start: float
    tokens: int
    usable: int
    lost: dict[str, int]
    loaded: int = 0
    ready: float | None = None
    first_step: float | None = None
    end: float | None = None
    how: str = ""
    reused: int = 0
    computed: int = 0
    waits: list[Span] = []


class Lookup(msgspec.Struct, frozen=True):
    """Tokens of a prompt that was looked up: what the device and the host had of it, what was lost.

    A load that fails is one more entry, which takes back what the host was to bring.
    """

    time: float
    device: int
    host: int
    lost: dict[str, int]
    prompts: int = 1


class Eviction(msgspec.Struct, frozen=True):
    """Data that left a tier, or will as soon as they have been copied."""

    time: float
    pages: int
    states: int
    why: str
    by: str
    tier: str
    spans: dict[str, int] = {}  # pages of each span component


class Figures:
    """Takes the events of one or more runs in order.

    `kept` bounds how many spans of each kind are remembered; the oldest go. Those who want all and
    remember less say what they make of each as it ends: see the methods `note_...`.
    """

    def __init__(self, kept: int | None = None) -> None:
        self._kept = kept
        self.started: RuntimeStarted | None = None
        self.runs: list[float] = []
        self.first = 0.0
        self.last = 0.0
        self.events = 0
        self.pools: dict[str, PoolCounts] = {}
        self.occupancy: list[tuple[float, dict[str, dict[Holder, int]]]] = []
        self.lookups: list[Lookup] = []
        self.evictions: list[Eviction] = []
        self.uncopied = {"pages": 0, "states": 0}  # of what was evicted: its copy was not made
        self.requests: list[RequestSpan] = []
        self.copies: list[CopySpan] = []
        self.steps: list[Span] = []
        self.refused: dict[tuple[str, str], int] = {}
        self.dropped: dict[tuple[str, str], int] = {}  # copies, by kind and reason
        self.running: dict[str, RequestSpan] = {}
        self._leases: dict[str, int] = {}  # of those
        self.waiting: dict[int, Span] = {}
        self.in_flight: dict[int, CopySpan] = {}
        self.open_steps: dict[int, Span] = {}
        self._planned: dict[int, tuple[float, CopyPlanned]] = {}
        self._queue_free: dict[str, float] = {}
        self._handlers: dict[type[Event], Callable[..., None]] = {
            RuntimeStarted: self._on_started,
            RequestOpened: self._on_opened,
            RequestForked: self._on_forked,
            RequestSuspended: self._on_suspended,
            Acquired: self._on_acquired,
            RequestEnded: self._on_ended,
            LeaseEnded: self._on_lease_ended,
            FellBack: self._on_fell_back,
            Inserted: self._on_inserted,
            Kept: self._on_kept,
            Evicted: self._on_evicted,
            Granted: self._on_granted,
            Freed: self._on_freed,
            Parked: self._on_parked,
            Waited: self._on_waited,
            Refused: self._on_refused,
            CopyPlanned: self._on_planned,
            CopyDropped: self._on_dropped,
            CopySubmitted: self._on_submitted,
            CopyEnded: self._on_copied,
            StepChanged: self._on_step,
        }

    def add(self, time: float, event: Event) -> None:
        """Take the next event."""
        if not self.events:
            self.first = time
        self.last = time
        self.events += 1
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _keep(self, spans: list[T]) -> None:
        if self._kept is not None and len(spans) > 2 * self._kept:
            del spans[: len(spans) - self._kept]

    # -- for those who want all ----------------------------------------------------------------

    def note_pools(self) -> None:
        """Places have changed hands."""
        held = {name: dict(pool.held) for name, pool in self.pools.items()}
        self.occupancy.append((self.last, held))
        self._keep(self.occupancy)

    def note_lookup(self, lookup: Lookup) -> None:
        """A prompt was looked up, or a load has failed."""
        self.lookups.append(lookup)
        self._keep(self.lookups)

    def note_eviction(self, eviction: Eviction) -> None:
        """Data went."""
        self.evictions.append(eviction)
        self._keep(self.evictions)

    def note_request(self, request: RequestSpan) -> None:
        """A request is over."""

    def note_copy(self, copy: CopySpan) -> None:
        """A copy is over."""

    def note_step(self, step: Span) -> None:
        """A forward pass is over."""

    # -- pools ---------------------------------------------------------------------------------

    def _on_started(self, event: RuntimeStarted) -> None:
        self.started = event
        self.runs.append(self.last)
        self.pools = {"kv": PoolCounts(event.pages), "state": PoolCounts(event.states)}
        if event.host_pages:
            self.pools["host_kv"] = PoolCounts(event.host_pages)
            self.pools["host_state"] = PoolCounts(event.host_states)
        self.pools.update({name: PoolCounts(size) for name, size in event.spans.items()})
        for one in (self.running, self.waiting, self.in_flight, self.open_steps, self._planned):
            one.clear()
        self._leases.clear()
        self._queue_free.clear()
        self.note_pools()

    def _move(self, pool: str, count: int, origin: Holder, to: Holder) -> None:
        if count and pool in self.pools:
            self.pools[pool].move(count, origin, to)

    def _move_spans(self, spans: dict[str, list[int]], origin: Holder, to: Holder) -> None:
        for name, ids in spans.items():
            self._move(name, len(ids), origin, to)

    def _on_granted(self, event: Granted) -> None:
        self._move(pool_of("kv", event.tier), len(event.pages), "free", "granted")
        self._move(pool_of("state", event.tier), len(event.states), "free", "granted")
        self._move_spans(event.spans, "free", "granted")
        self.note_pools()
        wait = self.waiting.pop(event.asked, None)
        if wait is not None:
            wait.end = self.last

    def _on_freed(self, event: Freed) -> None:
        holders: dict[int, Holder] = {TREE: "tree", PARKED: "parked"}
        origin = holders.get(event.owner, "granted")
        self._move(pool_of(event.component, event.tier), len(event.ids), origin, "free")
        self.note_pools()

    def _on_parked(self, event: Parked) -> None:
        self._move("kv", len(event.pages), "granted", "parked")
        self._move("state", len(event.states), "granted", "parked")
        self._move_spans(event.spans, "granted", "parked")
        self.note_pools()

    def _on_inserted(self, event: Inserted) -> None:
        self._move("kv", len(event.adopted), "granted", "tree")
        self._move("state", int(event.adopted_state > 0), "granted", "tree")
        self._move_spans(event.spans, "granted", "tree")
        self.note_pools()

    def _on_kept(self, event: Kept) -> None:
        self._move(pool_of(event.component, event.tier), len(event.ids), "granted", "tree")
        self.note_pools()

    def _on_evicted(self, event: Evicted) -> None:
        if event.why == "no_copy":  # told before, when it was promised
            self.uncopied["pages"] += event.pages
            self.uncopied["states"] += event.states
            return
        pages = event.pages + event.pages_promised
        states = event.states + event.states_promised
        names = () if self.started is None else self.started.spans
        spans = dict(zip(names, event.spans, strict=False))
        if pages or states or any(spans.values()):
            gone = Eviction(self.last, pages, states, event.why, event.request, event.tier, spans)
            self.note_eviction(gone)

    # -- requests ------------------------------------------------------------------------------

    def _on_opened(self, event: RequestOpened) -> None:
        self._looked_up(event)
        self._begin(
            RequestSpan(
                event.request,
                event.session,
                event.namespace,
                self.last,
                event.tokens,
                event.usable,
                dict(event.lost),
                loaded=0 if event.device is None else event.usable - event.device,
                reused=event.usable,
            ),
            event.lease,
        )

    def _on_forked(self, event: RequestForked) -> None:
        parent = self.running.get(event.parent)
        namespace = ("", "") if parent is None else parent.namespace
        session = "" if parent is None else parent.session
        self._begin(
            RequestSpan(
                event.request, session, namespace, self.last, event.tokens, event.tokens, {}
            ),
            event.lease,
        )

    def _begin(self, request: RequestSpan, lease: int) -> None:
        self.running[request.name] = request
        self._leases[request.name] = lease
        self.requests.append(request)
        self._keep(self.requests)

    def _on_acquired(self, event: Acquired) -> None:
        self._looked_up(event)

    def _looked_up(self, event: RequestOpened | Acquired) -> None:
        device = event.usable if event.device is None else event.device
        self.note_lookup(Lookup(self.last, device, event.usable - device, event.lost))

    def _on_fell_back(self, event: FellBack) -> None:
        lost = sum(event.lost.values())
        request = self.running.get(event.request)
        host = lost if request is None else min(lost, request.loaded)
        self.note_lookup(Lookup(self.last, host - lost, -host, event.lost, prompts=0))
        if request is not None:
            request.usable -= lost
            request.loaded -= host
            for why, tokens in event.lost.items():
                request.lost[why] = request.lost.get(why, 0) + tokens

    def _on_suspended(self, event: RequestSuspended) -> None:
        self._ends(event.request, "suspended")  # when it goes on it is another one

    def _on_ended(self, event: RequestEnded) -> None:
        request = self._ends(event.request, event.how)
        if request is not None:
            request.reused, request.computed = event.reused, event.computed
            self.note_request(request)

    def _on_lease_ended(self, event: LeaseEnded) -> None:
        """Forget a request whose caller left before it had it: no other event tells its end."""
        if self._leases.get(event.request) == event.lease and not event.state_only:
            request = self._ends(event.request, "aborted")
            if request is not None:
                self.note_request(request)

    def _ends(self, name: str, how: str) -> RequestSpan | None:
        """Take a request out of those that run; None if it was not one of them."""
        self._leases.pop(name, None)
        request = self.running.pop(name, None)
        if request is not None:
            request.end, request.how = self.last, how
        return request

    def _on_waited(self, event: Waited) -> None:
        wait = self.waiting[event.turn] = Span(event.request, self.last)
        request = self.running.get(event.request)
        if request is not None:
            request.waits.append(wait)

    def _on_refused(self, event: Refused) -> None:
        key = event.what, event.why
        self.refused[key] = self.refused.get(key, 0) + 1
        wait = self.waiting.pop(event.asked, None)
        if wait is not None:
            wait.end, wait.outcome = self.last, event.why

    def _on_step(self, event: StepChanged) -> None:
        if event.state == "opened":
            name = f"step {event.step}"
            step = self.open_steps[event.step] = Span(name, self.last, outcome="opened")
            self.steps.append(step)
            self._keep(self.steps)
            return
        opened = self.open_steps.get(event.step)
        if opened is None:
            return
        if event.state == "over":
            opened.end = self.last
            del self.open_steps[event.step]
            self.note_step(opened)
        else:
            opened.outcome = event.state
        for name in event.requests if event.state == "launched" else ():
            request = self.running.get(name)
            if request is not None and request.first_step is None:
                request.first_step = self.last

    # -- copies --------------------------------------------------------------------------------

    def _on_planned(self, event: CopyPlanned) -> None:
        self._planned[event.op] = self.last, event

    def _on_submitted(self, event: CopySubmitted) -> None:
        planned, plan = self._planned.pop(event.op, (self.last, None))
        copy = self.in_flight[event.op] = CopySpan(
            event.op,
            event.kind,
            "" if plan is None else plan.request,
            event.queue,
            event.bytes,
            planned,
            self.last,
            self.last,
        )
        self.copies.append(copy)
        self._keep(self.copies)

    def _on_copied(self, event: CopyEnded) -> None:
        copy = self.in_flight.pop(event.op, None)
        if copy is None:
            return
        copy.end, copy.error = self.last, event.error
        if event.ended_ns is not None:  # the event comes later than the end: the loop was busy
            copy.end = min(self.last, copy.submitted + event.ended_ns / 1e9)
        if event.started_ns is not None and event.ended_ns is not None:
            # Its own clock says how long it took; a quick one is over before its event is told.
            copy.start = copy.end - (event.ended_ns - event.started_ns) / 1e9
        else:
            free = self._queue_free.get(copy.queue, 0.0)
            copy.start = min(copy.end, max(copy.submitted, free))
        self._queue_free[copy.queue] = copy.end
        request = self.running.get(copy.request)
        if request is not None and request.ready is None and request.first_step is None:
            request.ready = self.last
        self.note_copy(copy)

    def _on_dropped(self, event: CopyDropped) -> None:
        self._planned.pop(event.op, None)
        key = event.kind, event.why
        self.dropped[key] = self.dropped.get(key, 0) + 1
