"""Room under write-back: what is promised is not room yet, and is not asked for twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest
from serving import ATTENTION, PAGE, House, house, run, seed

from phloem import CacheReset, NoRoom, PoolFigures
from phloem.events import Evicted

LEAVES = [run(first, 2 * PAGE) for first in (100, 200, 300, 400)]


async def rounds(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def write_back(inline: bool, *, states: int = 8) -> AbstractAsyncContextManager[House]:
    return house(
        inline=inline, pages=8, states=states, host_bytes="1MiB", write_policy="write_back"
    )


async def full(here: House) -> None:
    """Four prompts of two pages and a state each; no page is free, and none has a copy."""
    for leaf in LEAVES:
        await seed(here, leaf)
    assert here.cache.stats().kv.free == 0
    here.events.clear()


def evicted(here: House) -> tuple[int, int]:
    """Pages and victims so far, freed and promised."""
    victims = [victim for event in here.of_type(Evicted) for victim in event.victims]
    return sum(victim.pages for victim in victims), len(victims)


def check_sum(figures: Sequence[PoolFigures]) -> None:
    for one in figures:
        held = one.free + one.parked + one.evictable + one.protected + one.granted + one.in_flight
        assert held == one.size, one


async def test_who_does_not_wait_is_told_what_is_on_its_way(inline: bool) -> None:
    async with write_back(inline) as here:
        await full(here)
        here.gate.shut()
        for attempt in range(3):
            with pytest.raises(NoRoom) as caught:
                if attempt == 1:
                    here.cache.nowait.allocate(pages=2)
                else:
                    await here.cache.allocate(pages=2, wait=False)
            kv, state = caught.value.figures
            assert (kv.free, kv.in_flight, kv.evictable) == (0, 2, 6), "asked for only once"
            assert state.in_flight == 1
            check_sum(caught.value.figures)
        here.gate.open()
        await here.settled()
        grant = await here.cache.allocate(pages=2, wait=False)
        assert evicted(here) == (2, 1)
        here.cache.release(grant)


async def test_a_waiter_is_not_made_room_for_twice(inline: bool) -> None:
    async with write_back(inline) as here:
        await full(here)
        here.gate.shut()
        waiting = asyncio.ensure_future(here.cache.allocate(pages=4))
        await rounds()
        assert evicted(here) == (4, 2)
        here.gate.let_one_pass()
        await here.until(lambda: here.cache.stats().kv.free == 2)
        assert evicted(here) == (4, 2), "the other two are on their way"
        here.gate.open()
        here.cache.release(await asyncio.wait_for(waiting, 60))
        assert evicted(here) == (4, 2)
        assert here.cache.stats().kv.tree == 4


async def test_the_next_waiter_asks_only_for_what_is_still_short(inline: bool) -> None:
    async with write_back(inline) as here:
        await full(here)
        here.gate.shut()
        first = asyncio.ensure_future(here.cache.allocate(pages=3, owner="first"))
        await rounds()
        second = asyncio.ensure_future(here.cache.allocate(pages=3, owner="second"))
        await rounds()
        here.gate.open()
        for task in (first, second):
            await asyncio.wait_for(task, 60)
        assert evicted(here) == (6, 3)
        for task in (first, second):
            here.cache.release(task.result())


async def test_what_stays_after_all_is_made_up_for(inline: bool) -> None:
    """Somebody uses what was promised: the waiter is given something else."""
    async with write_back(inline) as here:
        await full(here)
        here.gate.shut()
        waiting = asyncio.ensure_future(here.cache.allocate(pages=2))
        await rounds()
        lease = await here.cache.acquire(LEAVES[0], whole=True)
        assert lease.boundary == 2 * PAGE
        here.gate.open()
        here.cache.release(await asyncio.wait_for(waiting, 60))
        assert (await here.cache.match(LEAVES[0], whole=True)).device == 2 * PAGE
        assert evicted(here) == (4, 2)
        lease.release()


async def on_the_host_beside_a_full_device(here: House) -> list[int]:
    """A prompt that is only on the host, while the device is full of what has no copy."""
    prompt = run(500, 2 * PAGE)
    await seed(here, prompt)
    await here.cache.evict(pages=8)
    await here.settled()
    await full(here)
    match = await here.cache.match(prompt, whole=True)
    assert (match.device, match.host) == (0, 2 * PAGE)
    return prompt


async def test_a_load_waits_for_room_that_is_on_its_way(inline: bool) -> None:
    async with write_back(inline) as here:
        prompt = await on_the_host_beside_a_full_device(here)
        here.gate.shut()
        opening = asyncio.ensure_future(here.cache.open_request(prompt, whole=True))
        await rounds()
        assert not opening.done()
        with pytest.raises(NoRoom):  # and nobody is kept behind it who does not wait
            await here.cache.allocate(pages=1, wait=False)
        here.gate.let_one_pass()  # the backup
        request = await asyncio.wait_for(opening, 60)
        assert request.usable == 2 * PAGE
        check_sum(here.cache.core.allocator.figures(0, 0))
        assert here.cache.core.allocator.figures(0, 0)[0].in_flight == 2
        here.gate.open()
        await request.allocate(0)
        await request.ready()
        assert (request.computed, here.cache.stats().tokens_loaded) == (2 * PAGE, 2 * PAGE)
        assert evicted(here) == (2, 1)
        request.abort()


async def test_a_load_that_waits_for_room_can_be_left(inline: bool) -> None:
    async with write_back(inline) as here:
        prompt = await on_the_host_beside_a_full_device(here)
        here.gate.shut()
        opening = asyncio.ensure_future(here.cache.open_request(prompt, whole=True))
        await rounds()
        opening.cancel()
        await asyncio.wait([opening])
        here.gate.open()
        await here.settled()
        assert here.nothing_owned()
        await here.cache.audit()


async def test_a_reset_ends_the_wait_for_the_room_of_a_load(inline: bool) -> None:
    async with write_back(inline) as here:
        prompt = await on_the_host_beside_a_full_device(here)
        here.gate.shut()
        opening = asyncio.ensure_future(here.cache.open_request(prompt, whole=True))
        await rounds()
        await here.cache.reset()
        with pytest.raises(CacheReset):
            await asyncio.wait_for(opening, 60)
        here.gate.open()
        await here.settled()
        assert here.nothing_owned()
        await here.cache.audit()


async def test_who_does_not_wait_does_not_wait_for_the_room_of_a_load(inline: bool) -> None:
    async with write_back(inline) as here:
        prompt = await on_the_host_beside_a_full_device(here)
        here.gate.shut()
        alone = here.cache.nowait.acquire(prompt, whole=True)
        assert (alone.boundary, await alone.ready()) == (0, alone.match)
        assert alone.match.usable == 0
        alone.release()
        opening = asyncio.ensure_future(here.cache.open_request(prompt, whole=True))
        await rounds()
        joined = here.cache.nowait.acquire(prompt, whole=True)
        assert joined.boundary == 2 * PAGE, "promised, but not there yet"
        here.gate.open()
        assert (await asyncio.wait_for(joined.ready(), 60)).usable == 2 * PAGE
        assert len(joined.pages) == 2
        joined.release()
        (await opening).abort()


async def test_what_a_holder_takes_is_made_up_for_at_once(inline: bool) -> None:
    """What was free when the tree was asked went to another, and was asked for only much later."""
    async with house(
        inline=inline, layout=ATTENTION, pages=6, host_bytes="1MiB", write_policy="write_back"
    ) as here:
        for first in (1, 100):
            await seed(here, run(first, PAGE))
        held = await here.cache.allocate(pages=3, owner="holder")
        here.gate.shut()
        waits = asyncio.ensure_future(here.cache.allocate(pages=2, owner="newcomer"))
        await rounds()
        assert here.cache.stats().tree.pages_leaving == 1, "one is free"
        more = await here.cache.allocate(pages=1, owner="holder")
        await rounds()
        assert here.cache.stats().tree.pages_leaving == 2
        here.gate.open()
        for grant in (await asyncio.wait_for(waits, 60), held, more):
            here.cache.release(grant)
        await here.settled()
        await here.cache.audit()
