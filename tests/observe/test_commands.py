"""The commands on logs: timeline, report, top, explain, trace."""

from __future__ import annotations

import asyncio
import io
import math
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from observe.driver import Driver, config
from rich.console import Console

from phloem import CacheRuntime, InvalidRequest
from phloem.runtime.cli import main
from phloem.runtime.observe.numbers import overlap, percentile
from phloem.runtime.observe.top import LogTail, watch
from phloem.runtime.tracing import open_log, read_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in one log."""
    path = tmp_path_factory.mktemp("logs") / "events.jsonl"

    async def run(seed: int) -> None:
        async with CacheRuntime(config(True), events=sink) as cache:
            driver = Driver(cache, seed)
            for _ in range(150):
                await driver.operate()
            await driver.close()

    with open_log(path) as sink:
        asyncio.run(run(21))
        asyncio.run(run(22))
    return path


# -- timeline -------------------------------------------------------------------------------------

PLAIN = {"name", "ph", "pid", "tid"}
MUST = {
    "X": PLAIN | {"ts", "dur"},
    "C": PLAIN | {"ts", "args"},
    "M": PLAIN | {"args"},
    "s": PLAIN | {"ts", "id", "cat"},
    "f": PLAIN | {"ts", "id", "cat", "bp"},
}


def test_the_timeline_is_of_the_trace_event_format(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert main(["trace", str(log), "--perfetto", str(out)]) == 0
    trace = msgspec.json.decode(out.read_bytes())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    for event in events:
        # What is zero may be left out; the rest must be there.
        assert set(event) | {"ts"} >= MUST[event["ph"]], event
        assert event.get("ts", 0) >= 0 and event.get("dur", 1) > 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    slices = [event for event in events if event["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} <= named
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"tree", "allocator", "transfer", "d2d", "passes 1", "r1"} <= tracks
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"actors", "copies", "requests", "pools", "actors (run 2)"} <= processes
    begun = Counter(e["id"] for e in events if e["ph"] == "s")
    ended = Counter(e["id"] for e in events if e["ph"] == "f")
    assert begun == ended and len(begun) > 50
    assert_arrows_bind(events)


def assert_arrows_bind(events: list[dict[str, object]]) -> None:
    """An arrow begins and ends within a slice of its track."""
    slices: dict[tuple[object, object], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            start = float(e.get("ts", 0.0))  # type: ignore[arg-type]
            end = start + float(e["dur"])  # type: ignore[arg-type]
            slices.setdefault((e["pid"], e["tid"]), []).append((start, end))
    for e in events:
        if e["ph"] in ("s", "f"):
            at = float(e.get("ts", 0.0))  # type: ignore[arg-type]
            spans = slices[e["pid"], e["tid"]]
            assert any(start <= at <= end + 0.01 for start, end in spans), e


# -- report ---------------------------------------------------------------------------------------

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that every element is closed, and collects what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.text = ""
        self.heads: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        have = dict(attrs)
        if "id" in have:
            self.ids.append(have["id"] or "")
        self.links.extend(have[name] or "" for name in ("href", "src") if name in have)
        if tag == "svg":
            self.charts.append(have)
        if re.fullmatch("h[1-6]", tag):
            self.heads.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_is_one_whole_page(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(log), "-o", str(out)]) == 0
    page = Page(out.read_text())
    assert len(page.ids) == len(set(page.ids))
    assert {"reuse", "pools", "evictions", "copies", "latency", "tree", "sessions"} <= set(page.ids)
    for link in page.links:  # nothing from elsewhere
        assert link == "data:," or (link.startswith("#") and link[1:] in page.ids), link
    assert "http" not in out.read_text()
    assert len(page.charts) > 6
    assert all(chart.get("role") == "img" and chart.get("aria-label") for chart in page.charts)
    assert page.heads[0] == 1 and set(page.heads[1:]) == {2}
    assert "Every token is reused or has the reason why not: reused" in page.text


async def test_windows_are_shown_like_other_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "log", tmp_path / "report.html"
    with open_log(path) as log:
        async with CacheRuntime(config(True, window=True), events=log) as cache:
            driver = Driver(cache, 1)
            for _ in range(200):
                await driver.operate()
            tree = cache.stats().spans["window"].tree
    assert tree > 0
    assert main(["report", str(path), "-o", str(out)]) == 0
    page = Page(out.read_text())
    labels = [chart.get("aria-label") or "" for chart in page.charts]
    assert any(label.startswith("Pages of windows on the device by holder") for label in labels)
    assert any("window pages left the device" in label for label in labels)
    assert "window pages evicted" in page.text and "24 window pages, grid" in page.text
    capsys.readouterr()
    assert main(["report", str(path), "--text"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"window: at most \d+ of 24 held; at the end", text)
    assert re.search(r"window pages evicted from the device: .*\d+ asked", text)
    assert main(["trace", str(path), "--at", "+1e9"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^window: .*\b{tree} tree", text, re.MULTILINE)
    assert sum(map(int, re.findall(r"(\d+) window pages", text))) == tree
    shown = io.StringIO()
    watch(path, every_s=1e6, once=True, console=Console(file=shown, width=100))
    assert "pages a second from the window" in shown.getvalue()


def test_names_in_a_report_are_text(tmp_path: Path) -> None:
    path, out = tmp_path / "log", tmp_path / "report.html"
    evil = "<script>alert(1)</script>"

    async def run() -> None:
        async with (
            CacheRuntime(config(False), events=sink) as cache,
            cache.request([1, 2, 3], id=evil),
        ):
            pass

    with open_log(path) as sink:
        asyncio.run(run())
    assert main(["report", str(path), "-o", str(out)]) == 0
    assert evil not in out.read_text()
    assert evil in Page(out.read_text()).text  # as what a reader sees


def test_sums_for_reports() -> None:
    assert percentile([3, 1, 2], 50) == 2 and percentile([3, 1, 2], 100) == 3
    assert overlap([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == (3, 6)
    assert overlap([], [(0, 1)]) == (0, 0)


# -- the others -----------------------------------------------------------------------------------


def test_trace_and_explain(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = str(list(read_log(log))[60].time)
    assert main(["trace", str(log), "--at", at, "--json"]) == 0
    early = msgspec.json.decode(capsys.readouterr().out)
    assert main(["trace", str(log)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"kv: \d+ free, \d+ tree", text) and "generation" in text
    assert main(["trace", str(log), "--run", "1", "--json"]) == 0
    assert early != msgspec.json.decode(capsys.readouterr().out)
    assert main(["explain", str(log), "--request", "r3", "--run", "2"]) == 0
    assert "request r3: " in capsys.readouterr().out
    assert main(["explain", str(log), "--request", "r3", "--json"]) == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert sum(reason["tokens"] for reason in said["reasons"]) == said["tokens"] - said["usable"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "{log}", "--request", "nobody"], "has no request 'nobody'"),
        (["trace", "{log}", "--at", "noon"], "--at noon is no time"),
        (["trace", "{log}", "--at", "+nan"], "--at +nan is no time"),
        (["trace", "{log}", "--run", "9"], "has 2 runs, no run 9"),
        (["trace", "{none}"], "No such file"),
        (["report", "{empty}"], "no RuntimeStarted"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str],
    message: str,
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    names = {"log": str(log), "none": str(tmp_path / "none"), "empty": str(empty)}
    assert main([argument.format(**names) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_top_follows_a_log(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "growing"
    lines = log.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:40]) + lines[40][:10])
    out = io.StringIO()

    def parts() -> Iterator[bytes]:
        yield lines[40][10:] + b"".join(lines[41:400])
        yield b"".join(lines[400:])

    more = parts()

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        with path.open("ab") as file:
            try:
                file.write(next(more))
            except StopIteration:
                raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        watch(path, every_s=0.5, console=Console(file=out, width=100), sleep=sleep)
    watch(path, once=True, console=Console(file=out, width=100))
    last = out.getvalue()[-3000:]
    assert "pools" in last and re.search(r"\d+ of 40 ", last) and "reused" in last
    for every_s in (0.0, math.inf, math.nan, -1.0):
        with pytest.raises(InvalidRequest, match="interval"):
            watch(path, every_s=every_s)


def test_a_tail_waits_for_torn_lines(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = log.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:7])
    tail = LogTail(path)
    assert len(tail.read()) == 1 and tail.read() == []
    with path.open("ab") as file:
        file.write(lines[1][7:])
    assert len(tail.read()) == 1
    tail.close()


def test_a_tail_reads_on_where_a_log_was_begun_anew(log: Path, tmp_path: Path) -> None:
    """Renamed by who rotates logs, or cut to nothing in its place."""
    path = tmp_path / "log"
    lines = log.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:9]))
    tail = LogTail(path)
    assert len(tail.read()) == 9
    path.rename(tmp_path / "log.1")
    assert tail.read() == []  # nothing is there yet
    with (tmp_path / "log.1").open("ab") as file:
        file.write(lines[9])
    assert len(tail.read()) == 1  # the old one was still written
    path.write_bytes(b"".join(lines[:5]))
    assert len(tail.read()) == 5
    path.write_bytes(b"".join(lines[:2]))
    assert len(tail.read()) == 2
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(InvalidRequest, match="log, line 3 is no event"):
        tail.read()
    tail.close()


def test_the_log_of_a_killed_process_is_read(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "torn"
    path.write_bytes(log.read_bytes()[:-20])
    for command in (["trace"], ["report", "--text"]):
        assert main([*command, str(path)]) == 0
        said = capsys.readouterr()
        assert said.err == f"phloem: the last line of {path} has no end yet; it is left out\n"
        assert said.out
