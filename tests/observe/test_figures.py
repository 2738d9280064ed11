"""Figures from events: what lasted, and from when to when."""

from __future__ import annotations

from phloem.events import CopyEnded, CopyPlanned, CopySubmitted, RuntimeStarted
from phloem.runtime.observe.figures import Figures

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
