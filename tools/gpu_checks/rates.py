"""Figures: pinning, the link, scattered copies, completion, what copies cost a model."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from streams.bench import LAYOUT
from torch import Tensor

from gpu_checks.bed import Bed, layout_of
from gpu_checks.table import Outcome, Skip
from phloem.cuda_streams.batches import Channel, Copy, CopyBatch
from phloem.cuda_streams.device_mover import DeviceMover
from phloem.cuda_streams.driver import Driver

__all__ = ["completion", "gil", "interference", "link", "pinning", "scattered"]

_MIB = 1 << 20


def _resident() -> int:
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return int(status.split()[0]) << 10


async def pinning(bed: Bed) -> Outcome:
    """Pinned memory: how fast, and no more than was asked for."""
    outcome, row = Outcome(), _MIB
    rows = max(3, int(1126 * bed.scale))  # 1.1 GiB: no power of two
    memory = bed.driver.pinned_memory()
    before, begun = _resident(), time.perf_counter()
    held = memory(rows, row)
    outcome.figures["GB/s"] = rows * row / (time.perf_counter() - begun) / 1e9
    used = (_resident() - before) / (rows * row)
    outcome.figures["resident / asked"] = used
    if bed.scale >= 1:
        outcome.expect(used <= 1.02, f"{used:.2f} times the memory asked for is in use")
    if bed.is_cuda:
        begun = time.perf_counter()
        torch_memory = torch.empty(rows * row, dtype=torch.uint8, pin_memory=True)
        outcome.figures["torch GB/s"] = torch_memory.numel() / (time.perf_counter() - begun) / 1e9
    begun = time.perf_counter()
    memory.close()
    outcome.figures["undone in s"] = time.perf_counter() - begun
    outcome.expect(held.rows.shape == (rows, row), "the memory has another shape")
    return outcome


async def link(bed: Bed) -> Outcome:
    """One piece across the link, each way and both at once."""
    outcome, driver = Outcome(), bed.driver
    down, up = driver.new_stream("down"), driver.new_stream("up")
    memory = driver.pinned_memory()
    sizes = [64 << 10, _MIB, 4 * _MIB, 20 * _MIB, 256 * _MIB]
    for size in [max(4096, int(size * bed.scale)) for size in sizes]:
        host = list(memory(2, size).rows)
        device = [torch.empty(size, dtype=torch.uint8, device=driver.device) for _ in range(2)]
        driver.settle()
        times = 200 if size < 64 * _MIB else 20

        def run(
            stream: object, target: Tensor, source: Tensor, times: int = times
        ) -> Callable[[], None]:
            def copies() -> None:
                for _ in range(times):
                    target.copy_(source, non_blocking=True)

            return lambda: driver.enqueue(stream, copies)

        go_down, go_up = run(down, host[0], device[0]), run(up, device[1], host[1])
        moved = size * times / 1e9

        def go_both(
            go_down: Callable[[], None] = go_down, go_up: Callable[[], None] = go_up
        ) -> None:
            go_down()
            go_up()
            driver.settle()

        both = bed.seconds(down, go_both)
        outcome.figures[f"{size >> 10} KiB d2h|h2d|both GB/s"] = (
            f"{moved / bed.seconds(down, go_down):.1f}|{moved / bed.seconds(up, go_up):.1f}"
            f"|{2 * moved / both:.1f}"
        )
    driver.settle()
    memory.close()
    for stream in (down, up):
        driver.close_stream(stream)
    return outcome


class _Staging:
    """The driver without batched copies, so that whatever can be staged is."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.batch_copy = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)


async def scattered(bed: Bed) -> Outcome:
    """Pages in any order: pieces in one call against a buffer on the device; GB/s."""
    outcome, driver = Outcome(), bed.driver
    if driver.batch_copy is None:
        outcome.figures["batched copies"] = "none: everything is staged"
    layers = 4
    for item, count in ((4, 1024), (16, 1024), (24, 1024), (32, 1024), (64, 1024), (256, 256)):
        pages = max(8, int(count * bed.scale)) // layers
        layout = layout_of(layers, item << 10, 16)
        device, host = bed.pools(layout, pages=pages + 1)
        ids, there = list(range(1, pages + 1)), list(range(1, pages + 1))
        random.Random(1).shuffle(ids)
        random.Random(2).shuffle(there)
        copies = {
            "d2h": Copy(device.kv_rows, host.kv_rows, ids, there),
            "h2d": Copy(host.kv_rows, device.kv_rows, there, ids),
        }
        cells: list[str] = []
        for staged in (False, True):
            if not staged and driver.batch_copy is None:
                continue
            stream = driver.new_stream("copies")
            with torch.inference_mode():
                use = _Staging(driver) if staged else driver
                mover = DeviceMover(use, stream, 16 << 20)  # type: ignore[arg-type]  # stands in
                for way, copy in copies.items():
                    move = _move(mover, copy, staged)
                    bed.seconds(stream, move)
                    best = min(bed.seconds(stream, move) for _ in range(5))
                    rate = copy.nbytes / best / 1e9
                    cells.append(f"{way} {'staged' if staged else 'direct'} {rate:.1f}")
            driver.close_stream(stream)
        outcome.figures[f"{item} KiB x {pages * layers}"] = ", ".join(cells)
    return outcome


