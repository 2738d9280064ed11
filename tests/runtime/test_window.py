"""Sliding-window layers through the runtime: what requests hold, reuse, give back, and run out of.

A pass writes into each place of a window page what token stands there, so that whoever reuses it
can check what it reads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from phloem.actors.actions import TREE
from phloem.cuda_streams.fences import Fence
from phloem.errors import InvalidRequest, NoRoom, StaleHandle
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.layout import KVSpec, LayerSpec, ModelLayout, StateSpec
from phloem.runtime.observe.history import History
from phloem.runtime.observe.state import live_state
from phloem.runtime.request import Request

PAGE, WINDOW = 4, 8
FULL = LayerSpec(kv=KVSpec((1, 1), (1, 1), "float32"))
SLIDING = LayerSpec(kv=KVSpec((1, 1), (1, 1), "float32", kept=f"window:{WINDOW}"))
RECURRENT = LayerSpec(states=(StateSpec("s", (1,)),))
ATTENTION = ModelLayout((FULL, SLIDING, SLIDING))
HYBRID = ModelLayout((RECURRENT, FULL, SLIDING))
LAYOUTS = pytest.mark.parametrize("layout", [ATTENTION, HYBRID], ids=["attention", "hybrid"])


def config(layout: ModelLayout, **more: Any) -> CacheConfig:
    sizes = {"device_pages": 64, "device_states": 8 if layout.has_states else 0}
    return CacheConfig(layout=layout, page_size=PAGE, state_chunk=1, **(sizes | more))


def check_window(cache: CacheRuntime, request: Request, tokens: list[int]) -> None:
    """What the next pass reads was written for these tokens."""
    table, keys = request.span_table("window"), cache.pools.kv[2].k
    for at in range(max(0, request.computed - WINDOW), request.computed):
        page = table[at // PAGE]
        assert page, f"no window page for token {at}"
        assert keys[page, at % PAGE, 0, 0] == tokens[at]


async def compute(cache: CacheRuntime, request: Request, tokens: list[int], chunk: int) -> None:
    """Compute up to the end of `tokens` in chunks, with a checkpoint after each."""
    while request.computed < len(tokens):
        start, end = request.computed, min(request.computed + chunk, len(tokens))
        await request.allocate(end - start)
        await request.ready()
        check_window(cache, request, tokens)
        table = request.span_table("window")
        with cache.step([request]) as step:
            for at in range(start, end):
                cache.pools.kv[2].k[table[at // PAGE], at % PAGE, 0, 0] = tokens[at]
            step.launched({request: end})
        await request.checkpoint(state=cache.config.layout.has_states and end % PAGE == 0)
        await cache.audit()


async def serve(cache: CacheRuntime, tokens: list[int], chunk: int = 8) -> int:
    """A whole request; how many tokens it reused."""
    async with cache.request(tokens) as request:
        reused = request.computed
        await compute(cache, request, tokens, chunk)
        await request.finish()
    return reused


@LAYOUTS
@pytest.mark.parametrize("chunk", [4, 8, 32])
async def test_what_is_reused_is_what_was_computed(layout: ModelLayout, chunk: int) -> None:
    async with CacheRuntime(config(layout)) as cache:
        tokens = list(range(1, 41))
        assert await serve(cache, tokens, chunk) == 0
        reused = await serve(cache, [*tokens, 50, 51], chunk)
        assert reused == 40
        branch = await serve(cache, [*tokens[:20], 60, 61, 62, 63], chunk)
        assert branch % PAGE == 0
        assert branch <= 20
        await cache.audit()
        stats = cache.stats()
        assert stats.spans["window"].granted == stats.spans["window"].parked == 0


@LAYOUTS
async def test_a_long_request_holds_no_more_than_its_window(layout: ModelLayout) -> None:
    pages = 2 * WINDOW // PAGE + 2
    async with CacheRuntime(config(layout, device_spans={"window": pages})) as cache:
        tokens = list(range(1, 161))
        async with cache.request(tokens) as request:
            await compute(cache, request, tokens, WINDOW)
            assert sum(page > 0 for page in request.span_table("window")) <= pages
            await request.finish()
        assert await serve(cache, [*tokens, 7, 8]) == 160


@LAYOUTS
async def test_a_lost_window_is_a_reason_and_comes_back(layout: ModelLayout) -> None:
    async with CacheRuntime(config(layout)) as cache:
        tokens = list(range(1, 25))
        await serve(cache, tokens, 24)
        longer = [*tokens, *range(30, 43)]
        await serve(cache, longer, 12)
        async with cache.request(longer) as other:
            assert other.computed == 36
            gone = await cache.evict(spans={"window": 64})
            assert gone.spans[0] > 0
            assert gone.pages == 0
            check_window(cache, other, longer)
            match = await cache.match([*tokens, 40])
            assert (match.usable, match.kv_prefix) == (0, 24)
            assert match.lost == {"no_window": 24, "last_token": 1}
            assert (await cache.match(longer)).usable == 36
        assert await serve(cache, [*tokens, 40], 24) == 0
        assert (await cache.match([*tokens, 40])).usable == 24
        await cache.audit()


async def test_no_room_says_which_pool_was_short() -> None:
    async with CacheRuntime(config(ATTENTION, device_spans={"window": 4})) as cache:
        async with cache.request(list(range(1, 41))) as request:
            with pytest.raises(NoRoom, match="window: asked 10 of 4"):
                await request.allocate(40)
            assert request.resources() == {"leases": 1}
        grant = await cache.allocate(spans={"window": 4}, owner="a")
        with pytest.raises(NoRoom, match="window: asked 1 of 4"):
            await cache.allocate(spans={"window": 1}, owner="b", wait=False)
        cache.release(grant)
        assert cache.stats().spans["window"].free == 4


async def test_raw_pages_go_in_and_come_back() -> None:
    async with CacheRuntime(config(ATTENTION)) as cache:
        grant = await cache.allocate(pages=4, spans={"window": 3}, owner="a")
        tokens = list(range(1, 17))
        result = await cache.insert(tokens, pages=grant.pages, spans={"window": grant.spans[0]})
        assert list(result.spans[0]) == list(grant.spans[0])
        again = cache.nowait.allocate(pages=4, spans={"window": 4}, owner="b")
        result = cache.nowait.insert(tokens, pages=again.pages, spans={"window": again.spans[0]})
        assert list(result.spans[0]) == [again.spans[0][0]]  # the three others were duplicates
        assert cache.stats().spans["window"].tree == 4
        assert cache.nowait.evict(spans={"window": 2}).spans == (2,)
        await cache.audit()


async def test_events_tell_all_of_it() -> None:
    history = History()
    async with CacheRuntime(
        config(HYBRID, device_spans={"window": 16}), events=lambda event: history.add(0.0, event)
    ) as cache:
        for start in (1, 2, 3):
            await serve(cache, list(range(start, start + 40)))
            await serve(cache, [*range(start, start + 20), 90, 91, 92, 93])
        await cache.evict(pages=3, spans={"window": 5})
        assert history.state() == live_state(cache.core)


@LAYOUTS
async def test_suspended_rolled_back_and_forked(layout: ModelLayout) -> None:
    async with CacheRuntime(config(layout)) as cache:
        tokens = list(range(1, 33))
        async with cache.request([*tokens, 1, 2]) as request:
            await compute(cache, request, tokens, 8)
            twin = await request.fork("twin")
            check_window(cache, twin, tokens)
            twin.abort()
            await request.suspend()
            await request.resume()
            assert request.computed == 32
            await compute(cache, request, [*tokens, 1, 2], 8)
            with pytest.raises(InvalidRequest, match="forked off the grid"):
                await request.fork()
            request.abort()
        await cache.audit()
        assert cache.stats().spans["window"].granted == 0


@LAYOUTS
async def test_what_the_tree_does_not_take_is_not_forked(layout: ModelLayout) -> None:
    """The window of such tokens is the request's own, and is not copied."""
    tokens = list(range(1, 33))
    async with CacheRuntime(config(layout)) as cache:
        async with cache.request(tokens) as request:
            await compute(cache, request, tokens[:16], 8)
            await cache.reset()
            await compute(cache, request, tokens, 8)
            with pytest.raises(StaleHandle, match="has not taken the window"):
                await request.fork()
        await cache.audit()
    async with CacheRuntime(replace(config(layout), enabled=False)) as cache:
        async with cache.request(tokens) as request:
            await compute(cache, request, tokens, 8)
            with pytest.raises(InvalidRequest, match="has not taken the window"):
                await request.fork()
        await cache.audit()
        assert cache.stats().spans["window"].granted == 0


