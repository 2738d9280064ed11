"""Figures from events: what lasted, and from when to when."""

from __future__ import annotations

from phloem.events import (
    CopyEnded,
    CopyPlanned,
    CopySubmitted,
    Evicted,
    RequestEnded,
    RequestOpened,
    RuntimeStarted,
)
from phloem.runtime.observe.charts import Bar
from phloem.runtime.observe.figures import Figures
from phloem.runtime.observe.gathered import BUCKETS, Gathered, Queue
from phloem.runtime.observe.snapshot import snapshot

STARTED = RuntimeStarted(page_size=2, grid=2, pages=4, states=2, layout="")


def submitted(op: int) -> CopySubmitted:
    return CopySubmitted(op=op, kind="copy_state", pages=[], states=[op], queue="d2d", bytes=64)


def test_a_copy_lasts_as_long_as_its_engine_says() -> None:
    figures = Figures()
    for time, event in (
        (10.0, STARTED),
        (11.0, CopyPlanned(op=1, kind="copy_state", request="r")),
        (12.0, submitted(1)),
        (20.0, CopyEnded(op=1, error="", started_ns=1_500_000_000, ended_ns=4_000_000_000)),
    ):
        figures.add(time, event)
    (copy,) = figures.copies
    assert (copy.planned, copy.submitted, copy.start, copy.end) == (11.0, 12.0, 13.5, 16.0)


def test_where_the_log_does_not_tell_it_began_when_its_queue_was_free() -> None:
    figures = Figures()
    for time, event in (
        (10.0, STARTED),
        (12.0, submitted(1)),
        (13.0, submitted(2)),
        (20.0, CopyEnded(op=1, error="")),
        (21.0, CopyEnded(op=2, error="")),
    ):
        figures.add(time, event)
    assert [(copy.start, copy.end) for copy in figures.copies] == [(12.0, 20.0), (20.0, 21.0)]


def test_what_cannot_be_told_apart_is_drawn_as_one() -> None:
    queue = Queue(pixel=1.0)
    queue.add(Bar(0.0, 5.0, "load", "a long one"), "load")
    for number in range(1000):
        start = 10.0 + number / 1000
        queue.add(Bar(start, start + 0.0005, "load", "a short one"), "load")
    queue.add(Bar(11.0, 11.0001, "failed", "one that failed"), "load")
    queue.add(Bar(20.0, 20.1, "load", "far from the others"), "load")
    titles = [bar.title for bar in queue.bars]
    assert titles == ["a long one", "1000 load", "one that failed", "far from the others"]
    assert len(queue) == 1003 and queue.spans()[0] == (0.0, 5.0)


def test_a_report_keeps_sums_and_not_what_it_has_summed() -> None:
    gathered = Gathered(0.0, 1000.0)
    gathered.add(0.0, STARTED)
    for number in range(5000):
        time, name = number / 5, f"r{number}"
        opened = RequestOpened(
            request=name, tokens=10, usable=4, device=4, kv_prefix=4, wanted=[],
            lost={"never_seen": 6}, namespace=("", ""), session=f"s{number % 7}",
        )  # fmt: skip
        gathered.add(time, opened)
        gathered.add(time, submitted(number))
        gathered.add(time, CopyEnded(op=number, error=""))
        ended = RequestEnded(request=name, how="finished", reused=4, computed=6, published=10)
        gathered.add(time, ended)
    gathered.finish()
    assert gathered.prompts == 5000 and sum(gathered.reused["device"]) == 20_000
    assert sum(gathered.lost["never_seen"]) == 30_000
    assert len(gathered.held) == BUCKETS + 1 and gathered.held[-1]["kv"]["free"] == 4
    assert len(gathered.worst()) == 40 and gathered.worst()[0].name == "r0"
    assert {sums.requests for sums in gathered.sessions.values()} <= {714, 715}
    kept = (gathered.requests, gathered.lookups, gathered.copies, gathered.occupancy)
    assert all(len(spans) <= 1 for spans in kept) and not gathered.running


def test_time_may_begin_at_zero() -> None:
    figures = Figures()
    figures.add(0.0, STARTED)
    figures.add(5.0, STARTED)
    assert (figures.first, figures.last, figures.runs) == (0.0, 5.0, [0.0, 5.0])


def test_what_goes_without_its_copy_counts_once() -> None:
    """It was told when it was promised, and is told again when its copy has not been made."""
    figures = Figures()
    figures.add(0.0, STARTED)
    promised = Evicted(pages=1, states=0, pages_promised=3, states_promised=1, why="room")
    figures.add(1.0, promised)
    figures.add(1.5, Evicted(pages=2, states=1, why="no_copy"))
    (gone,) = figures.evictions
    assert (gone.pages, gone.states) == (4, 1)
    assert snapshot(figures, 1.0).evicted == {"device": 4}
    assert figures.uncopied == {"pages": 2, "states": 1}
