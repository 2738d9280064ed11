"""One simulated run: a loop, a clock, faults, and runtimes that are watched.

async def scenario(sim: Simulation) -> None:
    async with sim.runtime(config) as cache:       # the real actors, on a virtual engine
        ...                                        # an ordinary asyncio program

simulate(scenario, seed=7)                         # raises `SimulationFailed` with all details
explore(scenario, seeds=range(500))
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Generic, TypeVar

import msgspec

from phloem.actors.tree.keys import Namespace
from phloem.cuda_streams.engine import CopyBatch, CopyEngine, Post
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.virtual import VirtualEngine, VirtualStream
from phloem.errors import HostMemoryShort
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig, parse_bytes
from phloem.runtime.core import Core
from phloem.runtime.devices import EngineFactory, HostMemoryFactory
from phloem.runtime.simulation.contents import check_contents
from phloem.runtime.simulation.draws import Draws, NotDeterministic
from phloem.runtime.simulation.faults import (
    Faults,
    FaultyLink,
    host_memory,
    late_post,
    refused_memory,
)
from phloem.runtime.simulation.loop import Policy, SimDeadlock, SimLoop
from phloem.runtime.simulation.model import CostModel, SimModel, Violation
from phloem.runtime.simulation.watch import EventLog, Watch

__all__ = [
    "Outcome", "Simulation", "SimulationFailed", "check_determinism", "explore", "sim_run",
    "simulate",
]  # fmt: skip

T = TypeVar("T")

_PATIENCE_S = 86_400.0
_NEWS = 100  # looks, while nothing but news can still be on its way
_COLLECT_STEPS = 200_000  # garbage is collected at these steps only, so that finalisers repeat


class SimulationFailed(AssertionError):
    """A run ended as it must not. `error` is what was raised; the message says how to repeat it."""

    def __init__(self, error: BaseException, run: Simulation, repeat: str) -> None:
        self.error = error
        self.seed = run.seed
        self.run = run
        steps = [f"  {now_ns / 1e9:.6f} {what}" for now_ns, what in list(run.loop.history)[-12:]]
        events = [f"  {line}" for line in list(run.log.lines())[-12:]]
        text = [
            f"{type(error).__name__}: {error}",
            f"seed {run.seed}, policy {run.loop.policy}, step {run.loop.steps}, "
            f"{run.loop.time():.6f} virtual s, faults on: {', '.join(run.faults.on) or 'none'}",
            "the last steps:",
            *steps,
            "the last events:",
            *events,
        ]
        if repeat:
            text.append(f"repeat it with: {repeat}")
        super().__init__("\n".join(text))


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """How a run went. `digest` covers every event with its time: same seed, same digest.

    `tokens_loaded` came from the host tier; `waited_s` is the longest that an allocation waited.
    """

    seed: int
    result: T
    digest: str
    steps: int
    turns: int
    audits: int
    virtual_s: float
    injected: dict[str, int]
    events: dict[str, int]
    evicted: dict[str, int]
    tokens_loaded: int
    bytes_checked: int
    queue_max: int
    waited_s: float


class Simulation:
    """What a scenario is given: time, randomness, faults, and watched runtimes."""

    def __init__(self, loop: SimLoop, seed: int, faults: Faults, *, audit_every: int = 1) -> None:
        self.loop = loop
        self.rng = loop.rng
        self.clock = loop.clock
        self.seed = seed
        self.faults = faults
        self.log = EventLog()
        self.injected: Counter[str] = Counter()
        self.watches: list[Watch] = []
        self.models: list[SimModel] = []
        self._audit_every = audit_every
        self._clients: list[asyncio.Task[object]] = []
        loop.at_end.append(self.log.close)
        if faults.cancel:
            loop.before_step.append(self._cancel_somebody)

    def inject(self, fault: str) -> None:
        """Count a fault that happened."""
        self.injected[fault] += 1

    # -- runtimes ------------------------------------------------------------------------------

    @asynccontextmanager
    async def runtime(
        self, config: CacheConfig, *, copy_ns: Callable[[CopyBatch], int] | None = None
    ) -> AsyncGenerator[CacheRuntime, None]:
        """A runtime of the real actors on a virtual engine, with this run's faults.

        `copy_ns`: what a copy takes beyond what the link says, for pools that stand for larger
        ones. Leaving the block normally checks that nothing is owned by anybody any more, once what
        is in flight has ended; so the scenario must have seen to its requests by then.
        """
        faults = self.faults
        if faults.narrow:
            config = msgspec.structs.replace(config, queue_max=self.rng.randrange(1, 5))
        # However long a copy hangs: giving up on one takes a real thread, and here are none.
        patience = max(config.close_timeout_s, _PATIENCE_S)
        config = msgspec.structs.replace(
            config, inline=faults.inline != "off", close_timeout_s=patience
        )
        link = FaultyLink(faults, self.rng, self.inject, lambda: self.loop.now_ns, copy_ns)
        hazards = HazardChecker()

        watch = Watch(
            self.log,
            lambda: self.loop.now_ns,
            self.loop.fail,
            audit_every=self._audit_every,
            leaks_allowed=bool(faults.forget),
        )

        def engine(post: Post) -> CopyEngine:
            return VirtualEngine(
                self.clock,
                post=late_post(self.loop) if faults.late else post,
                fault=link.fault,
                delay=link.delay,
                hazards=hazards,
                order_seed=self.rng.getrandbits(32) if faults.reorder else None,
                on_event=watch.copy_event,
            )

        self.watches.append(watch)
        cache = self._made(config, watch, engine)
        async with cache:
            core = cache.core
            watch.attach(core)
            self.loop.reporters.append(watch.describe)
            self.loop.before_step.append(watch.at_step)
            if faults.narrow:
                core.domain.inline_max = self.rng.randrange(1, 8)
                core.domain.batch = self.rng.randrange(1, 4)
            if faults.inline == "mixed":
                self.loop.before_step.append(lambda: self._switch_inline(core))
            if faults.dead:
                self.clock.call_at(self._some_time(faults.dead), lambda: self._kill(link))
            yield cache
            await self._settle(core)
            watch.at_end()
            if hazards.found:
                raise Violation(f"memory was used while a copy used it: {hazards.found[0]}")
        self.loop.before_step.remove(watch.at_step)

    def _made(self, config: CacheConfig, watch: Watch, engine: EngineFactory) -> CacheRuntime:
        """A runtime; without a host tier when the memory for that is refused."""
        memory: HostMemoryFactory = host_memory
        if parse_bytes(config.host_bytes) and self.chance("pin_refused"):
            memory = refused_memory(self.rng.randrange(2))
        try:
            return CacheRuntime(config, events=watch, engine=engine, host_memory=memory)
        except HostMemoryShort:
            without = msgspec.structs.replace(config, host_bytes=0)
            return CacheRuntime(without, events=watch, engine=engine)

    def model(
        self,
        cache: CacheRuntime,
        cost: CostModel,
        *,
        recheck: bool = True,
        is_written: Callable[[Namespace], bool] = lambda _: True,
    ) -> SimModel:
        """A model over the runtime's pools (its layout must be a `sim_layout`).

        At the end of the runtime all bytes of the tree are compared with the tags of its tokens,
        but for namespaces that somebody else fills (`is_written`).
        """
        watch = self.watches[-1]
        layout = cache.config.layout
        tokens = {int(text.partition(":")[2]) for text in layout.spans}
        windows = {number: max(tokens) for number in layout.layers_of("window")}
        model = SimModel(
            cache.pools, watch.places, cost, self.loop.fail, recheck=recheck, windows=windows
        )
        watch.at_last.append(
            lambda core: check_contents(core, cache.pools, cache.host_pools, is_written)
        )
        self.models.append(model)
        return model

    def stream(self, name: str) -> VirtualStream:
        """A stream in virtual time; what it tells the loop may be late."""
        return VirtualStream(name, self.clock, late_post(self.loop) if self.faults.late else None)

    # -- callers -------------------------------------------------------------------------------

    def client(self, coro: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        """A task that the fault `cancel` may cancel, between any two callbacks."""
        task = self.loop.create_task(coro, name=name)
        if self.faults.cancel:
            self._clients.append(task)
        return task

    def chance(self, fault: str) -> bool:
        """True when a fault whose likelihood is for each occasion happens now; counts it."""
        likelihood: float = getattr(self.faults, fault)
        if not likelihood or self.rng.random() >= likelihood:
            return False
        self.inject(fault)
        return True

    async def every(self, fault: str, act: Callable[[], Awaitable[object]]) -> None:
        """Do `act` at random, as often in a virtual second as the fault's likelihood says."""
        likelihood: float = getattr(self.faults, fault)
        while likelihood:
            await asyncio.sleep(self.rng.expovariate(likelihood))
            self.inject(fault)
            await act()

    def _cancel_somebody(self) -> None:
        """Every other time one of those who have been answered and do not know it yet."""
        if self.rng.random() >= self.faults.cancel:
            return
        self._clients = [task for task in self._clients if not task.done()]
        ready = self.loop.ready_tasks() if self.rng.random() < 0.5 else []
        answered = [task for task in self._clients if task in ready]
        chosen = answered or self._clients
        if chosen:
            self.inject("cancel")
            task = chosen[self.rng.randrange(len(chosen))]
            self._clients.remove(task)
            task.cancel()

    def _switch_inline(self, core: Core) -> None:
        if self.rng.random() < 1 / 64:
            core.domain.inline = not core.domain.inline

    def _kill(self, link: FaultyLink) -> None:
        self.inject("dead")
        link.dead = True

    def _some_time(self, per_second: float) -> int:
        return round(self.rng.expovariate(per_second) * 1e9)

    async def _settle(self, core: Core) -> None:
        """Wait until nothing is in flight, at most a quarter of an hour.

        A hang ends after seconds, but copies that hang queue up. News of its end comes to each who
        waits for it by itself: leases that were given up behind it may end a little later.
        """
        quiet = 0  # looks in a row
        for number in range(10_000):
            pools = core.ledger.pools
            busy = core.transfer.in_flight + core.domain.queued + sum(p.parked for p in pools)
            busy += len(core.tree.operations)
            quiet = 0 if busy or core.tree.sweeping else quiet + 1
            if quiet and (quiet > _NEWS or not core.tree.leases.live):
                return
            await asyncio.sleep(0.01 if number < 1_000 else 0.1)


