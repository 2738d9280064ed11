"""Loads while others wait for room: refused, since it is theirs first, and not for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from serving import ATTENTION, HYBRID, PAGE, House, compute, house, run, seed

from phloem import ModelLayout, Request, StaleHandle
from phloem.events import RequestOpened

PROMPT = run(1, 3 * PAGE + 1)
END = 3 * PAGE


@dataclass
class Crowd:
    """All room is held by one request, and another waits for it; PROMPT is on the host."""

    here: House
    holder: Request
    newcomer: Request
    waits: asyncio.Task[None]

    async def goes(self) -> None:
        self.holder.abort()
        await asyncio.wait([self.waits], timeout=60)
        self.newcomer.abort()
        await self.here.settled()

    def openings(self, request: Request) -> int:
        return sum(event.request == request.id for event in self.here.of_type(RequestOpened))


@asynccontextmanager
async def crowd(inline: bool, layout: ModelLayout = HYBRID) -> AsyncIterator[Crowd]:
    async with house(inline=inline, layout=layout, pages=8, states=4, host_bytes="1MiB") as here:
        await seed(here, PROMPT[:END])
        await here.cache.evict(pages=99, states=99)
        await here.settled()
        holder = await here.cache.open_request(run(100, 5))
        await holder.allocate(8 * PAGE)
        newcomer = await here.cache.open_request(run(200, 5))
        waits = asyncio.create_task(newcomer.allocate(8 * PAGE))
        await here.until(lambda: here.cache.core.ledger.waiting == 1)
        yield Crowd(here, holder, newcomer, waits)
        for request in (holder, newcomer):
            request.abort()
        await asyncio.wait([waits])


@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
async def test_a_load_that_was_refused_is_made_at_the_next_turn(
    layout: ModelLayout, inline: bool
) -> None:
    async with crowd(inline, layout) as crowded:
        request = await crowded.here.cache.open_request(PROMPT)
        assert request.usable == 0 and request.match.lost["refused"] == END
        assert (await request.advance()).usable == 0, "the other one still waits"
        assert crowded.openings(request) == 1
        await crowded.goes()
        match = await request.advance()
        assert (match.usable, match.device, request.usable, request.computed) == (END, 0, END, END)
        assert match.lost.get("refused", 0) == 0
        await request.allocate(1)
        assert (await request.ready()).usable == END
        assert request._tokens_reused == END and request._tokens_loaded == END
        await compute(crowded.here, request, PROMPT, len(PROMPT))
        await request.finish()
        assert crowded.here.cache.stats().tokens_loaded == END


async def test_who_has_room_of_his_own_is_not_moved(inline: bool) -> None:
    async with crowd(inline) as crowded:
        request = await crowded.here.cache.open_request(PROMPT)
        await crowded.goes()
        await request.allocate(len(PROMPT))
        assert (await request.advance()).usable == 0 and crowded.openings(request) == 1
        await request.ready()
        await compute(crowded.here, request, PROMPT, 2 * PAGE)
        await request.finish()


async def test_it_may_be_refused_again(inline: bool) -> None:
    async with crowd(inline) as crowded:
        request = await crowded.here.cache.open_request(PROMPT)
        crowded.waits.cancel()
        await asyncio.wait([crowded.waits])
        assert (await request.advance()).lost["refused"] == END, "all is held, and nobody waits"
        await crowded.goes()
        assert (await request.advance()).usable == END
        request.abort()


async def test_whoever_ends_it_meanwhile_has_it_ended(inline: bool) -> None:
    """Its load waits for what is leaving the device; somebody aborts the request."""
    async with house(
        inline=inline, pages=8, states=4, host_bytes="1MiB", write_policy="write_back"
    ) as here:
        await seed(here, PROMPT[:END])
        await here.cache.evict(pages=99, states=99)
        await here.settled()
        holder = await here.cache.open_request(run(100, 5))
        await holder.allocate(8 * PAGE)
        newcomer = await here.cache.open_request(run(200, 5))
        waits = asyncio.create_task(newcomer.allocate(8 * PAGE))
        await here.until(lambda: here.cache.core.ledger.waiting == 1)
        request = await here.cache.open_request(PROMPT)
        assert request.match.lost["refused"] == END
        waits.cancel()
        await asyncio.wait([waits])
        newcomer.abort()
        holder.abort()
        await seed(here, run(300, 4 * PAGE))
        await seed(here, run(400, 4 * PAGE))
        here.gate.shut()  # what makes room for the load does not come to an end
        asks = asyncio.create_task(request.advance())
        await asyncio.sleep(0.01)
        assert not asks.done()
        request.abort()
        here.gate.open()
        with pytest.raises(StaleHandle, match="is over"):
            await asks
        await here.settled()
        assert here.cache.stats().tree.leases == 0
