"""Moving rows between pools in CPU memory."""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.cuda_streams.batches import Clear, Copy, CopyItem

__all__ = ["RowMover"]


class RowMover:
    """Copies rows between pools with few calls of about `call_bytes`, each without the GIL.

    Runs of `run_bytes` or more on average go in one pass over memory, many to a call. Shorter ones
    are gathered into a buffer of `stage_bytes` and scattered from there. (Many calls much shorter
    than the interpreter's switch interval collapse when the loop is busy.) One mover a thread.
    """

    def __init__(
        self, *, stage_bytes: int = 8 << 20, run_bytes: int = 32 << 10, call_bytes: int = 4 << 20
    ) -> None:
        self.run_bytes = run_bytes
        self.call_bytes = call_bytes
        # int64: its storage begins at an 8-byte boundary, so it can be seen in any word.
        self._stage = torch.empty(max(stage_bytes, run_bytes) // 8, dtype=torch.int64)

    def apply(self, item: CopyItem, layer: int) -> None:
        """Carry out one layer of an item."""
        if not item.target_ids:
            return
        if isinstance(item, Clear):
            for part in item.target.parts(layer):
                part.index_fill_(0, item.index, 0)
            return
        for target, source, convert in item.target.pairs(layer, item.source):
            if convert is not None:
                source_index, target_index = item.index
                target.index_copy_(0, target_index, convert(source.index_select(0, source_index)))
                continue
            row_bytes = target.shape[1] * target.element_size()
            if len(item.target_ids) * row_bytes >= len(item.runs) * self.run_bytes:
                self._in_runs(item, source, target, row_bytes)
            else:
                self._staged(item, source, target, row_bytes)

    def _in_runs(self, item: Copy, source: Tensor, target: Tensor, row_bytes: int) -> None:
        group_to: list[Tensor] = []
        group_from: list[Tensor] = []
        size = 0
        for run in item.runs:
            group_to.append(target[run.target : run.target + run.length])
            group_from.append(source[run.source : run.source + run.length])
            size += run.length * row_bytes
            if size >= self.call_bytes:
                _copy_all(group_to, group_from)
                group_to, group_from, size = [], [], 0
        if group_to:
            _copy_all(group_to, group_from)

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


def _copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    # The only public spelling of "copy these to those in one call" has an underscore.
    torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
