"""Requests that arrive together at a real hybrid model, with the cache and without, in one run."""

from __future__ import annotations

import asyncio

import torch
import transformers

from phloem.runtime.demo.measure import compare
from phloem.runtime.demo.workloads import simultaneous
from phloem.runtime.integrations.models import build_model
from phloem.runtime.integrations.transformers import TransformersModel

__all__ = ["serving"]


def serving(model_name: str = "qwen3-next") -> dict[str, float]:
    """16 requests of 1,024 shared, 128 own and 16 new tokens each."""
    # It tells of kernels that no CPU has; the library is untyped here.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # the model is small: more threads only take the loop's core
    model = TransformersModel(build_model(model_name))
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
