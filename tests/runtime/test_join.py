"""Requests that arrive while another one computes the same prefix wait for it and take it over."""

from __future__ import annotations

import asyncio
import gc

import pytest
from msgspec.structs import replace

from phloem import CacheConfig, CacheRuntime, ModelLayout, NoRoom, Request, StateSpec
from phloem.actors.domain import Reply

HYBRID = ModelLayout.hybrid(
    kv_layers=1,
    kv_heads=1,
    head_dim=4,
    kv_dtype="float32",
    states=[StateSpec("recurrent", (2, 2), "float32", layers=1)],
)
ATTENTION = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4, kv_dtype="float32")
SHARED = list(range(100, 132))


def config(layout: ModelLayout, inline: bool) -> CacheConfig:
    return CacheConfig(
        layout=layout,
        page_size=4,
        state_chunk=4,
        device_pages=64,
        device_states=16,
        inline=inline,
    )


async def prepare(request: Request) -> None:
    await request.allocate(request.length - request.computed)
    await request.ready()


async def chunk(cache: CacheRuntime, request: Request) -> int:
    """One chunk of prefill and its checkpoint; returns the tokens computed."""
    start, end = request.next_stop(8)
    with cache.step([request]) as step:
        step.launched({request: end})
    await request.checkpoint()
    return end - start


async def compute(cache: CacheRuntime, request: Request) -> int:
    await prepare(request)
    computed = 0
    while request.computed < request.length:
        computed += await chunk(cache, request)
    await request.finish()
    return computed


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "queued"])
@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
async def test_the_common_prefix_is_computed_once(layout: ModelLayout, inline: bool) -> None:
    async with CacheRuntime(config(layout, inline)) as cache:

        async def follow(own: int) -> int:
            async with cache.request([*SHARED, own, own], id=f"f{own}", join=True) as request:
                return await compute(cache, request)

        async with cache.request([*SHARED, 1, 1], id="leader") as leader:
            followers = [asyncio.ensure_future(follow(own)) for own in (2, 3, 4)]
            await prepare(leader)
            total = 0
            while leader.computed < leader.length:
                await asyncio.sleep(0)
                if leader.computed < len(SHARED):
                    assert not any(follower.done() for follower in followers)
                total += await chunk(cache, leader)
            await leader.finish()
        total += sum(await asyncio.gather(*followers))
        assert total == len(SHARED) + 4 * 2
        await cache.audit()
        assert cache.stats().kv.granted == 0


async def test_when_the_leader_aborts_one_carries_on_and_the_rest_wait_for_it() -> None:
    async with CacheRuntime(config(HYBRID, True)) as cache:
        computed: dict[int, int] = {}

        async def follow(own: int) -> None:
            async with cache.request([*SHARED, own, own], id=f"f{own}", join=True) as request:
                computed[own] = await compute(cache, request)

        leader = await cache.open_request([*SHARED, 1, 1], id="leader")
        followers = [asyncio.ensure_future(follow(own)) for own in (2, 3, 4)]
        await prepare(leader)
        await chunk(cache, leader)
        await asyncio.sleep(0)
        leader.abort()
        await asyncio.gather(*followers)
        # The leader published 8 tokens without a state: the first follower starts over.
        assert sorted(computed.values()) == [2, 2, len(SHARED) + 2]
        await cache.audit()


async def test_a_short_common_part_is_not_waited_for() -> None:
    async with CacheRuntime(config(HYBRID, True)) as cache:
        leader = await cache.open_request([*SHARED[:4], 9, 9, 9, 9], id="leader")
        request = await cache.open_request([*SHARED, 1], id="other")
        await request.join()
        assert request.computed == 0
        request.abort()
        leader.abort()


async def test_equal_pages_after_different_beginnings_are_no_common_prefix() -> None:
    async with CacheRuntime(config(HYBRID, True)) as cache:
        for first in (1, 2):
            async with cache.request([first] * 4 + SHARED[:4] + [0], id=f"w{first}") as warm:
                await compute(cache, warm)
        tail = [7] * 24
        leader = await cache.open_request([1] * 4 + SHARED[:4] + tail, id="leader")
        other = await cache.open_request([2] * 4 + SHARED[:4] + tail, id="other")
        await other.join()
        assert all(wanted.why != "branch" for wanted in leader.wanted)
        other.abort()
        leader.abort()


