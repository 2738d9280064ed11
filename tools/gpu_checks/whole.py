"""The whole runtime on a device: served with the cache and without, the answers are the same."""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, cast

import torch

from gpu_checks.bed import Bed
from gpu_checks.table import Outcome, Skip
from phloem.cuda_streams.device_streams import DeviceWorker
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.pools import DevicePools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phloem.runtime.cache import Stats
    from phloem.runtime.integrations.server import Completion, HybridServer
    from phloem.runtime.integrations.transformers import TransformersModel

__all__ = ["NEEDS", "whole"]

NEEDS = ("anyio", "msgspec", "structlog", "transformers", "safetensors")
"""What the runtime and its example model import beyond torch."""

_PAGE, _GRID = 16, 64


def _prompts(vocabulary: int, chunks: int) -> list[list[int]]:
    """Turns of two conversations with one system prompt, one of them asked twice."""
    rng = Random(0)
    shared = rng.choices(range(vocabulary), k=chunks * _GRID)
    first = shared + rng.choices(range(vocabulary), k=70)
    second = shared + rng.choices(range(vocabulary), k=100)
    return [first, second, first, first + rng.choices(range(vocabulary), k=90), second[:300]]


async def _serve(
    server: HybridServer[object],  # type: ignore[type-var]  # whichever requests it has
    prompts: Sequence[Sequence[int]],
) -> list[Completion]:
    async with server:  # one after another: batches of other sizes may round differently
        return [await server.generate(prompt, 8) for prompt in prompts]


async def _cached(
    bed: Bed, model: TransformersModel, prompts: Sequence[Sequence[int]], **sizes: object
) -> tuple[list[Completion], Stats]:
    """The answers with a cache, and its books at the end."""
    from phloem.runtime.cache import CacheRuntime
    from phloem.runtime.config import CacheConfig
    from phloem.runtime.integrations.server import HybridServer

    driver = bed.driver
    native = driver.new_stream("model")
    config = CacheConfig(
        layout=model.layout,
        page_size=_PAGE,
        state_chunk=_GRID,
        **sizes,  # type: ignore[arg-type]  # numbers and texts by name
    )
    async with AsyncExitStack() as at_end:
        at_end.callback(driver.close_stream, native)
        async with CacheRuntime(config, device=driver.device, driver=driver) as cache:
            worker = cache.worker_stream("model", on=cast("torch.Stream", native))
            try:
                server = HybridServer(model, cache, worker, chunk=_GRID, publish="all")
                warm = await _serve(server, prompts)  # type: ignore[arg-type]
            finally:
                await asyncio.to_thread(worker.close)
            await cache.audit()
            return warm, cache.stats()


async def _bare(
    bed: Bed, model: TransformersModel, prompts: Sequence[Sequence[int]]
) -> list[Completion]:
    """The answers without a cache."""
    from phloem.runtime.integrations.bare import BareCache
    from phloem.runtime.integrations.server import HybridServer

    driver = bed.driver
    native = driver.new_stream("bare")
    pools = DevicePools.allocate(
        model.layout, pages=65, states=3, page_size=_PAGE, device=driver.device
    )
    async with AsyncExitStack() as at_end:
        at_end.callback(driver.close_stream, native)
        worker = DeviceWorker("bare", native, driver, LoopPoster(asyncio.get_running_loop()))
        try:
            server = HybridServer(model, BareCache(pools, worker), worker, chunk=_GRID)
            return await _serve(server, prompts)  # type: ignore[arg-type]
        finally:
            await asyncio.to_thread(worker.close)


async def whole(bed: Bed) -> Outcome:
    """The example model over pools on the device: bare, cached, and with a host tier.

    The same tokens each time, and the books in order; with the host tier the device's pools are too
    small, so that data goes there and comes back.
    """
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise Skip(f"needs {', '.join(missing)}")
    from phloem.runtime.integrations.models import build_model
    from phloem.runtime.integrations.transformers import TransformersModel

    outcome = Outcome()
    module = cast("torch.nn.Module", build_model("qwen3-next")).to(bed.driver.device)
    model = TransformersModel(cast("object", module))  # type: ignore[arg-type]  # as it was
    chunks = 4 if bed.is_cuda else 2
    prompts = _prompts(model.vocabulary, chunks)[: 5 if bed.is_cuda else 3]
    cold = await _bare(bed, model, prompts)
    roomy: dict[str, object] = {"device_pages": 256, "device_states": 24}
    # Room for one conversation and a little.
    small: dict[str, object] = {"device_pages": 10 + 5 * chunks, "device_states": 4}
    both = {
        "device": await _cached(bed, model, prompts, **roomy),
        "host": await _cached(bed, model, prompts, **small, host_bytes="256MiB"),
    }
    for tier, (warm, stats) in both.items():
        reused = sum(one.reused for one in warm)
        outcome.figures[f"reused, {tier}"] = float(reused)
        outcome.figures[f"s, {tier}"] = sum(one.total_s for one in warm)
        outcome.expect(reused > 0, f"{tier}: nothing was reused")
        for number, (one, other) in enumerate(zip(warm, cold, strict=True)):
            same = one.tokens == other.tokens
            outcome.expect(same, f"{tier}: prompt {number} is answered differently")
        for name, pool in (("kv", stats.kv), ("state", stats.state)):
            lost = pool.size - pool.free - pool.parked - pool.tree - pool.granted
            outcome.expect(not lost, f"{tier}: {lost} places of {name} are owned by nobody")
    loaded = both["host"][1].tokens_loaded
    outcome.figures["tokens loaded"] = float(loaded)
    outcome.expect(loaded > 0, "nothing came back from the host tier")
    outcome.figures["s, cold"] = sum(one.total_s for one in cold)
    outcome.figures["threads near"] = both["device"][1].near
    return outcome
