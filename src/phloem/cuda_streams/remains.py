"""The rest of a copy that is still carried out once a part of it has failed."""

from __future__ import annotations

from phloem.cuda_streams.batches import Copy, CopyBatch, CopyItem
from phloem.errors import CopyCancelled, CopyFailed

__all__ = ["Remains"]


class Remains:
    """All items of a batch; after a failure that spares some, the leading rows of the first.

    A layer lands for all rows at once, so whoever stops at a failure has no row in all layers. An
    engine goes on with the rows that a failure spares (`CopyFailed.rows_ok`) instead: the batch
    fails all the same, at its end, and what its error says of good rows is true then.
    """

    def __init__(self, batch: CopyBatch) -> None:
        self.items: tuple[CopyItem, ...] = batch.items
        self.error: CopyFailed | None = None
        """What the batch fails with at its end."""

    def cut(self, error: BaseException) -> bool:
        """Keep what a failure spares; False if that is nothing, and the batch ends with it."""
        if not isinstance(error, CopyFailed) or isinstance(error, CopyCancelled):
            return False
        first = self.items[0]
        rows = min(error.rows_ok, len(first.target_ids)) if isinstance(first, Copy) else 0
        error.rows_ok = rows
        if not rows or not isinstance(first, Copy):
            return False
        ids = first.source_ids[:rows], first.target_ids[:rows]
        self.items = (Copy(first.source, first.target, *ids),)
        self.error = error
        return True
