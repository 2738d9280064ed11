"""A scheduler with a race, found by simulation.

    python examples/planted_race.py              # looks for it, and says how to repeat it
    python examples/planted_race.py --seed 17    # one seed; exit status 1 if it fails
    python examples/planted_race.py --fixed      # the same scheduler without the race

The scheduler enqueues a forward pass, lets other tasks run, and only then tells the cache by
opening a step. A client that hangs up at that moment has its pages freed under the running pass.
On an ordinary loop this takes a client that is cancelled within microseconds; here it takes some
seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from phloem import CacheConfig, CacheRuntime, Namespace, Request
from phloem.testing import (
    QWEN3_NEXT_80B,
    Chunk,
    Faults,
    SimModel,
    Simulation,
    SimulationFailed,
    TaggedTokens,
    explore,
    sim_layout,
)

CONFIG = CacheConfig(
    layout=sim_layout(), page_size=4, state_chunk=4, device_pages=64, device_states=8
)


class Scheduler:
    """One prompt after the other on one stream."""

    def __init__(self, sim: Simulation, cache: CacheRuntime, *, fixed: bool) -> None:
        self.cache = cache
        self.model: SimModel = sim.model(cache, QWEN3_NEXT_80B)
        self.stream = sim.stream("compute")
        self.fixed = fixed

    async def serve(self, prompt: list[int], name: str) -> None:
        """Compute a prompt in chunks of eight tokens and publish it."""
        tokens = TaggedTokens(prompt, Namespace(), CONFIG.page_size)
        async with self.cache.request(prompt, id=name) as request:
            await request.allocate(len(prompt) - request.computed)
            await request.ready()
            while request.computed < len(prompt):
                _, end = request.next_stop(8)
                await self.forward(request, tokens, end)
                await request.checkpoint()
            await request.finish()

    async def forward(self, request: Request, tokens: TaggedTokens, end: int) -> None:
        """One pass; the race is here."""
        chunk = Chunk(request, tokens, request.computed, end)
        if not self.fixed:
            self.model.enqueue([chunk], self.stream)
            await asyncio.sleep(0)  # "let others run": also the client, who hangs up
        with self.cache.step([request], stream=self.stream) as step:
            if self.fixed:
                self.model.enqueue([chunk], self.stream)
            step.launched({request: end})
        over = asyncio.Event()
        step.fence.add_callback(over.set)
        await over.wait()


async def scenario(sim: Simulation, *, fixed: bool) -> None:
    """Eight clients with a common prefix; some of them hang up."""
    async with sim.runtime(CONFIG) as cache:
        scheduler = Scheduler(sim, cache, fixed=fixed)
        clients = [
            sim.client(scheduler.serve([*range(12), *range(n, n + 12)], f"client-{n}"), f"c{n}")
            for n in range(8)
        ]
        await asyncio.gather(*clients, return_exceptions=True)


def hang_up(rng: random.Random) -> Faults:
    """The only fault of this example."""
    return Faults(cancel=0.02 * rng.random())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, help="this seed only")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--fixed", action="store_true", help="without the race")
    options = parser.parse_args()
    seeds = range(options.seeds) if options.seed is None else (options.seed,)
    try:
        explore(
            lambda sim: scenario(sim, fixed=options.fixed),
            seeds,
            faults=hang_up,
            repeat=lambda seed: f"python examples/planted_race.py --seed {seed}",
        )
    except SimulationFailed as failure:
        print(failure)
        return int(options.fixed or options.seed is not None)
    print(f"{len(seeds)} seeds without a violation")
    return int(not options.fixed and options.seed is None)  # there is a race to be found


if __name__ == "__main__":
    sys.exit(main())
