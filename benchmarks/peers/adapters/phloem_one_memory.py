"""phloem with one memory for pages and states, as vLLM has one pool of blocks for both."""

from __future__ import annotations

from benchmarks.peers.adapters import phloem_nowait
from phloem.runtime.config import CacheConfig
from phloem.runtime.layout import ModelLayout, StateSpec

_TOKEN_BYTES = 4  # one key and one value of 16 bits


class Adapter(phloem_nowait.Adapter):
    """A state is as large as a page, and the bytes are those of the two pools together."""

    title = "phloem, one memory"
    page_min = 16

    @classmethod
    def config(cls, page_size: int, tokens: int, states: int) -> CacheConfig:
        state = StateSpec("state", (page_size,), "float32", layers=1)
        layout = ModelLayout.hybrid(kv_layers=1, kv_heads=1, head_dim=1, states=[state])
        frames = tokens // page_size + states + 1
        return CacheConfig(
            layout=layout,
            page_size=page_size,
            state_chunk=1,
            device_bytes=frames * page_size * _TOKEN_BYTES,
            eviction="lru",
        )
