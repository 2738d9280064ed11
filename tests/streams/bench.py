"""What the engine tests share: small pools full of random bytes, engines by name, an oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phloem.cuda_streams.batches import Clear, CopyItem
from phloem.cuda_streams.clocks import LoopClock
from phloem.cuda_streams.cuda import CudaDriver
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.dispatch import Dispatcher, Fault
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.host import ordinary_memory
from phloem.cuda_streams.mover import RowMover
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.rows import RowPool
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.runtime.layout import KVSpec, LayerSpec, ModelLayout, StateSpec
from streams.fake_device import FakeDriver
from streams.ranked import FAST, Ranks, over_ranks, virtual_engines

LAYOUT = ModelLayout.from_layers(
    [
        LayerSpec(states=(StateSpec("recurrent", (4, 8)), StateSpec("conv", (5, 3), "bfloat16"))),
        LayerSpec(),
        LayerSpec(KVSpec((2, 4), (2, 4), "bfloat16"), (StateSpec("conv", (7,), "float16"),)),
        LayerSpec(kv=KVSpec((1, 3), (1, 5), "float32")),
    ]
)

RANKS = ("", " of rank 1")  # what the names of pools end in


def fill(pool: RowPool, seed: int) -> None:
    """Random bytes in every row."""
    rng = torch.Generator().manual_seed(seed)
    for layer in range(pool.layers):
        for part in pool.parts(layer):
            part.copy_(torch.randint(0, 256, part.shape, generator=rng, dtype=torch.uint8))


def image(pool: RowPool) -> list[Tensor]:
    """The bytes of a pool as they are now."""
    return [part.cpu().clone() for layer in range(pool.layers) for part in pool.parts(layer)]


def apply(item: CopyItem, images: dict[str, list[Tensor]]) -> None:
    """The oracle: what an item does, row by row, to images of the pools, on each rank."""
    for rank in RANKS:
        for number, target in enumerate(images.get(item.target.name + rank, ())):
            for index, row in enumerate(item.target_ids):
                if isinstance(item, Clear):
                    target[row] = 0
                else:
                    source = images[item.source.name + rank][number]
                    target[row] = source[item.source_ids[index]]


@dataclass(repr=False)
class Bench:
    """Pools and the engines under test; `close` ends the engines."""

    kind: str
    device: DevicePools
    host: HostPools
    engines: list[Dispatcher]
    hazards: HazardChecker
    driver: FakeDriver = field(default_factory=FakeDriver)
    cuda: CudaDriver | None = None
    second: tuple[DevicePools, HostPools] | None = None  # what rank 1 has, where there is one
    ranks: list[Ranks] = field(default_factory=list[Ranks])

    @classmethod
    def make(cls, kind: str, *, pages: int = 24, states: int = 12, page_size: int = 2) -> Bench:
        place = "cuda:0" if kind == "cuda" else "cpu"
        cuda = CudaDriver(place) if kind == "cuda" else None
        memory = ordinary_memory if cuda is None else cuda.pinned_memory()
        device = DevicePools.allocate(
            LAYOUT, pages=pages, states=states, page_size=page_size, device=place
        )
        host = HostPools.allocate(device, pages=pages, states=states, memory=memory)
        bench = cls(kind, device, host, [], HazardChecker(), cuda=cuda)
        if kind == "two ranks":
            other = DevicePools.allocate(LAYOUT, pages=pages, states=states, page_size=page_size)
            bench.second = other, HostPools.allocate(other, pages=pages, states=states)
        for seed, (_, pool) in enumerate(bench.named()):
            fill(pool, seed)
        return bench

    @property
    def shards(self) -> tuple[tuple[RowPool, ...], ...]:
        """The pools of each rank; there is one but for the kind `two ranks`."""
        both = [(self.device, self.host), *([self.second] if self.second else [])]
        return tuple(
            (device.kv_rows, device.state_rows, host.kv_rows, host.state_rows)
            for device, host in both
        )

    def named(self) -> list[tuple[str, RowPool]]:
        return [
            (pool.name + rank, pool)
            for rank, pools in zip(RANKS, self.shards, strict=False)
            for pool in pools
        ]

    def images(self) -> dict[str, list[Tensor]]:
        return {name: image(pool) for name, pool in self.named()}

    def same(self, images: dict[str, list[Tensor]]) -> bool:
        now = self.images()
        return all(
            torch.equal(part, want)
            for name, parts in now.items()
            for part, want in zip(parts, images[name], strict=True)
        )

    def untouched(self, images: dict[str, list[Tensor]]) -> bool:
        """Device and states are as in `images`, on the rank where faults strike (the last)."""
        now, rank = self.images(), RANKS[len(self.shards) - 1]
        return all(
            torch.equal(part, want)
            for name in ("device kv", "device states", "host states")
            for part, want in zip(now[name + rank], images[name + rank], strict=True)
        )

    def engine(
        self,
        fault: Fault | None = None,
        *,
        mover: Callable[[], RowMover] = RowMover,
        order_seed: int | None = None,
    ) -> Dispatcher:
        loop = asyncio.get_running_loop()
        if self.kind == "threads":
            engine: Dispatcher = ThreadEngine(LoopPoster(loop), fault=fault, mover=mover)
        elif self.cuda is not None:
            engine = DeviceEngine(LoopPoster(loop), self.cuda, fault=fault)
        elif self.kind.startswith("device"):
            self.driver = FakeDriver(batched=self.kind == "device, batched")
            stage_bytes = 3 * self.device.page_bytes
            engine = DeviceEngine(
                LoopPoster(loop), self.driver, fault=fault, stage_bytes=stage_bytes
            )
        elif self.kind == "two ranks":
            clock, checkers = LoopClock(loop), (self.hazards, HazardChecker())
            engines = virtual_engines(clock, checkers, faults=(None, fault), order_seed=order_seed)
            self.ranks.append(over_ranks(LoopPoster(loop), clock, self.shards, engines))
            engine = self.ranks[-1].head
        else:
            clock = LoopClock(loop)
            engine = VirtualEngine(
                clock, links=FAST, fault=fault, hazards=self.hazards, order_seed=order_seed
            )
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def some_ids(rng: random.Random, pool: RowPool, count: int) -> list[int]:
    """`count` distinct rows: scattered, or one run."""
    if rng.random() < 0.5:
        return rng.sample(range(1, pool.count), count)
    start = rng.randrange(1, pool.count - count + 1)
    return list(range(start, start + count))
