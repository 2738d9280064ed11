"""Explanations: every token that is not reused has a reason, and the right one."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path

import pytest
from msgspec import structs
from observe.driver import Driver, config

from phloem import CacheRuntime, InvalidRequest, Namespace, events
from phloem.cuda_streams.dispatch import Dispatcher
from phloem.cuda_streams.engine import CopyEngine, Post, Ticket
from phloem.runtime.devices import engine_for
from phloem.runtime.observe.explain import Explanation, explain_request, readable
from phloem.runtime.observe.state import live_state
from phloem.runtime.tracing import open_log, read_log


async def serve(cache: CacheRuntime, tokens: list[int], name: str, *, state: bool = True) -> None:
    async with cache.request(tokens, id=name) as request:
        for _ in range(2):  # less may come from the host than it had
            await request.allocate(len(tokens) - request.computed)
            await request.ready()
        while request.computed < len(tokens):
            start, end = request.next_stop(4)
            with cache.step([request]) as step:
                step.launched({request: end})
            assert end > start
            await request.checkpoint(state=state if end % 4 == 0 else False)
        await request.finish(publish="prompt")


def reasons(explanation: Explanation) -> dict[str, int]:
    assert explanation.tokens - explanation.usable == sum(r.tokens for r in explanation.reasons)
    return {reason.why: reason.tokens for reason in explanation.reasons}


def detail(explanation: Explanation, why: str) -> str:
    (reason,) = (reason for reason in explanation.reasons if reason.why == why)
    return "; ".join(reason.details)


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LONGER = [*PROMPT[:8], 20, 21, 22, 23, 24]  # keeps the KV of the other when its states go


async def test_a_live_cache_explains_itself() -> None:
    async with CacheRuntime(config(True)) as cache:
        cold = await cache.explain(PROMPT)
        assert reasons(cold) == {"last_token": 1, "never_seen": 8}
        await serve(cache, PROMPT, "a")
        await serve(cache, LONGER, "b", state=False)
        before = live_state(cache.core)
        warm = await cache.explain(PROMPT)
        assert (warm.usable, warm.kv_prefix) == (8, 8)
        assert reasons(warm) == {"last_token": 1}
        other = await cache.explain(PROMPT, namespace=Namespace(salt="x"))
        assert "namespace ('', '') has 8 tokens of them" in detail(other, "never_seen")
        assert live_state(cache.core) == before  # explaining changes nothing
        await cache.evict(states=8)
        bare = await cache.explain(PROMPT)
        assert reasons(bare)["no_state"] == 8 and bare.branch_point == 8
        assert "a state at 8 would have saved 8 tokens" in bare.remedies
        await cache.evict(pages=6)
        gone = await cache.explain(PROMPT)
        assert reasons(gone) == {"last_token": 1, "evicted": 8}
        assert "made room for a caller of evict (use" in detail(gone, "evicted")
        assert "4 more pages for the cache" in "; ".join(gone.remedies)


async def test_a_log_explains_a_request(tmp_path: Path) -> None:
    path, clock = tmp_path / "log", itertools.count(1)
    with open_log(path, clock=lambda: float(next(clock))) as log:
        async with CacheRuntime(config(True), events=log) as cache:
            await serve(cache, PROMPT, "first")
            await serve(cache, LONGER, "longer", state=False)
            await cache.evict(states=8)
            await serve(cache, PROMPT, "bare")
            await cache.evict(pages=40, states=8)
            big = [50 + n for n in range(78)]
            await serve(cache, PROMPT, "again")
            await serve(cache, big, "big", state=False)
            await serve(cache, PROMPT, "victim")
    first = explain_request(path, "first")
    assert reasons(first) == {"last_token": 1, "never_seen": 8}
    assert any("published up to 8, with a state" in line for line in first.later)
    assert "finished, computed 9" in first.later[-1]
    bare = explain_request(path, "bare")
    assert reasons(bare) == {"last_token": 1, "no_state": 8}
    assert re.search(
        r"there was a state at 8; it went \d.* \(asked, score", detail(bare, "no_state")
    )
    victim = explain_request(path, "victim")
    assert reasons(victim)["evicted"] == 8
    assert "made room for big" in detail(victim, "evicted")
    assert "lru gave the victims" in detail(victim, "evicted")
    text = readable(victim)
    assert text.startswith("request victim: 0 of 9 tokens reusable, KV of 0")
    with pytest.raises(InvalidRequest, match="has no request 'nobody' in run 1"):
        explain_request(path, "nobody", run=1)


async def test_what_else_went_is_not_taken_for_the_kv_that_did(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open_log(path) as log:
        async with CacheRuntime(config(True, window=True), events=log) as cache:
            await serve(cache, PROMPT, "first")
            await serve(cache, [50 + n for n in range(17)], "other")
            cache.release(await cache.allocate(pages=31, spans={"window": 20}, owner="both"))
            await serve(cache, PROMPT, "again")
    evictions = (one.event for one in read_log(path) if isinstance(one.event, events.Evicted))
    (made_room,) = (one for one in evictions if one.request == "both")
    assert {"leaf", "span"} <= {victim.what for victim in made_room.victims}
    again = explain_request(path, "again")
    assert reasons(again)["evicted"] > 0
    leaves = [one for one in made_room.victims if one.what not in ("state", "span")]
    assert detail(again, "evicted").count("tokens up to") == len(leaves) < 3


async def test_what_the_host_had_and_what_did_not_come(tmp_path: Path) -> None:
    path, broken = tmp_path / "log", False
    engines: list[Dispatcher] = []

    def fault(ticket: Ticket, layer: int) -> None:
        del layer
        if broken and ticket.batch.channel == "h2d":
            raise OSError("down")

    def engine(post: Post) -> CopyEngine:
        engine = engine_for(None, asyncio.get_running_loop())(post)
        assert isinstance(engine, Dispatcher)
        engine.fault = fault
        engines.append(engine)
        return engines[0]

    async def demote(cache: CacheRuntime) -> None:
        await engines[0].drain()
        await asyncio.sleep(0)
        assert not cache.stats().tree.operations
        await cache.evict(pages=40, states=8)

    settings = config(True, host="write_through")
    with open_log(path) as log:
        async with CacheRuntime(settings, events=log, engine=engine) as cache:
            await serve(cache, PROMPT, "first")
            await demote(cache)
            live = await cache.explain(PROMPT)
            assert (live.usable, live.device, live.state_tier) == (8, 0, "host")
            assert "(0 on the device, 8 from the host)" in readable(live)
            await serve(cache, PROMPT, "second")
            await demote(cache)
            broken = True
            await serve(cache, PROMPT, "third")
    second = explain_request(path, "second")
    assert (second.usable, second.device, second.state_tier) == (8, 0, "host")
    assert reasons(second) == {"last_token": 1}
    assert "computed 1, loaded 8 from the host" in second.later[-1]
    third = explain_request(path, "third")
    assert (third.usable, third.device) == (0, 0)
    assert reasons(third) == {"last_token": 1, "copy_failed": 8}
    assert any("a load did not come, stood on 0" in line for line in third.later)
    assert third.later[-1].endswith("finished, computed 9")


@pytest.mark.parametrize(("prefill", "way"), [(1e9, "recompute"), (1.0, "load")])
async def test_what_was_weighed_is_told(tmp_path: Path, prefill: float, way: str) -> None:
    path, engines = tmp_path / "log", list[CopyEngine]()

    def engine(post: Post) -> CopyEngine:
        engines.append(engine_for(None, asyncio.get_running_loop())(post))
        return engines[0]

    settings = structs.replace(
        config(True, host="write_through"),
        loads="cheapest",
        prefill_tokens_per_s=prefill,
        load_bytes_per_s=1e3,
    )
    with open_log(path) as log:
        async with CacheRuntime(settings, events=log, engine=engine) as cache:
            await serve(cache, PROMPT, "first")
            await engines[0].drain()
            await asyncio.sleep(0)
            await cache.evict(pages=40, states=8)
            await serve(cache, PROMPT, "second")
    assert not explain_request(path, "first").weighed, "there was nothing to weigh"
    second = explain_request(path, "second")
    assert [(one.way, one.saved) for one in second.weighed] == [
        *([("load", 8), ("load", 4)]),
        ("recompute", 0),
    ]
    (taken,) = (one for one in second.weighed if one.taken)
    assert (taken.way, taken.saved) == (way, second.usable)
    assert taken.seconds == min(one.seconds for one in second.weighed)
    assert reasons(second) == {"last_token": 1, **({} if way == "load" else {"dearer": 8})}
    text = readable(second)
    words = {"load": "load what the host has, up to 8", "recompute": "compute from 0 on"}
    assert re.search(rf"  - [\d.e-]+ ms: {words[way]} \(taken\)\n", text), text
    assert "ms: load what the host has, up to 4\n" in text and text.count("(taken)") == 1


async def test_reasons_add_up_for_every_request_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open_log(path) as log:
        async with CacheRuntime(config(True), events=log) as cache:
            driver = Driver(cache, 5)
            for _ in range(400):
                await driver.operate()
            await driver.close()
    seen: set[str] = set()
    opened = 0
    for entry in read_log(path):
        if isinstance(entry.event, events.RequestOpened | events.Acquired):
            opened += 1
            seen.update(entry.event.lost)
            assert sum(entry.event.lost.values()) == entry.event.tokens - entry.event.usable
    assert opened > 100
    assert {"last_token", "partial_page", "never_seen", "evicted", "no_state"} <= seen
    for number in range(1, 100, 7):
        explanation = explain_request(path, f"r{number}")
        assert sum(reasons(explanation).values()) == explanation.tokens - explanation.usable
