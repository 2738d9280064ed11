"""Known faults of systems like this one, tried at the runtime; the ids stand in the names."""

from __future__ import annotations

import asyncio
import contextvars
import gc

import pytest
from serving import PAGE, compute, dump, house, run, seed, serve

from phloem import Admission, CacheCrashed, InvalidRequest, NoRoom, StaleHandle
from phloem.actors.tree.audit import AuditFailed
from phloem.events import Event, Evicted, Granted, LeaseTaken, RequestOpened

PROMPT = run(1, 3 * PAGE + 1)


async def test_f005_f061_a_refused_admission_keeps_no_slot(inline: bool) -> None:
    async with house(inline=inline, pages=6, states=3) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        full = await cache.allocate(pages=4, owner="full")
        before = cache.stats()
        for _ in range(3):
            (answer,) = cache.nowait.admit_many([Admission(PROMPT, 2, 1, "r")])
            assert isinstance(answer, NoRoom)
            async with cache.request(PROMPT) as request:
                with pytest.raises(NoRoom):
                    await request.allocate(2 * PAGE, wait=False)
            stats = cache.stats()
            assert (stats.kv, stats.state, stats.tree.leases) == (before.kv, before.state, 0)
        assert (await cache.evict(pages=2)).pages == 2, "and no reference to what it had matched"
        cache.release(full)


async def test_f016_each_lease_is_ended_by_its_own_holder(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        lookup = await cache.acquire(PROMPT, owner="lookup")
        request = await cache.open_request(PROMPT)
        await request.allocate(2 * PAGE)
        here.gate.error = OSError("half way")
        with pytest.raises(Exception, match="half way"):
            await request.ready()
        here.gate.error = None
        request.abort()
        await here.until(lambda: cache.stats().tree.leases == 1)
        assert cache.stats().tree.pages_protected == 2
        lookup.release()
        with pytest.raises(StaleHandle):
            lookup.release()
        again = await cache.acquire(PROMPT, owner="again")
        assert cache.stats().tree.pages_protected == 2, "the next one is not lost"
        again.release()


async def test_f024_a_page_that_a_running_step_reads_is_not_handed_out(inline: bool) -> None:
    async with house(inline=inline, pages=4) as here:
        cache = here.cache
        request = await cache.open_request(PROMPT)
        await request.allocate(len(PROMPT))
        await request.ready()
        step = cache.step([request])
        step.launched({request: len(PROMPT)})  # scheduled, not run
        with pytest.raises(InvalidRequest, match="not over"):
            await request.rollback(PAGE)
        request.abort()
        with pytest.raises(NoRoom):
            await cache.allocate(pages=1, wait=False)
        step.end()
        grant = await cache.allocate(pages=4)
        cache.release(grant)


async def test_f060_no_attempt_of_an_aborted_request_leaves_a_record(inline: bool) -> None:
    async with house(inline=inline) as here:
        await seed(here, PROMPT[: 2 * PAGE])
        core = here.cache.core
        request = await here.cache.open_request(PROMPT)
        await request.allocate(2 * PAGE)
        here.gate.shut()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request.ready(), 0.01)
        assert len(core.tree_actor.operations) == 2
        request.abort()
        here.gate.open()
        await here.settled()
        await here.until(lambda: not core.tree_actor.operations)
        assert not core.tree_actor.operations and not core.requests
        assert not core.transfer.in_flight and not core.ledger.accounts


async def test_f076_waiting_for_room_costs_nothing_and_others_are_served(inline: bool) -> None:
    async with house(inline=inline, pages=4) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        lease = await cache.acquire(PROMPT, owner="pins")
        grant = await cache.allocate(pages=2, owner="holds")
        waits = asyncio.ensure_future(cache.allocate(pages=1, owner="waits", timeout=0.5))
        await asyncio.sleep(0.01)
        turns = cache.stats().turns
        await asyncio.sleep(0.02)
        assert cache.stats().turns == turns, "nobody spins"
        assert (await cache.match(PROMPT)).usable == 2 * PAGE
        with pytest.raises(NoRoom):
            await waits
        lease.release()
        cache.release(grant)