def sim_run(main: Callable[[], Coroutine[object, object, T]], loop: SimLoop) -> T:
    """Run `main` to its end on `loop`, with garbage collected at fixed steps only.

    Raises what it raises; an exception that no task was there to hear ends it too.
    """
    with _collected_at_steps(loop):
        task = loop.create_task(main(), name="main")
        try:
            result = loop.run_until_complete(task)
        finally:
            _wind_up(loop)
    if loop.errors:
        raise loop.errors[0]
    return result


@contextmanager
def _collected_at_steps(loop: SimLoop) -> Generator[None, None, None]:
    def collect() -> None:
        if loop.steps % _COLLECT_STEPS == _COLLECT_STEPS - 1:
            gc.collect()

    loop.before_step.append(collect)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _wind_up(loop: SimLoop) -> None:
    """Cancel what is left and close the loop, whatever state the run ended in."""
    loop.wind_up()
    left = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in left:
        task.cancel()
    try:
        with suppress(SimDeadlock):  # the first error counts
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def simulate(
    scenario: Callable[[Simulation], Coroutine[object, object, T]],
    *,
    seed: int = 0,
    policy: Policy = "task",
    faults: Faults | None = None,
    audit_every: int = 1,
    scramble: int | None = None,
    steps_max: int = 5_000_000,
    rng: random.Random | None = None,
    repeat: str = "",
) -> Outcome[T]:
    """Run a scenario once. Raises `SimulationFailed`, from what went wrong.

    `rng` replaces the seed's generator: a test may pass one that Hypothesis controls, which then
    shrinks the schedule with everything else. `repeat` is told to the reader of a failure.
    """
    loop = SimLoop(
        seed if rng is None else rng, policy=policy, scramble=scramble, steps_max=steps_max
    )
    run = Simulation(loop, seed, faults or Faults(), audit_every=audit_every)
    try:
        result = sim_run(lambda: scenario(run), loop)
    except (KeyboardInterrupt, SystemExit, NotDeterministic):
        raise
    except BaseException as error:
        raise SimulationFailed(error, run, repeat) from error
    watches = run.watches
    return Outcome(
        seed=seed,
        result=result,
        digest=run.log.digest,
        steps=loop.steps,
        turns=sum(sum(watch.protocol.turns.values()) for watch in watches),
        audits=sum(watch.audits for watch in watches),
        virtual_s=loop.time(),
        injected=dict(sorted(run.injected.items())),
        events=dict(sorted(run.log.counts.items())),
        evicted=dict(sum((watch.evicted for watch in watches), Counter[str]())),
        tokens_loaded=sum(watch.tokens_loaded for watch in watches),
        waited_s=max((watch.fairness.longest_ns for watch in watches), default=0) / 1e9,
        bytes_checked=sum(model.bytes_checked for model in run.models),
        queue_max=max((watch.queue_max for watch in watches), default=0),
    )