def _move(mover: DeviceMover, copy: Copy, staged: bool) -> Callable[[], None]:
    def move() -> None:
        if staged:
            mover.whole(copy)
        else:
            for layer in range(copy.target.layers):
                mover.layer(copy, layer)

    return move


async def completion(bed: Bed) -> Outcome:
    """From a submission to the caller's next line; and what waiting costs the CPU."""
    outcome = Outcome()
    device, host = bed.pools(LAYOUT, pages=4, page_size=2)
    item = Copy(device.state_rows, host.state_rows, [0], [0])
    async with bed.engine() as engine, bed.stream() as stream:
        samples: list[float] = []
        for _ in range(500 if bed.is_cuda else 20):
            begun = time.perf_counter()
            await engine.submit(CopyBatch("d2h", (item,)))
            samples.append((time.perf_counter() - begun) * 1e6)
        samples.sort()
        outcome.figures["p50 µs"] = samples[len(samples) // 2]
        outcome.figures["p99 µs"] = samples[len(samples) * 99 // 100]
        cpu, begun = time.process_time(), time.perf_counter()
        for _ in range(10):
            bed.delay(stream.stream, 50.0 if bed.is_cuda else 2.0)
            await stream.record().reached()
        busy = (time.process_time() - cpu) / (time.perf_counter() - begun)
        outcome.figures["CPU while waiting, %"] = 100 * busy
        if bed.is_cuda:
            outcome.expect(busy < 0.5, f"waiting takes {busy:.0%} of a core: something spins")
    return outcome


async def gil(bed: Bed) -> Outcome:
    """Whether the interpreter runs on while a thread waits for an event."""
    outcome, driver = Outcome(), bed.driver
    stream = driver.new_stream("busy")

    def progress(waiting: bool) -> int:
        count, ended = 0, threading.Event()
        wait_ms = 200.0 if bed.is_cuda else 20.0

        def wait() -> None:
            if waiting:
                bed.delay(stream, wait_ms)
                driver.synchronize(driver.record(stream))
            else:
                time.sleep(wait_ms / 1e3)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        while not ended.is_set():
            count += 1
        thread.join()
        return count

    progress(False)
    alone = statistics.median(progress(False) for _ in range(3))
    share = statistics.median(progress(True) for _ in range(3)) / alone
    outcome.figures["progress, %"] = 100 * share
    if bed.is_cuda:
        outcome.expect(share > 0.5, f"the interpreter keeps {share:.0%} of its speed")
    driver.close_stream(stream)
    return outcome


async def interference(bed: Bed) -> Outcome:
    """What copies at full rate cost a model that multiplies matrices meanwhile."""
    if not bed.is_cuda:
        raise Skip("a matter of the device")
    outcome, driver = Outcome(), bed.driver
    device, host = bed.pools(layout_of(8, 64 << 10, 16), pages=513)
    ids = list(range(1, 513))
    copies: dict[Channel, Copy] = {
        "d2h": Copy(device.kv_rows, host.kv_rows, ids, ids[::-1]),
        "h2d": Copy(host.kv_rows, device.kv_rows, ids, ids[::-1]),
    }
    a = torch.randn(4096, 4096, device=driver.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    driver.settle()

    def compute() -> None:
        for _ in range(100):
            torch.mm(a, a, out=out)

    async with bed.engine() as engine, bed.stream() as stream:

        def seconds() -> float:
            return bed.seconds(stream.stream, lambda: driver.enqueue(stream.stream, compute))

        seconds()
        alone = min(seconds() for _ in range(3))
        for way, copy in copies.items():
            tickets = [engine.submit(CopyBatch(way, (copy,))) for _ in range(40)]
            await tickets[0].placed.reached()
            with_copies = await asyncio.to_thread(seconds)
            outcome.figures[f"slower with {way}, %"] = 100 * (with_copies / alone - 1)
            outcome.figures[f"{way} still copying"] = "yes" if not tickets[-1].done else "no"
            await engine.drain()
    return outcome
