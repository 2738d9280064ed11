"""Passes that begin before all they build on has landed, and what becomes of them when it fails."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from serving import (
    ATTENTION,
    HYBRID,
    PAGE,
    House,
    Row,
    check_kv,
    check_state,
    compute,
    digests,
    dump,
    forward,
    house,
    over,
    read_kv,
    run,
    seed,
)
from virtual import Time, in_virtual_time

from phloem import ModelLayout, Request, TransferFailed
from phloem.cuda_streams.landing import Landing
from phloem.cuda_streams.virtual import PCIE5, landings_ns, overlapped_end_ns
from phloem.cuda_streams.workers import WorkerStream
from phloem.errors import CacheReset, CopyFailed, InvalidRequest
from phloem.runtime.config import CacheConfig
from phloem.runtime.sync import BlockingCacheRuntime, SyncCacheRuntime

PROMPT = run(1, 3 * PAGE + 1)
END = 3 * PAGE
BOTH = pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])


def roomy(inline: bool, layout: ModelLayout = HYBRID) -> AbstractAsyncContextManager[House]:
    return house(inline=inline, layout=layout, pages=24, states=12, host_bytes="1MiB")


async def loading(here: House, layers: int, *, known: int = END) -> Request:
    """A request whose prompt is on the host only; so many layers of its load have landed."""
    await seed(here, PROMPT[:known])
    await here.cache.evict(pages=99, states=99)
    await here.settled()
    here.gate.loads_up_to(layers)
    request = await here.cache.open_request(PROMPT)
    assert (request.usable, request.match.device) == (known, 0)
    await request.allocate(len(PROMPT) - request.computed)
    return request


def layer_by_layer(here: House, row: Row, landing: Landing, seen: list[int]) -> None:
    """A pass that looks at each layer when it may; in the worker's thread."""
    pools, chain = here.cache.pools, digests(row.tokens[: row.end])
    pages = list(row.table[: row.start // PAGE])
    for layer in range(pools.kv_rows.layers):
        landing.wait(layer, here.stream)
        if layer in pools.kv:
            for part in (pools.kv[layer].k, pools.kv[layer].v):
                assert part[pages].flatten().tolist() == chain[1 : row.start + 1]
        if layer in pools.states:
            assert pools.states[layer]["digest"][row.slot].tolist() == [chain[row.start], row.start]
        seen.append(layer)
    forward(pools, [row])


def provisional(here: House, request: Request, fn: Any, *more: Any) -> tuple[Any, Future[Any]]:
    """A pass to the end of the prompt, launched and not waited for."""
    step = here.cache.step([request], stream=here.stream)
    row = Row.of(request, PROMPT, len(PROMPT))
    work = here.stream.run(fn, *((here, row, *more) if more else (here.cache.pools, [row])))
    step.launched({request: len(PROMPT)})
    step.end()
    return step, work


@BOTH
async def test_a_pass_reads_each_layer_as_soon_as_it_has_landed(
    layout: ModelLayout, inline: bool
) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=0)
        landing = await request.landing()
        seen: list[int] = []
        step, work = provisional(here, request, layer_by_layer, landing, seen)
        await asyncio.sleep(0.01)
        assert not seen
        here.gate.loads_up_to(1)
        await here.until(lambda: seen == [0] or work.done())
        await asyncio.sleep(0.01)
        assert seen == [0] and not work.done()
        here.gate.loads_up_to(None)
        await over(step)
        work.result()
        assert (await request.ready()).usable == END
        assert request.computed == len(PROMPT) and request._tokens_computed == 1
        await request.finish()
        assert here.cache.stats().tokens_loaded == END


@BOTH
async def test_a_stream_waits_instead_of_the_caller(layout: ModelLayout, inline: bool) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=1)
        await request.wait_on(here.stream, layer=0)
        first = here.stream.run(lambda: None)
        await asyncio.wait_for(asyncio.wrap_future(first), 60)
        await request.wait_on(here.stream)
        step, work = provisional(here, request, forward)
        await asyncio.sleep(0.01)
        assert not work.done()
        here.gate.loads_up_to(None)
        await over(step)
        work.result()
        assert await request.ready() is request.match
        await request.finish()


