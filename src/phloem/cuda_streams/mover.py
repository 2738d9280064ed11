"""Moving rows between pools in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.cuda_streams.batches import Clear, Copy, CopyItem

__all__ = ["RowMover"]


class RowMover:
    """Copies rows between pools with few calls of about `call_bytes`, each without the GIL.

    By what holds the GIL least, and then by passes over memory:

    - No more than `few_runs` runs go as they are, many to a call, also of several layers.
    - No more than `few_runs` stretches of neighbouring targets are gathered, or of neighbouring
      sources scattered (for this rows have to be of `run_bytes`, or it is slow), by one call each.
    - Runs of `run_bytes` or more on average go as they are.
    - Other rows are gathered into a buffer of `stage_bytes` and scattered from there.

    Between calls the GIL is held to make views, at most two for each `run_bytes`: some 20 µs. Calls
    are short, some 0.1 ms, so that the loop is never kept from a core for long: with calls of 4 MiB
    its lag is several times as large. One mover a thread.
    """

    def __init__(
        self,
        *,
        stage_bytes: int = 512 << 10,
        run_bytes: int = 32 << 10,
        call_bytes: int = 512 << 10,
        few_runs: int = 8,
    ) -> None:
        self.run_bytes = run_bytes
        self.call_bytes = call_bytes
        self.few_runs = few_runs
        # int64: its storage begins at an 8-byte boundary, so it can be seen in any word.
        self._stage = torch.empty(max(stage_bytes, run_bytes) // 8, dtype=torch.int64)
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._waiting_bytes = 0

    def add(self, item: CopyItem, layer: int) -> None:
        """Carry out one layer of an item, now or at the latest with `flush`."""
        if not item.target_ids:
            return
        if isinstance(item, Clear):
            for part in item.target.words(layer):
                self._zeros += [part[row : row + 1] for row in item.target_ids]
            return
        for target, source, convert in item.target.pairs(layer, item.source):
            if convert is not None:
                source_index, target_index = item.index
                target.index_copy_(0, target_index, convert(source.index_select(0, source_index)))
                continue
            row_bytes = target.shape[1] * target.element_size()
            starts, few = item.starts, self.few_runs
            if len(starts.both) <= few:
                self._in_runs(item, source, target, row_bytes)
            elif len(starts.target) <= few:
                self._gathered(item, source, target, row_bytes)
            elif row_bytes >= self.run_bytes and len(starts.source) <= few:
                self._scattered(item, source, target, row_bytes)
            elif len(item.target_ids) * row_bytes >= len(starts.both) * self.run_bytes:
                self._in_runs(item, source, target, row_bytes)
            else:
                self._staged(item, source, target, row_bytes)

    def flush(self) -> None:
        """Carry out what is still waiting."""
        targets, sources, zeros = self._targets, self._sources, self._zeros
        self.drop()
        # The only spellings of "do this to all of these in one call" have an underscore.
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        if zeros:
            torch._foreach_zero_(zeros)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def drop(self) -> None:
        """Forget what is still waiting: its copy has been given up."""
        self._targets, self._sources, self._zeros = [], [], []
        self._waiting_bytes = 0

    def _in_runs(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        for run in item.runs:
            self._targets.append(target[run.target : run.target + run.length])
            self._sources.append(source[run.source : run.source + run.length])
            self._waiting_bytes += run.length * row_bytes
            if self._waiting_bytes >= self.call_bytes:
                self.flush()

    def _gathered(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        source_index, _ = item.index
        for at, end in self._chunks(item.starts.target, len(item.target_ids), row_bytes):
            row = item.target_ids[at]
            out = target[row : row + end - at]
            torch.index_select(source, 0, source_index[at:end], out=out)

    def _scattered(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        _, target_index = item.index
        for at, end in self._chunks(item.starts.source, len(item.source_ids), row_bytes):
            row = item.source_ids[at]
            target.index_copy_(0, target_index[at:end], source[row : row + end - at])

    def _chunks(
        self, starts: npt.NDArray[np.int64], count: int, row_bytes: int
    ) -> Iterator[tuple[int, int]]:
        """The stretches that begin at `starts`, cut into pieces of at most `call_bytes`."""
        step = max(1, self.call_bytes // row_bytes)
        for begin, over in pairwise([*starts.tolist(), count]):
            for at in range(begin, over, step):
                yield at, min(at + step, over)

    def _staged(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        stage = self._stage.view(target.dtype)
        source_index, target_index = item.index
        step = stage.numel() * stage.element_size() // row_bytes
        assert step > 0, "a row longer than a run goes in runs"
        for start in range(0, len(item.target_ids), step):
            chunk = slice(start, start + step)
            rows = source_index[chunk]
            held = stage[: len(rows) * target.shape[1]].view(len(rows), target.shape[1])
            torch.index_select(source, 0, rows, out=held)
            target.index_copy_(0, target_index[chunk], held)
