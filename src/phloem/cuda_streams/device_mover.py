"""How the rows of a copy go onto a device's stream.

Across the link a copy goes *direct*, each part of each row as a piece of one batched call, or
*staged*: rows are gathered on the device into a buffer laid out like the host's rows, and cross as
whole rows. Direct reaches the link's rate only for large parts, but lets layers land one by one.
Pools with coded parts go part by part, coded and decoded on the device.
The buffer is used by one stream only, so the stream's own order protects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from phloem.cuda_streams.batches import Clear, Copy, CopyItem
from phloem.cuda_streams.driver import Addresses, Driver
from phloem.cuda_streams.rows import RowPool

__all__ = ["DeviceMover"]

# Below this a device's copy engine is far from the rate of the link; measured on PCIe 5.
_DIRECT_BYTES = 28 << 10


class DeviceMover:
    """Puts copies onto one stream. `whole(item)` all layers; `layer(item, k)` just one."""

    def __init__(self, driver: Driver, stream: object, stage_bytes: int) -> None:
        self._driver = driver
        self._stream = stream
        self._stage = driver.empty(stream, stage_bytes)

    def can_layer(self, item: CopyItem) -> bool:
        """Whether layers of this item can land one by one."""
        if isinstance(item, Clear) or _on_device(item):
            return True
        coded = item.source.is_coded or item.target.is_coded
        return coded or self._driver.batch_copy is not None

    def whole(self, item: CopyItem) -> None:
        """Enqueue all layers of an item, the fastest way."""
        if not item.target_ids:
            return
        if isinstance(item, Copy) and not _on_device(item) and not self._is_direct(item):
            self._staged(item)
            return
        for layer in range(item.target.layers):
            self.layer(item, layer)

    def layer(self, item: CopyItem, layer: int) -> None:
        """Enqueue one layer of an item."""
        if not item.target_ids or not item.target.parts(layer):
            return
        if isinstance(item, Clear):
            self._put(partial(_clear, item, layer, self._driver.device))
        elif _on_device(item):
            self._put(partial(_move, item, layer, self._driver.device))
        elif item.source.is_coded or item.target.is_coded:
            self._put(partial(_coded, item, layer, self._driver.device))
        elif (batch_copy := self._driver.batch_copy) is not None:
            batch_copy(self._stream, *_pieces(item, layer))
        else:
            self._put(partial(_row_by_row, item, layer))

    def _put(self, fn: Callable[[], None]) -> None:
        self._driver.enqueue(self._stream, fn)

    def _is_direct(self, item: Copy) -> bool:
        host = item.target if item.target.tier == "host" else item.source
        if host.whole is None or host.is_coded or host.whole.shape[1] > len(self._stage):
            return True
        parts = sum(map(len, item.target.part_bytes))
        big = item.target.row_bytes >= parts * _DIRECT_BYTES
        return big and self._driver.batch_copy is not None

    def _staged(self, item: Copy) -> None:
        host = item.target if item.target.tier == "host" else item.source
        assert host.whole is not None, "only page-first pools are staged"
        step = len(self._stage) // host.whole.shape[1]
        for start in range(0, len(item.target_ids), step):
            chunk = slice(start, min(start + step, len(item.target_ids)))
            self._put(partial(self._stage_chunk, item, host, host.whole, chunk))

    def _stage_chunk(self, item: Copy, host: RowPool, whole: Tensor, chunk: slice) -> None:
        down = host is item.target
        count = chunk.stop - chunk.start
        stage = self._stage[: count * whole.shape[1]].view(count, whole.shape[1])
        host_ids = (item.target_ids if down else item.source_ids)[chunk]
        device_ids = item.index[0 if down else 1][chunk]
        index = device_ids.to(self._driver.device, non_blocking=True)
        if not down:
            for at, row, length in _runs(host_ids, host.piece_rows):
                stage[at : at + length].copy_(whole[row : row + length], non_blocking=True)
        for layer in range(host.layers):
            pairs = item.target.pairs(layer, item.source)
            for (target, source, _), part in zip(pairs, host.parts(layer), strict=True):
                # The same place in a row of the buffer as in a row of the host's memory.
                offset = part.storage_offset() - whole.storage_offset()
                held = stage[:, offset : offset + part.shape[1]].view(target.dtype)
                if down:
                    held.copy_(source.index_select(0, index))
                else:
                    target.index_copy_(0, index, held)
        if down:
            for at, row, length in _runs(host_ids, host.piece_rows):
                whole[row : row + length].copy_(stage[at : at + length], non_blocking=True)


def _on_device(item: Copy) -> bool:
    return item.source.tier == item.target.tier == "device"


def _clear(item: Clear, layer: int, device: torch.device) -> None:
    index = item.index.to(device, non_blocking=True)
    for part in item.target.parts(layer):
        part.index_fill_(0, index, 0)


def _move(item: Copy, layer: int, device: torch.device) -> None:
    source_index, target_index = (index.to(device, non_blocking=True) for index in item.index)
    for target, source, _ in item.target.pairs(layer, item.source):
        target.index_copy_(0, target_index, source.index_select(0, source_index))


def _row_by_row(item: Copy, layer: int) -> None:
    for target, source, _ in item.target.pairs(layer, item.source):
        for target_id, source_id in zip(item.target_ids, item.source_ids, strict=True):
            target[target_id].copy_(source[source_id], non_blocking=True)


def _coded(item: Copy, layer: int, device: torch.device) -> None:
    down = item.target.tier == "host"
    # Temporaries are allocated on the stream that uses them, so its order protects them.
    index = item.index[0 if down else 1].to(device, non_blocking=True)
    for target, source, convert in item.target.pairs(layer, item.source):
        if down:
            rows = source.index_select(0, index)
            rows = rows if convert is None else convert(rows)
            for number, target_id in enumerate(item.target_ids):
                target[target_id].copy_(rows[number], non_blocking=True)
        else:
            shape = (len(item.source_ids), source.shape[1])
            rows = torch.empty(shape, dtype=source.dtype, device=device)
            for number, source_id in enumerate(item.source_ids):
                rows[number].copy_(source[source_id], non_blocking=True)
            target.index_copy_(0, index, rows if convert is None else convert(rows))


def _pieces(item: Copy, layer: int) -> tuple[Addresses, Addresses, Addresses]:
    """(target addresses, source addresses, sizes) of all parts of a layer's rows."""
    columns: list[list[Addresses]] = [[], [], []]
    for target, source, _ in item.target.pairs(layer, item.source):
        size = target.shape[1] * target.element_size()
        for column, rows, ids in (
            (columns[0], target, item.target_ids),
            (columns[1], source, item.source_ids),
        ):
            stride = rows.stride(0) * rows.element_size()
            column.append(rows.data_ptr() + np.asarray(ids, np.uint64) * np.uint64(stride))
        columns[2].append(np.full(len(item.target_ids), size, np.uint64))
    targets, sources, sizes = (np.concatenate(column) for column in columns)
    return targets, sources, sizes


def _runs(ids: Sequence[int], piece_rows: int) -> list[tuple[int, int, int]]:
    """(position, first id, length) of the runs of neighbouring ids within pieces, in order."""
    array = np.asarray(ids, np.int64)
    breaks = (np.diff(array) != 1) | (array[1:] % piece_rows == 0)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.concatenate((starts, [len(array)])))
    return list(zip(starts.tolist(), array[starts].tolist(), lengths.tolist(), strict=True))
