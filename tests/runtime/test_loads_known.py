"""Known faults and worked examples of loads and backups, tried at the runtime."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from serving import PAGE, House, compute, house, later, run

from phloem import NoRoom, Request
from phloem.cuda_streams.engine import CopyBatch, Ticket
from phloem.events import CopyEnded, RequestEnded

PROMPT = run(1, 4 * PAGE + 1)


def roomy(inline: bool, **options: Any) -> AbstractAsyncContextManager[House]:
    sizes: dict[str, Any] = {"pages": 24, "states": 12} | options
    return house(inline=inline, host_bytes="1MiB", **sizes)


async def fill(here: House, request: Request, prompt: list[int]) -> None:
    """The rest of a request's life; its model checks every byte that it builds on."""
    for _ in range(2):  # less may come than was promised
        await request.allocate(len(prompt) - request.computed)
        await request.ready()
    while request.computed < len(prompt):
        _, end = request.next_stop(4 * PAGE)
        await compute(here, request, prompt, end)
        await request.checkpoint()
    await request.finish()


async def serve(here: House, prompt: list[int]) -> None:
    await fill(here, await here.cache.open_request(prompt), prompt)
    await here.settled()


async def on_the_host_only(here: House, prompt: list[int]) -> None:
    await serve(here, prompt)
    await here.cache.evict(pages=99, states=99)
    match = await here.cache.match(prompt)
    assert (match.device, match.host, match.state_tier) == (0, 4 * PAGE, "host")


@pytest.mark.parametrize("ack_first", [True, False])
async def test_f011_a_suspended_request_leaves_its_load_to_itself(
    ack_first: bool, inline: bool
) -> None:
    """Ten times over, whichever comes first: what the load writes is owned once, then cached."""
    async with roomy(inline) as here:
        cache = here.cache
        await on_the_host_only(here, PROMPT)
        request = await cache.open_request(PROMPT)
        for _ in range(10):
            await request.allocate(1)
            here.gate.shut()
            waiting = asyncio.ensure_future(request.ready())
            await asyncio.sleep(0)
            waiting.cancel()
            if ack_first:
                here.gate.open()
                await here.settled()
            await request.suspend()
            here.gate.open()
            await here.settled()
            stats = cache.stats()
            assert (stats.kv.granted, stats.state.granted, stats.tree.operations) == (0, 0, 0)
            assert not request.resources()
            await cache.audit()
            await cache.evict(pages=99, states=99)
            assert (await request.resume()).usable == 4 * PAGE
        await fill(here, request, PROMPT)


async def test_f053_a_hundred_failed_copies_keep_nothing(inline: bool) -> None:
    """Every place is as it was, of both tiers; when the link is back all can be copied."""
    async with roomy(inline) as here:
        cache = here.cache
        await serve(here, PROMPT)
        await cache.reset()
        await here.settled()
        before = cache.stats()
        here.gate.error = OSError("no space left")
        for number in range(100):
            # No request of a model: its own slot would be cleared by the same broken engine.
            grant = await cache.allocate(pages=1, owner=f"r{number}")
            tokens = run(1000 * (number + 1), PAGE)
            later(here)  # each failure closes the tier again from the third on
            await cache.match(tokens)
            await cache.insert(tokens, pages=grant.pages)
            await here.settled()
        failed = [ended for ended in here.of_type(CopyEnded) if ended.error]
        stats = cache.stats()
        assert len(failed) == 100
        assert stats.host_kv == before.host_kv and stats.tree.operations == 0
        assert cache.is_open
        await cache.evict(pages=99)
        here.gate.error = None
        later(here)
        await on_the_host_only(here, PROMPT)


