"""A forward pass that reads each layer as soon as it has landed."""

from __future__ import annotations

import statistics
import time

import torch

from gpu_checks.bed import Bed, layout_of
from gpu_checks.table import Outcome
from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_streams import DeviceStream
from phloem.cuda_streams.pools import DevicePools
from phloem.cuda_streams.virtual import overlapped_end_ns

__all__ = ["overlap"]

_LAYERS = 32


class _Forward:
    """32 layers of matrix products, each of which also adds up what its layer holds."""

    def __init__(self, bed: Bed, pools: DevicePools, products: int) -> None:
        size = 4096 if bed.is_cuda else 32
        dtype = torch.bfloat16 if bed.is_cuda else torch.float32
        self.bed, self.pools, self.products = bed, pools, products
        self.a = torch.randn(size, size, device=bed.driver.device, dtype=dtype)
        self.out = torch.empty_like(self.a)
        self.sums = torch.zeros(_LAYERS, dtype=torch.int64, device=bed.driver.device)
        bed.driver.settle()

    def layer(self, number: int) -> None:
        for part in self.pools.kv_rows.parts(number):
            self.sums[number] = part[1:].sum(dtype=torch.int64)
        for _ in range(self.products):
            torch.mm(self.a, self.a, out=self.out)

    def launch(self, stream: DeviceStream, number: int) -> None:
        self.bed.driver.enqueue(stream.stream, lambda: self.layer(number))


async def _once(
    engine: DeviceEngine, stream: DeviceStream, copy: Copy | None, forward: _Forward | None
) -> float:
    begun = time.perf_counter()
    ticket = None
    if copy is not None:
        ticket = engine.submit(CopyBatch("h2d", (copy,), by_layer=True))
        await ticket.placed.reached()
    if forward is not None:
        for number in range(_LAYERS):
            if ticket is not None:
                stream.wait(ticket.layer_fence(number))
            forward.launch(stream, number)
        await stream.record().reached()
    if ticket is not None:
        await ticket
    return time.perf_counter() - begun


async def overlap(bed: Bed) -> Outcome:
    """Loads of 1k to 8k tokens under a pass: right sums, and the time beside the closed form."""
    outcome = Outcome()
    tokens = [1024, 4096, 8192] if bed.is_cuda else [64]
    item = 64 << 10 if bed.is_cuda else 1 << 10
    async with bed.engine() as engine, bed.stream() as stream:
        for count in tokens:
            pages = count // 16
            device, host = bed.pools(layout_of(_LAYERS, item, 16), pages=pages + 1)
            ids = list(range(1, pages + 1))
            want = []
            for number in range(_LAYERS):
                (part,) = device.kv_rows.parts(number)
                want.append(int(part[1:].sum(dtype=torch.int64)))
            await engine.submit(CopyBatch("d2h", (Copy(device.kv_rows, host.kv_rows, ids, ids),)))
            copy = Copy(host.kv_rows, device.kv_rows, ids, ids)
            forward = _Forward(bed, device, 4 if bed.is_cuda else 1)
            for number in range(_LAYERS):
                for part in device.kv_rows.parts(number):
                    part.zero_()
            bed.driver.settle()
            await _once(engine, stream, copy, forward)
            wrong = [n for n in range(_LAYERS) if int(forward.sums[n]) != want[n]]
            outcome.expect(not wrong, f"{count} tokens: layers {wrong} were read before they came")
            load, compute, both = [
                statistics.median([await _once(engine, stream, *what) for _ in range(5)])
                for what in ((copy, None), (None, forward), (copy, forward))
            ]
            landed = [round(load * 1e9 * (n + 1) / _LAYERS) for n in range(_LAYERS)]
            closed = overlapped_end_ns(landed, [round(compute * 1e9 / _LAYERS)] * _LAYERS) / 1e9
            outcome.figures[f"{count} tokens, ms load|compute|both"] = (
                f"{load * 1e3:.2f}|{compute * 1e3:.2f}|{both * 1e3:.2f}"
            )
            outcome.figures[f"{count}: to closed form"] = both / closed
            outcome.figures[f"{count}: to the larger"] = both / max(load, compute)
    return outcome
