"""The same four operations through each way in: the floor, the pure tree, nowait, await.

Every form holds the same kind of tree: a uniform one of depth 4 with edges of 256 tokens, so that a
path is 1,024 tokens, and a state at every node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.floors import FloorNode, PythonFloor
from phloem.actors.actions import Ids
from phloem.actors.tree import Tree
from phloem.actors.tree.keys import TokenKey
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.layout import ModelLayout, StateSpec
from phloem.runtime.lease import Lease

__all__ = [
    "EDGE",
    "PAGE",
    "AwaitForm",
    "FloorForm",
    "Form",
    "NowaitForm",
    "Paths",
    "TreeForm",
    "open_runtime",
]

PAGE = 16
EDGE = 256
DEPTH = 4
_VOCABULARY = 150_000
_LAYOUT = ModelLayout.hybrid(
    kv_layers=1, kv_heads=1, head_dim=1, states=[StateSpec("state", (1,), "float32", layers=1)]
)


class Paths:
    """The keys of a uniform tree of at most `nodes`, parents first, and new keys under them."""

    def __init__(self, nodes: int, edge: int = EDGE, depth: int = DEPTH) -> None:
        self._rng = np.random.default_rng(7)
        self._edge = edge
        self._depth = depth
        self._fanout = 2
        while self._count(self._fanout + 1) <= nodes:
            self._fanout += 1
        self.nodes = self._count(self._fanout)
        self.leaves: list[bytes] = []

    def _count(self, fanout: int) -> int:
        return sum(fanout**level for level in range(1, self._depth + 1))

    def tokens(self, count: int) -> bytes:
        """Random token ids as a key has them."""
        return self._rng.integers(0, _VOCABULARY, count, dtype=np.int32).tobytes()

    def __iter__(self) -> Iterator[TokenKey]:
        """Every node's key once; the leaves are kept for `some`."""
        self.leaves.clear()
        return self._below(b"", 1)

    def _below(self, prefix: bytes, level: int) -> Iterator[TokenKey]:
        for _ in range(self._fanout):
            path = prefix + self.tokens(self._edge)
            yield TokenKey(path)
            if level < self._depth:
                yield from self._below(path, level + 1)
            else:
                self.leaves.append(path)

    def some(self, count: int, more: int = EDGE) -> list[TokenKey]:
        """`count` keys that lead to leaves of the tree and go on for `more` new tokens."""
        chosen: list[int] = self._rng.integers(len(self.leaves), size=count).tolist()
        return [TokenKey(self.leaves[leaf] + self.tokens(more)) for leaf in chosen]


class Job(NamedTuple):
    """An insert about to happen."""

    key: TokenKey
    lease: object
    pages: Ids
    state: int


class Form(Protocol):
    """One way in, without awaiting."""

    name: str

    def match(self, key: TokenKey) -> object: ...
    def lease(self, key: TokenKey) -> None: ...
    def begin(self, key: TokenKey) -> Job: ...
    def insert(self, job: Job) -> object: ...
    def end(self, job: Job) -> None: ...
    def evict(self, pages: int) -> object: ...


