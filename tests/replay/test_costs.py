"""The cost model: worked examples, published models, fits, and when a load pays."""

from __future__ import annotations

import pytest

from phloem.actors.tree import Tree
from phloem.actors.tree.node import Node
from phloem.errors import InvalidRequest
from phloem.runtime.costs.layers import (
    Attention,
    GatedDelta,
    LinearAttention,
    Mamba1,
    Mamba2,
    Mixture,
    Mla,
    Mlp,
    SlidingWindow,
    geometry_of,
)
from phloem.runtime.costs.published import GEOMETRIES, geometry_named
from phloem.runtime.costs.times import Link, PrefillTimes, load_pays_from


def test_s214_a_linear_layer() -> None:
    layer = LinearAttention(hidden=512, heads=4, head_dim=64, state=32)
    assert 10 * layer.linear == 10_649_600 == 163_840 + 10_485_760
    model = geometry_of("linear", [layer])
    assert model.flops(20) == 2 * model.flops(10)


def test_s215_feed_forward_dense_and_of_experts() -> None:
    assert 10 * Mlp(hidden=512, inner=1024).linear == 31_457_280
    mixture = Mixture(hidden=512, inner=128, active=4, shared=256)
    assert 10 * mixture.linear == 6 * 10 * 512 * 128 * 4 + 6 * 10 * 512 * 256


def state_at(length: int, *states: int, fork: int = 0) -> tuple[Tree, Node]:
    """A key of 30 tokens with states at some lengths, a way parting from it, and one on beyond.

    Without a fork another key comes instead, so that states are as old.
    """
    tree, key = Tree(page_size=1, policy="benefit"), list(range(30))
    for slot, at in enumerate(states, 1):
        tree.insert(key, range(1, at + 1), state=slot, length=at)
    tree.insert([*key[:fork], 99], range(1, fork + 2))
    tree.insert([*key, 99], range(1, 32))
    return tree, next(node for node in tree.radix if node.end == length and node.state)


def test_s217_a_state_is_worth_what_it_saves_beyond_the_nearest_live_one() -> None:
    """Not beyond its structural parent: an entry of 10 tokens whose nearest state is 20 above."""
    tree, entry = state_at(30, 10, 30, fork=20)
    assert entry.parent is not None and (entry.end, entry.parent.end) == (30, 20)
    other, twice = state_at(30, 10, 30)
    assert twice.parent is not None and (twice.end, twice.parent.end) == (30, 10)
    near, same = tree.policy.state_score(entry), other.policy.state_score(twice)
    assert near == same > 0
    farther, alone = state_at(30, 30)
    assert farther.policy.state_score(alone) == pytest.approx(1.5 * near, rel=1e-6)


# KV bytes a token, and MiB of a state with 32-bit and with 16-bit recurrent parts.
PUBLISHED = {
    "qwen3-next-80b-a3b": (24_576, 73.69, 37.69),
    "qwen3.5-9b": (32_768, 49.12, 25.12),
    "qwen3.5-35b-a3b": (20_480, 61.41, 31.41),
    "olmo-hybrid-7b": (122_880, 52.21, 26.89),
    "kimi-linear-48b-a3b": (8_064, 41.41, 21.41),
    "minimax-text-01": (40_960, 280.00, 140.00),
    "falcon-h1-34b": (147_456, 290.11, 146.11),
    "falcon-h1-7b": (45_056, 132.90, 66.90),
    "jamba-1.5-mini": (16_384, 15.31, 8.31),
    "jamba-1.5-large": (36_864, 68.91, 37.41),
    "bamba-9b": (12_288, 117.40, 59.40),
    "granite-4.0-h-small": (16_384, 145.74, 73.74),
    "granite-4.0-h-tiny": (8_192, 54.69, 27.69),
    "nemotron-h-8b": (16_384, 97.41, 49.41),
    "nemotron-h-56b": (40_960, 870.33, 438.33),
    "nemotron-nano-9b-v2": (16_384, 136.90, 69.40),
    "nemotron-3-nano-30b-a3b": (6_144, 46.81, 23.81),
    "zamba2-2.7b": (184_320, 69.12, 35.37),
    "lfm2-2.6b": (16_384, 0.17, 0.17),
    "lfm3-1.7b": (12_288, 2.79, 2.79),
    "zaya1-8b": (40_960, 0.12, 0.11),
}


