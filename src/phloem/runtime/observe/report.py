"""A log as one page of HTML that needs nothing else: no network, no library, readable in print."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from phloem.errors import InvalidRequest
from phloem.events import RuntimeStarted
from phloem.runtime.observe.charts import (
    Band,
    Bar,
    Block,
    Lane,
    gantt,
    icicle,
    number,
    stacked_area,
    stacked_bars,
)
from phloem.runtime.observe.figures import HOLDERS, Figures, RequestSpan
from phloem.runtime.observe.history import History, Node
from phloem.runtime.observe.numbers import overlap, percentile, sparks
from phloem.runtime.tracing import read_log

__all__ = ["report"]

_BUCKETS = 96
_LEAVES_MAX = 400
_ROWS_MAX = 200
_BARS_MAX = 4000  # in one lane: more cannot be told apart
_HOLDER_CSS = {"tree": "a", "granted": "f", "parked": "b", "free": "d"}
_LOST_CSS = {
    "reused": "a",
    "no_state": "e",
    "evicted": "b",
    "forgotten": "h",
    "never_seen": "f",
    "partial_page": "g",
    "last_token": "d",
}
_WHY_CSS = {"room": "b", "asked": "f", "path_cap": "c"}
_COPY_CSS = {"copy_state": "a", "copy_pages": "f", "clear_state": "g"}


def report(path: str | Path, run: int | None = None) -> str:
    """The page for a log, or for one of its runs (from 1 on).

    Raises `InvalidRequest` when there is no such run.
    """
    figures, history = Figures(), History()
    for entry in read_log(path):
        if isinstance(entry.event, RuntimeStarted) and history.run == run:
            break
        history.add(entry.time, entry.event)
        if run is None or history.run == run:
            figures.add(entry.time, entry.event)
    if figures.started is None:
        raise InvalidRequest(f"{path} has no RuntimeStarted of run {run or 1}: nothing to report")
    return _Report(Path(path).name, figures, history).page()


class _Report:
    def __init__(self, name: str, figures: Figures, history: History) -> None:
        self._name = name
        self._figures = figures
        self._history = history
        self._first = figures.first
        self._length = max(figures.last - figures.first, 1e-6)
        self._edges = [self._length * n / _BUCKETS for n in range(_BUCKETS + 1)]

    def page(self) -> str:
        """All of it."""
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
        started = self._figures.started
        assert started is not None
        about = (
            f"{started.pages} pages of {started.page_size} tokens, {started.states} states, "
            f"grid {started.grid}, {started.policy or 'lru'}; {self._length:.3g} s, "
            f"{self._figures.events} events, {len(self._figures.runs)} run(s)"
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>Cache report: {escape(self._name)}</title>"
            f'<link rel="icon" href="data:,"><style>{(data / "report.css").read_text()}</style>'
            '</head><body><a class="skip" href="#reuse">Skip to the figures</a>'
            f"<header><h1>Cache report</h1><p>{escape(self._name)}: {escape(about)}</p>"
            '<button id="theme" aria-pressed="false">Light / dark</button></header>'
            f'<nav aria-label="Sections">{links}</nav><main>{self._tiles()}{body}</main>'
            "<footer><p>Charts can be read with the arrow keys; each has its figures as a table."
            '</p></footer><div id="says" role="status" aria-live="polite"></div>'
            f"<script>{(data / 'report.js').read_text()}</script></body></html>\n"
        )

    def _tiles(self) -> str:
        figures = self._figures
        reused = sum(lookup.usable for lookup in figures.lookups)
        asked = reused + sum(sum(lookup.lost.values()) for lookup in figures.lookups)
        tiles = {
            "prompts looked up": number(len(figures.lookups)),
            "prompt tokens": number(asked),
            "of them reused": _percent(reused, asked),
            "pages evicted": number(sum(gone.pages for gone in figures.evictions)),
            "states evicted": number(sum(gone.states for gone in figures.evictions)),
            "copied": f"{number(sum(copy.bytes for copy in figures.copies))}B",
        }
        cells = "".join(
            f'<div class="tile"><b>{value}</b><span>{name}</span></div>'
            for name, value in tiles.items()
        )
        return f'<div class="tiles">{cells}</div>'

    # -- over time -----------------------------------------------------------------------------

    def _bucket(self, time: float) -> int:
        return min(int((time - self._first) / self._length * _BUCKETS), _BUCKETS - 1)

    def _reuse(self) -> str:
        lookups = self._figures.lookups
        reasons = sorted({why for lookup in lookups for why in lookup.lost})
        known = [why for why in _LOST_CSS if why == "reused" or why in reasons]
        names = known + [why for why in reasons if why not in _LOST_CSS]
        values = {name: [0.0] * _BUCKETS for name in names}
        for lookup in lookups:
            row = self._bucket(lookup.time)
            values["reused"][row] += lookup.usable
            for why, tokens in lookup.lost.items():
                values[why][row] += tokens
        bands = [Band(name, _LOST_CSS.get(name, "c"), values[name]) for name in names]
        total = sum(sum(band.values) for band in bands)
        text = ", ".join(f"{b.name} {_percent(sum(b.values), total)}" for b in bands)
        return (
            "<p>Prompt tokens by what became of them at the lookup. Every token is reused or has "
            f"the reason why not: {escape(text)}.</p>"
            + self._bars("Prompt tokens, reused and lost by reason", bands)
        )

    def _evictions(self) -> str:
        parts: list[str] = []
        for what in ("pages", "states"):
            values: dict[str, list[float]] = {}
            for gone in self._figures.evictions:
                row = values.setdefault(gone.why, [0.0] * _BUCKETS)
                row[self._bucket(gone.time)] += gone.pages if what == "pages" else gone.states
            bands = [Band(why, _WHY_CSS.get(why, "g"), row) for why, row in sorted(values.items())]
            if any(any(band.values) for band in bands):
                parts.append(self._bars(f"Evicted {what}, by reason", bands))
        return "".join(parts) or "<p>Nothing was evicted.</p>"

    def _bars(self, title: str, bands: Sequence[Band]) -> str:
        chart = stacked_bars(f"{title} over {self._length:.3g} seconds", self._edges, bands)
        return _figure(title, chart, bands, self._edges[:-1])

    def _pools(self) -> str:
        times = [time - self._first for time, _ in self._figures.occupancy]
        at = [max(bisect_right(times, edge) - 1, 0) for edge in self._edges]
        parts: list[str] = []
        for name, title in (("kv", "Pages of KV"), ("state", "Slots of states")):
            pool = self._figures.pools[name]
            if not pool.size:
                continue
            held = [self._figures.occupancy[index][1][name] for index in at]
            bands = [
                Band(holder, _HOLDER_CSS[holder], [one[holder] for one in held])
                for holder in HOLDERS
            ]
            label = f"{title} by holder over {self._length:.3g} seconds"
            chart = stacked_area(label, self._edges, bands, pool.size)
            parts.append(_figure(f"{title}: {pool.size}", chart, bands, self._edges))
        return (
            "<p>Granted places belong to requests; parked ones wait until no pass or copy touches "
            "them any more.</p>" + "".join(parts)
        )

    # -- what lasts ----------------------------------------------------------------------------

    def _copies(self) -> str:
        figures = self._figures
        queues = sorted({copy.queue for copy in figures.copies})
        lanes = [
            Lane(
                queue or "copies",
                [
                    Bar(
                        copy.start - self._first,
                        self._ended(copy.end),
                        "e" if copy.error else _COPY_CSS.get(copy.kind, "c"),
                        f"{copy.kind} {copy.op} for {copy.request or 'nobody'}, {copy.bytes} B"
                        + (f": {copy.error}" if copy.error else ""),
                    )
                    for copy in figures.copies
                    if copy.queue == queue
                ][-_BARS_MAX:],
            )
            for queue in queues
        ]
        passes = [
            Bar(
                step.start - self._first, self._ended(step.end), "c", f"{step.name}, {step.outcome}"
            )
            for step in figures.steps
        ]
        lanes.append(Lane("passes", passes[-_BARS_MAX:]))
        copied = [(bar.start, bar.end) for lane in lanes[:-1] for bar in lane.bars]
        together, whole = overlap(copied, [(bar.start, bar.end) for bar in passes])
        chart = gantt("Copies by queue, and forward passes", lanes, (0.0, self._length))
        failed = sum(bool(copy.error) for copy in figures.copies)
        rows = [
            (
                queue or "copies",
                str(sum(copy.queue == queue for copy in figures.copies)),
                str(sum(copy.bytes for copy in figures.copies if copy.queue == queue)),
            )
            for queue in queues
        ]
        legend = _legend({**_COPY_CSS, "failed": "e", "forward pass": "c"})
        return (
            f"<p>{len(figures.copies)} copies, {failed} failed; "
            f"{_percent(together, whole)} of the time in which one ran, a pass ran, too.</p>"
            f"<figure><figcaption>Time on each queue</figcaption>{legend}{chart}"
            f"{_details(_table(('queue', 'copies', 'bytes'), rows))}</figure>"
        )

    def _ended(self, end: float | None) -> float:
        return self._length if end is None else end - self._first

    def _latency(self) -> str:
        requests = self._figures.requests
        series: dict[str, list[float]] = {
            "waits for room": [
                wait.end - wait.start for r in requests for wait in r.waits if wait.end is not None
            ],
            "opened to first pass": [
                r.first_step - r.start for r in requests if r.first_step is not None
            ],
            "opened to end": [r.end - r.start for r in requests if r.end is not None],
            "forward pass": [s.end - s.start for s in self._figures.steps if s.end is not None],
        }
        for copy in self._figures.copies:
            if copy.end is not None:
                series.setdefault(copy.kind, []).append(copy.end - copy.submitted)
        rows = [
            (
                escape(name),
                str(len(values)),
                *(_seconds(percentile(values, share)) for share in (50, 95, 99, 100)),
                sparks(values),
            )
            for name, values in series.items()
            if values
        ]
        head = ("what", "count", "median", "95 %", "99 %", "longest", "distribution")
        return _table(head, rows, raw=True) if rows else "<p>Nothing was measured.</p>"

    # -- the tree ------------------------------------------------------------------------------

    def _tree(self) -> str:
        history = self._history
        if history.incomplete:
            return f"<p>It cannot be drawn: {escape(history.incomplete)}.</p>"
        nodes = [node for node in history.nodes.values() if node.parent is not None]
        if not nodes:
            return "<p>It is empty.</p>"
        blocks, rows, left_out = self._blocks(nodes)
        tokens = max(node.end for node in nodes)
        states = sum(node.state > 0 for node in nodes)
        chart = icicle(f"The tree, {len(nodes)} nodes", blocks, tokens, rows)
        more = f" {left_out} leaves that were used longest ago are left out." if left_out else ""
        leaves = sorted(nodes, key=lambda node: -node.end)[:_ROWS_MAX]
        table = _table(
            ("node", "from token", "to token", "pages", "state", "used before the end"),
            [
                (
                    str(node.id),
                    str(node.start),
                    str(node.end),
                    str(len(node.pages)),
                    "yes" if node.state else "no",
                    _seconds(history.time - node.used),
                )
                for node in leaves
            ],
        )
        key = (
            '<ul class="legend"><li><i style="background:var(--warm)"></i>used lately</li>'
            '<li><i style="background:var(--cold)"></i>used long ago</li>'
            '<li><i class="b"></i>a state at the end</li><li><i class="e"></i>leased</li></ul>'
        )
        return (
            f"<p>{len(nodes)} nodes with {states} states, from the empty prefix on the left; all "
            f"on the device.{more}</p><figure><figcaption>Nodes by token position</figcaption>"
            f"{key}{chart}{_details(table)}</figure>"
        )

    def _blocks(self, nodes: list[Node]) -> tuple[list[Block], float, int]:
        """Every node over the rows of its leaves, those used last on top."""
        history = self._history
        parents = {node.parent.id for node in nodes if node.parent is not None}
        leaves = [node for node in nodes if node.id not in parents]
        # By use would tear siblings apart: the path decides, branches in the order of latest use.
        latest: dict[int, float] = {}
        for leaf in leaves:
            for node in history.path(leaf.id):
                latest[node.id] = max(latest.get(node.id, 0.0), leaf.used)
        shown = sorted(leaves, key=lambda leaf: -leaf.used)[:_LEAVES_MAX]
        shown.sort(key=lambda leaf: [(-latest[node.id], node.id) for node in history.path(leaf.id)])
        rows: dict[int, tuple[int, int]] = {}
        for row, leaf in enumerate(shown):
            for node in history.path(leaf.id):
                rows[node.id] = (rows.get(node.id, (row, row))[0], row + 1)
        leased = {lease.node for lease in history.leases.values()}
        coldest, hottest = min(latest.values()), max(latest.values())
        blocks: list[Block] = []
        for name, (top, bottom) in rows.items():
            node = history.nodes[name]
            css = ("stateful " if node.state else "") + ("leased" if node.id in leased else "")
            state = f", state in slot {node.state}" if node.state else ", no state"
            title = f"node {node.id}: tokens {node.start} to {node.end}{state}"
            heat = (latest[node.id] - coldest) / max(hottest - coldest, 1e-9)
            blocks.append(Block(node.start, node.end, top, bottom, css.strip(), heat, title))
        return blocks, float(len(shown)), len(leaves) - len(shown)

    # -- tables --------------------------------------------------------------------------------

    def _sessions(self) -> str:
        groups: dict[str, list[RequestSpan]] = {}
        for request in self._figures.requests:
            groups.setdefault(request.session or "(none)", []).append(request)
        rows = [
            (
                name,
                str(len(group)),
                str(sum(r.tokens for r in group)),
                str(sum(r.usable for r in group)),
                _percent(sum(r.usable for r in group), sum(r.tokens for r in group)),
                str(sum(r.lost.get("evicted", 0) for r in group)),
                str(sum(r.lost.get("no_state", 0) for r in group)),
                _seconds(max(r.start for r in group) - self._first),
            )
            for name, group in groups.items()
        ]
        head = (
            "session",
            "requests",
            "tokens",
            "reused",
            "share",
            "evicted",
            "no state",
            "last at",
        )
        rows.sort(key=lambda row: -int(row[2]))
        return _table(head, rows[:_ROWS_MAX], sortable=True)

    def _requests(self) -> str:
        def avoidable(request: RequestSpan) -> int:
            lost = request.lost
            return sum(lost.get(why, 0) for why in ("no_state", "evicted", "forgotten"))

        worst = sorted(self._figures.requests, key=avoidable, reverse=True)[:40]
        rows = [
            (
                request.name,
                str(request.tokens),
                str(request.usable),
                *(str(request.lost.get(why, 0)) for why in ("no_state", "evicted", "forgotten")),
                str(request.lost.get("never_seen", 0)),
                request.how or "running",
            )
            for request in worst
        ]
        head = ("request", "tokens", "reused", "no state", "evicted", "forgotten", "never seen", "")
        return (
            "<p>What a larger cache, another policy or another placement of states could have "
            "saved comes first. <code>phloem explain LOG --request NAME</code> says more.</p>"
            + _table(head, rows, sortable=True)
        )


# -- pieces of the page ---------------------------------------------------------------------------


def _figure(title: str, chart: str, bands: Sequence[Band], starts: Sequence[float]) -> str:
    head = ("second", *(band.name for band in bands))
    rows = [
        (f"{start:.3g} s", *(f"{band.values[row]:g}" for band in bands))
        for row, start in enumerate(starts)
    ]
    legend = _legend({band.name: band.css for band in bands})
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}{chart}"
        f"{_details(_table(head, rows))}</figure>"
    )


def _legend(names: dict[str, str]) -> str:
    items = "".join(
        f'<li><i class="{css}"></i>{escape(name.replace("_", " "))}</li>'
        for name, css in names.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _details(table: str) -> str:
    return f"<details><summary>The figures as a table</summary>{table}</details>"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    sortable: bool = False,
    raw: bool = False,
) -> str:
    def cell(text: str) -> str:
        value = text.removesuffix(" s").removesuffix(" %")
        data = f' data-value="{value}"' if sortable and _is_number(value) else ""
        return f"<td{data}>{text if raw else escape(text)}</td>"

    heads = "".join(
        f'<th scope="col">{f"<button>{name}</button>" if sortable and name else name}</th>'
        for name in head
    )
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    css = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex="0"><table{css}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _seconds(value: float) -> str:
    return f"{value:.6f} s" if value < 0.01 else f"{value:.3f} s"
