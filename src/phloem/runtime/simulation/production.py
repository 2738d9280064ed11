"""Hours of production in minutes: a whole trace over pools of real size, with faults.

    report = production(read_trace(path), seed=1)

The actors are the real ones and everything is watched as in any simulation, but for two things: the
audit of the whole tree and of all pools runs every few thousand turns, and prompts of thousands of
tokens are verified once for each pass, before it. Requests are read one at a time and forgotten
when they end, so memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from phloem.errors import InvalidRequest
from phloem.runtime.config import CacheConfig
from phloem.runtime.simulation.campaign import Plan, play
from phloem.runtime.simulation.faults import Faults
from phloem.runtime.simulation.model import QWEN3_NEXT_80B, sim_layout
from phloem.runtime.simulation.schedulers import Limits, Served
from phloem.runtime.simulation.workloads import Prompt, of_trace
from phloem.runtime.simulation.world import Outcome, Simulation, simulate
from phloem.runtime.traces import TraceRequest

__all__ = ["PRODUCTION_FAULTS", "production"]

_GIB = 2**30
_PAGE = 512

PRODUCTION_FAULTS = Faults(
    copy_fail=0.001,
    copy_slow=0.02,
    copy_hang=0.0005,
    reorder=True,
    late=True,
    cancel=2e-6,
    abandon=0.0005,
    inline="mixed",
)
"""A bad day: some copies fail, links are slow, one client in a few hundred hangs up."""


def production(
    requests: Iterable[TraceRequest],
    *,
    seed: int = 0,
    scheduler: str = "fcfs",
    faults: Faults = PRODUCTION_FAULTS,
    workers: int = 4,
    kv_gib: float = 40.0,
    states_gib: float = 20.0,
    answer_max: int = 2048,
    told: Callable[[float, int], object] | None = None,
) -> Outcome[list[Served]]:
    """Serve a trace with the pools of `workers` accelerators and the costs of Qwen3-Next-80B.

    `kv_gib` and `states_gib` are for each worker. `told` hears of the virtual second and the number
    of each arrival. Raises `SimulationFailed`, and `InvalidRequest` for pools without room.
    """
    cost = QWEN3_NEXT_80B
    pages = int(workers * kv_gib * _GIB / (_PAGE * cost.kv_bytes))
    states = int(workers * states_gib * _GIB / cost.state_bytes)
    if pages < 1 or states < 1:
        raise InvalidRequest(f"{kv_gib} and {states_gib} GiB a worker: {pages} pages, {states}")
    plan = Plan(
        seed=seed,
        policy="batch",
        scheduler=scheduler,
        workload="trace",
        prompts=(),
        limits=Limits(chunk=2048, batch_tokens=8192, running=64 * workers, ahead=2, stride=16),
        config=CacheConfig(
            layout=sim_layout(layers=1),
            page_size=_PAGE,
            state_chunk=64,
            device_pages=pages,
            device_states=states,
        ),
        faults=faults,
        cost=cost,
        recheck=False,
        audit_every=20_000,
        steps_max=1_000_000_000,
    )

    def arriving() -> Iterator[Prompt]:
        for number, prompt in enumerate(of_trace(requests, answer_max=answer_max)):
            if told is not None:
                told(prompt.at_s, number)
            yield prompt

    async def scenario(sim: Simulation) -> list[Served]:
        return await play(sim, plan, arriving())

    return simulate(
        scenario,
        seed=seed,
        policy=plan.policy,
        faults=faults,
        audit_every=plan.audit_every,
        steps_max=plan.steps_max,
    )
