"""What passes between the head of a model that runs on several ranks, and the ranks: plain values.

Ids of pages and slots mean the same on every rank; copies are named by their ticket's number at the
head, forward passes by a number of their own. So an order can go through any wire that keeps what
it carries in order, and come out of it on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from phloem.cuda_streams.batches import Channel

__all__ = [
    "Answer", "Cancel", "Close", "CopyLanded", "Ended", "Finished", "Hasten", "Item", "Mark",
    "Order", "Pass", "PassOver", "Progress", "Submit",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CopyLanded:
    """The instant, on each rank by itself, at which layers 0..`layer` of a copy have landed there.

    For the last layer it is the copy's end, whatever its outcome.
    """

    copy: int
    layer: int


@dataclass(frozen=True, slots=True)
class PassOver:
    """The instant, on each rank by itself, at which a forward pass has ended there."""

    step: int


Mark: TypeAlias = CopyLanded | PassOver


@dataclass(frozen=True, slots=True)
class Item:
    """Rows of a pool to copy to rows of another, or, without a source, to clear.

    In all model layers, or in one of them.
    """

    target: str
    target_ids: tuple[int, ...]
    source: str | None = None
    source_ids: tuple[int, ...] = ()
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """Carry out a copy. `number` counts the orders, from 1, without a gap.

    Of copies before `oldest_copy` and passes before `oldest_step` the head will not speak again.
    """

    number: int
    copy: int
    channel: Channel
    items: tuple[Item, ...]
    after: tuple[Mark, ...]
    requires: tuple[int, ...]
    by_layer: bool
    priority: int
    label: str
    oldest_copy: int
    oldest_step: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A copy is not wanted any more: end it early if that is possible."""

    number: int
    copy: int


@dataclass(frozen=True, slots=True)
class Hasten:
    """Somebody waits for a copy now: those of a positive priority come after it."""

    number: int
    copy: int


@dataclass(frozen=True, slots=True)
class Close:
    """No order will follow."""

    number: int


Order: TypeAlias = Submit | Cancel | Hasten | Close


@dataclass(frozen=True, slots=True)
class Pass:
    """What the head says of a forward pass; it goes with the batch, by whichever way that goes.

    A rank launches it when the first `orders` orders have been submitted there, and lets it wait
    for `waits`.
    """

    step: int
    orders: int
    waits: tuple[Mark, ...]
    oldest_copy: int
    oldest_step: int


@dataclass(frozen=True, slots=True)
class Progress:
    """So many leading model layers of a copy have landed on a rank."""

    rank: int
    copy: int
    layers: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A copy will not touch memory on a rank again. `dead`: nor will any other, ever.

    `rows_ok`: so many leading rows of the first item are good in all layers although it failed.
    """

    rank: int
    copy: int
    outcome: Literal["done", "failed", "cancelled", "dead"]
    why: str = ""
    rows_ok: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A forward pass, and so every earlier one of its stream, is over on a rank."""

    rank: int
    step: int


Answer: TypeAlias = Progress | Ended | Finished
