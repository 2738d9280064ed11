"""Requests at their end, through resets, and the level below them."""

from __future__ import annotations

import asyncio

import pytest
from serving import (
    ATTENTION,
    PAGE,
    compute,
    digests,
    house,
    opened,
    over,
    read_kv,
    read_state,
    run,
    seed,
    serve,
)

from phloem import InvalidRequest, OwnershipError, Placement, StaleHandle
from phloem.cuda_streams.fences import Fence
from phloem.events import Inserted, LeaseEnded, RequestEnded

PROMPT = run(1, 3 * PAGE + 1)


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("publish", "kv", "usable"), [("all", 4, 4), ("prompt", 3, 3), ("none", 0, 0)]
)
async def test_finish_publishes_what_it_is_told(
    publish: str, kv: int, usable: int, inline: bool
) -> None:
    async with house(inline=inline) as here:
        whole = PROMPT + run(70, 3)
        request = await opened(here, PROMPT)
        await compute(here, request, whole, 3 * PAGE)
        if publish != "none":
            await request.checkpoint()
        request.extend(run(70, 3))
        await compute(here, request, whole, len(whole))
        await request.finish(publish=publish)  # type: ignore[arg-type]  # one of the three
        await here.settled()
        match = await here.cache.match(whole, whole=True)
        assert (match.kv_prefix, match.usable) == (kv * PAGE, usable * PAGE)
        assert here.of_type(RequestEnded)[-1].published == kv * PAGE


async def test_without_reuse_of_decoded_tokens_only_the_prompt_is_published(inline: bool) -> None:
    async with house(inline=inline, reuse_decoded=False) as here:
        await serve(here, PROMPT[: 2 * PAGE], more=2 * PAGE)
        whole = PROMPT[: 2 * PAGE] + list(range(900, 900 + 2 * PAGE))
        assert (await here.cache.match(whole, whole=True)).kv_prefix == 2 * PAGE


async def test_a_cache_that_is_off_serves_and_keeps_nothing(inline: bool) -> None:
    async with house(inline=inline, enabled=False) as here:
        for _ in range(2):
            assert await serve(here, PROMPT, more=2) == 0
        await here.settled()
        assert here.cache.stats().kv.tree == here.cache.stats().state.tree == 0


async def test_a_model_that_writes_on_keeps_the_working_state(inline: bool) -> None:
    """Finish off the grid: KV alone is published, the slot comes back."""
    async with house(inline=inline, placement=Placement(end_of_prompt=False)) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        await here.settled()
        stats = here.cache.stats()
        assert stats.kv.tree == 3 and stats.state.tree == 0
        assert here.of_type(Inserted)[-1].state == "none"


async def test_f020_the_next_step_may_still_write_what_was_finished(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        request = await opened(here, PROMPT, room=5 * PAGE)
        request.extend(run(70, 3))  # up to the end of a page
        with cache.step([request]) as step:
            step.launched({request: 4 * PAGE})
        late = cache.step([request])
        late.launched({request: 4 * PAGE})  # runs ahead of what is accepted
        await request.finish()
        stats = cache.stats()
        assert stats.kv.parked == 1 and stats.kv.free == stats.kv.size - 5
        assert request.resources() == {"leases": 1, "steps": 1}
        late.end()
        await here.settled()
        await here.until(lambda: not request.resources())
        assert request.resources() == {} and cache.stats().kv.parked == 0


# -- reset -----------------------------------------------------------------------------------------


async def test_f003_f062_running_requests_survive_a_reset_and_give_all_back(
    inline: bool,
) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        request, aborted, idle = [await opened(here, PROMPT) for _ in range(3)]
        lease = await cache.acquire(PROMPT, owner="low")
        await compute(here, request, PROMPT, 3 * PAGE)
        for number in range(1, 4):
            assert await cache.reset() == number
            await cache.audit()
        assert (await cache.match(PROMPT)).kv_prefix == 0
        assert cache.stats().kv.tree == 2, "what leases still protect"
        assert await request.checkpoint() is None
        assert (await request.advance()).usable == 2 * PAGE
        await compute(here, request, PROMPT, len(PROMPT))  # reads the former generation's pages
        (await request.fork()).abort()  # it reads what the request reads
        with pytest.raises(StaleHandle):
            await cache.insert(PROMPT[: 2 * PAGE], pages=[], lease=lease)
        await request.finish()
        aborted.abort()
        lease.release()
        assert cache.stats().kv.tree == 2
        idle.abort()
        await here.settled()
        await here.until(lambda: cache.stats().kv.free == 32)
        assert cache.stats().kv.free == 32 and cache.stats().state.free == 8
        assert await serve(here, PROMPT) == 0


async def test_a_reset_while_the_state_of_a_checkpoint_is_copied(inline: bool) -> None:
    async with house(inline=inline) as here:
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, 3 * PAGE)
        here.gate.shut()
        checkpoint = asyncio.ensure_future(request.checkpoint())
        for _ in range(5):
            await asyncio.sleep(0)
        await here.cache.reset()
        here.gate.open()
        assert await asyncio.wait_for(checkpoint, 60) is None
        assert here.cache.stats().state.granted == 1, "the copy's slot came back"
        await request.finish()


