"""A request that is suspended is still there: in the state, in the counts, and as a span."""

from __future__ import annotations

import pytest
from observe.driver import config
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phloem import CacheRuntime
from phloem.events import Event, RequestSuspended
from phloem.runtime.observe.counts import Counts
from phloem.runtime.observe.figures import Figures
from phloem.runtime.observe.history import History
from phloem.runtime.observe.otel import SpanSink
from phloem.runtime.observe.state import live_state

TOKENS = list(range(21))


@pytest.mark.parametrize("end", ["finish", "abort"])
@pytest.mark.parametrize("keep_lease", [True, False])
async def test_a_suspended_request_is_told(keep_lease: bool, end: str) -> None:
    """By its lease's end it counted as left by its caller, and as another one when it went on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    counts, history, figures = Counts(), History(), Figures()
    spans, told = SpanSink(provider.get_tracer("test")), list[Event]()

    def sink(event: Event) -> None:
        told.append(event)
        counts(event)
        history.add(0.0, event)
        figures.add(0.0, event)
        spans(event)

    async with CacheRuntime(config(True), events=sink) as cache:
        request = await cache.open_request(TOKENS, id="r")
        await request.suspend(keep_lease=keep_lease)
        (event,) = [one for one in told if isinstance(one, RequestSuspended)]
        assert (event.request, event.computed, event.keeps_lease) == ("r", 0, keep_lease)
        assert history.state().requests == live_state(cache.core).requests == ["r"]
        await request.resume()
        assert history.state().requests == ["r"]
        assert counts.requests_opened == 1
        if end == "abort":
            request.abort()
        else:
            await request.finish()
        assert history.state().requests == live_state(cache.core).requests == []
        assert figures.running == {}
        assert [one.how for one in figures.requests] == ["suspended", f"{end}ed"]
    finished = exporter.get_finished_spans()
    requests = [span for span in finished if span.name == "phloem.request"]
    assert [span.attributes["phloem.how"] for span in requests if span.attributes] == [
        *("suspended", f"{end}ed"),
    ]
    assert all(span.status.is_unset for span in requests), "nobody's caller left"
