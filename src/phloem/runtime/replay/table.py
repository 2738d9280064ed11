"""The results of a replay as a table, for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from phloem.runtime.replay.chart import bars, gib
from phloem.runtime.replay.runs import Report, Run, TraceFigures

__all__ = ["show"]


def _if(figure: float, text: str) -> str:
    return text if figure else ""


_COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("hit\n%", lambda run: f"{100 * run.hit_rate:.1f}"),
    ("host\n%", lambda run: _if(run.host_rate, f"{100 * run.host_rate:.1f}")),
    ("saved\n%", lambda run: f"{100 * run.compute_saved:.1f}"),
    ("states/\nrequest", lambda run: f"{run.states_per_request:.2f}"),
    ("copied\nGB", lambda run: f"{run.state_bytes_copied / 1e9:.1f}"),
    ("to host\nGB", lambda run: _if(run.bytes_to_host, f"{run.bytes_to_host / 1e9:.1f}")),
    ("loaded\nGB", lambda run: _if(run.bytes_to_device, f"{run.bytes_to_device / 1e9:.1f}")),
    ("pages\nmoved", lambda run: _if(run.pages_moved, f"{run.pages_moved:,}")),
    ("skip-\nped", lambda run: f"{run.skipped:,}"),
    ("pages\nout", lambda run: f"{run.pages_evicted:,}"),
    ("states\nout", lambda run: f"{run.states_evicted:,}"),
    ("µs/\nevict", lambda run: _if(run.us_per_eviction, f"{run.us_per_eviction:.0f}")),
    ("µs/\nlook", lambda run: _if(run.us_per_lookup, f"{run.us_per_lookup:.0f}")),
)
"""What is empty in all rows is left out."""

_NOT_WITH_HOST = ("copied\nGB", "pages\nmoved")  # for a table of 80 columns


def show(report: Report, trace: TraceFigures, console: Console) -> None:
    """Print what a trace is, a row for each run and the bounds, and bars."""
    console.print(
        f"\n{trace.name}: {trace.requests:,} requests of {trace.tokens / trace.requests:,.0f} "
        f"tokens, {trace.distinct_tokens / 1e6:.2f} M distinct; pages of {trace.block_size}; "
        f"an unbounded cache hits {100 * trace.ceiling:.1f} %",
        soft_wrap=True,
    )
    runs = [run for run in report.runs if run.trace == trace.name]
    left_out = _NOT_WITH_HOST if any(run.bytes_to_host for run in runs) else ()
    columns = [
        (head, text)
        for head, text in _COLUMNS
        if head not in left_out and any(text(run) for run in runs)
    ]
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for before, run, following in zip([None, *runs], runs, [*runs[1:], None], strict=False):
        begins = before is None or before.capacity != run.capacity
        shown = [text(run) for _, text in columns]
        table.add_row(gib(run.capacity) if begins else "", run.policy, *shown)
        if following is None or following.capacity != run.capacity:
            _add_bounds(report, run.trace, run.capacity, table)
            table.add_section()
    console.print(table)
    for line in bars(report, trace):
        console.print(line, highlight=False)


def _add_bounds(report: Report, trace: str, capacity: int, table: Table) -> None:
    for one in report.bounds:
        if (one.trace, one.capacity) == (trace, capacity):
            for name, rate in (
                ("KV, optimum", one.bounds.kv_optimum),
                ("clairvoyant", one.bounds.clairvoyant),
                ("upper bound", one.bounds.upper),
            ):
                table.add_row("", name, f"{100 * rate:.1f}", style="dim")
