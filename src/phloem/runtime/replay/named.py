"""Caches by the name of their policy."""

from __future__ import annotations

from collections.abc import Callable

from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import policy_named
from phloem.errors import InvalidRequest
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.admission import AsPlaced
from phloem.runtime.replay.cache import ReplayCache
from phloem.runtime.replay.known.judicious import Judicious, LeafLru
from phloem.runtime.replay.known.pools import (
    BlockLru,
    NoStates,
    TwoEnds,
    grid_memory,
    kv_memory,
    two_pools,
)
from phloem.runtime.replay.known.scored import Gdsf, Marconi, TunedMarconi
from phloem.runtime.replay.requests import Workload

__all__ = ["KNOWN", "cache_named"]

_Maker = Callable[[Workload, Geometry, int], ReplayCache]


def _kv_lru(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    memory = kv_memory(capacity, geometry, workload.block_size)
    return ReplayCache(
        geometry,
        workload.block_size,
        capacity=memory,
        policy=BlockLru(),
        admission=NoStates(),
    )


def _grid(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    memory = grid_memory(capacity, geometry, workload.block_size)
    return ReplayCache(
        geometry,
        workload.block_size,
        capacity=memory,
        policy=BlockLru(),
        admission=NoStates(),
    )


def _two_pools(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    memory = two_pools(capacity, geometry, workload.block_size)
    return ReplayCache(
        geometry,
        workload.block_size,
        capacity=memory,
        policy=BlockLru(),
        admission=TwoEnds(memory.states),
    )


def _judicious(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    return ReplayCache(
        geometry,
        workload.block_size,
        capacity=capacity,
        policy=LeafLru(),
        admission=Judicious(),
    )


def _judicious_4096(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    size = workload.block_size
    return ReplayCache(
        geometry, size, capacity=capacity, policy=LeafLru(), admission=Judicious(4096 // size)
    )


def _marconi(alpha: float) -> _Maker:
    def make(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
        size = workload.block_size
        return ReplayCache(
            geometry,
            size,
            capacity=capacity,
            policy=Marconi(geometry, size, alpha),
            admission=Judicious(),
        )

    return make


def _tuned(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    return TunedMarconi(geometry, workload.block_size, capacity)


def _gdsf(workload: Workload, geometry: Geometry, capacity: int) -> ReplayCache:
    size = workload.block_size
    return ReplayCache(
        geometry,
        size,
        capacity=capacity,
        policy=Gdsf(geometry, size),
        admission=Judicious(),
    )


KNOWN: dict[str, tuple[_Maker, str]] = {
    "kv-lru": (_kv_lru, "blocks of KV without states, least recently used"),
    "grid": (_grid, "a state at every block, least recently used"),
    "two-pools": (_two_pools, "a pool of KV and one of states, 1 : 0.9, each least recently used"),
    "judicious": (_judicious, "states at the end and at branches, least recently used leaves"),
    "judicious-4096": (_judicious_4096, "the same, and a state each 4,096 tokens"),
    "marconi-0": (_marconi(0.0), "Marconi with alpha 0"),
    "marconi-0.1": (_marconi(0.1), "Marconi with alpha 0.1"),
    "marconi-0.5": (_marconi(0.5), "Marconi with alpha 0.5"),
    "marconi-2": (_marconi(2.0), "Marconi with alpha 2"),
    "marconi": (_tuned, "Marconi with alpha tuned on its first requests"),
    "gdsf": (_gdsf, "GreedyDual-Size-Frequency over the same tree"),
}
"""Policies of papers and other systems, by name: how to make a cache, and what they are."""


def cache_named(
    name: str,
    workload: Workload,
    geometry: Geometry,
    capacity: int,
    placement: Placement | None = None,
) -> ReplayCache:
    """A cache of so many bytes under the policy of that name.

    One of `KNOWN`, whose admission is part of it, or an eviction policy of the tree with the
    `placement` of states. Raises `InvalidRequest` for an unknown one.
    """
    if name in KNOWN:
        if placement is not None:
            raise InvalidRequest(f"{name} has an admission of its own")
        return KNOWN[name][0](workload, geometry, capacity)
    return ReplayCache(
        geometry,
        workload.block_size,
        capacity=capacity,
        policy=policy_named(name),
        admission=AsPlaced(placement),
    )
