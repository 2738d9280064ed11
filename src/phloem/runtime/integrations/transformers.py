"""Hybrid models of `transformers` over pools of KV pages and state slots.

A `TransformersModel` moves data between the model's own cache object and the pools: it gathers a
request's pages and a private copy of its state into a new cache object, runs the model on it, and
scatters what the run added back into pages and slots. It decides nothing: which pages and slots
are whose comes from the caller.

Facts about these models that the code below depends on:

* Recurrent and convolution states are written in place by every forward pass, so a cache object
  must never share memory with a slot. KV tensors are replaced, not written.
* A state that was put into the cache object by attribute is ignored in silence; the `update_*`
  methods copy and mark it as present.
* Some models count positions from zero if they are not told them, even on a filled cache.
* The cache argument of `forward` has two names, by version: `cache` and `past_key_values`.
* Shapes and dtypes differ per family (K and V widths, convolution columns, float32 states in a
  bfloat16 model), so they are read from the tensors of a short run, never computed from a config.
* A few models are silently wrong when a prompt is continued in a second chunk (their scan starts
  from zero). Only checked `model_type`s are taken; the others have to pass `self_test`.
"""

from __future__ import annotations

import inspect
from functools import partial
from math import nan
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from phloem.cuda_streams.specs import KVSpec, LayerSpec, StateSpec
from phloem.errors import InvalidRequest
from phloem.runtime.integrations.late import late_kv, late_states
from phloem.runtime.layout import ModelLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedConfig

    from phloem.cuda_streams.pools import DevicePools

__all__ = [
    "ALLOWED", "CacheLayer", "CausalModel", "ModelCache", "Row", "TransformersModel",
    "UncheckedModel",
]  # fmt: skip

ALLOWED = frozenset(
    {
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "llama",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3",
        "qwen3_next",
    }
)
"""The `model_type`s whose continuation from restored data is checked by this project's tests."""

_PROBE_TOKENS = 8


class UncheckedModel(InvalidRequest):
    """A model that is not on the allow-list, or one that failed the self-test."""


class ModelConfig(Protocol):
    """What is read from a model's config."""

    model_type: str
    vocab_size: int


class CausalOutput(Protocol):
    """What is read from a forward pass."""

    @property
    def logits(self) -> Tensor: ...


class CausalModel(Protocol):
    """A causal language model of `transformers`."""

    @property
    def config(self) -> ModelConfig: ...
    def __call__(self, **arguments: object) -> CausalOutput: ...


class CacheLayer(Protocol):
    """What one layer keeps; layers with attention only have no states, and the reverse."""

    keys: Tensor
    values: Tensor
    number_of_states: int
    conv_states: dict[int, Tensor | None]
    recurrent_states: dict[int, Tensor | None]

    def update(
        self, key_states: Tensor, value_states: Tensor, *more: object, **named: object
    ) -> object: ...


class ModelCache(Protocol):
    """The model's own cache object: KV and states of one request, or of a batch of them."""

    @property
    def layers(self) -> Sequence[CacheLayer]: ...
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> object: ...
    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0) -> object: ...
    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> object: ...


class Row(NamedTuple):
    """Where one request's data is: its KV pages, how many tokens they hold, its working slot."""

    pages: Sequence[int]
    length: int
    slot: int | None


class _StatePart(NamedTuple):
    layer: int
    kind: str  # "conv" or "recurrent"
    number: int

    @property
    def name(self) -> str:
        return self.kind if self.number == 0 else f"{self.kind}{self.number}"


