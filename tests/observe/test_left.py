"""Requests whose callers left before they had them, and forks that were never made, run nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from observe.driver import config

from phloem import CacheRuntime, NoRoom
from phloem.events import Event, RequestEnded, RequestForked, RequestOpened
from phloem.runtime.observe.counts import Counts
from phloem.runtime.observe.figures import Figures
from phloem.runtime.traces import read_event_log
from phloem.runtime.tracing import open_log, several

TOKENS = list(range(21))


async def leave(cache: CacheRuntime, name: str) -> None:
    """Open a request as a caller who is cancelled when it is opened and he has not heard of it."""
    opening = asyncio.ensure_future(cache.open_request(TOKENS, id=name))
    while not cache.core.tree.leases.live:  # noqa: ASYNC110  the turn tells nobody else
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    cache.core.domain.drain()


async def test_callers_who_leave_leave_nothing_in_the_counts() -> None:
    counts, figures = Counts(), Figures()

    def sink(event: Event) -> None:
        counts(event)
        figures.add(1.0, event)

    async with CacheRuntime(config(True, inline=False), events=sink) as cache:
        for number in range(30):
            await leave(cache, f"left {number}")
        assert counts.requests_opened == 30 and counts.requests_ended["aborted"] == 30
        assert not counts._usable and not counts._leases and not figures.running
        assert {one.how for one in figures.requests} == {"aborted"}
        async with cache.request(TOKENS, id="stays"):
            assert set(figures.running) == set(counts._usable) == {"stays"}
    assert counts.requests_ended == {"finished": 0, "aborted": 31}


async def test_a_log_is_read_on_behind_a_caller_who_left(tmp_path: Path) -> None:
    """Without waiting for an end that never comes; the same name may come again."""
    path = tmp_path / "log"
    options = msgspec.structs.replace(config(True, inline=False), tell_prompts=True)
    with open_log(path) as log:
        async with CacheRuntime(options, events=log) as cache:
            await leave(cache, "r")
            for name in ("a", "r"):
                async with cache.request(TOKENS, id=name) as request:
                    await request.finish()
    lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path / "first").write_bytes(b"".join(lines[: _end_of(lines, "a") + 1]) + b"torn")
    read = read_event_log(tmp_path / "first")
    assert next(read).length == len(TOKENS), "known before the line that cannot be read"
    assert [one.length for one in read_event_log(path)] == 2 * [len(TOKENS)]


def _end_of(lines: list[bytes], name: str) -> int:
    found = (number for number, line in enumerate(lines) if b"RequestEnded" in line)
    return next(number for number in found if f'"request":"{name}"'.encode() in lines[number])


async def test_a_fork_for_which_there_is_no_room_is_not_told() -> None:
    events: list[Event] = []
    counts = Counts()
    options = msgspec.structs.replace(config(True), device_states=1)
    async with CacheRuntime(options, events=several(events.append, counts)) as cache:
        request = await cache.open_request(TOKENS, id="a")
        await request.allocate(len(TOKENS))
        await request.ready()
        with cache.step([request]) as step:
            step.launched({request: len(TOKENS)})
        with pytest.raises(NoRoom):
            await request.fork("b")
        request.abort()
    told = [one for one in events if isinstance(one, RequestOpened | RequestForked | RequestEnded)]
    assert [one.request for one in told] == ["a", "a"]
    assert counts.requests_ended["aborted"] == counts.requests_opened == 1