def explore(
    scenario: Callable[[Simulation], Coroutine[object, object, T]],
    seeds: Iterable[int],
    *,
    policy: Policy | None = None,
    faults: Callable[[random.Random], Faults] | None = None,
    repeat: Callable[[int], str] | None = None,
) -> list[Outcome[T]]:
    """Run a scenario for each seed; raises `SimulationFailed` at the first that fails.

    Without `policy` the policies take turns. `faults` draws those of a seed (see `swarm`).
    """
    outcomes: list[Outcome[T]] = []
    for seed in seeds:
        chosen = policy or POLICY_TURNS[seed % len(POLICY_TURNS)]
        outcomes.append(
            simulate(
                scenario,
                seed=seed,
                policy=chosen,
                faults=faults(random.Random(seed)) if faults is not None else None,
                repeat=repeat(seed) if repeat is not None else "",
            )
        )
    return outcomes


POLICY_TURNS: tuple[Policy, ...] = ("task", "batch", "pct", "task", "batch", "fifo")


def check_determinism(
    scenario: Callable[[Simulation], Coroutine[object, object, T]],
    *,
    seed: int = 0,
    policy: Policy = "task",
    faults: Faults | None = None,
) -> Outcome[T]:
    """Run a seed twice; raises `NotDeterministic` naming the first draw that differs."""
    first = Draws(seed)
    outcome = simulate(scenario, seed=seed, policy=policy, faults=faults, rng=first)
    second = Draws(seed, expected=first.drawn)
    again = simulate(scenario, seed=seed, policy=policy, faults=faults, rng=second)
    second.finish()
    if again.digest != outcome.digest:
        raise NotDeterministic(
            f"all {len(first.drawn)} draws are equal, but the events are not: {outcome.events} "
            f"and {again.events}"
        )
    return outcome
