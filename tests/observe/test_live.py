"""A running cache that shows itself at a socket: viewers come and go, and never hold it up."""

from __future__ import annotations

import asyncio
import errno
import io
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from observe.driver import Driver, config
from rich.console import Console

from phloem import CacheRuntime, InvalidRequest
from phloem.events import Event, RequestOpened, ResetDone, RuntimeStarted
from phloem.runtime.cli import main
from phloem.runtime.observe import live as live_module
from phloem.runtime.observe.live import LiveEvents, LiveView, serve_top
from phloem.runtime.observe.snapshot import Snapshot
from phloem.runtime.observe.top import watch

STARTED = RuntimeStarted(page_size=2, grid=2, pages=4, states=2, layout="")


@pytest.fixture
def path() -> Iterator[Path]:
    """Short enough for the name of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "top"


async def look(view: LiveView) -> Snapshot:
    """As a viewer in another process: the loop goes on meanwhile."""
    for _ in range(50):
        now = await asyncio.to_thread(view.look, 1.0)
        if now.started:
            return now
    raise AssertionError("nothing was shown")


def test_without_a_descriptor_left_nobody_new_is_shown_anything(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the time being; who is there already sees on."""
    none_left = threading.Event()

    class Listener(socket.socket):
        def accept(self) -> Any:
            if none_left.is_set():
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(live_module.socket, "socket", Listener)
    with serve_top(path) as live:
        first = LiveView(path)
        assert not first.look(1.0).started
        none_left.set()
        second = LiveView(path, timeout_s=0.3)
        with pytest.raises(OSError, match="timed out"):
            second.look(1.0)
        live(STARTED)
        while not first.look(1.0).started:
            pass
        none_left.clear()
        second.close()
        third = LiveView(path)
        assert third.look(1.0).started
        for view in (first, third):
            view.close()


async def test_viewers_attach_and_detach_while_it_runs(path: Path) -> None:
    with serve_top(path) as live:
        async with CacheRuntime(config(True, host="write_through"), events=live) as cache:
            driver = Driver(cache, 5)
            for _ in range(150):
                await driver.operate()
            first = LiveView(path)
            assert (await look(first)).pools.keys() == {"kv", "state", "host_kv", "host_state"}
            second = LiveView(path)
            seen = await look(second)
            first.close()
            for _ in range(50):
                await driver.operate()
            now = await look(second)
            assert now.time > seen.time and now.missed == 0
            stats = cache.stats()
            assert now.pools["kv"].held["granted"] == stats.kv.granted
            assert now.pools["state"].held["tree"] == stats.state.tree
            assert {one.name for one in now.requests if not one.over} == set(cache.core.requests)
            assert now.queues["d2d"].copies > 0
            second.close()
            await driver.close()
            third = LiveView(path)
            assert not [one for one in (await look(third)).requests if not one.over]
    with pytest.raises(OSError, match="ended"):
        third.look(1.0)
    third.close()
    live.close()


def test_top_shows_a_socket(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_top(path) as live:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        watch(path, once=True, console=Console(file=(early := io.StringIO())))
        assert "no runtime has started" in early.getvalue()
        run_a_little(live)
        assert main(["top", str(path), "--once"]) == 0
        said = capsys.readouterr().out
        assert "host kv" in said and "d2h" in said and "of 40" in said
        looks = 0

        def sleep(seconds: float) -> None:
            nonlocal looks
            assert seconds == 0.5
            looks += 1
            if looks == 3:
                live.close()

        with pytest.raises(OSError, match="ended"):
            watch(path, every_s=0.5, console=Console(file=io.StringIO()), sleep=sleep)
        assert looks == 3 and not path.exists()


def run_a_little(live: LiveEvents) -> None:
    async def run() -> None:
        async with CacheRuntime(config(True, host="write_through"), events=live) as cache:
            driver = Driver(cache, 5)
            for _ in range(100):
                await driver.operate()
            await driver.close()

    asyncio.run(run())


def test_bad_viewers_go_and_others_stay(path: Path) -> None:
    with serve_top(path) as live:
        run_a_little(live)
        good = LiveView(path)
        for words in (b"rubbish\n", b"nan\n", b"-1\n", b"1" * 500):
            with socket.socket(socket.AF_UNIX) as bad:
                bad.settimeout(5)
                bad.connect(str(path))
                bad.sendall(words)
                with suppress(ConnectionResetError):  # it need not read to the end
                    assert bad.recv(10) == b"", words
        with socket.socket(socket.AF_UNIX) as deaf:  # asks without end and never reads
            deaf.settimeout(5)
            deaf.connect(str(path))
            with pytest.raises(OSError):
                for _ in range(100_000):
                    deaf.sendall(b"1\n" * 30)
        assert good.look(1.0).started
        crowd = [LiveView(path) for _ in range(7)]
        assert all(view.look(1.0).started for view in crowd)
        late = LiveView(path)
        with pytest.raises(OSError, match="takes no more viewers"):
            late.look(1.0)
        for view in (good, late, *crowd):
            view.close()


def test_what_does_not_fit_is_counted(path: Path) -> None:
    with serve_top(path, capacity=1) as live:
        live._queue.append((0.0, ResetDone(generation=1)))  # as if the thread were busy
        event = RequestOpened(
            tokens=1, usable=0, kv_prefix=0, lost={}, wanted=[], namespace=("", "")
        )
        for _ in range(2000):
            live(event)
        assert live.missed > 0
        view = LiveView(path)
        assert view.look(1.0).missed == live.missed
        view.close()


def test_viewers_are_answered_however_much_happens(path: Path) -> None:
    """Events that come as fast as they are counted keep nobody waiting, nor the one who closes."""
    with serve_top(path) as live:
        add = live._figures.add

        def add_and_more(time: float, event: Event) -> None:
            add(time, event)
            live(event)

        live._figures.add = add_and_more  # type: ignore[method-assign]  # the next one is there
        live(STARTED)
        view = LiveView(path, timeout_s=30)
        assert view.look(1.0).started
        view.close()


def test_who_may_serve_where(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="capacity is 0"):
        serve_top(path, capacity=0)
    with serve_top(path), pytest.raises(OSError):
        serve_top(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serve_top(path):  # the socket of a process that has died is taken over
        LiveView(path).close()
    path.write_text("a file")
    with pytest.raises(OSError, match=str(path)):
        serve_top(path)
    with pytest.raises(OSError, match=str(path)):
        LiveView(path)
    with pytest.raises(OSError, match=r"too long.*xxx"):
        serve_top(path.with_name("x" * 200))
    assert path.read_text() == "a file"
