"""What a cache could reach at most, and what one that knows the future does reach.

Next uses are what all three bounds are made of. A parent is never used later than its child.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import msgspec
import numpy as np
import numpy.typing as npt

from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.requests import Workload

__all__ = ["Bounds", "bounds", "ceiling", "clairvoyant", "dual", "kv_optimum"]

_NEVER = 1 << 62
_MULTIPLIERS = 60  # steps of the search for the best price of memory


class Bounds(msgspec.Struct, frozen=True):
    """Hit rates, as shares of all prompt tokens.

    `ceiling`: an unbounded cache that can use every prefix. `kv_optimum`: pure KV of so many bytes,
    exact. `clairvoyant`: a feasible schedule of KV and states that knows the future; a better one
    may exist. `upper`: no schedule of KV and states can exceed it.
    """

    ceiling: float
    kv_optimum: float
    clairvoyant: float
    upper: float


class _Uses:
    """When blocks are used: `ids[k]` of request k, of which it looks up the first `matchable[k]`."""

    def __init__(self, workload: Workload) -> None:
        self.ids = [np.frombuffer(request.data, np.int32) for request in workload.requests]
        self.matchable = [request.matchable for request in workload.requests]
        self.next = self._next_uses(workload.distinct)

    def _next_uses(self, distinct: int) -> list[npt.NDArray[np.int64]]:
        """For each block of each request, the next request that looks it up."""
        coming = np.full(distinct, _NEVER, np.int64)
        found: list[npt.NDArray[np.int64]] = []
        for number in range(len(self.ids) - 1, -1, -1):
            ids = self.ids[number]
            found.append(coming[ids])
            coming[ids[: self.matchable[number]]] = number
        found.reverse()
        return found


def ceiling(workload: Workload) -> float:
    """The hit rate of an unbounded cache that can use every prefix."""
    seen = np.zeros(workload.distinct, np.bool_)
    hits = 0
    for request in workload.requests:
        ids = np.frombuffer(request.data, np.int32)
        hits += int(seen[ids[: request.matchable]].sum())  # a prefix: ids are chained
        seen[ids] = True
    return hits * workload.block_size / max(1, workload.tokens)


def kv_optimum(workload: Workload, capacity: int, geometry: Geometry) -> float:
    """The best hit rate of pure KV: Belady's rule with bypass, among equals the deeper block goes.

    Exact for blocks of equal size: what is kept is always closed under prefixes.
    """
    uses = _Uses(workload)
    room = capacity // (geometry.kv_bytes * workload.block_size)
    kept: dict[int, int] = {}  # by block: its next use
    order: list[tuple[int, int, int]] = []  # a heap of -next use, -depth, block; some outdated
    hits = 0
    for ids, matchable, coming in zip(uses.ids, uses.matchable, uses.next, strict=True):
        blocks = ids.tolist()
        for depth, (block, use) in enumerate(zip(blocks, coming.tolist(), strict=True)):
            before = kept.get(block)
            hits += before is not None and depth < matchable
            if use == _NEVER:
                kept.pop(block, None)
            elif use != before:
                kept[block] = use
                heappush(order, (-use, -depth, block))
        while len(kept) > room:
            use, _, block = heappop(order)
            if kept.get(block) == -use:
                del kept[block]
    return hits * workload.block_size / max(1, workload.tokens)


class _Packing:
    """Items of a future request and its deepest prefix: that KV and one state at its end.

    The KV of all items together is held once, a state for each end.
    """

    def __init__(self, page_bytes: int, state_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.state_bytes = state_bytes
        self.bytes = 0
        self.items: dict[int, npt.NDArray[np.int32]] = {}  # by the request that will use it
        self._latest: list[int] = []  # a heap of -request; some outdated
        self._pages: dict[int, int] = {}  # by block: how many items need it
        self._states: dict[int, int] = {}  # by the last block before it

    def put(self, request: int, prefix: npt.NDArray[np.int32]) -> None:
        """An item, in place of a shallower one of the same request."""
        former = self.items.get(request)
        if former is not None and len(former) >= len(prefix):
            return
        if former is None:
            heappush(self._latest, -request)
        for block in prefix.tolist():
            count = self._pages.get(block, 0)
            self.bytes += 0 if count else self.page_bytes
            self._pages[block] = count + 1
        end = int(prefix[-1])
        count = self._states.get(end, 0)
        self.bytes += 0 if count else self.state_bytes
        self._states[end] = count + 1
        if former is not None:
            self._release(former)
        self.items[request] = prefix

    def take(self, request: int) -> int:
        """The item's request has come: how many blocks it finds."""
        prefix = self.items.pop(request, None)
        if prefix is None:
            return 0
        self._release(prefix)
        return len(prefix)

    def drop_latest(self) -> None:
        """The item that is used last goes."""
        request = -heappop(self._latest)
        prefix = self.items.pop(request, None)
        if prefix is not None:
            self._release(prefix)

    def _release(self, prefix: npt.NDArray[np.int32]) -> None:
        for block in prefix.tolist():
            self._pages[block] -= 1
            if not self._pages[block]:
                del self._pages[block]
                self.bytes -= self.page_bytes
        end = int(prefix[-1])
        self._states[end] -= 1
        if not self._states[end]:
            del self._states[end]
            self.bytes -= self.state_bytes


