"""Requests: what they take over, publish, copy and give up, with the bytes looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from serving import (
    ATTENTION,
    HYBRID,
    PAGE,
    Row,
    blocked,
    check_kv,
    check_state,
    compute,
    digests,
    dump,
    forward,
    house,
    opened,
    run,
    seed,
    serve,
    until,
    write_state,
)

from phloem import CopyFailed, DevicePools, InvalidRequest, ModelLayout
from phloem.events import LeaseEnded, Refused, RequestEnded

PROMPT = run(1, 3 * PAGE + 1)
BOTH = pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])


# -- advance ---------------------------------------------------------------------------------------


@BOTH
async def test_advance_takes_over_what_others_have_published(
    layout: ModelLayout, inline: bool
) -> None:
    async with house(inline=inline, layout=layout) as here:
        late = await opened(here, PROMPT)
        before = late.page_table()
        free = here.cache.stats().kv.free
        assert (await late.advance()).usable == 0 and late.page_table() == before
        await serve(here, PROMPT)
        match = await late.advance()
        assert match.usable == late.computed == late.boundary == 3 * PAGE
        table = late.page_table()
        assert len(table) == len(before) and not set(table[:3]) & set(before)
        assert table[3:] == before[3:], "unused room stays"
        assert here.cache.stats().kv.free == free, "three pages came, three went back"
        await compute(here, late, PROMPT, len(PROMPT))  # reads all of it
        await late.finish()
        assert here.of_type(RequestEnded)[-1].reused == 3 * PAGE


async def test_advance_goes_on_from_what_is_computed_only_if_that_is_less(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 2 * PAGE)
        await seed(here, PROMPT[:PAGE])
        assert (await request.advance()).usable == 0 and request.computed == 2 * PAGE
        await seed(here, PROMPT[: 3 * PAGE])
        assert (await request.advance()).usable == 3 * PAGE == request.computed == request.usable
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_advance_before_ready_and_with_a_snapshot(inline: bool) -> None:
    async with house(inline=inline, states=4) as here:
        request = await here.cache.open_request(PROMPT)
        await request.allocate(4 * PAGE)
        await seed(here, PROMPT[: 2 * PAGE])
        assert (await request.advance()).usable == 2 * PAGE and request.status == "open"
        await request.ready()
        assert request.try_snapshot_slot(3 * PAGE) is not None
        granted = here.cache.stats().state.granted
        await seed(here, PROMPT[: 3 * PAGE])
        await request.advance()
        assert here.cache.stats().state.granted == granted - 1, "the snapshot is of no use now"
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


# -- checkpoint ------------------------------------------------------------------------------------


async def test_a_checkpoint_at_a_wanted_position_publishes_a_copy_of_the_state(
    inline: bool,
) -> None:
    async with house(inline=inline) as here:
        pools = here.cache.pools
        request = await opened(here, PROMPT)
        assert [w.position for w in request.wanted] == [3 * PAGE]
        assert request.next_stop(100) == (0, 3 * PAGE), "chunks end where a state is wanted"
        await compute(here, request, PROMPT, PAGE)
        assert await request.checkpoint() is not None  # KV alone: nobody wants a state here
        assert here.cache.stats().state.tree == 0
        await compute(here, request, PROMPT, 3 * PAGE)
        result = await request.checkpoint()
        assert result is not None and result.state == "adopted" and request.wanted == ()
        lease = await here.cache.acquire(PROMPT, owner="look")
        assert lease.boundary == 3 * PAGE and lease.state not in (0, request.state_slot)
        chain = digests(PROMPT)
        check_state(pools, lease.state, chain, 3 * PAGE)
        check_kv(pools, lease.pages, chain, 3 * PAGE)
        await compute(here, request, PROMPT, len(PROMPT))
        check_state(pools, lease.state, chain, 3 * PAGE)  # the copy is the tree's own
        lease.release()
        assert await request.checkpoint() is None, "nothing new in whole pages"
        await request.finish()


async def test_f037_duplicates_give_way_to_the_trees_pages(inline: bool) -> None:
    async with house(inline=inline, pages=14) as here:
        cache = here.cache
        first, second = await opened(here, PROMPT), await opened(here, PROMPT)
        for request in (first, second):
            await compute(here, request, PROMPT, 2 * PAGE)
        await first.checkpoint(state=True)
        mine = second.page_table()
        result = await second.checkpoint(state=True)
        assert result is not None and result.reused == 2 * PAGE and result.state == "duplicate"
        assert second.page_table()[:2] == first.page_table()[:2]
        assert second.page_table()[2:] == mine[2:]
        assert cache.stats().kv.free == 14 - 12 + 2, "the duplicates came back once"
        # Whoever gets those pages writes to them; the second goes on reading the tree's.
        grant = await cache.allocate(pages=cache.stats().kv.free, owner="other")
        assert set(mine[:2]) <= set(grant.pages)
        for part in cache.pools.kv.values():
            part.k[list(grant.pages)] = -1
            part.v[list(grant.pages)] = -1
        await compute(here, second, PROMPT, len(PROMPT))
        await second.finish()
        cache.release(grant)
        first.abort()


async def test_duplicates_of_a_running_step_are_parked(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await serve(here, PROMPT[: 2 * PAGE + 1])
        late = await cache.open_request(PROMPT[: 2 * PAGE])
        late_boundary = late.boundary
        await late.allocate(2 * PAGE - late.computed)
        await late.ready()
        step = cache.step([late])
        step.launched({late: 2 * PAGE})
        assert late_boundary == 0
        await late.checkpoint(state=False)
        assert cache.stats().kv.parked == 2, "the step may still write them"
        step.end()
        await here.settled()
        late.abort()


async def test_f083_without_a_slot_the_kv_is_published_and_the_request_goes_on(
    inline: bool,
) -> None:
    async with house(inline=inline, states=1) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 3 * PAGE)
        result = await request.checkpoint()
        assert result is not None and result.state == "none" and result.published == 3 * PAGE
        assert here.of_type(Refused)[-1].why == "no_slot"
        assert here.cache.stats().refused_checkpoints == 1
        await compute(here, request, PROMPT, len(PROMPT))
        assert (await here.cache.match(PROMPT)).kv_prefix == 3 * PAGE
        request.abort()


@pytest.mark.parametrize("end", [3 * PAGE - 1, 2 * PAGE])
async def test_a_state_off_the_grid_is_refused_and_no_error(end: int, inline: bool) -> None:
    async with house(inline=inline, state_chunk=3 * PAGE) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, end)
        assert await request.checkpoint(state=True) is None
        assert here.of_type(Refused)[-1].why == "off_grid"
        assert here.cache.stats().tree.pages == 0, "KV of no use before the grid is reached"
        await request.finish()


async def test_a_state_that_exists_is_not_copied_again(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, PAGE)
        await request.checkpoint(state=True)
        copies = here.cache.stats().actions["copies"]
        assert await request.checkpoint(state=True) is None
        assert here.cache.stats().actions["copies"] == copies
        assert here.of_type(Refused)[-1].why == "exists"
        request.abort()


async def test_publishing_while_the_state_is_still_being_written(inline: bool) -> None:
    """A later reader copies the state only after the step that writes it."""
    async with house(inline=inline) as here:
        cache, stream, pools = here.cache, here.stream, here.cache.pools
        tokens = run(1, 2 * PAGE)
        request = await cache.open_request(tokens, whole=True)
        await request.allocate(2 * PAGE)
        await request.ready()
        chain = digests(tokens)
        slot, table = request.state_slot, request.page_table()
        assert slot is not None
        release = blocked(stream)
        with cache.step([request], stream=stream) as step:
            stream.run(_write, pools, table, slot, chain)
            step.launched({request: 2 * PAGE})
        await request.finish()  # hands the working slot over; the step has not even begun
        reader = await cache.open_request([*tokens, 7])
        assert reader.usable == 2 * PAGE and not step.fence.passed
        await reader.allocate(PAGE)
        ready = asyncio.ensure_future(reader.ready())
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not ready.done(), "its copy waits for the step"
        release.mark_passed()
        await asyncio.wait_for(ready, 60)
        await compute(here, reader, [*tokens, 7], 2 * PAGE + 1)
        await reader.finish()


def _write(pools: DevicePools, table: Sequence[int], slot: int, chain: list[int]) -> None:
    for position in range(len(chain) - 1):
        for layer in pools.kv.values():
            layer.k[table[position // PAGE], position % PAGE] = chain[position + 1]
            layer.v[table[position // PAGE], position % PAGE] = chain[position + 1]
    write_state(pools, slot, chain[-1], len(chain) - 1)


# -- snapshots and rollback ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["checkpoint", "finish"])
async def test_a_snapshot_by_the_kernel_is_donated(end: str, inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        slot = request.try_snapshot_slot(2 * PAGE)
        assert slot is not None
        await compute(here, request, PROMPT, len(PROMPT), snapshot=(slot, 2 * PAGE))
        if end == "checkpoint":
            await request.checkpoint()
            request.abort()
        else:
            await request.finish()
        await here.settled()
        lease = await here.cache.acquire(PROMPT, owner="look")
        assert (lease.boundary, lease.state) == (2 * PAGE, slot)
        check_state(here.cache.pools, slot, digests(PROMPT), 2 * PAGE)
        lease.release()


async def test_a_snapshot_that_was_not_reached_is_not_donated(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        assert request.try_snapshot_slot(3 * PAGE) is not None
        await compute(here, request, PROMPT, 2 * PAGE)
        await request.checkpoint(state=False)
        assert here.cache.stats().state.tree == 0
        await request.finish()
        assert (await here.cache.match(PROMPT)).usable == 2 * PAGE, "the working state alone"


async def test_snapshot_slots_are_refused_with_a_reason(inline: bool) -> None:
    async with house(inline=inline, states=2) as here:
        request = await opened(here, PROMPT)
        for position, why in ((3, "off_grid"), (0, "unsettled"), (-PAGE, "")):
            if why:
                assert request.try_snapshot_slot(position) is None
                assert here.of_type(Refused)[-1].why == why
            else:
                with pytest.raises(InvalidRequest):
                    request.try_snapshot_slot(position)
        first = request.try_snapshot_slot(PAGE)
        assert first is not None and request.try_snapshot_slot(2 * PAGE) == first
        request.abort()


async def test_a_snapshot_of_a_pass_that_was_given_up_is_given_up_too(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        slot = request.try_snapshot_slot(2 * PAGE)
        assert slot is not None
        step = here.cache.step([request])
        step.launched({request: len(PROMPT)})
        step.abandon()
        await here.settled()
        assert request.computed == 0 and here.cache.stats().state.granted == 1
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        assert (await here.cache.match(PROMPT)).usable == 0, "no state was made at a page's end"


async def test_rejected_drafts_are_rolled_back_to_a_snapshot(inline: bool) -> None:
    async with house(inline=inline) as here:
        pools = here.cache.pools
        request = await opened(here, PROMPT[: 2 * PAGE])
        slot = request.try_snapshot_slot(2 * PAGE)
        assert slot is not None
        await compute(here, request, PROMPT, 2 * PAGE, snapshot=(slot, 2 * PAGE))
        drafts = PROMPT[: 2 * PAGE] + run(70, 3)
        request.extend(run(70, 3))
        await compute(here, request, drafts, len(drafts))
        for position in (0, PAGE, 2 * PAGE + 1):
            before = dump(here.cache)
            with pytest.raises(InvalidRequest):
                await request.rollback(position)
            assert dump(here.cache) == before
        await request.rollback(2 * PAGE)
        assert (request.computed, request.length) == (2 * PAGE, 2 * PAGE)
        assert request.state_slot is not None
        check_state(pools, request.state_slot, digests(PROMPT[: 2 * PAGE]), 2 * PAGE)
        accepted = PROMPT[: 2 * PAGE] + run(80, 2)
        request.extend(run(80, 2))
        await compute(here, request, accepted, len(accepted))
        await request.finish()
        assert (await here.cache.match(accepted, whole=True)).usable == 2 * PAGE


async def test_nothing_beyond_what_is_accepted_is_published(inline: bool) -> None:
    """Attention only: any position can be rolled back to."""
    async with house(inline=inline, layout=ATTENTION) as here:
        request = await opened(here, PROMPT[: 2 * PAGE])
        await compute(here, request, PROMPT, 2 * PAGE)
        await request.checkpoint()
        drafts = PROMPT[: 2 * PAGE] + run(70, 2 * PAGE)
        request.extend(run(70, 2 * PAGE))
        await compute(here, request, drafts, len(drafts))
        await request.rollback(2 * PAGE + 1)
        with pytest.raises(InvalidRequest):
            await request.rollback(2 * PAGE - 1)  # published: others may read it
        await request.finish()
        assert (await here.cache.match(drafts, whole=True)).usable == 2 * PAGE


async def test_a_rollback_into_the_prompt_forgets_the_rest_of_it(inline: bool) -> None:
    async with house(inline=inline, layout=ATTENTION) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, PAGE)
        await request.rollback(PAGE + 1)
        await serve(here, PROMPT)
        await request.advance()
        assert request.computed == PAGE, "only what its own tokens say"
        other = PROMPT[: PAGE + 1] + run(90, 6)
        request.extend(run(90, 6))
        await compute(here, request, other, len(other))
        await request.finish()
        assert (await here.cache.match(other, whole=True)).usable == 2 * PAGE


# -- steps that are given up -----------------------------------------------------------------------


async def test_an_abandoned_pass_counts_for_nothing(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        with pytest.raises(ZeroDivisionError), here.cache.step([request]) as step:
            step.launched({request: 2 * PAGE})
            assert request.computed == 2 * PAGE
            raise ZeroDivisionError
        assert step.state == "abandoned" and request.computed == 0
        await request.ready()  # from the empty boundary again
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_what_the_tree_took_of_a_pass_is_not_computed_again(inline: bool) -> None:
    """Its pages are the tree's, and perhaps read by others already."""
    async with house(inline=inline, layout=ATTENTION) as here:
        request = await opened(here, PROMPT)
        step = here.cache.step([request], stream=here.stream)
        here.stream.run(forward, here.cache.pools, [Row.of(request, PROMPT, 2 * PAGE)])
        step.launched({request: 2 * PAGE})
        await request.checkpoint()
        step.abandon()
        assert request.computed == request.boundary == 2 * PAGE
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_a_pass_given_up_while_its_state_is_copied_is_not_published(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, PAGE)
        step = here.cache.step([request], stream=here.stream)
        step.launched({request: 2 * PAGE})
        checkpoint = asyncio.create_task(request.checkpoint(state=True))
        await until(lambda: request.resources().get("states") == 2)
        step.abandon()
        await checkpoint
        assert request.computed == request.boundary == PAGE
        assert (await here.cache.match(PROMPT)).kv_prefix == PAGE
        request.abort()


