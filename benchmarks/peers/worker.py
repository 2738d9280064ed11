"""One process of the matrix: `python -m benchmarks.peers.worker ADAPTER W1:16,W5:16:10000`.

Prints one line `RESULT {json}` for each job. Runs inside one event loop, for adapters whose library
needs one; nothing here awaits while a stream runs.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import importlib
import json
import pstats
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.measure import (
    Clock,
    GcWatch,
    Summary,
    cpu_clock,
    involuntary_switches,
    resident_bytes,
    summary,
    wall_clock,
)
from benchmarks.peers.protocol import Adapter, Tokens
from benchmarks.peers.serve import Record, serve, serve_all
from benchmarks.peers.workloads import (
    SIZES,
    Request,
    agents,
    chat,
    documents,
    grown_tree,
    random_tokens,
)

RESULT = "RESULT "
_STREAMS = {"W1": chat, "W2": documents, "W3": agents, "W4": chat}
_PROBES = 2000  # matches at full size


class Job(NamedTuple):
    """A workload at a page size; `size` in nodes, for W5."""

    workload: str
    page: int
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> Job:
        """`W1:16` or `W5:16:100000`."""
        workload, *numbers = text.split(":")
        return cls(workload, *map(int, numbers))


Figures = dict[str, object]


def _clock(workload: str) -> Clock:
    """Operations of milliseconds are preempted too often to be dropped: CPU time counts."""
    return cpu_clock if workload in ("W2", "W6") else wall_clock


async def _stream(kind: type[Adapter], job: Job, verify: bool, profile: int) -> Figures:
    """W1 to W4."""
    tokens, states, longest = SIZES[job.workload]
    tokens = tokens // 64 * 64
    adapter = kind(job.page, tokens, states, longest)
    await adapter.open()
    record = Record(_clock(job.workload))
    if verify:
        held = np.full(tokens + 64 * (states + 64), -1, np.int64)
        serve_all(adapter, _STREAMS[job.workload](), record, held)
        adapter.check()
        await adapter.close()
        return {"verified": True, "hit_rate": record.hit / record.tokens}
    requests: Iterator[Request] | list[Request] = _STREAMS[job.workload]()
    profiler = cProfile.Profile()
    if profile:
        requests = list(requests)
        profiler.enable()
    begun = time.perf_counter()
    with GcWatch() as watch:
        serve_all(adapter, requests, record)
    wall = time.perf_counter() - begun
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(profile)
    out: Figures = {**record.figures(), "gc": watch.figures(), "wall_s": wall}
    out["nodes"] = adapter.nodes()
    await adapter.close()
    return out


async def _long_prompts(kind: type[Adapter], job: Job) -> Figures:
    """W6: prompts of 128k tokens, new ones and then the same with 512 tokens more."""
    length, count = 131_072, 6
    rng = np.random.default_rng(6)
    adapter = kind(job.page, int(length * (count + 1) * 1.2) // 64 * 64, 400, length + 4096)
    await adapter.open()
    cold, hot = Record(_clock("W6")), Record(_clock("W6"))
    prompts = [random_tokens(rng, length) for _ in range(count)]
    serve_all(adapter, map(Request, prompts), cold)
    longer = [np.concatenate([prompt, random_tokens(rng, 512)]) for prompt in prompts]
    serve_all(adapter, map(Request, longer), hot)
    await adapter.close()
    return {"cold": cold.figures(), "hot": hot.figures()}


async def _by_size(kind: type[Adapter], job: Job) -> Figures:
    """W5: a tree of `size` nodes: matches, growth, evictions, memory."""
    edge = max(16, job.page)
    room = int(job.size * 1.25 * edge) // 64 * 64 + 64 * 4000
    adapter = kind(job.page, room, int(job.size * 1.25) + 9000, edge * 8)
    await adapter.open()
    before = resident_bytes()
    rng = np.random.default_rng(9)
    record = Record()
    begun = time.perf_counter()
    with GcWatch() as watch:
        leaves, inner, count = _build(adapter, job.size, edge, rng, record)
    out: Figures = {"nodes": count, "build_s": time.perf_counter() - begun, "gc": watch.figures()}
    out["bytes_per_node"] = (resident_bytes() - before) / count
    out["tail"] = record.last(_PROBES).figures()
    out.update(_probe(adapter, leaves, edge, rng))
    grown = Record()
    probes: list[int] = rng.integers(len(inner), size=_PROBES).tolist()
    for number in probes:
        serve(adapter, Request(np.concatenate([inner[number], random_tokens(rng, edge)])), grown)
    out["grow"] = grown.figures()
    adapter.prepare_evict()
    out["evict"] = {
        "tokens1": _evictions(adapter, (edge, 0), 100),
        "state1": _evictions(adapter, (0, 1), 100),
        "tokens64": _evictions(adapter, (64 * edge, 0), 10),
    }
    await adapter.close()
    return out


def _build(
    adapter: Adapter, size: int, edge: int, rng: np.random.Generator, record: Record
) -> tuple[list[Tokens], list[Tokens], int]:
    """Grow the tree; samples of its leaves and of its inner paths."""
    leaves: list[Tokens] = []
    inner: list[Tokens] = []
    count = 0
    for path, is_leaf in grown_tree(size, edge):
        serve(adapter, Request(path), record)
        count += 1
        kept, most = (leaves, 4000) if is_leaf else (inner, 3000)
        if len(kept) < most:
            kept.append(path)
        elif rng.random() < most / count:
            kept[rng.integers(most)] = path
    return leaves, inner, count


def _probe(adapter: Adapter, leaves: list[Tokens], edge: int, rng: np.random.Generator) -> Figures:
    """Matches that hit, leases, and matches that miss, at full size."""
    hits: list[int] = []
    leases: list[int] = []
    misses: list[int] = []
    found = asked = 0
    probes: list[int] = rng.integers(len(leaves), size=_PROBES).tolist()
    for number in probes:
        key = adapter.key(np.concatenate([leaves[number], np.full(edge, 7, np.int64)]))
        switches = involuntary_switches()
        begun = wall_clock()
        match = adapter.match(key)
        matched = wall_clock()
        adapter.unlock(adapter.lock(match.handle))
        ended = wall_clock()
        if involuntary_switches() == switches:
            hits.append(matched - begun)
            leases.append(ended - matched)
        found += match.hit
        asked += len(leaves[number])
    for _ in range(_PROBES):
        key = adapter.key(random_tokens(rng, 4 * edge))
        switches = involuntary_switches()
        begun = wall_clock()
        adapter.match(key)
        ended = wall_clock()
        if involuntary_switches() == switches:
            misses.append(ended - begun)
    return {
        "match_hit": summary(hits),
        "lease": summary(leases),
        "match_miss": summary(misses),
        "hit_rate": found / asked,
    }


def _evictions(adapter: Adapter, demand: tuple[int, int], count: int) -> Summary:
    """Evict `demand` up to `count` times within 20 s; what is asked for must go.

    A sample that was preempted counts with its CPU time: some peers take a second for each.
    """
    samples: list[int] = []
    stop = wall_clock() + 20_000_000_000
    while len(samples) < count and wall_clock() < stop:
        switches, cpu = involuntary_switches(), cpu_clock()
        begun = wall_clock()
        freed = adapter.evict(*demand)
        took = wall_clock() - begun
        cpu = cpu_clock() - cpu
        if sum(freed) < sum(demand):
            raise AssertionError(f"an eviction of {demand} freed {freed}")
        samples.append(took if involuntary_switches() == switches else cpu)
    return summary(samples)


async def _run(kind: type[Adapter], job: Job, verify: bool, profile: int) -> Figures:
    if job.workload == "W5":
        return await _by_size(kind, job)
    if job.workload == "W6":
        return await _long_prompts(kind, job)
    return await _stream(kind, job, verify, profile)


def main() -> None:
    """Run the jobs one after another; a job that fails is a result with its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter")
    parser.add_argument("jobs", help="WORKLOAD:PAGE[:NODES],...")
    parser.add_argument("--verify", action="store_true", help="check the slots of every hit")
    parser.add_argument("--profile", type=int, default=0, help="print so many rows of a profile")
    arguments = parser.parse_args()
    module = importlib.import_module(f"benchmarks.peers.adapters.{arguments.adapter}")
    kind: type[Adapter] = module.Adapter
    for job in map(Job.parse, arguments.jobs.split(",")):
        if job.page < kind.page_min:
            continue
        gc.collect()
        begun = time.perf_counter()
        out: Figures = {}
        try:
            out = asyncio.run(_run(kind, job, arguments.verify, arguments.profile))
        except Exception as error:  # noqa: BLE001  the other jobs go on; the table names it
            traceback.print_exc()
            out["error"] = f"{type(error).__name__}: {error}"
        out.update(job._asdict(), adapter=arguments.adapter, job_s=time.perf_counter() - begun)
        print(RESULT + json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