def clairvoyant(workload: Workload, capacity: int, geometry: Geometry) -> float:
    """What a feasible schedule of KV and states that knows the future reaches.

    Each request leaves, for every later one that uses a prefix of it next, the deepest such prefix
    and a state at its end; the one used last is dropped first. Whole items only, so the schedule is
    weak where one session fills the cache.
    """
    uses = _Uses(workload)
    packing = _Packing(geometry.kv_bytes * workload.block_size, geometry.state_bytes)
    hits = 0
    for number, (ids, coming) in enumerate(zip(uses.ids, uses.next, strict=True)):
        hits += packing.take(number)
        if not len(ids):
            continue
        ends = np.flatnonzero(np.append(coming[1:] != coming[:-1], True))
        for end in ends.tolist():
            if coming[end] == _NEVER:
                break
            packing.put(int(coming[end]), ids[: end + 1])
            while packing.bytes > capacity:
                packing.drop_latest()
    return hits * workload.block_size / max(1, workload.tokens)


def dual(workload: Workload, capacity: int, geometry: Geometry) -> float:
    """A Lagrangian bound on any schedule of KV and states, with one price for memory.

    Memory is rented by the slot between two requests. At price `x` for each byte and slot a request
    k is best served from the prefix p that maximises `p - x * (KV kept since its last use + a state
    kept since the last use of p)`; the sum of these and the price of the whole memory over all
    slots bounds what is possible at any price, the lowest of them is the answer.
    """
    last = np.full(workload.distinct, -1, np.int64)
    waits: list[npt.NDArray[np.int64]] = []
    for number, request in enumerate(workload.requests):
        ids = np.frombuffer(request.data, np.int32)
        before = last[ids[: request.matchable]]
        known = before[: int((before >= 0).sum())]  # a prefix: ids are chained
        if len(known):
            waits.append(number - known)
        last[ids] = number
    if not waits:
        return 0.0
    size = workload.block_size
    wait = np.concatenate(waits).astype(np.float64)
    lengths = np.array([len(one) for one in waits])
    starts = np.concatenate(([0], lengths.cumsum()[:-1]))
    depth = np.arange(1, len(wait) + 1) - np.repeat(starts, lengths)
    running = wait.cumsum()
    kept = running - np.repeat(running[starts] - wait[starts], lengths)
    rent = kept * (geometry.kv_bytes * size) + wait * geometry.state_bytes
    worth = depth * float(size)
    slots = float(len(workload.requests)) * capacity

    def at(price: float) -> float:
        best = np.maximum.reduceat(worth - price * rent, starts)
        return price * slots + float(np.maximum(best, 0.0).sum())

    return _least(at, float(worth.sum()) / slots) / max(1, workload.tokens)


def _least(function: Callable[[float], float], high: float) -> float:
    """The least value of a convex function between 0 and `high`, closely, never below it."""
    low, best = 0.0, function(0.0)
    for _ in range(_MULTIPLIERS):
        third = (high - low) / 3
        left, right = function(low + third), function(high - third)
        best = min(best, left, right)
        if left < right:
            high -= third
        else:
            low += third
    return best


def bounds(workload: Workload, capacity: int, geometry: Geometry) -> Bounds:
    """All of them."""
    optimum = kv_optimum(workload, capacity, geometry)
    return Bounds(
        ceiling(workload),
        optimum,
        clairvoyant(workload, capacity, geometry),
        min(optimum, dual(workload, capacity, geometry)),
    )
