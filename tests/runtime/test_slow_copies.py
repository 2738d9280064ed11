"""Copies on the device that hang: whoever waits for one is told, and its memory is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from serving import PAGE, House, compute, house, opened, run, seed, too_long

from phloem import CopyFailed, TransferFailed
from phloem.cuda_streams.fences import Fence

pytestmark = pytest.mark.not_sim("what hangs here blocks threads")

PROMPT = run(1, 3 * PAGE + 1)
END = 3 * PAGE
T = TypeVar("T")


class Hang:
    """Copies whose labels begin so hang until they are let go."""

    def __init__(self, here: House, kind: str) -> None:
        self._gate = here.gate
        self._gate.hang(kind)

    def let_go(self) -> None:
        self._gate.open()


@asynccontextmanager
async def hanging(inline: bool, kind: str) -> AsyncIterator[tuple[House, Hang]]:
    """PROMPT is known; from now on copies of a kind hang. At the end all has come back."""
    async with house(inline=inline) as here:
        await seed(here, PROMPT[:END])
        hang = Hang(here, kind)
        try:
            yield here, hang
        finally:
            hang.let_go()
        await here.settled()
        assert not here.cache.core.tree_actor.operations


async def given_up(here: House, call: Coroutine[object, object, T], kind: str = "copy_") -> T:
    """What a call gives back, whose copy takes too long."""
    waiting = asyncio.ensure_future(call)
    await too_long(here.cache, kind)
    return await asyncio.wait_for(waiting, 60)


async def test_it_is_given_up_by_the_clock(inline: bool) -> None:
    """The one copy that there is, since on a busy machine others might take as long."""
    async with house(inline=inline, copy_timeout_s=0.05) as here:
        hang = Hang(here, "clear_state")
        async with here.cache.request(PROMPT) as request:
            await request.allocate(1)
            with pytest.raises(CopyFailed, match="takes too long"):
                await asyncio.wait_for(request.ready(), 60)
        hang.let_go()


@pytest.mark.parametrize("kind", ["copy_state", "clear_state"])
async def test_ready_does_not_wait_for_a_private_copy_that_hangs(inline: bool, kind: str) -> None:
    async with hanging(inline, kind) as (here, hang):
        prompt = PROMPT if kind == "copy_state" else run(100, 2 * PAGE)
        request = await here.cache.open_request(prompt)
        await request.allocate(len(prompt) - request.computed)
        slot = request.state_slot
        with pytest.raises(CopyFailed, match="takes too long"):
            await given_up(here, request.ready(), kind)
        assert request.state_slot is None, "it may be written at any time"
        await here.cache.audit()
        assert slot not in here.cache.core.ledger.state.free_places
        hang.let_go()
        await here.settled()
        assert slot in here.cache.core.ledger.state.free_places
        await request.allocate(len(prompt) - request.computed)
        await request.ready()
        await compute(here, request, prompt, len(prompt))
        await request.finish()


async def test_a_state_is_kept_for_who_needs_it_once_more(inline: bool) -> None:
    """The late end of the copy that was given up does not end the protection of its source."""
    async with hanging(inline, "copy_state") as (here, hang):
        request = await here.cache.open_request(PROMPT)
        await request.allocate(1)
        with pytest.raises(CopyFailed):
            await given_up(here, request.ready())
        hang.let_go()
        await here.settled()
        await here.cache.evict(states=99)
        await request.allocate(1)
        assert (await request.ready()).usable == END
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_what_it_reads_is_not_reused_before_its_end(inline: bool) -> None:
    """Nobody wants the data any more: not the request, which has gone, and not the tree."""
    async with hanging(inline, "copy_state") as (here, hang):
        async with here.cache.request(PROMPT) as request:
            await request.allocate(1)
            source = here.cache.core.tree.state_of(request._lease)
            with pytest.raises(CopyFailed):
                await given_up(here, request.ready())
        await here.cache.evict(pages=99, states=99)
        assert source not in here.cache.core.ledger.state.free_places
        await here.cache.audit()
        hang.let_go()
        await here.settled()
        await here.cache.evict(pages=99, states=99)
        assert source in here.cache.core.ledger.state.free_places


async def test_a_pass_on_a_copy_that_hangs_is_told(inline: bool) -> None:
    async with hanging(inline, "copy_state") as (here, hang):
        request = await here.cache.open_request(PROMPT)
        await request.allocate(1)
        landing = await request.landing()
        step = here.cache.step([request], stream=here.stream)
        work = here.stream.run(landing.wait, 3, here.stream)
        step.launched({request: len(PROMPT)})
        step.end()
        with pytest.raises(TransferFailed) as failed:
            await given_up(here, request.ready())
        assert failed.value.tokens_ok == END == request.computed and request.state_slot is None
        with pytest.raises(CopyFailed, match="given up"):
            await asyncio.wait_for(asyncio.wrap_future(work), 60)
        hang.let_go()
        await request.allocate(1)
        await request.ready()
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()


async def test_a_checkpoint_and_a_fork_do_not_wait(inline: bool) -> None:
    async with hanging(inline, "nothing") as (here, _):
        request = await opened(here, PROMPT)
        await compute(here, request, PROMPT, len(PROMPT))
        hang = Hang(here, "copy_")
        with pytest.raises(CopyFailed, match="takes too long"):
            await given_up(here, request.fork())
        hang.let_go()
        await here.settled()
        other = run(200, 2 * PAGE)
        second = await opened(here, other)
        await compute(here, second, other, PAGE)
        hang = Hang(here, "copy_")
        with pytest.raises(CopyFailed, match="takes too long"):
            await given_up(here, second.checkpoint(state=True))
        hang.let_go()
        second.abort()
        await request.finish()


async def test_a_copy_that_waits_for_a_long_pass_is_no_slow_copy(inline: bool) -> None:
    async with hanging(inline, "nothing") as (here, _):
        prompt = run(200, 2 * PAGE)
        request = await opened(here, prompt)
        go = Fence()
        before = here.stream.run(here.stream.hold, go)
        with here.cache.step([request], stream=here.stream) as step:
            here.stream.run(lambda: None)
            step.launched({request: PAGE})
        checkpoint = asyncio.create_task(request.checkpoint(state=True))
        await asyncio.sleep(0.1)
        assert not checkpoint.done()
        go.mark_passed()
        published = await asyncio.wait_for(checkpoint, 60)
        assert published is not None and published.state == "adopted" and before.done()
        request.abort()
        await here.cache.reset()  # what the pass wrote is nothing
