"""Copies by worker threads: a load under a forward pass, and what copies do to the loop."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch, CopyItem
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.mover import RowMover
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.workers import ThreadWorker
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


class _Round(NamedTuple):
    """One pass, one load, or both: seconds from the start."""

    ended: float
    landed: list[float]  # when each layer was there
    took: list[float]  # what each layer's computing took

    @property
    def closed_form(self) -> float:
        """When it would have ended if each layer began at once: the rest is our own doing."""
        return _ended(self.landed, self.took)


def _ended(landed: Sequence[float], took: Sequence[float]) -> float:
    now = 0.0
    for there, cost in zip(landed, took, strict=True):
        now = max(now, there) + cost
    return now


class _Nothing(RowMover):
    """A mover that takes its time and moves nothing: no bytes, no lock, no cache is fought for."""

    def __init__(self, layer_s: float) -> None:
        super().__init__(stage_bytes=1)
        self._layer_s = layer_s

    def add(self, item: CopyItem, layer: int) -> None:
        del item, layer

    def flush(self) -> None:
        time.sleep(self._layer_s)


class _Overlap:
    """A load of 32 layers and a pass over them, alone and together."""

    def __init__(self, pages: int, mover: Callable[[], RowMover] = RowMover) -> None:
        device, host = _pools(pages)
        post = LoopPoster(asyncio.get_running_loop())
        self.copy = _load(device, host)
        self.layer_s = 0.0
        self._engine, self._stream = ThreadEngine(post, mover=mover), ThreadWorker("forward", post)

    def close(self) -> None:
        self._stream.close()
        self._engine.close()

    async def load(self) -> float:
        """Seconds of a load by itself."""
        begun = time.perf_counter()
        await self._engine.submit(CopyBatch("h2d", (self.copy,), by_layer=True))
        return time.perf_counter() - begun

    async def compute(self) -> float:
        """Seconds of a pass by itself."""
        return (await self._run(None)).ended

    async def both(self) -> _Round:
        return await self._run(CopyBatch("h2d", (self.copy,), by_layer=True))

    async def _run(self, batch: CopyBatch | None) -> _Round:
        landed, took = [0.0] * _LAYERS, [0.0] * _LAYERS
        begun = time.perf_counter()

        def note(layer: int) -> None:
            landed[layer] = time.perf_counter() - begun

        def compute(layer: int) -> None:
            start = time.perf_counter()
            time.sleep(self.layer_s)
            took[layer] = time.perf_counter() - start

        ticket = None if batch is None else self._engine.submit(batch)
        for layer in range(_LAYERS):
            if ticket is not None:
                fence = ticket.layer_fence(layer)
                fence.add_hook(partial(note, layer))
                self._stream.wait(fence)
            self._stream.run(compute, layer)
        await self._stream.record().reached()
        ended = time.perf_counter() - begun
        if ticket is not None:
            await ticket
        return _Round(ended, landed, took)

    async def measure(self, rounds: int) -> dict[str, float]:
        loads: list[float] = []
        passes: list[float] = []
        together: list[_Round] = []
        for number in range(-3, rounds):  # in turns: what else the machine does meets all three
            loads.append(await self.load())
            # As long as the load, since then neither hides the other: the worst case.
            self.layer_s = min(loads[1:] or loads) / _LAYERS
            one, two = await self.compute(), await self.both()
            if number >= 0:
                passes.append(one)
                together.append(two)
        least = min(together)
        idle = [1e6 * (one.ended - one.closed_form) / _LAYERS for one in together]
        return {
            "to_larger": least.ended / max(min(loads), min(passes)),
            "to_closed_form": min(one.ended / one.closed_form for one in together),
            "wait_us_a_layer": min(idle),
            "wait_us_a_layer_p50": float(np.percentile(idle, 50)),
            "load_ms": min(loads) * 1e3,
            "compute_ms": min(passes) * 1e3,
            "load_gb_s": self.copy.nbytes / min(loads) / 1e9,
        }


async def _overlap(pages: int, rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    moves = _Overlap(pages)
    try:
        found["bytes"] = await moves.measure(rounds)
    finally:
        moves.close()
    layer_s = found["bytes"]["load_ms"] / 1e3 / _LAYERS
    sleeps = _Overlap(1, partial(_Nothing, layer_s))
    try:
        found["sleeping"] = await sleeps.measure(rounds)
    finally:
        sleeps.close()
    return found


def overlap(pages: int = 32, rounds: int = 60) -> dict[str, dict[str, float]]:
    """A load of 32 layers under a pass that sleeps as long as the load takes: the worst case.

    `bytes` moves them; `sleeping` only takes the time, so it shows the engine without what moving
    does to a machine that computes as well. `to_larger`: the least time of both together to the
    larger of the least times alone; 1.03 is what no engine can better, since the first layer must
    have landed. `to_closed_form`: to when a pass had to end by the instants at which the layers
    landed in that very round, the least of all rounds; `wait_us_a_layer`: the rest.
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


async def _lag(gib: float, turns: int) -> dict[str, float]:
    device, host = _pools(64)
    copy, post = _load(device, host), LoopPoster(asyncio.get_running_loop())
    engine = ThreadEngine(post)
    times = max(1, round(gib * 2**30 / copy.nbytes))

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

    late: dict[str, list[list[float]]] = {"quiet": [], "busy": [], "process": []}
    try:
        took = await copying()
        for _ in range(turns):
            late["quiet"].append(await during(asyncio.create_task(_idle(took))))
            late["busy"].append(await during(asyncio.create_task(copying())))
            late["process"].append(await beside(took))
    finally:
        engine.close()
    figures: dict[str, float] = {"wakeups_a_copy": post.wakeups / (times * (turns + 1))}
    for name, by_turn in late.items():
        p99s = [float(np.percentile(ticks, 99)) for ticks in by_turn]
        figures |= {f"{name}_p99_ms": min(p99s), f"{name}_p99_ms_p50": statistics.median(p99s)}
    return figures


async def _idle(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def lag(gib: float = 1.0, turns: int = 24) -> dict[str, float]:
    """How late the loop is, at the 99th percentile of a turn, in the best turn and in the middle.

    `busy`: while `gib` GiB move; `quiet`: for as long, between those; `process`: while another
    process copies, which shares no interpreter: what the machine does, whoever copies.
    """
    torch.set_num_threads(1)
    return asyncio.run(_lag(gib, turns))
