"""What a cache could reach at most, and what one that knows the future does reach.

Next uses are what all three bounds are made of. A parent is never used later than its child.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

import msgspec
import numpy as np
import numpy.typing as npt

from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.requests import Workload

__all__ = ["Bounds", "bounds", "ceiling", "clairvoyant", "dual", "kv_optimum"]

_NEVER = 1 << 62
_STEPS = 50  # of each search for prices of memory


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
    """When blocks are used: request k has `ids[k]` and looks up the first `matchable[k]`."""

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
    """Items, by the last block of a prefix: its KV and a state at its end.

    The KV of all items together is held once.
    """

    def __init__(self, page_bytes: int, state_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.state_bytes = state_bytes
        self.bytes = 0
        self.uses: dict[int, int] = {}  # the next request that ends there, by item
        self._prefixes: dict[int, npt.NDArray[np.int32]] = {}
        self._latest: list[tuple[int, int]] = []  # a heap of -request, item; some outdated
        self._pages: dict[int, int] = {}  # by block: how many items need it

    def put(self, prefix: npt.NDArray[np.int32], use: int) -> None:
        """An item, or another use of it."""
        end = int(prefix[-1])
        if end not in self.uses:
            self._prefixes[end] = prefix
            self.bytes += self.state_bytes
            for block in prefix.tolist():
                count = self._pages.get(block, 0)
                self.bytes += 0 if count else self.page_bytes
                self._pages[block] = count + 1
        self.uses[end] = use
        heappush(self._latest, (-use, end))

    def drop_latest(self) -> None:
        """The item that is used last goes."""
        use, end = heappop(self._latest)
        if self.uses.get(end) == -use:
            self.drop(end)

    def drop(self, end: int) -> None:
        """An item goes."""
        del self.uses[end]
        self.bytes -= self.state_bytes
        for block in self._prefixes.pop(end).tolist():
            self._pages[block] -= 1
            if not self._pages[block]:
                del self._pages[block]
                self.bytes -= self.page_bytes


def clairvoyant(workload: Workload, capacity: int, geometry: Geometry) -> float:
    """What a feasible schedule of KV and states that knows the future reaches.

    A later request would best start where it parts from all before it. There, each request that
    passes leaves a state, and its KV up to there, for the next that will start there; what is used
    last is dropped first. Whole prefixes only: weak where one session fills the cache.
    """
    ids = [np.frombuffer(request.data, np.int32) for request in workload.requests]
    starts = np.zeros(workload.distinct, np.bool_)
    coming: dict[int, deque[int]] = {}
    seen = np.zeros(workload.distinct, np.bool_)
    for number, (blocks, request) in enumerate(zip(ids, workload.requests, strict=True)):
        known = int(seen[blocks[: request.matchable]].sum())  # a prefix: ids are chained
        if known:
            starts[blocks[known - 1]] = True
            coming.setdefault(int(blocks[known - 1]), deque()).append(number)
        seen[blocks] = True
    packing = _Packing(geometry.kv_bytes * workload.block_size, geometry.state_bytes)
    hits = 0
    for number, (blocks, request) in enumerate(zip(ids, workload.requests, strict=True)):
        places = np.flatnonzero(starts[blocks]).tolist()
        held = [at for at in places if int(blocks[at]) in packing.uses]
        found = max((at + 1 for at in held if at < request.matchable), default=0)
        hits += found
        for at in places:
            end = int(blocks[at])
            uses = coming[end]
            while uses and uses[0] <= number:
                uses.popleft()
            if uses and (at >= found or end in packing.uses):
                packing.put(blocks[: at + 1], uses[0])
            elif end in packing.uses:
                packing.drop(end)
        while packing.bytes > capacity:
            packing.drop_latest()
    return hits * workload.block_size / max(1, workload.tokens)


class _Rents:
    """What each request could be served from, and which memory that would have taken.

    Memory is rented by the slot between two requests, at a price for each byte in each slot. A
    request served from a prefix has rented its KV since the last use of each block, and a state
    since the last use of the prefix's end.
    """

    def __init__(self, workload: Workload, capacity: int, geometry: Geometry) -> None:
        last = np.full(workload.distinct, -1, np.int64)
        since: list[npt.NDArray[np.int64]] = []
        until: list[int] = []
        for number, request in enumerate(workload.requests):
            ids = np.frombuffer(request.data, np.int32)
            before = last[ids[: request.matchable]]
            known = before[: int((before >= 0).sum())]  # a prefix: ids are chained
            if len(known):
                since.append(known)
                until.append(number)
            last[ids] = number
        size = workload.block_size
        self.slots = len(workload.requests)
        self.capacity = float(capacity)
        self.page_bytes = float(geometry.kv_bytes * size)
        self.state_bytes = float(geometry.state_bytes)
        lengths = np.array([len(one) for one in since], np.int64)
        self.any = len(since) > 0
        self.since = np.concatenate([*since, np.empty(0, np.int64)])
        self.lengths = lengths
        self.starts = lengths.cumsum() - lengths
        self.until = np.repeat(np.array(until, np.int64), lengths)
        self.worth = (np.arange(len(self.since)) - np.repeat(self.starts, lengths) + 1.0) * size

    def price(self, prices: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        """The bound at these prices, and how many bytes each slot would then be asked for."""
        total = np.concatenate(([0.0], prices.cumsum()))
        wait = total[self.until] - total[self.since]
        running = wait.cumsum()
        before = np.repeat(running[self.starts] - wait[self.starts], self.lengths)
        gain = self.worth - (running - before) * self.page_bytes - wait * self.state_bytes
        best = np.maximum.reduceat(gain, self.starts)
        value = self.capacity * float(total[-1]) + float(np.maximum(best, 0.0).sum())
        return value, self._asked(gain, best)

    def _asked(
        self, gain: npt.NDArray[np.float64], best: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Bytes that are rented in each slot when each request takes its best prefix."""
        places = np.arange(len(gain))
        ends = np.where(gain == np.repeat(best, self.lengths), places, len(gain))
        end = np.minimum.reduceat(ends, self.starts)
        taken = places <= np.repeat(np.where(best > 0, end, -1), self.lengths)
        end = end[best > 0]
        change = self.page_bytes * self._balance(taken) + self.state_bytes * self._balance(end)
        return change.cumsum()[:-1]

    def _balance(self, chosen: npt.NDArray[np.bool_ | np.int64]) -> npt.NDArray[np.int64]:
        """How many more rents begin than end in each slot."""
        slots = self.slots + 1
        begun = np.bincount(self.since[chosen], minlength=slots)
        return begun - np.bincount(self.until[chosen], minlength=slots)


