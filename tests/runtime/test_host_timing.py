"""What a host tier costs those who do not need it: nothing; and how much memory it takes."""

from __future__ import annotations

import asyncio

import pytest
from serving import ATTENTION, HYBRID, PAGE, compute, house, run, seed
from virtual import Time, in_virtual_time

from phloem import CacheConfig, ModelLayout
from phloem.cuda_streams.virtual import PCIE5, Link

SLOW = {**PCIE5, "d2h": Link(1_000)}  # a kilobyte a second


def first_token_ns(write_policy: str) -> list[int]:
    """When each of some requests has its first token, with room in the pool for all of them."""
    host = {} if not write_policy else {"host_bytes": "1MiB", "write_policy": write_policy}
    config = CacheConfig(
        layout=HYBRID,
        page_size=PAGE,
        state_chunk=PAGE,
        device_pages=64,
        device_states=24,
        close_timeout_s=10_000.0,
        **host,  # type: ignore[arg-type]  # two fields of the config
    )
    taken: list[int] = []

    async def scenario(time: Time) -> None:
        async with time.runtime(config, links=SLOW) as cache:
            stream = time.stream()
            for first in (1, 100, 1, 200, 100):
                prompt = run(first, 3 * PAGE + 1)
                begun = time.now_ns
                async with cache.request(prompt) as request:
                    await request.allocate(len(prompt) - request.computed)
                    await request.ready()
                    while request.computed < len(prompt):
                        _, end = request.next_stop(PAGE)
                        with cache.step([request], stream=stream) as step:
                            stream.run(50_000 * (end - request.computed))
                            step.launched({request: end})
                        await step.over()
                        await request.checkpoint()
                    taken.append(time.now_ns - begun)
                    await request.finish()
            assert (cache.stats().copies_in_flight > 0) == (write_policy == "write_through")

    in_virtual_time(scenario)
    return taken


def test_nobody_waits_for_a_backup_that_he_does_not_need() -> None:
    alone = first_token_ns("")
    for write_policy in ("write_back", "write_through"):
        tiered = first_token_ns(write_policy)
        # The loop's own steps take a microsecond each in this world; a copy would take seconds.
        assert all(abs(a - b) < 20_000 for a, b in zip(tiered, alone, strict=True)), write_policy


@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
@pytest.mark.parametrize("asked", [64 << 10, 1 << 20, 3_000_000])
async def test_the_host_memory_asked_for_is_what_is_used(layout: ModelLayout, asked: int) -> None:
    async with house(layout=layout, host_bytes=asked) as here:
        stats = here.cache.stats()
        assert abs(stats.host_bytes - asked) <= 0.02 * asked
        assert stats.host_kv is not None and stats.host_kv.size > 0


async def test_a_suspended_request_comes_back_from_the_host_bit_for_bit(inline: bool) -> None:
    """Its state leaves the device in between, since others need the room."""
    prompt = run(1, 4 * PAGE + 1)
    async with house(inline=inline, pages=12, states=4, host_bytes="1MiB") as here:
        request = await here.cache.open_request(prompt)
        await request.allocate(len(prompt))
        await request.ready()
        await compute(here, request, prompt, 3 * PAGE)
        await request.suspend()
        await here.settled()
        for first in (100, 200, 300):
            await seed(here, run(first, 4 * PAGE))
        assert (await here.cache.match(prompt)).device == 0, "pushed out by others"
        await request.resume()
        assert request.match.usable == 3 * PAGE
        await request.allocate(len(prompt) - request.computed)
        await asyncio.wait_for(request.ready(), 60)
        assert (request.computed, here.cache.stats().tokens_loaded) == (3 * PAGE, 3 * PAGE)
        await compute(here, request, prompt, len(prompt))  # checks every byte it builds on
        await request.finish()
