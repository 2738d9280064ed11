"""A client that goes away at any await of its life leaves nothing behind.

Each life is run again and again: the first time it is cancelled at its first suspension, the next
time at its second, until it comes to its end. The cancellation arrives while the client waits, or
in the instant between an answer and the client's wake-up, or through a cancel scope.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import pytest
from serving import HYBRID, PAGE, House, compute, dump, house, over, rounds, run, seed, serve

from phloem import InvalidRequest, ModelLayout, NoRoom, RuntimeClosed, StaleHandle
from phloem.cuda_streams.fences import Fence
from phloem.events import RuntimeStopped
from phloem.runtime.layout import LayerSpec
from phloem.runtime.simulation import SimLoop

PROMPT = run(1, 3 * PAGE + 1)
Life = Callable[[House], Coroutine[Any, Any, None]]


class Counted:
    """Awaits a coroutine and tells of each suspension: its number, and what is waited for."""

    def __init__(
        self, inner: Coroutine[Any, Any, None], suspended: Callable[[int, object], None]
    ) -> None:
        self._inner = inner
        self._suspended = suspended
        self.count = 0

    def __await__(self) -> Generator[Any, Any, None]:
        error: BaseException | None = None
        while True:
            try:
                waits_for = self._inner.send(None) if error is None else self._inner.throw(error)
            except StopIteration:
                return
            error = None
            self.count += 1
            self._suspended(self.count, waits_for)
            try:
                yield waits_for
            except BaseException as thrown:  # noqa: BLE001  goes to whom it was meant for
                error = thrown


async def cancelled_at(life: Coroutine[Any, Any, None], number: int, how: str) -> bool:
    """Run `life`, cancelled at its suspension `number`; False when it has fewer of them."""
    scope = anyio.CancelScope()
    reached = False

    def suspended(count: int, waits_for: object) -> None:
        nonlocal reached
        if count != number:
            return
        reached = True
        task = asyncio.current_task()
        assert task is not None
        if how == "scope":
            asyncio.get_running_loop().call_soon(scope.cancel)
        elif how == "lost" and isinstance(waits_for, asyncio.Future):
            # Before the task's own wake-up, which it adds after this: the answer is on its way.
            waits_for.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)

    async def alone() -> None:
        with scope:
            await Counted(life, suspended)

    task = asyncio.ensure_future(alone())
    await asyncio.wait_for(asyncio.wait([task]), 60)
    assert task.done(), f"hangs after a cancellation at {number}"
    if not task.cancelled():
        task.result()
    return reached


async def every_suspension(
    life: Life, how: str, inline: bool, at_least: int, **options: Any
) -> None:
    """Cancel `life` at each of its suspensions, each time in the same house."""
    async with house(inline=inline, **options) as here:
        await seed(here, run(1, PAGE))
        number = 1
        while await cancelled_at(life(here), number, how):
            await here.settled()
            await here.until(here.nothing_owned)
            assert here.nothing_owned(), (number, here.cache.stats())
            await here.cache.audit()
            # The life starts from the same tree each time: its first page, with its state.
            await here.cache.evict(pages=99, states=99)
            await seed(here, run(1, PAGE))
            number += 1
        # Where threads copy, what is over before it is awaited suspends nobody.
        enough = number > at_least or not isinstance(asyncio.get_running_loop(), SimLoop)
        assert enough, f"only {number - 1} suspensions: this tries too little"


HOW = pytest.mark.parametrize("how", ["waiting", "lost", "scope"])


async def plain(here: House) -> None:
    """Open, allocate, ready, advance, steps, checkpoints, a token of output, finish."""
    await serve(here, PROMPT, chunk=PAGE, more=2)


async def rolled_back(here: House) -> None:
    """A snapshot by the kernel, drafts, and back to the snapshot."""
    whole = PROMPT[: 2 * PAGE] + run(70, 3)
    async with here.cache.request(PROMPT[: 2 * PAGE]) as request:
        await request.allocate(len(whole) - request.computed)
        await request.ready()
        slot = request.try_snapshot_slot(2 * PAGE)
        assert slot is not None
        await compute(here, request, whole, 2 * PAGE, snapshot=(slot, 2 * PAGE))
        request.extend(whole[2 * PAGE :])
        await compute(here, request, whole, len(whole))
        await request.rollback(2 * PAGE)
        whole = PROMPT[: 2 * PAGE] + run(80, 2)
        request.extend(whole[2 * PAGE :])
        await compute(here, request, whole, len(whole))
        await request.finish()


async def forked(here: House) -> None:
    """Two continuations of one prompt, the fork with its own page and state."""
    async with here.cache.request(PROMPT[: 2 * PAGE + 2]) as request:
        await request.allocate(3 * PAGE)
        await request.ready()
        await compute(here, request, PROMPT, 2 * PAGE + 2)
        twin = await request.fork()
        try:
            whole = PROMPT[: 2 * PAGE + 2] + run(60, 1)
            twin.extend(run(60, 1))
            await compute(here, twin, whole, len(whole))
            await twin.finish()
        finally:
            twin.abort()
        await request.finish()


async def two_in_one_pass(here: House) -> None:
    """A leaving client abandons the pass, which also holds the other request."""
    cache = here.cache
    async with cache.request(PROMPT) as one, cache.request(run(40, PAGE)) as two:
        for request in (one, two):
            await request.allocate(request.length - request.computed)
            await request.ready()
        with cache.step([one, two], stream=here.stream) as step:
            await here.stream.call(lambda: None)
            step.launched({one: one.length, two: two.length})
            await here.stream.call(lambda: None)
        await over(step)
        await asyncio.gather(one.finish(publish="none"), two.finish(publish="none"))


async def lower_level(here: House) -> None:
    """Acquire, allocate, insert, evict, match, release."""
    cache = here.cache
    await cache.match(PROMPT)
    lease = await cache.acquire(run(1, 2 * PAGE), owner="low", whole=True)
    try:
        grant = await cache.allocate(pages=2, states=1, owner="low")
        try:
            start = lease.boundary // PAGE
            await cache.insert(run(1, 2 * PAGE), pages=grant.pages[: 2 - start], lease=lease)
            await cache.evict(pages=1)
        finally:
            cache.release(grant)
    finally:
        lease.release()


async def insert_releases(here: House) -> None:
    """An insert that gives its lease back; the block does it if that did not happen."""
    cache = here.cache
    async with await cache.acquire(run(1, 2 * PAGE), owner="low", whole=True) as lease:
        pages = 2 - lease.boundary // PAGE
        grant = await cache.allocate(pages=pages, states=1, owner="low")
        try:
            await cache.insert(
                run(1, 2 * PAGE),
                pages=grant.pages,
                lease=lease,
                state=grant.states[0],
                release=True,
            )
            assert lease.released
        finally:
            cache.release(grant)


async def waits_for_room(here: House) -> None:
    """Allocates what another holds, who gives it back a little later."""
    cache = here.cache
    other = cache.nowait.allocate(pages=20, owner="other")
    later = asyncio.get_running_loop().call_later(0.005, cache.release, other)
    try:
        async with cache.request(run(200, 20 * PAGE)) as request:
            await request.allocate(20 * PAGE, timeout=60)
            await request.ready()
    finally:
        later.cancel()
        if not other.released:
            cache.release(other)


LIVES = {
    "plain": (plain, 5),
    "rolled_back": (rolled_back, 4),
    "forked": (forked, 4),
    "two_in_one_pass": (two_in_one_pass, 3),
    "lower_level": (lower_level, 0),
    "insert_releases": (insert_releases, 0),
    "waits_for_room": (waits_for_room, 1),
}


@HOW
@pytest.mark.parametrize("life", LIVES)
async def test_f058_f104_a_client_cancelled_at_any_await_leaves_nothing(
    life: str, how: str, inline: bool
) -> None:
    lives, at_least = LIVES[life]
    await every_suspension(lives, how, inline, at_least)


async def test_many_clients_cancelled_at_random_moments(inline: bool) -> None:
    async with house(inline=inline, pages=24, states=7) as here:
        for offset in range(12):
            tasks = [
                asyncio.ensure_future(serve(here, run(1, PAGE * (1 + n % 4) + n), more=2))
                for n in range(6)
            ]
            for _ in range(3 * offset):
                await asyncio.sleep(0)
            for task in tasks[offset % 2 :: 2]:
                task.cancel()
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            for answer in done:
                assert isinstance(answer, int | asyncio.CancelledError), answer


# -- what is still in motion -----------------------------------------------------------------------


async def test_f020_pages_of_a_running_model_are_not_reused_before_it_is_done(
    inline: bool,
) -> None:
    async with house(inline=inline, pages=4, states=2) as here:
        cache, stream = here.cache, here.stream
        running, go = threading.Event(), Fence()

        def model() -> None:
            running.set()
            stream.hold(go)

        async def client() -> None:
            async with cache.request(PROMPT) as request:
                await request.allocate(len(PROMPT))
                await request.ready()
                pages.extend(request.page_table())
                with cache.step([request], stream=stream) as step:
                    work = stream.call(model)
                    step.launched({request: len(PROMPT)})
                    await work
                await request.finish()

        pages: list[int] = []
        task = asyncio.ensure_future(client())
        await here.until(running.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = cache.stats()
        assert stats.kv.parked == len(pages) == 4 and stats.state.parked == 1
        with pytest.raises(NoRoom) as refused:
            await cache.allocate(pages=1, wait=False)
        assert refused.value.figures[0].parked == 4
        waiting = asyncio.ensure_future(cache.allocate(pages=4, states=2))
        await rounds(10)
        assert not waiting.done()
        go.mark_passed()
        grant = await asyncio.wait_for(waiting, 60)
        assert sorted(grant.pages) == sorted(pages)
        cache.release(grant)


async def test_f059_a_slot_that_a_copy_writes_is_not_reused_before_the_copy_ends(
    inline: bool,
) -> None:
    async with house(inline=inline, states=1) as here:
        cache = here.cache
        here.gate.shut()
        async with cache.request(PROMPT) as request:
            await request.allocate(len(PROMPT))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request.ready(), 0.02)
        assert cache.stats().state.parked == 1
        with pytest.raises(NoRoom):
            await cache.allocate(states=1, wait=False)
        here.gate.open()
        grant = await cache.allocate(states=1, timeout=60)
        cache.release(grant)


@pytest.mark.not_sim("a thread ends a copy while the loop is busy")
async def test_f059_a_copy_that_has_ended_keeps_nothing_waiting(inline: bool) -> None:
    async with house(inline=inline, states=1) as here:
        cache = here.cache
        async with cache.request(PROMPT) as request:
            await request.allocate(len(PROMPT))
            here.gate.shut()
            ready = asyncio.ensure_future(request.ready())
            await asyncio.sleep(0)
            cache.core.domain.drain()
            here.gate.open()
            for copy in list(cache.core.transfer._tickets.values()):
                while not copy.tickets[0][1].done:  # ended; the loop has not heard of it
                    threading.Event().wait(0.001)
            ready.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ready
        await here.settled()
        assert cache.stats().state.free == 1


async def test_a_lease_outlives_the_copy_that_reads_under_it(inline: bool) -> None:
    async with house(inline=inline, states=3) as here:
        cache = here.cache
        await seed(here, run(1, PAGE))
        here.gate.shut()
        async with cache.request(PROMPT) as request:
            await request.allocate(len(PROMPT) - request.computed)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request.ready(), 0.02)
        assert cache.stats().tree.states_protected == 1, "the copy still reads it"
        assert (await cache.evict(pages=9, states=9)).states == 0
        here.gate.open()
        await here.settled()
        assert cache.stats().tree.states_protected == 0


@pytest.mark.sim(seeds=1, policy="fifo")  # it counts the rounds of the loop
@pytest.mark.parametrize("call", ["ready", "checkpoint"])
async def test_a_copy_that_was_queued_when_its_client_left_touches_nothing_of_others(
    call: str,
) -> None:
    """Queued: the message is on its way, no copy is in flight yet, and the client goes."""
    async with house(inline=False, states=3) as here:
        cache = here.cache
        await seed(here, run(1, PAGE))
        async with cache.request(PROMPT, breakpoints=[2 * PAGE]) as request:
            await request.allocate(len(PROMPT) - request.computed)
            if call == "checkpoint":
                await request.ready()
                await compute(here, request, PROMPT, 2 * PAGE)
            here.gate.shut()
            work: Awaitable[object] = request.ready() if call == "ready" else request.checkpoint()
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)  # the message is queued
            assert cache.stats().copies_in_flight == 0 and not task.done()
            task.cancel()
            request.abort()
            touched = {
                state for copy in cache.core.transfer._tickets.values() for state in copy.states
            }
            free = set(cache.core.ledger.state.free_places)
            assert not touched & free, "a copy in flight writes a slot that is free"
            with pytest.raises(asyncio.CancelledError):
                await task


# -- leaving in other ways -------------------------------------------------------------------------


async def test_abort_is_legal_at_any_time_and_idempotent(inline: bool) -> None:
    async with house(inline=inline) as here:
        async with here.cache.request(PROMPT) as request:
            request.abort()
            before = dump(here.cache)
            request.abort()
            assert dump(here.cache) == before
            assert request.status == "aborted"
            with pytest.raises(StaleHandle):
                await request.allocate(1)
        await serve(here, PROMPT)


async def test_a_request_aborted_while_it_waits_for_room_gets_none(inline: bool) -> None:
    async with house(inline=inline, pages=8) as here:
        cache = here.cache
        other = await cache.allocate(pages=8, owner="other")
        request = await cache.open_request(PROMPT)
        waits = asyncio.ensure_future(request.allocate(len(PROMPT)))
        await rounds(5)
        request.abort()
        with pytest.raises(StaleHandle):
            await asyncio.wait_for(waits, 60)
        assert cache.stats().waiting == 0
        cache.release(other)
        assert request.status == "aborted"


async def test_a_request_aborted_at_the_hand_over_gives_the_grant_back(inline: bool) -> None:
    async with house(inline=inline, pages=8) as here:
        cache = here.cache
        other = await cache.allocate(pages=8, owner="other")
        request = await cache.open_request(PROMPT)
        waits = asyncio.ensure_future(request.allocate(len(PROMPT)))
        await rounds(5)
        cache.release(other)  # granted; the client has not run yet
        request.abort()
        with pytest.raises(StaleHandle):
            await asyncio.wait_for(waits, 60)


@pytest.mark.parametrize("call", ["ready", "rollback", "checkpoint", "fork"])
async def test_a_request_aborted_by_another_task_stays_so(call: str, inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        async with cache.request(PROMPT[: 2 * PAGE], breakpoints=[2 * PAGE]) as request:
            await request.allocate(3 * PAGE)
            if call != "ready":
                await request.ready()
                slot = request.try_snapshot_slot(2 * PAGE)
                assert slot is not None
                await compute(here, request, PROMPT, 2 * PAGE, snapshot=(slot, 2 * PAGE))
            if call == "rollback":
                request.extend(run(70, 2))
                await compute(here, request, PROMPT[: 2 * PAGE] + run(70, 2), 2 * PAGE + 2)
            here.gate.shut()
            works: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
                "ready": request.ready,
                "rollback": lambda: request.rollback(2 * PAGE),
                "checkpoint": lambda: request.checkpoint(state=True),
                "fork": request.fork,
            }
            if call == "checkpoint":
                request._holding.drop_snapshots(())
            task = asyncio.ensure_future(works[call]())
            await rounds(5)
            assert not task.done()
            request.abort()
            here.gate.open()
            with pytest.raises(StaleHandle):
                await asyncio.wait_for(task, 60)
            assert request.status == "aborted"
        await here.until(lambda: not request.resources())
        assert not request.resources()


async def test_closing_tells_everybody_who_waits(inline: bool) -> None:
    async with house(inline=inline, pages=4, check_empty=False) as here:
        cache = here.cache
        await cache.allocate(pages=4, owner="holder")
        request = await cache.open_request(PROMPT)
        waiting = [
            asyncio.ensure_future(request.allocate(len(PROMPT))),
            asyncio.ensure_future(cache.allocate(pages=2, owner="two")),
        ]
        await rounds(5)
        await cache.close()
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, RuntimeClosed | StaleHandle), answer


async def test_f112_closing_has_a_deadline_and_names_what_is_owned(inline: bool) -> None:
    async with house(inline=inline, check_empty=False, close_timeout_s=0.05) as here:
        cache = here.cache
        await cache.allocate(pages=2, states=1, owner="forgot")
        lease = await cache.acquire(PROMPT, owner="forgot too")
        request = await cache.open_request(PROMPT)
        await request.allocate(len(PROMPT))
        here.gate.shut()
        ready = asyncio.ensure_future(request.ready())
        await rounds(3)
        closing = asyncio.ensure_future(cache.close())
        await asyncio.wait_for(closing, 60)
        here.gate.open()
        with pytest.raises((RuntimeClosed, StaleHandle)):
            await ready
        (last,) = here.of_type(RuntimeStopped)
        assert "forgot too" in last.leases and last.pages >= 2 and last.states >= 1
        lease.release()


async def test_a_cancelled_closer_closes_all_the_same(inline: bool) -> None:
    async with house(inline=inline, check_empty=False) as here:
        cache = here.cache
        request = await cache.open_request(PROMPT)
        await request.allocate(len(PROMPT))
        here.gate.shut()
        ready = asyncio.ensure_future(request.ready())
        await rounds(3)
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.01, scope.cancel)
            asyncio.get_running_loop().call_later(0.03, here.gate.open)
            await cache.close()
        with pytest.raises((RuntimeClosed, StaleHandle)):
            await ready
        with pytest.raises(RuntimeClosed):
            await cache.match(PROMPT)


async def test_f106_a_runtime_may_be_closed_by_another_task_than_opened_it(inline: bool) -> None:
    async with house(inline=inline, check_empty=False) as here:
        cache = here.cache
        await serve(here, PROMPT)
        pending = asyncio.ensure_future(cache.allocate(pages=33, owner="more than there is"))
        await asyncio.ensure_future(cache.close())
        await asyncio.ensure_future(cache.close())
        with pytest.raises((NoRoom, RuntimeClosed)):
            await pending


async def test_f008_a_request_that_publishes_nothing_goes_on_and_gives_all_back(
    inline: bool,
) -> None:
    async with house(inline=inline, pages=4) as here:
        tokens = run(1, 2 * PAGE)
        async with here.cache.request(tokens) as request:
            for count in (1, 2):
                await request.allocate(count * PAGE - request.computed)
                await request.ready()
                await compute(here, request, tokens, count * PAGE)
                assert here.cache.stats().kv.granted == count
            await request.finish(publish="none")
        await here.settled()
        stats = here.cache.stats()
        assert stats.kv.free == 4 and stats.tree.nodes == 0


async def test_an_engine_that_fails_is_no_crash(inline: bool) -> None:
    async with house(inline=inline) as here:
        here.gate.error = OSError("a bad copy")
        async with here.cache.request(PROMPT) as request:
            await request.allocate(len(PROMPT))
            with pytest.raises(Exception, match="a bad copy"):
                await request.ready()
            assert request.status == "open"
            with pytest.raises(InvalidRequest), here.cache.step([request]) as step:
                step.launched({request: 4})
            here.gate.error = None
            await request.ready()
            await compute(here, request, PROMPT, 4)
        await serve(here, PROMPT)


async def test_a_model_that_keeps_only_states(inline: bool) -> None:
    layout = ModelLayout.from_layers([LayerSpec(states=HYBRID.layers[0].states)])
    async with house(inline=inline, layout=layout, pages=8) as here:
        assert await serve(here, run(1, 9)) == 0
        assert await serve(here, run(1, 9)) == 8
