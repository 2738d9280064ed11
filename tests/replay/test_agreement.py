"""Replay, simulated runtime and live runtime hit the same for every request of a sampled trace."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from phloem import CacheConfig, CacheRuntime
from phloem.actors.tree.audit import audit_tree
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.live import LiveReplay
from phloem.runtime.replay.requests import prepare
from phloem.runtime.traces import TraceRequest, sample
from phloem.testing import Simulation, sim_layout, simulate

PAGE = 2  # as heavy as a state of the simulated model
SMALL = Geometry(name="s", kv_bytes=16, state_bytes=32, flops_linear=1.0, flops_quadratic=0.0)


def requests(name: str, shrink: int) -> list[TraceRequest]:
    """A sample with shorter blocks; prompt and answer together fill whole pages."""
    found: list[TraceRequest] = []
    for one in sample(name):
        tokens = one.tokens(shrink=shrink)[:800]
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


async def served(cache: CacheRuntime, asked: list[TraceRequest]) -> list[int]:
    """One after another: the hit of each."""
    hits: list[int] = []
    for number, one in enumerate(asked):
        prompt, answer = one.blocks.tolist(), one.answer.tolist()
        async with cache.request(prompt, id=f"r{number}") as request:
            hits.append(request.usable)
            await request.allocate(len(prompt) + len(answer) - request.computed)
            await request.ready()
            request.extend(answer)
            while request.computed < len(prompt) + len(answer):
                _, end = request.next_stop(10_000)
                with cache.step([request]) as step:
                    step.launched({request: end})
                if end < len(prompt) + len(answer):
                    await request.checkpoint()
            await request.finish()
    return hits


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

    async def live() -> list[int]:
        async with CacheRuntime(config) as cache:
            return await served(cache, asked)

    async def scenario(sim: Simulation) -> list[int]:
        async with sim.runtime(config) as cache:
            return await served(cache, asked)

    hits = [decision.hit for decision in decisions]
    assert sum(hit > 0 for hit in hits) >= 10
    assert asyncio.run(live()) == hits
    assert simulate(scenario, seed=3).result == hits
