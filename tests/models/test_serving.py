"""The serving loop over the real runtime: what is computed, what comes out, what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch
from models.harness import Harness
from models.zoo import ZOO, random_tokens

from phloem import CacheConfig, CacheRuntime, NoRoom, Request
from phloem.cuda_streams.fences import Fence, LoopPoster
from phloem.cuda_streams.lockstep import new_worker
from phloem.cuda_streams.pools import DevicePools
from phloem.cuda_streams.workers import WorkerStream
from phloem.runtime.integrations.bare import BareCache
from phloem.runtime.integrations.server import Completion, HybridServer, Publish
from phloem.runtime.integrations.transformers import ModelCache, TransformersModel

GRID, PAGE = 64, 16
DECODED = 2e-3  # see test_equality


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return Harness(getattr(request, "param", "qwen3_next")).model


@dataclass
class Served:
    cache: CacheRuntime
    server: HybridServer[Request]
    stream: WorkerStream

    async def all(self, prompts: Sequence[Sequence[int]], new: int) -> list[Completion]:
        return await asyncio.gather(*(self.server.generate(prompt, new) for prompt in prompts))

    @property
    def parked(self) -> int:
        """Pages and slots that something in flight may still touch."""
        stats = self.cache.stats()
        return stats.kv.parked + stats.state.parked

    @property
    def in_flight(self) -> int:
        """Parked places, and leases that end with the same fences."""
        return self.parked + self.cache.stats().tree.leases

    async def settled(self) -> None:
        """Every page and slot is free or the tree's, and the audit passes."""
        async with asyncio.timeout(60):
            while self.in_flight:  # noqa: ASYNC110  there is nothing else to wait on
                await asyncio.sleep(0.001)
        stats = self.cache.stats()
        assert stats.requests == 0
        assert (stats.kv.granted, stats.state.granted, stats.tree.leases) == (0, 0, 0)
        await self.cache.audit()


@asynccontextmanager
async def serving(
    model: TransformersModel,
    *,
    pages: int = 600,
    states: int = 40,
    grid: int = GRID,
    publish: Publish = "prompt",
    host_bytes: int | str = 0,
) -> AsyncIterator[Served]:
    # With attention only a prefix can end at any page: pages of a whole chunk keep the boundaries.
    config = CacheConfig(
        layout=model.layout,
        page_size=PAGE if model.layout.has_states else grid,
        state_chunk=grid,
        device_pages=pages,
        device_states=states if model.layout.has_states else 0,
        host_bytes=host_bytes,
    )
    async with CacheRuntime(config) as cache:
        stream = cache.worker_stream("model")
        try:
            async with HybridServer(
                model, cache, stream, chunk=grid, publish=publish, keep_logits=True
            ) as server:
                served = Served(cache, server, stream)
                yield served
                await served.settled()
        finally:
            stream.close()


