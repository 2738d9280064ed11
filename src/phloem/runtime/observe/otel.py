"""Spans for OpenTelemetry, from events: one for each request, wait for room and copy.

    spans = SpanSink(trace.get_tracer("my.server"))
    async with CacheRuntime(config, events=several(log, spans)) as cache: ...

A span's parent is what the caller has bound as `traceparent` (W3C) with
`structlog.contextvars.bind_contextvars`; without one a request begins a trace of its own. Only the
API package is needed here: samplers and exporters are those of the application.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from phloem.events import (
    CopyDropped,
    CopyEnded,
    CopyPlanned,
    CopySubmitted,
    Event,
    Evicted,
    FellBack,
    Granted,
    LeaseEnded,
    Refused,
    RequestEnded,
    RequestForked,
    RequestOpened,
    RequestSuspended,
    RuntimeStopped,
    Waited,
)

__all__ = ["SpanSink"]

_CARRIED = ("traceparent", "tracestate")


class SpanSink:
    """A sink that makes spans with `tracer`. `clock_ns` gives nanoseconds since the epoch.

    A request has a span until it ends or is suspended, and another one when it goes on. It has
    `gen_ai.usage.cache_read.input_tokens` (what was reused),
    `gen_ai.usage.cache_creation.input_tokens` (what it computed) and, under `phloem.`, the tokens
    lost by reason. Spans that are open when the runtime stops are ended then.
    """

    def __init__(self, tracer: Tracer, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._carrier = TraceContextTextMapPropagator()
        self._requests: dict[str, tuple[Span, int]] = {}  # by name: with the number of the lease
        self._waits: dict[int, Span] = {}
        self._copies: dict[int, Span] = {}

    def __call__(self, event: Event) -> None:
        """Take an event, within the turn in which it happened."""
        match event:
            case RequestOpened():
                self._opened(event)
            case RequestForked():
                span = self._begin("phloem.request", event)
                span.set_attribute("phloem.forked_from", event.parent)
                self._requests[event.request] = span, event.lease
            case RequestSuspended():
                self._suspended(event)
            case RequestEnded():
                self._ended(event)
            case LeaseEnded():
                self._lease_ended(event)
            case Waited():
                wait = self._waits[event.turn] = self._begin("phloem.wait_for_room", event)
                wait.set_attributes({"phloem.pages": event.pages, "phloem.states": event.states})
            case Granted():
                self._finish(self._waits.pop(event.asked, None))
            case Refused():
                self._finish(self._waits.pop(event.asked, None), event.why)
            case Evicted():
                self._evicted(event)
            case CopyPlanned():
                copy = self._copies[event.op] = self._begin("phloem.copy", event)
                copy.set_attribute("phloem.copy.kind", event.kind)
            case CopySubmitted():
                self._submitted(event)
            case CopyEnded():
                self._copied(event)
            case CopyDropped():
                self._finish(self._copies.pop(event.op, None), event.why)
            case FellBack():
                self._fell_back(event)
            case RuntimeStopped():
                self._stopped(event)
            case _:
                pass

    def _begin(self, name: str, event: Event) -> Span:
        """A span under that of its request, or under the caller's."""
        of_request = self._requests.get(event.request)
        if of_request is not None:
            parent = set_span_in_context(of_request[0], Context())
        else:
            carried = {key: event.context[key] for key in _CARRIED if key in event.context}
            parent = self._carrier.extract(carried, Context())
        attributes = {"phloem.request": event.request} if event.request else {}
        return self._tracer.start_span(name, parent, attributes=attributes, start_time=self._now())

    def _now(self) -> int:
        return self._clock_ns()

    def _finish(self, span: Span | None, error: str = "") -> None:
        if span is None:
            return
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._now())

    def _opened(self, event: RequestOpened) -> None:
        span = self._begin("phloem.request", event)
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": event.tokens,
                "gen_ai.usage.cache_read.input_tokens": event.usable,
                "phloem.kv_prefix": event.kv_prefix,
                "phloem.reused.device": event.usable if event.device is None else event.device,
                **{f"phloem.lost.{why}": tokens for why, tokens in event.lost.items()},
            }
        )
        if event.session:
            span.set_attribute("session.id", event.session)
        self._requests[event.request] = span, event.lease

    def _ended(self, event: RequestEnded) -> None:
        span, _ = self._requests.pop(event.request, (None, 0))
        if span is not None:
            span.set_attributes(
                {
                    "gen_ai.usage.cache_read.input_tokens": event.reused,
                    "gen_ai.usage.cache_creation.input_tokens": event.computed,
                    "phloem.loaded_from_host": event.loaded,
                    "phloem.published": event.published,
                    "phloem.how": event.how,
                }
            )
            self._finish(span)

    def _suspended(self, event: RequestSuspended) -> None:
        span, _ = self._requests.pop(event.request, (None, 0))
        if span is not None:
            span.set_attribute("phloem.how", "suspended")
            self._finish(span)

    def _lease_ended(self, event: LeaseEnded) -> None:
        """The lease of a request that nobody was left to hear of."""
        found = self._requests.get(event.request)
        if found is not None and found[1] == event.lease and not event.state_only:
            del self._requests[event.request]
            self._finish(found[0], "its caller left")

    def _submitted(self, event: CopySubmitted) -> None:
        copy = self._copies.get(event.op)
        if copy is not None:
            copy.set_attributes(
                {"phloem.copy.queue": event.queue, "phloem.copy.bytes": event.bytes}
            )
            copy.add_event("phloem.submitted", timestamp=self._now())

    def _copied(self, event: CopyEnded) -> None:
        """The span lasts from the plan to the end; how long it was queued and ran is told apart."""
        copy = self._copies.pop(event.op, None)
        if copy is not None and event.started_ns is not None and event.ended_ns is not None:
            ran = event.ended_ns - event.started_ns
            copy.set_attributes(
                {"phloem.copy.queued_ns": event.started_ns, "phloem.copy.ran_ns": ran}
            )
        self._finish(copy, event.error)

    def _fell_back(self, event: FellBack) -> None:
        found = self._requests.get(event.request)
        if found is not None:
            figures = {f"phloem.lost.{why}": tokens for why, tokens in event.lost.items()}
            found[0].add_event("phloem.not_loaded", figures, timestamp=self._now())

    def _evicted(self, event: Evicted) -> None:
        found = self._requests.get(event.request)
        if found is not None:
            figures = {"phloem.pages": event.pages, "phloem.states": event.states}
            if event.spans:
                figures["phloem.span_pages"] = sum(event.spans)
            found[0].add_event("phloem.evicted", figures, timestamp=self._now())

    def _stopped(self, event: RuntimeStopped) -> None:
        error = "" if event.why == "closed" else event.why
        for span in (*self._waits.values(), *self._copies.values()):
            self._finish(span, error or "the runtime stopped")
        for span, _ in self._requests.values():
            self._finish(span, error or "the runtime stopped")
        self._waits, self._copies, self._requests = {}, {}, {}
