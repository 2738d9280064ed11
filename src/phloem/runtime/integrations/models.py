"""Real hybrid architectures at sizes for one CPU core, with weights from a seed and byte tokens.

For the demo, the examples and benchmarks: nothing is downloaded, and any text can be a prompt.
All feed-forward layers are dense, because a mixture of experts may route near-tied tokens
differently when rounding differs, which would blur a comparison of outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from phloem.errors import InvalidRequest
from phloem.runtime.integrations.seeded import seeded_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phloem.runtime.integrations.transformers import CausalModel

__all__ = ["END", "MODELS", "START", "build_model", "decode_bytes", "encode_bytes"]

PAD, START, END = 256, 257, 258
"""Special tokens after the 256 bytes."""

_HIDDEN, _LAYERS = 256, 8
_LINEAR, _FULL = "linear_attention", "full_attention"
_PATTERN = [_LINEAR, _LINEAR, _LINEAR, _FULL] * (_LAYERS // 4)
_BASE: dict[str, object] = {
    "vocab_size": 259,
    "hidden_size": _HIDDEN,
    "num_attention_heads": 8,
    "initializer_range": 0.06,  # far above 0.02, so that context steers the logits
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
_GROUPED: dict[str, object] = {**_BASE, "num_key_value_heads": 2, "intermediate_size": 2 * _HIDDEN}
_MAMBA2: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 2 * _HIDDEN // 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_chunk_size": 64,
}
_DELTA_NET: dict[str, object] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
}


MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_GROUPED,
            **_DELTA_NET,
            "head_dim": 32,
            "num_hidden_layers": _LAYERS,
            "mlp_only_layers": list(range(_LAYERS)),
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        {
            **_GROUPED,
            **_MAMBA2,
            "head_dim": 32,
            "num_hidden_layers": _LAYERS // 2,  # each has attention and a state
            "mamba_d_ssm": 2 * _HIDDEN,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            **_MAMBA2,
            "num_hidden_layers": _LAYERS,
            "layer_types": _PATTERN,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 2 * _HIDDEN,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **_GROUPED,
            "head_dim": 32,
            "layers_block_type": [_LINEAR, "mlp", _LINEAR, "mlp", _LINEAR, _FULL, "mlp"] * 2,
            "ssm_state_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 2 * _HIDDEN // 8,
            "n_groups": 1,
            "expand": 2,
            "chunk_size": 64,
        },
    ),
    "bamba": (
        "BambaConfig",
        {
            **_GROUPED,
            **_MAMBA2,
            "num_hidden_layers": _LAYERS,
            "attn_layer_indices": [3, 7],
            "mamba_expand": 2,
        },
    ),
    "olmo-hybrid": (
        "OlmoHybridConfig",
        {
            **_GROUPED,
            "num_hidden_layers": _LAYERS,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 48,
        },
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        {
            **_BASE,
            "num_key_value_heads": 8,
            "intermediate_size": 2 * _HIDDEN,
            "num_hidden_layers": _LAYERS,
            "first_k_dense_replace": _LAYERS,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "linear_head_dim": 32,
            "linear_num_heads": 8,
            "layer_types": _PATTERN,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_GROUPED,
            "num_hidden_layers": _LAYERS,
            "full_attn_idxs": [3, 7],
            "conv_L_cache": 3,
        },
    ),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 32, "num_hidden_layers": _LAYERS}),
    "llama": ("LlamaConfig", {**_GROUPED, "num_hidden_layers": _LAYERS}),
}
"""Names for `build_model`; the last two have attention only."""


def build_model(name: str, seed: int = 0) -> CausalModel:
    """A float32 model in evaluation mode, the same for the same seed.

    Raises `InvalidRequest` for a name that is not in `MODELS`.
    """
    if name not in MODELS:
        raise InvalidRequest(f"no model {name!r}; there are {', '.join(MODELS)}")
    config_class, shape = MODELS[name]
    return cast("CausalModel", seeded_model(config_class, shape, seed))


def encode_bytes(text: str) -> list[int]:
    """One token for each byte of UTF-8."""
    return list(text.encode("utf-8"))


def decode_bytes(tokens: Sequence[int]) -> str:
    """The text of the bytes; special tokens are left out, broken characters replaced."""
    return bytes(token for token in tokens if token < PAD).decode("utf-8", errors="replace")