async def test_f077_prefixes_that_fill_the_pool_leave_room_to_compute(inline: bool) -> None:
    """Each of four has its prefix under lease, and all need a page: one gives way at a time."""
    async with house(inline=inline, pages=8, states=9) as here:
        for first in range(100, 500, 100):
            await seed(here, run(first, 2 * PAGE))
        assert here.cache.stats().kv.free == 0
        there = asyncio.Barrier(4)

        async def client(first: int) -> int:
            tokens = [*run(first, 2 * PAGE), 1, 2]
            gave_way = 0
            while True:
                try:
                    async with here.cache.request(tokens) as request:
                        if not gave_way:
                            await there.wait()  # all four have theirs
                        await request.allocate(len(tokens) - request.computed)
                        await request.ready()
                        while request.computed < len(tokens):
                            _, end = request.next_stop(PAGE)
                            await compute(here, request, tokens, end)
                        await request.finish()
                        return gave_way
                except NoRoom as error:
                    assert error.deadlock
                    gave_way += 1

        async with asyncio.timeout(60):
            gave_way = await asyncio.gather(*(client(first) for first in range(100, 500, 100)))
        assert 1 <= sum(gave_way) <= 12


async def test_f079_chunks_are_kept_when_there_is_no_state_to_spare(inline: bool) -> None:
    async with house(inline=inline, states=2) as here:
        tokens = run(1, 4 * PAGE)
        async with here.cache.request(tokens, breakpoints=[PAGE, 2 * PAGE, 3 * PAGE]) as request:
            await request.allocate(len(tokens))
            await request.ready()
            reached = []
            while request.computed < len(tokens):
                _, end = request.next_stop(PAGE)
                await compute(here, request, tokens, end)
                await request.checkpoint()
                reached.append(request.computed)
            await request.finish()
        assert reached == [PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE], "no chunk is computed twice"


async def test_f021_f088_a_checkpoint_evicts_what_it_needs_but_never_its_own(
    inline: bool,
) -> None:
    async with house(inline=inline, states=2) as here:
        await seed(here, run(500, PAGE))
        async with here.cache.request(PROMPT) as request:
            await request.allocate(len(PROMPT))
            await request.ready()
            await compute(here, request, PROMPT, 3 * PAGE)
            result = await request.checkpoint()
            assert result is not None and result.state == "adopted"
            assert [event.states for event in here.of_type(Evicted)] == [1]
            assert (await here.cache.match(PROMPT)).usable == 3 * PAGE


async def test_f108_completions_need_nobody_to_hold_them(inline: bool) -> None:
    async with house(inline=inline, pages=120, states=40) as here:
        steps = []
        for number in range(30):
            request = await here.cache.open_request(run(100 * number, 3 * PAGE))
            await request.allocate(3 * PAGE)
            ready = asyncio.ensure_future(request.ready())
            if number % 3:
                await ready
                steps.append(here.cache.step([request]))
            else:
                await asyncio.sleep(0)
                ready.cancel()
            request.abort()
            del request, ready
        for step in steps:
            gc.collect(0)
            step.abandon()
        del steps, step
        gc.collect()
        await here.until(lambda: here.cache.stats().kv.free == 120)
        assert here.cache.stats().kv.free == 120 and here.cache.stats().state.free == 40


async def test_f109_who_is_woken_finds_everything_done(inline: bool) -> None:
    """A copy ends in a thread; its waiter must not run before what the end means is true."""
    async with house(inline=inline) as here:
        core = here.cache.core
        await seed(here, PROMPT[: 2 * PAGE])

        async def one(name: str) -> None:
            async with here.cache.request(PROMPT, id=name) as request:
                await request.allocate(2 * PAGE)
                await request.ready()
                waiting = [r for op in core.tree_actor.operations.values() for r, _ in op.replies]
                assert not any(reply.done for reply in waiting)
                slots = {s for copy in core.transfer._tickets.values() for s in copy.states}
                assert request.state_slot not in slots, "its own copy has been heard of"
                assert not request._lease.has_state

        for _ in range(10):
            await asyncio.gather(*(one(f"r{number}") for number in range(5)))


