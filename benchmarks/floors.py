"""Floors: what the same work costs with nothing around it.

`PythonFloor` is about the least that a prefix tree for hybrid models can do in Python: no
namespaces, leases with owners, ledger, events or checks. The hops are the least that handing a
message to an actor can cost on an event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from heapq import heappop, heappush

import msgspec

from benchmarks.measure import cpu_clock

__all__ = ["FloorNode", "PythonFloor", "hop_cost", "hop_floors"]

_TOKEN = 4  # bytes


class FloorNode(msgspec.Struct, gc=False, eq=False):
    """One node; cycles are never cut, since a floor is dropped whole."""

    parent: FloorNode | None
    edge: bytes
    end: int
    pages: array[int]
    state: int = 0
    children: dict[bytes, FloorNode] | None = None
    stamp: int = 0
    users: int = 0


class PythonFloor:
    """A radix tree of bytes: match, lock, unlock, insert, evict."""

    def __init__(self, page_size: int) -> None:
        self._page = page_size * _TOKEN
        self._root = FloorNode(None, b"", 0, array("i"), users=1)
        self._now = 0
        self._order = 0
        self._heap: list[tuple[int, int, FloorNode]] = []

    def _walk(self, data: bytes) -> tuple[FloorNode, FloorNode]:
        """The deepest node on the way, and the deepest of these with a state."""
        node = best = self._root
        offset = 0
        while node.children is not None:
            child = node.children.get(data[offset : offset + self._page])
            if child is None or not data.startswith(child.edge, offset):
                break
            offset += len(child.edge)
            node = child
            if child.state:
                best = child
        return node, best

    def match(self, data: bytes) -> int:
        """Tokens that can be reused."""
        return self._walk(data)[1].end

    def lock(self, data: bytes) -> FloorNode:
        """Protect what matches."""
        best = self._walk(data)[1]
        node: FloorNode | None = best
        while node is not None:
            node.users += 1
            node = node.parent
        return best

    def unlock(self, best: FloorNode) -> None:
        """End it; the leaf becomes the youngest candidate."""
        self._now += 1
        best.stamp = self._now
        node: FloorNode | None = best
        while node is not None:
            node.users -= 1
            if not node.users and node.children is None:
                self._queue(node)
            node = node.parent

    def insert(self, data: bytes, pages: array[int], state: int, below: FloorNode) -> FloorNode:
        """Hang `data[below.end:]` under `below` as a new leaf."""
        self._now += 1
        edge = data[below.end * _TOKEN :]
        leaf = FloorNode(below, edge, len(data) // _TOKEN, pages, state, stamp=self._now)
        if below.children is None:
            below.children = {}
        below.children[edge[: self._page]] = leaf
        self._queue(leaf)
        return leaf

    def evict(self, pages: int) -> int:
        """Drop the oldest leaves until so many pages are free."""
        gone = 0
        while gone < pages and self._heap:
            noted, order, leaf = heappop(self._heap)
            if leaf.users or leaf.children is not None or leaf.parent is None:
                continue
            if leaf.stamp > noted:
                heappush(self._heap, (leaf.stamp, order, leaf))
                continue
            gone += len(leaf.pages)
            parent, leaf.parent = leaf.parent, None
            assert parent.children is not None
            del parent.children[leaf.edge[: self._page]]
            if not parent.children:
                parent.children = None
                if not parent.users:
                    self._queue(parent)
        return gone

    def _queue(self, node: FloorNode) -> None:
        self._order += 1
        heappush(self._heap, (node.stamp, self._order, node))


# -- hops ------------------------------------------------------------------------------------------


async def _coroutine(value: int) -> int:
    return value


class _QueueActor:
    """A mailbox that is an asyncio.Queue, one future for each call."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            value, reply = await self._queue.get()
            reply.set_result(value)

    async def call(self, value: int) -> int:
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((value, reply))
        return await reply

    def stop(self) -> None:
        self._task.cancel()


class _DrainActor:
    """A deque that the loop drains whole in one callback, one future for each call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._scheduled = False

    def _drain(self) -> None:
        self._scheduled = False
        while self._queue:
            value, reply = self._queue.popleft()
            reply.set_result(value)

    async def call(self, value: int) -> int:
        reply: asyncio.Future[int] = self._loop.create_future()
        self._queue.append((value, reply))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)
        return await reply


async def hop_floors(calls: int) -> dict[str, dict[str, float]]:
    """CPU microseconds a call, by mailbox, for one caller and for 16 at once."""
    queue = _QueueActor()
    kinds = {
        "await a coroutine, no hop": _coroutine,
        "asyncio.Queue and a future": queue.call,
        "deque drained by the loop": _DrainActor().call,
    }
    out = {
        name: {
            str(callers): await hop_cost(partial(_calls, call), callers, calls)
            for callers in (1, 16)
        }
        for name, call in kinds.items()
    }
    queue.stop()
    return out


async def hop_cost(
    caller: Callable[[int], Awaitable[None]], callers: int, calls: int, rounds: int = 5
) -> float:
    """CPU microseconds of each of `calls` calls by so many callers at once; the best round."""
    best = float("inf")
    for _ in range(rounds):
        begun = cpu_clock()
        await asyncio.gather(*(caller(calls // callers) for _ in range(callers)))
        best = min(best, (cpu_clock() - begun) / (calls // callers * callers) / 1e3)
    return best


async def _calls(call: Callable[[int], Awaitable[object]], count: int) -> None:
    for value in range(count):
        await call(value)