@pytest.mark.parametrize("kept", ["kept", "gone", "never"])
async def test_the_working_state_comes_back_from_the_boundary_or_not_at_all(
    kept: str, inline: bool
) -> None:
    """A state that is not there any more must not become a cleared one."""
    async with house(inline=inline) as here:
        cache = here.cache
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 2 * PAGE)
        await request.checkpoint(state=kept != "never")
        assert request.boundary == request.computed == 2 * PAGE
        cache.step([request]).abandon()
        if kept == "gone":
            for lease in cache.core.tree.leases.live.values():
                if lease.has_state:
                    cache.core.tree.release_state(lease)
            assert (await cache.evict(states=1)).states == 1
        if kept == "kept":
            await request.ready()
            await compute(here, request, PROMPT, len(PROMPT))
            await request.finish()
        else:
            with pytest.raises(InvalidRequest):
                await request.ready()
            with pytest.raises(InvalidRequest), cache.step([request]) as step:
                step.launched({request: len(PROMPT)})
            request.abort()


async def test_ready_may_be_asked_again_after_a_time_out(inline: bool) -> None:
    async with house(inline=inline, states=2) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await here.cache.open_request(PROMPT)
        await request.allocate(3 * PAGE)
        here.gate.shut()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request.ready(), 0.01)
        assert here.cache.stats().copies_in_flight == 3
        for left in (2, 1):
            here.gate.let_one_pass()
            await here.until(lambda n=left: here.cache.stats().copies_in_flight == n)  # type: ignore[misc]  # n is an int
            assert here.cache.stats().copies_in_flight == left
            assert (await here.cache.evict(states=1)).states == 0, "a copy in flight reads it"
        here.gate.open()
        await request.ready()
        await here.settled()
        assert here.cache.stats().tree.states_protected == 0
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_ready_after_a_time_out_and_a_reset(inline: bool) -> None:
    async with house(inline=inline, states=2) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await here.cache.open_request(PROMPT)
        await request.allocate(3 * PAGE)
        here.gate.shut()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(request.ready(), 0.01)
        await here.cache.reset()
        here.gate.open()
        await here.settled()
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        await here.cache.audit()


