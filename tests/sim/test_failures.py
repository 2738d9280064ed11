"""Known faults that hang on an order of events: tried under many, with every byte checked."""

from __future__ import annotations

import asyncio

import msgspec

from phloem import CacheConfig, CacheRuntime, Namespace, NoRoom, Request
from phloem.events import Granted
from phloem.runtime.simulation import (
    QWEN3_NEXT_80B,
    Chunk,
    Faults,
    SimModel,
    Simulation,
    TaggedTokens,
    explore,
    sim_layout,
)

CONFIG = CacheConfig(
    layout=sim_layout(), page_size=1, state_chunk=1, device_pages=12, device_states=6
)


class Bench:
    """A runtime, a model and a stream; passes are launched and waited for as a test says."""

    def __init__(self, sim: Simulation, cache: CacheRuntime) -> None:
        self.cache = cache
        self.model: SimModel = sim.model(cache, QWEN3_NEXT_80B)
        self.stream = sim.stream("compute")
        self.tokens: dict[str, TaggedTokens] = {}

    def known(self, request: Request, prompt: list[int]) -> None:
        self.tokens[request.id] = TaggedTokens(prompt, Namespace(), 1)

    def launch(self, *requests: Request, end: int) -> asyncio.Event:
        """One pass of all up to `end`; set when it is over."""
        over = asyncio.Event()
        with self.cache.step(requests, stream=self.stream) as step:
            chunks = [Chunk(r, self.tokens[r.id], r.computed, end) for r in requests]
            self.model.enqueue(chunks, self.stream)
            step.launched(dict.fromkeys(requests, end))
        step.fence.add_callback(over.set)
        return over


def test_f027_two_equal_prompts_admitted_in_one_tick_never_read_each_other_s_unwritten_pages() -> (
    None
):
    """Entries are made when what they name has been launched before whoever reads them."""

    async def scenario(sim: Simulation) -> int:
        async with sim.runtime(CONFIG) as cache:
            bench = Bench(sim, cache)

            async def client(name: str, prompt: list[int]) -> int:
                await asyncio.sleep(sim.rng.choice((0.0, 0.0, 0.003, 0.02)))
                async with cache.request(prompt, id=name) as request:
                    bench.known(request, prompt)
                    await request.allocate(len(prompt) - request.computed)
                    await request.ready()
                    while request.computed < len(prompt):
                        await request.advance()
                        over = bench.launch(request, end=request.next_stop(2)[1])
                        await request.checkpoint()
                        await over.wait()
                    await request.finish()
                    return request.match.usable

            hits = await asyncio.gather(client("r1", [1, 2, 3, 4]), client("r2", [1, 2, 3, 4, 9]))
            return sum(hits)

    shared = [outcome.result for outcome in explore(scenario, range(60), policy="task")]
    assert any(shared), "under some orders one of them continues from what the other published"


def test_f104_room_handed_over_at_the_tick_of_a_timeout_is_not_lost() -> None:
    """The next one gets it, or the pool; and the caller who gave up hears of no grant."""

    async def scenario(sim: Simulation) -> tuple[int, int]:
        config = msgspec.structs.replace(CONFIG, device_pages=4)
        async with sim.runtime(config) as cache:
            held = await cache.allocate(pages=4, owner="held")

            async def asks(name: str) -> bool:
                try:
                    grant = await cache.allocate(pages=4, owner=name, timeout=0.01)
                except NoRoom:
                    return False
                cache.release(grant)
                return True

            async def gives_back() -> None:
                await asyncio.sleep(0.01 + 1e-6 * sim.rng.randrange(-8, 4))
                cache.release(held)

            first, second, _ = await asyncio.gather(asks("one"), asks("two"), gives_back())
            await cache.audit()
            assert cache.stats().kv.free == 4
            granted = sim.log.counts[Granted.__name__] - 1
            return int(first) + int(second), granted

    outcomes = explore(
        scenario, range(300), faults=lambda rng: Faults(inline=rng.choice(("on", "off", "mixed")))
    )
    heard = {outcome.result for outcome in outcomes}
    assert {got for got, _ in heard} >= {0, 1}, "both sides of the tick are met"
    assert all(got <= granted for got, granted in heard)


def test_f020_f059_what_a_launched_pass_still_writes_is_nobody_else_s() -> None:
    """A request ends while its next pass runs; the pool is so small that others wait for it."""

    async def scenario(sim: Simulation) -> int:
        async with sim.runtime(CONFIG) as cache:
            bench = Bench(sim, cache)

            async def leaves(name: str, prompt: list[int], *, abort: bool) -> None:
                async with cache.request(prompt, id=name) as request:
                    bench.known(request, prompt)
                    await request.allocate(len(prompt) - request.computed)
                    await request.ready()
                    await bench.launch(request, end=4).wait()
                    bench.launch(request, end=6)
                    if not abort:
                        await request.finish()

            await asyncio.gather(*(leaves(f"r{n}", [n] * 6, abort=n % 2 == 0) for n in range(1, 6)))
            return sim.log.counts["Parked"]

    parked = [
        outcome.result
        for outcome in explore(
            scenario, range(60), faults=lambda rng: Faults(late=rng.random() < 0.5)
        )
    ]
    assert any(parked)
