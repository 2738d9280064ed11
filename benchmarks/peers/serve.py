"""One request through an adapter, timed operation by operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from benchmarks.measure import Clock, Summary, involuntary_switches, summary, wall_clock
from benchmarks.peers.protocol import Adapter, Place, Tokens
from benchmarks.peers.workloads import Request

__all__ = ["OutOfRoom", "Record", "serve", "serve_all"]

Operation = Literal["key", "match", "gather", "allocate", "evict", "insert", "branch"]


class OutOfRoom(Exception):
    """The cache could not make room for a request, though nothing else is protected."""


class Record:
    """Samples of one run, in nanoseconds. `insert` is lock, insert and unlock together.

    With the wall clock, a sample during which the kernel took the core away is dropped and counted
    in `preempted`.
    """

    def __init__(self, clock: Clock = wall_clock) -> None:
        self.clock = clock
        self.samples: dict[Operation, list[int]] = {}
        self.requests: list[int] = []
        self.hit = 0
        self.tokens = 0
        self.evicted = 0
        self.preempted = 0

    def switches(self) -> int:
        """What tells a preempted sample; constant where none is dropped."""
        return involuntary_switches() if self.clock is wall_clock else 0

    def keep(self, spent: dict[Operation, int]) -> None:
        """Add the samples of one request; its key is made before it begins."""
        for operation, duration in spent.items():
            self.samples.setdefault(operation, []).append(duration)
        self.requests.append(sum(spent.values()) - spent.get("key", 0))

    def last(self, count: int) -> Record:
        """The samples of the last `count` requests, or of their last operations."""
        tail = Record(self.clock)
        tail.samples = {name: samples[-count:] for name, samples in self.samples.items()}
        tail.requests = self.requests[-count:]
        return tail

    def figures(self) -> dict[str, Summary | float]:
        """The summary of each operation and of whole requests, and the token hit rate."""
        out: dict[str, Summary | float] = {
            name: summary(samples) for name, samples in self.samples.items()
        }
        if self.requests:
            out["request"] = summary(self.requests)
        out["hit_rate"] = self.hit / max(1, self.tokens)
        out["evicted_tokens"] = float(self.evicted)
        out["preempted"] = float(self.preempted)
        return out


def serve(adapter: Adapter, request: Request, record: Record, held: Tokens | None = None) -> None:
    """Match, lock, gather, allocate what is missing (evicting), insert, unlock.

    Where the cache wants a state before the end, the request stops there, inserts and goes on, as
    the chunks of a prefill do. `held`, for a verifying run, is what each slot holds.
    """
    clock = record.clock
    length = len(request.tokens) // adapter.page_size * adapter.page_size
    spent: dict[Operation, int] = {"allocate": 0, "insert": 0}
    switches = record.switches()
    begun = clock()
    key = adapter.key(request.tokens)
    keyed = clock()
    match = adapter.match(key)
    matched = clock()
    receipt = adapter.lock(match.handle)
    locked = clock()
    gathered = adapter.slots(match, receipt)
    spent["gather"] = clock() - locked
    wanted = adapter.wanted(match, request.breakpoints) if adapter.hybrid else ()
    spent["key"], spent["match"] = keyed - begun, matched - keyed
    spent["insert"] += locked - matched
    place = Place(match, receipt, gathered)
    record.hit += min(match.hit, length)
    record.tokens += len(request.tokens)
    for stop in (*(at for at in wanted if match.hit < at < length), length):
        if stop > place.match.hit:
            place = _extend(adapter, request, key, stop, place, record, spent, held)
    if place.receipt is not None:
        begun = clock()
        adapter.unlock(place.receipt)
        spent["insert"] += clock() - begun
    if record.switches() != switches:
        record.preempted += 1
    else:
        record.keep(spent)


def _extend(
    adapter: Adapter,
    request: Request,
    key: Any,
    stop: int,
    place: Place,
    record: Record,
    spent: dict[Operation, int],
    held: Tokens | None,
) -> Place:
    """Compute up to `stop`: allocate and insert with a state; where the request stands then."""
    clock, hit = record.clock, place.match.hit
    slots, state = _room(adapter, stop - hit, record, spent)
    if held is not None and not adapter.fused:
        held[adapter.slots_to_numpy(slots)] = request.tokens[hit:stop]
    last = stop == len(request.tokens) // adapter.page_size * adapter.page_size
    begun = clock()
    if last:
        adapter.finish(key, stop, slots, state, place)
        spent["insert"] += clock() - begun
        place = place._replace(receipt=None)
    else:
        part = adapter.cut(key, stop)
        adapter.insert(part, stop, slots, state, place)
        place = adapter.continue_from(part, place)
        spent["branch"] = spent.get("branch", 0) + clock() - begun
    if held is not None and adapter.fused:
        held[adapter.slots_to_numpy(adapter.written())[:stop]] = request.tokens[:stop]
    return place


def _room(
    adapter: Adapter, tokens: int, record: Record, spent: dict[Operation, int]
) -> tuple[Any, Any]:
    """Slots and a state, evicting when either is short."""
    clock = record.clock
    begun = clock()
    slots = adapter.allocate(tokens)
    state = adapter.allocate_state() if adapter.hybrid and slots is not None else None
    spent["allocate"] += clock() - begun
    if slots is None:
        slots = _evict_then(adapter.allocate, (tokens, 0), (tokens,), adapter, record, spent)
        begun = clock()
        state = adapter.allocate_state() if adapter.hybrid else None
        spent["allocate"] += clock() - begun
    if state is None and adapter.hybrid:
        state = _evict_then(adapter.allocate_state, (0, 1), (), adapter, record, spent)
    return slots, state


def _evict_then(
    again: Any,
    demand: tuple[int, int],
    arguments: tuple[int, ...],
    adapter: Adapter,
    record: Record,
    spent: dict[Operation, int],
) -> Any:
    clock = record.clock
    begun = clock()
    freed, _ = adapter.evict(*demand)
    evicted = clock()
    got = again(*arguments)
    ended = clock()
    spent["evict"] = spent.get("evict", 0) + evicted - begun
    spent["allocate"] += ended - evicted
    record.evicted += freed
    if got is None:
        raise OutOfRoom(f"no room for {demand[0]} tokens and {demand[1]} states")
    return got


def serve_all(
    adapter: Adapter, requests: Iterable[Request], record: Record, held: Tokens | None = None
) -> None:
    """Serve a stream. With `held`, the slots of each hit must hold the tokens asked for."""
    for request in requests:
        if held is not None:
            match = adapter.match(adapter.key(request.tokens))
            receipt = adapter.lock(match.handle)
            slots = adapter.slots_to_numpy(adapter.slots(match, receipt))[: match.hit]
            adapter.unlock(receipt)
            if not (held[slots] == request.tokens[: match.hit]).all():
                raise AssertionError(f"a hit of {match.hit} tokens has slots that hold others")
        serve(adapter, request, record, held)
