"""Metrics for Prometheus: a collector that reads counts and figures when it is scraped.

Counters rather than ratios, base units in the names, closed sets of labels, and every series there
from the beginning, so that "never" differs from "not exported". The cache pays for its events and
a few additions each; it never waits for a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from phloem.actors.tree.components import SPANS
from phloem.errors import CacheCrashed, InvalidRequest, RuntimeClosed
from phloem.runtime.observe.counts import Counts

if TYPE_CHECKING:
    from phloem.runtime.cache import Stats

__all__ = ["METRICS", "CacheCollector", "MetricsServer"]


class _About(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    text: str


METRICS: dict[str, _About] = {
    "phloem_lookups_total": _About("counter", (), "Prompts that were looked up."),
    "phloem_prompt_tokens_total": _About("counter", (), "Tokens of those prompts."),
    "phloem_reused_tokens_total": _About(
        "counter", ("tier",), "Of them, reused at the lookup, by the tier that had them."
    ),
    "phloem_lost_tokens_total": _About(
        "counter", ("reason",), "Of them, not reused, by reason; with the reused they add up."
    ),
    "phloem_not_loaded_tokens_total": _About(
        "counter",
        ("reason",),
        "Of the reused, computed after all since their load found no room or failed.",
    ),
    "phloem_taken_over_tokens_total": _About(
        "counter", (), "Tokens that running requests took over from others after their lookup."
    ),
    "phloem_computed_tokens_total": _About("counter", (), "Tokens computed by ended requests."),
    "phloem_published_tokens_total": _About("counter", (), "Tokens added to the tree."),
    "phloem_requests_opened_total": _About("counter", (), "Requests opened or forked."),
    "phloem_requests_ended_total": _About("counter", ("how",), "Requests that are over."),
    "phloem_evicted_total": _About(
        "counter",
        ("kind", "tier", "reason"),
        "Pages (attention, window) and slots (state) that left a tier, or will once copied.",
    ),
    "phloem_evicted_uncopied_total": _About(
        "counter", ("kind",), "Of them, gone without the copy that was to be made first."
    ),
    "phloem_granted_total": _About(
        "counter", ("kind", "tier"), "Pages and slots that were granted."
    ),
    "phloem_waits_total": _About("counter", (), "Allocations that had to wait for room."),
    "phloem_refused_total": _About(
        "counter", ("what", "reason"), "What was not done, for want of room or of benefit."
    ),
    "phloem_copies_total": _About("counter", ("operation",), "Copies handed to the engine."),
    "phloem_copies_failed_total": _About("counter", ("operation",), "Copies that failed."),
    "phloem_copies_dropped_total": _About(
        "counter", ("operation", "reason"), "Copies between the tiers that were planned, not made."
    ),
    "phloem_copied_bytes_total": _About("counter", ("operation",), "Bytes of those copies."),
    "phloem_copying_seconds_total": _About(
        "counter", ("operation",), "Time from the begin to the end of those copies, added up."
    ),
    "phloem_leases_leaked_total": _About("counter", (), "Leases collected without release."),
    "phloem_resets_total": _About("counter", (), "Times the cache was reset."),
    "phloem_pool_places": _About(
        "gauge", ("kind", "tier", "holder"), "Places by holder; together the size of the pool."
    ),
    "phloem_tree_nodes": _About("gauge", (), "Nodes of the tree."),
    "phloem_tree_protected": _About("gauge", ("kind",), "Pages and states that leases protect."),
    "phloem_leases": _About("gauge", (), "Leases that are held."),
    "phloem_requests": _About("gauge", (), "Requests that run."),
    "phloem_waiting": _About("gauge", (), "Allocations that wait for room."),
    "phloem_copies_in_flight": _About("gauge", (), "Copies that have not ended."),
}
"""Every metric: its kind, its labels and what it means."""


Sample = tuple[tuple[str, ...], float]


class CacheCollector(Collector):
    """Shows a runtime to a registry of `prometheus_client`; `stats` are read at each scrape.

    After the runtime's end, also by a crash, the counters stay and the gauges go.
    """

    def __init__(self, counts: Counts, stats: Callable[[], Stats]) -> None:
        self._counts = counts
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """The metrics now; called by the registry, in the scraping thread."""
        counters = self._counters()
        try:
            gauges = _gauges(self._stats())
        except (RuntimeClosed, CacheCrashed):
            gauges = {}
        for name, about in METRICS.items():
            found = counters.get(name, gauges.get(name))
            if found is None:
                continue
            family: CounterMetricFamily | GaugeMetricFamily
            if about.kind == "counter":
                family = CounterMetricFamily(name, about.text, labels=about.labels)
            else:
                family = GaugeMetricFamily(name, about.text, labels=about.labels)
            for labels, value in found:
                family.add_metric(labels, value)
            yield family

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry; nothing is read."""
        for name, about in METRICS.items():
            if about.kind == "counter":
                yield CounterMetricFamily(name, about.text, labels=about.labels)
            else:
                yield GaugeMetricFamily(name, about.text, labels=about.labels)

    def _counters(self) -> dict[str, list[Sample]]:
        counts = self._counts
        return {
            "phloem_lookups_total": _one(counts.lookups),
            "phloem_prompt_tokens_total": _one(counts.prompt_tokens),
            "phloem_reused_tokens_total": _each(counts.reused_tokens),
            "phloem_lost_tokens_total": _each(counts.lost_tokens),
            "phloem_not_loaded_tokens_total": _each(counts.not_loaded_tokens),
            "phloem_taken_over_tokens_total": _one(counts.taken_over_tokens),
            "phloem_computed_tokens_total": _one(counts.computed_tokens),
            "phloem_published_tokens_total": _one(counts.published_tokens),
            "phloem_requests_opened_total": _one(counts.requests_opened),
            "phloem_requests_ended_total": _each(counts.requests_ended),
            "phloem_evicted_total": [
                *_of_kind("attention", counts.evicted_pages.items()),
                *_of_kind("state", counts.evicted_states.items()),
                *((labels, float(n)) for labels, n in list(counts.evicted_spans.items())),
            ],
            "phloem_evicted_uncopied_total": _each(
                {"attention": counts.uncopied_pages, "state": counts.uncopied_states}
            ),
            "phloem_granted_total": [
                *_of_kind("attention", (((tier,), n) for tier, n in counts.granted_pages.items())),
                *_of_kind("state", (((tier,), n) for tier, n in counts.granted_states.items())),
                *_pairs(counts.granted_spans),
            ],
            "phloem_waits_total": _one(counts.waits),
            "phloem_refused_total": _pairs(counts.refused),
            "phloem_copies_total": _each(counts.copies),
            "phloem_copies_failed_total": _each(counts.copies_failed),
            "phloem_copies_dropped_total": _pairs(counts.copies_dropped),
            "phloem_copied_bytes_total": _each(counts.copied_bytes),
            "phloem_copying_seconds_total": [
                ((kind,), nanoseconds / 1e9)
                for kind, nanoseconds in list(counts.copying_ns.items())
            ],
            "phloem_leases_leaked_total": _one(counts.leases_leaked),
            "phloem_resets_total": _one(counts.resets),
        }


