"""How to test a scheduler of your own: an ordinary asyncio program, under every order of events.

python examples/simulated_scheduler.py
"""

from __future__ import annotations

import asyncio
import sys

from phloem import CacheConfig
from phloem.testing import (
    QWEN3_NEXT_80B,
    Limits,
    Scale,
    Served,
    Server,
    Simulation,
    explore,
    sim_layout,
    swarm,
    workload,
)

CONFIG = CacheConfig(
    layout=sim_layout(), page_size=4, state_chunk=8, device_pages=96, device_states=6
)


async def scenario(sim: Simulation) -> list[Served]:
    """Users chat with a server that admits the longest cached prefix first.

    `Server` stands where your scheduler would: it uses nothing but phloem's public interface.
    """
    prompts = workload("chat", sim.seed, Scale(requests=10, piece=5, gap_s=0.01))
    async with sim.runtime(CONFIG) as cache:  # the real actors, in virtual time, watched
        model = sim.model(cache, QWEN3_NEXT_80B)
        limits = Limits(chunk=16, running=4)
        async with Server(
            cache, model, sim.stream("compute"), order="longest", limits=limits
        ) as server:
            clients = [sim.client(server.serve(prompt), prompt.name) for prompt in prompts]
            ended = await asyncio.gather(*clients, return_exceptions=True)
    return [answer for answer in ended if isinstance(answer, Served)]


def main() -> int:
    outcomes = explore(scenario, range(25), faults=swarm)
    served = [answer for outcome in outcomes for answer in outcome.result]
    finished = [answer for answer in served if answer.how == "finished"]
    reused = sum(answer.reused for answer in finished)
    print(
        f"{len(outcomes)} seeds, {sum(outcome.turns for outcome in outcomes)} turns, "
        f"{sum(outcome.virtual_s for outcome in outcomes):.0f} virtual s: "
        f"{len(finished)} of {len(served)} finished, {reused} tokens reused, nothing lost"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
