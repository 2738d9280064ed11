"""Tiny models of each allowed architecture, built from their config classes; nothing is downloaded.

`INIT` is far above the usual 0.02: at hidden size 64 that is what makes attention and recurrent
state really steer the logits, so that a wrong state is seen (the negative controls of
`test_equality.py`). The time steps of the recurrent layers are drawn for a memory of hundreds of
tokens; with the default initialisation a state forgets within a few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, INIT = 512, 0.12
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "initializer_range": INIT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LINEAR, _FULL = "linear_attention", "full_attention"
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
_DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

ZOO: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_BASE,
        **_HEADS,
        **_DELTA_NET,
        head_dim=16,
        intermediate_size=128,
        num_hidden_layers=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(  # type: ignore[call-arg]  # its base takes it
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        head_dim=16,
        intermediate_size=128,
        num_hidden_layers=3,
        mamba_d_ssm=128,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        intermediate_size=64,
        num_hidden_layers=4,
        layer_types=[_LINEAR, _FULL] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_BASE,
        **_HEADS,
        head_dim=16,
        layers_block_type=[_LINEAR, "mlp", _FULL, _LINEAR, "moe", _FULL],
        intermediate_size=128,
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        expand=2,
        chunk_size=64,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        num_experts_per_tok=2,
    ),
    "bamba": lambda: transformers.BambaConfig(
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        intermediate_size=128,
        num_hidden_layers=4,
        attn_layer_indices=[1, 3],
        mamba_expand=2,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        **_BASE,
        **_HEADS,
        intermediate_size=128,
        num_hidden_layers=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **_BASE,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_experts_per_tok=2,
        num_local_experts=4,
        moe_intermediate_size=32,
        intermediate_size=128,
        num_hidden_layers=4,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=[_LINEAR, _LINEAR, _LINEAR, _FULL],
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **_BASE,
        **_HEADS,
        intermediate_size=128,
        num_hidden_layers=4,
        full_attn_idxs=[1, 3],
        conv_L_cache=3,
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **_BASE, **_HEADS, head_dim=16, intermediate_size=128, num_hidden_layers=3
    ),
    "llama": lambda: transformers.LlamaConfig(
        **_BASE, **_HEADS, intermediate_size=128, num_hidden_layers=3
    ),
}
# Not allowed: used by the tests of the self-test.
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **_BASE,
        **_HEADS,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["conv", _FULL] * 2,
        conv_L_cache=3,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **_BASE,
        **_HEADS,
        intermediate_size=128,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_dt_rank=8,
    ),
    "lfm3": lambda: transformers.Lfm3Config(
        **_BASE,
        **_HEADS,
        head_dim=16,
        intermediate_size=128,
        num_hidden_layers=8,
        sliding_window=96,
    ),
}

MIXTURES_OF_EXPERTS = {"granitemoehybrid", "kimi_linear", "nemotron_h", "qwen3_next"}


def build(name: str, seed: int = 0) -> Any:
    """A float32 model of architecture `name` with weights from `seed`, in evaluation mode."""
    config = (ZOO | OTHERS)[name]()
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("dt_bias"):
                step = torch.exp(torch.empty(weight.shape).uniform_(-6.9, -2.3))
                weight.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model.eval()


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids of the zoo's vocabulary, without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
    return ids
