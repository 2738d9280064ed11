"""What device a runtime works on, and by what means."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.engine import CopyEngine, Post
from phloem.cuda_streams.host import HostMemory, ordinary_memory
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.threads import ThreadEngine
from phloem.errors import InvalidRequest
from phloem.runtime.config import CacheConfig

__all__ = [
    "EngineFactory", "HostMemoryFactory", "driver_for", "engine_for", "host_pools_for", "pools_for",
]  # fmt: skip

EngineFactory = Callable[[Post], CopyEngine]
HostMemoryFactory = Callable[[int, int], HostMemory]
"""Memory for so many rows of so many bytes."""


def pools_for(
    config: CacheConfig, device: str | torch.device | None, pools: DevicePools | None
) -> DevicePools:
    """The pools given, or new ones on `device`, by default in CPU memory.

    Raises `InvalidRequest` when pools were given that are elsewhere or have other pages.
    """
    if pools is None:
        return DevicePools.allocate(
            config.layout,
            pages=config.device_pages + 1,
            states=config.device_states + 1,
            page_size=config.page_size,
            device="cpu" if device is None else device,
        )
    if pools.page_size != config.page_size:
        raise InvalidRequest(
            f"the pools have pages of {pools.page_size} tokens, the config of {config.page_size}"
        )
    if device is not None and not _same(torch.device(device), pools.device):
        raise InvalidRequest(f"the pools are on {pools.device}, not on {device}")
    return pools


def host_pools_for(
    config: CacheConfig,
    pools: DevicePools,
    driver: Driver | None,
    memory: HostMemoryFactory | None = None,
) -> HostPools | None:
    """The pools of the host tier, pinned where a driver can; None when it is off.

    Raises `HostMemoryShort` with nothing taken when the memory is not there.
    """
    pages, states = config.host_places(pools.page_bytes, pools.slot_bytes)
    if not pages:
        return None
    if memory is None:
        memory = ordinary_memory if driver is None else driver.pinned_memory()
    # Place 0 is never granted, as on the device.
    return HostPools.allocate(
        pools, pages=pages + 1, states=states + 1, memory=memory, int8_states=config.int8_states
    )


def _same(asked: torch.device, there: torch.device) -> bool:
    whole = str(asked) == asked.type  # `cuda` stands for whichever
    return asked.type == there.type if whole else asked == there


def driver_for(device: torch.device) -> Driver | None:
    """The driver of a CUDA device; None for memory that threads copy.

    Raises `InvalidRequest` for any other device.
    """
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        raise InvalidRequest(f"no copy engine for {device}; there are cpu and cuda")
    from phloem.cuda_streams.cuda import CudaDriver

    return CudaDriver(device)


def engine_for(driver: Driver | None) -> EngineFactory:
    """The engine that suits: of the device, or of worker threads."""
    if driver is None:
        return ThreadEngine
    return lambda post: DeviceEngine(post, driver)
