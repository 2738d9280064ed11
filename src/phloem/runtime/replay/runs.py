"""Many replays at once: each trace, policy and capacity is a run of its own, in any process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter

import msgspec

from phloem.actors.tree.core import WritePolicy
from phloem.actors.tree.placement import Placement
from phloem.errors import InvalidRequest
from phloem.runtime.config import parse_bytes
from phloem.runtime.costs.model import Geometry
from phloem.runtime.processes import in_processes
from phloem.runtime.replay.bounds import Bounds, bounds, ceiling
from phloem.runtime.replay.named import Tiers, cache_named
from phloem.runtime.replay.requests import Workload
from phloem.runtime.replay.served import Cache, serve_all

__all__ = ["BoundsOf", "Report", "Run", "Settings", "TraceFigures", "capacity_of", "replay"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs have in common.

    `placement` counts in tokens; None: as the tree does it unless told. `states_share`: a fixed
    pool of states with so much of the bytes; None: one budget. `decisions`: keep what was decided.
    `host`: the bytes of a host tier, as text; with it, or with `one_memory`, a whole runtime is
    replayed, in which running requests take room and one memory is cut into frames.
    """

    geometry: Geometry
    placement: Placement | None = None
    states_share: float | None = None
    sessions: bool = False
    host: str | None = None
    write_policy: WritePolicy = "write_through"
    one_memory: bool = False
    bounds: bool = True
    decisions: bool = False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one capacity on one trace. Rates are shares of prompt tokens and of FLOPs.

    `us_...` are mean microseconds of one eviction for one insert, of one victim of it, and of one
    lookup, on the machine at hand (0 of a whole runtime, where they are not told apart).
    `host_rate` is the part of the hit rate that was loaded from the host. `decisions` has a line of
    JSON for each request, if asked for.
    """

    trace: str
    policy: str
    capacity: int
    hit_rate: float
    host_rate: float
    compute_saved: float
    states_per_request: float
    state_bytes_copied: int
    bytes_to_host: int
    bytes_to_device: int
    pages_moved: int
    skipped: int
    evictions: int
    pages_evicted: int
    states_evicted: int
    us_per_eviction: float
    us_per_victim: float
    us_per_lookup: float
    seconds: float
    decisions: bytes = b""


class BoundsOf(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds on one trace at one capacity of the device, and what the host has besides."""

    trace: str
    capacity: int
    bounds: Bounds


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is. `ceiling`: the hit rate of an unbounded cache that can use every prefix."""

    name: str
    requests: int
    block_size: int
    tokens: int
    distinct_tokens: int
    ceiling: float


class Report(msgspec.Struct, kw_only=True):
    """All results, in the order in which they were asked for."""

    geometry: Geometry
    traces: list[TraceFigures]
    runs: list[Run] = []
    bounds: list[BoundsOf] = []


def capacity_of(text: str, workload: Workload, geometry: Geometry) -> int:
    """Bytes from "5%" of the KV of all distinct tokens, a number, or like "16GiB"."""
    if not text.endswith("%"):
        return parse_bytes(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise InvalidRequest(f"{text!r} is no share of a trace's KV")
    return int(workload.distinct_tokens * share) * geometry.kv_bytes


def in_blocks(placement: Placement | None, block: int) -> Placement | None:
    """A placement that counts in tokens, for a tree whose pages are blocks of so many."""
    if placement is None:
        return None
    periodic = placement.periodic
    return msgspec.structs.replace(
        placement,
        periodic=None if periodic is None else max(1, periodic // block),
        gain_min=-(-placement.gain_min // block),
    )


def _host_bytes(workload: Workload, settings: Settings) -> int:
    host = settings.host
    return 0 if host is None else capacity_of(host, workload, settings.geometry)


def _cache(workload: Workload, settings: Settings, policy: str, capacity: int) -> Cache:
    """Raises `InvalidRequest` for what cannot be replayed."""
    if settings.one_memory and settings.states_share is not None:
        raise InvalidRequest("one memory has no pool of states")
    tiers = None
    if settings.one_memory or settings.host is not None:
        tiers = Tiers(_host_bytes(workload, settings), settings.write_policy)
    return cache_named(
        policy,
        workload,
        settings.geometry,
        capacity,
        placement=in_blocks(settings.placement, workload.block_size),
        states_share=settings.states_share,
        sessions=settings.sessions,
        tiers=tiers,
    )


def _run(workload: Workload, settings: Settings, policy: str, capacity: int) -> Run:
    cache = _cache(workload, settings, policy, capacity)
    lines: list[bytes] = []
    encode = msgspec.json.Encoder().encode
    began = perf_counter()
    totals = serve_all(
        cache,
        workload,
        (lambda decision: lines.append(encode(decision) + b"\n")) if settings.decisions else None,
    )
    seconds = perf_counter() - began
    victims = totals.pages_evicted + totals.states_evicted
    return Run(
        trace=workload.name,
        policy=policy,
        capacity=capacity,
        hit_rate=totals.hit_rate,
        host_rate=totals.host_tokens / totals.tokens if totals.tokens else 0.0,
        compute_saved=totals.compute_saved,
        states_per_request=totals.states_made / max(1, totals.requests),
        state_bytes_copied=totals.state_bytes_copied,
        bytes_to_host=totals.bytes_to_host,
        bytes_to_device=totals.bytes_to_device,
        pages_moved=totals.pages_moved,
        skipped=totals.skipped,
        evictions=totals.evictions,
        pages_evicted=totals.pages_evicted,
        states_evicted=totals.states_evicted,
        us_per_eviction=totals.eviction_s / max(1, totals.evictions) * 1e6,
        us_per_victim=totals.eviction_s / max(1, victims) * 1e6,
        us_per_lookup=totals.lookup_s / max(1, totals.requests) * 1e6,
        seconds=seconds,
        decisions=b"".join(lines),
    )


def _bounds(workload: Workload, settings: Settings, capacity: int) -> BoundsOf:
    return BoundsOf(
        trace=workload.name,
        capacity=capacity,
        bounds=bounds(workload, capacity + _host_bytes(workload, settings), settings.geometry),
    )


_Task = tuple[int, str | None, int]  # which workload, the policy or None for bounds, bytes
_shared: list[Workload] = []  # of a worker process


def _share(workloads: list[Workload]) -> None:
    _shared[:] = workloads


def _work(settings: Settings, task: _Task) -> Run | BoundsOf:
    which, policy, capacity = task
    if policy is None:
        return _bounds(_shared[which], settings, capacity)
    return _run(_shared[which], settings, policy, capacity)


def replay(
    workloads: Sequence[Workload],
    settings: Settings,
    policies: Sequence[str],
    capacities: Sequence[str],
    *,
    jobs: int = 1,
    told: Callable[[int, int, str], object] | None = None,
) -> Report:
    """Every policy at every capacity on every trace, in `jobs` processes.

    `told` hears how many runs have ended, of how many, and which did. Results do not depend on
    `jobs`. What is asked for twice runs once. Raises `InvalidRequest` for unknown names, bad sizes
    and two traces of one name, before anything runs.
    """
    if not workloads or not capacities or jobs < 1:
        raise InvalidRequest(
            f"{len(workloads)} traces, {len(capacities)} capacities, {jobs} processes"
        )
    if len({workload.name for workload in workloads}) < len(workloads):
        raise InvalidRequest("two traces have the same name: their results could not be told apart")
    tasks: list[_Task] = []
    for which, workload in enumerate(workloads):
        for text in capacities:
            capacity = capacity_of(text, workload, settings.geometry)
            for policy in policies:
                _cache(workload, settings, policy, capacity)
                tasks.append((which, policy, capacity))
            if settings.bounds:
                tasks.append((which, None, capacity))
    tasks = list(dict.fromkeys(tasks))
    results: dict[_Task, Run | BoundsOf] = {}
    for task, result in _carried_out(list(workloads), settings, tasks, jobs):
        results[task] = result
        if told is not None:
            told(len(results), len(tasks), f"{result.trace}, {task[1] or 'bounds'}")
    report = Report(
        geometry=settings.geometry,
        traces=[
            TraceFigures(
                name=workload.name,
                requests=len(workload.requests),
                block_size=workload.block_size,
                tokens=workload.tokens,
                distinct_tokens=workload.distinct_tokens,
                ceiling=ceiling(workload),
            )
            for workload in workloads
        ],
    )
    for task in tasks:
        result = results[task]
        if isinstance(result, Run):
            report.runs.append(result)
        else:
            report.bounds.append(result)
    return report


def _carried_out(
    workloads: list[Workload], settings: Settings, tasks: list[_Task], jobs: int
) -> Iterator[tuple[_Task, Run | BoundsOf]]:
    work = partial(_work, settings)
    if jobs == 1 or len(tasks) == 1:
        _share(workloads)
        for task in tasks:
            yield task, work(task)
        _shared.clear()
        return
    jobs = min(jobs, len(tasks))
    yield from in_processes(jobs, work, tasks, begin=partial(_share, workloads))
