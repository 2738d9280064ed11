"""Metrics as a real client parses them, and spans as a real SDK exports them."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request

import pytest
import structlog
from observe.driver import Driver, config
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from phloem import CacheCrashed, CacheRuntime, InvalidRequest
from phloem.actors.tree.core import WritePolicy
from phloem.actors.tree.results import LOST, Match
from phloem.runtime.observe.counts import TIERS
from phloem.runtime.observe.metrics import METRICS, MetricsServer
from phloem.runtime.observe.otel import SpanSink

Series = dict[tuple[str, tuple[str, ...]], float]


async def scrape(server: MetricsServer) -> Series:
    """Every sample by name and label values, as Prometheus would have it."""

    def fetch(accept: str) -> str:
        address = f"http://{server.host}:{server.port}/metrics"
        asked = urllib.request.Request(address, headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=240) as page:
            assert page.status == 200
            text: str = page.read().decode()
            return text

    strict = await asyncio.to_thread(fetch, "application/openmetrics-text; version=1.0.0")
    assert strict.endswith("# EOF\n")
    assert len(list(openmetrics.text_string_to_metric_families(strict))) > 20
    text = await asyncio.to_thread(fetch, "text/plain")
    series: Series = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        about = METRICS[name]
        assert (family.type, family.documentation) == (about.kind, about.text)
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            assert sample.name == name and set(sample.labels) == set(about.labels)
            key = sample.name, tuple(sample.labels[label] for label in about.labels)
            assert key not in series
            series[key] = sample.value
    return series


@pytest.mark.parametrize(("host", "window"), [(None, False), ("write_back", False), (None, True)])
async def test_every_metric_exists_before_first_use_and_tells_the_truth(
    host: WritePolicy | None, window: bool
) -> None:
    async with CacheRuntime(config(True, host=host, window=window), metrics=True) as cache:
        with cache.serve_metrics(port=0) as server:
            before = await scrape(server)
            assert {name for name, _ in before} == set(METRICS)
            assert {labels[0] for name, labels in before if "_lost_" in name} == set(LOST)
            counters = [value for (name, _), value in before.items() if name.endswith("_total")]
            assert set(counters) == {0.0}
            driver = Driver(cache, 4)
            evicted, after = ("phloem_evicted_total", ("attention", "device", "asked")), before
            for _ in range(20):  # under write-back it depends on copies whether what goes is there
                for _ in range(250):
                    await driver.operate()
                after = await scrape(server)
                if after[evicted]:
                    break
            stats = cache.stats()
            assert set(after) == set(before), "no series appears by use"
            lost = sum(v for (name, _), v in after.items() if name == "phloem_lost_tokens_total")
            reused = {tier: after["phloem_reused_tokens_total", (tier,)] for tier in TIERS}
            assert after["phloem_prompt_tokens_total", ()] == lost + sum(reused.values()) > 0
            for holder in ("free", "parked", "tree", "granted"):
                shown = after["phloem_pool_places", ("attention", "device", holder)]
                assert shown == getattr(stats.kv, holder)
                spans = stats.spans.get("window")
                shown = after["phloem_pool_places", ("window", "device", holder)]
                assert shown == (0 if spans is None else getattr(spans, holder))
                there = after["phloem_pool_places", ("state", "host", holder)]
                assert there == (getattr(stats.host_state, holder) if stats.host_state else 0)
            assert after[evicted] > 0
            assert (after["phloem_evicted_total", ("window", "device", "asked")] > 0) == window
            assert (after["phloem_granted_total", ("window", "device")] > 0) == window
            kept = {span.component: span.protected for span in stats.tree.spans}
            assert after["phloem_tree_protected", ("window",)] == kept.get("window", 0)
            assert after["phloem_copies_total", ("copy_state",)] > 0
            assert after["phloem_copying_seconds_total", ("copy_state",)] > 0
            assert (after["phloem_copies_total", ("backup",)] > 0) == (host is not None)
            assert (after["phloem_granted_total", ("attention", "host")] > 0) == (host is not None)
            assert after["phloem_refused_total", ("checkpoint", "unsettled")] >= 0
            await driver.close()
            await cache.close()
            closed = await scrape(server)
            assert closed["phloem_lookups_total", ()] == after["phloem_lookups_total", ()]
            assert ("phloem_leases", ()) not in closed


async def test_nothing_is_served_that_is_not_counted() -> None:
    async with CacheRuntime(config(False)) as cache:
        with pytest.raises(InvalidRequest, match="metrics=True"):
            cache.serve_metrics(port=0)
    async with CacheRuntime(config(False), metrics=True) as cache:
        with pytest.raises(InvalidRequest, match="port 70000"):
            cache.serve_metrics(port=70000)


async def test_after_a_crash_the_counters_stay_and_the_gauges_go() -> None:
    async with CacheRuntime(config(True), metrics=True) as cache:
        with cache.serve_metrics(port=0) as server:
            async with cache.request([1, 2, 3]):
                pass
            with pytest.raises(CacheCrashed):
                cache.core.run("no message")  # type: ignore[arg-type]  # on purpose
            series = await scrape(server)
    assert series["phloem_lookups_total", ()] == 1
    assert not any(name == "phloem_leases" for name, _ in series)


async def test_a_scrape_changes_nothing_and_counts_what_is_protected() -> None:
    """It is made in a thread of its own, in which the tree must not be written to."""
    async with CacheRuntime(config(False), metrics=True) as cache:
        with cache.serve_metrics(port=0) as server:
            for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
                grant = cache.nowait.allocate(pages=len(tokens) // 2)
                cache.nowait.insert(tokens, pages=grant.pages)
            lease = cache.nowait.acquire([1, 2, 3, 4, 5, 6], whole=True)
            unsettled = dict(cache.core.tree.leases.unsettled)
            assert unsettled
            series = await scrape(server)
            assert series["phloem_tree_protected", ("attention",)] == 3
            assert cache.core.tree.leases.unsettled == unsettled
            assert cache.stats().tree.pages_protected == 3
            assert not cache.core.tree.leases.unsettled
            lease.release()


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_spans_of_requests_join_the_callers_trace() -> None:
    exporter, clock = InMemorySpanExporter(), itertools.count(1)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sink = SpanSink(provider.get_tracer("test"), clock_ns=lambda: next(clock))
    async with CacheRuntime(config(True), events=sink) as cache:
        with structlog.contextvars.bound_contextvars(traceparent=PARENT):
            async with cache.request([1, 2, 3, 4, 5], id="r1") as request:
                match: Match = request.match
                await request.allocate(5)
                await request.ready()
                with cache.step([request]) as step:
                    step.launched({request: 4})
                await request.finish()
        async with cache.request([1, 2, 3, 4, 9], id="r2"):
            pass
        await cache.open_request([7, 8, 9], id="left")
    spans = {
        span.attributes["phloem.request"]: span
        for span in exporter.get_finished_spans()
        if span.attributes and span.name == "phloem.request"
    }
    assert set(spans) == {"r1", "r2", "left"}
    first = spans["r1"]
    assert first.context.trace_id == int(PARENT.split("-")[1], 16)
    assert first.parent is not None and first.parent.span_id == int(PARENT.split("-")[2], 16)
    assert first.attributes is not None
    assert first.attributes["gen_ai.usage.cache_read.input_tokens"] == match.usable == 0
    assert first.attributes["gen_ai.usage.cache_creation.input_tokens"] == 4
    assert first.attributes["phloem.how"] == "finished"
    assert first.start_time is not None and first.end_time is not None
    assert 0 < first.start_time < first.end_time < 1000
    assert spans["r2"].parent is None
    assert spans["r2"].attributes is not None
    assert spans["r2"].attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    copies = [span for span in exporter.get_finished_spans() if span.name == "phloem.copy"]
    assert copies and all(
        span.parent is not None and span.parent.span_id == first.context.span_id for span in copies
    )
