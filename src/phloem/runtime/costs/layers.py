"""What the layers of a model cost: FLOPs of a prefill, bytes of KV for each token, bytes of state.

A multiplication and an addition are two FLOPs. `linear` is for each token, `quadratic` for each
token times its position's square share: a prefill of `l` tokens takes `linear * l + quadratic *
l**2`. Norms, rotary embeddings and activations are left out, as they are everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phloem.errors import InvalidRequest
from phloem.runtime.costs.model import Geometry

__all__ = [
    "Attention",
    "Custom",
    "GatedDelta",
    "Layer",
    "LinearAttention",
    "Mamba1",
    "Mamba2",
    "Mixture",
    "Mla",
    "Mlp",
    "SlidingWindow",
    "geometry_of",
]

_CONV_BYTES = 2  # convolution windows are kept in 16 bits


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """The costs that every kind of layer has; all are 0 unless its kind says otherwise."""

    @property
    def linear(self) -> float:
        """FLOPs for each token."""
        return 0.0

    @property
    def quadratic(self) -> float:
        """FLOPs for the square of the tokens."""
        return 0.0

    @property
    def kv_bytes(self) -> int:
        """Bytes cached for each token."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes cached for each checkpoint."""
        return 0


class Custom(Layer, frozen=True, kw_only=True):
    """A layer given by its numbers."""

    flops: float = 0.0
    square: float = 0.0
    kv: int = 0
    state: int = 0

    @property
    def linear(self) -> float:
        """As given."""
        return self.flops

    @property
    def quadratic(self) -> float:
        """As given."""
        return self.square

    @property
    def kv_bytes(self) -> int:
        """As given."""
        return self.kv

    @property
    def state_bytes(self) -> int:
        """As given."""
        return self.state


class Attention(Layer, frozen=True, kw_only=True):
    """Full attention. `causal`: a token is multiplied with those before it only."""

    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    causal: bool = True
    element_bytes: int = 2

    @property
    def linear(self) -> float:
        """Projections of queries, keys, values and the output."""
        return 2.0 * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def quadratic(self) -> float:
        """Scores and weighted values, two products of a head's width for each pair."""
        return 4.0 * self.heads * self.head_dim / (2 if self.causal else 1)

    @property
    def kv_bytes(self) -> int:
        """A key and a value."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes


class SlidingWindow(Attention, frozen=True, kw_only=True):
    """Attention over the last `window` tokens, whose KV is part of a checkpoint.

    Every token is counted as seeing a whole window; the first few see less.
    """

    window: int

    @property
    def linear(self) -> float:
        """Projections, and the pairs of one window."""
        pairs = 4.0 * self.heads * self.head_dim * self.window
        return 2.0 * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + pairs

    @property
    def quadratic(self) -> float:
        """No more pairs than the window holds."""
        return 0.0

    @property
    def kv_bytes(self) -> int:
        """0: nothing in it grows with the tokens."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Keys and values of all tokens of the window but the newest."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes * (self.window - 1)


class Mla(Layer, frozen=True, kw_only=True):
    """Latent attention: a compressed vector for all heads, and one rotary part."""

    hidden: int
    heads: int
    latent: int
    rope: int
    nope: int
    value_dim: int
    element_bytes: int = 2

    @property
    def linear(self) -> float:
        """Queries, down to the latent, up from it, and the output."""
        queries = self.hidden * self.heads * (self.nope + self.rope)
        down = self.hidden * (self.latent + self.rope)
        up = self.latent * self.heads * (self.nope + self.value_dim)
        return 2.0 * (queries + down + up + self.heads * self.value_dim * self.hidden)

    @property
    def quadratic(self) -> float:
        """Scores over both parts, and weighted values, for each pair with an earlier token."""
        return 1.0 * self.heads * (self.nope + self.rope + self.value_dim)

    @property
    def kv_bytes(self) -> int:
        """The latent and the rotary part."""
        return (self.latent + self.rope) * self.element_bytes


