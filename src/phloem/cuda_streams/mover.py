"""Moving rows between pools in CPU memory."""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.cuda_streams.batches import Clear, Copy, CopyItem

__all__ = ["RowMover"]


class RowMover:
    """Copies rows between pools with few calls of about `call_bytes`, each without the GIL.

    Runs of `run_bytes` or more on average, or no more than `few_runs`, go in one pass over memory,
    many to a call, also of several layers. Others are gathered into a buffer of `stage_bytes` and
    scattered from there. (Many calls much shorter than the interpreter's switch interval collapse
    when the loop is busy.) One mover a thread.
    """

    def __init__(
        self,
        *,
        stage_bytes: int = 8 << 20,
        run_bytes: int = 32 << 10,
        call_bytes: int = 4 << 20,
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
            runs = len(item.runs)
            long = len(item.target_ids) * row_bytes >= runs * self.run_bytes
            if long or runs <= self.few_runs:
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
