"""The configuration of a runtime: one frozen value, checked when it is made."""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec

from phloem.actors.tree.components import Components
from phloem.actors.tree.core import BACKUP_HITS, WritePolicy
from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import policy_named
from phloem.errors import InvalidRequest
from phloem.runtime.checks import integer
from phloem.runtime.costs.model import Geometry
from phloem.runtime.costs.published import geometry_named
from phloem.runtime.layout import ModelLayout

__all__ = ["CacheConfig", "parse_bytes"]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a runtime caches, and how much of it.

    `page_size` and the model's own `state_chunk` (the distance of positions at which its kernels
    can keep a state) make the grid, their least common multiple. `device_pages` and
    `device_states` count what can be granted; the reserved page 0 and slot 0 come on top.
    `reuse_decoded=False` publishes only what prefill computed: some models give slightly different
    states by decoding one token at a time. `inline`: callers that find the queue empty take their
    turn at once; the results are the same without. `queue_max` bounds the callers that wait for a
    turn.

    Sliding-window layers (see `KVSpec`) have a pool of their own: `device_spans` says how many of
    its pages can be granted, by the component's name, as in `{"window": 2048}`; by default as many
    as `device_pages`. For models with such layers there is no host tier yet, nor one memory.

    `device_bytes` (a number, or like "16GiB") takes the place of both: one memory for pages and
    states, in frames of a state each, whose use follows what is asked for; 0 leaves it off.

    `eviction` names the order in which data go ("benefit": what will probably save least for its
    bytes goes first, learned; "lru" and others). `placement` says where states are kept.

    `snapshot_slots`: how many snapshots by the model's kernel a request may hold at once; with two
    the older one is what is left to publish when the request ends before the newer one's position.

    `audit_nodes`: after each turn of the tree so many of its nodes are audited, round after round;
    for debugging. A broken one stops the runtime with `CacheCrashed`. 0: only on demand.

    `tell_prompts`: the event of a request's end tells which prefixes it shares, by a digest of 64
    bits for each whole page of its prompt and answer, so that `phloem replay` can read the log of
    events. It contains no tokens, but is no secret either: who guesses a prompt can tell whether it
    was served. It costs about a microsecond and 20 bytes of the log a page, at the request's end.

    `host_bytes` (likewise) is the host tier's, for pages and states together; 0 leaves it off.
    `loads`: whether what is there is loaded "always", or only where that is the
    "cheapest" way to the end of a prompt, by `prefill_tokens_per_s` and `load_bytes_per_s`, or by
    what passes and loads are measured to take where these are 0. `geometry` is what is computed: a
    published model's name, or a `phloem.runtime.costs.model.Geometry`; then a token is taken to
    cost more the more stand before it, without one ("") as much as any other.

    `write_policy` says when data is copied there: "write_through" at its first use, "selective" at
    its second, "write_back" when it leaves the device. The states named in `int8_states` are kept
    there as 8-bit codes, the others exactly. Nobody waits longer than `copy_timeout_s` for a copy
    that could begin: what one between the tiers was to bring is computed instead, and of one on the
    device (the private copy of a state) the caller is told by `CopyFailed`. `prefetches_max` bounds
    the loads that are made ahead of requests at a time; see `CacheRuntime.prefetch`.
    """

    layout: ModelLayout
    page_size: int = 16
    state_chunk: int = 64
    device_pages: int = 4096
    device_states: int = 64
    device_spans: dict[str, int] = {}
    device_bytes: int | str = 0
    snapshot_slots: int = 1
    host_bytes: int | str = 0
    loads: Literal["always", "cheapest"] = "always"
    geometry: str | Geometry = ""
    prefill_tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    write_policy: WritePolicy = "write_through"
    int8_states: tuple[str, ...] = ()
    prefetches_max: int = 4
    eviction: str = "benefit"
    placement: Placement = Placement()
    enabled: bool = True
    reuse_decoded: bool = True
    inline: bool = True
    queue_max: int = 4096
    close_timeout_s: float = 10.0
    copy_timeout_s: float = 60.0
    audit_nodes: int = 0
    tell_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "state_chunk", "device_pages", "queue_max", "snapshot_slots"):
            integer(name, getattr(self, name), 1)
        integer("audit_nodes", self.audit_nodes)
        integer("prefetches_max", self.prefetches_max)
        integer("device_states", self.device_states, 1 if self.layout.has_states else 0)
        self._check_spans()
        policy_named(self.eviction)
        parse_bytes(self.host_bytes)
        parse_bytes(self.device_bytes)
        if self.loads not in ("always", "cheapest"):
            raise InvalidRequest(f"loads is {self.loads!r}; there are 'always' and 'cheapest'")
        for name in ("prefill_tokens_per_s", "load_bytes_per_s"):
            if not 0 <= getattr(self, name) < inf:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; 0: it is measured")
        _ = self.prefill_geometry
        if self.write_policy not in BACKUP_HITS:
            raise InvalidRequest(
                f"no write policy {self.write_policy!r}; there are {[*BACKUP_HITS]}"
            )
        for name in ("close_timeout_s", "copy_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it is above 0")

    def _check_spans(self) -> None:
        spans = Components(self.components, self.page_size, self.state_chunk).spans
        if unknown := self.device_spans.keys() - {span.name for span in spans}:
            raise InvalidRequest(
                f"device_spans names {min(unknown)!r}; the layout has {self.layout.spans}"
            )
        for name, count in self.device_spans.items():
            integer(f"device_spans of {name}", count, 1)
        for name in ("host_bytes", "device_bytes"):
            if spans and parse_bytes(getattr(self, name)):
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)}, but layers are kept as "
                    f"{', '.join(self.layout.spans)}, for which there is none"
                )

    @property
    def prefill_geometry(self) -> Geometry | None:
        """What `geometry` names; raises `InvalidRequest` for an unknown one, or without FLOPs."""
        if self.geometry == "":
            return None
        found = geometry_named(self.geometry) if isinstance(self.geometry, str) else self.geometry
        if not (found.flops_linear > 0 and 0 <= found.flops_quadratic < inf):
            raise InvalidRequest(
                f"geometry {found.name!r} has {found.flops_linear} FLOPs for a token and "
                f"{found.flops_quadratic} for two"
            )
        return found

    @property
    def span_pages(self) -> dict[str, int]:
        """Pages of each span component that can be granted."""
        names = [text.partition(":")[0] for text in self.layout.spans]
        return {name: self.device_spans.get(name, self.device_pages) for name in names}

    def host_places(self, page_bytes: int, slot_bytes: int) -> tuple[int, int]:
        """Pages and states of the host tier, of one budget for both.

        In the proportion of the device pools, so that neither is useless for want of the other;
        half the bytes for each where the device has one memory for both. (0, 0) when there is no
        host tier.
        """
        budget = parse_bytes(self.host_bytes)
        if not budget:
            return 0, 0
        if parse_bytes(self.device_bytes) and self.layout.has_states:
            pages = budget // (2 * page_bytes) if page_bytes else 0
            states = budget // (2 * slot_bytes)
        else:
            device = self.device_pages * page_bytes + self.device_states * slot_bytes
            pages = budget * self.device_pages // device
            states = budget * self.device_states // device
        if not pages or (self.layout.has_states and not states):
            raise InvalidRequest(
                f"host_bytes {self.host_bytes} has no room for a page of {page_bytes} bytes and a "
                f"state of {slot_bytes}"
            )
        return pages, states

    @property
    def components(self) -> tuple[str, ...]:
        """The kinds of data that the layout needs."""
        return (
            ("kv", "state", *self.layout.spans)
            if self.layout.has_states
            else (
                "kv",
                *self.layout.spans,
            )
        )


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(size: int | str) -> int:
    """A number of bytes from a number or from text like "8GiB". Raises `InvalidRequest`."""
    if isinstance(size, str):
        digits = size.rstrip("BKMGTi")
        unit = size[len(digits) :]
        try:
            return integer("bytes", round(float(digits) * _UNITS[unit]))
        except (ValueError, KeyError, OverflowError):
            raise InvalidRequest(
                f"{size!r} is no number of bytes; units are {[*_UNITS][1:]}"
            ) from None
    return integer("bytes", size)