class TransformersModel:
    """One model and how its cache object maps onto pools.

    `layout` describes the pools it needs. Not thread-safe: all calls that run the model or touch
    pools belong on one worker thread.

    Raises `UncheckedModel` for a `model_type` that is not in `ALLOWED`, unless `unchecked` is set;
    set it only to hand the model to `self_test`. Raises `InvalidRequest` for a model whose cache
    holds more than KV of all tokens and recurrent states (windows, other cache classes).
    """

    def __init__(self, model: CausalModel, *, unchecked: bool = False) -> None:
        model_type = model.config.model_type
        if model_type not in ALLOWED and not unchecked:
            raise UncheckedModel(
                f"model type {model_type!r} is not checked ({', '.join(sorted(ALLOWED))} are); "
                "phloem.runtime.integrations.selftest.adopt(model) runs the self-test on it "
                "and takes it if it passes"
            )
        self.model = model
        self.model_type = model_type
        self.vocabulary = model.config.vocab_size
        module = cast("torch.nn.Module", model)
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.device = next(module.parameters()).device
        self.layout = self._probe()

    def _probe(self) -> ModelLayout:
        """Runs a few tokens and reads what the cache object then holds, layer by layer."""
        cache = self._bare_cache()
        if windows := _layers_of(DynamicSlidingWindowLayer, cache):
            raise InvalidRequest(f"layers {windows} keep sliding windows: not supported")
        self.forward([0] * _PROBE_TOKENS, cache, 0)
        self._kv_layers = _layers_of(CacheLayerMixin, cache)
        self._state_parts = [
            part
            for index in _layers_of(LinearAttentionCacheLayerMixin, cache)
            for part in _state_parts(index, cache.layers[index])
        ]
        self._zeros = {
            part: torch.zeros_like(_state(cache.layers[part.layer], part))
            for part in self._state_parts
        }
        # What is read before it was filled must show.
        self._blanks = {part: torch.full_like(zero, nan) for part, zero in self._zeros.items()}
        return ModelLayout.from_layers(
            [self._layer_spec(index, layer) for index, layer in enumerate(cache.layers)]
        )

    def _layer_spec(self, index: int, layer: CacheLayer) -> LayerSpec:
        states: list[StateSpec] = []
        for part in self._state_parts:
            if part.layer == index:
                state = _state(layer, part)
                states.append(StateSpec(part.name, tuple(state.shape[1:]), _dtype(state)))
        kv = None
        if index in self._kv_layers:
            (_, key_heads, _, key_width), (_, value_heads, _, value_width) = (
                layer.keys.shape,
                layer.values.shape,
            )
            kv = KVSpec((key_heads, key_width), (value_heads, value_width), _dtype(layer.keys))
        return LayerSpec(kv, tuple(states))

    # ------------------------------------------------------------------ running the model

    def _bare_cache(self) -> ModelCache:
        return cast("ModelCache", DynamicCache(config=cast("PreTrainedConfig", self.model.config)))

    @torch.inference_mode()
    def new_cache(self) -> ModelCache:
        """An empty cache object: no KV, and states that are zero.

        It is what `gather` gives for no tokens and a cleared slot. A bare cache object of the
        model without any state differs from it by rounding: its first chunk takes another path.
        """
        cache = self._bare_cache()
        for part in self._state_parts:
            self._load_state(cache, part, self._zeros[part])
        return cache

    @torch.inference_mode()
    def plain(self, tokens: Sequence[int]) -> Tensor:
        """The logits at every position from the model by itself: one piece, no cache object."""
        ids = torch.tensor([list(tokens)], device=self.device)
        return self.model(input_ids=ids, use_cache=False).logits[0]

    def forward(
        self, tokens: Sequence[int], cache: ModelCache, start: int, *, every_position: bool = False
    ) -> Tensor:
        """Runs `tokens`, the first at position `start`, on a cache that holds all before it.

        Returns the logits after the last token, [1, vocabulary], or after each of them.
        """
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        return self._call(cache, ids, positions, 0 if every_position else 1)[0]

    def decode(self, tokens: Sequence[int], cache: ModelCache, lengths: Sequence[int]) -> Tensor:
        """Runs one token for each row of a gathered batch; row r holds `lengths[r]` tokens.

        Returns the logits, [rows, vocabulary]. One row alone takes the same path as `forward`.
        """
        if len(tokens) == 1:
            return self.forward(tokens, cache, lengths[0])
        ends = torch.tensor(list(lengths), device=self.device)[:, None]
        columns = torch.arange(max(lengths) + 1, device=self.device)[None]
        mask = (columns >= max(lengths) - ends).long()
        ids = torch.tensor(list(tokens), device=self.device)[:, None]
        return self._call(cache, ids, ends, 1, attention_mask=mask)[:, -1]

    @torch.inference_mode()
    def _call(
        self, cache: ModelCache, ids: Tensor, positions: Tensor, keep: int, **extra: Tensor
    ) -> Tensor:
        arguments: dict[str, object] = {self._cache_argument: cache, **extra}
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **arguments,
        )
        return output.logits

    # ------------------------------------------------------------------ pools to cache object

    def gather(
        self, pools: DevicePools, pages: Sequence[int], n_tokens: int, state_slot: int | None
    ) -> ModelCache:
        """A new cache object with the first `n_tokens` of `pages` and a copy of `state_slot`.

        The slot must hold the state exactly at `n_tokens`; at 0, a cleared one. It is not read
        for a model without states.
        """
        return self.gather_batch(pools, [Row(pages, n_tokens, state_slot)])

    @torch.inference_mode()
    def gather_late(self, pools: DevicePools, row: Row, wait: Callable[[int], None]) -> ModelCache:
        """Like `gather`, each layer only when a forward pass comes to it, and after `wait(layer)`.

        What `wait` raises ends the pass; the cache object is of no use then.
        """
        cache = self._bare_cache()
        pages, slots = self._page_index(pools, row), self._slots([row.slot])

        def gather_kv(layer: int) -> tuple[Tensor, Tensor]:
            wait(layer)
            keys, values = self._kv_of(pools, layer, [row], [pages], row.length)
            return keys, values

        def fill(layer: int, held: CacheLayer) -> None:
            wait(layer)
            for part in self._parts_of(layer):
                states = pools.states[layer][part.name].index_select(0, slots)
                _state(held, part).copy_(states)

        for layer, held in enumerate(cache.layers):
            if row.length and layer in self._kv_layers:
                late_kv(held, row.length, partial(gather_kv, layer))
            if parts := self._parts_of(layer):
                for part in parts:
                    self._load_state(cache, part, self._blanks[part])
                late_states(held, partial(fill, layer, held))
        return cache

    @torch.inference_mode()
    def gather_batch(self, pools: DevicePools, rows: Sequence[Row]) -> ModelCache:
        """The same for several requests: KV padded on the left to the longest, states stacked."""
        cache = self._bare_cache()
        longest = max(row.length for row in rows)
        if longest:
            pages = [self._page_index(pools, row) for row in rows]
            for layer in self._kv_layers:
                keys, values = self._kv_of(pools, layer, rows, pages, longest)
                cache.update(keys, values, layer)
        slots = self._slots([row.slot for row in rows])
        for part in self._state_parts:
            states = pools.states[part.layer][part.name].index_select(0, slots)
            self._load_state(cache, part, states)
        return cache

    def _load_state(self, cache: ModelCache, part: _StatePart, states: Tensor) -> None:
        """Copies `states` into the cache object and marks them as present."""
        if part.kind == "conv":
            cache.update_conv_state(states, part.layer, state_idx=part.number)
        else:
            cache.update_recurrent_state(states, part.layer, state_idx=part.number)

    def _page_index(self, pools: DevicePools, row: Row) -> Tensor:
        pages = row.pages[: -(-row.length // pools.page_size)]
        return torch.tensor(list(pages), dtype=torch.int64, device=self.device)

    def _kv_of(
        self,
        pools: DevicePools,
        layer: int,
        rows: Sequence[Row],
        pages: Sequence[Tensor],
        longest: int,
    ) -> list[Tensor]:
        """Keys and values of a layer, [rows, heads, longest, width], with each row at the right."""
        joined: list[Tensor] = []
        for pool in (pools.kv[layer].k, pools.kv[layer].v):
            _, _, heads, width = pool.shape
            out = pool.new_zeros(len(rows), heads, longest, width)
            for place, row, index in zip(out, rows, pages, strict=True):
                if row.length:
                    tokens = pool.index_select(0, index).flatten(0, 1)[: row.length]
                    place[:, longest - row.length :] = tokens.transpose(0, 1)
            joined.append(out)
        return joined

    def _parts_of(self, layer: int) -> list[_StatePart]:
        return [part for part in self._state_parts if part.layer == layer]

    # ------------------------------------------------------------------ cache object to pools

    @torch.inference_mode()
    def scatter_kv(
        self, cache: ModelCache, pools: DevicePools, pages: Sequence[int], start: int, end: int
    ) -> None:
        """Writes the KV of tokens [start, end) of a one-request cache into `pages`.

        `pages` is the request's page table from position 0 on.
        """
        where = [divmod(position, pools.page_size) for position in range(start, end)]
        page = torch.tensor([pages[index] for index, _ in where], device=self.device)
        offset = torch.tensor([offset for _, offset in where], device=self.device)
        for layer in self._kv_layers:
            held, pool = cache.layers[layer], pools.kv[layer]
            pool.k[page, offset] = held.keys[0, :, start:end].transpose(0, 1)
            pool.v[page, offset] = held.values[0, :, start:end].transpose(0, 1)

    def store_state(self, cache: ModelCache, pools: DevicePools, slot: int | None) -> None:
        """Writes the state of a one-request cache into `slot`."""
        self.store_states(cache, pools, [slot])

    @torch.inference_mode()
    def store_states(
        self, cache: ModelCache, pools: DevicePools, slots: Sequence[int | None]
    ) -> None:
        """Writes the state of each row of a batch into its slot."""
        index = self._slots(slots)
        for part in self._state_parts:
            states = _state(cache.layers[part.layer], part)
            pools.states[part.layer][part.name].index_copy_(0, index, states)

    def copy_state(self, pools: DevicePools, source: int, target: int) -> None:
        """Copies a state from slot to slot, in the order of the calls on the worker thread."""
        for part in self._state_parts:
            states = pools.states[part.layer][part.name]
            states[target] = states[source]

    def _slots(self, slots: Sequence[int | None]) -> Tensor:
        """The slots as an index. Slot 0 stands for the none of a model without states."""
        if self._state_parts and any(not slot for slot in slots):
            raise InvalidRequest(f"this model keeps states; the slots given are {list(slots)}")
        return torch.tensor([slot or 0 for slot in slots], device=self.device)

    @torch.inference_mode()
    def scatter_decoded(self, cache: ModelCache, pools: DevicePools, rows: Sequence[Row]) -> None:
        """Writes what `decode` added: the last token's KV and the state of each row.

        `Row.length` counts the new token.
        """
        where = [divmod(row.length - 1, pools.page_size) for row in rows]
        pages = [row.pages[index] for row, (index, _) in zip(rows, where, strict=True)]
        page = torch.tensor(pages, device=self.device)
        offset = torch.tensor([offset for _, offset in where], device=self.device)
        for layer in self._kv_layers:
            held, pool = cache.layers[layer], pools.kv[layer]
            pool.k[page, offset] = held.keys[:, :, -1]
            pool.v[page, offset] = held.values[:, :, -1]
        self.store_states(cache, pools, [row.slot for row in rows])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _state(layer: CacheLayer, part: _StatePart) -> Tensor:
    states = layer.conv_states if part.kind == "conv" else layer.recurrent_states
    state = states[part.number]
    if state is None:
        raise InvalidRequest(f"layer {part.layer} of the cache object holds no {part.name} state")
    return state


def _layers_of(kind: type, cache: ModelCache) -> list[int]:
    layers = cast("Sequence[object]", cache.layers)
    return [index for index, layer in enumerate(layers) if isinstance(layer, kind)]


def _state_parts(index: int, layer: CacheLayer) -> Iterator[_StatePart]:
    """The states that a recurrent layer of a filled cache object holds."""
    for number in range(layer.number_of_states):
        if layer.conv_states[number] is not None:
            yield _StatePart(index, "conv", number)
        if layer.recurrent_states[number] is not None:
            yield _StatePart(index, "recurrent", number)
