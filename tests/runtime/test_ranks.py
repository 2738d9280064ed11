"""One tree, two ranks: the whole runtime over an engine that every copy on both goes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from serving import HYBRID, PAGE, Row, forward, over, run
from streams.ranked import Fleet, Ranks, jitter, over_ranks, virtual_engines

from phloem import (
    CacheConfig,
    CacheRuntime,
    CopyFailed,
    DevicePools,
    EngineDead,
    ModelLayout,
    Request,
)
from phloem.cuda_streams.clocks import LoopClock
from phloem.cuda_streams.dispatch import Fault
from phloem.cuda_streams.engine import Post, Ticket
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.host import HostMemory
from phloem.cuda_streams.pools import HostPools
from phloem.cuda_streams.ranks import RankedEngine
from phloem.runtime.layout import LayerSpec

PROMPTS = [run(n, 4 * PAGE + 1) for n in (10, 20, 30, 40)]


@dataclass
class Pair:
    """A runtime over two ranks, and the model that runs on both."""

    cache: CacheRuntime
    devices: list[DevicePools]
    checkers: list[HazardChecker]
    faults: dict[int, Callable[[Ticket, int], None]] = field(default_factory=dict)  # by rank
    errors: list[AssertionError] = field(default_factory=list)
    ranks: Ranks | None = None
    fleet: Fleet | None = None

    async def compute(self, request: Request, tokens: Sequence[int], end: int) -> None:
        assert self.fleet is not None
        with self.cache.step([request], stream=self.fleet.head) as step:
            row = Row.of(request, tokens, end)

            def one_rank(rank: int) -> None:
                try:
                    forward(self.devices[rank], [row])
                except AssertionError as error:
                    self.errors.append(error)

            self.fleet.run([], one_rank)
            step.launched({request: end})
        await over(step)
        assert not self.errors, self.errors

    async def serve(self, tokens: Sequence[int]) -> int:
        """A request through its life; returns what it reused."""
        async with self.cache.request(tokens) as request:
            await self.fill(request, tokens)
            return request._tokens_reused

    async def fill(self, request: Request, tokens: Sequence[int]) -> None:
        await request.allocate(len(tokens) - request.computed)
        await request.ready()
        await request.allocate(len(tokens) - request.computed)  # if less came than was promised
        while request.computed < len(tokens):
            _, end = request.next_stop(2 * PAGE)
            await self.compute(request, tokens, end)
            await request.checkpoint(state=end % PAGE == 0 or None)
        await request.finish()

    async def settled(self) -> None:
        for _ in range(2000):
            stats = self.cache.stats()
            if not (stats.kv.parked or stats.state.parked or stats.copies_in_flight):
                return
            await asyncio.sleep(0.0005)
        raise AssertionError(f"it does not come to rest: {self.cache.stats()}")


def stages() -> list[ModelLayout]:
    """The layers of the model dealt out to two ranks: each has nothing of the other's."""
    half = len(HYBRID.layers) // 2
    nothing = [LayerSpec()] * half
    return [
        ModelLayout.from_layers([*HYBRID.layers[:half], *nothing]),
        ModelLayout.from_layers([*nothing, *HYBRID.layers[half:]]),
    ]


def no_memory(count: int, row_bytes: int) -> HostMemory:
    """For the head of a pipeline, which has pools of the whole model and none of its bytes."""
    return HostMemory(torch.empty((count, row_bytes), dtype=torch.uint8, device="meta"), count)


@asynccontextmanager
async def pair(
    *, seed: int = 0, pages: int = 12, inline: bool = True, pipeline: bool = False
) -> AsyncIterator[Pair]:
    config = CacheConfig(
        layout=HYBRID, page_size=PAGE, state_chunk=PAGE, device_pages=pages, device_states=6,
        host_bytes="1MiB", inline=inline,
    )  # fmt: skip
    devices = [
        DevicePools.allocate(one, pages=pages + 1, states=7, page_size=PAGE)
        for one in (stages() if pipeline else [HYBRID, HYBRID])
    ]
    head = devices[0]
    if pipeline:
        head = DevicePools.allocate(
            HYBRID, pages=pages + 1, states=7, page_size=PAGE, device="meta"
        )
    clock = LoopClock(asyncio.get_running_loop())

    def fault_of(rank: int) -> Fault:
        def fault(ticket: Ticket, layer: int) -> None:
            if rank in here.faults:
                here.faults[rank](ticket, layer)

        return fault

    def engine(post: Post) -> RankedEngine:
        own = here.cache.host_pools
        assert own is not None
        pages, states = own.kv_rows.count, own.state_rows.count
        hosts = [HostPools.allocate(one, pages=pages, states=states) for one in devices]
        if not pipeline:
            hosts[0] = own  # the head is the first rank
        shards = [
            (device.kv_rows, device.state_rows, host.kv_rows, host.state_rows)
            for device, host in zip(devices, hosts, strict=True)
        ]
        engines = virtual_engines(clock, here.checkers, faults=[fault_of(0), fault_of(1)])
        here.ranks = over_ranks(post, clock, shards, engines, delay_ns=jitter(seed, 20_000))
        here.fleet = Fleet(here.ranks, clock, jitter(seed + 1, 20_000))
        return here.ranks.head

    memory = no_memory if pipeline else None
    cache = CacheRuntime(config, pools=head, engine=engine, host_memory=memory)
    here = Pair(cache, devices, [HazardChecker(), HazardChecker()])
    async with cache:
        yield here
        assert [checker.found for checker in here.checkers] == [[], []]