@BOTH
async def test_readiness_of_a_layer(layout: ModelLayout, inline: bool) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=1)
        assert (await asyncio.wait_for(request.ready(layer=0), 60)).usable == END
        count = len(layout.layers)
        last = asyncio.ensure_future(request.ready(layer=count - 1))
        await asyncio.sleep(0.01)
        assert not last.done()
        here.gate.loads_up_to(None)
        await asyncio.wait_for(last, 60)
        for bad in (-1, count):
            with pytest.raises(InvalidRequest, match="layer"):
                await request.ready(layer=bad)
            with pytest.raises(InvalidRequest, match="layer"):
                await request.wait_on(here.stream, layer=bad)
        await request.ready()
        assert (await request.ready(layer=1)).usable == END, "also once all is there"
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


@BOTH
async def test_nothing_is_published_before_the_outcome(layout: ModelLayout, inline: bool) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=0)
        early = here.cache.step([request], stream=here.stream)
        with pytest.raises(InvalidRequest, match="not ready"):
            early.launched({request: len(PROMPT)})
        early.abandon()
        await over(early)
        await request.wait_on(here.stream)
        assert (await request.advance()) is request.match
        step, work = provisional(here, request, forward)
        for call in (request.checkpoint, request.finish, lambda: request.rollback(END)):
            with pytest.raises(InvalidRequest, match=r"ready\(\) comes first|is not over"):
                await call()
        with pytest.raises(InvalidRequest, match="not running"):
            await request.fork()
        here.gate.loads_up_to(None)
        await over(step)
        work.result()
        await request.ready()
        await request.finish()


async def again(here: House, request: Request) -> None:
    """Compute from where the request stands, and see that everything is right."""
    await request.allocate(len(PROMPT) - request.computed)
    await request.ready()
    await compute(here, request, PROMPT, len(PROMPT))
    chain = digests(PROMPT)
    await here.stream.call(check_kv, here.cache.pools, request.page_table(), chain, len(PROMPT))
    if here.cache.pools.states:
        check_state(here.cache.pools, request.state_slot or 0, chain, len(PROMPT))
    assert (request._tokens_computed, request._tokens_reused) == (
        len(PROMPT) - request.match.usable,
        request.match.usable,
    )
    await request.finish()
    await here.settled()
    await here.cache.audit()


def lose(what: str, here: House) -> None:
    """Copies of that kind fail from now on."""

    def fault(ticket: Any, layer: int) -> None:
        gate(ticket, layer)
        if ticket.batch.label.startswith(what):
            raise RuntimeError("the link is down")

    gate = here.gate
    here.cache._engine.fault = fault  # type: ignore[union-attr]  # of the fixture


@BOTH
async def test_passes_that_ran_on_a_load_that_failed_are_told(
    layout: ModelLayout, inline: bool
) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=0)
        lose("load", here)
        await request.wait_on(here.stream)
        step, work = provisional(here, request, lambda *_: None)
        here.gate.loads_up_to(None)
        with pytest.raises(TransferFailed, match="0 tokens are still good") as failed:
            await request.ready()
        assert failed.value.tokens_ok == request.computed == request.usable == 0
        await over(step)
        work.result()
        await again(here, request)


async def test_passes_that_ran_on_a_private_copy_that_failed_are_told(inline: bool) -> None:
    async with roomy(inline) as here:
        request = await loading(here, layers=0)
        lose("copy_state", here)
        await request.wait_on(here.stream)
        step, _ = provisional(here, request, lambda *_: None)
        here.gate.loads_up_to(None)
        with pytest.raises(TransferFailed) as failed:
            await request.ready()
        assert failed.value.tokens_ok == request.computed == END
        await over(step)
        lose("nothing", here)
        await again(here, request)


@BOTH
async def test_without_passes_a_load_that_failed_is_only_a_smaller_match(
    layout: ModelLayout, inline: bool
) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=0)
        lose("load", here)
        late = here.cache.step([request], stream=here.stream)
        waiting = asyncio.ensure_future(request.ready(layer=1))
        await asyncio.sleep(0)
        here.gate.loads_up_to(None)
        assert (await asyncio.wait_for(waiting, 60)).usable == 0
        with pytest.raises(TransferFailed) as failed:
            late.launched({request: len(PROMPT)})
        assert failed.value.tokens_ok == 0
        late.abandon()
        await again(here, request)


