"""Counts of what happened, since the runtime opened: plain integers, kept by a sink of events.

Nothing here knows Prometheus; `metrics.py` shows the counts to it.
"""

from __future__ import annotations

from typing import TypeVar, get_args

from phloem.actors.tree.components import SPANS
from phloem.actors.tree.placement import Refusal
from phloem.actors.tree.results import LOST
from phloem.events import (
    Acquired,
    CopyDropped,
    CopyEnded,
    CopySubmitted,
    Event,
    Evicted,
    FellBack,
    Granted,
    Inserted,
    LeaseEnded,
    LeaseLeaked,
    Refused,
    RequestEnded,
    RequestForked,
    RequestOpened,
    RequestSuspended,
    ResetDone,
    RuntimeStarted,
    Waited,
)

__all__ = ["TIERS", "Counts"]

TIERS: tuple[str, ...] = ("device", "host")
NOT_LOADED: tuple[str, ...] = ("no_room", "copy_failed", "timed_out", "tier_failed")
EVICTED: tuple[tuple[str, str], ...] = (
    *(("device", why) for why in ("room", "asked", "path_cap")),
    ("host", "room"),
)
EVICTED_SPANS: tuple[tuple[str, str, str], ...] = tuple(
    (name, tier, why) for name in SPANS for tier, why in EVICTED if tier == "device"
)
REFUSED: tuple[tuple[str, str], ...] = (
    *(("room", why) for why in ("no_room", "deadlock", "left", "ended")),
    *(("checkpoint", why) for why in (*get_args(Refusal), "reset")),
)
ENDED: tuple[str, ...] = ("finished", "aborted")
COPIES: tuple[str, ...] = ("copy_state", "copy_pages", "clear_state", "backup", "load")
DROPPED: tuple[tuple[str, str], ...] = tuple(
    (kind, why) for kind in ("backup", "load") for why in ("no_room", "not_wanted")
)


class Counts:
    """A sink that counts. Every series is there from the beginning, at 0."""

    def __init__(self) -> None:
        self.lookups = 0
        self.prompt_tokens = 0
        self.reused_tokens = dict.fromkeys(TIERS, 0)
        self.lost_tokens = dict.fromkeys(LOST, 0)
        self.not_loaded_tokens = dict.fromkeys(NOT_LOADED, 0)
        self.taken_over_tokens = 0
        self.computed_tokens = 0
        self.published_tokens = 0
        self.requests_opened = 0
        self.requests_ended = dict.fromkeys(ENDED, 0)
        self.evicted_pages = dict.fromkeys(EVICTED, 0)
        self.evicted_states = dict.fromkeys(EVICTED, 0)
        self.evicted_spans = dict.fromkeys(EVICTED_SPANS, 0)
        self.refused = dict.fromkeys(REFUSED, 0)
        self.uncopied_pages = 0
        self.uncopied_states = 0
        self.granted_pages = dict.fromkeys(TIERS, 0)
        self.granted_states = dict.fromkeys(TIERS, 0)
        self.granted_spans = {(name, "device"): 0 for name in SPANS}
        self.waits = 0
        self.copies = dict.fromkeys(COPIES, 0)
        self.copies_failed = dict.fromkeys(COPIES, 0)
        self.copies_dropped = dict.fromkeys(DROPPED, 0)
        self.copied_bytes = dict.fromkeys(COPIES, 0)
        self.copying_ns = dict.fromkeys(COPIES, 0)
        self.leases_leaked = 0
        self.resets = 0
        self._usable: dict[str, int] = {}  # of requests that run ...
        self._leases: dict[str, int] = {}  # ... and their leases
        self._suspended: set[str] = set()
        self._in_flight: dict[int, str] = {}
        self._spans: tuple[str, ...] = ()  # the span components, in the order of counts of them

    def __call__(self, event: Event) -> None:
        """Count an event."""
        match event:
            case RequestOpened():
                self.requests_opened += event.request not in self._suspended
                self._suspended.discard(event.request)
                self._usable[event.request] = event.usable
                self._leases[event.request] = event.lease
                self._looked_up(event)
            case RequestSuspended():
                self._suspended.add(event.request)
            case Acquired():
                self._looked_up(event)
            case RequestForked():
                self.requests_opened += 1
            case RequestEnded():
                self._ended(event)
            case LeaseEnded():
                self._lease_ended(event)
            case Inserted():
                self.published_tokens += max(0, event.published - event.reused)
            case FellBack():
                self._fell_back(event)
            case Evicted():
                self._evicted(event)
            case Granted():
                self.granted_pages[event.tier] += len(event.pages)
                self.granted_states[event.tier] += len(event.states)
                for name, ids in event.spans.items():
                    _add(self.granted_spans, (name, event.tier), len(ids))
            case Waited():
                self.waits += 1
            case Refused():
                key = event.what, event.why
                self.refused[key] = self.refused.get(key, 0) + 1
            case CopySubmitted():
                _add(self.copies, event.kind, 1)
                _add(self.copied_bytes, event.kind, event.bytes)
                self._in_flight[event.op] = event.kind
            case CopyEnded():
                kind = self._in_flight.pop(event.op, COPIES[0])
                if event.error:
                    _add(self.copies_failed, kind, 1)
                if event.started_ns is not None and event.ended_ns is not None:
                    _add(self.copying_ns, kind, event.ended_ns - event.started_ns)
            case CopyDropped():
                _add(self.copies_dropped, (event.kind, event.why), 1)
            case LeaseLeaked():
                self.leases_leaked += 1
            case ResetDone():
                self.resets += 1
            case RuntimeStarted():
                self._spans = tuple(event.spans)
            case _:
                pass

    def _looked_up(self, event: RequestOpened | Acquired) -> None:
        self.lookups += 1
        self.prompt_tokens += event.tokens
        device = event.usable if event.device is None else event.device
        self.reused_tokens["device"] += device
        self.reused_tokens["host"] += event.usable - device
        for why, tokens in event.lost.items():
            _add(self.lost_tokens, why, tokens)

    def _fell_back(self, event: FellBack) -> None:
        for why, tokens in event.lost.items():
            _add(self.not_loaded_tokens, why, tokens)
            if event.request in self._usable:
                self._usable[event.request] -= tokens

    def _evicted(self, event: Evicted) -> None:
        if event.why == "no_copy":  # told before, when it was promised
            self.uncopied_pages += event.pages
            self.uncopied_states += event.states
            return
        key = event.tier, event.why
        _add(self.evicted_pages, key, event.pages + event.pages_promised)
        _add(self.evicted_states, key, event.states + event.states_promised)
        for name, pages in zip(self._spans, event.spans, strict=False):
            _add(self.evicted_spans, (name, *key), pages)

    def _ended(self, event: RequestEnded) -> None:
        _add(self.requests_ended, event.how, 1)
        self.computed_tokens += event.computed
        usable = self._forget(event.request)
        if usable is not None:
            self.taken_over_tokens += event.reused - usable

    def _lease_ended(self, event: LeaseEnded) -> None:
        """Forget a request whose caller left before it had it: no other event tells its end."""
        of_request = self._leases.get(event.request) == event.lease and not event.state_only
        if of_request and event.request not in self._suspended:
            _add(self.requests_ended, "aborted", 1)
            self._forget(event.request)

    def _forget(self, request: str) -> int | None:
        """Forget a request that is over; returns what it could reuse when opened, if known."""
        self._suspended.discard(request)
        self._leases.pop(request, None)
        return self._usable.pop(request, None)


K = TypeVar("K")


def _add(counts: dict[K, int], key: K, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount
