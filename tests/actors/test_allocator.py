"""Room: exact shortfalls, refusals with figures, who is served first, deadlocks, parking."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest
from serving import ATTENTION, PAGE, House, compute, house, rounds, run, seed

from phloem import Grant, InvalidRequest, NoRoom, PoolFigures, StaleHandle
from phloem.actors.domain import Reply
from phloem.events import Evicted, Granted, Refused, Waited


def started(call: Coroutine[Any, Any, Grant]) -> asyncio.Task[Grant]:
    return asyncio.ensure_future(call)


async def refused(task: asyncio.Task[Grant]) -> NoRoom:
    with pytest.raises(NoRoom) as caught:
        await asyncio.wait_for(task, 60)
    return caught.value


async def granted(here: House, *tasks: asyncio.Task[Grant]) -> None:
    """These are granted, in this order, and give back what they got."""
    for task in tasks:
        here.cache.release(await asyncio.wait_for(task, 60))


# -- the joint shortfall ---------------------------------------------------------------------------


async def three_leaves(here: House) -> None:
    """Three prompts of two pages with a state each; all six pages are the tree's."""
    for first in (100, 200, 300):
        await seed(here, run(first, 2 * PAGE))
    assert here.cache.stats().kv.free == 0


@pytest.mark.parametrize(
    ("pages", "states", "gone"),
    [
        (1, 0, (2, 1)),  # a leaf with a state goes whole
        (2, 0, (2, 1)),
        (3, 0, (4, 2)),
        (0, 2, (0, 0)),  # there are two free states
        (0, 3, (2, 1)),  # the least recent state, with its leaf
        (2, 3, (2, 1)),  # one demand: the state that went with the leaf counts
        (2, 4, (4, 2)),
        (6, 5, (6, 3)),
    ],
)
async def test_f080_f088_the_shortfall_is_met_exactly(
    pages: int, states: int, gone: tuple[int, int], inline: bool
) -> None:
    async with house(inline=inline, pages=6, states=5) as here:
        await three_leaves(here)
        here.events.clear()
        grant = await here.cache.allocate(pages=pages, states=states, wait=False)
        assert (len(grant.pages), len(grant.states)) == (pages, states)
        evicted = here.of_type(Evicted)
        assert (sum(e.pages for e in evicted), sum(e.states for e in evicted)) == gone
        assert all(e.why == "room" for e in evicted)
        await here.cache.audit()
        here.cache.release(grant)


async def test_a_tail_without_a_state_gives_only_the_pages_that_are_missing(inline: bool) -> None:
    async with house(inline=inline, pages=8, layout=ATTENTION) as here:
        await seed(here, run(1, 8 * PAGE))
        grant = await here.cache.allocate(pages=3)
        assert here.cache.stats().kv.tree == 5
        assert (await here.cache.match(run(1, 8 * PAGE), whole=True)).usable == 5 * PAGE
        here.cache.release(grant)


async def test_what_cannot_be_met_evicts_nothing(inline: bool) -> None:
    async with house(inline=inline, pages=6, states=5) as here:
        await three_leaves(here)
        held = await here.cache.acquire(run(100, 2 * PAGE), owner="held", whole=True)
        here.events.clear()
        with pytest.raises(NoRoom):
            await here.cache.allocate(pages=5, wait=False)
        with pytest.raises(NoRoom):
            await here.cache.allocate(pages=1, states=5, wait=False)
        assert not here.of_type(Evicted), "nothing was dropped for nothing"
        held.release()


# -- refusals --------------------------------------------------------------------------------------


async def test_a_refusal_carries_the_figures_and_others_go_on(inline: bool) -> None:
    async with house(inline=inline, pages=10, states=5) as here:
        cache = here.cache
        await seed(here, run(100, 2 * PAGE))
        await seed(here, run(200, 2 * PAGE))
        lease = await cache.acquire(run(100, 2 * PAGE), owner="reader", whole=True)
        grant = await cache.allocate(pages=3, states=1, owner="holder")
        with pytest.raises(NoRoom) as caught:
            await cache.allocate(pages=6, states=4, wait=False)
        assert not caught.value.deadlock
        assert caught.value.figures == (
            PoolFigures("kv", 6, 10, 3, 0, 2, 2, 3, 0, 128),
            PoolFigures("state", 4, 5, 2, 0, 1, 1, 1, 0, 32),
        )
        assert "asked 6 of 10, free 3" in str(caught.value)
        (told,) = here.of_type(Refused)
        assert told.what == "room" and "asked 6" in told.detail
        other = await cache.allocate(pages=5, states=3, wait=False)
        for handle in (other, grant, lease):
            cache.release(handle)


@pytest.mark.parametrize("asked", [(11, 0), (0, 6), (10**9, 10**9)])
async def test_f078_more_than_there_is_is_refused_at_once_and_an_exact_fit_is_not(
    asked: tuple[int, int], inline: bool
) -> None:
    async with house(inline=inline, pages=10, states=5) as here:
        with pytest.raises(NoRoom):
            await asyncio.wait_for(here.cache.allocate(pages=asked[0], states=asked[1]), 60)
        all_of_it = await asyncio.wait_for(here.cache.allocate(pages=10, states=5), 60)
        here.cache.release(all_of_it)


async def test_nothing_can_be_allocated_and_leaves_nothing(inline: bool) -> None:
    async with house(inline=inline) as here:
        grant = await here.cache.allocate()
        assert not grant.pages and not grant.states
        assert not here.cache.core.ledger.accounts
        here.cache.release(grant)
        with pytest.raises(StaleHandle):
            here.cache.release(grant)


@pytest.mark.parametrize("bad", [-1, 1.5, "2", None])
async def test_amounts_that_are_none_are_refused(bad: Any, inline: bool) -> None:
    async with house(inline=inline) as here:
        for amounts in ({"pages": bad}, {"states": bad}, {"pages": 1, "states": bad}):
            with pytest.raises(InvalidRequest):
                await here.cache.allocate(**amounts)
            with pytest.raises(InvalidRequest):
                here.cache.nowait.allocate(**amounts)
            with pytest.raises(InvalidRequest):
                await here.cache.evict(**amounts)
            with pytest.raises(InvalidRequest):
                here.cache.nowait.evict(**amounts)


async def test_a_time_limit_ends_a_wait_with_the_figures(inline: bool) -> None:
    async with house(inline=inline, pages=4) as here:
        holder = await here.cache.allocate(pages=3, owner="holder")
        with pytest.raises(NoRoom) as caught:
            await here.cache.allocate(pages=2, owner="late", timeout=0.01)
        assert caught.value.figures[0].free == 1 and not caught.value.deadlock
        await here.cache.audit()
        assert here.cache.stats().waiting == 0
        here.cache.release(holder)


# -- who is served first ---------------------------------------------------------------------------


async def test_newcomers_are_served_in_order_and_nobody_overtakes(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        holder = await cache.allocate(pages=9, owner="holder")
        big = started(cache.allocate(pages=5, owner="big"))
        await rounds()
        small = started(cache.allocate(pages=1, owner="small"))
        await rounds()
        assert not big.done() and not small.done(), "one page is free, but big is first"
        assert [waited.request for waited in here.of_type(Waited)] == ["big", "small"]
        assert not any(waited.holder for waited in here.of_type(Waited))
        cache.release(holder)
        await granted(here, big, small)
        order = [event.request for event in here.of_type(Granted)]
        assert order == ["holder", "big", "small"]


async def test_holders_are_served_before_newcomers(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        one = await cache.allocate(pages=2, owner="one")
        two = await cache.allocate(pages=2, owner="two")
        other = await cache.allocate(pages=6, owner="other")
        new = started(cache.allocate(pages=1, owner="new"))
        await rounds()
        second = started(cache.allocate(pages=3, owner="two"))
        await rounds()
        third = started(cache.allocate(pages=3, owner="one"))
        await rounds()
        assert [w.holder for w in here.of_type(Waited)] == [False, True, True]
        cache.release(other)
        await granted(here, second, third, new)
        order = [event.request for event in here.of_type(Granted)]
        assert order[3:] == ["two", "one", "new"]
        cache.release(one)
        cache.release(two)


async def test_a_fitting_newcomer_waits_while_a_holder_waits(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        one = await cache.allocate(pages=2, owner="one")
        other = await cache.allocate(pages=6, owner="other")
        more = started(cache.allocate(pages=5, owner="one"))
        await rounds()
        new = started(cache.allocate(pages=1, owner="new"))
        await rounds()
        assert not more.done() and not new.done() and cache.stats().kv.free == 2
        cache.release(other)
        await granted(here, more, new)
        cache.release(one)


async def test_a_request_that_was_only_opened_holds_nothing(inline: bool) -> None:
    """Its lease protects no page of anybody, so those who hold pages come before it."""
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        running = await cache.open_request(run(1, 4 * PAGE), id="running")
        await running.allocate(4 * PAGE)
        other = await cache.allocate(pages=6, owner="other")
        fresh = await cache.open_request(run(500, 6 * PAGE), id="fresh")
        first = asyncio.ensure_future(fresh.allocate(6 * PAGE))
        await rounds()
        second = asyncio.ensure_future(running.allocate(5 * PAGE))
        await rounds()
        assert not first.done() and not second.done()
        assert [w.holder for w in here.of_type(Waited)] == [False, True]
        cache.release(other)
        await asyncio.wait_for(second, 60)
        running.abort()
        await asyncio.wait_for(first, 60)
        fresh.abort()


async def test_a_lease_on_data_makes_a_holder(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        await seed(here, run(1, 2 * PAGE))
        lease = await cache.acquire(run(1, 2 * PAGE), owner="reader", whole=True)
        other = await cache.allocate(pages=8, owner="other")
        new = started(cache.allocate(pages=1, owner="new"))
        await rounds()
        reads = started(cache.allocate(pages=4, owner="reader"))
        await rounds()
        assert [w.holder for w in here.of_type(Waited)] == [False, True]
        cache.release(other)
        await granted(here, reads, new)
        lease.release()


async def test_asking_without_waiting_never_waits(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        holder = await cache.allocate(pages=8, owner="holder")
        with pytest.raises(NoRoom):
            await cache.allocate(pages=3, wait=False)
        waits = started(cache.allocate(pages=4, owner="waits"))
        await rounds()
        with pytest.raises(NoRoom):
            await cache.allocate(pages=1, owner="fits, but is second", wait=False)
        with pytest.raises(NoRoom):
            cache.nowait.allocate(pages=1)
        more = await cache.allocate(pages=2, owner="holder", wait=False)
        cache.release(more)
        cache.release(holder)
        await granted(here, waits)


async def test_two_who_will_not_wait_are_both_served_when_the_tree_can_help(
    inline: bool,
) -> None:
    async with house(inline=inline, pages=6, states=5) as here:
        await three_leaves(here)
        grants = await asyncio.gather(
            here.cache.allocate(pages=2, owner="a", wait=False),
            here.cache.allocate(pages=2, owner="b", wait=False),
        )
        for grant in grants:
            here.cache.release(grant)


async def test_one_who_will_not_wait_is_not_left_behind_one_who_does() -> None:
    """Queued: the tree is asked for the first; a holder who must wait comes in meanwhile."""
    async with house(inline=False, pages=6, states=6) as here:
        cache = here.cache
        await seed(here, run(100, 2 * PAGE))
        other = await cache.allocate(pages=3, owner="other")
        holder = await cache.allocate(pages=1, owner="holder")
        quick = started(cache.allocate(pages=2, owner="quick", wait=False))
        slow = started(cache.allocate(pages=5, owner="holder"))
        done, _ = await asyncio.wait([quick], timeout=60)
        assert done, "an allocation with wait=False waits"
        if quick.exception() is None:
            cache.release(quick.result())
        cache.release(other)
        await granted(here, slow)
        cache.release(holder)


async def test_an_optional_slot_is_never_evicted_for(inline: bool) -> None:
    """A slot for the kernel's snapshot: only what is free already."""
    async with house(inline=inline, states=2) as here:
        await seed(here, run(900, PAGE))
        async with here.cache.request(run(1, 2 * PAGE)) as request:
            await request.allocate(2 * PAGE)
            assert request.try_snapshot_slot(PAGE) is None
            assert here.cache.stats().state.tree == 1
            assert [told.what for told in here.of_type(Refused)] == ["room", "checkpoint"]


# -- leaving, parking, deadlock --------------------------------------------------------------------


async def test_f104_f105_a_waiter_who_leaves_lets_the_next_one_go_on(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        holder = await cache.allocate(pages=8, owner="holder")
        big = started(cache.allocate(pages=9, owner="big"))
        await rounds()
        small = started(cache.allocate(pages=2, owner="small"))
        await rounds()
        assert not small.done()
        big.cancel()
        await granted(here, small)
        cache.release(holder)
        with pytest.raises(asyncio.CancelledError):
            await big


async def test_those_who_left_behind_one_who_waits_are_not_in_the_line(inline: bool) -> None:
    """Nobody knows how long he waits, nor how many come and leave meanwhile."""
    async with house(inline=inline, pages=8, layout=ATTENTION) as here:
        before = sum(type(one) is Reply for one in gc.get_objects())  # of other tests
        held = await here.cache.allocate(pages=6, owner="holder")
        waits = started(here.cache.allocate(pages=8, owner="waits"))
        await rounds(3)
        for number in range(20):
            leaves = started(here.cache.allocate(pages=1, owner=f"leaves {number}"))
            await rounds(3)
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
        assert here.cache.stats().waiting == here.cache.core.ledger.waiting == 1
        del leaves
        gc.collect()
        left = sum(type(one) is Reply for one in gc.get_objects()) - before
        assert left < 10, "nobody waits for these"
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert here.cache.stats().waiting == here.cache.core.ledger.waiting == 0
        here.cache.release(held)


async def test_f104_room_handed_to_one_who_has_just_left_goes_to_the_next(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        holder = await cache.allocate(pages=8, owner="holder")
        first = started(cache.allocate(pages=9, owner="first"))
        await rounds()
        second = started(cache.allocate(pages=9, owner="second"))
        await rounds()
        cache.release(holder)  # granted to the first, who has not run yet
        first.cancel()
        await granted(here, second)
        with pytest.raises(asyncio.CancelledError):
            await first


@pytest.mark.sim(seeds=1, policy="fifo")  # it takes them in the order of their numbers
async def test_f105_leaving_and_giving_back_in_one_round_strands_nobody(inline: bool) -> None:
    async with house(inline=inline, pages=10) as here:
        cache = here.cache
        holder = await cache.allocate(pages=10, owner="holder")
        waiters = [
            started(cache.allocate(pages=4, owner=f"waiter {number}")) for number in range(6)
        ]
        await rounds()
        for waiter in waiters[::2]:
            waiter.cancel()
        cache.release(holder)
        late = started(cache.allocate(pages=4, owner="late"))
        for waiter in waiters[1::2]:
            await granted(here, waiter)
        await granted(here, late)
        assert cache.stats().waiting == 0


async def test_f020_what_a_step_still_writes_is_parked(inline: bool) -> None:
    async with house(inline=inline, pages=4, states=2) as here:
        cache = here.cache
        request = await cache.open_request(run(1, PAGE), id="r")
        await request.allocate(PAGE)
        grant = await cache.allocate(pages=3, states=1, owner="low")
        step = cache.step([request])
        cache.release(grant, after=step)
        stats = cache.stats()
        assert stats.kv.parked == 3 and stats.state.parked == 1
        assert stats.kv.free == 0
        with pytest.raises(NoRoom) as caught:
            await cache.allocate(pages=1, wait=False)
        assert caught.value.figures[0].parked == 3
        waits = started(cache.allocate(pages=3, owner="new"))
        await rounds()
        assert not waits.done(), "what is parked comes back: no deadlock, no grant yet"
        step.abandon()
        await granted(here, waits)
        request.abort()


async def test_a_deadlock_of_holders_ends_with_one_refusal_of_the_youngest(inline: bool) -> None:
    async with house(inline=inline, pages=9) as here:
        cache = here.cache
        held = [await cache.allocate(pages=3, owner=name) for name in ("one", "two", "three")]
        asks = []
        for name in ("one", "two", "three"):
            asks.append(started(cache.allocate(pages=3, owner=name)))
            await rounds()
        error = await refused(asks[2])
        assert error.deadlock and "every holder waits" in str(error)
        await rounds()
        assert not asks[0].done() and not asks[1].done()
        cache.release(held[2])
        await granted(here, asks[0])
        cache.release(held[0])
        await granted(here, asks[1])
        cache.release(held[1])
        deadlocks = [told for told in here.of_type(Refused) if told.why == "deadlock"]
        assert len(deadlocks) == 1 and deadlocks[0].request == "three"


async def test_when_every_holder_waits_whoever_fits_is_served(inline: bool) -> None:
    async with house(inline=inline, pages=9) as here:
        cache = here.cache
        one = await cache.allocate(pages=4, owner="one")
        two = await cache.allocate(pages=4, owner="two")
        big = started(cache.allocate(pages=5, owner="one"))
        await rounds()
        assert not big.done(), "two may still give back"
        small = started(cache.allocate(pages=1, owner="two"))
        await granted(here, small)
        cache.release(two)
        await granted(here, big)
        cache.release(one)


async def test_a_holder_who_does_not_wait_may_give_back(inline: bool) -> None:
    """No deadlock while somebody who holds something is not waiting, or asks without waiting."""
    async with house(inline=inline, pages=9) as here:
        cache = here.cache
        one = await cache.allocate(pages=4, owner="one")
        two = await cache.allocate(pages=4, owner="two")
        waits = started(cache.allocate(pages=5, owner="one"))
        await rounds()
        with pytest.raises(NoRoom) as caught:
            await cache.allocate(pages=5, owner="two", wait=False)
        assert not caught.value.deadlock
        assert not waits.done()
        cache.release(two)
        await granted(here, waits)
        cache.release(one)


async def test_a_deadlock_of_requests_lets_the_others_finish(inline: bool) -> None:
    """Three requests that grow; one gives way and is served when the others are done."""
    async with house(inline=inline, pages=8, states=8) as here:

        async def grows(first: int) -> int:
            gave_way = 0
            tokens = run(first, 4 * PAGE)
            while True:
                async with here.cache.request(tokens, id=f"r{first}") as request:
                    try:
                        for pages in (1, 2, 3, 4):
                            await request.allocate(pages * PAGE - request.computed)
                            await request.ready()
                            await compute(here, request, tokens, pages * PAGE)
                        await request.finish(publish="none")
                        return gave_way
                    except NoRoom as error:
                        assert error.deadlock
                        gave_way += 1

        async with asyncio.timeout(60):
            gave_way = await asyncio.gather(*(grows(first) for first in (100, 200, 300)))
        assert sum(gave_way) < 20


async def test_a_reset_under_way_is_waited_for(
    inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a former generation holds comes back in slices: no deadlock, no refusal."""
    async with house(inline=inline, pages=12, states=12) as here:
        cache = here.cache
        for first in range(100, 1300, 200):
            await seed(here, run(first, 2 * PAGE))
        tree = cache.core.tree
        sweep = tree.sweep
        monkeypatch.setattr(tree, "sweep", lambda: sweep(1))
        await cache.reset()
        grant = await asyncio.wait_for(cache.allocate(pages=12, states=3), 60)
        cache.release(grant)
