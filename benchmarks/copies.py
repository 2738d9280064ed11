"""Copies by worker threads: a load under a forward pass, and what copies do to the loop."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time

import numpy as np
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.threads import ThreadEngine, WorkerStream
from phloem.runtime.layout import ModelLayout

__all__ = ["lag", "overlap"]

_LAYERS = 32
_COPY_FOREVER = """
import numpy
source, target = numpy.ones(1 << 26, numpy.uint8), numpy.zeros(1 << 26, numpy.uint8)
numpy.copyto(target, source)
print("ready", flush=True)
while True:
    numpy.copyto(target, source)
"""


def _pools(pages: int) -> tuple[DevicePools, HostPools]:
    """32 attention layers, 64 KiB for each of a page's: 2 MiB a page."""
    layout = ModelLayout.attention_only(layers=_LAYERS, kv_heads=8, head_dim=128)
    device = DevicePools.allocate(layout, pages=pages + 1, states=0, page_size=16)
    host = HostPools.allocate(device, pages=pages, states=0)
    for layer in range(_LAYERS):  # touched, so that the first copy finds the memory there
        for part in (*device.kv_rows.parts(layer), *host.kv_rows.parts(layer)):
            part.fill_(layer)
    return device, host


def _load(device: DevicePools, host: HostPools) -> Copy:
    """Every page, in any order."""
    pages = host.kv_rows.count
    ids = random.Random(0).sample(range(1, pages + 1), pages)
    return Copy(host.kv_rows, device.kv_rows, list(range(pages)), ids)


async def _overlap(pages: int, rounds: int) -> dict[str, float]:
    device, host = _pools(pages)
    copy, post = _load(device, host), LoopPoster(asyncio.get_running_loop())
    engine, stream = ThreadEngine(post), WorkerStream("forward", post)

    async def once(load: bool, layer_s: float) -> float:
        begun = time.perf_counter()
        ticket = engine.submit(CopyBatch("h2d", (copy,), by_layer=True)) if load else None
        for layer in range(_LAYERS if layer_s else 0):
            if ticket is not None:
                stream.wait(ticket.layer_fence(layer))
            stream.run(time.sleep, layer_s)
        await stream.record().reached()
        if ticket is not None:
            await ticket
        return time.perf_counter() - begun

    try:
        await once(True, 0)
        layer_s = statistics.median([await once(True, 0) for _ in range(rounds)]) / _LAYERS
        # In turns, so that what else the machine does meets all three.
        times = [
            (await once(True, 0), await once(False, layer_s), await once(True, layer_s))
            for _ in range(rounds)
        ]
    finally:
        stream.close()
        engine.close()
    load, compute, both = map(min, zip(*times, strict=True))
    ratios = [together / max(first, second) for first, second, together in times]
    low, middle, high = np.percentile(ratios, (10, 50, 90))
    return {
        "to_larger": both / max(load, compute),
        "by_round_p10": float(low),
        "by_round_p50": float(middle),
        "by_round_p90": float(high),
        "load_ms": load * 1e3,
        "compute_ms": compute * 1e3,
        "load_gb_s": copy.nbytes / load / 1e9,
    }


def overlap(pages: int = 128, rounds: int = 15) -> dict[str, float]:
    """A load of 32 layers under a pass that sleeps as long as the load takes: the worst case.

    `to_larger`: the least time of both together to the larger of the least times alone. How much
    the machine's other work blurs it is seen in the same ratio round by round.
    """
    torch.set_num_threads(1)
    return asyncio.run(_overlap(pages, rounds))


async def _ticks(ended: asyncio.Event) -> list[float]:
    """How late the loop runs a timer of 1 ms, in ms, over and over until the event."""
    late: list[float] = []
    while not ended.is_set():
        begun = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - begun - 0.001) * 1e3)
    return late


async def _lag(gib: float) -> dict[str, float]:
    device, host = _pools(64)
    copy, post = _load(device, host), LoopPoster(asyncio.get_running_loop())
    engine = ThreadEngine(post)
    times = round(gib * 2**30 / copy.nbytes)

    async def copying() -> float:
        begun = time.perf_counter()
        for _ in range(times):
            await engine.submit(CopyBatch("h2d", (copy,)))
        return time.perf_counter() - begun

    async def during(work: asyncio.Task[float]) -> list[float]:
        ended = asyncio.Event()
        work.add_done_callback(lambda _: ended.set())
        return await _ticks(ended)

    async def beside(seconds: float) -> list[float]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _COPY_FOREVER, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            return await during(asyncio.create_task(_idle(seconds)))
        finally:
            process.kill()
            await process.wait()

    try:
        took = await copying()
        quiet: list[float] = []
        busy: list[float] = []
        other: list[float] = []
        for _ in range(3):  # in turns
            quiet += await during(asyncio.create_task(_idle(took)))
            busy += await during(asyncio.create_task(copying()))
            other += await beside(took)
    finally:
        engine.close()
    return {
        "p50_ms": float(np.percentile(busy, 50)),
        "p99_ms": float(np.percentile(busy, 99)),
        "process_p99_ms": float(np.percentile(other, 99)),
        "quiet_p99_ms": float(np.percentile(quiet, 99)),
        "wakeups_a_copy": post.wakeups / (times * 4),
    }


async def _idle(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def lag(gib: float = 1.0) -> dict[str, float]:
    """How late the loop is while `gib` GiB move, three times; between those times; and while
    another *process* copies, which shares no interpreter: what the machine's scheduler does.
    """
    torch.set_num_threads(1)
    return asyncio.run(_lag(gib))
