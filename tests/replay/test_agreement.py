"""Replay, simulated runtime and live runtime hit the same for every request of a sampled trace."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec import convert

from phloem import CacheConfig, CacheRuntime
from phloem.actors.tree.audit import audit_tree
from phloem.cuda_streams.clocks import LoopClock
from phloem.cuda_streams.engine import CHANNELS, CopyEngine, Post
from phloem.cuda_streams.virtual import Link, VirtualEngine
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.live import LiveReplay
from phloem.runtime.replay.requests import prepare
from phloem.runtime.replay.whole import WholeReplay
from phloem.runtime.traces import TraceRequest, sample
from phloem.testing import Simulation, sim_layout, simulate

PAGE = 2  # as heavy as a state of the simulated model
SMALL = Geometry(name="s", kv_bytes=16, state_bytes=32, flops_linear=1.0, flops_quadratic=0.0)


def requests(name: str, shrink: int, *, whole: bool = False) -> list[TraceRequest]:
    """A sample with shorter blocks; prompt and answer together fill whole pages.

    `whole`: each of them does.
    """
    found: list[TraceRequest] = []
    for one in sample(name):
        tokens = one.tokens(shrink=shrink)[:800]
        if whole:
            tokens = tokens[: max(1, len(tokens) // PAGE) * PAGE]
        answer = np.concatenate([one.answer[:16], np.arange(len(found), len(found) + PAGE)])
        answer = answer[: len(answer) - (len(tokens) + len(answer)) % PAGE].astype(np.int32)
        found.append(
            TraceRequest(
                at_s=one.at_s,
                session=one.session,
                blocks=tokens,
                block_size=1,
                length=len(tokens),
                output=len(answer),
                answer=answer,
            )
        )
    return found


async def served(cache: CacheRuntime, asked: list[TraceRequest]) -> list[tuple[int, int]]:
    """One after another: the hit of each, and what of it came from the host."""
    hits: list[tuple[int, int]] = []
    for number, one in enumerate(asked):
        prompt, answer = one.blocks.tolist(), one.answer.tolist()
        async with cache.request(prompt, id=f"r{number}") as request:
            await request.allocate(len(prompt) + len(answer) - request.computed)
            match = await request.ready()
            hits.append((match.usable, match.host))
            await settled(cache)  # copies are over before the pass is
            request.extend(answer)
            while request.computed < len(prompt) + len(answer):
                _, end = request.next_stop(10_000)
                with cache.step([request]) as step:
                    step.launched({request: end})
                if end < len(prompt) + len(answer):
                    await request.checkpoint()
                await settled(cache)
            await request.finish()
        await settled(cache)
    return hits


async def settled(cache: CacheRuntime) -> None:
    """Every copy has ended, and what it led to is done."""
    for _ in range(10_000):
        if not cache.core.in_flight and not cache.stats().tree.operations:
            return
        await asyncio.sleep(0.0002)
    raise AssertionError("copies do not end")


@pytest.mark.parametrize("policy", ["lru", "lfu", "benefit"])
@pytest.mark.parametrize(
    ("name", "shrink"),
    [
        ("agent_taubench_airline_tokens", 1),
        ("mooncake_conversation", 128),
        ("agentic_coding_sessions", 16),
    ],
)
def test_all_three_hit_the_same(name: str, shrink: int, policy: str) -> None:
    asked = requests(name, shrink)
    config = CacheConfig(
        layout=sim_layout(),
        page_size=PAGE,
        state_chunk=PAGE,
        device_pages=900,
        device_states=12,
        eviction=policy,
    )
    work = prepare(asked, name=name, block=PAGE)
    replay = LiveReplay(SMALL, PAGE, pages=900, states=12, policy=policy)
    decisions = [replay.serve(request) for request in work.requests]
    audit_tree(replay.tree)
    assert sum(decision.evicted[0] for decision in decisions) > 100, "not what it is about"
    assert not any(decision.skipped for decision in decisions)

    async def live() -> list[tuple[int, int]]:
        async with CacheRuntime(config) as cache:
            return await served(cache, asked)

    async def scenario(sim: Simulation) -> list[tuple[int, int]]:
        async with sim.runtime(config) as cache:
            return await served(cache, asked)

    hits = [(decision.hit, 0) for decision in decisions]
    assert sum(hit > 0 for hit, _ in hits) >= 10
    assert asyncio.run(live()) == hits
    assert simulate(scenario, seed=3).result == hits


def in_turn(post: Post) -> CopyEngine:
    """Copies end in the order in which they were asked for, however late that is.

    Which of two threads ends first would decide what was used last.
    """
    links = dict.fromkeys(CHANNELS, Link(10**15))
    return VirtualEngine(LoopClock(asyncio.get_running_loop()), links=links, post=post)


ROOM: dict[str, object] = {"device_pages": 420, "device_states": 12}
HOST: dict[str, object] = {"host_bytes": 400_000}
TIERS: dict[str, dict[str, object]] = {
    "one memory": {"device_bytes": 20_000},
    "host": {**ROOM, **HOST},
    "write back": {**ROOM, **HOST, "write_policy": "write_back"},
    "one memory, host": {"device_bytes": 20_000, **HOST},
}


@pytest.mark.parametrize(
    ("tiers", "policy"), [*((tiers, "benefit") for tiers in TIERS), ("host", "lru")]
)
@pytest.mark.parametrize(
    ("name", "shrink"), [("agentic_coding_sessions", 16), ("mooncake_conversation", 256)]
)
def test_tiers_and_one_memory_too(name: str, shrink: int, tiers: str, policy: str) -> None:
    """What is hit, and what of it is loaded from the host."""
    asked = requests(name, shrink, whole=True)
    config = convert(
        {"layout": sim_layout(), "page_size": PAGE, "state_chunk": PAGE, "eviction": policy}
        | TIERS[tiers],
        CacheConfig,
    )
    capacity = int(config.device_bytes) or 432 * 32
    replay = WholeReplay(
        SMALL,
        PAGE,
        capacity=capacity,
        states_share=None if config.device_bytes else 12 / 432,
        host=int(config.host_bytes),
        write_policy=config.write_policy,
        policy=policy,
    )
    work = prepare(asked, name=name, block=PAGE)
    decisions = [replay.serve(request) for request in work.requests]
    totals = replay.totals
    hits = [(decision.hit, decision.host) for decision in decisions]
    assert sum(hit > 0 for hit, _ in hits) >= 10
    assert not totals.skipped and totals.pages_evicted > 100
    assert (totals.pages_moved > 0) <= ("one memory" in tiers)
    if "host_bytes" in TIERS[tiers]:
        assert totals.host_tokens and totals.bytes_to_host > 0
        assert totals.bytes_to_device > 0

    async def live() -> list[tuple[int, int]]:
        async with CacheRuntime(config, engine=in_turn) as cache:
            return await served(cache, asked)

    async def scenario(sim: Simulation) -> list[tuple[int, int]]:
        async with sim.runtime(config) as cache:
            return await served(cache, asked)

    assert asyncio.run(live()) == hits
    assert simulate(scenario, seed=3).result == hits