async def without_cache(
    model: TransformersModel, prompts: Sequence[Sequence[int]], new: int, grid: int = GRID
) -> list[Completion]:
    loop = asyncio.get_running_loop()
    stream = new_worker("bare", LoopPoster(loop), loop)
    pools = DevicePools.allocate(
        model.layout,
        pages=1 + sum(-(-(len(prompt) + new) // PAGE) for prompt in prompts),
        states=1 + len(prompts) if model.layout.has_states else 0,
        page_size=PAGE,
    )
    try:
        async with HybridServer(
            model, BareCache(pools, stream), stream, chunk=grid, keep_logits=True
        ) as server:
            return await asyncio.gather(*(server.generate(prompt, new) for prompt in prompts))
    finally:
        stream.close()


def same(completions: Sequence[Completion], cold: Sequence[Completion]) -> bool:
    """The same tokens, and the same bits after the prompt."""
    return all(
        mine.tokens == other.tokens and torch.equal(mine.logits[0], other.logits[0])
        for mine, other in zip(completions, cold, strict=True)
    )


async def test_sixteen_that_arrive_together_compute_what_they_share_once(
    model: TransformersModel,
) -> None:
    shared = random_tokens(1024, 1)
    prompts = [shared + random_tokens(128, 10 + number) for number in range(16)]
    cold = await without_cache(model, prompts, 16, grid=128)
    async with serving(model, pages=1400, grid=128) as served:
        completions = await served.all(prompts, 16)
        assert same(completions, cold)
        distinct = 1024 + 16 * 128
        assert sum(done.computed for done in completions) <= 1.1 * distinct
        again = await served.all(prompts, 16)
        assert same(again, cold)
        assert [done.reused for done in again] == [1024] * 16


@pytest.mark.parametrize("model", sorted(ZOO), indirect=True)
async def test_s209_every_architecture_gives_cold_outputs_from_a_shared_prefix(
    model: TransformersModel,
) -> None:
    """The shared part is not a multiple of the grid; one prompt comes twice."""
    shared = random_tokens(3 * GRID + 10, 2)
    prompts = [shared + random_tokens(40 + number, 20 + number) for number in range(3)]
    prompts.append(prompts[0])
    cold = await without_cache(model, prompts, 6)
    async with serving(model) as served:
        assert same(await served.all(prompts, 6), cold)
        again = await served.all(prompts, 6)
        assert same(again, cold)
        assert all(done.reused >= 3 * GRID for done in again)


async def test_s206_conversations_come_back_over_the_host(model: TransformersModel) -> None:
    """Turn by turn, with a device pool that holds one conversation and a half."""
    first = [random_tokens(2 * GRID, 300 + n // 2) + random_tokens(70, 310 + n) for n in range(4)]
    cold = await without_cache(model, first, 6)
    second = [
        prompt + list(done.tokens) + random_tokens(GRID, 320 + number)
        for number, (prompt, done) in enumerate(zip(first, cold, strict=True))
    ]
    colder = await without_cache(model, second, 6)
    async with serving(model, pages=24, states=4, host_bytes="64MiB") as served:
        for prompt, wanted in zip((*first, *second), (*cold, *colder), strict=True):
            (done,) = await served.all([prompt], 6)
            assert same([done], [wanted])
            if prompt in second:
                assert done.reused >= len(first[0]) // GRID * GRID
        assert served.cache.stats().tokens_loaded > 0


async def test_a_state_that_was_changed_behind_the_cache_is_seen(
    model: TransformersModel,
) -> None:
    """Negative control: the comparison above can fail."""
    prompts = [random_tokens(3 * GRID + 9, 3)]
    cold = await without_cache(model, prompts, 6)
    async with serving(model) as served:
        assert same(await served.all(prompts, 6), cold)
        for states in served.cache.pools.states.values():
            for state in states.values():
                state.zero_()
        wrong = await served.all(prompts, 6)
        assert wrong[0].reused == 3 * GRID
        assert not same(wrong, cold)


async def test_s205_s209_an_answer_can_be_the_prefix_of_the_next_turn(
    model: TransformersModel,
) -> None:
    """Decode-made data is reused: near the cold logits, and the same tokens."""
    first = random_tokens(GRID + 40, 4)
    async with serving(model, publish="all") as served:
        (answer,) = await served.all([first], GRID)
        turn = [*first, *answer.tokens, *random_tokens(30, 5)]
        (warm,) = await served.all([turn], 8)
    (cold,) = await without_cache(model, [turn], 8)
    assert warm.reused == 2 * GRID
    assert warm.tokens == cold.tokens
    for mine, other in zip(warm.logits, cold.logits, strict=True):
        assert float((mine - other).abs().max() / other.std()) < DECODED


async def test_published_prompts_leave_decoded_tokens_out(model: TransformersModel) -> None:
    first = random_tokens(GRID + 40, 4)
    async with serving(model, publish="prompt") as served:
        (answer,) = await served.all([first], GRID)
        match = await served.cache.match([*first, *answer.tokens])
        assert (match.usable, match.kv_prefix) == (GRID, GRID)


@pytest.mark.parametrize("pauses", range(0, 75, 5))
async def test_a_cancelled_client_leaves_nothing(model: TransformersModel, pauses: int) -> None:
    """Cancelled after any number of milliseconds; `serving` checks what is left."""
    shared = random_tokens(2 * GRID, 6)
    prompts = [shared + random_tokens(50, 60 + number) for number in range(3)]
    cold = await without_cache(model, prompts[:2], 5)
    async with serving(model) as served:
        tasks = [asyncio.create_task(served.server.generate(prompt, 5)) for prompt in prompts]
        for _ in range(pauses):
            await asyncio.sleep(0.001)
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert same([task.result() for task in tasks[:2]], cold)
        assert same(await served.all(prompts[:2], 5), cold)


async def test_pages_of_a_cancelled_client_wait_for_its_forward_pass(
    model: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is in the middle of the chunk: what it writes to must not be given to others."""
    entered, leave = threading.Event(), Fence()
    forward = model.forward

    def slow(tokens: Sequence[int], cache: ModelCache, start: int) -> torch.Tensor:
        entered.set()
        served.stream.hold(leave)
        return forward(tokens, cache, start)

    async with serving(model) as served:
        monkeypatch.setattr(model, "forward", slow)
        client = asyncio.create_task(served.server.generate(random_tokens(50, 9), 5))
        while not entered.is_set():  # noqa: ASYNC110  a thread's
            await asyncio.sleep(0.001)
        free = served.cache.stats().kv.free
        client.cancel()
        await asyncio.wait([client])
        assert (served.parked, served.cache.stats().kv.free) == (5, free)
        leave.mark_passed()
        monkeypatch.undo()
        await served.settled()
        assert served.cache.stats().kv.free == free + 4


async def test_little_room_makes_requests_wait_and_evicts(model: TransformersModel) -> None:
    """Room for one request and a half; outputs stay right."""
    prompts = [random_tokens(2 * GRID + 20, 70 + number) for number in range(5)]
    cold = await without_cache(model, prompts, 5)
    async with serving(model, pages=15, states=3) as served:
        assert same(await served.all(prompts, 5), cold)
        assert served.cache.stats().actions["FreeDeviceSlots"] > 0


async def test_no_room_is_an_error_with_figures_and_others_go_on(
    model: TransformersModel,
) -> None:
    async with serving(model, pages=9) as served:
        large = asyncio.create_task(served.server.generate(random_tokens(200, 7), 5))
        small = asyncio.create_task(served.server.generate(random_tokens(60, 8), 5))
        with pytest.raises(NoRoom, match="asked 13 of 9"):
            await large
        assert len((await small).tokens) == 5
