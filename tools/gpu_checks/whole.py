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

    from phloem.runtime.integrations.server import Completion, HybridServer

__all__ = ["NEEDS", "whole"]

NEEDS = ("anyio", "msgspec", "structlog", "transformers", "safetensors")
"""What the runtime and its example model import beyond torch."""

_PAGES, _STATES, _GRID = 256, 24, 64


def _prompts(vocabulary: int) -> list[list[int]]:
    """Turns of two conversations with one system prompt, one of them asked twice."""
    rng = Random(0)
    shared = rng.choices(range(vocabulary), k=4 * _GRID)
    first = shared + rng.choices(range(vocabulary), k=70)
    second = shared + rng.choices(range(vocabulary), k=100)
    return [first, second, first, first + rng.choices(range(vocabulary), k=90), second[:300]]


async def _serve(
    server: HybridServer[object],  # type: ignore[type-var]  # whichever requests it has
    prompts: Sequence[Sequence[int]],
) -> list[Completion]:
    async with server:  # one after another: batches of other sizes may round differently
        return [await server.generate(prompt, 8) for prompt in prompts]


async def whole(bed: Bed) -> Outcome:
    """The example model over pools on the device, cached and bare: equal tokens, sane books."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise Skip(f"needs {', '.join(missing)}")
    from phloem.runtime.cache import CacheRuntime
    from phloem.runtime.config import CacheConfig
    from phloem.runtime.integrations.bare import BareCache
    from phloem.runtime.integrations.models import build_model
    from phloem.runtime.integrations.server import HybridServer
    from phloem.runtime.integrations.transformers import TransformersModel

    outcome, driver = Outcome(), bed.driver
    module = cast("torch.nn.Module", build_model("qwen3-next")).to(driver.device)
    model = TransformersModel(cast("object", module))  # type: ignore[arg-type]  # as it was
    prompts = _prompts(model.vocabulary)
    config = CacheConfig(
        layout=model.layout,
        page_size=16,
        state_chunk=_GRID,
        device_pages=_PAGES,
        device_states=_STATES,
    )
    native = driver.new_stream("model")
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
            stats = cache.stats()
        pools = DevicePools.allocate(
            model.layout,
            pages=_PAGES + 1,
            states=_STATES + 1,
            page_size=16,
            device=driver.device,
        )
        post = LoopPoster(asyncio.get_running_loop())
        worker = DeviceWorker("bare", native, driver, post)
        try:
            bare = HybridServer(model, BareCache(pools, worker), worker, chunk=_GRID)
            cold = await _serve(bare, prompts)  # type: ignore[arg-type]
        finally:
            await asyncio.to_thread(worker.close)
    reused = sum(one.reused for one in warm)
    outcome.figures["reused tokens"] = float(reused)
    outcome.figures["s warm"] = sum(one.total_s for one in warm)
    outcome.figures["s cold"] = sum(one.total_s for one in cold)
    outcome.figures["threads near"] = stats.near
    outcome.expect(reused > 0, "nothing was reused")
    for number, (one, other) in enumerate(zip(warm, cold, strict=True)):
        outcome.expect(one.tokens == other.tokens, f"prompt {number} is answered differently")
    for name, pool in (("kv", stats.kv), ("state", stats.state)):
        kept = pool.free + pool.parked + pool.tree
        outcome.expect(
            kept == pool.size, f"{pool.size - kept} places of {name} are owned by nobody"
        )
    return outcome
