"""The device under test: its driver, a way to make it busy, pools, streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from phloem.cuda_streams.cuda import CudaDriver
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_streams import DeviceStream
from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.runtime.layout import LayerSpec, ModelLayout

__all__ = ["Bed", "cuda_bed", "layout_of"]


@dataclass(frozen=True)
class Bed:
    """One device. `scale` shrinks the sizes that rates are measured at, for tests."""

    driver: Driver
    delay: Callable[[object, float], None]
    """Keep a stream busy for so many milliseconds."""
    scale: float = 1.0

    @property
    def is_cuda(self) -> bool:
        return isinstance(self.driver, CudaDriver)

    def pools(
        self, layout: ModelLayout, *, pages: int, states: int = 1, page_size: int = 16
    ) -> tuple[DevicePools, HostPools]:
        """Device pools of random bytes and host pools of zeros, of equal counts."""
        device = DevicePools.allocate(
            layout, pages=pages, states=states, page_size=page_size, device=self.driver.device
        )
        host = HostPools.allocate(
            device, pages=pages, states=states, memory=self.driver.pinned_memory()
        )
        for pool in (device.kv_rows, device.state_rows):
            for layer in range(pool.layers):
                for part in pool.parts(layer):
                    part.random_(0, 256)
        self.driver.settle()
        return device, host

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[DeviceEngine]:
        """An engine that posts to the running loop."""
        engine = DeviceEngine(LoopPoster(asyncio.get_running_loop()), self.driver)
        try:
            yield engine
        finally:
            await asyncio.to_thread(engine.close)

    @asynccontextmanager
    async def stream(self, name: str = "forward") -> AsyncGenerator[DeviceStream]:
        """A stream of the caller's."""
        native = self.driver.new_stream(name)
        post = LoopPoster(asyncio.get_running_loop())
        stream = DeviceStream(name, native, self.driver, post)
        try:
            yield stream
        finally:
            await asyncio.to_thread(stream.close)
            self.driver.close_stream(native)

    def seconds(self, stream: object, fn: Callable[[], None]) -> float:
        """How long what `fn` puts onto the stream takes, its submission included."""
        self.driver.synchronize(self.driver.record(stream))
        begun = time.perf_counter()
        fn()
        self.driver.synchronize(self.driver.record(stream))
        return time.perf_counter() - begun


def layout_of(layers: int, item_bytes: int, page_size: int) -> ModelLayout:
    """Attention layers whose K and V of a page take `item_bytes` together."""
    dim = item_bytes // (2 * page_size * 2)
    assert dim * 4 * page_size == item_bytes, "sizes that divide"
    plain = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=dim)
    return ModelLayout.from_layers([LayerSpec(kv=plain.layers[0].kv)] * layers)


def cuda_bed(device: str) -> Bed:
    """The bed on a CUDA device. Raises InvalidRequest where there is none."""
    driver = CudaDriver(device)
    stream = driver.new_stream("calibration")
    cycles = 20_000_000

    def spin(stream: object, count: int) -> None:
        with driver.current(stream):
            torch.cuda._sleep(count)  # type: ignore[no-untyped-call]  # torch's own tests use it

    bed = Bed(driver, lambda *_: None)
    bed.seconds(stream, lambda: spin(stream, 1000))
    per_ms = cycles / (bed.seconds(stream, lambda: spin(stream, cycles)) * 1e3)
    driver.close_stream(stream)
    return Bed(driver, lambda stream, ms: spin(stream, int(ms * per_ms)))