class Mamba1(Layer, frozen=True, kw_only=True):
    """A selective scan over `inner` channels with `state` numbers each."""

    hidden: int
    inner: int
    state: int
    conv: int = 4
    recurrent_bytes: int = 4

    @property
    def linear(self) -> float:
        """Projections in (twice as wide) and out, the scan, the gate."""
        return 6.0 * self.hidden * self.inner + 8.0 * self.inner * self.state + 5.0 * self.inner

    @property
    def state_bytes(self) -> int:
        """The scan's state, and the convolution's last inputs."""
        scan = self.inner * self.state * self.recurrent_bytes
        return scan + self.inner * (self.conv - 1) * _CONV_BYTES


class Mamba2(Layer, frozen=True, kw_only=True):
    """The scan by heads; keys and queries are shared by the heads of a group."""

    hidden: int
    heads: int
    head_dim: int
    state: int
    groups: int = 1
    conv: int = 4
    recurrent_bytes: int = 4

    @property
    def linear(self) -> float:
        """Projections in and out, the update and the read of the state."""
        inner = self.heads * self.head_dim
        into = 2 * inner + 2 * self.groups * self.state + self.heads
        return 2.0 * self.hidden * (into + inner) + 6.0 * inner * self.state

    @property
    def state_bytes(self) -> int:
        """The scan's state, and the convolution's last inputs."""
        inner = self.heads * self.head_dim
        channels = inner + 2 * self.groups * self.state
        scan = inner * self.state * self.recurrent_bytes
        return scan + channels * (self.conv - 1) * _CONV_BYTES


class GatedDelta(Layer, frozen=True, kw_only=True):
    """A gated delta rule: one matrix of key by value for each value head."""

    hidden: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv: int = 4
    recurrent_bytes: int = 4

    @property
    def linear(self) -> float:
        """Projections with gates, and four passes over the matrix: decay, read, write, query."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        projected = 2 * keys + 2 * values + 2 * self.value_heads
        return 2.0 * self.hidden * (projected + values) + 8.0 * values * self.key_dim

    @property
    def state_bytes(self) -> int:
        """The matrices, and the convolution's last inputs."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        matrices = values * self.key_dim * self.recurrent_bytes
        return matrices + (2 * keys + values) * (self.conv - 1) * _CONV_BYTES


class LinearAttention(Layer, frozen=True, kw_only=True):
    """Linear attention with `state` numbers for each of `heads * head_dim` channels."""

    hidden: int
    heads: int
    head_dim: int
    state: int
    recurrent_bytes: int = 4

    @property
    def linear(self) -> float:
        """Four projections, and one pass over the state."""
        inner = self.heads * self.head_dim
        return 8.0 * self.hidden * inner + 2.0 * inner * self.state

    @property
    def state_bytes(self) -> int:
        """The state."""
        return self.heads * self.head_dim * self.state * self.recurrent_bytes


class Mlp(Layer, frozen=True, kw_only=True):
    """A feed-forward layer; gated ones have three matrices, others two."""

    hidden: int
    inner: int
    gated: bool = True

    @property
    def linear(self) -> float:
        """FLOPs of its matrices, for each token."""
        return 2.0 * self.hidden * self.inner * (3 if self.gated else 2)


class Mixture(Layer, frozen=True, kw_only=True):
    """Gated experts of `inner` channels, `active` of them for each token, and a shared one."""

    hidden: int
    inner: int
    active: int
    shared: int = 0

    @property
    def linear(self) -> float:
        """The active experts' matrices, and the shared one's of `shared` channels."""
        return 6.0 * self.hidden * (self.inner * self.active + self.shared)


def geometry_of(name: str, layers: Iterable[Layer]) -> Geometry:
    """A model of these layers, one after another. Raises `InvalidRequest` for one without any."""
    stack = list(layers)
    if not stack:
        raise InvalidRequest(f"{name} has no layers")
    return Geometry(
        name=name,
        kv_bytes=sum(layer.kv_bytes for layer in stack),
        state_bytes=sum(layer.state_bytes for layer in stack),
        flops_linear=sum(layer.linear for layer in stack),
        flops_quadratic=sum(layer.quadratic for layer in stack),
    )
