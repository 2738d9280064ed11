"""Simulation: the real actors on a seeded loop in virtual time, with faults and checkers.

Write a scenario as an ordinary asyncio program and let it run under every order of events that the
seed can bring about:

    from phloem.testing import Simulation, explore, swarm

    async def scenario(sim: Simulation) -> None:
        async with sim.runtime(config) as cache:
            ...

    explore(scenario, range(500), faults=swarm)

The same seed gives the same run, event for event, in every process. What is checked is listed in
`watch`, what can go wrong in `faults`, what of the API is made use of in `uses`. `phloem.testing`
has the same names.
"""

from phloem.runtime.simulation.campaign import Fixed, Plan, plan_for, play, run_plan, shorten
from phloem.runtime.simulation.draws import Draws, NotDeterministic
from phloem.runtime.simulation.faults import FAULTS, Faults, InjectedFault, swarm
from phloem.runtime.simulation.jobs import ORDERS, Limits, Preempted, Served
from phloem.runtime.simulation.loop import POLICIES, Policy, SimDeadlock, SimLivelock, SimLoop
from phloem.runtime.simulation.model import (
    QWEN3_NEXT_80B,
    Chunk,
    CostModel,
    SimModel,
    Violation,
    sim_layout,
)
from phloem.runtime.simulation.production import PRODUCTION_FAULTS, production
from phloem.runtime.simulation.schedulers import Server
from phloem.runtime.simulation.tags import TaggedTokens
from phloem.runtime.simulation.uses import USES
from phloem.runtime.simulation.watch import EventLog, Watch
from phloem.runtime.simulation.workloads import WORKLOADS, Prompt, Scale, of_trace, workload
from phloem.runtime.simulation.world import (
    Outcome,
    Simulation,
    SimulationFailed,
    check_determinism,
    explore,
    sim_run,
    simulate,
)

__all__ = [
    # the loop
    "SimLoop", "Policy", "POLICIES", "SimDeadlock", "SimLivelock", "sim_run",
    # scenarios
    "Simulation", "simulate", "explore", "Outcome", "SimulationFailed",
    "check_determinism", "NotDeterministic", "Draws",
    # faults and checkers
    "Faults", "FAULTS", "swarm", "InjectedFault", "Watch", "EventLog", "Violation",
    # models and schedulers
    "SimModel", "Chunk", "CostModel", "QWEN3_NEXT_80B", "TaggedTokens", "sim_layout",
    "Server", "Limits", "Served", "Preempted", "ORDERS", "USES",
    # workloads
    "Prompt", "Scale", "WORKLOADS", "workload", "of_trace",
    # many seeds, whole traces
    "Plan", "Fixed", "plan_for", "play", "run_plan", "shorten", "production", "PRODUCTION_FAULTS",
]  # fmt: skip
