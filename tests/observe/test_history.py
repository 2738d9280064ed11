"""State rebuilt from events equals the live state, at every instant."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from observe.driver import Driver, config

from phloem import CacheRuntime, InvalidRequest, events
from phloem.actors.tree.core import WritePolicy
from phloem.cuda_streams.clocks import VirtualClock
from phloem.cuda_streams.engine import CopyEngine, Post, Ticket
from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.runtime.observe.counts import Counts
from phloem.runtime.observe.figures import HOLDERS, Figures
from phloem.runtime.observe.history import History, replay
from phloem.runtime.observe.state import CacheState, live_state
from phloem.runtime.tracing import open_log


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("seed", range(3))
async def test_the_rebuilt_state_is_the_live_one(hybrid: bool, seed: int) -> None:
    history = History()
    kinds: set[str] = set()

    def sink(event: events.Event) -> None:
        history.add(0.0, event)
        kinds.add(type(event).__name__)
        if isinstance(event, events.TreeChanged):
            kinds.update(type(change).__name__ for change in event.changes)

    async with CacheRuntime(config(hybrid), events=sink) as cache:
        driver = Driver(cache, seed)
        for _ in range(800):
            await driver.operate()
            assert history.state() == live_state(cache.core)
        await driver.close()
        await cache.audit()
        assert history.state() == live_state(cache.core)
        assert history.counts("kv") == {
            name: getattr(cache.stats().kv, name) for name in ("free", "parked", "tree", "granted")
        }
    # The run has gone everywhere, or it shows nothing.
    wanted = {"NodeAdded", "NodeSplit", "NodeRemoved", "TailCut", "ResetDone", "RequestForked"}
    if hybrid:
        wanted |= {"StatePut", "StateTaken", "NodesMerged", "CopyEnded", "Refused"}
    assert wanted <= kinds


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("seed", range(2))
async def test_with_a_window_the_rebuilt_state_is_the_live_one(hybrid: bool, seed: int) -> None:
    history, figures, counts = History(), Figures(), Counts()
    kinds: set[str] = set()

    def sink(event: events.Event) -> None:
        history.add(0.0, event)
        figures.add(0.0, event)
        counts(event)
        kinds.add(type(event).__name__)
        if isinstance(event, events.TreeChanged):
            kinds.update(type(change).__name__ for change in event.changes)
        if isinstance(event, events.Evicted):
            kinds.update(victim.what for victim in event.victims)

    async with CacheRuntime(config(hybrid, window=True), events=sink) as cache:
        driver = Driver(cache, seed)
        most = 0
        for _ in range(800):
            await driver.operate()
            assert history.state() == live_state(cache.core)
            stats = cache.stats().spans["window"]
            held = {name: getattr(stats, name) for name in HOLDERS}
            assert history.counts("window") == figures.pools["window"].held == held
            most = max(most, stats.tree)
        await driver.close()
        await cache.audit()
        assert history.state() == live_state(cache.core)
        assert most > 12
    wanted = {"SpanPut", "SpanTaken", "span", "leaf", "tail", "NodeSplit", "NodesMerged"}
    assert wanted | {"ResetDone", "RequestForked"} <= kinds
    gone = sum(sum(one.spans.values()) for one in figures.evictions)
    assert sum(counts.evicted_spans.values()) == gone > 0
    assert counts.granted_spans["window", "device"] > gone


async def test_pages_of_a_window_that_wait_for_a_pass_are_told() -> None:
    history, figures = History(), Figures()

    def sink(event: events.Event) -> None:
        history.add(0.0, event)
        figures.add(0.0, event)

    async with CacheRuntime(config(False, window=True), events=sink) as cache:
        gate, stream = Fence(), cache.worker_stream("model")
        request = await cache.open_request(list(range(8)))
        await request.allocate(8)
        await request.ready()
        with cache.step([request], stream=stream) as step:
            stream.wait(gate)
            step.launched({request: 8})
        request.abort()
        for parked in (4, 0):
            assert cache.stats().spans["window"].parked == parked
            assert history.counts("window") == figures.pools["window"].held
            assert history.counts("window")["parked"] == parked
            assert history.state() == live_state(cache.core)
            gate.mark_passed()
            cache.release(await cache.allocate(pages=40, owner="next", timeout=60))
        stream.close()


HOSTS: tuple[WritePolicy, ...] = ("write_through", "selective", "write_back")
MOVES = {"KvPut", "KvTaken", "Kept", "FellBack", "CopyPlanned", "demoted on device"}


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("policy", HOSTS)
def test_with_a_host_tier_the_rebuilt_state_is_the_live_one(
    hybrid: bool, policy: WritePolicy
) -> None:
    history, clock = History(), VirtualClock()
    seen: Counter[str] = Counter()
    failures, good = random.Random(5), 0
    wanted = MOVES | {"copy on host" if policy != "write_back" else "leaving on device"}
    wanted |= {"CopyDropped"} if policy == "write_through" else set[str]()

    def sink(event: events.Event) -> None:
        history.add(0.0, event)
        seen[type(event).__name__] += 1
        if isinstance(event, events.TreeChanged):
            seen.update(type(change).__name__ for change in event.changes)
        if isinstance(event, events.Evicted):
            seen.update(f"{victim.what} on {event.tier}" for victim in event.victims)

    def fault(ticket: Ticket, layer: int) -> None:
        nonlocal good
        del layer
        if ticket.batch.channel == "d2d":
            return
        good += 1
        if good > 3 and failures.random() < 0.3:  # never in a row, which would close the tier
            good = 0
            raise OSError("a copy that fails")

    async def scenario() -> None:
        def engine(post: Post) -> CopyEngine:
            del post  # callbacks come in virtual time
            return VirtualEngine(clock, fault=fault)

        async with CacheRuntime(config(hybrid, host=policy), events=sink, engine=engine) as cache:
            driver = Driver(cache, 1, clock)
            for number in range(5000):
                await driver.operate()
                assert history.state() == live_state(cache.core)
                if number > 1000 and wanted <= set(seen):
                    break
            await driver.close()
            await cache.audit()
            assert history.state() == live_state(cache.core)

    asyncio.run(scenario())
    assert wanted <= set(seen)  # the run has gone everywhere, or it shows nothing


async def test_a_log_gives_the_state_at_any_time(tmp_path: Path) -> None:
    clock = itertools.count(1)
    path = tmp_path / "log"
    states: dict[float, CacheState] = {}
    with open_log(path, clock=lambda: float(next(clock))) as log:
        async with CacheRuntime(config(True), events=log) as cache:
            driver = Driver(cache, 7)
            for _ in range(30):
                for _ in range(10):
                    await driver.operate()
                states[float(next(clock))] = live_state(cache.core)
            await driver.close()
        async with CacheRuntime(config(True), events=log) as cache:
            await Driver(cache, 8).operate()
            last = live_state(cache.core)
    for time, state in states.items():
        assert replay(path, until=time).state() == state
    assert replay(path, run=2).state().nodes == last.nodes
    assert replay(path, run=1).state() != replay(path).state()
    with pytest.raises(InvalidRequest, match="has 2 runs, no run 3"):
        replay(path, run=3)


async def test_a_log_with_gaps_is_refused(tmp_path: Path) -> None:
    whole, gaps, info = tmp_path / "log", tmp_path / "gaps", tmp_path / "info"
    with open_log(whole) as log, open_log(info, level="info") as few:

        def both(event: events.Event) -> None:
            log(event)
            few(event)

        async with CacheRuntime(config(True), events=both) as cache:
            driver = Driver(cache, 3)
            for _ in range(60):
                await driver.operate()
            await driver.close()
    with pytest.raises(InvalidRequest, match="leaves events out \\(level info"):
        replay(info).state()
    lines = whole.read_bytes().splitlines(keepends=True)
    grants = [n for n, line in enumerate(lines) if b'"event":"Granted"' in line]
    gaps.write_bytes(b"".join(lines[: grants[5]] + lines[grants[5] + 1 :]))
    with pytest.raises(InvalidRequest, match="the log is not whole"):
        replay(gaps).state()
    dropped = b'{"event":"EventsDropped","time":1.0,"level":"warning","count":3}\n'
    gaps.write_bytes(b"".join(lines) + dropped)
    with pytest.raises(InvalidRequest, match="3 events were dropped"):
        replay(gaps).state()
    gaps.write_bytes(b"".join(line for line in lines if b"RuntimeStarted" not in line))
    with pytest.raises(InvalidRequest, match="no RuntimeStarted"):
        replay(gaps).state()