def _one(value: int) -> list[Sample]:
    return [((), float(value))]


def _each(values: Mapping[str, int]) -> list[Sample]:
    return [((name,), float(value)) for name, value in list(values.items())]


def _pairs(values: Mapping[tuple[str, str], int]) -> list[Sample]:
    return [(labels, float(value)) for labels, value in list(values.items())]


def _of_kind(kind: str, values: Iterable[tuple[tuple[str, ...], int]]) -> list[Sample]:
    return [((kind, *labels), float(value)) for labels, value in list(values)]


def _gauges(stats: Stats) -> dict[str, list[Sample]]:
    pools = {
        ("attention", "device"): stats.kv,
        ("state", "device"): stats.state,
        ("attention", "host"): stats.host_kv,
        ("state", "host"): stats.host_state,
        **{(name, "device"): stats.spans.get(name) for name in SPANS},
    }
    places: list[Sample] = [
        ((*name, holder), 0.0 if pool is None else float(getattr(pool, holder)))
        for name, pool in pools.items()
        for holder in ("free", "parked", "tree", "granted")
    ]
    tree = stats.tree
    protected = {span.component: span.protected for span in tree.spans}
    return {
        "phloem_pool_places": places,
        "phloem_tree_nodes": _one(tree.nodes),
        "phloem_tree_protected": _each(
            {
                "attention": tree.pages_protected,
                "state": tree.states_protected,
                **{name: protected.get(name, 0) for name in SPANS},
            }
        ),
        "phloem_leases": _one(tree.leases),
        "phloem_requests": _one(stats.requests),
        "phloem_waiting": _one(stats.waiting),
        "phloem_copies_in_flight": _one(stats.copies_in_flight),
    }


class MetricsServer:
    """Serves the metrics of one runtime over HTTP, from a thread of its own; `port` 0: any."""

    def __init__(
        self, counts: Counts, stats: Callable[[], Stats], *, port: int, host: str = "localhost"
    ) -> None:
        if not 0 <= port < 65536:
            raise InvalidRequest(f"port {port}; ports go from 0, any that is free, to 65535")
        registry = CollectorRegistry()
        registry.register(CacheCollector(counts, stats))
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.host = host
        self.port = int(self._server.server_port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
