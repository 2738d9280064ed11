"""States that the model's kernel leaves in slots of the request's own, and states that lag."""

from __future__ import annotations

from typing import Any

import pytest
from serving import PAGE, House, check_state, compute, digests, dump, house, opened, run

from phloem import InvalidRequest, Placement, Request
from phloem.events import Refused

PROMPT = run(1, 3 * PAGE + 1)
GRID = 256
QUIET = Placement(branch=False, end_of_prompt=False, end_of_response=False)


def large(snapshot_slots: int, **options: Any) -> Any:
    """A cache for prompts of hundreds of tokens, which no kernel of the test computes."""
    return house(
        page_size=8,
        state_chunk=GRID,
        pages=100,
        placement=QUIET,
        snapshot_slots=snapshot_slots,
        **options,
    )


def passed(here: House, request: Request, end: int, state_at: int | None = None) -> None:
    """A pass that is over at once."""
    with here.cache.step([request]) as step:
        late = None if state_at is None else {request: state_at}
        step.launched({request: end}, states_at=late)


@pytest.mark.parametrize(
    ("slots", "length", "kept"),
    [(2, 600, 512), (2, 400, 256), (2, 200, 0), (1, 600, 512), (1, 400, 0)],
)
async def test_s89_a_request_that_ends_early_leaves_its_older_snapshot(
    slots: int, length: int, kept: int, inline: bool
) -> None:
    tokens = run(1, 600)
    async with large(slots, inline=inline) as here:
        request = await opened(here, tokens, 600)
        older, newer = request.try_snapshot_slot(256), request.try_snapshot_slot(512)
        assert older is not None and newer is not None and (older == newer) == (slots == 1)
        passed(here, request, length)
        await request.finish()
        await here.settled()
        match = await here.cache.match(tokens)
        assert (match.usable, match.kv_prefix) == (kept, length // GRID * GRID)
        stats = here.cache.stats()
        assert stats.state.tree == (kept > 0) and stats.state.granted == 0
        lease = await here.cache.acquire(tokens, owner="look")
        assert lease.state == {0: 0, 256: older, 512: newer}[kept]
        lease.release()


async def test_s88_a_checkpoint_hands_the_last_snapshot_over_and_two_go_on(inline: bool) -> None:
    tokens = run(1, 1100)
    async with large(2, inline=inline, states=4) as here:
        request = await opened(here, tokens[:600], 600)
        first, second = request.try_snapshot_slot(256), request.try_snapshot_slot(512)
        passed(here, request, 600)
        result = await request.checkpoint()
        assert result is not None and result.state == "adopted"
        assert request.boundary == 512 and here.cache.stats().state.tree == 1
        assert request.resources()["states"] == 1, "the working slot: no snapshot has a name now"
        request.extend(run(601, 190))
        await request.allocate(190)
        third = request.try_snapshot_slot(768)
        assert third not in (None, second)
        fourth = request.try_snapshot_slot(1024)
        assert fourth not in (None, second, third)
        assert request.resources()["states"] == 3
        request.abort()
        assert first is not None


async def test_snapshots_at_wanted_positions_are_all_published(inline: bool) -> None:
    async with house(inline=inline, snapshot_slots=2) as here:
        request = await here.cache.open_request(PROMPT, breakpoints=[PAGE])
        await request.allocate(len(PROMPT))
        await request.ready()
        slots = {at: request.try_snapshot_slot(at) for at in (PAGE, 2 * PAGE)}
        chain = digests(PROMPT)
        for at, slot in slots.items():
            assert slot is not None
            await compute(here, request, PROMPT, at, snapshot=(slot, at))
        await request.finish()
        await here.settled()
        for at, slot in slots.items():
            lease = await here.cache.acquire(PROMPT[:at], owner="look", whole=True)
            assert (lease.boundary, lease.state) == (at, slot)
            check_state(here.cache.pools, lease.state, chain, at)
            lease.release()


async def test_the_oldest_gives_way_where_no_other_slot_can_be_had(inline: bool) -> None:
    async with house(inline=inline, states=2, snapshot_slots=2) as here:
        request = await opened(here, PROMPT)
        first = request.try_snapshot_slot(PAGE)
        assert first is not None and request.try_snapshot_slot(PAGE) == first
        assert request.try_snapshot_slot(2 * PAGE) == first
        await compute(here, request, PROMPT, PAGE)
        await request.checkpoint(state=False)
        assert here.cache.stats().state.tree == 0, "it holds the state at the second position only"
        other = await here.cache.open_request(run(100, 9))
        assert other.try_snapshot_slot(PAGE) is None
        assert here.of_type(Refused)[-1].why == "no_slot"
        for one in (request, other):
            one.abort()


async def test_an_abandoned_pass_takes_along_what_it_may_have_overwritten(inline: bool) -> None:
    async with house(inline=inline, snapshot_slots=2) as here:
        request = await opened(here, PROMPT)
        slot = request.try_snapshot_slot(PAGE)
        assert slot is not None and request.try_snapshot_slot(2 * PAGE) is not None
        await compute(here, request, PROMPT, PAGE, snapshot=(slot, PAGE))
        step = here.cache.step([request])
        step.launched({request: 2 * PAGE})
        step.abandon()
        await here.settled()
        assert request.resources()["states"] == 2, "the working slot and the first snapshot"
        await request.finish()
        await here.settled()
        assert (await here.cache.match(PROMPT)).usable == PAGE


# -- states that lag -------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["checkpoint", "finish", "suspend"])
async def test_s92_a_state_that_lags_is_published_where_it_is_true(end: str, inline: bool) -> None:
    tokens = run(1, 40)
    async with house(inline=inline, page_size=1, state_chunk=1, pages=64) as here:
        request = await opened(here, tokens, 41)
        working = request.state_slot
        passed(here, request, 40, state_at=33)
        if end == "checkpoint":
            await request.checkpoint(state=True)
            request.abort()
        elif end == "finish":
            await request.finish()
        else:
            await request.suspend()
        await here.settled()
        assert (await here.cache.match(tokens[:33], whole=True)).usable == 33
        match = await here.cache.match(tokens, whole=True)
        assert (match.usable, match.kv_prefix) == (33, 40)
        lease = await here.cache.acquire(tokens, owner="look")
        assert (lease.state == working) == (end != "checkpoint"), "a copy, or the slot itself"
        lease.release()
        if end == "suspend":
            assert (await request.resume()).usable == 33
            request.abort()


async def test_a_request_whose_state_lags_goes_on(inline: bool) -> None:
    async with house(inline=inline, page_size=1, state_chunk=1, pages=64) as here:
        request = await opened(here, run(1, 40), 40)
        passed(here, request, 20, state_at=14)
        with pytest.raises(InvalidRequest):
            await request.fork()
        passed(here, request, 40, state_at=40)
        await request.finish()
        assert (await here.cache.match(run(1, 41))).usable == 40


@pytest.mark.parametrize(("end", "state_at"), [(4, 5), (4, -1)])
async def test_a_state_is_at_or_below_the_end(end: int, state_at: int, inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        step = here.cache.step([request])
        before = dump(here.cache)
        with pytest.raises(InvalidRequest):
            step.launched({request: end}, states_at={request: state_at})
        assert dump(here.cache) == before and step.state == "opened"
        with pytest.raises(InvalidRequest):
            step.launched({}, states_at={request: 0})
        step.abandon()
        request.abort()