async def test_followers_do_not_hide_that_the_leader_waits_in_vain() -> None:
    """The only slot has a state that all of them lease: nobody who waits can give anything back."""
    tight = replace(config(HYBRID, True), device_states=1)
    async with CacheRuntime(tight) as cache:
        async with cache.request(SHARED[:8], whole=True) as request:
            await compute(cache, request)
        leader = await cache.open_request([*SHARED, 1, 1], id="leader")
        assert leader.usable == 8
        follower = await cache.open_request([*SHARED, 2, 2], id="follower")
        joining = asyncio.ensure_future(follower.join())
        await asyncio.sleep(0)
        allocating = asyncio.ensure_future(leader.allocate(26))
        with pytest.raises(NoRoom) as caught:
            await asyncio.wait_for(allocating, 60)
        assert caught.value.deadlock and not joining.done()
        leader.abort()
        await asyncio.wait_for(joining, 60)
        # The other way round: who waits for room already, when the last who might give joins.
        second = await cache.open_request([*SHARED, 3, 3], id="second")
        allocating = asyncio.ensure_future(follower.allocate(26))
        await asyncio.sleep(0)
        assert not allocating.done()
        joining = asyncio.ensure_future(second.join())
        with pytest.raises(NoRoom) as caught:
            await asyncio.wait_for(allocating, 60)
        assert caught.value.deadlock
        follower.abort()
        await asyncio.wait_for(joining, 60)
        second.abort()


async def test_gives_up_after_the_timeout_and_computes_itself() -> None:
    async with CacheRuntime(config(HYBRID, True)) as cache:
        stuck = await cache.open_request([*SHARED, 1, 1], id="stuck")
        async with cache.request(
            [*SHARED, 2, 2], id="follower", join=True, join_timeout=0.01
        ) as request:
            assert await compute(cache, request) == len(SHARED) + 2
        stuck.abort()
        await cache.audit()


async def test_a_cancelled_follower_leaves_nothing_behind() -> None:
    async with CacheRuntime(config(HYBRID, True)) as cache:
        leader = await cache.open_request([*SHARED, 1, 1], id="leader")

        async def follow() -> None:
            async with cache.request([*SHARED, 2, 2], id="follower", join=True):
                raise AssertionError("nobody has computed anything")

        follower = asyncio.ensure_future(follow())
        await asyncio.sleep(0)
        follower.cancel()
        with pytest.raises(asyncio.CancelledError):
            await follower
        assert cache.stats().requests == 1
        assert await compute(cache, leader) == len(SHARED) + 2
        await cache.audit()


async def test_followers_that_try_again_and_again_leave_nothing_behind() -> None:
    async with (
        CacheRuntime(config(HYBRID, False)) as cache,
        cache.request([*SHARED, 1], id="leader") as leader,
    ):
        await prepare(leader)
        async with cache.request([*SHARED, 2], id="follower") as request:
            before = sum(type(one) is Reply for one in gc.get_objects())  # of other tests
            for _ in range(50):
                await request.join(timeout=0.001)
            gc.collect()
            assert sum(type(one) is Reply for one in gc.get_objects()) < before + 10
            waiting = asyncio.ensure_future(request.join())
            await asyncio.sleep(0.01)
            while leader.computed < len(SHARED):
                await chunk(cache, leader)
            await waiting
            assert request.computed == len(SHARED)


async def test_a_reset_lets_followers_go() -> None:
    async with CacheRuntime(config(HYBRID, True)) as cache:
        leader = await cache.open_request([*SHARED, 1, 1], id="leader")

        async def follow() -> int:
            async with cache.request([*SHARED, 2, 2], id="follower", join=True) as request:
                return await compute(cache, request)

        follower = asyncio.ensure_future(follow())
        await asyncio.sleep(0)
        await cache.reset()
        assert await follower == len(SHARED) + 2
        leader.abort()
        await cache.audit()
