"""Requests that arrive together at a real hybrid model, with the cache and without, in one run."""

from __future__ import annotations

import asyncio
import random
import time

import torch
import transformers

from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.threads import ThreadEngine
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.demo.measure import compare
from phloem.runtime.demo.workloads import simultaneous
from phloem.runtime.integrations.models import build_model
from phloem.runtime.integrations.server import HybridServer
from phloem.runtime.integrations.transformers import TransformersModel

__all__ = ["first_token", "serving"]


_CHUNK = 64
_NEW = random.Random(0)


def _model(name: str) -> TransformersModel:
    # It tells of kernels that no CPU has; the library is untyped here.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # the model is small: more threads only take the loop's core
    return TransformersModel(build_model(name))


class _SlowLink:
    """Each layer of a load takes so long, whatever there is to copy."""

    layer_s = 0.0

    def __call__(self, ticket: Ticket, layer: int) -> None:
        del layer
        if ticket.batch.channel == "h2d":
            time.sleep(self.layer_s)


async def _first_token(model: TransformersModel, known: int, rounds: int) -> dict[str, float]:
    config = CacheConfig(
        layout=model.layout,
        page_size=16,
        state_chunk=_CHUNK,
        device_pages=4 * known // 16,
        device_states=16,
        host_bytes="256MiB",
    )
    prefix, link = [_NEW.randrange(256) for _ in range(known)], _SlowLink()
    took: dict[str, list[float]] = {"device": [], "whole": [], "by_layer": []}
    async with CacheRuntime(config, engine=lambda post: ThreadEngine(post, fault=link)) as cache:
        stream = cache.worker_stream("model")

        async def one(way: str) -> float:
            """Seconds to the first token of a prompt whose prefix is known and whose end is new."""
            prompt = prefix + [_NEW.randrange(256) for _ in range(_CHUNK)]
            while cache.stats().copies_in_flight:  # noqa: ASYNC110  nothing else to wait on
                await asyncio.sleep(0.001)
            if way != "device":
                await cache.evict(pages=config.device_pages, states=config.device_states)
            before = cache.stats().tokens_loaded
            async with HybridServer(
                *(model, cache, stream), chunk=_CHUNK, publish="none", by_layer=way != "whole"
            ) as server:
                answer = await server.generate(prompt, 1)
            loaded = cache.stats().tokens_loaded - before
            assert answer.reused == known and loaded == (0 if way == "device" else known)
            return answer.first_token_s

        try:
            async with HybridServer(model, cache, stream, chunk=_CHUNK) as server:
                for _ in range(3):
                    await server.generate([*prefix, 1], 1)
            await one("device")
            # A load takes as long as the pass over it: neither can hide more of the other.
            link.layer_s = min([await one("device") for _ in range(5)]) / len(model.layout.layers)
            for _ in range(rounds):
                for way, times in took.items():
                    times.append(await one(way))
        finally:
            stream.close()
    figures = {f"{way}_ms": min(times) * 1e3 for way, times in took.items()}
    return {**figures, "link_layer_ms": link.layer_s * 1e3}


def first_token(known: int = 2048, rounds: int = 12) -> dict[str, float]:
    """Time to first token when the prefix is on the host behind a slow link; least of many, in ms.

    `device`: nothing has to be loaded; `whole`: the pass waits for the load; `by_layer`: each layer
    of it for its own. The load takes as long as the pass.
    """
    return asyncio.run(_first_token(_model("qwen3-next"), known, rounds))


def serving(model_name: str = "qwen3-next") -> dict[str, float]:
    """16 requests of 1,024 shared, 128 own and 16 new tokens each."""
    model = _model(model_name)
    asyncio.run(compare(model, simultaneous(requests=2, shared=128, own=64, max_new=4)))  # warm up
    compared = asyncio.run(compare(model, simultaneous()))
    if compared.failures:
        raise AssertionError("; ".join(compared.failures))
    return {
        "computed_to_distinct": compared.cached.computed / compared.distinct_tokens,
        "speedup": compared.speedup,
        "with_cache_s": compared.cached.total_s,
        "without_cache_s": compared.bare.total_s,
        "loop_lag_p99_ms": compared.cached.lag_p99_s * 1e3,
        "ttft_median_ms": compared.cached.ttft_median_s * 1e3,
        "ttft_median_without_ms": compared.bare.ttft_median_s * 1e3,
    }
