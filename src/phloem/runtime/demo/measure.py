"""Serves a workload with the cache and without it, and compares the two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from phloem.actors.tree.core import WritePolicy
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.pools import DevicePools
from phloem.cuda_streams.workers import ThreadWorker
from phloem.errors import NoRoom
from phloem.runtime.cache import CacheRuntime, PoolStats
from phloem.runtime.config import CacheConfig
from phloem.runtime.demo.faults import LoadFaults
from phloem.runtime.demo.workloads import Turn, Workload, distinct_tokens
from phloem.runtime.integrations.bare import BareCache
from phloem.runtime.integrations.server import Completion, HybridServer
from phloem.runtime.integrations.server import Request as Servable
from phloem.runtime.observe.numbers import percentile

if TYPE_CHECKING:
    from phloem.events import Sink
    from phloem.runtime.integrations.transformers import TransformersModel
    from phloem.runtime.request import Request

__all__ = ["Comparison", "Served", "Settings", "compare", "loop_lag"]

R = TypeVar("R", bound=Servable)
Clock = Callable[[], float]
Tick = Callable[[], None]

_LAG_EVERY_S = 0.005
_SETTLE_S, _SETTLE_TRIES = 0.005, 400


@dataclass(frozen=True)
class Settings:
    """The pools and the chunk of prefill, the same with and without the cache.

    With `chunk` equal to the grid (`state_chunk` here), a prompt is computed in the same pieces
    whatever was reused, so its logits are the same bits. With `host_bytes` the cache has a host
    tier, which is of use when `pages` or `states` are fewer than what is worth keeping. `faults`
    are those of its loads.
    """

    page_size: int = 16
    state_chunk: int = 64
    pages: int = 2048
    states: int = 64
    chunk: int = 64
    host_bytes: int | str = 0
    write_policy: WritePolicy = "write_through"
    faults: LoadFaults | None = None


_BARE = Settings()  # at least: who keeps nothing is not to be slowed by small pools


class Served(msgspec.Struct, frozen=True):
    """A workload served once; times in seconds.

    `ttft` is the time to first token; `lag_p99_s` is how late the event loop ran a timer.
    """

    computed: int
    reused: int
    ttft_median_s: float
    ttft_p95_s: float
    total_s: float
    lag_p99_s: float


class Comparison(msgspec.Struct, frozen=True):
    """One workload with the cache and without, and what the cache looked like at the end.

    `unaccounted` counts places that are neither free nor the tree's once nobody is served.
    `audit` is empty when it passed. `tokens_loaded` came from the host tier.
    """

    workload: str
    about: str
    requests: int
    prompt_tokens: int
    distinct_tokens: int
    new_tokens: int
    cached: Served
    bare: Served
    outputs_equal: int
    logit_difference_max: float
    actions: dict[str, int]
    pools: dict[str, PoolStats]
    unaccounted: int
    audit: str
    tokens_loaded: int

    @property
    def speedup(self) -> float:
        """Total time without the cache over total time with it."""
        return self.bare.total_s / self.cached.total_s

    @property
    def failures(self) -> tuple[str, ...]:
        """What must not be; empty when all is well."""
        found: list[str] = []
        if self.outputs_equal != self.requests:
            found.append(f"{self.requests - self.outputs_equal} of {self.requests} outputs differ")
        if self.unaccounted:
            found.append(f"{self.unaccounted} pages or slots are unaccounted for")
        if self.audit:
            found.append(f"the audit failed: {self.audit}")
        return tuple(f"{self.workload}: {what}" for what in found)


async def compare(
    model: TransformersModel,
    workload: Workload,
    settings: Settings | None = None,
    *,
    events: Sink | None = None,
    tick: Tick = lambda: None,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Serve a workload twice in this loop; `tick` is called after each of its 2 * n requests."""
    settings = settings or Settings()
    config = CacheConfig(
        eviction="lru",  # as the documents show its log
        layout=model.layout,
        page_size=settings.page_size,
        state_chunk=settings.state_chunk,
        device_pages=settings.pages,
        device_states=settings.states if model.layout.has_states else 0,
        host_bytes=settings.host_bytes,
        write_policy=settings.write_policy,
        copy_timeout_s=60.0 if settings.faults is None else settings.faults.copy_timeout_s,
    )
    engine = None if settings.faults is None else settings.faults.engine
    async with (
        CacheRuntime(config, events=events, engine=engine) as cache,
        AsyncExitStack() as at_end,
    ):
        stream = cache.worker_stream("model")
        at_end.callback(stream.close)
        server: HybridServer[Request] = HybridServer(
            model, cache, stream, chunk=settings.chunk, keep_logits=True, clock=clock
        )
        outputs, cached = await _serve(server, workload, tick, clock)
        audit = await _settled_audit(cache)
        stats = cache.stats()
    bare_outputs, bare = await _serve_bare(model, workload, settings, tick, clock)
    pairs = [(outputs[turn.id], bare_outputs[turn.id]) for turn in workload.turns]
    pools = {"kv": stats.kv, "state": stats.state}
    if stats.host_kv is not None and stats.host_state is not None:
        pools |= {"host kv": stats.host_kv, "host state": stats.host_state}
    return Comparison(
        workload=workload.name,
        about=workload.about,
        requests=len(workload.turns),
        prompt_tokens=workload.prompt_tokens,
        distinct_tokens=distinct_tokens(turn.prompt for turn in workload.turns),
        new_tokens=sum(len(one.tokens) for one in outputs.values()),
        cached=cached,
        bare=bare,
        outputs_equal=sum(a.tokens == b.tokens for a, b in pairs),
        logit_difference_max=max(_difference(a, b) for a, b in pairs),
        actions=stats.actions,
        pools=pools,
        unaccounted=sum(pool.size - pool.free - pool.tree for pool in pools.values()),
        audit=audit,
        tokens_loaded=stats.tokens_loaded,
    )


