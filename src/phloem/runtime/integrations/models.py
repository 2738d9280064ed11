"""Real hybrid architectures at sizes for one CPU core, with weights from a seed and byte tokens.

For the demo, the examples and benchmarks: nothing is downloaded, and any text can be a prompt.
All feed-forward layers are dense, because a mixture of experts may route near-tied tokens
differently when rounding differs, which would blur a comparison of outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import transformers
from transformers import AutoModelForCausalLM

from phloem.errors import InvalidRequest
from phloem.runtime.integrations.transformers import CausalModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedConfig

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


def _config(name: str, **shape: object) -> PreTrainedConfig:
    return cast("Callable[..., PreTrainedConfig]", getattr(transformers, name))(**shape)


def _qwen3_next() -> PreTrainedConfig:
    return _config(
        "Qwen3NextConfig",
        **_GROUPED,
        **_DELTA_NET,
        head_dim=32,
        num_hidden_layers=_LAYERS,
        mlp_only_layers=list(range(_LAYERS)),
    )


def _falcon_h1() -> PreTrainedConfig:
    return _config(
        "FalconH1Config",
        **_GROUPED,
        **_MAMBA2,
        head_dim=32,
        num_hidden_layers=_LAYERS // 2,  # each has attention and a state
        mamba_d_ssm=2 * _HIDDEN,
    )


def _granite() -> PreTrainedConfig:
    return _config(
        "GraniteMoeHybridConfig",
        **_GROUPED,
        **_MAMBA2,
        num_hidden_layers=_LAYERS,
        layer_types=_PATTERN,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=2 * _HIDDEN,
    )


def _nemotron_h() -> PreTrainedConfig:
    return _config(
        "NemotronHConfig",
        **_GROUPED,
        head_dim=32,
        layers_block_type=[_LINEAR, "mlp", _LINEAR, "mlp", _LINEAR, _FULL, "mlp"] * 2,
        ssm_state_size=64,
        mamba_num_heads=8,
        mamba_head_dim=2 * _HIDDEN // 8,
        n_groups=1,
        expand=2,
        chunk_size=64,
    )


def _bamba() -> PreTrainedConfig:
    return _config(
        "BambaConfig",
        **_GROUPED,
        **_MAMBA2,
        num_hidden_layers=_LAYERS,
        attn_layer_indices=[3, 7],
        mamba_expand=2,
    )


def _olmo_hybrid() -> PreTrainedConfig:
    return _config(
        "OlmoHybridConfig",
        **_GROUPED,
        num_hidden_layers=_LAYERS,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=24,
        linear_value_head_dim=48,
    )


def _kimi_linear() -> PreTrainedConfig:
    return _config(
        "KimiLinearConfig",
        **_BASE,
        num_key_value_heads=8,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        first_k_dense_replace=_LAYERS,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=8,
        layer_types=_PATTERN,
    )


def _lfm2() -> PreTrainedConfig:
    return _config(
        "Lfm2Config",
        **_GROUPED,
        num_hidden_layers=_LAYERS,
        full_attn_idxs=[3, 7],
        conv_L_cache=3,
    )


def _qwen3() -> PreTrainedConfig:
    return _config("Qwen3Config", **_GROUPED, head_dim=32, num_hidden_layers=_LAYERS)


def _llama() -> PreTrainedConfig:
    return _config("LlamaConfig", **_GROUPED, num_hidden_layers=_LAYERS)


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": _qwen3_next,
    "falcon-h1": _falcon_h1,
    "granite-hybrid": _granite,
    "nemotron-h": _nemotron_h,
    "bamba": _bamba,
    "olmo-hybrid": _olmo_hybrid,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "qwen3": _qwen3,
    "llama": _llama,
}
"""Names for `build_model`; the last two have attention only."""


def build_model(name: str, seed: int = 0) -> CausalModel:
    """A float32 model in evaluation mode, the same for the same seed.

    The time steps of recurrent layers are drawn for a memory of hundreds of tokens. Raises
    `InvalidRequest` for a name that is not in `MODELS`.
    """
    if name not in MODELS:
        raise InvalidRequest(f"no model {name!r}; there are {', '.join(MODELS)}")
    config = MODELS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cast("torch.nn.Module", AutoModelForCausalLM.from_config(config))
        for parameter, weight in model.named_parameters():
            if parameter.endswith("dt_bias"):
                step = torch.exp(torch.empty(weight.shape).uniform_(-6.9, -2.3))
                weight.data.copy_(step + torch.log(-torch.expm1(-step)))
    return cast("CausalModel", model.eval())


def encode_bytes(text: str) -> list[int]:
    """One token for each byte of UTF-8."""
    return list(text.encode("utf-8"))


def decode_bytes(tokens: Sequence[int]) -> str:
    """The text of the bytes; special tokens are left out, broken characters replaced."""
    return bytes(token for token in tokens if token < PAD).decode("utf-8", errors="replace")
