"""The runtime in numbers."""

from __future__ import annotations

import msgspec

from phloem.actors.places import Pool
from phloem.actors.tree.results import TreeFigures

__all__ = ["PoolStats", "Stats", "pool_stats"]


class PoolStats(msgspec.Struct, frozen=True):
    """One pool, in pages or slots: free + parked + tree + granted = size.

    `free` can be granted at once; `parked` was given back and waits for forward passes and copies
    that may still touch it; `tree` is cached, and `granted` is what requests and grants own.
    """

    size: int
    free: int
    parked: int
    tree: int
    granted: int


class Stats(msgspec.Struct, frozen=True):
    """The runtime in numbers, at one instant.

    `kv` and `state` are the pools of the device. `requests` run, and `waiting` calls wait for room.
    `turns` and `actions` (by kind) count what the actors have done since the runtime was opened,
    `refused_checkpoints` those that found no slot for a state, and `leases_leaked` the leases that
    were collected by Python without having been released.
    """

    kv: PoolStats
    state: PoolStats
    spans: dict[str, PoolStats]
    """The pools of other components, by name."""
    tree: TreeFigures
    requests: int
    waiting: int
    copies_in_flight: int
    turns: int
    actions: dict[str, int]
    refused_checkpoints: int
    leases_leaked: int
    host_kv: PoolStats | None
    host_state: PoolStats | None
    """The pools of the host tier; None when it is off."""
    host_bytes: int
    """What they take, all told."""
    tokens_loaded: int
    """Tokens that requests reused from the host tier."""
    host_closed: str
    """Why the host tier is left alone at the moment, if it is."""
    frames_cleared: int
    pages_moved: int
    """Where pages and states share one memory: what was cleared for states, and moved for it."""
    near: str
    """Where the copy threads of a device are bound to CPUs near it, or why not; empty without."""


def pool_stats(pool: Pool) -> PoolStats:
    """A pool as it is now."""
    return PoolStats(pool.extent, pool.room, pool.parked, pool.tree, pool.granted)
