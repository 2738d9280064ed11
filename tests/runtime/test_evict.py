"""Evicting very much: in slices, between which others have their turns."""

import asyncio

import pytest

from phloem import CacheConfig, CacheRuntime, KVSpec, LayerSpec, ModelLayout

LEAVES = 1000


async def full(cache: CacheRuntime) -> None:
    """Cache `LEAVES` prompts of a page each."""
    for first in range(LEAVES):
        grant = await cache.allocate(pages=1)
        await cache.insert([first, first], pages=grant.pages)


def config() -> CacheConfig:
    layout = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=1)
    return CacheConfig(layout=layout, page_size=2, device_pages=LEAVES)


@pytest.mark.sim(seeds=1, policy="fifo")  # in other orders an evicting task may have all the turns
async def test_others_have_their_turns_while_very_much_is_evicted() -> None:
    async with CacheRuntime(config()) as cache:
        await full(cache)
        evicting = asyncio.create_task(cache.evict(pages=LEAVES))
        seen = []
        while not evicting.done():
            seen.append(cache.stats().kv.tree)
            assert (await cache.match([LEAVES - 1, LEAVES - 1], whole=True)).usable in (0, 2)
            await asyncio.sleep(0)
        assert (await evicting).pages == LEAVES
        assert len(set(seen)) >= 4, "one slice at a time"
        assert cache.stats().kv.free == cache.stats().kv.size
        await cache.audit()


@pytest.mark.parametrize("windows", [0, 1, 256, 257, 700, LEAVES])
async def test_windows_are_evicted_in_slices_too(windows: int) -> None:
    sliding = LayerSpec(kv=KVSpec((1, 1), (1, 1), kept="window:2"))
    layout = ModelLayout((LayerSpec(kv=KVSpec((1, 1), (1, 1))), sliding))
    spans = {"window": LEAVES}
    async with CacheRuntime(
        CacheConfig(layout=layout, page_size=2, device_pages=LEAVES, device_spans=spans)
    ) as cache:
        for first in range(LEAVES):
            grant = await cache.allocate(pages=1, spans={"window": 1})
            window = {"window": grant.spans[0]}
            await cache.insert([first, first], pages=grant.pages, spans=window)
        turns = cache.core.domain.turns
        gone = await cache.evict(spans={"window": windows})
        assert sum(gone.spans) == windows
        assert cache.core.domain.turns - turns >= windows // 256
        assert cache.stats().spans["window"].tree == LEAVES - windows
        await cache.audit()


@pytest.mark.parametrize("pages", [0, 1, 256, 257, 700])
async def test_no_more_is_evicted_than_asked(pages: int) -> None:
    async with CacheRuntime(config()) as cache:
        await full(cache)
        assert (await cache.evict(pages=pages)).pages == pages
        assert cache.stats().kv.tree == LEAVES - pages
        await cache.audit()


@pytest.mark.sim(seeds=1, policy="fifo")  # as above
async def test_a_cancelled_eviction_leaves_the_rest() -> None:
    async with CacheRuntime(config()) as cache:
        await full(cache)
        evicting = asyncio.create_task(cache.evict(pages=LEAVES))
        await asyncio.sleep(0)
        evicting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evicting
        left = cache.stats().kv.tree
        assert 0 < left < LEAVES
        assert cache.stats().kv.free == LEAVES - left
        await cache.audit()
