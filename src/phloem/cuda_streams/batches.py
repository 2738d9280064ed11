"""What an engine is asked to do: frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.rows import RowPool, Tier
from phloem.errors import InvalidRequest

if TYPE_CHECKING:
    from phloem.cuda_streams.engine import Ticket

__all__ = ["CHANNELS", "Channel", "Clear", "Copy", "CopyBatch", "CopyItem", "Run", "Starts"]

Channel = Literal["d2h", "h2d", "d2d"]
CHANNELS: tuple[Channel, ...] = ("d2h", "h2d", "d2d")
_ENDS: dict[Channel, tuple[Tier, Tier]] = {
    "d2h": ("device", "host"),
    "h2d": ("host", "device"),
    "d2d": ("device", "device"),
}


class Run(NamedTuple):
    """`length` neighbouring rows that go to neighbouring rows."""

    source: int
    target: int
    length: int


class Starts(NamedTuple):
    """Where stretches of neighbouring rows begin, as positions in the ids, ascending.

    In the source, in the target, and in both at once.
    """

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    both: npt.NDArray[np.int64]


def _begins(breaks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


def _ids(what: str, ids: Sequence[int], pool: RowPool) -> tuple[int, ...]:
    plain: tuple[int, ...]
    if len(ids) == 1 and type(ids[0]) is int:  # the copy of one state, made for each request
        plain, low, high = (ids[0],), ids[0], ids[0]
    else:
        array = np.asarray(ids)
        if array.size == 0:
            return ()
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidRequest(f"{what} must be a flat run of integers, not {array.dtype}")
        plain, low, high = tuple(array.tolist()), int(array.min()), int(array.max())
    if low < 0 or high >= pool.count:
        worst = low if low < 0 else high
        raise InvalidRequest(f"{what}: {worst} is not a row of {pool.name} (0..{pool.count - 1})")
    return plain


def _distinct(what: str, ids: tuple[int, ...]) -> None:
    if len(ids) > 1 and len(set(ids)) != len(ids):
        twice = next(row for index, row in enumerate(ids) if row in ids[:index])
        raise InvalidRequest(f"{what}: {twice} is named twice")


@dataclass(frozen=True)
class Copy:
    """Row `source_ids[i]` of `source` to row `target_ids[i]` of `target`, in all layers.

    The rows are pages of two KV pools or slots of two state pools; both pools may be the same
    (copy on write). Raises InvalidRequest when ids are out of range, targets repeat, a row is
    source and target at once, or the pools' rows differ in layout.
    """

    source: RowPool
    target: RowPool
    source_ids: Sequence[int]
    target_ids: Sequence[int]

    def __post_init__(self) -> None:
        source_ids = _ids("source_ids", self.source_ids, self.source)
        target_ids = _ids("target_ids", self.target_ids, self.target)
        if len(source_ids) != len(target_ids):
            raise InvalidRequest(f"{len(source_ids)} source_ids, but {len(target_ids)} target_ids")
        _distinct("target_ids", target_ids)
        if self.source.part_bytes != self.target.part_bytes:
            raise InvalidRequest(f"{self.source!r} and {self.target!r} differ in layout")
        both_coded = self.source.is_coded and self.target.is_coded
        if both_coded and self.source.codecs != self.target.codecs:
            raise InvalidRequest(f"{self.source!r} and {self.target!r} are coded differently")
        object.__setattr__(self, "source_ids", source_ids)
        object.__setattr__(self, "target_ids", target_ids)

    # Kept on the value itself: a side table by id() would meet recycled ids.
    @cached_property
    def starts(self) -> Starts:
        """Where stretches of neighbouring rows begin."""
        count = len(self.source_ids)
        if count < 2:
            one = np.arange(count)
            return Starts(one, one, one)
        source = np.diff(np.asarray(self.source_ids, np.int64)) != 1
        target = np.diff(np.asarray(self.target_ids, np.int64)) != 1
        return Starts(*(_begins(breaks) for breaks in (source, target, source | target)))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The same pairs as the fewest runs, in the order given."""
        starts = self.starts.both.tolist()
        return tuple(
            Run(self.source_ids[at], self.target_ids[at], end - at)
            for at, end in pairwise([*starts, len(self.source_ids)])
        )

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """(source, target) ids as int64 tensors in CPU memory."""
        return (
            torch.tensor(self.source_ids, dtype=torch.int64),
            torch.tensor(self.target_ids, dtype=torch.int64),
        )

    @property
    def nbytes(self) -> int:
        return len(self.target_ids) * self.target.row_bytes