async def test_f110_events_carry_the_ids_of_their_messages(inline: bool) -> None:
    bound: contextvars.ContextVar[str] = contextvars.ContextVar("bound", default="nobody")
    bound.set("r1")  # the runtime opens inside somebody's context
    async with house(inline=inline, pages=6) as here:

        async def client(name: str, first: int) -> None:
            bound.set(name)
            await serve(here, run(first, 2 * PAGE + 1), name=name)

        await asyncio.gather(client("r2", 100), client("r3", 200), client("r4", 300))
        owners: dict[type[Event], set[str]] = {}
        for event in here.events:
            owners.setdefault(type(event), set()).add(event.request)
        for kind in (RequestOpened, LeaseTaken, Granted):
            assert owners[kind] == {"r2", "r3", "r4"}, kind
        opened = {event.request: event.tokens for event in here.of_type(RequestOpened)}
        assert opened == {"r2": 9, "r3": 9, "r4": 9}
        for event in here.of_type(Granted):
            assert event.account > 0 and event.turn > 0


async def test_f111_the_loop_goes_on_while_everybody_waits(inline: bool) -> None:
    """Nobody opens the gate before the loop has come round, so a wait that blocks it never ends."""
    async with house(inline=inline, pages=8, states=3) as here:
        here.gate.shut()
        clients = [
            asyncio.ensure_future(serve(here, run(100 * n, PAGE * (1 + n % 3) + 1)))
            for n in range(6)
        ]
        for _ in range(100):
            await asyncio.sleep(0.0005)
        assert not any(client.done() for client in clients), "copies are held, room is short"
        here.gate.open()
        await asyncio.wait_for(asyncio.gather(*clients), 60)


async def test_f113_a_turn_that_was_rejected_changes_nothing(inline: bool) -> None:
    async with house(inline=inline, pages=8) as here:
        cache = here.cache
        await seed(here, PROMPT[: 2 * PAGE])
        before = dump(cache)
        for tokens in ([], [*PROMPT, -1]):
            with pytest.raises(InvalidRequest):
                await cache.open_request(tokens)
        async with cache.request(PROMPT + run(600, 400)) as request:
            with pytest.raises(NoRoom):
                await request.allocate(request.length - request.computed)
        after = dump(cache)
        stamps = [(*node[:5], None) for node in before["nodes"]]  # type: ignore[attr-defined]  # a list
        assert [(*node[:5], None) for node in after["nodes"]] == stamps  # type: ignore[attr-defined]  # a list
        for part in ("cells", "free", "accounts", "leases", "requests", "waiting"):
            assert after[part] == before[part]
        assert await serve(here, PROMPT) == 2 * PAGE


async def test_f001_a_late_clean_up_of_a_finished_request_does_nothing(inline: bool) -> None:
    """One token of look-ahead room; the step-end clean-up comes after the finish."""
    async with house(inline=inline, pages=8) as here:
        cache = here.cache
        request = await cache.open_request(PROMPT[:3])
        await request.allocate(2 * PAGE)
        await request.ready()
        step = cache.step([request])
        step.launched({request: 2})
        await request.finish()
        step.end()
        request.abort()
        await here.settled()
        before = dump(cache)
        request.abort()
        assert dump(cache) == before and cache.stats().kv.free == 8


async def test_audits_after_each_turn_stop_a_runtime_whose_tree_is_broken() -> None:
    async with house(audit_nodes=8, check_empty=False) as here:
        for first in (1, 100, 200):
            await serve(here, run(first, 3 * PAGE))
        broken = next(iter(here.cache.core.tree.radix))
        broken.hits += 1  # no invariant
        await here.cache.match(run(1, 3 * PAGE))
        broken.leases += 1
        with pytest.raises(CacheCrashed) as caught:
            for _ in range(20):
                await here.cache.match(run(1, 3 * PAGE))
        assert isinstance(caught.value.__cause__, AuditFailed)
