"""What device a runtime works on, and by what means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.engine import CopyEngine, Post
from phloem.cuda_streams.hazards import Hazard, HazardChecker
from phloem.cuda_streams.host import HostMemory
from phloem.cuda_streams.lockstep import SimulatedLoop
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.errors import InvalidRequest
from phloem.runtime.config import CacheConfig, parse_bytes

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

    Raises `InvalidRequest` for a device that is not there, and when pools were given that are
    elsewhere, have other pages, or keep other layers than the configured model does.
    """
    if pools is None:
        return _new_pools(config, "cpu" if device is None else _usable(device))
    if parse_bytes(config.device_bytes) and pools.frame is None:
        raise InvalidRequest(
            "device_bytes needs pools that share one memory, as DevicePools.share makes them; "
            "those given are separate"
        )
    if pools.page_size != config.page_size:
        raise InvalidRequest(
            f"the pools have pages of {pools.page_size} tokens, the config of {config.page_size}"
        )
    layers = config.layout.layers
    with_kv = {number for number, layer in enumerate(layers) if layer.kv is not None}
    states = {n: {s.name for s in layer.states} for n, layer in enumerate(layers) if layer.states}
    if with_kv != set(pools.kv) or states != {n: set(kept) for n, kept in pools.states.items()}:
        raise InvalidRequest("the pools keep KV or states of other layers than the config's layout")
    if device is not None and not _same(torch.device(device), pools.device):
        raise InvalidRequest(f"the pools are on {pools.device}, not on {device}")
    return pools


def _usable(device: str | torch.device) -> str | torch.device:
    """`device`, which torch can reach. Raises `InvalidRequest` with torch's reason if it cannot."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise InvalidRequest(f"device {device!r} cannot be used: {error}") from error
    return device


def _new_pools(config: CacheConfig, device: str | torch.device) -> DevicePools:
    layout, page_size = config.layout, config.page_size
    nbytes = parse_bytes(config.device_bytes)
    if nbytes and layout.has_kv and layout.has_states:
        return DevicePools.share(layout, nbytes=nbytes, page_size=page_size, device=device)
    pages, states = config.device_pages + 1, config.device_states + 1
    if nbytes and layout.has_kv:
        room = pages = nbytes // layout.page_bytes(page_size)
    elif nbytes:
        room = states = nbytes // layout.slot_bytes
    else:
        room = pages
    if room < 2:
        raise InvalidRequest(f"device_bytes {config.device_bytes}: no room for anything to grant")
    return DevicePools.allocate(
        layout,
        pages=pages,
        states=states,
        page_size=page_size,
        device=device,
        spans={name: count + 1 for name, count in config.span_pages.items()},
    )


def host_pools_for(
    config: CacheConfig, pools: DevicePools, memory: HostMemoryFactory
) -> HostPools | None:
    """The pools of the host tier; None when it is off.

    Raises `HostMemoryShort` with nothing taken when the memory is not there.
    """
    pages, states = config.host_places(pools.page_bytes, pools.slot_bytes)
    if not pages:
        return None
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


def engine_for(driver: Driver | None, loop: object) -> EngineFactory:
    """The engine that suits: of the device, of worker threads, or of a loop's virtual time."""
    if driver is not None:
        return lambda post: DeviceEngine(post, driver)
    if isinstance(loop, SimulatedLoop):
        return partial(_virtual_engine, loop)
    return ThreadEngine


def _virtual_engine(loop: SimulatedLoop, post: Post) -> CopyEngine:
    def tell(hazard: Hazard) -> None:
        loop.fail(AssertionError(f"memory was used while a copy used it: {hazard}"))

    return VirtualEngine(loop.clock, post=post, hazards=HazardChecker(tell))
