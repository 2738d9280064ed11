"""Hours of production in minutes: a whole trace over pools of real size, with faults.

    report = production(read_trace(path), seed=1)

The actors are the real ones and everything is watched as in any simulation, but for two things: the
audit of the whole tree and of all pools runs every few thousand turns, and prompts of thousands of
tokens are verified once for each pass, before it. Requests are read one at a time and forgotten
when they end, so memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from phloem.cuda_streams.engine import CopyBatch
from phloem.cuda_streams.virtual import PCIE5
from phloem.errors import InvalidRequest
from phloem.runtime.config import CacheConfig
from phloem.runtime.simulation.campaign import Plan, play, run_plan
from phloem.runtime.simulation.faults import Faults
from phloem.runtime.simulation.jobs import Limits, Served
from phloem.runtime.simulation.model import QWEN3_NEXT_80B, CostModel, sim_layout
from phloem.runtime.simulation.workloads import Prompt, of_trace
from phloem.runtime.simulation.world import Outcome, Simulation, simulate
from phloem.runtime.traces import TraceRequest

__all__ = ["PRODUCTION_FAULTS", "demo", "production"]

_GIB = 2**30
_PAGE = 512

PRODUCTION_FAULTS = Faults(
    copy_fail=0.001,
    copy_slow=0.02,
    copy_hang=0.0005,
    reorder=True,
    late=True,
    tier_away=1 / 600,
    cancel=2e-6,
    abandon=0.0005,
    inline="mixed",
)
"""A bad day: some copies fail, links are slow, the host tier is away for a moment every ten
minutes, one client in a few thousand hangs up."""


def production(
    requests: Iterable[TraceRequest],
    *,
    seed: int = 0,
    scheduler: str = "fcfs",
    faults: Faults = PRODUCTION_FAULTS,
    workers: int = 4,
    kv_gib: float = 40.0,
    states_gib: float = 20.0,
    host_gib: float = 64.0,
    answer_max: int = 2048,
    told: Callable[[float, int], object] | None = None,
) -> Outcome[list[Served]]:
    """Serve a trace with the pools of `workers` accelerators and the costs of Qwen3-Next-80B.

    `kv_gib`, `states_gib` and `host_gib` (0: no host tier) are for each worker. The pools hold tags
    instead of real data, in as many places as the real ones have; copies take as long as real ones.
    `told` hears of the virtual second and the number of each arrival. Raises `SimulationFailed`,
    and `InvalidRequest` for pools without room.
    """
    cost = QWEN3_NEXT_80B
    pages = int(workers * kv_gib * _GIB / (_PAGE * cost.kv_bytes))
    states = int(workers * states_gib * _GIB / cost.state_bytes)
    if pages < 1 or states < 1 or host_gib < 0:
        raise InvalidRequest(
            f"{kv_gib}, {states_gib} and {host_gib} GiB a worker: {pages} pages, {states} states"
        )
    layout = sim_layout(layers=1)
    small = pages * layout.page_bytes(_PAGE) + states * layout.slot_bytes
    host = int(small * host_gib / (kv_gib + states_gib))
    plan = Plan(
        seed=seed,
        policy="batch",
        scheduler=scheduler,
        workload="trace",
        prompts=(),
        limits=Limits(chunk=2048, batch_tokens=8192, running=64 * workers, ahead=2, stride=16),
        config=CacheConfig(
            layout=layout,
            page_size=_PAGE,
            state_chunk=64,
            device_pages=pages,
            device_states=states,
            host_bytes=host,
        ),
        faults=faults,
        cost=cost,
        recheck=False,
        copy_ns=partial(_copy_ns, cost, workers),
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


def _copy_ns(cost: CostModel, workers: int, batch: CopyBatch) -> int:
    """How long the real bytes of a copy take, over the links of all workers at once."""
    nbytes = 0.0
    for item in batch.items:
        is_kv = item.target.name.endswith("kv")
        nbytes += len(item.target_ids) * (_PAGE * cost.kv_bytes if is_kv else cost.state_bytes)
    return round(1e9 * nbytes / (workers * PCIE5[batch.channel].bytes_per_s))


def demo(
    *, seed: int = 0, think_s: float = 20.0, faults: Faults = PRODUCTION_FAULTS
) -> Outcome[list[Served]]:
    """The demo's conversations at the costs of Qwen3-Next-80B, by users who read and write.

    Each turn arrives `think_s` virtual seconds after the one before it. Raises `SimulationFailed`.
    """
    from phloem.runtime.demo.workloads import conversation_tree  # it needs transformers

    turns = conversation_tree().turns
    order: dict[str, int] = {}
    prompts: list[Prompt] = []
    for turn in turns:
        order[turn.id] = 0 if turn.after is None else order[turn.after] + 1
        at_s = think_s * order[turn.id]
        prompts.append(Prompt(name=turn.id, at_s=at_s, tokens=turn.prompt, output=turn.max_new))
    prompts.sort(key=lambda prompt: prompt.at_s)
    plan = Plan(
        seed=seed,
        policy="batch",
        scheduler="fcfs",
        workload="demo",
        prompts=tuple(prompts),
        limits=Limits(chunk=512, batch_tokens=2048, running=16),
        config=CacheConfig(
            layout=sim_layout(), page_size=16, state_chunk=64, device_pages=2048, host_bytes="1MiB"
        ),
        faults=faults,
        audit_every=100,
    )
    return run_plan(plan)
