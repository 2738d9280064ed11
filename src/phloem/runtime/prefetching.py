"""Loads ahead of requests: optional work, which nobody waits for and nothing makes room for."""

from __future__ import annotations

from phloem.actors import messages as m
from phloem.actors.domain import nothing_to_undo
from phloem.actors.tree.keys import TokenKey
from phloem.actors.tree.tree import Match
from phloem.runtime.core import Core
from phloem.runtime.lease import Lease
from phloem.runtime.nowait import lease_and_match
from phloem.runtime.opening import undo_lease

__all__ = ["prefetch"]


async def prefetch(core: Core, key: TokenKey, limit: int) -> int:
    """See `CacheRuntime.prefetch`; `limit`: so many tokens of the key are looked up."""
    if core.prefetches >= core.config.prefetches_max:
        match = await core.call(m.Match(key, limit), nothing_to_undo)
        assert isinstance(match, Match)
        return match.device
    core.prefetches += 1
    try:
        message = m.Acquire(key, limit, "prefetch", wait=False, idle=True)
        acquired = await core.call(message, undo_lease(core))
        async with Lease(core, *lease_and_match(acquired)) as lease:
            return (await lease.ready()).usable
    finally:
        core.prefetches -= 1
