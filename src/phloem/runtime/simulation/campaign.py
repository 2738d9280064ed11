"""Many seeds: what each one runs is drawn from it, unless it was said; failures are shortened.

A `Plan` says everything about a run, so a plan is what is repeated, shortened and reported.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from math import lcm
from typing import cast

import msgspec

from phloem.actors.tree.core import BACKUP_HITS, WritePolicy
from phloem.actors.tree.keys import Namespace
from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import POLICY_NAMES
from phloem.cuda_streams.engine import CopyBatch
from phloem.errors import InvalidRequest, NoRoom, StaleHandle
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.simulation.faults import FAULTS, Faults, swarm
from phloem.runtime.simulation.jobs import ORDERS, Limits, Served
from phloem.runtime.simulation.loop import POLICIES, Policy
from phloem.runtime.simulation.model import QWEN3_NEXT_80B, CostModel, sim_layout
from phloem.runtime.simulation.schedulers import Server
from phloem.runtime.simulation.uses import USES, draw_uses, with_uses
from phloem.runtime.simulation.workloads import WORKLOADS, Prompt, Scale, workload
from phloem.runtime.simulation.world import (
    Outcome,
    Simulation,
    SimulationFailed,
    simulate,
)

__all__ = ["HOSTS", "Fixed", "Plan", "command", "plan_for", "play", "run_plan", "shorten"]


HOSTS: tuple[str, ...] = ("none", *BACKUP_HITS)
# The adaptive one is a use, since it came when seeds had their meaning already.
_EVICTIONS = tuple(name for name in POLICY_NAMES if name != "adaptive")


class Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all seeds; None and empty are drawn for each.

    `faults`: only these can be on, `()` for none. `prompts`: only these numbers of a workload.
    `host`: `none` for no host tier, or how it is written (see `CacheConfig.write_policy`). `uses`:
    only these can be made use of (see `phloem.runtime.simulation.uses`), `()` for none.
    """

    scheduler: str | None = None
    workload: str | None = None
    policy: Policy | None = None
    faults: tuple[str, ...] | None = None
    prompts: tuple[int, ...] | None = None
    scramble: int | None = None
    requests: int | None = None
    host: str | None = None
    uses: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for what, name, known in (
            ("scheduler", self.scheduler, tuple(ORDERS)),
            ("workload", self.workload, tuple(WORKLOADS)),
            ("policy", self.policy, POLICIES),
            ("host tier", self.host, HOSTS),
        ):
            if name is not None and name not in known:
                raise InvalidRequest(f"no {what} is called {name!r}; there are {known}")
        if self.requests is not None and self.requests < 1:
            raise InvalidRequest(f"{self.requests} requests of a workload; at least 1")
        if unknown := sorted(set(self.faults or ()) - set(FAULTS)):
            raise InvalidRequest(f"no fault is called {unknown[0]!r}; there are {FAULTS}")
        if unknown := sorted(set(self.uses or ()) - set(USES)):
            raise InvalidRequest(f"no use is called {unknown[0]!r}; there are {USES}")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run, completely."""

    seed: int
    policy: Policy
    scheduler: str
    workload: str
    prompts: tuple[Prompt, ...]
    limits: Limits
    config: CacheConfig
    faults: Faults
    uses: tuple[str, ...] = ()
    scramble: int | None = None
    cost: CostModel = QWEN3_NEXT_80B
    recheck: bool = True
    audit_every: int = 1
    borrowers: int = 0
    steps_max: int = 200_000
    copy_ns: Callable[[CopyBatch], int] | None = None


def plan_for(seed: int, fixed: Fixed | None = None) -> Plan:
    """What a seed runs: small pools, small pages, every combination of what the kit has.

    The same seed draws the same whatever is fixed, so fixing something changes only that.
    """
    fixed = fixed or Fixed()
    rng = random.Random(f"plan {seed}")
    order, kind = rng.choice(tuple(ORDERS)), rng.choice(tuple(WORKLOADS))
    policy: Policy = rng.choices(POLICIES, (1, 3, 4, 2))[0]
    scale = Scale(
        requests=rng.randrange(3, 14),
        piece=rng.choice((3, 6, 10)),
        gap_s=rng.choice((0.002, 0.02, 0.2)),
    )
    if fixed.requests is not None:
        scale = msgspec.structs.replace(scale, requests=fixed.requests)
    limits = Limits(
        chunk=rng.choice((4, 8, 16)),
        batch_tokens=rng.choice((16, 48)),
        running=rng.randrange(1, 9),
        reserve=rng.random() < 0.5,
        ahead=rng.choice((1, 1, 2, 3)),
        stride=rng.choice((1, 1, 4)),
        room_timeout_s=rng.choice((None, 0.05, 1.0)),
        tries=5,
        samples=rng.choice((1, 1, 1, 2)),
        join_s=rng.choice((None, None, 0.02, 0.5)),
        snapshots=rng.random() < 0.25,
    )
    geometry = _Geometry(rng)
    faults = swarm(rng)
    audit_every = rng.choice((1, 4, 4, 8, 8, 16, 16, 32))
    borrowers = rng.choice((0, 0, 1, 2))
    if fixed.faults is not None:
        faults = faults.only(fixed.faults)
    prompts = workload(fixed.workload or kind, seed, scale)
    geometry.draw_host(rng, fixed.host)
    config = geometry.config(prompts)  # of all prompts, so that leaving some out changes no sizes
    uses = draw_uses(seed)
    if fixed.uses is not None:
        uses = tuple(name for name in uses if name in fixed.uses)
    limits, config = with_uses(seed, uses, limits, config)
    if fixed.prompts is not None:
        chosen = [number for number in fixed.prompts if 0 <= number < len(prompts)]
        if fixed.prompts and not chosen:
            raise InvalidRequest(f"seed {seed} has prompts 0 to {len(prompts) - 1} only")
        prompts = [prompts[number] for number in chosen]
    return Plan(
        seed=seed,
        policy=fixed.policy or policy,
        scheduler=fixed.scheduler or order,
        workload=fixed.workload or kind,
        prompts=tuple(prompts),
        limits=limits,
        config=config,
        faults=faults,
        uses=uses,
        scramble=fixed.scramble,
        audit_every=audit_every,
        borrowers=borrowers,
    )


class _Geometry:
    """Drawn sizes; the pools are made for the prompts, which come later."""

    def __init__(self, rng: random.Random) -> None:
        self.states = rng.random() < 0.85
        self.page_size = rng.choice((1, 2, 4))
        self.state_chunk = self.page_size * rng.choice((1, 1, 2))
        self.pressure = rng.choice((1.0, 1.3, 2.0, 4.0))
        self.slots = rng.choice((1, 2, 3, 5, 10))
        self.placement = Placement(
            branch=rng.random() < 0.8,
            end_of_prompt=rng.random() < 0.8,
            budget=rng.choice((1, 2, 8)),
            max_states_per_path=rng.choice((None, None, 1, 2)),
        )
        self.reuse_decoded = rng.random() < 0.8

    def draw_host(self, rng: random.Random, fixed: str | None) -> None:
        """Whether there is a host tier, how large and how it is written."""
        drawn = rng.choice(("none", "none", *BACKUP_HITS, "write_back"))
        self.host = fixed or drawn
        self.host_share = rng.choice((0.3, 0.3, 1.0, 3.0))
        self.eviction = rng.choice(("lru", "lru", *_EVICTIONS))

    def config(self, prompts: Sequence[Prompt]) -> CacheConfig:
        """Pools that hold the largest prompt with its answer, and `pressure` times as much."""
        grid = lcm(self.page_size, self.state_chunk)
        most = max(len(prompt.tokens) + prompt.output for prompt in prompts) + grid
        layout = sim_layout(layers=2, states=self.states)
        pages = int(self.pressure * (most // self.page_size + 2))
        device = pages * layout.page_bytes(self.page_size) + self.slots * layout.slot_bytes
        least = -(-device // min(pages, self.slots)) if self.states else -(-device // pages)
        return CacheConfig(
            layout=layout,
            page_size=self.page_size,
            state_chunk=self.state_chunk,
            device_pages=pages,
            device_states=self.slots,
            host_bytes=0 if self.host == "none" else max(least, int(self.host_share * device)),
            write_policy=cast("WritePolicy", "write_through" if self.host == "none" else self.host),
            eviction=self.eviction,
            placement=self.placement,
            reuse_decoded=self.reuse_decoded,
        )


def run_plan(plan: Plan, *, repeat: str = "") -> Outcome[list[Served]]:
    """Run a plan. Raises `SimulationFailed`."""
    return simulate(
        lambda sim: _scenario(sim, plan),
        seed=plan.seed,
        policy=plan.policy,
        faults=plan.faults,
        audit_every=plan.audit_every,
        scramble=plan.scramble,
        steps_max=plan.steps_max,
        repeat=repeat,
    )


async def _scenario(sim: Simulation, plan: Plan) -> list[Served]:
    return await play(sim, plan, plan.prompts)


async def play(sim: Simulation, plan: Plan, prompts: Iterable[Prompt]) -> list[Served]:
    """Serve prompts as they arrive, one at a time from `prompts`, under the plan's faults.

    Every prompt ends in one of the ways that exist; anything else ends the run.
    """
    served: list[Served] = []
    async with sim.runtime(plan.config, copy_ns=plan.copy_ns) as cache:
        model = sim.model(cache, plan.cost, recheck=plan.recheck, is_written=_is_written)
        async with (
            Server(
                cache,
                model,
                sim.stream("compute"),
                order=plan.scheduler,
                limits=plan.limits,
                fails=lambda: sim.chance("abandon"),
            ) as server,
            _aside(sim, cache, plan),
        ):
            await _arrivals(sim, server, prompts, served)
    return served


@asynccontextmanager
async def _aside(sim: Simulation, cache: CacheRuntime, plan: Plan) -> AsyncGenerator[None, None]:
    """What goes on beside the requests, until the block is left."""
    tasks = [
        asyncio.create_task(sim.every("reset", cache.reset), name="resetter"),
        asyncio.create_task(sim.every("evict", lambda: _evict(sim, cache)), name="evicter"),
        asyncio.create_task(sim.every("abort", lambda: _abort(sim, cache)), name="aborter"),
        *(
            asyncio.create_task(_change_policy(sim, cache), name="policy changer")
            for _ in range("policies" in plan.uses)
        ),
        *(
            sim.client(_borrow(sim, cache, f"{_BORROWER}-{number}"), f"{_BORROWER}-{number}")
            for number in range(plan.borrowers)
        ),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:  # one by one: `gather` takes more steps on one Python than on another
            try:
                await task
            except asyncio.CancelledError:
                continue
            except Exception as error:  # noqa: BLE001  whatever it is, it ends the run
                sim.loop.fail(error)


async def _abort(sim: Simulation, cache: CacheRuntime) -> None:
    requests = sorted(cache.core.requests)
    if requests:
        cache.core.requests[sim.rng.choice(requests)].abort()


async def _change_policy(sim: Simulation, cache: CacheRuntime) -> None:
    while True:
        await asyncio.sleep(sim.rng.expovariate(10.0))
        await cache.use_policy(sim.rng.choice(POLICY_NAMES))


_BORROWER = "borrower"


def _is_written(namespace: Namespace) -> bool:
    """A borrower inserts pages without anything in them; nobody reads them."""
    return not namespace.salt.startswith(_BORROWER)


async def _borrow(sim: Simulation, cache: CacheRuntime, name: str) -> None:
    """A user of the calls below requests: leases, grants with time-outs, inserts of its own."""
    rng, size = sim.rng, cache.config.page_size
    namespace = Namespace(salt=name)  # nobody reads its pages, so nothing need be in them
    while True:
        await asyncio.sleep(rng.expovariate(5.0))
        tokens = [rng.randrange(2) for _ in range(size * rng.randrange(1, 4))]
        async with await cache.acquire(tokens, namespace=namespace, owner=name, whole=True) as held:
            await held.ready()
            missing = (len(tokens) - held.boundary) // size
            try:
                grant = await cache.allocate(
                    pages=missing, owner=name, timeout=rng.choice((0.001, 0.05, 1.0))
                )
            except NoRoom:
                continue
            try:
                await asyncio.sleep(rng.expovariate(50.0))
                draw = rng.random()
                if draw < 0.5:
                    await cache.insert(
                        tokens,
                        pages=grant.pages,
                        lease=held,
                        namespace=namespace,
                        release=draw < 0.25,
                    )
            except StaleHandle:
                pass  # reset in between: the grant is still ours
            finally:
                cache.release(grant)


async def _arrivals(
    sim: Simulation, server: Server, prompts: Iterable[Prompt], served: list[Served]
) -> None:
    left = 0
    nobody = asyncio.Event()

    def ended(task: asyncio.Task[Served]) -> None:
        nonlocal left
        left -= 1
        if task.cancelled():
            served.append(Served(name=task.get_name(), how="cancelled"))
            if not sim.faults.cancel:
                sim.loop.fail(asyncio.CancelledError(task.get_name()))
        elif (error := task.exception()) is not None:
            sim.loop.fail(error)
        else:
            served.append(task.result())
        if not left:
            nobody.set()

    for prompt in prompts:
        await asyncio.sleep(max(0.0, prompt.at_s - sim.loop.time()))
        left += 1
        nobody.clear()
        client = sim.client(_client(sim, server, prompt), prompt.name)
        client.add_done_callback(ended)
    if left:
        await nobody.wait()


async def _client(sim: Simulation, server: Server, prompt: Prompt) -> Served:
    if sim.chance("forget"):
        lease = await server.cache.acquire(
            prompt.tokens, namespace=prompt.namespace, owner=prompt.name
        )
        del lease
    return await server.serve(prompt)


async def _evict(sim: Simulation, cache: CacheRuntime) -> None:
    few = sim.rng.random() < 0.8
    pages, states = (2, 1) if few else (cache.config.device_pages, cache.config.device_states)
    await cache.evict(pages=sim.rng.randrange(pages + 1), states=sim.rng.randrange(states + 1))


# -- failures --------------------------------------------------------------------------------------


def command(plan: Plan, fixed: Fixed) -> str:
    """The command line that repeats a plan."""
    words = ["phloem simulate", f"--seeds {plan.seed}"]
    for option, value in (
        ("scheduler", fixed.scheduler),
        ("workload", fixed.workload),
        ("policy", fixed.policy),
        ("requests", fixed.requests),
        ("host", fixed.host),
        ("scramble", fixed.scramble),
    ):
        if value is not None:
            words.append(f"--{option} {value}")
    if fixed.faults is not None:
        words.append(f"--faults {','.join(fixed.faults) or 'none'}")
    if fixed.uses is not None:
        words.append(f"--uses {','.join(fixed.uses) or 'none'}")
    if fixed.prompts is not None:
        words.append(f"--prompts {','.join(map(str, fixed.prompts))}")
    return " ".join(words)


def shorten(
    seed: int, fixed: Fixed, failure: SimulationFailed, *, told: Callable[[str], object] = str
) -> tuple[Fixed, SimulationFailed]:
    """Look for a smaller plan that fails with the same kind of error.

    Leaves prompts out, turns faults and uses off, and lets the order be asyncio's own from as early
    a step on as possible. `told` hears of each success.
    """
    kind = type(failure.error)
    best, last = fixed, failure

    def attempt(candidate: Fixed) -> bool:
        nonlocal best, last
        try:
            run_plan(plan_for(seed, candidate))
        except SimulationFailed as error:
            if type(error.error) is kind:
                best, last = candidate, error
                told(command(plan_for(seed, candidate), candidate))
                return True
        return False

    numbers = tuple(fixed.prompts or range(len(plan_for(seed, fixed).prompts)))
    for fewer in _smaller(numbers, lambda kept: attempt(_with(best, prompts=kept))):
        numbers = fewer
    for fault in plan_for(seed, best).faults.on:
        attempt(_with(best, faults=tuple(f for f in plan_for(seed, best).faults.on if f != fault)))
    for use in plan_for(seed, best).uses:
        attempt(_with(best, uses=tuple(u for u in plan_for(seed, best).uses if u != use)))
    if plan_for(seed, best).config.host_bytes:
        attempt(_with(best, host="none"))
    low, high = 0, last.run.loop.steps
    while low < high and high - low > max(4, high // 16):
        middle = (low + high) // 2
        if attempt(_with(best, scramble=middle)):
            high = middle
        else:
            low = middle
    return best, last


def _with(fixed: Fixed, **changes: object) -> Fixed:
    return msgspec.structs.replace(fixed, **changes)


def _smaller(
    numbers: tuple[int, ...], fails: Callable[[tuple[int, ...]], bool]
) -> Iterator[tuple[int, ...]]:
    """Leave parts out, halves first, then single ones, as long as it still fails."""
    size = max(1, len(numbers) // 2)
    while size:
        start = 0
        while start < len(numbers):
            kept = numbers[:start] + numbers[start + size :]
            if kept and fails(kept):
                numbers = kept
                yield kept
            else:
                start += size
        size //= 2
