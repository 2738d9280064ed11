"""Copies between the tiers that fail in part, hang, or come late; and a tier that is given up."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from serving import (
    ATTENTION,
    HYBRID,
    PAGE,
    House,
    Row,
    compute,
    forward,
    house,
    over,
    run,
    seed,
    too_long,
)
from streams.fake_device import FakeDriver

from phloem import ModelLayout, Request, TransferFailed
from phloem.actors.domain import Reply
from phloem.actors.tree.tiering import CLOSED_MS, FAILURES_MAX
from phloem.cuda_streams.clocks import LoopClock
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.dispatch import Fault
from phloem.cuda_streams.engine import CHANNELS, CopyEngine, Post, Ticket
from phloem.cuda_streams.virtual import Link, VirtualEngine
from phloem.errors import CopyFailed, EngineDead
from phloem.events import FellBack, RequestOpened, TierChanged

PROMPT = run(1, 3 * PAGE + 1)
END = 3 * PAGE
BOTH = pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])


def roomy(
    inline: bool, layout: ModelLayout = HYBRID, **options: Any
) -> AbstractAsyncContextManager[House]:
    return house(inline=inline, layout=layout, pages=24, states=12, host_bytes="1MiB", **options)


def breaks(here: House, fault: Any) -> None:
    here.cache._engine.fault = fault  # type: ignore[union-attr]  # of the fixture


def stands_nowhere(request: Request) -> bool:
    return not request.boundary


async def on_the_host(here: House, first: int = 1) -> list[int]:
    prompt = run(first, 3 * PAGE + 1)
    await seed(here, prompt[:END])
    await here.cache.evict(pages=99, states=99)
    await here.settled()
    return prompt


async def to_the_end(here: House, request: Request, prompt: list[int]) -> None:
    for _ in range(2):
        await request.allocate(len(prompt) - request.computed)
        await asyncio.wait_for(request.ready(), 60)
    await compute(here, request, prompt, len(prompt))
    await request.finish()


def virtual(post: Post, fault: Fault) -> CopyEngine:
    clock, links = LoopClock(asyncio.get_running_loop()), dict.fromkeys(CHANNELS, Link(10**12))
    return VirtualEngine(clock, links=links, post=post, fault=fault)


def device(post: Post, fault: Fault, *, batched: bool = True) -> CopyEngine:
    return DeviceEngine(post, FakeDriver(batched=batched), fault=fault)


ENGINES = {
    "threads": None,
    "virtual": virtual,
    "device, batched": device,
    "device, staged": partial(device, batched=False),
}


@BOTH
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.not_sim("a real engine") if "device" in name else ())
        for name in ENGINES
    ],
)
@pytest.mark.parametrize("at", [0, 1, -1])
async def test_what_came_of_a_load_that_failed_is_kept(
    layout: ModelLayout, inline: bool, engine: str, at: int
) -> None:
    """Two pages are whole in all layers: a model without states stands on them."""

    def fault(ticket: Ticket, layer: int) -> None:
        if ticket.batch.channel == "h2d" and layer == at % ticket.batch.layers:
            raise CopyFailed("a page cannot be read", rows_ok=2)

    made = ENGINES[engine]
    given = {} if made is None else {"engine": made}
    async with roomy(inline, layout, **given) as here:
        prompt = await on_the_host(here)
        breaks(here, fault)
        request = await here.cache.open_request(prompt)
        await request.allocate(1)
        good = 2 * PAGE if layout is ATTENTION else 0
        match = await request.ready()
        assert (match.usable, request.boundary) == (good, good)
        assert match.lost["tier_failed"] == END - good
        breaks(here, lambda *_: None)
        nodes = list(here.cache.core.tree.radix)
        assert sum(len(node.pages) for node in nodes) == 2, "KV that arrived is kept"
        await to_the_end(here, request, prompt)  # whose passes read all it stands on


async def test_who_stands_on_all_that_came_of_a_load_that_failed_has_not_fallen_back(
    inline: bool,
) -> None:
    """An event said that it had, by no tokens."""

    def fault(ticket: Ticket, layer: int) -> None:
        if ticket.batch.channel == "h2d" and layer == 1:
            raise CopyFailed("a page cannot be read", rows_ok=END // PAGE)

    async with roomy(inline, ATTENTION) as here:
        prompt = await on_the_host(here)
        breaks(here, fault)
        request = await here.cache.open_request(prompt)
        await request.allocate(1)
        match = await request.ready()
        assert (match.usable, request.boundary) == (END, END) and "tier_failed" not in match.lost
        assert not here.of_type(FellBack)
        await to_the_end(here, request, prompt)


@pytest.mark.parametrize("layout", [ATTENTION], ids=["attention"])
async def test_a_pass_on_a_load_that_fails_in_part_goes_on_from_what_came(
    layout: ModelLayout, inline: bool
) -> None:
    async with roomy(inline, layout) as here:
        gate = here.gate

        def fault(ticket: Ticket, layer: int) -> None:
            gate(ticket, layer)
            if ticket.batch.channel == "h2d" and layer == 1:
                raise CopyFailed("a page cannot be read", rows_ok=2)

        prompt = await on_the_host(here)
        gate.loads_up_to(1)  # not before the pass
        breaks(here, fault)
        request = await here.cache.open_request(prompt)
        await request.allocate(1)
        await request.wait_on(here.stream)
        with here.cache.step([request], stream=here.stream) as step:
            here.stream.run(lambda: None)
            step.launched({request: len(prompt)})
        gate.open()
        with pytest.raises(TransferFailed) as failed:
            await request.ready()
        assert failed.value.tokens_ok == request.computed == request.usable == 2 * PAGE
        breaks(here, lambda *_: None)
        await to_the_end(here, request, prompt)


@BOTH
async def test_nobody_waits_for_a_load_that_hangs(layout: ModelLayout, inline: bool) -> None:
    async with roomy(inline, layout) as here:
        prompt = await on_the_host(here)
        here.gate.hang("load")
        request = await here.cache.open_request(prompt)
        other = await here.cache.open_request(prompt)
        assert request.usable == other.usable == END
        targets = set(request.page_table())
        await too_long(here.cache, "load")
        await to_the_end(here, request, prompt)
        assert request.match.lost["tier_failed"] == END and request.usable == 0
        await to_the_end(here, other, prompt)
        await here.cache.audit()
        assert targets.isdisjoint(here.cache.core.ledger.kv.free_places), "still being written"
        assert here.cache.core.allocator.figures(0, 0)[0].in_flight == len(targets)
        here.gate.open()
        await here.settled()  # what comes late goes back
        assert targets & set(here.cache.core.ledger.kv.free_places)
        assert (await here.cache.match(prompt)).usable == END


async def test_who_looks_again_and_again_for_a_load_leaves_nothing_behind(inline: bool) -> None:
    async with roomy(inline) as here:
        prompt = await on_the_host(here)
        here.gate.hang("load")
        lease = await here.cache.acquire(prompt, owner="impatient")
        before = sum(type(one) is Reply for one in gc.get_objects())  # of other tests
        for _ in range(50):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lease.ready(), 0.001)
        gc.collect()
        assert sum(type(one) is Reply for one in gc.get_objects()) < before + 10
        here.gate.open()
        assert (await lease.ready()).usable == END
        lease.release()


@BOTH
async def test_passes_on_a_load_that_hangs_are_told(layout: ModelLayout, inline: bool) -> None:
    async with roomy(inline, layout) as here:
        prompt = await on_the_host(here)
        here.gate.hang("load")
        request = await here.cache.open_request(prompt)
        await request.allocate(1)
        await request.wait_on(here.stream)
        with here.cache.step([request], stream=here.stream) as step:
            row = Row.of(request, prompt, len(prompt))
            work = here.stream.run(forward, here.cache.pools, [row])
            step.launched({request: len(prompt)})
        await too_long(here.cache, "load")
        with pytest.raises(TransferFailed) as failed:
            await asyncio.wait_for(request.ready(), 60)
        assert failed.value.tokens_ok == 0
        here.gate.open()  # or its stream would never get to what comes after
        await over(step)
        work.exception(5)
        await to_the_end(here, request, prompt)


async def test_what_was_to_leave_behind_a_backup_that_hangs_stays(inline: bool) -> None:
    async with roomy(inline, write_policy="write_back") as here:
        await seed(here, PROMPT[:END])
        here.gate.hang("backup")
        evicted = await here.cache.evict(pages=3)
        assert (evicted.pages, evicted.pages_promised) == (0, 3)
        tree = here.cache.core.tree
        assert tree.figures().pages_leaving == 3
        while tree.figures().pages_leaving:
            await too_long(here.cache, "backup")
        figures = tree.figures()
        assert (figures.pages, figures.pages_leaving, figures.pages_protected) == (3, 0, 3)
        assert (await here.cache.match(PROMPT)).device == END, "it can be used meanwhile"
        here.gate.open()
        await here.settled()
        stats = here.cache.stats()
        assert stats.tree.pages_protected == 0 and stats.host_kv is not None
        assert stats.host_kv.free == stats.host_kv.size, "what came late went back"


async def test_who_waits_for_room_behind_a_backup_that_hangs_gets_other_room(
    inline: bool,
) -> None:
    async with roomy(inline, write_policy="write_back") as here:
        for first in range(FAILURES_MAX + 1):
            await seed(here, run(100 * first, 2 * PAGE))
        held = await here.cache.allocate(pages=here.cache.stats().kv.free)
        here.gate.hang("backup")
        # One backup after another takes too long, until the tier is closed: then no copy is made.
        waiting = asyncio.ensure_future(here.cache.allocate(pages=2))
        for _ in range(FAILURES_MAX):
            assert not waiting.done()
            await too_long(here.cache, "backup")
        grant = await asyncio.wait_for(waiting, 60)
        assert here.cache.stats().host_closed and here.cache.stats().tree.pages_protected
        here.gate.open()
        here.cache.release(grant)
        here.cache.release(held)


async def test_a_tier_that_fails_again_and_again_is_left_alone_for_a_while(inline: bool) -> None:
    async with roomy(inline) as here:
        prompts = [await on_the_host(here, 100 * n) for n in range(1, FAILURES_MAX + 2)]

        def fault(ticket: Ticket, layer: int) -> None:
            del layer
            if ticket.batch.channel == "h2d":
                raise RuntimeError("the link is down")

        breaks(here, fault)
        for prompt in prompts[:-1]:
            assert not here.cache.stats().host_closed
            request = await here.cache.open_request(prompt)
            await here.until(partial(stands_nowhere, request))
            request.abort()
            await here.settled()
        assert here.cache.stats().host_closed == f"{FAILURES_MAX} copies in a row failed"
        (told,) = here.of_type(TierChanged)
        assert (told.tier, told.why) == ("host", here.cache.stats().host_closed)

        match = await here.cache.match(prompts[-1])
        assert (match.usable, match.lost["tier_failed"]) == (0, END), "nothing is promised"
        fallen = len(here.of_type(FellBack))
        request = await here.cache.open_request(prompts[-1])
        assert (request.usable, request.boundary) == (0, 0)
        assert request.match.lost["tier_failed"] == END
        opened = here.of_type(RequestOpened)[-1]
        assert (opened.request, opened.lost["tier_failed"]) == (request.id, END)
        assert len(here.of_type(FellBack)) == fallen, "it never stood on what it cannot have"
        await to_the_end(here, request, prompts[-1])
        await here.settled()

        breaks(here, lambda *_: None)
        tiers = here.cache.core.tree_actor.tiers
        assert tiers is not None
        now = tiers._clock()
        tiers._clock = lambda: now + CLOSED_MS
        assert (await here.cache.match(prompts[0])).usable == END, "its time has come"
        request = await here.cache.open_request(prompts[0])
        assert request.usable == END
        assert not here.cache.stats().host_closed
        await to_the_end(here, request, prompts[0])
        assert here.of_type(TierChanged)[-1].why == ""
        tiers._clock = lambda: 0


async def test_a_lost_device_closes_the_tier_for_good(inline: bool) -> None:
    async with roomy(inline) as here:
        prompt = await on_the_host(here)

        def fault(ticket: Ticket, layer: int) -> None:
            del ticket, layer
            raise EngineDead("gone")

        breaks(here, fault)
        request = await here.cache.open_request(prompt)
        await here.until(lambda: bool(here.cache.stats().host_closed))
        assert here.cache.stats().host_closed == "the device is lost"
        await here.until(lambda: not request.boundary)
        request.abort()
        await here.settled()
        await here.cache.audit()
