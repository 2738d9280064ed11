"""Many outcomes in numbers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phloem.runtime.simulation.jobs import Served
from phloem.runtime.simulation.world import Outcome

__all__ = ["Summary", "percentile"]


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Summary(msgspec.Struct, kw_only=True):
    """Many outcomes in numbers. Times are virtual but for `wall_s`."""

    seeds: int = 0
    steps: int = 0
    turns: int = 0
    audits: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    bytes_checked: int = 0
    requests: dict[str, int] = {}
    injected: dict[str, int] = {}
    events: dict[str, int] = {}
    evicted: dict[str, int] = {}
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    preempted: int = 0
    tokens_loaded: int = 0
    queue_max: int = 0
    waited_s: float = 0.0
    first_token_s: list[float] = []
    total_s: list[float] = []

    def add(self, outcome: Outcome[list[Served]]) -> None:
        """Count one outcome."""
        self.seeds += 1
        self.steps += outcome.steps
        self.turns += outcome.turns
        self.audits += outcome.audits
        self.virtual_s += outcome.virtual_s
        self.bytes_checked += outcome.bytes_checked
        self.tokens_loaded += outcome.tokens_loaded
        self.queue_max = max(self.queue_max, outcome.queue_max)
        self.waited_s = max(self.waited_s, outcome.waited_s)
        _count(self.injected, outcome.injected)
        _count(self.events, outcome.events)
        _count(self.evicted, outcome.evicted)
        for served in outcome.result:
            _count(self.requests, {served.how: 1})
            self.preempted += served.preempted
            if served.how == "finished":
                self.prompt_tokens += served.prompt
                self.reused_tokens += served.reused
                self.output_tokens += served.output
                self.first_token_s.append(served.first_token_s)
                self.total_s.append(served.total_s)

    def merge(self, other: Summary) -> None:
        """Count what another summary counted."""
        for name in ("seeds", "steps", "turns", "audits", "virtual_s", "bytes_checked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in (
            *("prompt_tokens", "reused_tokens", "output_tokens"),
            *("preempted", "tokens_loaded"),
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.queue_max = max(self.queue_max, other.queue_max)
        self.waited_s = max(self.waited_s, other.waited_s)
        for name in ("requests", "injected", "events", "evicted"):
            _count(getattr(self, name), getattr(other, name))
        self.first_token_s += other.first_token_s
        self.total_s += other.total_s

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def figures(self) -> dict[str, object]:
        """What a reader wants to know, as plain values; latencies as percentiles."""
        plain = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in ("first_token_s", "total_s")
        }
        latencies = {
            f"{name}_p{round(100 * share)}": round(percentile(getattr(self, name), share), 6)
            for name in ("first_token_s", "total_s")
            for share in (0.5, 0.95, 0.99)
        }
        return {**plain, "hit_rate": round(self.hit_rate, 4), **latencies}


def _count(into: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + count