class FloorForm:
    """The floor; it has no pools, so pages are numbers that nobody counts."""

    name = "floor"

    def __init__(self, paths: Paths) -> None:
        self._floor = PythonFloor(PAGE)
        for key in paths:
            self.end(self._insert(self.begin(key)))

    def _insert(self, job: Job) -> Job:
        self.insert(job)
        return job

    def match(self, key: TokenKey) -> object:
        return self._floor.match(key.data)

    def lease(self, key: TokenKey) -> None:
        self._floor.unlock(self._floor.lock(key.data))

    def begin(self, key: TokenKey) -> Job:
        below = self._floor.lock(key.data)
        return Job(key, below, array("i", bytes(4 * ((key.length - below.end) // PAGE))), 1)

    def insert(self, job: Job) -> object:
        assert isinstance(job.lease, FloorNode)
        return self._floor.insert(job.key.data, job.pages, job.state, job.lease)

    def end(self, job: Job) -> None:
        assert isinstance(job.lease, FloorNode)
        self._floor.unlock(job.lease)

    def evict(self, pages: int) -> object:
        return self._floor.evict(pages)


class TreeForm:
    """The pure tree; page ids and slots are numbers that nobody grants or takes back."""

    name = "tree alone"

    def __init__(self, paths: Paths) -> None:
        self.tree = Tree(page_size=PAGE)
        self._page = self._slot = 0
        for key in paths:
            job = self.begin(key)
            self.insert(job)
            self.end(job)

    def match(self, key: TokenKey) -> object:
        return self.tree.match(key)

    def lease(self, key: TokenKey) -> None:
        self.tree.release(self.tree.acquire(key, owner="bench")[0])

    def begin(self, key: TokenKey) -> Job:
        lease, match = self.tree.acquire(key, owner="bench")
        count = (key.length - match.usable) // PAGE
        pages = array("i", range(self._page + 1, self._page + 1 + count))
        self._page += count
        self._slot += 1
        return Job(key, lease, pages, self._slot)

    def insert(self, job: Job) -> object:
        assert isinstance(job.lease, TreeLease)
        return self.tree.insert(job.key, job.pages, job.state, job.lease)

    def end(self, job: Job) -> None:
        assert isinstance(job.lease, TreeLease)
        self.tree.release(job.lease)

    def evict(self, pages: int) -> object:
        return self.tree.evict(pages)


async def open_runtime(pages: int, states: int) -> CacheRuntime:
    """A runtime with pools of one layer, one head and head dim 1, and states anywhere."""
    config = CacheConfig(
        layout=_LAYOUT, page_size=PAGE, state_chunk=1, device_pages=pages, device_states=states
    )
    return await CacheRuntime(config).open()


class NowaitForm:
    """The runtime's forms that never wait."""

    name = "nowait"

    def __init__(self, cache: CacheRuntime, paths: Paths) -> None:
        self._nowait = cache.nowait
        for key in paths:
            job = self.begin(key)
            self.insert(job)
            self.end(job)

    def match(self, key: TokenKey) -> object:
        return self._nowait.match(key, whole=True)

    def lease(self, key: TokenKey) -> None:
        self._nowait.release(self._nowait.acquire(key, whole=True))

    def begin(self, key: TokenKey) -> Job:
        lease = self._nowait.acquire(key, whole=True)
        grant = self._nowait.allocate(pages=(key.length - lease.boundary) // PAGE, states=1)
        return Job(key, lease, grant.pages, grant.states[0])

    def insert(self, job: Job) -> object:
        assert isinstance(job.lease, Lease)
        return self._nowait.insert(job.key, pages=job.pages, state=job.state, lease=job.lease)

    def end(self, job: Job) -> None:
        assert isinstance(job.lease, Lease)
        self._nowait.release(job.lease)

    def evict(self, pages: int) -> object:
        return self._nowait.evict(pages=pages)


class AwaitForm:
    """The runtime's coroutines, over the tree that a `NowaitForm` built; inline or queued."""

    def __init__(self, cache: CacheRuntime, *, inline: bool) -> None:
        self.name = "await, inline" if inline else "await, queued"
        self.inline = inline
        self._cache = cache

    async def match(self, key: TokenKey) -> object:
        return await self._cache.match(key, whole=True)

    async def lease(self, key: TokenKey) -> None:
        self._cache.release(await self._cache.acquire(key, whole=True))

    async def begin(self, key: TokenKey) -> Job:
        lease = await self._cache.acquire(key, whole=True)
        grant = await self._cache.allocate(pages=(key.length - lease.boundary) // PAGE, states=1)
        return Job(key, lease, grant.pages, grant.states[0])

    async def insert(self, job: Job) -> object:
        assert isinstance(job.lease, Lease)
        return await self._cache.insert(job.key, pages=job.pages, state=job.state, lease=job.lease)

    async def end(self, job: Job) -> None:
        assert isinstance(job.lease, Lease)
        self._cache.release(job.lease)

    async def evict(self, pages: int) -> object:
        return await self._cache.evict(pages=pages)
