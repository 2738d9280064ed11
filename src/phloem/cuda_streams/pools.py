"""Pools: the tensors that pages and slots live in, and the same memory as rows of bytes.

A model sees tensors by layer, indexed by page id or slot. Copies see a `RowPool`: row `i` is page
`i` (or slot `i`), and each model layer contributes zero or more *parts* to it:

    device, kv        part of a layer:  [ K of the page | pad | V of the page | pad ]
    device, states    one part for each named state of a layer
    host              the parts of all layers of a row side by side
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from phloem.cuda_streams.codec import Int8Codec
from phloem.cuda_streams.host import HostMemory, available_bytes, ordinary_memory
from phloem.cuda_streams.specs import KVSpec, Layered, LayerSpec, StateSpec, aligned, torch_dtype
from phloem.errors import HostMemoryShort, InvalidRequest

__all__ = ["DevicePools", "HostPools", "LayerKV", "Pair", "RowPool", "Tier"]

Tier = Literal["device", "host"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BYTES = {word: size for size, word in _WORDS.items()}


def _word_bytes(part: Tensor) -> int:
    """The widest word that `part` (uint8 [rows, bytes]) can be seen in."""
    sizes = (part.shape[1], part.stride(0), part.storage_offset())
    return next(word for word in _WORDS if all(size % word == 0 for size in sizes))


class Pair(NamedTuple):
    """A part of a layer on its way: [count, words] each, of the widest word that fits both.

    Where one side is coded both are bytes, and `convert` makes rows of the target of the source's.
    """

    target: Tensor
    source: Tensor
    convert: Callable[[Tensor], Tensor] | None


class RowPool:
    """`count` rows of bytes, each with its parts by model layer.

    Ids are row numbers: page ids for a KV pool, slots for a state pool. Two pools with equal
    `part_bytes` can be copied between, whatever their physical order. Those are plain bytes: a
    pool below the device may keep some of its parts coded.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        count: int,
        layers: Sequence[Sequence[Tensor]],
        *,
        whole: Tensor | None = None,
        piece_rows: int | None = None,
        codecs: Sequence[Sequence[Int8Codec | None]] | None = None,
    ) -> None:
        """`layers[l]` are the parts of model layer `l`: uint8 [count, bytes], dense in a row;
        `codecs[l]` say how they are coded, if they are.

        `whole`, for a page-first pool, is its memory [count, bytes]; the parts are views of it.
        No single copy may cross a multiple of `piece_rows` rows of it.
        """
        for parts in layers:
            for part in parts:
                shape_ok = part.dtype == torch.uint8 and part.dim() == 2
                if not shape_ok or part.shape[0] != count or part.stride(1) != 1:
                    raise InvalidRequest(
                        f"pool {name!r}: a part must be uint8 [{count}, bytes], dense in a row, "
                        f"not {part.dtype} {tuple(part.shape)} with strides {part.stride()}"
                    )
        self.name = name
        self.tier: Tier = tier
        self.count = count
        self.whole = whole
        self.piece_rows = piece_rows or max(1, count)
        self.codecs = (
            tuple(map(tuple, codecs)) if codecs else tuple((None,) * len(parts) for parts in layers)
        )
        self.stored_bytes = tuple(tuple(part.shape[1] for part in parts) for parts in layers)
        self.part_bytes = tuple(
            tuple(
                size if codec is None else codec.part_bytes
                for size, codec in zip(sizes, coded, strict=True)
            )
            for sizes, coded in zip(self.stored_bytes, self.codecs, strict=True)
        )
        self._parts = tuple(tuple(parts) for parts in layers)
        self._views = tuple(
            tuple(part.view(_WORDS[_word_bytes(part)]) for part in parts) for parts in layers
        )
        self.row_bytes = sum(map(sum, self.stored_bytes)) if whole is None else whole.shape[1]
        """Bytes of one row over all layers, alignment included."""

    def __repr__(self) -> str:
        return f"RowPool({self.name!r}, {self.tier}, {self.count} rows of {self.row_bytes} bytes)"

    @property
    def layers(self) -> int:
        """The number of model layers, those without a part included."""
        return len(self._parts)

    @property
    def is_coded(self) -> bool:
        """Some part is not kept as plain bytes."""
        return any(codec is not None for coded in self.codecs for codec in coded)

    @property
    def is_meta(self) -> bool:
        """The rows have sizes but no bytes (torch's `meta` device): for simulations."""
        return any(part.is_meta for parts in self._parts for part in parts)

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        """The parts of a model layer as uint8 [count, bytes]; empty if it keeps nothing here."""
        return self._parts[layer]

    def words(self, layer: int) -> tuple[Tensor, ...]:
        """The parts of a model layer as [count, words] of the widest word that fits each."""
        return self._views[layer]

    def pairs(self, layer: int, source: RowPool) -> list[Pair]:
        """How the parts of a layer come here from `source`, which has equal `part_bytes`."""
        out: list[Pair] = []
        for number, (own, its) in enumerate(
            zip(self._parts[layer], source._parts[layer], strict=True)
        ):
            own_codec, its_codec = self.codecs[layer][number], source.codecs[layer][number]
            if own_codec == its_codec:
                mine, theirs = self._views[layer][number], source._views[layer][number]
                if mine.dtype != theirs.dtype:
                    word = min(mine.dtype, theirs.dtype, key=_BYTES.__getitem__)
                    mine, theirs = mine.view(word), theirs.view(word)
                out.append(Pair(mine, theirs, None))
            elif own_codec is not None:
                out.append(Pair(own, its, own_codec.encode))
            elif its_codec is not None:
                out.append(Pair(own, its, its_codec.decode))
        return out


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer: [pages, page_size, heads, dim] each, indexed by page id."""

    k: Tensor
    v: Tensor


def _typed(rows: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """uint8 [n, bytes] as [n, *shape] of `dtype`; a view."""
    return torch.unflatten(rows.view(torch_dtype(dtype)), 1, shape)


def _kv_layer(
    spec: KVSpec, pages: int, page_size: int, device: torch.device
) -> tuple[LayerKV, Tensor]:
    k_bytes, v_bytes = page_size * spec.key_bytes, page_size * spec.value_bytes
    v_start = aligned(k_bytes)
    rows = torch.zeros((pages, v_start + aligned(v_bytes)), dtype=torch.uint8, device=device)
    k = _typed(rows[:, :k_bytes], spec.dtype, (page_size, *spec.key))
    v = _typed(rows[:, v_start : v_start + v_bytes], spec.dtype, (page_size, *spec.value))
    return LayerKV(k, v), rows


def _state(spec: StateSpec, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.zeros((slots, aligned(spec.nbytes)), dtype=torch.uint8, device=device)
    return _typed(rows[:, : spec.nbytes], spec.dtype, spec.shape), rows


class _Wanted(NamedTuple):
    """What the layout says about one adopted tensor."""

    pool: str
    layer: int
    dtype: str
    shape: tuple[int, ...]


def _adopted_rows(name: str, tensor: Tensor, want: _Wanted) -> Tensor:
    """The rows of an adopted tensor, uint8 [n, bytes]; a view."""
    if tensor.dtype != torch_dtype(want.dtype) or tuple(tensor.shape[1:]) != want.shape:
        raise InvalidRequest(
            f"{name} must be {want.dtype} [n, {', '.join(map(str, want.shape))}], "
            f"not {tensor.dtype} {list(tensor.shape)}"
        )
    if not tensor[:1].is_contiguous():
        raise InvalidRequest(f"{name} has holes within a row: strides {tensor.stride()}")
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _count(pool: str, layers: list[list[Tensor]]) -> int:
    counts = {len(part) for parts in layers for part in parts}
    if len(counts) > 1:
        raise InvalidRequest(f"tensors of {pool} differ in their first size: {sorted(counts)}")
    return counts.pop() if counts else 0


@dataclass(frozen=True, slots=True)
class DevicePools:
    """The device tier. Page 0 and slot 0 are never granted: padded rows may write there.

    `kv[layer].k` and `.v` are [pages, page_size, heads, dim]; `states[layer][name]` is
    [slots, *shape]. Layers that keep no KV (no state) are not in `kv` (`states`). Both are views
    of the rows of `kv_rows` and `state_rows`, which copies work on.
    """

    page_size: int
    kv: Mapping[int, LayerKV]
    states: Mapping[int, Mapping[str, Tensor]]
    kv_rows: RowPool
    state_rows: RowPool
    device: torch.device

    @classmethod
    def allocate(
        cls,
        layout: Layered,
        *,
        pages: int,
        states: int,
        page_size: int,
        device: str | torch.device = "cpu",
    ) -> DevicePools:
        """Zeroed pools of `pages` pages and `states` slots, the reserved ones included.

        Raises InvalidRequest for sizes below one. What no layer keeps takes no bytes.
        """
        layers = layout.layers
        _check_sizes(layers, pages, states, page_size)
        where = torch.device(device)
        kv: dict[int, LayerKV] = {}
        by_name: dict[int, dict[str, Tensor]] = {}
        kv_parts: list[list[Tensor]] = []
        state_parts: list[list[Tensor]] = []
        # Outside inference mode, whoever calls: an inference tensor could not be written later.
        with torch.inference_mode(False):
            for number, layer in enumerate(layers):
                kv_parts.append([])
                state_parts.append([])
                if layer.kv is not None:
                    kv[number], rows = _kv_layer(layer.kv, pages, page_size, where)
                    kv_parts[-1].append(rows)
                for spec in layer.states:
                    tensor, rows = _state(spec, states, where)
                    by_name.setdefault(number, {})[spec.name] = tensor
                    state_parts[-1].append(rows)
        return cls(
            page_size=page_size,
            kv=kv,
            states=by_name,
            kv_rows=RowPool("device kv", "device", pages, kv_parts),
            state_rows=RowPool("device states", "device", states, state_parts),
            device=where,
        )

    @classmethod
    def adopt(
        cls,
        layout: Layered,
        *,
        page_size: int,
        kv: Mapping[int, tuple[Tensor, Tensor]],
        states: Mapping[int, Mapping[str, Tensor]],
    ) -> DevicePools:
        """A framework's own tensors as pools; nothing is copied.

        `kv[layer]` are keys and values as [pages, page_size, heads, dim], `states[layer][name]` are
        [slots, *shape]. Pages (slots) may be any distance apart, but each must be dense in itself.
        Raises InvalidRequest for missing or surplus layers and names, other shapes or dtypes than
        the layout's, pages (slots) with holes, and tensors that differ in count or device.
        """
        wanted: dict[str, _Wanted] = {}
        given: dict[str, Tensor] = {}
        for number, layer in enumerate(layout.layers):
            if layer.kv is not None:
                for name, shape in (("k", layer.kv.key), ("v", layer.kv.value)):
                    key = f"{name} of layer {number}"
                    wanted[key] = _Wanted("kv", number, layer.kv.dtype, (page_size, *shape))
            for spec in layer.states:
                key = f"state {spec.name!r} of layer {number}"
                wanted[key] = _Wanted("states", number, spec.dtype, spec.shape)
        for number, (k, v) in kv.items():
            given |= {f"k of layer {number}": k, f"v of layer {number}": v}
        for number, named in states.items():
            given |= {f"state {name!r} of layer {number}": one for name, one in named.items()}
        if given.keys() != wanted.keys():
            missing, surplus = wanted.keys() - given.keys(), given.keys() - wanted.keys()
            raise InvalidRequest(f"missing {sorted(missing)}, surplus {sorted(surplus)}")
        parts: dict[str, list[list[Tensor]]] = {
            pool: [[] for _ in layout.layers] for pool in ("kv", "states")
        }
        for name, want in wanted.items():
            parts[want.pool][want.layer].append(_adopted_rows(name, given[name], want))
        devices = {str(tensor.device) for tensor in given.values()}
        if len(devices) != 1:
            raise InvalidRequest(f"one device is needed, not {sorted(devices)}")
        counts = {pool: _count(pool, layers) for pool, layers in parts.items()}
        _check_sizes(layout.layers, counts["kv"], counts["states"], page_size)
        return cls(
            page_size=page_size,
            kv={number: LayerKV(k, v) for number, (k, v) in sorted(kv.items())},
            states={
                number: {spec.name: states[number][spec.name] for spec in layer.states}
                for number, layer in enumerate(layout.layers)
                if layer.states
            },
            kv_rows=RowPool("device kv", "device", counts["kv"], parts["kv"]),
            state_rows=RowPool("device states", "device", counts["states"], parts["states"]),
            device=next(iter(given.values())).device,
        )

    @property
    def pages(self) -> int:
        """Pages, the reserved page 0 included."""
        return self.kv_rows.count

    @property
    def slots(self) -> int:
        """State slots, the reserved slot 0 included."""
        return self.state_rows.count

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, padding included."""
        return self.kv_rows.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot over all layers, padding included."""
        return self.state_rows.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and slots."""
        return self.pages * self.page_bytes + self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class HostPools:
    """The host tier, page-first: all layers of a page (of a state) are one run of bytes."""

    kv_rows: RowPool
    state_rows: RowPool

    @classmethod
    def allocate(
        cls,
        like: DevicePools,
        *,
        pages: int,
        states: int,
        available: Callable[[], int] = available_bytes,
        memory: Callable[[int, int], HostMemory] = ordinary_memory,
        int8_states: Collection[str] = (),
    ) -> HostPools:
        """`pages` pages and `states` slots with the row layout of `like`; none is reserved.

        The states named in `int8_states` are kept as 8-bit codes (`Int8Codec`), the others exact.

        `memory(count, row_bytes)` gives what a pool lives in: ordinary memory, or pinned.
        Raises InvalidRequest for negative sizes and names of no state, and HostMemoryShort with
        nothing taken when both pools together do not fit.
        """
        for what, count in (("pages", pages), ("states", states)):
            if count < 0:
                raise InvalidRequest(f"{what} is {count}; at least 0")
        kv_codecs: Codecs = [[None] * len(sizes) for sizes in like.kv_rows.part_bytes]
        codecs = _state_codecs(like, int8_states)
        asked = pages * _row_bytes(like.kv_rows, kv_codecs)
        asked += states * _row_bytes(like.state_rows, codecs)
        if asked > (left := available()):
            raise HostMemoryShort(asked, left)
        return cls(
            kv_rows=_page_first("host kv", like.kv_rows, pages, memory, kv_codecs),
            state_rows=_page_first("host states", like.state_rows, states, memory, codecs),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and slots."""
        pools = (self.kv_rows, self.state_rows)
        return sum(pool.count * pool.row_bytes for pool in pools)


Codecs = list[list[Int8Codec | None]]


def _state_codecs(like: DevicePools, int8_states: Collection[str]) -> Codecs:
    """For each layer and named state of it how it is coded."""
    known = {name for named in like.states.values() for name in named}
    if unknown := set(int8_states) - known:
        raise InvalidRequest(f"no state is called {min(unknown)!r}; there are {sorted(known)}")
    codecs: Codecs = []
    for layer, sizes in enumerate(like.state_rows.part_bytes):
        named = like.states.get(layer, {})
        codecs.append(
            [
                Int8Codec(tuple(state.shape[1:]), str(state.dtype).removeprefix("torch."), size)
                if name in int8_states
                else None
                for (name, state), size in zip(named.items(), sizes, strict=True)
            ]
        )
    return codecs


def _stored(like: RowPool, codecs: Codecs) -> list[list[int]]:
    """Bytes of each part of each layer as they are kept."""
    return [
        [size if codec is None else codec.coded_bytes for size, codec in zip(*both, strict=True)]
        for both in zip(like.part_bytes, codecs, strict=True)
    ]


def _row_bytes(like: RowPool, codecs: Codecs) -> int:
    """Bytes of a page-first row for the parts of `like`."""
    return sum(aligned(size) for sizes in _stored(like, codecs) for size in sizes)


def _page_first(
    name: str,
    like: RowPool,
    count: int,
    memory: Callable[[int, int], HostMemory],
    codecs: Codecs,
) -> RowPool:
    rows, piece_rows = memory(count, _row_bytes(like, codecs))
    layers: list[list[Tensor]] = []
    start = 0
    for sizes in _stored(like, codecs):
        layers.append([])
        for size in sizes:
            layers[-1].append(rows[:, start : start + size])
            start += aligned(size)
    return RowPool(name, "host", count, layers, whole=rows, piece_rows=piece_rows, codecs=codecs)


def _check_sizes(layers: Sequence[LayerSpec], pages: int, states: int, page_size: int) -> None:
    if page_size < 1:
        raise InvalidRequest(f"page_size is {page_size}; at least 1")
    has_kv = any(layer.kv is not None for layer in layers)
    has_states = any(layer.states for layer in layers)
    if not has_kv and not has_states:
        raise InvalidRequest("no layer keeps anything")
    for what, has, count in (("pages", has_kv, pages), ("states", has_states, states)):
        if count < (1 if has else 0):
            raise InvalidRequest(f"{what} is {count}; at least 1 (number 0 is reserved)")
