"""Loads ahead of requests: what they bring, and that nobody pays for them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from serving import ATTENTION, HYBRID, PAGE, House, compute, house, run, seed
from virtual import Time, in_virtual_time

from phloem import CacheConfig, InvalidRequest, ModelLayout, Request
from phloem.cuda_streams.virtual import Link
from phloem.events import CopyPlanned, CopySubmitted, Evicted
from phloem.runtime.sync import SyncCacheRuntime

PROMPT, OTHER = run(1, 3 * PAGE + 1), run(100, 3 * PAGE + 1)
END = 3 * PAGE
BOTH = pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])


def roomy(
    inline: bool, layout: ModelLayout = HYBRID, pages: int = 24, most: int = 4
) -> AbstractAsyncContextManager[House]:
    return house(
        inline=inline,
        layout=layout,
        pages=pages,
        states=8,
        host_bytes="1MiB",
        prefetches_max=most,
    )


async def on_the_host(here: House, *prompts: list[int]) -> None:
    for prompt in prompts:
        await seed(here, prompt[:END])
    await here.cache.evict(pages=99, states=99)
    await here.settled()
    here.events.clear()


@BOTH
async def test_a_request_finds_on_the_device_what_was_brought(
    layout: ModelLayout, inline: bool
) -> None:
    async with roomy(inline, layout) as here:
        await on_the_host(here, PROMPT)
        assert await here.cache.prefetch(PROMPT) == END
        assert here.cache.stats().tree.leases == 0, "it is cache like any other"
        assert [e.request for e in here.of_type(CopyPlanned) if e.kind == "load"] == ["prefetch"]
        request = await here.cache.open_request(PROMPT)
        assert (request.usable, request.match.device) == (END, END)
        await request.allocate(1)
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        assert await here.cache.prefetch(PROMPT) == END, "all is there"
        assert await here.cache.prefetch(run(500, 9)) == 0, "nobody has it"


async def test_nothing_makes_room_for_it(inline: bool) -> None:
    async with roomy(inline, pages=8) as here:
        await on_the_host(here, PROMPT)
        await seed(here, run(200, 4 * PAGE))
        await seed(here, run(300, 3 * PAGE))
        here.events.clear()
        assert await here.cache.prefetch(PROMPT) == 0
        assert not here.of_type(Evicted) and not here.of_type(CopySubmitted)
        assert (await here.cache.match(PROMPT)).host == END, "a request would have it loaded"


async def test_while_somebody_waits_for_room_it_takes_none(inline: bool) -> None:
    async with roomy(inline, pages=8) as here:
        await on_the_host(here, PROMPT)
        holder = await here.cache.open_request(run(200, 5))
        await holder.allocate(4 * PAGE)
        newcomer = await here.cache.open_request(run(300, 5))
        waits = asyncio.create_task(newcomer.allocate(8 * PAGE))
        await here.until(lambda: here.cache.core.ledger.waiting == 1)
        assert here.cache.stats().kv.free >= 3
        assert await here.cache.prefetch(PROMPT) == 0
        holder.abort()
        await waits
        newcomer.abort()
        await here.settled()
        assert await here.cache.prefetch(PROMPT) == END


async def test_a_request_joins_the_load(inline: bool) -> None:
    async with roomy(inline) as here:
        await on_the_host(here, PROMPT)
        here.gate.loads_up_to(1)
        ahead = asyncio.create_task(here.cache.prefetch(PROMPT))
        await here.until(lambda: bool(here.of_type(CopySubmitted)))
        request = await here.cache.open_request(PROMPT)
        await request.allocate(1)
        assert request.usable == END
        here.gate.loads_up_to(None)
        await request.ready()
        assert await ahead == END and len(here.of_type(CopySubmitted)) == 2, "and its own state"
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_no_more_than_so_many_at_once(inline: bool) -> None:
    async with roomy(inline, most=1) as here:
        await on_the_host(here, PROMPT, OTHER)
        here.gate.loads_up_to(0)
        ahead = asyncio.create_task(here.cache.prefetch(PROMPT))
        await here.until(lambda: bool(here.of_type(CopySubmitted)))
        assert await here.cache.prefetch(OTHER) == 0
        here.gate.loads_up_to(None)
        assert await ahead == END
        assert await here.cache.prefetch(OTHER) == END
    with pytest.raises(InvalidRequest, match="prefetches_max"):
        CacheConfig(layout=HYBRID, prefetches_max=-1)


async def test_a_cancelled_caller_leaves_the_data_as_cache(inline: bool) -> None:
    async with roomy(inline) as here:
        await on_the_host(here, PROMPT)
        here.gate.loads_up_to(1)
        ahead = asyncio.create_task(here.cache.prefetch(PROMPT))
        await here.until(lambda: bool(here.of_type(CopySubmitted)))
        ahead.cancel()
        await asyncio.wait([ahead])
        assert "prefetch" not in here.cache.core.tree.leases.owners
        assert here.cache.core.prefetches == 0
        here.gate.loads_up_to(None)
        await here.settled()
        assert (await here.cache.match(PROMPT)).device == END


async def test_a_load_that_fails_is_no_error(inline: bool) -> None:
    async with roomy(inline) as here:
        await on_the_host(here, PROMPT)
        here.gate.error = OSError("the link is down")
        assert await here.cache.prefetch(PROMPT) == 0
        here.gate.error = None
        assert await here.cache.prefetch(PROMPT) == END


def test_without_a_loop() -> None:
    config = CacheConfig(
        layout=ATTENTION, page_size=PAGE, device_pages=8, device_states=0, host_bytes="1MiB"
    )
    with SyncCacheRuntime(config) as cache:
        assert cache.prefetch(PROMPT) == 0


@pytest.mark.parametrize("joined", [False, True])
def test_its_copy_goes_behind_what_requests_wait_for(joined: bool) -> None:
    """In virtual time: a load that waits on the link is overtaken, so it costs nobody anything.

    Unless a request joins it: then it is as urgent as any.
    """
    layout = ModelLayout.attention_only(layers=4, kv_heads=1, head_dim=4096, kv_dtype="int64")
    config = CacheConfig(
        layout=layout, page_size=PAGE, device_pages=64, device_states=0, host_bytes="64MiB"
    )
    link = Link(10**9)  # a page takes about a millisecond
    prompts = [run(1000 * n, 3 * PAGE + 1) for n in range(1, 4)]

    async def scenario(time: Time) -> None:
        links = {"d2h": link, "h2d": link, "d2d": link}
        async with time.runtime(config, links=links) as cache:  # type: ignore[arg-type]  # by name

            async def put_on_the_host(prompt: list[int]) -> None:
                async with cache.request(prompt[:END], whole=True) as request:
                    await request.allocate(END)
                    await request.ready()
                    stream = time.stream()
                    with cache.step([request], stream=stream) as step:
                        stream.run(1000)
                        step.launched({request: END})
                    await step.over()
                    await request.finish()

            async def forget() -> None:
                while cache.stats().copies_in_flight:  # noqa: ASYNC110  virtual time
                    await asyncio.sleep(0.01)
                await cache.evict(pages=99)

            async def wait_for(request: Request) -> int:
                begun = time.now_ns
                await request.ready()
                return time.now_ns - begun

            for prompt in prompts:
                await put_on_the_host(prompt)
            await forget()
            first = await cache.open_request(prompts[0])
            alone = await wait_for(first)
            first.abort()
            await forget()
            running = await cache.open_request(prompts[0])  # has the link
            ahead = asyncio.create_task(cache.prefetch(prompts[1]))
            await asyncio.sleep(0)
            urgent = await cache.open_request(prompts[2])
            joins = await cache.open_request(prompts[1]) if joined else None
            took = await asyncio.gather(wait_for(running), wait_for(urgent))
            # The prefetch was asked for before the second one.
            if joins is None:
                assert took[0] <= alone < took[1] <= 2 * alone
                assert not ahead.done()
            else:
                assert took[0] <= alone and 2 * alone < took[1] <= 3 * alone
                assert await wait_for(joins) == 0
                joins.abort()
            assert await ahead == END
            for request in (running, urgent):
                request.abort()

    in_virtual_time(scenario)
