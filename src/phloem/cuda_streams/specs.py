"""What one model layer keeps for a prefix: shapes, dtypes, bytes.

A layer may keep KV for every token, recurrent states, both (parallel hybrids), or neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch

from phloem.errors import InvalidRequest

__all__ = [
    "FrameShape",
    "KVSpec",
    "LayerSpec",
    "Layered",
    "StateSpec",
    "aligned",
    "torch_dtype",
]

# Every part of a row begins at a multiple of this, so that rows can be moved as 8-byte words
# (several times faster than bytes) and kernels can use 16-byte loads.
_ALIGN = 16


def aligned(size: int) -> int:
    """`size` bytes rounded up to where the next part of a row may begin."""
    return -(-size // _ALIGN) * _ALIGN


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; InvalidRequest if there is none."""
    found: object = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"no torch dtype is called {name!r}; names are like 'bfloat16'")
    return found


def _check_shape(what: str, shape: object) -> None:
    sizes = cast("Sequence[int]", shape) if isinstance(shape, Sequence) else ()
    if not sizes or any(size < 1 for size in sizes):
        raise InvalidRequest(f"{what} must be one or more positive sizes, not {shape}")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One attention layer: the shapes (heads, dim) of one token's key and value, which may differ.

    `kept` says which of the cache's components keeps it: "kv" for full attention, "window:128" for
    a sliding window of 128 tokens. Raises InvalidRequest for an unknown dtype or an empty shape.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: str = "bfloat16"
    kept: str = "kv"

    @property
    def component(self) -> str:
        """The name of the component that keeps it."""
        return self.kept.partition(":")[0]

    def __post_init__(self) -> None:
        torch_dtype(self.dtype)
        _check_shape("key", self.key)
        _check_shape("value", self.value)

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key."""
        return math.prod(self.key) * torch_dtype(self.dtype).itemsize

    @property
    def value_bytes(self) -> int:
        """Bytes of one token's value."""
        return math.prod(self.value) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One named state: its shape and dtype in one layer.

    `layers` is read only by `ModelLayout.hybrid`: how many layers keep a state like this.
    Raises InvalidRequest for an unknown dtype, an empty shape or name, or no layers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layers: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidRequest("a state needs a name")
        if self.layers < 1:
            raise InvalidRequest(f"state {self.name!r} is in {self.layers} layers; at least 1")
        torch_dtype(self.dtype)
        _check_shape(f"shape of state {self.name!r}", self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of this state in one layer."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one model layer keeps. Raises InvalidRequest if two states have the same name."""

    kv: KVSpec | None = None
    states: tuple[StateSpec, ...] = ()

    def __post_init__(self) -> None:
        names = [state.name for state in self.states]
        if len(set(names)) != len(names):
            raise InvalidRequest(f"two states of one layer have the same name: {names}")

    def page_bytes(self, page_size: int, component: str = "kv") -> int:
        """Bytes that a component's page of `page_size` tokens takes here, padding included."""
        if self.kv is None or self.kv.component != component:
            return 0
        return aligned(page_size * self.kv.key_bytes) + aligned(page_size * self.kv.value_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot takes in this layer, padding included."""
        return sum(aligned(state.nbytes) for state in self.states)


class Layered(Protocol):
    """Anything that says what each model layer keeps, in the order a forward pass visits them."""

    @property
    def layers(self) -> Sequence[LayerSpec]: ...


class FrameShape(NamedTuple):
    """A piece of one memory that holds either one state slot or `pages` pages.

    `slot_bytes` and `page_bytes` are what they take in it: their own size, and what is added so
    that whole ones fill the frame.
    """

    nbytes: int
    pages: int

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""
        return self.nbytes // self.pages

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.nbytes

    @classmethod
    def of(cls, page_bytes: int, slot_bytes: int) -> FrameShape:
        """The frame that wastes least for pages and slots of so many bytes, both above 0."""
        fewer = max(1, slot_bytes // page_bytes)

        def shape(pages: int) -> FrameShape:
            unit = _ALIGN * pages
            return cls(-(-max(pages * page_bytes, slot_bytes) // unit) * unit, pages)

        def wasted(one: FrameShape) -> float:
            return 1 - min(one.pages * page_bytes, slot_bytes) / one.nbytes

        return min(shape(fewer), shape(fewer + 1), key=wasted)
