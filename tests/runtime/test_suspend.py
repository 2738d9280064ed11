"""Preemption: a request gives back its room and goes on later from what is still cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from serving import ATTENTION, PAGE, Row, blocked, compute, forward, house, opened, run, seed, until

from phloem import InvalidRequest, StaleHandle

PROMPT = run(1, 3 * PAGE + 1)


async def test_gives_back_its_room_and_goes_on_where_it_was(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 2 * PAGE)
        await request.suspend()
        assert not request.resources()
        assert here.cache.stats().tree.pages_protected == 0
        match = await request.resume()
        assert (match.usable, request.computed) == (2 * PAGE, 2 * PAGE)
        assert request.usable == 2 * PAGE
        await request.allocate(len(PROMPT) - request.computed)
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        assert (await here.cache.match(PROMPT)).kv_prefix == 3 * PAGE


async def test_what_was_evicted_meanwhile_is_computed_again(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 2 * PAGE)
        await request.suspend()
        await here.cache.evict(pages=99, states=99)
        assert (await request.resume()).usable == request.usable == 0
        await request.allocate(len(PROMPT))
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_a_kept_lease_protects_what_was_published(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 2 * PAGE)
        await request.suspend(keep_lease=True)
        assert request.resources() == {"leases": 1}
        await here.cache.evict(pages=99)
        assert (await here.cache.match(PROMPT)).kv_prefix == 2 * PAGE
        await request.resume()
        assert here.cache.stats().tree.leases == 1, "the former lease is gone (F-017)"
        request.abort()


async def test_tokens_said_so_far_are_part_of_it(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, len(PROMPT))
        request.extend([7] * PAGE)
        tokens = [*PROMPT, *[7] * PAGE]
        await request.allocate(len(tokens) - request.computed)
        await compute(here, request, tokens, 4 * PAGE)
        await request.suspend()
        assert (await request.resume()).usable == 4 * PAGE
        request.abort()


async def test_calls_out_of_order_change_nothing(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        with pytest.raises(InvalidRequest):
            await request.resume()
        await request.suspend()
        for call in (request.suspend, request.ready, request.advance, request.finish):
            with pytest.raises(InvalidRequest, match="suspended"):
                await call()
        with pytest.raises(InvalidRequest, match="suspended"):
            await request.allocate(1)
        request.abort()
        with pytest.raises(StaleHandle):
            await request.resume()


async def test_f023_pages_that_a_step_still_writes_stay_parked(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        release = blocked(here.stream)
        with here.cache.step([request], stream=here.stream) as step:
            here.stream.run(lambda: None)
            step.launched({request: PAGE})
        try:
            await request.suspend()
            gone = await here.cache.evict(pages=99, states=99)
            stats = here.cache.stats()
        finally:
            release.mark_passed()
        assert (gone.pages, gone.states) == (0, 0), "the step still reads what was published"
        assert (stats.kv.tree, stats.state.tree, stats.kv.granted) == (1, 1, 0)
        assert stats.kv.parked > 0
        await here.settled()
        await request.resume()
        request.abort()


async def test_what_a_pass_still_reads_under_the_lease_is_not_evicted(inline: bool) -> None:
    """Published by another, so that nothing but the lease of the suspended one keeps it."""
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await opened(here, PROMPT)
        assert request.usable == 2 * PAGE
        release = blocked(here.stream)
        with here.cache.step([request], stream=here.stream) as step:
            here.stream.run(lambda: None)
            step.launched({request: 2 * PAGE + 1})
        try:
            await request.suspend()
            gone = await here.cache.evict(pages=99)
        finally:
            release.mark_passed()
        assert gone.pages == 0
        await here.settled()
        assert (await here.cache.evict(pages=99)).pages == 2
        request.abort()


async def test_what_a_pass_still_reads_under_a_kept_lease_outlives_a_reset(inline: bool) -> None:
    """`resume` ended the former lease at once, and the sweep freed what the pass was reading."""
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await opened(here, PROMPT)
        release = blocked(here.stream)
        with here.cache.step([request], stream=here.stream) as step:
            here.stream.run(lambda: None)
            step.launched({request: 2 * PAGE + 1})
        try:
            await request.suspend(keep_lease=True)
            await here.cache.reset()
            await request.resume()
            held = here.cache.stats().kv.tree
        finally:
            release.mark_passed()
        assert held == 2
        await here.settled()
        assert here.cache.stats().kv.tree == 0
        request.abort()


async def test_aborting_a_suspended_request_gives_its_lease_back_once(inline: bool) -> None:
    async with house(inline=inline) as here:
        for keep in (True, False):
            request = await opened(here, PROMPT)
            await compute(here, request, PROMPT, PAGE)
            await request.suspend(keep_lease=keep)
            request.abort()
            request.abort()
            assert not request.resources()


async def test_a_reset_while_suspended(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, PAGE)
        await request.suspend(keep_lease=True)
        await here.cache.reset()
        assert (await request.resume()).usable == 0
        request.abort()


@pytest.mark.parametrize("lease_first", [True, False])
async def test_f007_what_is_let_go_of_twice_over_is_free_in_either_order(
    lease_first: bool, inline: bool
) -> None:
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        leases = [await here.cache.acquire(PROMPT, owner=name) for name in ("one", "two")]
        await here.cache.reset()  # the tree's own hold on the data ends; the leases' do not
        await here.settled()
        if lease_first:
            leases.reverse()
        leases[0].release()
        await here.settled()
        assert here.cache.stats().kv.tree == 2, "the other one may still read it"
        leases[1].release()
        await here.settled()
        assert here.cache.stats().kv.free == here.cache.stats().kv.size


async def test_f017_after_a_resume_there_is_one_lease(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, PAGE)
        await request.checkpoint(state=True)
        await request.suspend(keep_lease=True)
        await seed(here, PROMPT[: 3 * PAGE])
        assert here.cache.stats().tree.leases == 1
        assert (await request.resume()).usable == 3 * PAGE
        assert here.cache.stats().tree.leases == 1
        await request.allocate(PAGE)
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        await here.settled()
        figures = here.cache.stats().tree
        assert (figures.leases, figures.pages_protected, figures.states_protected) == (0, 0, 0)


# -- what other tasks of the request await meanwhile -----------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
async def test_who_waits_for_room_of_a_suspended_request_hears_of_it(
    resumed: bool, inline: bool
) -> None:
    """It is preempted where it stands; room that came later would keep it from being resumed."""
    async with house(inline=inline, pages=8) as here:
        others = await here.cache.allocate(pages=6)
        request = await here.cache.open_request(PROMPT)
        waiting = asyncio.create_task(request.allocate(len(PROMPT)))
        await until(lambda: here.cache.stats().waiting)
        await request.suspend()
        assert not here.cache.stats().waiting
        if resumed:
            await request.resume()
        here.cache.release(others)
        with pytest.raises(StaleHandle, match="suspended"):
            await waiting
        assert here.cache.stats().kv.granted == 0
        if not resumed:
            await request.resume()
        await request.allocate(len(PROMPT))
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("what", ["checkpoint", "ready", "fork", "rollback"])
async def test_who_waits_for_a_copy_of_a_suspended_request_hears_of_it(
    what: str, resumed: bool, inline: bool
) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        if what == "rollback":
            slot = request.try_snapshot_slot(PAGE)
            assert slot is not None
            await compute(here, request, PROMPT, PAGE, snapshot=(slot, PAGE))
        await compute(here, request, PROMPT, 2 * PAGE)
        if what == "ready":
            await request.checkpoint(state=True)
            here.cache.step([request]).abandon()
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "checkpoint": lambda: request.checkpoint(state=True),
            "ready": request.ready,
            "fork": request.fork,
            "rollback": lambda: request.rollback(PAGE),
        }
        here.gate.shut()
        waiting = asyncio.create_task(calls[what]())
        await until(lambda: here.cache.stats().copies_in_flight)
        await request.suspend()
        if resumed:
            await request.resume()
            await request.allocate(len(PROMPT))
        here.gate.open()
        with pytest.raises(StaleHandle if resumed else InvalidRequest, match="suspended"):
            await waiting
        if not resumed:
            await request.resume()
            await request.allocate(len(PROMPT))
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_a_pass_from_before_that_is_given_up_late_sets_nothing_back(inline: bool) -> None:
    async with house(inline=inline, layout=ATTENTION) as here:
        request = await opened(here, PROMPT)
        step = here.cache.step([request], stream=here.stream)
        here.stream.run(forward, here.cache.pools, [Row.of(request, PROMPT, PAGE)])
        step.launched({request: PAGE})
        await request.suspend()
        await request.resume()
        await request.allocate(len(PROMPT))
        assert (await request.ready()).usable == PAGE
        await compute(here, request, PROMPT, 2 * PAGE)
        step.abandon()
        assert request.computed == 2 * PAGE
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
