"""The event log: what it writes, leaves out, drops and reads back."""

from __future__ import annotations

import gzip
import io
import itertools
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from phloem import CacheConfig, CacheRuntime, InvalidRequest, ModelLayout, events
from phloem.runtime.tracing import (
    Entry,
    EventLog,
    EventsDropped,
    LogOpened,
    RecentEvents,
    Style,
    caller_context,
    ends_torn,
    level_of,
    open_log,
    read_heads,
    read_log,
    several,
)

OPENED = events.RequestOpened(
    turn=3,
    request="r1",
    tokens=10,
    usable=4,
    kv_prefix=8,
    lost={"last_token": 1, "no_state": 5},
    wanted=[(8, "branch")],
    namespace=("", ""),
)
FREED = events.Freed(turn=4, cause=3, component="kv", ids=[7, 8], owner=-1)


def ticking() -> itertools.count[int]:
    return itertools.count(100)


def entries_of(path: Path) -> list[Entry]:
    """Without the lines that say that the log was opened."""
    return [entry for entry in read_log(path) if not isinstance(entry.event, LogOpened)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, ticks = tmp_path / "log", ticking()
    with open_log(path, clock=lambda: next(ticks), fields={"run": "a"}) as log:
        log(OPENED)
        log(FREED)
    with open_log(path, clock=lambda: next(ticks)) as log:  # appends
        log(events.CopyEnded(op=1, error="lost"))
    opened = LogOpened(schema=events.SCHEMA, least="debug", kinds=[], sample=1)
    assert list(read_log(path)) == [
        Entry(100.0, "info", opened),
        Entry(101.0, "info", OPENED),
        Entry(102.0, "debug", FREED),
        Entry(103.0, "info", opened),
        Entry(104.0, "error", events.CopyEnded(op=1, error="lost")),
    ]
    first = msgspec.json.decode(path.read_bytes().splitlines()[1])
    assert list(first)[:4] == ["event", "time", "level", "run"]
    assert "cause" not in first  # absent ids are left out


def test_level_and_kinds_choose(tmp_path: Path) -> None:
    with open_log(tmp_path / "info", level="info") as log:
        log(FREED)
        log(OPENED)
    with open_log(tmp_path / "freed", kinds=[events.Freed]) as log:
        log(FREED)
        log(OPENED)
    assert [entry.event for entry in entries_of(tmp_path / "info")] == [OPENED]
    assert [entry.event for entry in entries_of(tmp_path / "freed")] == [FREED]
    (opened, _) = read_log(tmp_path / "freed")
    assert isinstance(opened.event, LogOpened) and opened.event.kinds == ["Freed"]
    assert log.dropped == 0


def test_a_sample_keeps_whole_requests(tmp_path: Path) -> None:
    with open_log(tmp_path / "log", sample=4) as log:
        for name in range(40):
            log(events.RequestEnded(request=f"r{name}", how="x", reused=0, computed=0, published=0))
            log(events.LeaseLeaked(request=f"r{name}", lease=1))
        log(FREED)  # of no request
    kept = [entry.event.request for entry in entries_of(tmp_path / "log")]
    assert kept[-1] == "" and 4 <= len(set(kept)) <= 16
    assert all(kept.count(name) == 2 for name in kept[:-1])


def test_logfmt_lines_are_pairs() -> None:
    out = io.BytesIO()
    with open_log(out, style="logfmt", clock=lambda: 0.25) as log:
        log(FREED)
    line = out.getvalue().decode().splitlines()[1]
    assert line == (
        "event=Freed time=0.25 level=debug turn=4 cause=3 component=kv ids=[7,8] owner=-1 "
        "tier=device"
    )


def test_recent_events_are_kept_up_to_a_bound(tmp_path: Path) -> None:
    ticks = ticking()
    recent = RecentEvents(2, clock=lambda: next(ticks))
    both = several(None, recent, None)
    assert both is recent and several(None) is None
    for event in (OPENED, FREED, OPENED):
        both(event)
    assert recent.forgotten == 1
    assert recent.entries() == [Entry(101, "debug", FREED), Entry(102, "info", OPENED)]
    recent.write(tmp_path / "log")
    assert entries_of(tmp_path / "log") == recent.entries()


def test_a_log_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open_log(path) as log:
        log(FREED)
    later = path.read_bytes().replace(b'"schema":%d' % events.SCHEMA, b'"schema":99')
    path.write_bytes(later)
    with pytest.raises(InvalidRequest, match="schema 99, written by a later version"):
        list(read_log(path))


def test_what_a_caller_has_bound_is_text() -> None:
    with structlog.contextvars.bound_contextvars(trace_id="a", attempt=2):
        assert caller_context() == {"trace_id": "a", "attempt": "2"}
    assert caller_context() == {}


def test_console_lines_are_for_people() -> None:
    out = io.BytesIO()
    with open_log(out, style="console", clock=lambda: 0.25) as log:
        log(FREED)
    line = out.getvalue().decode().splitlines()[1]
    assert line.startswith("1970-01-01T00:00:00.250+00:00 [debug    ] Freed")
    assert "ids=[7, 8]" in line
    assert not out.closed  # a stream that was given stays open


class Gate(io.RawIOBase):
    """A disk that hangs until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.text = b""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.entered.set()
        assert self.open.wait(60)
        self.text += data
        return len(data)


def test_a_hanging_disk_drops_counts_and_tells() -> None:
    gate = Gate()
    log = open_log(gate, capacity=3, clock=lambda: 0.0)
    log(OPENED)
    assert gate.entered.wait(60)  # the writer hangs with the first line
    for _ in range(5):
        log(FREED)
    assert log.dropped == 2
    gate.open.set()
    log.close()
    names = [msgspec.json.decode(line)["event"] for line in gate.text.splitlines()]
    assert names[0] == "LogOpened"
    assert names[1:] == ["RequestOpened", "Freed", "Freed", "Freed", "EventsDropped"]
    assert msgspec.json.decode(gate.text.splitlines()[-1])["count"] == 2
    log(FREED)  # after the end: counted, never an error
    assert log.dropped == 3


def test_a_broken_disk_is_told_at_the_end() -> None:
    class Broken(Gate):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            raise OSError(f"disk full: {len(data)} bytes lost")

    log = open_log(Broken())
    log(OPENED)
    with pytest.raises(OSError, match="disk full"):
        log.close()
    assert log.dropped == 2  # with the line that says that the log was opened
    log.close()


def test_an_event_that_no_line_can_hold_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(path)
    log(OPENED)
    log(msgspec.structs.replace(OPENED, tokens=object()))
    log(FREED)
    with pytest.raises(TypeError, match="object"):
        log.close()
    assert [entry.event for entry in entries_of(path)] == [OPENED, FREED, EventsDropped(count=1)]
    assert log.dropped == 1


async def test_positions_of_another_library_are_written_as_numbers(tmp_path: Path) -> None:
    layout = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4)
    config = CacheConfig(layout=layout, page_size=2, device_pages=8)
    with open_log(tmp_path / "log") as log:
        async with CacheRuntime(config, events=log) as cache:
            places = np.array([4, 6])
            async with cache.request(range(8), breakpoints=places[:1]) as request:  # type: ignore[arg-type]  # no sequence
                await request.allocate(6)
                await request.ready()
                with cache.step([request]) as step:
                    step.launched({request: places[1]})
                assert type(request.computed) is int
                await request.finish()
    (ended,) = [
        e.event for e in read_log(tmp_path / "log") if isinstance(e.event, events.RequestEnded)
    ]
    assert ended.computed == 6


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for bad in ({"level": "loud"}, {"style": "xml"}, {"capacity": 0}, {"sample": 0}):
        with pytest.raises(InvalidRequest):
            open_log(tmp_path / "log", **bad)  # type: ignore[arg-type]
    assert not (tmp_path / "log").exists()


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open_log(path) as log:
        log(OPENED)
    path.write_bytes(path.read_bytes() + b'{"event":"Fre\n')
    for read in (read_log, read_heads):
        with pytest.raises(InvalidRequest, match="line 3 is no event"):
            list(read(path))


@pytest.mark.parametrize("torn", [b'{"event":"Fre', bytes(512)], ids=["cut", "zeros"])
def test_the_log_of_a_killed_process_is_read_and_goes_on(torn: bytes, tmp_path: Path) -> None:
    """Its last line has no end: the rest counts, and the next writer begins a line of its own."""
    path = tmp_path / "log"
    with open_log(path) as log:
        log(OPENED)
    assert not ends_torn(path)
    path.write_bytes(path.read_bytes() + torn)
    assert ends_torn(path)
    assert len(list(read_log(path))) == len(list(read_heads(path))) == 2
    with open_log(path) as log:
        log(OPENED)
    kinds = [type(entry.event).__name__ for entry in read_log(path)]
    assert kinds == ["LogOpened", "RequestOpened"] * 2
    assert [head.event for head in read_heads(path)] == kinds
    packed = tmp_path / "log.1.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [type(entry.event).__name__ for entry in read_log(packed)] == kinds
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(InvalidRequest, match=r"log.1.gz cannot be unpacked"):
        list(read_log(packed))


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open_log(path) as log:
        log(OPENED)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n \r\n"))
    assert len(list(read_log(path))) == 2


@pytest.mark.parametrize("style", ["json", "logfmt", "console"])
def test_half_a_character_in_a_name_does_not_end_the_log(style: Style, tmp_path: Path) -> None:
    path = tmp_path / "log"
    odd = msgspec.structs.replace(OPENED, request="a\ud800", context={"user\udfff": "\udc00"})
    with open_log(path, style=style, sample=1) as log:
        log(odd)
        log(OPENED)
    assert log.dropped == 0
    assert path.read_bytes().count(b"\n") == 3
    if style == "json":
        _, first, second = read_log(path)
        assert first.event.request == "a\\ud800" and second.event == OPENED
    with open_log(path, sample=7) as log:
        log(odd)  # whether its request is chosen: an answer, not an error


def test_every_kind_of_event_has_a_level() -> None:
    """A new kind must be given a level, in the table or by what it says."""
    from phloem.runtime import tracing

    by_content = {events.CopyEnded, events.RuntimeStopped}
    kinds = set(events.Event.__subclasses__())
    assert kinds == set(tracing._LEVELS) | by_content
    assert EventsDropped in kinds
    assert level_of(events.CopyEnded(op=1, error="")) < level_of(
        events.CopyEnded(op=1, error="lost")
    )
    stopped: dict[str, Any] = {"leases": [], "pages": 0, "states": 0}
    assert level_of(events.RuntimeStopped(why="closed", **stopped)) < level_of(
        events.RuntimeStopped(why="crashed: x", **stopped)
    )


async def test_a_runtime_writes_its_events(tmp_path: Path) -> None:
    layout = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4, kv_dtype="float32")
    config = CacheConfig(layout=layout, page_size=2, state_chunk=2, device_pages=8, device_states=0)
    log: EventLog
    with open_log(tmp_path / "log") as log:
        async with CacheRuntime(config, events=log) as cache:
            async with cache.request([1, 2, 3, 4], id="r1") as request:
                await request.allocate(4)
                await request.ready()
                with cache.step([request]) as step:
                    step.launched({request: 4})
                await request.finish()
            await cache.audit()
    entries = [entry.event for entry in entries_of(tmp_path / "log")]
    kinds = [type(event).__name__ for event in entries]
    assert kinds[0] == "RuntimeStarted"
    assert kinds[-1] == "RuntimeStopped"
    assert {"RequestOpened", "LeaseTaken", "Granted", "StepChanged", "Inserted"} < set(kinds)
    ended = [event for event in entries if isinstance(event, events.RequestEnded)]
    assert [(e.request, e.how, e.computed, e.published) for e in ended] == [
        ("r1", "finished", 4, 4)
    ]
