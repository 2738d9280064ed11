"""Models of `transformers` with weights from a seed instead of a download."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["seeded_model"]


def seeded_model(config_class: str, shape: Mapping[str, object], seed: int) -> torch.nn.Module:
    """A float32 causal model in evaluation mode, the same for the same seed.

    `config_class` names a class of `transformers`, `shape` its arguments. The time steps of the
    recurrent layers are drawn so that softplus(bias) is log-uniform in [0.001, 0.1], as these
    models are trained from: their state then remembers hundreds of tokens, not a few.
    """
    config = cast("Callable[..., object]", getattr(transformers, config_class))(**shape)
    build = cast(
        "Callable[[object], torch.nn.Module]",
        transformers.AutoModelForCausalLM.from_config,  # pyright: ignore[reportUnknownMemberType] # untyped there
    )
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType] # untyped there
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] # untyped there
        model = build(config)
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                step = torch.exp(torch.empty(weight.shape).uniform_(-6.9, -2.3))
                weight.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model.eval()