@pytest.mark.sim
@pytest.mark.parametrize("pipeline", [False, True], ids=["tensor", "pipeline"])
async def test_f082_requests_are_served_from_both_tiers_of_two_ranks(
    pipeline: bool, inline: bool
) -> None:
    async with pair(inline=inline, pipeline=pipeline) as here:
        for _ in range(2):
            for prompt in [*PROMPTS, *PROMPTS[:2]]:
                await here.serve(prompt)
                await here.settled()
                await here.cache.audit()
        stats = here.cache.stats()
        assert stats.tokens_loaded > 0, "the device pool is too small for all of them"
        assert here.ranks is not None
        first, second = (wire.sent for wire in here.ranks.orders)
        assert first == second and len(first) > 20


@pytest.mark.sim
async def test_requests_side_by_side(inline: bool) -> None:
    async with pair(pages=24, inline=inline) as here:
        await asyncio.gather(*(here.serve(prompt) for prompt in (*PROMPTS[:3], *PROMPTS[:2])))
        await here.settled()
        await here.cache.audit()


@pytest.mark.sim
async def test_what_came_of_a_load_on_all_ranks_is_kept(inline: bool) -> None:
    """One rank has a page that cannot be read, the other another: what is before both is kept."""
    async with pair(inline=inline) as here:
        await here.serve(PROMPTS[0])
        await here.settled()
        await here.cache.evict(pages=99, states=99)
        await here.settled()
        for rank, spared in ((0, 3), (1, 2)):
            here.faults[rank] = _spares(spared)
        request = await here.cache.open_request(PROMPTS[0])
        assert request.match.host == 4 * PAGE
        await request.allocate(1)
        assert (await request.ready()).usable == 0, "the state is not there"
        assert sum(len(node.pages) for node in here.cache.core.tree.radix) == 2
        here.faults.clear()
        await here.fill(request, PROMPTS[0])


def _spares(rows: int) -> Callable[[Ticket, int], None]:
    def fault(ticket: Ticket, layer: int) -> None:
        if ticket.batch.channel == "h2d" and layer == 1:
            raise CopyFailed("a page cannot be read", rows_ok=rows)

    return fault


@pytest.mark.sim
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_load_that_fails_on_one_rank_is_computed_again_on_both(
    rank: int, inline: bool
) -> None:
    async with pair(inline=inline) as here:
        await here.serve(PROMPTS[0])
        await here.settled()
        await here.cache.evict(pages=99, states=99)

        def fault(ticket: Ticket, layer: int) -> None:
            if ticket.batch.channel == "h2d" and layer == 1:
                raise OSError("the link is down")

        here.faults[rank] = fault
        async with here.cache.request(PROMPTS[0]) as request:
            assert request.usable == 4 * PAGE
            await request.allocate(PAGE)
            await request.ready()
            assert request.usable == request.computed == 0
            here.faults.clear()
            await here.fill(request, PROMPTS[0])
        await here.settled()
        await here.cache.audit()
        assert (await here.cache.match(PROMPTS[0])).device == 4 * PAGE


@pytest.mark.sim
async def test_pages_come_back_when_the_slower_rank_has_left_them(inline: bool) -> None:
    async with pair(inline=inline) as here:
        assert here.ranks is not None and here.fleet is not None
        slow = here.ranks.answers[1]
        request = await here.cache.open_request(PROMPTS[0])
        await request.allocate(len(PROMPTS[0]))
        await request.ready()
        slow.held = True
        with here.cache.step([request], stream=here.fleet.head) as step:
            here.fleet.run([], lambda _: None)
            step.launched({request: PAGE})
        request.abort()
        await asyncio.sleep(0.01)
        assert here.cache.stats().kv.parked > 0, "rank 1 has not said that its pass is over"
        slow.release()
        await here.settled()
        assert not request.resources()
        await here.cache.audit()


@pytest.mark.sim
async def test_a_lost_rank_fails_what_waits_and_nothing_hangs(inline: bool) -> None:
    async with pair(inline=inline) as here:
        assert here.ranks is not None
        await here.serve(PROMPTS[0])
        await here.settled()
        here.ranks.answers[1].held = True
        request = await here.cache.open_request(PROMPTS[0])
        await request.allocate(1)
        waiting = asyncio.ensure_future(request.ready())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        here.ranks.head.lose(1, "its process has gone")
        with pytest.raises(EngineDead, match="rank 1"):
            await waiting
        request.abort()
        await here.settled()
        assert here.cache.is_open, "matches and explanations are still answered"
        await here.cache.audit()


@pytest.mark.sim
@pytest.mark.parametrize("pipeline", [False, True], ids=["tensor", "pipeline"])
async def test_a_pass_begins_before_its_load_has_landed_on_the_slower_rank(
    pipeline: bool, inline: bool
) -> None:
    async with pair(inline=inline, pipeline=pipeline) as here:
        assert here.ranks is not None and here.fleet is not None
        await here.serve(PROMPTS[0])
        await here.settled()
        await here.cache.evict(pages=99, states=99)
        request = await here.cache.open_request(PROMPTS[0])
        await request.allocate(PAGE)
        here.ranks.answers[1].held = True  # so the head cannot know that it has landed
        await request.wait_on(here.fleet.head)
        passed = asyncio.ensure_future(here.compute(request, PROMPTS[0], len(PROMPTS[0])))
        await asyncio.sleep(0.01)
        assert here.cache.stats().copies_in_flight == 2, "the load, and the copy of the state"
        assert not here.errors, "both ranks have run the pass, each on what it has itself"
        assert not passed.done()
        here.ranks.answers[1].release()
        await passed
        assert (await request.ready()).usable == 4 * PAGE
        await request.finish()
        await here.settled()
        await here.cache.audit()
