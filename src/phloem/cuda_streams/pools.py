"""Pools: the tensors that pages and slots live in, and the same memory as rows of bytes.

A model sees tensors by layer, indexed by page id or slot; copies see a `RowPool`. Parts of a row:

    device, kv        part of a layer:  [ K of the page | pad | V of the page | pad ]
    device, states    one part for each named state of a layer
    host, shared      the parts of all layers of a row side by side
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from phloem.cuda_streams.codec import Int8Codec
from phloem.cuda_streams.host import HostMemory, available_bytes, ordinary_memory
from phloem.cuda_streams.rows import RowPool
from phloem.cuda_streams.specs import (
    FrameShape,
    KVSpec,
    Layered,
    LayerSpec,
    StateSpec,
    aligned,
    torch_dtype,
)
from phloem.errors import HostMemoryShort, InvalidRequest

__all__ = ["DevicePools", "HostPools", "LayerKV"]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer: [pages, page_size, heads, dim] each, indexed by page id."""

    k: Tensor
    v: Tensor


def _typed(rows: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """uint8 [n, bytes] as [n, *shape] of `dtype`; a view."""
    return torch.unflatten(rows.view(torch_dtype(dtype)), 1, shape)


# Rows for a part of a layer: uint8 [count, bytes], from its size.
Rows = Callable[[int], Tensor]


def _new_rows(count: int, device: torch.device) -> Rows:
    return lambda size: torch.zeros((count, size), dtype=torch.uint8, device=device)


def _rows_within(memory: Tensor, first: int, count: int, stride: int) -> Rows:
    """Rows of `memory` (uint8 [bytes]), `stride` bytes apart; each part begins where one ended."""
    at = first

    def rows(size: int) -> Tensor:
        nonlocal at
        part = memory.as_strided((count, size), (stride, 1), memory.storage_offset() + at)
        at += size
        assert at <= first + stride
        return part

    return rows


def _kv_layer(spec: KVSpec, page_size: int, new: Rows) -> tuple[LayerKV, Tensor]:
    k_bytes, v_bytes = page_size * spec.key_bytes, page_size * spec.value_bytes
    v_start = aligned(k_bytes)
    rows = new(v_start + aligned(v_bytes))
    k = _typed(rows[:, :k_bytes], spec.dtype, (page_size, *spec.key))
    v = _typed(rows[:, v_start : v_start + v_bytes], spec.dtype, (page_size, *spec.value))
    return LayerKV(k, v), rows


def _state(spec: StateSpec, new: Rows) -> tuple[Tensor, Tensor]:
    rows = new(aligned(spec.nbytes))
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
    if not len(tensor):
        raise InvalidRequest(f"{name} has no rows; at least 1 (number 0 is reserved)")
    if not tensor[:1].is_contiguous():
        raise InvalidRequest(f"{name} has holes within a row: strides {tensor.stride()}")
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _count(pool: str, layers: list[list[Tensor]]) -> int:
    counts = {len(part) for parts in layers for part in parts}
    if len(counts) > 1:
        raise InvalidRequest(f"tensors of {pool} differ in their first size: {sorted(counts)}")
    return counts.pop() if counts else 0


@dataclass(frozen=True, slots=True, repr=False)
class DevicePools:
    """The device tier. Page 0 and slot 0 are never granted: padded rows may write there.

    `kv[layer].k` and `.v` are [pages, page_size, heads, dim], with as many pages as the component
    that keeps the layer has (`span_rows` for all but `kv`); `states[layer][name]` is
    [slots, *shape]. Layers that keep no KV (no state) are not in `kv` (`states`). Both are views
    of the rows of `kv_rows` and `state_rows`, which copies work on.
    """

    page_size: int
    kv: Mapping[int, LayerKV]
    states: Mapping[int, Mapping[str, Tensor]]
    kv_rows: RowPool
    state_rows: RowPool
    device: torch.device
    frame: FrameShape | None = None
    """How pages and slots share one memory; None when each has its own."""
    span_rows: Mapping[str, RowPool] = field(default_factory=dict[str, RowPool])
    """The rows of each component but `kv` that keeps KV, by its name."""

    @classmethod
    def allocate(
        cls,
        layout: Layered,
        *,
        pages: int,
        states: int,
        page_size: int,
        device: str | torch.device = "cpu",
        spans: Mapping[str, int] | None = None,
    ) -> DevicePools:
        """Zeroed pools of `pages` pages and `states` slots, the reserved ones included.

        `spans`: pages of each other component that keeps layers. Raises InvalidRequest for sizes
        below one, and where they are missing. What no layer keeps takes no bytes.
        """
        _check_sizes(layout.layers, pages, states, page_size, spans)
        where = torch.device(device)
        return cls._filled(
            *(layout, page_size, where, (pages, states)),
            *(_new_rows(pages, where), _new_rows(states, where)),
            spans=spans or {},
        )

    @classmethod
    def share(
        cls,
        layout: Layered,
        *,
        nbytes: int,
        page_size: int,
        device: str | torch.device = "cpu",
    ) -> DevicePools:
        """Zeroed pools of one memory of at most `nbytes` bytes, for pages and states together.

        The memory is cut into frames, each of which holds one state or some pages; who uses which
        as what is the caller's to know. The first frame has no state and the second no pages, so
        that place 0 of one pool never lies under data of the other. Raises InvalidRequest unless
        the layout has both KV and states, or when there is no room for one more frame than two.
        """
        layers = layout.layers
        page_bytes = sum(layer.page_bytes(page_size) for layer in layers)
        slot_bytes = sum(layer.slot_bytes for layer in layers)
        if any(layer.kv is not None and layer.kv.component != "kv" for layer in layers):
            raise InvalidRequest("only KV of full attention and states can share a memory")
        if not page_bytes or not slot_bytes:
            raise InvalidRequest("only KV and states can share a memory; one of them is missing")
        shape = FrameShape.of(page_bytes, slot_bytes)
        frames = nbytes // shape.nbytes
        if frames < 3:
            raise InvalidRequest(
                f"{nbytes} bytes are {frames} frames of {shape.nbytes} bytes; 3 are needed: one "
                "for page 0, one for slot 0, and one to use"
            )
        _check_sizes(layers, frames * shape.pages, frames - 1, page_size)
        where = torch.device(device)
        with torch.inference_mode(False):
            memory = torch.zeros(frames * shape.nbytes, dtype=torch.uint8, device=where)
        counts = (frames * shape.pages, frames - 1)
        return cls._filled(
            *(layout, page_size, where, counts),
            _rows_within(memory, 0, counts[0], shape.page_bytes),
            _rows_within(memory, shape.nbytes, counts[1], shape.slot_bytes),
            frame=shape,
        )

    @classmethod
    def _filled(
        cls,
        layout: Layered,
        page_size: int,
        device: torch.device,
        counts: tuple[int, int],
        kv_rows: Rows,
        state_rows: Rows,
        frame: FrameShape | None = None,
        spans: Mapping[str, int] = {},
    ) -> DevicePools:
        kv: dict[int, LayerKV] = {}
        by_name: dict[int, dict[str, Tensor]] = {}
        kv_parts: list[list[Tensor]] = []
        state_parts: list[list[Tensor]] = []
        span_rows = {name: _new_rows(count, device) for name, count in spans.items()}
        span_parts: dict[str, list[list[Tensor]]] = {name: [] for name in spans}
        # Outside inference mode, whoever calls: an inference tensor could not be written later.
        with torch.inference_mode(False):
            for number, layer in enumerate(layout.layers):
                kv_parts.append([])
                state_parts.append([])
                for parts in span_parts.values():
                    parts.append([])
                if layer.kv is not None:
                    component = layer.kv.component
                    source = kv_rows if component == "kv" else span_rows[component]
                    parts = kv_parts if component == "kv" else span_parts[component]
                    kv[number], rows = _kv_layer(layer.kv, page_size, source)
                    parts[-1].append(rows)
                for spec in layer.states:
                    tensor, rows = _state(spec, state_rows)
                    by_name.setdefault(number, {})[spec.name] = tensor
                    state_parts[-1].append(rows)
        pages, states = counts
        return cls(
            page_size=page_size,
            kv=kv,
            states=by_name,
            kv_rows=RowPool("device kv", "device", pages, kv_parts),
            state_rows=RowPool("device states", "device", states, state_parts),
            device=device,
            frame=frame,
            span_rows={
                name: RowPool(f"device {name}", "device", spans[name], parts)
                for name, parts in span_parts.items()
            },
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
                    wanted[key] = _Wanted(
                        layer.kv.component, number, layer.kv.dtype, (page_size, *shape)
                    )
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
        spans = sorted({want.pool for want in wanted.values()} - {"kv", "states"})
        parts: dict[str, list[list[Tensor]]] = {
            pool: [[] for _ in layout.layers] for pool in ("kv", "states", *spans)
        }
        for name, want in wanted.items():
            parts[want.pool][want.layer].append(_adopted_rows(name, given[name], want))
        devices = {str(tensor.device) for tensor in given.values()}
        if len(devices) != 1:
            raise InvalidRequest(f"one device is needed, not {sorted(devices)}")
        counts = {pool: _count(pool, layers) for pool, layers in parts.items()}
        sizes = {name: counts[name] for name in spans}
        _check_sizes(layout.layers, counts["kv"], counts["states"], page_size, sizes)
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
            span_rows={
                name: RowPool(f"device {name}", "device", counts[name], parts[name])
                for name in spans
            },
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
        if self.frame is not None:
            return self.pages // self.frame.pages * self.frame.nbytes
        spans = sum(rows.count * rows.row_bytes for rows in self.span_rows.values())
        return self.pages * self.page_bytes + self.slots * self.slot_bytes + spans

    def __repr__(self) -> str:
        spans = "".join(f", {rows.count} pages of {n}" for n, rows in self.span_rows.items())
        return (
            f"DevicePools({self.pages} pages of {self.page_size} tokens, {self.slots} slots{spans}"
            f", {self.nbytes} bytes on {self.device})"
        )


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


def _check_sizes(
    layers: Sequence[LayerSpec],
    pages: int,
    states: int,
    page_size: int,
    spans: Mapping[str, int] | None = None,
) -> None:
    if page_size < 1:
        raise InvalidRequest(f"page_size is {page_size}; at least 1")
    kept = {layer.kv.component for layer in layers if layer.kv is not None}
    has_kv = "kv" in kept
    for name in sorted(kept - {"kv"}):
        if (spans or {}).get(name, 0) < 1:
            raise InvalidRequest(f"no pages for {name}; at least 1 (number 0 is reserved)")
    has_states = any(layer.states for layer in layers)
    if not kept and not has_states:
        raise InvalidRequest("no layer keeps anything")
    for what, has, count in (("pages", has_kv, pages), ("states", has_states, states)):
        if count < (1 if has else 0):
            raise InvalidRequest(f"{what} is {count}; at least 1 (number 0 is reserved)")