async def test_a_load_that_has_failed_already_is_not_built_on(inline: bool) -> None:
    async with roomy(inline) as here:
        request = await loading(here, layers=0)
        lose("load", here)
        here.gate.loads_up_to(None)
        await here.until(lambda: request.boundary == 0)
        await request.allocate(len(PROMPT) - request.computed)
        assert not (await request.landing()).fences(1)
        assert request.match.usable == request.computed == 0
        await again(here, request)


async def test_targets_of_a_load_that_failed_wait_for_the_passes_that_read_them(
    inline: bool,
) -> None:
    async with roomy(inline) as here:
        request = await loading(here, layers=0)
        lose("load", here)
        targets = set(request.page_table()[: END // PAGE])
        assert 0 not in targets
        await request.wait_on(here.stream)
        gate: Future[None] = Future()
        step, _ = provisional(here, request, lambda *_: gate.result(60))
        here.gate.loads_up_to(None)
        with pytest.raises(TransferFailed):
            await request.ready()
        free = set(here.cache.core.ledger.kv.free_places)
        assert targets.isdisjoint(free), "given to nobody while the pass may read them"
        assert here.cache.stats().kv.parked == len(targets)
        gate.set_result(None)
        await over(step)
        await here.until(lambda: not here.cache.stats().kv.parked)
        await again(here, request)


@BOTH
async def test_leaving_in_the_middle_of_everything_leaves_nothing(
    layout: ModelLayout, inline: bool
) -> None:
    async with roomy(inline, layout) as here:
        for how in ("abort", "suspend"):
            request = await loading(here, layers=1)
            await request.wait_on(here.stream)
            provisional(here, request, lambda *_: None)
            if how == "suspend":
                await request.suspend()
            request.abort()
            here.gate.loads_up_to(None)
            await here.settled()
            await here.until(here.nothing_owned)
            assert here.nothing_owned()
            await here.cache.audit()


@BOTH
async def test_a_reset_in_the_middle_is_told(layout: ModelLayout, inline: bool) -> None:
    async with roomy(inline, layout) as here:
        request = await loading(here, layers=1)
        await request.wait_on(here.stream)
        await here.cache.reset()
        here.gate.loads_up_to(None)
        with pytest.raises(CacheReset):
            await request.ready()
        request.abort()


async def test_what_is_on_the_device_can_be_waited_for_in_the_same_way(inline: bool) -> None:
    """Also a copy within the device need not be waited for by the caller."""
    async with roomy(inline) as here:
        await seed(here, PROMPT[:END])
        request = await here.cache.open_request(PROMPT)
        await request.allocate(1)
        here.gate.shut()
        await request.wait_on(here.stream, layer=0)
        step, work = provisional(here, request, forward)
        await asyncio.sleep(0.01)
        assert not work.done()
        here.gate.open()
        await over(step)
        work.result()
        await request.ready()
        await request.finish()


def serve_without_a_loop(cache: Any, stream: Any) -> None:
    """Twice the same prompt, the second time from the host and before it has landed."""
    for _ in range(2):
        with cache.request(PROMPT) as request:
            request.allocate(len(PROMPT) - request.computed)
            request.wait_on(stream)
            with cache.step([request], stream=stream) as step:
                row = Row.of(request.inner, PROMPT, END if not request.usable else len(PROMPT))
                work = stream.run(forward, cache.pools, [row])
                cache.launched(step, {request: row.end})
            work.result(60)
            assert request.ready(layer=1) is request.match
            assert request.landing().fences(1) == () and request.ready() is request.match
            request.finish()
        while cache.stats().copies_in_flight or cache.stats().kv.parked:
            if isinstance(cache, SyncCacheRuntime):
                cache.poll()
        cache.evict(pages=99, states=99)
    assert cache.stats().tokens_loaded == END


def options() -> CacheConfig:
    return CacheConfig(
        layout=HYBRID,
        page_size=PAGE,
        state_chunk=PAGE,
        device_pages=12,
        device_states=4,
        host_bytes="1MiB",
    )


def test_without_a_loop() -> None:
    with SyncCacheRuntime(options()) as cache:
        stream = cache.inner.worker_stream("model")
        serve_without_a_loop(cache, stream)
        stream.close()


async def test_from_another_thread(inline: bool) -> None:
    async with roomy(inline) as here:
        blocking = BlockingCacheRuntime(here.cache, asyncio.get_running_loop())
        await asyncio.to_thread(serve_without_a_loop, blocking, here.stream)
        assert read_kv(here.cache.pools, [1], 1)


@pytest.mark.parametrize("compute_ns", [0, 20_000, 500_000, 10**7])
def test_in_virtual_time_the_overlap_is_that_of_the_closed_form(compute_ns: int) -> None:
    """Each layer is computed when it has landed and the one before is done, and no later."""
    layers = 6
    layout = ModelLayout.attention_only(layers=layers, kv_heads=1, head_dim=4096, kv_dtype="int64")
    config = CacheConfig(
        layout=layout, page_size=PAGE, device_pages=8, device_states=0, host_bytes="16MiB"
    )

    async def scenario(time: Time) -> None:
        async with time.runtime(config) as cache:
            grant = await cache.allocate(pages=3)
            await cache.insert(PROMPT[:END], pages=grant.pages)
            await asyncio.sleep(1)
            await cache.evict(pages=8)
            stream, link = time.stream(), PCIE5["h2d"]
            begun = time.now_ns
            request = await cache.open_request(PROMPT)
            await request.allocate(1)
            (load,) = cache.core.tree.loads_of(request._lease)
            ((_, ticket),) = cache.core.transfer.tickets_of(load)
            landings = landings_ns(ticket.batch, link, start_ns=begun)
            with cache.step([request], stream=stream) as step:
                for layer in range(layers):
                    await request.wait_on(stream, layer=layer)
                    stream.run(compute_ns)
                step.launched({request: len(PROMPT)})
            await step.over()
            closed = overlapped_end_ns(landings, [compute_ns] * layers, begun)
            # The loop's own steps take a microsecond each in this world.
            assert closed <= time.now_ns < closed + 20_000 + 1_000 * layers
            assert closed < landings[-1] + layers * compute_ns - 20_000 or not compute_ns
            await request.ready()
            await request.finish()

    in_virtual_time(scenario)


class Lost(Exception):
    """Stands for what `Landing.wait` raises, and for nothing else."""


def reads(stream: WorkerStream, landing: Landing, layer: int) -> None:
    try:
        landing.wait(layer, stream)
    except CopyFailed as error:
        raise Lost(str(error)) from error


@pytest.mark.parametrize("end", ["abort", "suspend", "close"])
async def test_a_pass_does_not_wait_for_what_nobody_wants(inline: bool, end: str) -> None:
    """The load hangs; the thread of the model goes on at once."""
    async with roomy(inline) as here:
        request = await loading(here, layers=0)
        landing, stream = await request.landing(), here.cache.worker_stream("another")
        step = here.cache.step([request], stream=stream)
        begun = threading.Event()

        def waits() -> None:
            begun.set()
            reads(stream, landing, 0)

        work = stream.run(waits)
        step.launched({request: len(PROMPT)})
        await here.until(begun.is_set)
        await asyncio.sleep(0.01)
        assert not work.done()
        if end == "abort":
            request.abort()
        elif end == "suspend":
            await request.suspend()
        else:
            stream.close()
        with pytest.raises(Lost, match="given up" if end != "close" else "closed"):
            await asyncio.wait_for(asyncio.wrap_future(work), 60)
        step.end()
        request.abort()
        stream.close()
        here.gate.loads_up_to(None)


async def test_a_pass_is_told_at_once_of_a_layer_that_failed(inline: bool) -> None:
    async with roomy(inline) as here:
        request = await loading(here, layers=1)
        landing = await request.landing()
        step = here.cache.step([request], stream=here.stream)
        work = here.stream.run(reads, here.stream, landing, 3)
        step.launched({request: len(PROMPT)})
        step.end()
        here.gate.error = OSError("the link is down")
        here.gate.loads_up_to(None)
        with pytest.raises(Lost, match="the link is down"):
            await asyncio.wait_for(asyncio.wrap_future(work), 60)
        assert not landing.landed
        with pytest.raises(TransferFailed):
            await request.ready()
        request.abort()


@pytest.mark.parametrize("layer", [-1, 99, 0.5])
async def test_a_layer_that_there_is_not_is_refused_before_anything_begins(
    layer: int, inline: bool
) -> None:
    async with roomy(inline) as here:
        request = await here.cache.open_request(PROMPT)
        await request.allocate(len(PROMPT))
        before = dump(here.cache)
        with pytest.raises(InvalidRequest, match="layer"):
            await request.wait_on(here.stream, layer=layer)
        with pytest.raises(InvalidRequest, match="layer"):
            await request.ready(layer=layer)
        assert dump(here.cache) == before
        request.abort()
