"""Serves a hybrid model of `transformers` for several clients that share a long system prompt.

    python examples/serve_transformers.py [qwen3-next | falcon-h1 | nemotron-h | lfm2 | ...]

The weights come from a seed, so the answers mean nothing; the times and the reuse are real.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import torch

from phloem import CacheConfig, CacheRuntime
from phloem.runtime.integrations.models import build_model, encode_bytes
from phloem.runtime.integrations.server import HybridServer
from phloem.runtime.integrations.transformers import TransformersModel

SYSTEM = "You answer questions about plants, briefly and with the Latin names. " * 12
QUESTIONS = (
    "What carries sugar down a stem?",
    "What carries water up a stem?",
    "Why are leaves green?",
    "What carries sugar down a stem?",
)
CHUNK = 64


async def main(name: str) -> None:
    """Asks all questions at once, twice."""
    model = TransformersModel(build_model(name))
    config = CacheConfig(
        layout=model.layout,
        page_size=16,
        state_chunk=CHUNK,
        device_pages=512,
        device_states=32 if model.layout.has_states else 0,
    )
    async with CacheRuntime(config) as cache:
        stream = cache.worker_stream("model")
        async with HybridServer(model, cache, stream, chunk=CHUNK) as server:
            for _ in range(2):
                completions = await asyncio.gather(
                    *(
                        server.generate(encode_bytes(SYSTEM + question), max_new=12)
                        for question in QUESTIONS
                    )
                )
                for question, done in zip(QUESTIONS, completions, strict=True):
                    print(
                        f"{question:34} {done.reused:5} of {done.prompt_tokens} tokens reused, "
                        f"first token after {done.first_token_s * 1e3:.0f} ms"
                    )
        stream.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "qwen3-next"))