async def test_the_private_copy_ends_the_leases_hold_on_the_state(inline: bool) -> None:
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await here.cache.open_request(PROMPT)
        await request.allocate(2 * PAGE)
        assert here.cache.stats().tree.states_protected == 1
        await request.ready()
        assert here.cache.stats().tree.states_protected == 0
        assert [event.state_only for event in here.of_type(LeaseEnded)][-1] is True
        assert (await here.cache.evict(states=1)).states == 1, "only KV is needed now"
        await compute(here, request, PROMPT, len(PROMPT))
        request.abort()


async def test_a_private_copy_that_failed_leaves_the_state_for_another_try(inline: bool) -> None:
    """It was given up with the copy, and could be evicted before `ready` was called again."""
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await here.cache.open_request(PROMPT)
        await request.allocate(2 * PAGE)
        here.gate.error = CopyFailed("once")
        with pytest.raises(CopyFailed):
            await request.ready()
        here.gate.error = None
        assert (await here.cache.evict(states=1)).states == 0
        assert (await request.ready()).usable == 2 * PAGE
        assert here.cache.stats().tree.states_protected == 0
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


# -- fork ------------------------------------------------------------------------------------------


@BOTH
async def test_a_fork_has_its_own_partial_page_and_state(layout: ModelLayout, inline: bool) -> None:
    async with house(inline=inline, layout=layout) as here:
        pools = here.cache.pools
        tokens = PROMPT[: 2 * PAGE + 3]
        request = await opened(here, tokens)
        await compute(here, request, tokens, len(tokens))
        twin = await request.fork("twin")
        assert twin.id == "twin" and twin.computed == request.computed == len(tokens)
        shared, own, others = twin.page_table()[:2], twin.page_table()[2], request.page_table()[2]
        assert shared == request.page_table()[:2] and own != others
        chain = digests(tokens)
        check_kv(pools, twin.page_table(), chain, len(tokens))
        if layout is HYBRID:
            assert twin.state_slot not in (None, request.state_slot)
            check_state(pools, twin.state_slot or 0, chain, len(tokens))
        ends = {}
        for one, first in ((request, 70), (twin, 80)):
            ends[one.id] = tokens + run(first, 4)
            one.extend(run(first, 4))
            await one.allocate(4)
            await compute(here, one, ends[one.id], len(ends[one.id]))
        check_kv(pools, request.page_table(), digests(ends[request.id]), len(tokens) + 4)
        check_kv(pools, twin.page_table(), digests(ends["twin"]), len(tokens) + 4)
        await request.finish()
        await twin.finish()
        await here.settled()
        for whole in ends.values():
            assert (await here.cache.match(whole, whole=True)).kv_prefix == 3 * PAGE


async def test_a_fork_outlives_the_request_it_came_from(inline: bool) -> None:
    async with house(inline=inline) as here:
        tokens = PROMPT[: 2 * PAGE + 1]
        request = await opened(here, tokens)
        await compute(here, request, tokens, len(tokens))
        twin = await request.fork()
        request.abort()
        await here.settled()
        await here.cache.evict(pages=99, states=99)
        whole = [*tokens, 7]
        twin.extend([7])
        await compute(here, twin, whole, len(whole))
        await twin.finish()


async def test_a_fork_takes_no_name_that_is_taken(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, PAGE)
        other = await here.cache.open_request(PROMPT, id="other")
        before = dump(here.cache)
        for name in ("other", request.id):
            with pytest.raises(InvalidRequest, match="running"):
                await request.fork(name)
        assert dump(here.cache) == before
        here.cache.step([other]).abandon()  # it is still the one of this name
        other.abort()
        request.abort()
