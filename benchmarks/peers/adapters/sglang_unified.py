"""SGLang's UnifiedRadixCache with full KV and mamba components; either tree core."""

# ruff: noqa: E402  stand-ins and settings must be in place before the library is imported
# ruff: noqa: ARG002  the protocol's arguments are not all of use to each library

from __future__ import annotations

import logging
import os
import warnings
from array import array
from typing import Any

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
os.environ.setdefault("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
warnings.filterwarnings("ignore")

import torch
import torch._inductor.compile_fx  # before triton has a stand-in

from benchmarks.peers import stubs
from benchmarks.peers.protocol import GRID, Adapter, Match, Place, Tokens

stubs.install(
    *("triton", "sgl_kernel", "flashinfer", "torchvision", "torchaudio", "xgrammar", "outlines"),
    *("gguf", "modelscope", "decord", "soundfile", "compressed_tensors", "deep_gemm", "deep_ep"),
    *("sgl_deep_gemm", "cuda", "cutlass", "tilelang", "quack", "torchao", "tvm_ffi", "datasets"),
    *("torch_memory_saver", "av", "sentencepiece", "tiktoken", "mistral_common", "timm", "kernels"),
    *("torchcodec", "flash_attn", "tml_renderers", "blobfile", "smg_grpc_servicer", "nvshmem"),
    *("pynvml", "watchfiles", "llguidance", "IPython"),
)
torch.set_num_threads(1)
logging.disable(logging.WARNING)

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

__all__ = ["Unified"]


def _pools(page_size: int, tokens: int, states: int, longest: int) -> tuple[Any, Any]:
    """The library's own pools and allocators on the CPU: one layer, one head, head dim 1."""
    arguments: Any = ServerArgs(model_path="dummy", page_size=page_size, device="cpu")
    arguments._mamba_cache_chunk_size = max(GRID, page_size)
    set_global_server_args_for_scheduler(arguments)
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=1,
        n_groups=1,
        num_heads=1,
        head_dim=1,
        state_size=1,
        conv_kernel=2,
    )
    requests = HybridReqToTokenPool(
        size=1,
        mamba_size=states,
        mamba_spec_state_size=1,
        max_context_len=longest + 64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=None,
    )
    kv = HybridLinearKVPool(
        size=tokens,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=1,
        head_dim=1,
        full_attention_layer_ids=[1],
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=requests.mamba_pool,
    )
    common: dict[str, Any] = {
        "size": tokens,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "kvcache": kv,
        "need_sort": False,
    }
    if page_size == 1:
        return requests, TokenToKVPoolAllocator(**common)
    return requests, PagedTokenToKVPoolAllocator(page_size=page_size, **common)


class Unified(Adapter):
    """Subclasses choose the core."""

    core = "?"

    def __init__(self, page_size: int, tokens: int, states: int, longest: int) -> None:
        super().__init__(page_size, tokens, states, longest)
        self._requests, self._allocator = _pools(page_size, tokens, states, longest)
        self._cache: Any = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._requests,
                token_to_kv_pool_allocator=self._allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                enable_mamba_extra_buffer=page_size > 1,
                tree_core_backend=self.core,
            )
        )
        if self._cache._tree_core_backend != self.core:
            raise AssertionError(f"the tree core is {self._cache._tree_core_backend}")

    def slots_to_numpy(self, slots: Any) -> Tokens:
        numbers: Tokens = slots.numpy()
        return numbers

    def check(self) -> None:
        held = self._cache.evictable_size()
        held = held[0] if isinstance(held, tuple) else held
        if self._allocator.available_size() + held != self._allocator.size:
            raise AssertionError("token slots are neither free nor cached")
        states = self._requests.mamba_allocator
        if states.available_size() + self._cache.mamba_evictable_size() != states.size:
            raise AssertionError("states are neither free nor cached")

    def key(self, tokens: Tokens) -> array[int]:
        ids = array("q")
        ids.frombytes(tokens.tobytes())
        return ids

    def match(self, key: Any) -> Match:
        found = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(key)))
        return Match(
            found.device_prefix_len, found.last_device_node, found.mamba_branching_seqlen or 0
        )

    def lock(self, handle: Any) -> Any:
        return self._cache.lock(handle)

    def unlock(self, receipt: Any) -> None:
        self._cache.unlock(receipt)

    def slots(self, match: Match, receipt: Any) -> Any:
        return self._cache.path_device_indices(match.handle)

    def allocate(self, tokens: int) -> Any | None:
        return self._allocator.alloc(tokens)

    def allocate_state(self) -> Any | None:
        return self._requests.mamba_allocator.alloc(1)

    def insert(self, key: Any, length: int, slots: Any, state: Any, place: Place) -> None:
        hit = place.match.hit
        value = torch.cat((place.gathered, slots)) if hit else slots
        whole = RadixKey(key, limit=length) if length < len(key) else RadixKey(key)
        done = self._cache.insert(
            InsertParams(
                key=whole.page_aligned(self.page_size),
                value=value,
                mamba_value=state,
                prev_prefix_len=hit,
                inserted_len=hit,
            )
        )
        if done.mamba_exist:
            self._requests.mamba_allocator.free(state)

    def evict(self, tokens: int, states: int) -> tuple[int, int]:
        # An engine frees what is short, not the whole of what it will allocate.
        short = max(0, tokens - self._allocator.available_size()) or tokens
        gone = self._cache.evict(EvictParams(num_tokens=short if tokens else 0, mamba_num=states))
        return gone.num_tokens_evicted, gone.mamba_num_evicted
