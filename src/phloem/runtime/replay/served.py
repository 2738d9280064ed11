"""What serves a trace, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.requests import ReplayRequest, Workload

__all__ = ["Cache", "Decision", "Totals", "serve_all"]


class Decision(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What was decided for one request; all positions in tokens.

    `prefix`: how far KV alone reached. `states`: where states were made. `skipped`: the request's
    data were not kept, since they did not fit. `evicted`: pages and states that went for it.
    `host`: tokens of the hit that were loaded from the host.
    """

    request: int
    hit: int
    prefix: int
    states: tuple[int, ...]
    skipped: bool
    evicted: tuple[int, int]
    host: int = 0


class Totals(msgspec.Struct):
    """Sums over the requests of a replay. `host_tokens` are those of the hits that were loaded.

    `bytes_to_...` crossed the link between the tiers; `pages_moved` moved the border in one memory.
    `eviction_s` and `lookup_s` are the only figures that depend on the machine.
    """

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    host_tokens: int = 0
    flops: float = 0.0
    flops_saved: float = 0.0
    states_made: int = 0
    states_restored: int = 0
    state_bytes_copied: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    pages_moved: int = 0
    skipped: int = 0
    evictions: int = 0
    pages_evicted: int = 0
    states_evicted: int = 0
    eviction_s: float = 0.0
    lookup_s: float = 0.0

    def count(self, tokens: int, decision: Decision, geometry: Geometry) -> None:
        """One request more, of so many prompt tokens.

        A hit copies the state it starts from; every state made but the last one of a request, which
        takes the working slot over, is a copy.
        """
        self.requests += 1
        self.tokens += tokens
        self.hit_tokens += decision.hit
        self.host_tokens += decision.host
        self.flops += geometry.flops(tokens)
        self.flops_saved += geometry.flops(decision.hit)
        self.states_made += len(decision.states)
        restored = decision.hit > 0 and geometry.state_bytes > 0
        self.states_restored += restored
        copies = max(0, len(decision.states) - 1) + restored
        self.state_bytes_copied += copies * geometry.state_bytes
        self.skipped += decision.skipped
        self.pages_evicted += decision.evicted[0]
        self.states_evicted += decision.evicted[1]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that needed no compute."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def compute_saved(self) -> float:
        """Share of the prefills' FLOPs that were not spent."""
        return self.flops_saved / self.flops if self.flops else 0.0


class Cache(Protocol):
    """What serves a trace, one request after another."""

    totals: Totals

    def serve(self, request: ReplayRequest) -> Decision:
        """Serve one."""
        ...


def serve_all(
    cache: Cache, workload: Workload, decided: Callable[[Decision], object] | None = None
) -> Totals:
    """Serve every request of a workload; `decided` hears of each. Returns the cache's totals."""
    for request in workload.requests:
        decision = cache.serve(request)
        if decided is not None:
            decided(decision)
    return cache.totals
