"""Errors that stay and errors that pass."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import torch
from streams.bench import LAYOUT

from gpu_checks.bed import Bed, cuda_bed
from gpu_checks.table import Outcome, Skip
from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.cuda import CudaDriver
from phloem.errors import EngineDead

__all__ = ["lose_the_device", "lost", "refused_pinning"]

_SCRIPT = Path(__file__).resolve().parents[1] / "gpu_check.py"


async def refused_pinning(bed: Bed) -> Outcome:
    """Memory that cannot be pinned is refused, and the next kernel does not hear of it."""
    outcome, driver = Outcome(), bed.driver
    if not isinstance(driver, CudaDriver):
        raise Skip("a matter of the CUDA driver")
    memory = driver.pinned_memory()
    rows = memory(4, 4096).rows
    try:
        driver._register(rows.data_ptr(), rows.numel())  # a second time
        outcome.expect(False, "the driver pins what is pinned")
    except RuntimeError as error:
        outcome.figures["refused"] = str(error)
    ones = torch.ones(8, device=driver.device) + 1
    outcome.expect(float(ones.sum()) == 16, "the next kernel is wrong")
    device, host = bed.pools(LAYOUT, pages=4, page_size=2)
    async with bed.engine() as engine:
        await engine.submit(CopyBatch("d2h", (Copy(device.kv_rows, host.kv_rows, [1], [1]),)))
    memory.close()
    return outcome


async def lost(bed: Bed) -> Outcome:
    """A device lost in another process: everything there fails soon, and nothing hangs."""
    if not bed.is_cuda:
        raise Skip("a matter of the device")
    outcome = Outcome()
    command = [sys.executable, str(_SCRIPT), "--lose", "--device", str(bed.driver.device)]
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    outcome.figures["ended with"] = float(ran.returncode)
    outcome.expect(ran.returncode == 0, ran.stderr.strip().splitlines()[-1] if ran.stderr else "?")
    outcome.figures["said"] = ran.stdout.strip()
    return outcome


async def lose_the_device(device: str) -> str:
    """Trip an assertion on the device; how long until the engine said so.

    Raises AssertionError when something is still waiting, or took what it must not.
    """
    bed = cuda_bed(device)
    pools, host = bed.pools(LAYOUT, pages=4, page_size=2)
    item = Copy(pools.kv_rows, host.kv_rows, [1], [1])
    async with bed.engine() as engine, bed.stream() as stream:
        await engine.submit(CopyBatch("d2h", (item,)))
        begun = time.perf_counter()

        def out_of_bounds() -> None:
            index = torch.full((1,), 1 << 40, device=bed.driver.device)
            torch.zeros(4, device=bed.driver.device)[index] = 1

        bed.driver.enqueue(stream.stream, out_of_bounds)
        tickets = [engine.submit(CopyBatch("d2h", (item,), (stream.record(),))) for _ in range(5)]
        for ticket in tickets:
            try:
                await asyncio.wait_for(ticket.ended(), 10)
            except TimeoutError:
                raise AssertionError(f"{ticket} hangs") from None
        took = time.perf_counter() - begun
        assert engine.dead is not None, "the engine does not know that its device is lost"
        try:
            engine.submit(CopyBatch("d2h", (item,)))
        except EngineDead:
            return f"EngineDead after {took:.2f} s"
        raise AssertionError("a dead engine takes a batch")