async def _serve_bare(
    model: TransformersModel, workload: Workload, settings: Settings, tick: Tick, clock: Clock
) -> tuple[dict[str, Completion], Served]:
    stream = ThreadWorker("model", LoopPoster(asyncio.get_running_loop()))
    pools = DevicePools.allocate(
        model.layout,
        pages=max(settings.pages, _BARE.pages) + 1,
        states=max(settings.states, _BARE.states) + 1 if model.layout.has_states else 0,
        page_size=settings.page_size,
    )
    try:
        server = HybridServer(
            model,
            BareCache(pools, stream),
            stream,
            chunk=settings.chunk,
            keep_logits=True,
            clock=clock,
        )
        return await _serve(server, workload, tick, clock)
    finally:
        stream.close()


async def _serve(
    server: HybridServer[R],
    workload: Workload,
    tick: Tick,
    clock: Clock,
) -> tuple[dict[str, Completion], Served]:
    """All turns as tasks of their own; a turn waits for the one before it."""
    answered = {turn.id: asyncio.Event() for turn in workload.turns}
    outputs: dict[str, Completion] = {}

    async def serve(turn: Turn) -> None:
        if turn.after is not None:
            await answered[turn.after].wait()
        outputs[turn.id] = await server.generate(turn.prompt, turn.max_new, id=turn.id)
        answered[turn.id].set()
        tick()

    async with loop_lag(clock) as lags, server:
        begun = clock()
        try:
            async with asyncio.TaskGroup() as group:
                for turn in workload.turns:
                    group.create_task(serve(turn))
        except BaseExceptionGroup as group:
            if isinstance(refused := group.exceptions[0], NoRoom):
                raise refused from None  # the pools asked for are too small for a prompt
            raise
        total_s = clock() - begun
    first = [one.first_token_s for one in outputs.values()]
    return outputs, Served(
        computed=sum(one.computed for one in outputs.values()),
        reused=sum(one.reused for one in outputs.values()),
        ttft_median_s=percentile(first, 50),
        ttft_p95_s=percentile(first, 95),
        total_s=total_s,
        lag_p99_s=percentile(lags, 99) if lags else 0.0,
    )


async def _settled_audit(cache: CacheRuntime) -> str:
    """Wait until nothing is parked any more, then audit; what is wrong, or nothing."""
    for _ in range(_SETTLE_TRIES):
        stats = cache.stats()
        moving = stats.kv.parked or stats.state.parked or stats.copies_in_flight
        if not moving and not stats.requests:
            break
        await asyncio.sleep(_SETTLE_S)
    try:
        await cache.audit()
    except AssertionError as error:
        return str(error) or "an invariant is broken"
    return ""


def _difference(a: Completion, b: Completion) -> float:
    """The largest of the logits that equal tokens were chosen from, and the first unequal one."""
    largest = 0.0
    for number, (x, y) in enumerate(zip(a.logits, b.logits, strict=True)):
        largest = max(largest, float((x - y).abs().max()))
        if a.tokens[number] != b.tokens[number]:
            break
    return largest


@asynccontextmanager
async def loop_lag(clock: Clock) -> AsyncGenerator[list[float]]:
    """Measures meanwhile how late the loop runs a timer of 5 ms, in seconds."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            due = clock() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            lags.append(max(0.0, clock() - due))

    task = asyncio.create_task(watch(), name="phloem-loop-lag")
    try:
        yield lags
    finally:
        task.cancel()
        await asyncio.wait([task])
