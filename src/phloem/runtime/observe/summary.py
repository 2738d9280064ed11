"""The figures of a report as a few lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phloem.runtime.observe.figures import HOLDERS
from phloem.runtime.observe.gathered import Gathered, gather
from phloem.runtime.observe.numbers import overlap, percentile
from phloem.runtime.observe.page import bytes_of, percent, seconds, words

__all__ = ["summary"]


def summary(path: str | Path, run: int | None = None) -> str:
    """What was reused and lost, who held the pools, what went, whether copies overlapped.

    Of a log or of one of its runs (from 1 on). Raises `InvalidRequest` when there is no such run.
    """
    gathered, history = gather(path, run)
    lines = [*_reuse(gathered), *_pools(gathered), *_evictions(gathered), *_copies(gathered)]
    if history.incomplete:
        lines.append(f"not all is known: {history.incomplete}")
    return "\n".join(lines)


def _reuse(g: Gathered) -> Iterator[str]:
    reused = {tier: sum(rows) for tier, rows in g.reused.items()}
    lost = {why: sum(rows) for why, rows in g.lost.items()}
    asked = sum(reused.values()) + sum(lost.values())
    yield f"{g.prompts} prompts of {asked:g} tokens in {seconds(g.length)}"
    for tier, tokens in reused.items():
        if tokens or tier == "device":
            yield f"  {tokens:>10g}  {percent(tokens, asked):>7}  reused, of the {tier}"
    for why, tokens in sorted(lost.items(), key=lambda item: -item[1]):
        yield f"  {tokens:>10g}  {percent(tokens, asked):>7}  {words(why)}"


def _pools(g: Gathered) -> Iterator[str]:
    for name, size in g.sizes.items():
        if not size or not g.held:
            continue
        last = g.held[-1].get(name, {})
        most = max(size - held[name]["free"] for held in g.held if name in held)
        holders = ", ".join(f"{last[holder]} {holder}" for holder in HOLDERS if last.get(holder))
        yield f"{words(name)}: at most {most} of {size} held; at the end {holders}"


def _evictions(g: Gathered) -> Iterator[str]:
    if not g.gone:
        yield "nothing was evicted"
    for (tier, what), by_reason in sorted(g.gone.items()):
        reasons = ", ".join(f"{sum(rows):g} {words(why)}" for why, rows in by_reason.items())
        yield f"{what} evicted from the {tier}: {reasons}"
    if any(g.uncopied.values()):
        pages, states = g.uncopied.values()
        yield f"{pages} pages and {states} states of these went without their copy to the host"


def _copies(g: Gathered) -> Iterator[str]:
    passes = g.passes.spans()
    for name, queue in sorted(g.queues.items()):
        beside, busy = overlap(queue.spans(), passes)
        failed = f", {queue.failed} failed" if queue.failed else ""
        yield (
            f"copies {name}: {len(queue)} of {bytes_of(queue.bytes)} in all{failed}, busy for "
            f"{seconds(busy)}, {percent(beside, busy)} of it beside a pass; median wait "
            f"{seconds(percentile(queue.late, 50))}"
        )
    for (kind, why), count in sorted(g.dropped.items()):
        yield f"{count} planned {words(kind)}s were dropped: {words(why)}"