async def test_s118_a_request_keeps_the_slot_that_it_has(inline: bool) -> None:
    async with roomy(inline) as here:
        cache = here.cache
        await on_the_host_only(here, PROMPT)
        async with cache.request(PROMPT) as request:
            await request.allocate(1)
            slot = request.state_slot
            assert cache.stats().state.granted >= 1
            await request.ready()
            await here.settled()
            assert request.state_slot == slot and cache.stats().state.granted == 1
        await here.settled()
        await cache.evict(pages=99, states=99)
        here.gate.shut()
        async with cache.request(PROMPT) as request:
            await request.allocate(1)
            slot = request.state_slot
            here.gate.error = OSError("the link is down")
            here.gate.open()
            waiting = asyncio.ensure_future(request.ready())
            await here.until(lambda: any(one.error for one in here.of_type(CopyEnded)))
            here.gate.error = None
            await asyncio.wait([waiting])
            waiting.exception()  # clearing its slot may have failed, too
            await here.settled()
            assert request.usable == 0
            assert request.state_slot == slot and cache.stats().state.granted == 1


async def test_s119_who_needs_a_slot_for_a_load(inline: bool) -> None:
    """One for a state that is on the host only, and none in any other case."""
    async with roomy(inline, states=2) as here:
        cache = here.cache

        async def opened(prompt: list[int]) -> tuple[int, int]:
            """What the load took: (states, copies)."""
            before = cache.stats().actions.get("LoadToDevice", 0)
            here.gate.shut()
            request = await cache.open_request(prompt)
            states = cache.stats().state.granted
            loads = cache.stats().actions.get("LoadToDevice", 0) - before
            request.abort()
            here.gate.open()
            await here.settled()
            return states, loads

        assert await opened(PROMPT) == (0, 0), "the root has nothing to load"
        await serve(here, PROMPT)
        assert await opened(PROMPT) == (0, 0), "all is on the device"
        await cache.evict(pages=99, states=99)
        assert await opened(PROMPT) == (1, 1), "the state is on the host only"
        assert await opened(PROMPT) == (0, 0), "it came back"
        # Exhausted: one that is cached goes for it.
        await cache.evict(pages=99, states=99)
        await serve(here, run(500, 4 * PAGE + 1))
        held = await cache.allocate(states=cache.stats().state.free, owner="other")
        assert await opened(PROMPT) == (1 + len(held.states), 1)
        # Nothing to be had: less is promised, and nothing is kept.
        await cache.evict(pages=99, states=99)
        rest = await cache.allocate(states=cache.stats().state.free, owner="other")
        with pytest.raises(NoRoom):
            await cache.allocate(states=1, owner="more", wait=False)
        async with cache.request(PROMPT) as request:
            assert request.usable == 0
            assert cache.stats().copies_in_flight == 0
        cache.release(held)
        cache.release(rest)
        await cache.audit()


@pytest.mark.not_sim("a thread ends the load while the loop is busy")
@pytest.mark.parametrize("suspended", [False, True])
async def test_a_load_that_ends_before_its_caller_hears_of_it_is_counted(
    suspended: bool, inline: bool
) -> None:
    async with roomy(inline) as here:
        await on_the_host_only(here, PROMPT)
        engine = here.cache._engine
        assert engine is not None
        submit = engine.submit

        def submit_and_wait(batch: CopyBatch) -> Ticket:
            ticket = submit(batch)
            assert batch.channel != "h2d" or ticket.quiesced.wait(60)
            return ticket

        if suspended:
            request = await here.cache.open_request(PROMPT)
            await request.suspend()
            await here.settled()
            await here.cache.evict(pages=99, states=99)
        before = here.cache.stats().tokens_loaded  # by chance the first load was as quick
        engine.submit = submit_and_wait  # type: ignore[method-assign]  # for this test
        if suspended:
            await request.resume()
        else:
            request = await here.cache.open_request(PROMPT)
        assert request.usable == here.cache.stats().tokens_loaded - before == 4 * PAGE
        await request.allocate(1)
        await request.ready()
        twin = await request.fork()
        assert here.cache.stats().tokens_loaded - before == 4 * PAGE, "each token once"
        twin.abort()
        await fill(here, request, PROMPT)
        assert here.of_type(RequestEnded)[-1].loaded == before + 4 * PAGE
