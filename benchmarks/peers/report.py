"""Tables of the matrix, and the ratios against the targets."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from typing import Any, NamedTuple

__all__ = ["TARGETS", "ratios", "table", "targets"]

Row = dict[str, Any]
_OURS = "phloem_nowait"
# Where a peer has one pool for tokens and states, so has what is compared with it in hit rates.
_LIKE = {"vllm_hybrid": "phloem_one_memory"}


class Target(NamedTuple):
    """`peer`'s p50 over ours: the geometric mean and the least over jobs of `works`."""

    peer: str
    figure: str
    works: tuple[str, ...]
    mean: float
    least: float

    def reached(self, found: dict[str, float]) -> tuple[float, float, bool]:
        """The mean and the least of the ratios by job, and whether both are as wanted."""
        mean, least = exp(sum(map(log, found.values())) / len(found)), min(found.values())
        return mean, least, mean >= self.mean and least >= self.least


_MAIN = ("W1", "W2", "W3", "W4")
TARGETS = (
    Target("sglang_rust", "request", _MAIN, 3.0, 2.0),
    Target("sglang_rust", "match", _MAIN, 1.8, 1.0),
    Target("sglang_rust", "insert", _MAIN, 3.0, 1.0),
    Target("sglang_rust", "hot.request", ("W6",), 3.0, 1.0),
    Target("sglang_rust", "grow.request", ("W5",), 3.0, 1.0),
    Target("sglang_rust", "evict.tokens1", ("W5",), 1.0, 1.0),
    Target("sglang_python", "request", _MAIN, 10.0, 6.0),
    Target("vllm_hybrid", "request", _MAIN, 10.0, 1.0),
    Target("vllm_hybrid", "hot.request", ("W6",), 10.0, 1.0),
    Target("vllm_hybrid", "grow.request", ("W5",), 1.0, 1.0),
)


def _p50(row: Row, figure: str) -> float | None:
    value: Any = row
    for name in figure.split("."):
        value = value.get(name)
        if value is None:
            return None
    return float(value["p50_us"])


def _job(row: Row) -> tuple[str, int, int]:
    return row["workload"], row["size"], row["page"]


def _cells(row: Row, columns: Iterable[str]) -> str:
    texts: list[str] = []
    for column in columns:
        value = _p50(row, column)
        texts.append("-" if value is None else f"{value:,.1f}")
    return "".join(f"{text:>11}" for text in texts)


_COLUMNS: dict[str, tuple[str, ...]] = {
    "W5": (
        *("match_hit", "match_miss", "lease", "grow.insert", "grow.request"),
        *("evict.tokens1", "evict.state1", "evict.tokens64"),
    ),
    "W6": ("cold.match", "cold.insert", "cold.request", "hot.match", "hot.insert", "hot.request"),
}
_USUAL = ("key", "match", "gather", "allocate", "evict", "insert", "request")


def table(rows: list[Row]) -> str:
    """µs, p50, by job and adapter; a request is everything but the making of its key."""
    lines: list[str] = []
    last: tuple[str, int, int] | None = None
    for row in sorted(rows, key=_job):
        columns = _COLUMNS.get(row["workload"], _USUAL)
        if _job(row) != last:
            last = _job(row)
            size = f", {row['nodes']:,} nodes" if row["size"] else ""
            lines.append(f"\n{row['workload']} page {row['page']}{size} (µs, p50)")
            heads = "".join(f"{name.split('.')[-1]:>11}" for name in columns)
            lines.append(f"  {'':18}{heads}{'p99 req':>11}{'hit rate':>10}")
        lines.append(f"  {row['adapter']:18}{_cells(row, columns)}{_tail(row)}")
    return "\n".join(lines)


def _tail(row: Row) -> str:
    whole: Row = row.get("grow") or row.get("hot") or row
    request = whole.get("request")
    p99 = "-" if request is None else f"{request['p99_us']:,.1f}"
    hits = row.get("hit_rate", whole.get("hit_rate", 0.0))
    more = f"{row['bytes_per_node']:8,.0f} B/node" if "bytes_per_node" in row else ""
    return f"{p99:>11}{hits:10.4f}{more}"


def ratios(rows: list[Row]) -> str:
    """How many times faster phloem is, by job."""
    lines = ["\nTimes faster than the peer (p50), by job"]
    for target, found in _found(rows):
        by_job = " ".join(f"{job} {ratio:.1f}" for job, ratio in found.items())
        lines.append(f"  {target.peer:14}{target.figure:16}{by_job}")
    return "\n".join(lines)


def targets(rows: list[Row]) -> str:
    """The targets, what was measured, and whether they are met."""
    heads = f"{'mean':>8}{'wanted':>8}{'least':>8}{'wanted':>8}"
    lines = ["\nTargets: geometric mean and least of the times faster (1: as fast as the peer)"]
    lines.append(f"  {'peer':14}{'figure':16}{'of':12}{heads}")
    for target, found in _found(rows):
        mean, least, met = target.reached(found)
        figures = f"{mean:8.2f}{target.mean:8g}{least:8.2f}{target.least:8g}"
        works = f"{target.works[0]}-{target.works[-1]}" if target.works[1:] else target.works[0]
        verdict = "met" if met else "NOT MET"
        lines.append(f"  {target.peer:14}{target.figure:16}{works:12}{figures}  {verdict}")
    missing = [target for target in TARGETS if target not in dict(_found(rows))]
    lines += [f"  {target.peer:14}{target.figure:16}not measured" for target in missing]
    return "\n".join([*lines, *_hit_rates(rows)])


def _found(rows: list[Row]) -> Iterable[tuple[Target, dict[str, float]]]:
    """For each target that rows speak of: the ratios by job."""
    by_job = {(row["adapter"], *_job(row)): row for row in rows}
    jobs = sorted({_job(row) for row in rows})
    for target in TARGETS:
        found: dict[str, float] = {}
        for job in jobs:
            ours = by_job.get((_OURS, *job))
            theirs = by_job.get((target.peer, *job))
            if job[0] in target.works and ours is not None and theirs is not None:
                mine, its = _p50(ours, target.figure), _p50(theirs, target.figure)
                if mine and its:
                    found[f"{job[0]}:{job[1] or job[2]}"] = its / mine
        if found:
            yield target, found


def _hit_rates(rows: list[Row]) -> Iterable[str]:
    """Tokens reused of all: never below a peer on the same work."""
    by_job = {
        (row["adapter"], *_job(row)): float(row["hit_rate"]) for row in rows if "hit_rate" in row
    }
    for peer in sorted({key[0] for key in by_job} - {_OURS, *_LIKE.values()}):
        ours = _LIKE.get(peer, _OURS)
        more = {
            f"{key[1]}:{key[2] or key[3]}": by_job[(ours, *key[1:])] - rate
            for key, rate in by_job.items()
            if key[0] == peer and (ours, *key[1:]) in by_job
        }
        if more:
            below = " ".join(f"{job} {gain:+.3f}" for job, gain in more.items() if gain < -0.0005)
            above = " ".join(f"{job} {gain:+.3f}" for job, gain in more.items() if gain > 0.0005)
            verdict = f"NOT MET: {below}" if below else "met"
            yield f"  {peer:14}hit rate never below  {verdict}; above: {above or 'nowhere'}"
