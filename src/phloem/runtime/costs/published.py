"""Published models, by name.

Bytes follow from the shapes of their layers (16-bit KV and convolutions). FLOPs a token are twice
the weights that take part in one, as published, and those over pairs of tokens follow from the
attention's shape. A name ending in `-bf16state` keeps recurrent states in 16 bits, else in 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from phloem.errors import InvalidRequest
from phloem.runtime.costs.layers import Attention, Custom, Layer, Mlp, geometry_of
from phloem.runtime.costs.model import Geometry

__all__ = ["GEOMETRIES", "geometry_named"]


class _Model(NamedTuple):
    """Shapes that decide what is cached: of attention, then of recurrent layers.

    `pair`: the widths of a query and of a value over all heads; `kv`: elements for each token;
    `channels` of a convolution of `conv` columns and `recurrent` elements in each recurrent layer;
    `window`: tokens and layers of sliding windows; `active`: weights that take part in a token.
    """

    name: str
    full: int
    pair: int
    kv: int
    recurrents: int
    channels: int
    conv: int
    recurrent: int
    active: float
    window: tuple[int, int] = (0, 0)


_MODELS = (
    _Model("qwen3-next-80b-a3b", 12, 8192, 1024, 36, 8192, 4, 524_288, 3e9),
    _Model("qwen3.5-9b", 8, 8192, 2048, 24, 8192, 4, 524_288, 9e9),
    _Model("qwen3.5-35b-a3b", 10, 8192, 1024, 30, 8192, 4, 524_288, 3e9),
    _Model("olmo-hybrid-7b", 8, 7680, 7680, 24, 11_520, 4, 552_960, 7e9),
    _Model("kimi-linear-48b-a3b", 7, 10_240, 576, 20, 12_288, 4, 524_288, 3e9),
    _Model("minimax-text-01", 10, 16_384, 2048, 70, 0, 1, 1_048_576, 45.9e9),
    _Model("falcon-h1-34b", 72, 5120, 1024, 72, 5120, 4, 1_048_576, 34e9),
    _Model("falcon-h1-7b", 44, 3072, 512, 44, 3584, 4, 786_432, 7e9),
    _Model("jamba-1.5-mini", 4, 8192, 2048, 28, 8192, 4, 131_072, 12e9),
    _Model("jamba-1.5-large", 9, 16_384, 2048, 63, 16_384, 4, 262_144, 94e9),
    _Model("bamba-9b", 3, 8192, 2048, 29, 8448, 4, 1_048_576, 9e9),
    _Model("granite-4.0-h-small", 4, 8192, 2048, 36, 8448, 4, 1_048_576, 9e9),
    _Model("granite-4.0-h-tiny", 4, 3072, 1024, 36, 3328, 4, 393_216, 1e9),
    _Model("nemotron-h-8b", 4, 8192, 2048, 24, 10_240, 4, 1_048_576, 8e9),
    _Model("nemotron-h-56b", 10, 16_384, 2048, 54, 20_480, 4, 4_194_304, 56e9),
    _Model("nemotron-nano-9b-v2", 4, 10_240, 2048, 27, 12_288, 4, 1_310_720, 9e9),
    _Model("nemotron-3-nano-30b-a3b", 6, 8192, 512, 23, 6144, 4, 524_288, 3e9),
    _Model("zamba2-2.7b", 9, 10_240, 10_240, 54, 5248, 4, 327_680, 2.7e9),
    _Model("lfm2-2.6b", 8, 4096, 1024, 22, 2048, 3, 0, 2.6e9),
    _Model("lfm3-1.7b", 6, 4096, 1024, 13, 2048, 7, 0, 1.7e9, (256, 5)),
    _Model("zaya1-8b", 40, 2048, 512, 40, 1280, 2, 128, 0.76e9),
)


def _published(model: _Model, name: str, recurrent_bytes: int) -> Geometry:
    attention = Custom(square=1.0 * model.pair, kv=2 * model.kv)
    convolution = model.channels * (model.conv - 1) * 2
    recurrent = Custom(state=convolution + model.recurrent * recurrent_bytes)
    tokens, windows = model.window
    layers: list[Layer] = [Custom(flops=2 * model.active)]
    layers += [attention] * model.full + [recurrent] * model.recurrents
    layers += [Custom(state=2 * model.kv * (tokens - 1))] * windows
    return geometry_of(name, layers)


def _marconi() -> Geometry:
    """The 7B hybrid of the Marconi paper (arXiv 2411.19379), by the formulas given there.

    4 attention layers, 24 Mamba layers, 28 MLPs, width 4096, 128 numbers of state for each of as
    many channels. All pairs of tokens count, not only those with an earlier one.
    """
    width, state = 4096, 128
    attention = Attention(hidden=width, heads=32, head_dim=128, kv_heads=32, causal=False)
    mamba = Custom(
        flops=12 * width * width + 16 * width * state + 10 * width,
        state=2 * width * state + 4 * 2 * (2 * width + 2 * state),
    )
    mlp = Mlp(hidden=width, inner=4 * width, gated=False)
    return geometry_of("marconi7b", [attention] * 4 + [mamba] * 24 + [mlp] * 28)


def _all() -> dict[str, Geometry]:
    found = {"marconi7b": _marconi()}
    for model in _MODELS:
        for name, size in ((model.name, 4), (f"{model.name}-bf16state", 2)):
            found[name] = _published(model, name, size)
    return found


GEOMETRIES: Mapping[str, Geometry] = _all()
"""By name."""


def geometry_named(name: str) -> Geometry:
    """The published model of that name; raises `InvalidRequest` for an unknown one."""
    found = GEOMETRIES.get(name)
    if found is None:
        raise InvalidRequest(f"no geometry {name!r}; there are {', '.join(GEOMETRIES)}")
    return found
