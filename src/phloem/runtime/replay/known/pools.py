"""Least recently used blocks: of KV alone, of KV with a state each, or beside a pool of states."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.actors.tree import Tree
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.policies import Policy
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.admission import Spot
from phloem.runtime.replay.known.judicious import NONE_WANTED
from phloem.runtime.replay.memory import Pools

__all__ = ["BlockLru", "NoStates", "TwoEnds", "grid_memory", "kv_memory", "two_pools"]

STATES_SHARE = 0.9  # bytes of states to one of KV, as SGLang divides memory by default


class BlockLru(Policy):
    """Least recently used, each page and each state by itself."""

    name = "block-lru"
    apart = True


class NoStates:
    """A model without states."""

    placement = NONE_WANTED
    from_copy = False

    def positions(self, tree: Tree, lease: Lease, spot: Spot) -> Sequence[int]:
        """None."""
        del tree, lease, spot
        return ()


class TwoEnds:
    """States at the end of the sequence, then at the end of the KV prefix that was found.

    The end only where all of a sequence fits into the pages. At most `states` of them, where there
    are only so many: the later one takes the place.
    """

    placement = NONE_WANTED
    from_copy = True

    def __init__(self, states: int) -> None:
        self.states = states

    def positions(self, tree: Tree, lease: Lease, spot: Spot) -> Sequence[int]:
        """Both ends, where KV is kept."""
        del tree, lease
        prefix = min(spot.prefix, spot.end)
        ends = [spot.end] if spot.whole else []
        if prefix not in (0, *ends):
            ends.append(prefix)
        return ends[max(0, len(ends) - self.states) :]


def kv_memory(capacity: int, geometry: Geometry, block: int) -> Pools:
    """Blocks of KV alone."""
    return Pools(capacity // (geometry.kv_bytes * block))


def grid_memory(capacity: int, geometry: Geometry, block: int) -> Pools:
    """A state with each block of KV: the two are always kept and lost together."""
    return Pools(capacity // (geometry.kv_bytes * block + geometry.state_bytes))


def two_pools(capacity: int, geometry: Geometry, block: int) -> Pools:
    """Bytes divided 1 : 0.9 among KV and states."""
    kv = capacity / (1 + STATES_SHARE)
    return Pools(
        int(kv / (geometry.kv_bytes * block)), int(kv * STATES_SHARE / geometry.state_bytes)
    )
