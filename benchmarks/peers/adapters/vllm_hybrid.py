"""vLLM's KVCacheManager with a full-attention group and a mamba group that keeps aligned states.

There is no tree: a request is hashed block by block, and the pool maps hashes to blocks. A match
makes the Request, which hashes; an insert is `allocate_slots` (locks, evicts, allocates, registers)
and `free`. Prefill is cut where its scheduler cuts it: at the last whole block, and where a shared
prefix ends.
"""

# ruff: noqa: E402  stand-ins and settings must be in place before the library is imported
# ruff: noqa: ARG002  the protocol's arguments are not all of use to each library

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from benchmarks.peers import stubs
from benchmarks.peers.protocol import Adapter as Protocol
from benchmarks.peers.protocol import Match, Place, Tokens

stubs.install(
    *("oss_harmony", "mcp", "flashinfer", "torchvision", "torchaudio", "xgrammar", "lark", "cuda"),
    *("outlines_core", "compressed_tensors", "mistral_common", "llguidance", "lmformatenforcer"),
    *("sentencepiece", "cv2", "cutlass", "tilelang", "quack", "prometheus_fastapi_instrumentator"),
    *("pythonjsonlogger", "model_hosting_container_standards"),
)
torch.set_num_threads(1)

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

__all__ = ["Adapter"]


class Adapter(Protocol):
    """Tokens and states share one pool of blocks."""

    title = "vLLM hybrid"
    fused = True
    page_min = 16

    def __init__(self, page_size: int, tokens: int, states: int, longest: int) -> None:
        super().__init__(page_size, tokens, states, longest)
        full = FullAttentionSpec(
            block_size=page_size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
        )
        mamba = MambaSpec(
            block_size=page_size,
            shapes=((page_size, 16),),
            dtypes=(torch.bfloat16,),
            mamba_cache_mode="align",
        )
        config = KVCacheConfig(
            num_blocks=tokens // page_size + states + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["mamba"], mamba)],
        )
        self._manager: Any = KVCacheManager(
            config,
            max_model_len=longest + 1024,
            scheduler_block_size=page_size,
            hash_block_size=page_size,
            enable_caching=True,
        )
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        self._hasher = get_request_block_hasher(page_size, function)
        self._sampling = SamplingParams(max_tokens=1)
        self._number = 0
        self._held: list[Any] = []
        self._last: Any = None

    def slots_to_numpy(self, slots: Any) -> Tokens:
        size = self.page_size
        return (np.asarray(slots, np.int64)[:, None] * size + np.arange(size)).ravel()

    def key(self, tokens: Tokens) -> list[int]:
        ids: list[int] = tokens.tolist()
        return ids

    def match(self, key: Any) -> Match:
        self._number += 1
        request = Request(str(self._number), key, self._sampling, None, block_hasher=self._hasher)
        blocks, hit, junction = self._manager.get_computed_blocks(request)
        return Match(hit, None, 0, (request, blocks, junction))

    def slots(self, match: Match, receipt: Any) -> Any:
        return match.extra[1].get_block_ids()[0]

    def lock(self, handle: Any) -> None:
        return None

    def unlock(self, receipt: Any) -> None:
        return None

    def allocate(self, tokens: int) -> bool:
        return True

    def allocate_state(self) -> bool:
        return True

    def insert(self, key: Any, length: int, slots: Any, state: Any, place: Place) -> None:
        request, blocks, junction = place.match.extra
        manager, done = self._manager, place.match.hit
        first = (done, blocks) if done else (0, None)
        ends = [junction] if done < junction < length else []
        ends += [length] if request.num_tokens == length else [length, request.num_tokens]
        for end in ends:
            manager.new_step_starts()
            if manager.allocate_slots(request, end - done, *first) is None:
                manager.free(request)
                raise MemoryError
            first = (0, None)
            request.num_computed_tokens = done = end
        self._last = manager.get_block_ids(request.request_id)[0]
        manager.free(request)
        if hasattr(manager, "take_boundary_state_offloads"):
            manager.take_boundary_state_offloads()

    def written(self) -> Any:
        return self._last

    def prepare_evict(self) -> None:
        """Take the blocks that hold nothing, so that the next one taken is cached."""
        pool = self._manager.block_pool
        empty, block = 0, pool.free_block_queue.fake_free_list_head.next_free_block
        while block.next_free_block is not None and block.block_hash is None:
            empty, block = empty + 1, block.next_free_block
        self._held = pool.get_new_blocks(empty)

    def evict(self, tokens: int, states: int) -> tuple[int, int]:
        """There is no such call: whoever takes the oldest blocks evicts them."""
        taken = self._manager.block_pool.get_new_blocks(max(1, tokens // self.page_size + states))
        self._held += taken
        return len(taken) * self.page_size, states
