"""S3-FIFO over blocks of KV: not on the tree, since it leaves holes in prefixes.

A tree gives up a block only when nothing hangs on it. S3-FIFO decides for each block by itself, and
what lies behind a hole cannot be used until the hole is filled.
"""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter

from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.requests import ReplayRequest
from phloem.runtime.replay.served import Decision, Totals

__all__ = ["S3Fifo"]

_SMALL = 0.1  # of the blocks are on probation
_USES_MAX = 3


class S3Fifo:
    """Three queues (SOSP'23): new blocks on probation, proven ones, and names of what had to go.

    A block that is used while on probation moves on, as does one whose name is remembered; a proven
    one that was used since goes round again. The deepest block of a request enters first.
    """

    def __init__(self, geometry: Geometry, block_size: int, capacity: int) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.blocks = max(1, capacity // (geometry.kv_bytes * block_size))
        self.totals = Totals()
        self.number = 0
        self._probation: OrderedDict[int, int] = OrderedDict()  # uses by block
        self._proven: OrderedDict[int, int] = OrderedDict()
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._small = max(1, int(self.blocks * _SMALL))

    def serve(self, request: ReplayRequest) -> Decision:
        """Count the blocks before the first hole, then use or admit all of them."""
        ids = request.ids()
        found = 0
        while found < request.matchable and self._has(ids[found]):
            found += 1
        evicted = 0
        began = perf_counter()
        for block in reversed(ids):
            evicted += self._use(block)
        self.totals.eviction_s += perf_counter() - began
        self.totals.evictions += evicted > 0
        decision = Decision(
            request=self.number,
            hit=found * self.block_size,
            prefix=found * self.block_size,
            states=(),
            skipped=False,
            evicted=(evicted, 0),
        )
        self.number += 1
        self.totals.count(request.tokens, decision, self.geometry)
        return decision

    def _has(self, block: int) -> bool:
        return block in self._probation or block in self._proven

    def _use(self, block: int) -> int:
        """Use a block, or admit it; returns how many had to go."""
        for queue in (self._probation, self._proven):
            uses = queue.get(block)
            if uses is not None:
                queue[block] = min(_USES_MAX, uses + 1)
                return 0
        evicted = 0
        while len(self._probation) + len(self._proven) >= self.blocks:
            if len(self._probation) >= self._small or not self._proven:
                evicted += self._end_probation()
            else:
                evicted += self._evict_proven()
        if block in self._gone:
            del self._gone[block]
            self._proven[block] = 0
        else:
            self._probation[block] = 0
        return evicted

    def _end_probation(self) -> int:
        """Move the oldest that were used on, and give up the first that was not."""
        while self._probation:
            block, uses = self._probation.popitem(last=False)
            if uses:
                self._proven[block] = 0
                continue
            self._gone[block] = None
            while len(self._gone) > self.blocks:
                self._gone.popitem(last=False)
            return 1
        return self._evict_proven()

    def _evict_proven(self) -> int:
        while True:
            block, uses = self._proven.popitem(last=False)
            if not uses:
                return 1
            self._proven[block] = uses - 1
