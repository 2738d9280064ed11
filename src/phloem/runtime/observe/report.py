"""A log as one page of HTML that needs nothing else: no network, no library, readable in print."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from phloem.actors.tree.components import SPANS
from phloem.runtime.observe.charts import (
    HALF,
    WIDTH,
    Band,
    Bar,
    Lane,
    gantt,
    icicle,
    number,
    stacked_area,
    stacked_bars,
)
from phloem.runtime.observe.figures import HOLDERS, RequestSpan
from phloem.runtime.observe.gathered import AVOIDABLE, Gathered, Queue, gather
from phloem.runtime.observe.history import History
from phloem.runtime.observe.icicle import blocks_of
from phloem.runtime.observe.numbers import overlap, percentile, sparks
from phloem.runtime.observe.page import (
    bytes_of,
    details,
    figure,
    legend,
    percent,
    seconds,
    table,
    words,
)

__all__ = ["report"]

_ROWS_MAX = 200
_HOLDER_CSS = {"tree": "a", "granted": "f", "parked": "b", "free": "d"}
_REUSE_CSS = {
    "reused, on the device": "a",
    "reused, from the host": "i",
    "no_state": "e",
    "evicted": "b",
    "no_window": "j",
    "no_room": "c",
    "copy_failed": "c",
    "timed_out": "c",
    "tier_failed": "c",
    "forgotten": "h",
    "never_seen": "f",
    "partial_page": "g",
    "last_token": "d",
}
_WHY_CSS = {"room": "b", "asked": "f", "path_cap": "c"}
_COPY_CSS = {
    "copy_state": "a",
    "copy_pages": "f",
    "clear_state": "g",
    "backup": "h",
    "load": "i",
    "failed": "e",
    "pass": "c",
}
_POOLS = {
    "kv": "Pages of KV on the device",
    "host_kv": "Pages of KV on the host",
    "state": "Slots of states on the device",
    "host_state": "Slots of states on the host",
    **{name: f"Pages of {name}s on the device" for name in SPANS},
}
_QUEUES = {"d2d": "on the device", "d2h": "to the host", "h2d": "from the host"}


def report(path: str | Path, run: int | None = None) -> str:
    """The page for a log, or for one of its runs (from 1 on).

    The log may be of any length: it is read twice and never held. Raises `InvalidRequest` when
    there is no such run.
    """
    gathered, history = gather(path, run)
    return _Report(Path(path).name, gathered, history).page()


class _Report:
    def __init__(self, name: str, gathered: Gathered, history: History) -> None:
        self._name = name
        self._g = gathered
        self._history = history
        self._over = f"over {gathered.length:.3g} seconds"
        self._runs = [time - gathered.begin for time in gathered.runs[1:]]
        self._reused = sum(sum(rows) for rows in gathered.reused.values())
        self._asked = self._reused + sum(sum(rows) for rows in gathered.lost.values())

    def page(self) -> str:
        """The whole page."""
        sections = [
            ("reuse", "What was reused, and what was lost", self._reuse()),
            ("pools", "Who holds the pools", self._pools()),
            ("evictions", "What was evicted", self._evictions()),
            ("copies", "Copies and passes", self._copies()),
            ("latency", "How long things took", self._latency()),
            ("tree", "The tree at the end", self._tree()),
            ("sessions", "Sessions", self._sessions()),
            ("requests", "Requests that lost most", self._requests()),
        ]
        data = files("phloem.runtime.observe") / "data"
        links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
        body = "".join(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>'
            f"{content}</section>"
            for key, title, content in sections
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>Cache report: {escape(self._name)}</title>"
            f'<link rel="icon" href="data:,"><style>{(data / "report.css").read_text()}</style>'
            '</head><body><a class="skip" href="#reuse">Skip to the figures</a>'
            f"<header><h1>Cache report</h1><p>{escape(self._name)}: {escape(self._about())}</p>"
            '<button id="theme" aria-pressed="false">Light / dark</button></header>'
            f'<nav aria-label="Sections">{links}</nav><main>{self._tiles()}{body}</main>'
            "<footer><p>Every chart can be walked with the arrow keys, and has its figures as a "
            'table.</p></footer><div id="says" role="status" aria-live="polite"></div>'
            f"<script>{(data / 'report.js').read_text()}</script></body></html>\n"
        )

    def _about(self) -> str:
        started = self._g.started
        assert started is not None
        host = ""
        if started.host_pages:
            host = f"; host tier of {started.host_pages} pages, {started.host_states} states"
        runs = len(self._g.runs)
        spans = "".join(f"{size} {name} pages, " for name, size in started.spans.items())
        return (
            f"{started.pages} pages of {started.page_size} tokens, {started.states} states, {spans}"
            f"grid {started.grid}, {started.policy or 'lru'}{host}; {self._g.length:.3g} s, "
            f"{self._g.events} events" + (f", {runs} runs" if runs > 1 else "")
        )

    def _tiles(self) -> str:
        g = self._g
        host = sum(g.reused["host"])
        copied = sum(queue.bytes for queue in g.queues.values())
        tiles = {
            "prompts looked up": number(g.prompts),
            "prompt tokens": number(self._asked),
            "of them reused": percent(self._reused, self._asked),
            "loaded from the host": percent(host, self._asked),
            "pages evicted": number(self._evicted("device", "pages")),
            "states evicted": number(self._evicted("device", "states")),
            **{
                f"{name} pages evicted": number(self._evicted("device", f"{name} pages"))
                for name in SPANS
                if name in g.sizes
            },
            "copied": bytes_of(copied),
        }
        if "host_kv" not in g.sizes:
            del tiles["loaded from the host"]
        cells = "".join(
            f'<div class="tile"><b>{value}</b><span>{name}</span></div>'
            for name, value in tiles.items()
        )
        return f'<div class="tiles">{cells}</div>'

    def _evicted(self, tier: str, what: str) -> float:
        return sum(sum(rows) for rows in self._g.gone.get((tier, what), {}).values())

    # -- over time -----------------------------------------------------------------------------

    def _reuse(self) -> str:
        g = self._g
        rows = {
            "reused, on the device": g.reused["device"],
            "reused, from the host": g.reused["host"],
            **g.lost,
        }
        names = [name for name in _REUSE_CSS if name in rows]
        names += sorted(name for name in rows if name not in _REUSE_CSS)
        bands = [
            Band(name, _REUSE_CSS.get(name, "c"), [max(0.0, value) for value in rows[name]])
            for name in names
            if any(rows[name]) or name == "reused, on the device"
        ]
        if not self._asked:
            return "<p>No prompt was looked up.</p>"
        text = ", ".join(
            f"{words(band.name)} {percent(sum(rows[band.name]), self._asked)}" for band in bands
        )
        return (
            "<p>Prompt tokens by what became of them at the lookup. Every token is reused or has "
            f"the reason why not: {escape(text)}.</p>"
            + legend({band.name: band.css for band in bands})
            + self._bars("Prompt tokens, reused and lost by reason", bands)
        )

    def _evictions(self) -> str:
        charts: list[str] = []
        seen: set[str] = set()
        pairs = sorted(self._g.gone.items(), key=lambda item: (item[0][1], item[0][0]))
        for (tier, what), by_reason in pairs:
            bands = [
                Band(why, _WHY_CSS.get(why, "g"), rows) for why, rows in sorted(by_reason.items())
            ]
            seen.update(by_reason)
            total = number(self._evicted(tier, what))
            charts.append(self._bars(f"{total} {what} left the {tier}", bands, HALF))
        if not charts:
            return "<p>Nothing was evicted.</p>"
        colours = {why: css for why, css in _WHY_CSS.items() if why in seen}
        pages, states = self._g.uncopied.values()
        uncopied = f" {pages} pages and {states} states went without their copy to the host."
        more = uncopied if pages or states else ""
        return f"<p>By reason.{more}</p>{legend(colours)}{_pairs(charts)}"

    def _bars(self, title: str, bands: Sequence[Band], width: int = WIDTH) -> str:
        edges = self._g.edges
        chart = stacked_bars(f"{title} {self._over}", edges, bands, self._runs, width)
        return figure(title, chart, bands, edges[:-1])

    def _pools(self) -> str:
        if self._history.incomplete and not self._g.queues:
            return f"<p>The log does not tell: {escape(self._history.incomplete)}.</p>"
        charts: list[str] = []
        for name, title in _POOLS.items():
            size = self._g.sizes.get(name, 0)
            if not size:
                continue
            held = [one.get(name, {}) for one in self._g.held]
            bands = [
                Band(holder, _HOLDER_CSS[holder], [one.get(holder, 0) for one in held])
                for holder in HOLDERS
            ]
            label = f"{title} by holder {self._over}"
            chart = stacked_area(label, self._g.edges, bands, size, self._runs, HALF)
            charts.append(figure(f"{title}: {number(size)}", chart, bands, self._g.edges))
        return (
            "<p>The tree holds what is cached; granted places belong to requests, or to a copy "
            "that is on its way; parked ones wait until no pass or copy touches them any more.</p>"
            f"{legend(_HOLDER_CSS)}{_pairs(charts)}"
        )

    # -- what lasts ----------------------------------------------------------------------------

    def _copies(self) -> str:
        g = self._g
        lanes = [
            Lane(_QUEUES.get(name, name) or "copies", _coloured(queue))
            for name, queue in sorted(g.queues.items())
        ]
        lanes.append(Lane("passes", _coloured(g.passes)))
        if not g.queues and not len(g.passes):
            why = self._history.incomplete
            return "<p>There was none" + (f", or {escape(why)}" if why else "") + ".</p>"
        passes = g.passes.spans()
        copied = [span for queue in g.queues.values() for span in queue.spans()]
        together, whole = overlap(copied, passes)
        chart = gantt("Copies by queue, and forward passes", lanes, (0.0, g.length), self._runs)
        rows: list[Sequence[str]] = []
        for name, queue in sorted(g.queues.items()):
            spans = queue.spans()
            beside, busy = overlap(spans, passes)
            rows.append(
                (
                    f"{name} ({_QUEUES.get(name, 'copies')})",
                    str(len(queue)),
                    str(queue.failed),
                    bytes_of(queue.bytes),
                    seconds(busy),
                    percent(beside, busy),
                    seconds(percentile(queue.late, 50)),
                )
            )
        head = ("queue", "copies", "failed", "bytes", "busy", "beside a pass", "median wait")
        dropped = "".join(
            f" {count} planned {words(kind)}s were dropped: {words(why)}."
            for (kind, why), count in sorted(g.dropped.items())
        )
        seen = {bar.css for lane in lanes for bar in lane.bars}
        colours = {name: css for name, css in _COPY_CSS.items() if css in seen}
        return (
            f"<p>While copies ran, forward passes ran for {percent(together, whole)} of the time."
            f"{dropped}</p><figure><figcaption>Time on each queue</figcaption>"
            f"{legend(colours)}{chart}</figure>{table(head, rows, label='Queues')}"
        )

    def _latency(self) -> str:
        rows = [
            (
                escape(words(name)),
                str(len(values)),
                *(seconds(percentile(values, share)) for share in (50, 95, 99, 100)),
                sparks(values),
            )
            for name, values in self._g.took.items()
        ]
        head = ("what", "count", "median", "95 %", "99 %", "longest", "distribution")
        return table(head, rows, raw=True) if rows else "<p>Nothing was measured.</p>"

    # -- the tree ------------------------------------------------------------------------------

    def _tree(self) -> str:
        history = self._history
        if history.incomplete:
            return f"<p>It cannot be drawn: {escape(history.incomplete)}.</p>"
        nodes = [node for node in history.nodes.values() if node.parent is not None]
        if not nodes:
            return "<p>It is empty.</p>"
        blocks, rows, left_out = blocks_of(history)
        chart = icicle(
            f"The tree, {len(nodes)} nodes", blocks, max(node.end for node in nodes), rows
        )
        states = sum(node.state > 0 or node.host_state > 0 for node in nodes)
        only = sum(bool(node.host_pages) and not node.pages for node in nodes)
        where = f"{only} of them on the host only" if only else "all on the device"
        more = f" {left_out} leaves that were used longest ago are left out." if left_out else ""
        spans = [name for name in SPANS if name in self._g.sizes]
        head = ("node", "from", "to", "pages", *(f"{name} pages" for name in spans), "state")
        head = (*head, "on the host", "state there", "used before")
        deepest = sorted(nodes, key=lambda node: -node.end)[:_ROWS_MAX]
        figures = table(
            head,
            [
                (
                    *map(str, (node.id, node.start, node.end, len(node.pages))),
                    *(str(len(node.spans.get(name, ()))) for name in spans),
                    "yes" if node.state else "no",
                    str(len(node.host_pages)),
                    "yes" if node.host_state else "no",
                    seconds(history.time - node.used),
                )
                for node in deepest
            ],
        )
        return (
            f"<p>{len(nodes)} nodes with {states} states, {where}. The empty prefix is on the "
            f"left; what was used last is on top.{more}</p>"
            f"<figure><figcaption>Nodes by token position</figcaption>{_KEY}{chart}"
            f"{details(figures)}</figure>"
        )

    # -- tables --------------------------------------------------------------------------------

    def _sessions(self) -> str:
        first = self._g.begin
        by_tokens = sorted(self._g.sessions.items(), key=lambda item: -item[1].tokens)
        rows = [
            (
                name or "(none)",
                *map(str, (one.requests, one.tokens, one.reused)),
                percent(one.reused, one.tokens),
                *map(str, (one.loaded, one.evicted, one.no_state)),
                seconds(one.last - first),
            )
            for name, one in by_tokens[:_ROWS_MAX]
        ]
        if not rows:
            return "<p>There was no request.</p>"
        head = ("session", "requests", "tokens", "reused", "share", "from the host", "evicted")
        more = len(by_tokens) - len(rows)
        note = f"<p>{more} sessions with fewer tokens are left out.</p>" if more else ""
        return note + table((*head, "no state", "last at"), rows, label="Sessions", sortable=True)

    def _requests(self) -> str:
        worst = self._g.worst()
        if not worst:
            return "<p>There was no request.</p>"
        known = ("never_seen", *AVOIDABLE)
        lost = [why for why in known if any(why in request.lost for request in worst)]
        head = ("request", "tokens", "reused", "from the host", *map(words, lost), "")
        rows = [_row(request, lost) for request in worst]
        return (
            "<p>What a larger cache, another policy or another placement of states could have "
            "saved comes first. <code>phloem explain LOG --request NAME</code> says more.</p>"
            + table(head, rows, label="Requests", sortable=True)
        )


def _pairs(charts: Sequence[str]) -> str:
    """Charts side by side, where the page is wide enough."""
    return f'<div class="pairs">{"".join(charts)}</div>'


def _row(request: RequestSpan, lost: Sequence[str]) -> Sequence[str]:
    return (
        request.name,
        *map(str, (request.tokens, request.usable, request.loaded)),
        *(str(request.lost.get(why, 0)) for why in lost),
        request.how or "running",
    )


def _coloured(queue: Queue) -> list[Bar]:
    return [bar._replace(css=_COPY_CSS.get(bar.css, "c")) for bar in queue.bars]


_KEY = (
    '<ul class="legend"><li><i class="warm"></i>on the device, used lately</li>'
    '<li><i class="cold"></i>used long ago</li>'
    '<li><i class="hostwarm"></i>on the host only, used lately</li>'
    '<li><i class="hostcold"></i>used long ago</li>'
    '<li><i class="copied"></i>on both</li>'
    '<li><i class="b"></i>a state on the device</li>'
    '<li><i class="hollow"></i>a state on the host</li><li><i class="e"></i>leased</li></ul>'
)
