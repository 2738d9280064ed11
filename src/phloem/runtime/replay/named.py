"""Caches by the name of their policy."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from phloem.actors.tree.core import WritePolicy
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
from phloem.runtime.replay.known.s3fifo import S3Fifo
from phloem.runtime.replay.known.scored import Gdsf, Marconi, TunedMarconi
from phloem.runtime.replay.memory import Memory, Pools
from phloem.runtime.replay.requests import Workload
from phloem.runtime.replay.served import Cache
from phloem.runtime.replay.whole import WholeReplay

__all__ = ["KNOWN", "Tiers", "cache_named"]


class Tiers(msgspec.Struct, frozen=True):
    """A whole runtime with a host tier of `host` bytes (0: none) and when data are copied there."""

    host: int = 0
    write_policy: WritePolicy = "write_through"


_Maker = Callable[[Workload, Geometry, int], Cache]


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


def _s3_fifo(workload: Workload, geometry: Geometry, capacity: int) -> S3Fifo:
    return S3Fifo(geometry, workload.block_size, capacity)


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
    "kv-s3fifo": (_s3_fifo, "blocks of KV without states, S3-FIFO"),
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
    states_share: float | None = None,
    sessions: bool = False,
    tiers: Tiers | None = None,
) -> Cache:
    """A cache of so many bytes under the policy of that name.

    One of `KNOWN`, whose admission and memory are part of it, or an eviction policy of the tree
    with the `placement` of states: over one budget, or with a pool of states that has
    `states_share` of the bytes. `sessions`: the tree is told of the trace's sessions. `tiers`: as
    the whole runtime has it, over pools or one memory, with running requests. Raises
    `InvalidRequest` for an unknown name, and for options that it does not have.
    """
    if name in KNOWN:
        if placement is not None or states_share is not None or sessions or tiers is not None:
            raise InvalidRequest(f"{name} has an admission and a memory of its own")
        return KNOWN[name][0](workload, geometry, capacity)
    memory: Memory | int = capacity
    if states_share is not None and not 0 < states_share < 1:
        raise InvalidRequest(f"a share of {states_share} of the bytes for states")
    if tiers is not None:
        return WholeReplay(
            geometry,
            workload.block_size,
            capacity=capacity,
            host=tiers.host,
            states_share=states_share,
            write_policy=tiers.write_policy,
            policy=name,
            placement=placement,
            sessions=sessions,
        )
    if states_share is not None:
        memory = Pools(
            int(capacity * (1 - states_share) / (geometry.kv_bytes * workload.block_size)),
            int(capacity * states_share / geometry.state_bytes),
        )
    return ReplayCache(
        geometry,
        workload.block_size,
        capacity=memory,
        policy=policy_named(name),
        admission=AsPlaced(placement),
        sessions=sessions,
    )
