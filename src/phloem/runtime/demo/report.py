"""What the demo found: as one value for `--json`, and as a table for people."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from phloem.runtime.cache import PoolStats
from phloem.runtime.demo.measure import Comparison
from phloem.runtime.environment import Environment
from phloem.runtime.integrations.recall import RecallScore

__all__ = ["Report", "show"]


class Report(msgspec.Struct, frozen=True):
    """All that `phloem demo` measured. `failures` is empty when all is well."""

    model: str
    seed: int
    comparisons: list[Comparison]
    recall: RecallScore
    failures: list[str]
    environment: Environment


def show(report: Report, console: Console) -> None:
    """Print the tables and the verdict."""
    for comparison in report.comparisons:
        console.print(f"[bold]{comparison.workload}[/]: {comparison.about}", highlight=False)
    console.print(_workloads_table(report))
    console.print(_recall_table(report.recall))
    for failure in report.failures:
        console.print(f"[bold red]FAILED[/] {failure}", highlight=False)
    if not report.failures:
        console.print(
            "[bold green]All outputs equal, every page and slot accounted for, audits passed.[/]"
        )


def _workloads_table(report: Report) -> Table:
    table = Table(title=f"{report.model}: with the cache | without", title_justify="left")
    table.add_column("")
    for comparison in report.comparisons:
        table.add_column(comparison.workload, justify="right")
    for name, cell in _ROWS:
        table.add_row(name, *(cell(comparison) for comparison in report.comparisons))
    return table


def _share(comparison: Comparison) -> str:
    reused = comparison.cached.reused
    return f"{reused:,} | {comparison.bare.reused:,}"


def _pair(cached_s: float, bare_s: float) -> str:
    return f"{cached_s:.2f} s | {bare_s:.2f} s"


def _late(comparison: Comparison) -> str:
    return f"{comparison.cached.lag_p99_s * 1e3:.1f} ms | {comparison.bare.lag_p99_s * 1e3:.1f} ms"


def _actions(comparison: Comparison) -> str:
    return "\n".join(f"{count} {kind}" for kind, count in comparison.actions.items()) or "none"


def _pool(pool: PoolStats) -> str:
    return f"{pool.tree} of {pool.size} kept"


_ROWS: list[tuple[str, Callable[[Comparison], str]]] = [
    ("requests", lambda c: f"{c.requests}"),
    ("prompt tokens", lambda c: f"{c.prompt_tokens:,}"),
    ("  distinct", lambda c: f"{c.distinct_tokens:,}"),
    ("  computed", lambda c: f"{c.cached.computed:,} | {c.bare.computed:,}"),
    ("  reused", _share),
    ("new tokens", lambda c: f"{c.new_tokens:,}"),
    ("TTFT median", lambda c: _pair(c.cached.ttft_median_s, c.bare.ttft_median_s)),
    ("TTFT p95", lambda c: _pair(c.cached.ttft_p95_s, c.bare.ttft_p95_s)),
    ("total time", lambda c: _pair(c.cached.total_s, c.bare.total_s)),
    ("  times faster", lambda c: f"[bold]{c.speedup:.1f}[/]"),
    ("loop late, p99", _late),
    ("outputs equal", lambda c: f"{c.outputs_equal} of {c.requests}"),
    ("largest logit diff.", lambda c: f"{c.logit_difference_max:.2g}"),
    ("actions", _actions),
    ("kv pages", lambda c: _pool(c.pools["kv"])),
    ("state slots", lambda c: _pool(c.pools["state"])),
    ("from the host", lambda c: f"{c.tokens_loaded:,} tokens" if "host kv" in c.pools else "off"),
    ("unaccounted", lambda c: f"{c.unaccounted}"),
    ("audit", lambda c: "failed" if c.audit else "passed"),
]


def _recall_table(score: RecallScore) -> Table:
    table = Table(
        title="recall: a small trained model",
        title_justify="left",
    )
    table.add_column("questions answered right", justify="left")
    table.add_column(f"of {score.asked}", justify="right")
    table.add_row("facts computed", f"{score.cold:.0%}")
    table.add_row("facts restored: KV and state", f"{score.restored:.0%}")
    table.add_row("facts restored: KV, another prompt's state", f"{score.wrong_state:.0%}")
    table.add_row("guessing", f"{score.chance:.0%}")
    table.add_row("largest logit difference, restored", f"{score.largest_difference:.3g}")
    return table
