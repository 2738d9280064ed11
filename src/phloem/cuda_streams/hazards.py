"""Finds memory that was used while a copy was using it. For tests and simulations.

When a copy starts, the checker remembers its source rows and fills its target rows with POISON.
When a layer lands, the source must be as it was (else somebody wrote what was being read) and the
target must still be poison (else somebody wrote where the copy was about to write). Whoever reads a
target before it has landed reads POISON: a NaN in bfloat16, float16 and float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from phloem.cuda_streams.batches import Copy
from phloem.cuda_streams.engine import Ticket

__all__ = ["POISON", "Hazard", "HazardChecker"]

POISON = (0xC0, 0x7F)  # in this order, over and over


@dataclass(frozen=True, slots=True)
class Hazard:
    """A row that somebody else wrote while a copy was using it."""

    kind: Literal["source changed", "target touched"]
    ticket: int
    label: str
    layer: int
    pool: str
    row: int


@lru_cache(maxsize=64)
def _poison(size: int) -> Tensor:
    return torch.tensor(POISON, dtype=torch.uint8).repeat(-(-size // 2))[:size]


class HazardChecker:
    """Watches the running tickets of one engine; what it found is in `found`, in order.

    `tell` hears of each at once.
    """

    def __init__(self, tell: Callable[[Hazard], None] | None = None) -> None:
        self.found: list[Hazard] = []
        self._tell = tell
        # By ticket, layer, item, part: the source rows when the ticket started.
        self._sources: dict[int, dict[tuple[int, int, int], Tensor]] = {}

    def begin(self, ticket: Ticket) -> None:
        """The ticket starts now."""
        sources: dict[tuple[int, int, int], Tensor] = {}
        for layer in range(ticket.batch.layers):
            for number, item in enumerate(ticket.batch.items):
                if isinstance(item, Copy):
                    for part, rows in enumerate(item.source.parts(layer)):
                        sources[layer, number, part] = rows[list(item.source_ids)]
        self._sources[ticket.seq] = sources
        for layer in range(ticket.batch.layers):
            for item in ticket.batch.items:
                for rows in item.target.parts(layer):
                    rows[list(item.target_ids)] = _poison(rows.shape[1])

    def landing(self, ticket: Ticket, layer: int) -> None:
        """One layer of the ticket is about to be written."""
        sources = self._sources[ticket.seq]
        for number, item in enumerate(ticket.batch.items):
            if isinstance(item, Copy):
                for part, rows in enumerate(item.source.parts(layer)):
                    same = rows[list(item.source_ids)] == sources[layer, number, part]
                    where = (item.source.name, tuple(item.source_ids))
                    self._report("source changed", ticket, layer, where, same)
            for rows in item.target.parts(layer):
                same = rows[list(item.target_ids)] == _poison(rows.shape[1])
                where = (item.target.name, tuple(item.target_ids))
                self._report("target touched", ticket, layer, where, same)

    def end(self, ticket: Ticket) -> None:
        """The ticket is over, whatever its outcome."""
        self._sources.pop(ticket.seq, None)

    def _report(
        self,
        kind: Literal["source changed", "target touched"],
        ticket: Ticket,
        layer: int,
        where: tuple[str, tuple[int, ...]],
        same: Tensor,
    ) -> None:
        pool, ids = where
        if bool(same.all()):
            return
        for number, row in enumerate(ids):
            if not bool(same[number].all()):
                hazard = Hazard(kind, ticket.seq, ticket.batch.label, layer, pool, row)
                self.found.append(hazard)
                if self._tell is not None:
                    self._tell(hazard)
