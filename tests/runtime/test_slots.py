"""Worked examples of slots: taken, kept by the cache, given back, never lost."""

from __future__ import annotations

import pytest
from serving import (
    PAGE,
    Row,
    blocked,
    check_state,
    compute,
    digests,
    forward,
    house,
    opened,
    read_state,
    run,
    seed,
)

from phloem import NoRoom
from phloem.actors.messages import Audit
from phloem.events import RequestEnded

PROMPT = run(1, 2 * PAGE)


async def test_s1_a_slot_that_is_given_back_is_free(inline: bool) -> None:
    async with house(inline=inline, states=20) as here:
        grant = await here.cache.allocate(states=1)
        assert here.cache.stats().state.free == 19
        here.cache.release(grant)
        assert here.cache.stats().state.free == 20


async def test_s2_a_slot_that_the_cache_keeps_is_not_free(inline: bool) -> None:
    async with house(inline=inline, states=20) as here:
        request = await opened(here, PROMPT, 2 * PAGE)
        await compute(here, request, PROMPT, 2 * PAGE)
        assert here.cache.stats().state.free == 19
        await request.allocate(0)
        assert here.cache.stats().state.free == 19, "no second slot for who has one"
        await request.finish()
        await here.settled()
        stats = here.cache.stats().state
        assert (stats.free, stats.tree, stats.granted) == (19, 1, 0)


async def test_s4_the_reserved_slot_is_never_handed_out(inline: bool) -> None:
    async with house(inline=inline, states=20, pages=4) as here:
        grant = await here.cache.allocate(states=20)
        assert sorted(grant.states) == run(1, 20)
        with pytest.raises(NoRoom):
            await here.cache.allocate(states=1, wait=False)
        assert here.cache.stats().state.granted == 20
        here.cache.release(grant)


async def test_s5_giving_back_nothing_changes_nothing(inline: bool) -> None:
    async with house(inline=inline) as here:
        before = here.cache.stats().kv
        here.cache.release(await here.cache.allocate())
        assert here.cache.stats().kv == before


async def test_s7_what_a_reservation_did_not_use_comes_back(inline: bool) -> None:
    async with house(inline=inline, states=20) as here:
        grant = await here.cache.allocate(pages=2, states=3)
        await here.cache.insert(PROMPT, pages=grant.pages, state=grant.states[0])
        here.cache.release(grant)
        assert here.cache.stats().state.free == 19


async def test_s16_the_private_copy_is_equal_and_leaves_its_source_as_it_was(inline: bool) -> None:
    async with house(inline=inline, states=20) as here:
        pools = here.cache.pools
        await seed(here, PROMPT)
        lease = await here.cache.acquire(PROMPT, owner="look", whole=True)
        before = read_state(pools, lease.state)
        request = await here.cache.open_request([*PROMPT, 99])
        await request.allocate(1)
        assert here.cache.stats().state.free == 18
        await request.ready()
        assert request.state_slot is not None and request.state_slot != lease.state
        assert read_state(pools, request.state_slot) == read_state(pools, lease.state) == before
        lease.release()
        request.abort()


async def test_s83_what_is_flagged_as_not_to_keep_is_not_found(inline: bool) -> None:
    thought = [*PROMPT, *run(50, PAGE)]
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, len(PROMPT))
        await request.checkpoint(state=True)
        request.extend(thought[len(PROMPT) :])
        await compute(here, request, thought, len(thought))
        await request.finish(publish="prompt")
        await here.settled()
        match = await here.cache.match(thought, whole=True)
        assert (match.usable, match.kv_prefix) == (len(PROMPT), len(PROMPT))
        assert here.of_type(RequestEnded)[-1].published == len(PROMPT)


async def test_s95_a_request_that_holds_a_state_only_gives_it_back(inline: bool) -> None:
    async with house(inline=inline, states=20) as here:
        request = await here.cache.open_request(PROMPT)
        await request.allocate(0)
        assert request.resources() == {"states": 1, "leases": 1}
        request.abort()
        assert here.cache.stats().state.free == 20 and not request.resources()


async def test_s185_frees_that_nobody_carries_out_are_noticed(inline: bool) -> None:
    async with house(inline=inline, check_empty=False) as here:
        await seed(here, PROMPT)
        gone, actions = here.cache.core.tree.evict(pages=2)
        assert gone.pages == 2 and actions
        with pytest.raises(AssertionError, match="tree and of the ledger differ"):
            here.cache.core.tree_actor.handlers[Audit](Audit())


async def test_s211_padded_rows_write_where_nothing_is_kept(inline: bool) -> None:
    """A captured graph runs rows that are nobody's: page 0 and slot 0 are theirs in every pass."""
    async with house(inline=inline, pages=12, states=5) as here:
        pools = here.cache.pools

        def pad() -> None:
            for layer in pools.kv.values():
                layer.k[0], layer.v[0] = -1, -1
            for named in pools.states.values():
                named["digest"][0] = -1

        for first in (1, 100, 1, 200, 100):
            prompt = run(first, 2 * PAGE + 1)
            request = await opened(here, prompt, len(prompt))
            assert 0 not in request.page_table() and request.state_slot != 0
            here.stream.run(pad)
            await compute(here, request, prompt, len(prompt))  # checks what it builds upon
            here.stream.run(pad)
            await request.finish()
        await here.settled()
        await here.cache.audit()


async def test_s211_a_snapshot_is_in_the_slot_chosen_for_its_pass(inline: bool) -> None:
    """Passes are launched ahead: when the first ends, another slot is the current one."""
    prompt = run(1, 3 * PAGE)
    async with house(inline=inline, snapshot_slots=2) as here:
        request = await here.cache.open_request(prompt, breakpoints=[PAGE, 2 * PAGE])
        await request.allocate(len(prompt))
        await request.ready()
        leave = blocked(here.stream)
        slots = []
        for end in (PAGE, 2 * PAGE):
            slot = request.try_snapshot_slot(end)
            assert slot is not None
            slots.append(slot)
            with here.cache.step([request], stream=here.stream) as step:
                row = Row.of(request, prompt, end, snapshot=(slot, end))
                work = here.stream.run(forward, here.cache.pools, [row])
                step.launched({request: end})
        assert slots[0] != slots[1]
        leave.mark_passed()
        await step.over()
        work.result()
        await request.checkpoint()
        for slot, end in zip(slots, (PAGE, 2 * PAGE), strict=True):
            lease = await here.cache.acquire(prompt[: end + 1], owner="look")
            assert (lease.boundary, lease.state) == (end, slot)
            check_state(here.cache.pools, slot, digests(prompt), end)
            lease.release()
        request.abort()