def test_the_bytes_of_published_models() -> None:
    """Computed from the tensors that each architecture holds, with these shapes."""
    assert {*PUBLISHED} == {name.removesuffix("-bf16state") for name in GEOMETRIES} - {"marconi7b"}
    for name, (kv, wide, narrow) in PUBLISHED.items():
        single, half = geometry_named(name), geometry_named(f"{name}-bf16state")
        assert single.kv_bytes == half.kv_bytes == kv, name
        assert round(single.state_bytes / 2**20, 2) == pytest.approx(wide, abs=0.006), name
        assert round(half.state_bytes / 2**20, 2) == pytest.approx(narrow, abs=0.006), name


def test_marconis_model_by_its_formulas() -> None:
    model = geometry_named("marconi7b")
    width, state = 4096, 128
    mamba = 12 * width**2 + 16 * width * state + 10 * width
    assert model.kv_bytes == 65_536
    assert model.state_bytes == 24 * (2 * width * state + 8 * (2 * width + 2 * state))
    assert round(model.state_bytes / 1e6, 2) == 26.79
    assert model.flops_linear == 24 * mamba + 4 * 8 * width**2 + 28 * 16 * width**2
    assert model.flops_quadratic == 4 * 4 * width
    assert model.flops(100) == model.flops(60) + model.flops(100, 60)


def test_layers_by_their_shapes_agree_with_published_bytes() -> None:
    """Qwen3-Next from layers: 12 of attention and 36 of the delta rule, each with its experts."""
    attention = Attention(hidden=2048, heads=16, head_dim=256, kv_heads=2)
    delta = GatedDelta(hidden=2048, key_heads=16, key_dim=128, value_heads=32, value_dim=128)
    experts = Mixture(hidden=2048, inner=512, active=10, shared=512)
    built = geometry_of("q", [attention] * 12 + [delta] * 36 + [experts] * 48)
    published = geometry_named("qwen3-next-80b-a3b")
    assert built.kv_bytes == published.kv_bytes
    assert built.state_bytes == published.state_bytes
    assert built.flops_quadratic == published.flops_quadratic
    assert built.flops_linear == pytest.approx(published.flops_linear, rel=0.2)


def test_bytes_of_the_other_kinds() -> None:
    assert Mla(hidden=9, heads=2, latent=512, rope=64, nope=128, value_dim=128).kv_bytes == 1152
    assert Mamba1(hidden=8, inner=8192, state=16).state_bytes == 8192 * (64 + 6)
    bamba = Mamba2(hidden=4096, heads=128, head_dim=64, state=128)
    assert 29 * bamba.state_bytes == geometry_named("bamba-9b").state_bytes
    window = SlidingWindow(hidden=8, heads=4, head_dim=64, kv_heads=4, window=256)
    assert (window.kv_bytes, window.state_bytes) == (0, 255 * 1024)
    assert window.quadratic == 0


def test_measured_times_are_fitted_without_parts_below_zero() -> None:
    true = PrefillTimes(fixed_s=0.004, linear_s=15e-6, quadratic_s=2e-11)
    lengths = (100, 1_000, 10_000, 100_000)
    fit = PrefillTimes.measured([(length, true.seconds(length)) for length in lengths])
    for length in (50, 3_000, 50_000):
        assert fit.seconds(length) == pytest.approx(true.seconds(length), rel=1e-6)
    noisy = PrefillTimes.measured([(100, 0.002), (1_000, 0.015), (10_000, 0.13)])
    assert min(noisy.fixed_s, noisy.linear_s, noisy.quadratic_s) >= 0
    for bad in ([(1, 1.0)], [(1, 1.0), (2, 1.0), (2, 3.0)], [(1, 0.0), (2, 1.0), (3, 1.0)]):
        with pytest.raises(InvalidRequest):
            PrefillTimes.measured(bad)


def test_when_a_load_pays() -> None:
    """At 50 GB/s and 400 TFLOP/s: a state is 53 or 103 tokens of prefill, KV 3 % of one each."""
    link = Link(bytes_per_s=50e9)
    for name, tokens in (("qwen3-next-80b-a3b-bf16state", 53), ("qwen3-next-80b-a3b", 103)):
        model = geometry_named(name)
        times = PrefillTimes.at_rate(model, 400e12)
        assert round(link.seconds(model.state_bytes) / times.linear_s) == tokens
        pays = load_pays_from(model, times, link)
        assert pays is not None and tokens < pays < 1.1 * tokens
        assert link.load_s(model, pays) < times.seconds(pays)
        assert link.load_s(model, pays - 1) >= times.seconds(pays - 1)
    slow = Link(bytes_per_s=1.5e9)  # below 1.6 GB/s the KV alone takes longer than its compute
    flat = PrefillTimes(linear_s=15e-6)
    assert load_pays_from(geometry_named("qwen3-next-80b-a3b"), flat, slow) is None