def dual(workload: Workload, capacity: int, geometry: Geometry) -> float:
    """A Lagrangian bound on any schedule of KV and states.

    Whatever the price of memory in each slot, the gains of all requests at that price and the price
    of the whole memory bound what is possible. First the best price for all slots alike is sought,
    then prices of their own, raised where more is asked for than there is, and lowered where less.
    """
    rents = _Rents(workload, capacity, geometry)
    if not rents.any:
        return 0.0
    alike = np.ones(rents.slots)
    low, high = 0.0, float(rents.worth.sum()) / (rents.slots * capacity)
    best = rents.price(alike * 0.0)[0]
    for _ in range(_STEPS):
        third = (high - low) / 3
        left, right = (rents.price(alike * at)[0] for at in (low + third, high - third))
        best = min(best, left, right)
        low, high = (low, high - third) if left < right else (low + third, high)
    prices = alike * (low + high) / 2
    for step in range(_STEPS):
        value, asked = rents.price(prices)
        best = min(best, value)
        excess = np.clip(asked / capacity - 1, -1, 1)
        prices *= np.exp(excess / np.sqrt(step + 1))
    return best / max(1, workload.tokens)


def bounds(workload: Workload, capacity: int, geometry: Geometry) -> Bounds:
    """All of them."""
    optimum = kv_optimum(workload, capacity, geometry)
    return Bounds(
        ceiling(workload),
        optimum,
        clairvoyant(workload, capacity, geometry),
        min(optimum, dual(workload, capacity, geometry)),
    )