@dataclass(frozen=True)
class Clear:
    """Zero the rows `target_ids` of `target` in all layers (the state of an empty prefix).

    Raises InvalidRequest when ids are out of range or repeat.
    """

    target: RowPool
    target_ids: Sequence[int]

    def __post_init__(self) -> None:
        target_ids = _ids("target_ids", self.target_ids, self.target)
        _distinct("target_ids", target_ids)
        object.__setattr__(self, "target_ids", target_ids)

    @cached_property
    def index(self) -> Tensor:
        """The ids as an int64 tensor in CPU memory."""
        return torch.tensor(self.target_ids, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return len(self.target_ids) * self.target.row_bytes


CopyItem = Copy | Clear


@dataclass(frozen=True)
class CopyBatch:
    """Items that succeed or fail together.

    `after` orders: the batch starts when these have ended, however they ended. `requires` also
    needs their data: if one of them failed the batch fails untouched. Nothing else is ordered,
    not even two batches of one channel. Among those that could start, lower `priority` goes first.
    `by_layer`: layer after layer in the model's order, each announced as it lands.

    Raises InvalidRequest when an item's pools do not belong to the channel, when two items have
    the same target row, or when a row is source and target at once.
    """

    channel: Channel
    items: tuple[CopyItem, ...]
    after: tuple[Fence | Ticket, ...] = ()
    requires: tuple[Ticket, ...] = ()
    by_layer: bool = False
    priority: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        if self.channel not in _ENDS:
            raise InvalidRequest(f"no channel is called {self.channel!r}; there are {CHANNELS}")
        if not self.items:
            raise InvalidRequest("a batch needs at least one item")
        layers = {item.target.layers for item in self.items}
        if len(layers) > 1:
            raise InvalidRequest(f"pools of different models: {sorted(layers)} layers")
        self._check_ends()
        self._check_overlap()

    def _check_ends(self) -> None:
        source_tier, target_tier = _ENDS[self.channel]
        for item in self.items:
            source_ok = isinstance(item, Clear) or item.source.tier == source_tier
            if not source_ok or item.target.tier != target_tier:
                raise InvalidRequest(f"{item} is not {source_tier} to {target_tier}")

    def _check_overlap(self) -> None:
        # By position of the pool in the batch: pools have no order, and id() is not for decisions.
        pools: list[RowPool] = []
        targets: list[set[int]] = []
        for item in self.items:
            if item.target not in pools:
                pools.append(item.target)
                targets.append(set())
            rows = targets[pools.index(item.target)]
            if not rows.isdisjoint(item.target_ids):
                twice = min(rows.intersection(item.target_ids))
                raise InvalidRequest(f"row {twice} of {item.target.name} is a target twice")
            rows.update(item.target_ids)
        for item in self.items:
            if isinstance(item, Copy) and item.source in pools:
                rows = targets[pools.index(item.source)]
                if not rows.isdisjoint(item.source_ids):
                    both = min(rows.intersection(item.source_ids))
                    raise InvalidRequest(f"row {both} of {item.source.name} is source and target")

    @property
    def nbytes(self) -> int:
        """Bytes that the batch writes."""
        return sum(item.nbytes for item in self.items)

    @property
    def layers(self) -> int:
        """The number of model layers, those that keep nothing included."""
        return self.items[0].target.layers
