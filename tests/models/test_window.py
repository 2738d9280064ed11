"""Models with sliding-window layers: what continues from restored windows computes the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from models.zoo import random_tokens
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from phloem.cuda_streams.pools import DevicePools
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.layout import KVSpec, LayerSpec, ModelLayout
from phloem.runtime.request import Request

WINDOW, PAGE, CHUNK = 24, 8, 16  # a chunk is within the window: the cache object keeps no more
_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "initializer_range": 0.12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": _TYPES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gemma3": lambda: transformers.Gemma3TextConfig(**_SIZES, query_pre_attn_scalar=16),
    "olmo3": lambda: transformers.Olmo3Config(**_SIZES),
}


class Windowed:
    """A tiny random model, run in chunks on pools: full layers by one table, windows by another."""

    def __init__(self, name: str) -> None:
        config = MODELS[name]()
        config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        parameters = inspect.signature(self.model.forward).parameters
        self.argument = "cache" if "cache" in parameters else "past_key_values"
        self.sliding = [kind == "sliding_attention" for kind in _TYPES]
        shape = (2, 16)
        self.layout = ModelLayout.from_layers(
            LayerSpec(kv=KVSpec(shape, shape, "float32", f"window:{WINDOW}" if slides else "kv"))
            for slides in self.sliding
        )

    def tables(self, request: Request) -> list[list[int]]:
        full, window = request.page_table().tolist(), request.span_table("window").tolist()
        return [window if slides else full for slides in self.sliding]

    def gather(self, pools: DevicePools, tables: list[list[int]], length: int) -> DynamicCache:
        """The cache object as it is after `length` tokens."""
        cache = DynamicCache(config=self.model.config)
        for number, (table, slides) in enumerate(zip(tables, self.sliding, strict=True)):
            first = max(0, length - WINDOW + 1) if slides else 0
            places = [divmod(at, PAGE) for at in range(first, length)]
            pages = torch.tensor([table[page] for page, _ in places], dtype=torch.long)
            offsets = torch.tensor([offset for _, offset in places], dtype=torch.long)
            assert (pages > 0).all(), "a page that is read was given back"
            if length:
                held = pools.kv[number]
                rows = [kv[pages, offsets].transpose(0, 1)[None] for kv in (held.k, held.v)]
                cache.update(rows[0], rows[1], number)
                layer = cache.layers[number]
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = length
        return cache

    def scatter(
        self, pools: DevicePools, tables: list[list[int]], cache: DynamicCache, start: int, end: int
    ) -> None:
        """Write what a chunk added."""
        for number, table in enumerate(tables):
            layer: Any = cache.layers[number]
            held = pools.kv[number]
            for back, at in enumerate(range(end - 1, start - 1, -1), 1):
                page, offset = table[at // PAGE], at % PAGE
                held.k[page, offset] = layer.keys[0, :, -back]
                held.v[page, offset] = layer.values[0, :, -back]

    @torch.inference_mode()
    def chunk(self, cache: DynamicCache, tokens: list[int], start: int) -> Tensor:
        ids = torch.tensor([tokens])
        positions = torch.arange(start, start + len(tokens))[None]
        held = {self.argument: cache}
        return self.model(input_ids=ids, position_ids=positions, use_cache=True, **held).logits[0]

    def cold(self, tokens: list[int]) -> Tensor:
        """The logits at every position, in the same chunks, from the model's own cache object."""
        cache = DynamicCache(config=self.model.config)
        starts = range(0, len(tokens), CHUNK)
        return torch.cat([self.chunk(cache, tokens[at : at + CHUNK], at) for at in starts])

    async def serve(self, runtime: CacheRuntime, tokens: list[int]) -> tuple[int, Tensor]:
        """How many tokens were reused, and the logits from there on."""
        out: list[Tensor] = []
        async with runtime.request(tokens) as request:
            reused = request.computed
            while request.computed < len(tokens):
                start, end = request.next_stop(CHUNK)
                await request.allocate(end - start)
                await request.ready()
                tables = self.tables(request)
                with runtime.step([request]) as step, torch.inference_mode():
                    cache = self.gather(runtime.pools, tables, start)
                    out.append(self.chunk(cache, tokens[start:end], start))
                    self.scatter(runtime.pools, tables, cache, start, end)
                    step.launched({request: end})
                await request.checkpoint()
            await request.finish()
        return reused, torch.cat(out)


@pytest.mark.parametrize("name", MODELS)
async def test_restored_windows_give_the_outputs_of_a_cold_run(name: str) -> None:
    model = Windowed(name)
    first = random_tokens(112, seed=1)
    longer = [*first, *random_tokens(40, seed=2)]
    branch = [*first[:80], *random_tokens(30, seed=3)]
    config = CacheConfig(
        layout=model.layout,
        page_size=PAGE,
        device_pages=48,
        device_states=0,
        device_spans={"window": 20},
    )
    async with CacheRuntime(config) as runtime:
        reused, logits = await model.serve(runtime, first)
        assert reused == 0
        assert torch.allclose(logits, model.cold(first), atol=1e-5)
        for tokens in (longer, branch, first):
            reused, logits = await model.serve(runtime, tokens)
            cold = model.cold(tokens)
            assert reused % PAGE == 0
            assert torch.allclose(logits, cold[reused:], atol=1e-4), (name, reused)
        assert (await runtime.match(longer)).usable > 0
        await runtime.audit()
        # And the windows matter: with other ones the outputs are others.
        for number, slides in enumerate(model.sliding):
            if slides:
                runtime.pools.kv[number].v.mul_(-1)
        reused, logits = await model.serve(runtime, longer)
        assert reused > WINDOW
        assert not torch.allclose(logits, model.cold(longer)[reused:], atol=1e-2)