async def test_a_reset_in_the_middle_of_a_step(inline: bool) -> None:
    async with house(inline=inline) as here:
        await seed(here, PROMPT[:PAGE])
        request = await opened(here, PROMPT)
        with here.cache.step([request], stream=here.stream) as step:
            work = here.stream.run(lambda: None)
            await here.cache.reset()
            step.launched({request: len(PROMPT)})
        await over(step)
        work.result(60)
        await request.finish()
        assert (await here.cache.match(PROMPT)).kv_prefix == 0


# -- leases and the lower level --------------------------------------------------------------------


async def test_an_insert_at_the_lower_level_moves_its_lease(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        lease = await cache.acquire(PROMPT, owner="low")
        grant = await cache.allocate(pages=3, states=1, owner="low")
        result = await cache.insert(
            PROMPT[: 3 * PAGE], pages=grant.pages, state=grant.states[0], lease=lease
        )
        assert result.adopted == ((0, 3 * PAGE),) and lease.boundary == 3 * PAGE
        assert lease.pages == grant.pages and lease.state == grant.states[0]
        cache.release(grant)  # nothing is left of it
        assert (await cache.evict(pages=3)).pages == 0
        lease.release()


async def test_an_insert_at_the_lower_level_may_end_its_lease(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        lease = await cache.acquire(PROMPT, owner="low")
        grant = await cache.allocate(pages=3, states=1, owner="low")
        tokens = PROMPT[: 3 * PAGE]
        with pytest.raises(InvalidRequest):
            await cache.insert(tokens, pages=grant.pages[:2], lease=lease, release=True)
        with pytest.raises(OwnershipError):
            await cache.insert(tokens, pages=[9, 10, 11], lease=lease, release=True)
        assert not lease.released, "what was refused has changed nothing"
        with pytest.raises(InvalidRequest, match="without a lease"):
            await cache.insert(tokens, pages=grant.pages, release=True)
        await cache.insert(
            tokens, pages=grant.pages, state=grant.states[0], lease=lease, release=True
        )
        assert lease.released and not cache.stats().tree.leases
        with pytest.raises(StaleHandle):
            lease.release()
        kinds = [type(event) for event in here.events if isinstance(event, Inserted | LeaseEnded)]
        assert kinds == [Inserted, LeaseEnded]
        cache.release(grant)
        assert (await cache.evict(pages=3)).pages == 3


async def test_what_a_step_still_writes_outlives_the_lease_that_its_insert_ends(
    inline: bool,
) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        request = await opened(here, run(50, PAGE + 1))
        lease = await cache.acquire(PROMPT, owner="low")
        grant = await cache.allocate(pages=3, owner="low")
        step = cache.step([request])
        await cache.insert(
            PROMPT[: 3 * PAGE], pages=grant.pages, lease=lease, after=step, release=True
        )
        assert lease.released and not lease.inner.live
        assert (await cache.evict(pages=3)).pages == 0
        step.abandon()
        await here.settled()
        assert (await cache.evict(pages=3)).pages == 3
        assert cache.stats().tree.leases == 1, "only the request's own"
        request.abort()


async def test_pages_that_a_caller_keeps_stay_in_the_grants_they_came_from(inline: bool) -> None:
    async with house(inline=inline, layout=ATTENTION) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        lease_free = cache.stats().kv.free
        first = await cache.allocate(pages=1, owner="low")
        second = await cache.allocate(pages=3, owner="low")
        pages = first.pages + second.pages
        result = await cache.insert(PROMPT[:PAGE] + run(2, PAGE), pages=pages[:2], swap=False)
        assert result.reused == PAGE and result.pages_changed == ()
        result = await cache.insert(PROMPT[: 3 * PAGE], pages=[pages[0], *pages[2:]], swap=False)
        assert result.reused == 2 * PAGE and result.adopted == ((2 * PAGE, 3 * PAGE),)
        await cache.audit()
        cache.release(second)
        cache.release(first)
        assert cache.stats().kv.free == lease_free - 2, "the two that the tree took"


async def test_offers_that_a_step_still_writes_are_parked_each_behind_its_own(
    inline: bool,
) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        request = await opened(here, PROMPT)
        grant = await cache.allocate(pages=4, owner="low")
        step = cache.step([request])
        tokens = PROMPT[: 2 * PAGE]
        await asyncio.gather(
            cache.insert(tokens, pages=grant.pages[:2], after=step),
            cache.insert(tokens, pages=grant.pages[2:]),
        )
        assert set(grant.pages[:2]).isdisjoint(cache.core.ledger.kv.free_places)
        step.abandon()
        await here.settled()
        assert set(grant.pages) <= set(cache.core.ledger.kv.free_places)
        request.abort()


async def test_a_request_reads_its_boundary_and_owns_the_rest(inline: bool) -> None:
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        request = await opened(here, PROMPT, room=4 * PAGE)
        assert request.resources() == {"pages": 2, "states": 1, "leases": 1}
        assert request.boundary == request.usable == 2 * PAGE and request.room == 4 * PAGE
        for values in read_kv(here.cache.pools, request.page_table(), 2 * PAGE):
            assert values == digests(PROMPT)[1 : 2 * PAGE + 1]
        assert request.state_slot is not None
        assert read_state(here.cache.pools, request.state_slot)[0][1] == 2 * PAGE
        request.abort()
        await here.until(lambda: not request.resources())
        assert request.resources() == {}


class PassesMeanwhile(Fence):
    """A thread passes it right after the first look at it."""

    @property
    def passed(self) -> bool:
        before = super().passed
        self.mark_passed()
        return before


@pytest.mark.parametrize("what", ["lease", "two fences", "grant", "step"])
async def test_a_fence_that_passes_while_one_looks_is_heard_of(what: str, inline: bool) -> None:
    """A lease was never released: its fence was pending when counted, and passed when asked."""
    async with house(inline=inline) as here:
        core = here.cache.core
        if what == "grant":
            core.release_grant(await here.cache.allocate(pages=2), (PassesMeanwhile(),))
        elif what == "step":
            await asyncio.wait_for(core.await_fences((PassesMeanwhile(), PassesMeanwhile())), 60)
        else:
            await seed(here, PROMPT[:PAGE])
            lease = (await here.cache.acquire(PROMPT, owner="low")).inner
            later = (PassesMeanwhile(), Fence()) if what == "two fences" else (PassesMeanwhile(),)
            core.release_lease_after(lease, later)
            core.domain.drain()
            assert lease.live == (what == "two fences")
            later[-1].mark_passed()
        core.domain.drain()
        assert here.nothing_owned() and not here.cache.stats().kv.parked
