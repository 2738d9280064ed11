"""What a model keeps for a prefix, layer by layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from phloem.cuda_streams.specs import KVSpec, LayerSpec, StateSpec
from phloem.errors import InvalidRequest

__all__ = ["KVSpec", "LayerKind", "LayerSpec", "ModelLayout", "StateSpec"]

LayerKind = Literal["kv", "state", "both", "none"]
_KINDS: dict[LayerKind, tuple[bool, bool]] = {
    "kv": (True, False),
    "state": (False, True),
    "both": (True, True),
    "none": (False, False),
}


@dataclass(frozen=True)
class ModelLayout:
    """The layers of a model in the order a forward pass visits them; loads overlap in this order.

    Raises InvalidRequest if no layer keeps anything.
    """

    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if not any(layer.kv is not None or layer.states for layer in self.layers):
            raise InvalidRequest("no layer keeps anything for a prefix")
        names = [text.partition(":")[0] for text in self.spans]
        if len(set(names)) < len(names):
            raise InvalidRequest(
                f"layers are kept as {self.spans}; a kind has one size: give all the largest"
            )

    @classmethod
    def from_layers(cls, layers: Iterable[LayerSpec]) -> ModelLayout:
        """Layers given one by one: for models whose layers differ, or measured by a probe run."""
        return cls(tuple(layers))

    @classmethod
    def attention_only(
        cls, *, layers: int, kv_heads: int, head_dim: int, kv_dtype: str = "bfloat16"
    ) -> ModelLayout:
        """A model with full attention in every layer."""
        shape = (kv_heads, head_dim)
        return cls((LayerSpec(kv=KVSpec(shape, shape, kv_dtype)),) * layers)

    @classmethod
    def hybrid(
        cls,
        *,
        kv_layers: int,
        kv_heads: int,
        head_dim: int,
        states: Sequence[StateSpec],
        kv_dtype: str = "bfloat16",
        layer_order: Sequence[LayerKind] | None = None,
    ) -> ModelLayout:
        """A model whose attention layers are alike and whose recurrent layers are alike.

        `layer_order` says what each model layer keeps: `kv`, `state`, `both` or `none`. Without
        it the attention layers are spread evenly, each after its share of recurrent ones.
        Raises InvalidRequest if counts disagree: all states must be in equally many layers
        (`from_layers` takes models where they are not).
        """
        counts = {state.layers for state in states}
        if len(counts) != 1:
            raise InvalidRequest(
                f"states must be in equally many layers, not {sorted(counts)}; see from_layers"
            )
        state_layers = counts.pop()
        order = _spread(kv_layers, state_layers) if layer_order is None else tuple(layer_order)
        if unknown := [kind for kind in order if kind not in _KINDS]:
            raise InvalidRequest(f"layer_order has {unknown[0]!r}; there are {tuple(_KINDS)}")
        for what, asked, column in (("kv", kv_layers, 0), ("state", state_layers, 1)):
            given = sum(_KINDS[kind][column] for kind in order)
            if given != asked:
                raise InvalidRequest(f"{asked} {what} layers, but layer_order has {given}")
        kv = KVSpec((kv_heads, head_dim), (kv_heads, head_dim), kv_dtype)
        kept = tuple(StateSpec(state.name, state.shape, state.dtype) for state in states)
        return cls(
            tuple(
                LayerSpec(kv=kv if has_kv else None, states=kept if has_state else ())
                for has_kv, has_state in (_KINDS[kind] for kind in order)
            )
        )

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The model layers that keep KV of every token."""
        return self.layers_of("kv")

    @cached_property
    def spans(self) -> tuple[str, ...]:
        """The components but `kv` that keep KV, as they are configured: like `window:128`."""
        return tuple(
            sorted({layer.kv.kept for layer in self.layers if layer.kv is not None} - {"kv"})
        )

    def layers_of(self, component: str) -> tuple[int, ...]:
        """The model layers whose KV a component keeps."""
        return tuple(
            number
            for number, layer in enumerate(self.layers)
            if layer.kv is not None and layer.kv.component == component
        )

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The model layers that keep a state."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.states)

    @property
    def has_kv(self) -> bool:
        return bool(self.kv_layers)

    @property
    def has_states(self) -> bool:
        """False for pure attention: any page boundary can then be reused."""
        return bool(self.state_layers)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV for one token over all layers that keep every token, without padding."""
        kvs = [kv for layer in self.layers if (kv := layer.kv) is not None and kv.kept == "kv"]
        return sum(kv.key_bytes + kv.value_bytes for kv in kvs)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states at one position over all layers, without padding."""
        return sum(state.nbytes for layer in self.layers for state in layer.states)

    @cached_property
    def state_weight(self) -> int:
        """How many tokens of KV weigh as much as one state; at least 1."""
        return max(1, round(self.state_bytes / max(self.kv_bytes_per_token, 1)))

    def page_bytes(self, page_size: int, component: str = "kv") -> int:
        """Bytes that a page of `page_size` tokens takes in a component's pool, with padding."""
        return sum(layer.page_bytes(page_size, component) for layer in self.layers)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes that a state slot takes in a pool, padding included."""
        return sum(layer.slot_bytes for layer in self.layers)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the layout as text: equal exactly when the bytes mean the same."""
        return hashlib.sha256("\n".join(map(_canonical, self.layers)).encode()).hexdigest()


def _spread(kv_layers: int, state_layers: int) -> tuple[LayerKind, ...]:
    """`state_layers` recurrent layers, an attention layer after each equal share of them."""
    order: list[LayerKind] = []
    done = 0
    for n in range(1, kv_layers + 1):
        share = state_layers * n // kv_layers
        order.extend("state" for _ in range(done, share))
        order.append("kv")
        done = share
    order.extend("state" for _ in range(done, state_layers))
    return tuple(order)


def _canonical(layer: LayerSpec) -> str:
    words: list[str] = []
    if layer.kv is not None:
        words.append(f"{layer.kv.kept} {layer.kv.dtype} {layer.kv.key} {layer.kv.value}")
    words += [f"state {state.name!r} {state.dtype} {state.shape}" for state in layer.states]
    return "; ".join(words) or "none"