def test_what_is_refused() -> None:
    for name in ("host_bytes", "device_bytes"):
        with pytest.raises(InvalidRequest, match=f"{name}.*window:8"):
            config(HYBRID, **{name: "1MiB"})
    with pytest.raises(InvalidRequest, match="device_spans names 'block'"):
        config(HYBRID, device_spans={"block": 3})
    with pytest.raises(InvalidRequest, match="a number of tokens"):
        config(ModelLayout((LayerSpec(kv=KVSpec((1, 1), (1, 1), kept="window")),)))
    other = LayerSpec(kv=KVSpec((1, 1), (1, 1), kept="window:16"))
    with pytest.raises(InvalidRequest, match="give all the largest"):
        ModelLayout((SLIDING, other))


def test_pools_of_a_window_are_adopted() -> None:
    from phloem.cuda_streams.pools import DevicePools

    def rows(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(pages, PAGE, 1, 1), torch.zeros(pages, PAGE, 1, 1)

    pools = DevicePools.adopt(
        ATTENTION, page_size=PAGE, kv={0: rows(9), 1: rows(5), 2: rows(5)}, states={}
    )
    assert (pools.pages, pools.span_rows["window"].count) == (9, 5)
    made = DevicePools.allocate(ATTENTION, pages=9, states=0, page_size=PAGE, spans={"window": 5})
    assert made.nbytes == pools.nbytes
    with pytest.raises(InvalidRequest, match="no pages for window"):
        DevicePools.allocate(ATTENTION, pages=9, states=0, page_size=PAGE)


async def test_a_window_that_a_pass_reads_stays_until_it_is_over() -> None:
    """Though its request's checkpoint has left it behind meanwhile."""
    gate = Fence()
    async with CacheRuntime(config(ATTENTION)) as cache:
        tokens = list(range(1, 41))
        await serve(cache, [*tokens[:24], 99], 8)
        stream = cache.worker_stream("model")
        try:
            async with cache.request(tokens) as request:
                assert request.computed == 24
                await request.allocate(16)
                await request.ready()
                read = request.span_table("window")[4:6]
                pool = cache.core.ledger.pool("window")
                with cache.step([request], stream=stream) as step:
                    stream.wait(gate)
                    step.launched({request: 40})
                await request.checkpoint()
                assert request.boundary == 40
                await cache.evict(spans={"window": 64})
                assert [pool.owner_of(page) for page in read] == [TREE, TREE]
                gate.mark_passed()
                await step.over()
                await cache.evict(spans={"window": 64})
                assert TREE not in [pool.owner_of(page) for page in read]
        finally:
            gate.mark_passed()
            stream.close()
        await cache.audit()


@LAYOUTS
async def test_a_window_that_a_pass_writes_stays_until_it_is_over(layout: ModelLayout) -> None:
    """Also what the boundary that it leads to does not need."""
    gate = Fence()
    async with CacheRuntime(config(layout)) as cache:
        tokens = list(range(1, 25))
        longer = [*tokens[:8], *range(90, 107)]
        await serve(cache, tokens[:8], 8)
        await serve(cache, longer, 8)
        stream = cache.worker_stream("model")
        try:
            async with cache.request(longer):
                await cache.evict(spans={"window": 64})  # what both begin with keeps its KV
                request = await cache.open_request(tokens)
                assert request.match.lost["no_window"] == 8
                await request.allocate(24)
                await request.ready()
                written = request.span_table("window")[:6]
                pool = cache.core.ledger.pool("window")
                with cache.step([request], stream=stream) as step:
                    stream.wait(gate)
                    step.launched({request: 24})
                await request.checkpoint()
                mine = [page for page in written if pool.owner_of(page) == TREE]
                assert len(mine) == (2 if layout.has_states else 6)
                await cache.evict(spans={"window": 64})
                assert {pool.owner_of(page) for page in mine} == {TREE}
                gate.mark_passed()
                await step.over()
                await request.finish()
        finally:
            gate.mark_passed()
            stream.close()
        await cache.audit()
