"""The configuration of a runtime: one frozen value, checked when it is made."""

from __future__ import annotations

import msgspec

from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import policy_named
from phloem.errors import InvalidRequest
from phloem.runtime.checks import integer
from phloem.runtime.layout import ModelLayout

__all__ = ["CacheConfig"]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a runtime caches, and how much of it.

    `page_size` and the model's own `state_chunk` (the distance of positions at which its kernels
    can keep a state) make the grid, their least common multiple. `device_pages` and
    `device_states` count what can be granted; the reserved page 0 and slot 0 come on top.
    `reuse_decoded=False` publishes only what prefill computed: some models give slightly different
    states by decoding one token at a time. `inline`: callers that find the queue empty take their
    turn at once; the results are the same without. `queue_max` bounds the callers that wait for a
    turn.
    """

    layout: ModelLayout
    page_size: int = 16
    state_chunk: int = 64
    device_pages: int = 4096
    device_states: int = 64
    eviction: str = "lru"
    placement: Placement = Placement()
    enabled: bool = True
    reuse_decoded: bool = True
    inline: bool = True
    queue_max: int = 4096
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("page_size", "state_chunk", "device_pages", "queue_max"):
            integer(name, getattr(self, name), 1)
        integer("device_states", self.device_states, 1 if self.layout.has_states else 0)
        policy_named(self.eviction)
        if self.close_timeout_s <= 0:
            raise InvalidRequest(f"close_timeout_s is {self.close_timeout_s}; it is above 0")

    @property
    def components(self) -> tuple[str, ...]:
        """The kinds of data that the layout needs."""
        return ("kv", "state") if self.layout.has_states else ("kv",)
