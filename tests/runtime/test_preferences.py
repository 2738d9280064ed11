"""Sessions, priorities and policies at the runtime; the tree's own tests have the details."""

from __future__ import annotations

import asyncio

import pytest

from phloem import CacheConfig, CacheRuntime, InvalidRequest, ModelLayout, StateSpec
from phloem.actors.tree.dump import picture
from phloem.cuda_streams.engine import CopyBatch, CopyEngine, Fence, Post, Ticket
from phloem.runtime.devices import engine_for
from phloem.runtime.opening import RequestOptions

LAYOUT = ModelLayout.hybrid(
    kv_layers=1,
    kv_heads=1,
    head_dim=4,
    kv_dtype="float32",
    states=[StateSpec("recurrent", (2, 2), "float32", layers=1)],
)


def config(**options: object) -> CacheConfig:
    settings = {
        "layout": LAYOUT,
        "page_size": 4,
        "state_chunk": 4,
        "device_pages": 32,
        "device_states": 8,
        **options,
    }
    return CacheConfig(**settings)  # type: ignore[arg-type]  # settings by name


async def serve(cache: CacheRuntime, first: int, options: RequestOptions) -> None:
    tokens = [first * 100 + i for i in range(9)]
    async with cache.request(tokens, **options) as request:
        await request.allocate(9)
        await request.ready()
        while request.computed < 9:
            _, end = request.next_stop(4)
            with cache.step([request]) as step:
                step.launched({request: end})
            await request.checkpoint()
        await request.finish()


async def kept(cache: CacheRuntime, *firsts: int) -> list[int]:
    matches = [await cache.match([first * 100 + i for i in range(9)]) for first in firsts]
    return [match.usable for match in matches]


async def test_a_session_is_kept_until_it_is_closed() -> None:
    async with CacheRuntime(config(eviction="session")) as cache:
        await serve(cache, 1, {"session": "s"})
        await serve(cache, 2, {})
        await cache.evict(pages=2)
        assert await kept(cache, 1, 2) == [8, 0]
        await serve(cache, 2, {})
        assert await cache.close_session("s")
        assert not await cache.close_session("s")
        await cache.evict(pages=2)
        assert await kept(cache, 1, 2) == [0, 8]
        await cache.audit()


async def test_a_session_ends_with_its_time_to_live() -> None:
    async with CacheRuntime(config(eviction="session")) as cache:
        await serve(cache, 1, {"session": "s", "session_ttl": 0.01})
        await asyncio.sleep(0.02)
        await serve(cache, 2, {})
        await cache.evict(pages=2)
        assert await kept(cache, 1, 2) == [0, 8]


async def test_the_lower_priority_goes_first_whatever_its_age() -> None:
    async with CacheRuntime(config(eviction="priority")) as cache:
        await serve(cache, 1, {"priority": 10})
        await serve(cache, 2, {"priority": 5})
        await serve(cache, 3, {"priority": 50, "keep_for": 0.01})
        await asyncio.sleep(0.02)
        await serve(cache, 4, {"priority": 20})
        await cache.evict(pages=2)
        assert await kept(cache, 1, 2, 3, 4) == [8, 8, 0, 8]
        await cache.evict(pages=2)
        assert await kept(cache, 1, 2, 4) == [8, 0, 8]
        await cache.audit()


async def test_changing_the_policy_keeps_what_is_cached() -> None:
    async with CacheRuntime(config()) as cache:
        for first in (1, 2, 3):
            await serve(cache, first, {})
        await cache.use_policy("fifo")
        assert await kept(cache, 1, 2, 3) == [8, 8, 8]
        await serve(cache, 1, {})
        await cache.evict(pages=2)
        assert await kept(cache, 1, 2, 3) == [0, 8, 8]
        with pytest.raises(InvalidRequest):
            await cache.use_policy("newest")


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 101},
        {"priority": -1},
        {"priority": 1.5},
        {"keep_for": 0.0},
        {"session": "s", "session_ttl": -1.0},
        {"session": "s", "session_ttl": float("nan")},
        {"breakpoints": [10]},
        {"breakpoint": [4]},
    ],
    ids=str,
)
async def test_bad_options_change_nothing(options: RequestOptions) -> None:
    async with CacheRuntime(config()) as cache:
        before = cache.stats().tree
        with pytest.raises(InvalidRequest):
            await cache.open_request([1, 2, 3, 4, 5], **options)
        assert cache.stats().tree == before
        assert not cache.stats().requests


async def test_a_dump_is_bounded_and_can_be_drawn() -> None:
    async with CacheRuntime(config()) as cache:
        for first in (1, 2, 3):
            await serve(cache, first, {})
        dump = await cache.dump(limit=2)
        assert len(picture(dump).splitlines()) >= 2
        with pytest.raises(InvalidRequest):
            await cache.dump(limit=0)


async def test_a_copy_that_is_stuck_does_not_hold_the_loop_at_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Fence()

    def stuck(post: Post) -> CopyEngine:
        engine = engine_for(None, asyncio.get_running_loop())(post)
        submit = engine.submit

        def later(batch: CopyBatch) -> Ticket:
            return submit(CopyBatch(batch.channel, batch.items, after=(gate,)))

        monkeypatch.setattr(engine, "submit", later)
        return engine

    cache = await CacheRuntime(config(close_timeout_s=0.05), engine=stuck).open()
    request = await cache.open_request([1, 2, 3, 4, 5])
    await request.allocate(5)
    waiting = asyncio.ensure_future(request.ready())
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    await cache.close()
    assert asyncio.get_running_loop().time() - begun < 60
    with pytest.raises(Exception, match="closed"):
        await waiting
    gate.mark_passed()
