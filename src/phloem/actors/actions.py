"""The catalogue of deferred actions.

An action is a frozen value that a turn emits for another actor, complete in itself: whoever
carries it out never looks at the tree. Only actions addressed to the tree name a node, by id and
generation; a node that is gone makes them a no-op. Actions are carried out in the order in which
they were emitted, before the caller of the turn resumes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

__all__ = [
    "TREE",
    "Action",
    "BackupToHost",
    "ClearState",
    "Component",
    "CopyPages",
    "CopyState",
    "EvictExcessPathStates",
    "FreeDeviceSlots",
    "FreeHostSlots",
    "Ids",
    "LoadToDevice",
    "Places",
    "Reserve",
    "Tier",
]

Component: TypeAlias = str  # the name of one; see `phloem.actors.tree.components`
Tier: TypeAlias = Literal["device", "host"]
if TYPE_CHECKING:
    Ids: TypeAlias = array[int]  # int32 page or slot ids; never written to once handed over
else:
    Ids = array  # with no subscript before Python 3.12; `help` of what has ids evaluates it

TREE = -1  # the owner of what the tree holds; grants and operations own by positive numbers


class FreeDeviceSlots(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the device allocator: `ids` go back to their pool, taken from `owner`.

    They are free once every fence that still touches them has passed.
    """

    component: Component
    ids: Ids
    owner: int


class EvictExcessPathStates(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the tree, as its next turn: drop the shallow states of a path beyond the cap."""

    node: int
    generation: int


class CopyState(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the transfer actor: copy a boundary's state into a request's own slot (copy on write)."""

    op: int
    source: int
    target: int


class CopyPages(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the transfer actor: copy pages that one request owns to pages that another owns."""

    op: int
    sources: Ids
    targets: Ids


class ClearState(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the transfer actor: zero a request's own slot, since its boundary is empty."""

    op: int
    target: int


class FreeHostSlots(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the host allocator: `ids` go back to their pool, taken from `owner`."""

    component: Component
    ids: Ids
    owner: int


class Reserve(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the allocator of `tier`: room for an operation, all or nothing.

    Answered to the tree by `Reserved` or `NotReserved`, in the same drain unless it may `wait` for
    what copies in flight will free; it never waits for anything else. `idle`: nothing is evicted
    for it either.
    """

    op: int
    tier: Tier
    pages: int
    states: int
    wait: bool = False
    idle: bool = False


class Places(msgspec.Struct, frozen=True, gc=False):
    """Part of a copy between tiers: `sources[i]` goes to `targets[i]`, of one component."""

    component: Component
    sources: Ids
    targets: Ids


class BackupToHost(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the transfer actor: copy device data to the host tier; `Copied(op)` tells its end."""

    op: int
    items: tuple[Places, ...]


class LoadToDevice(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the transfer actor: copy host data to the device, layer by layer; `Copied(op)` follows.

    `idle`: nobody waits for it, so all others go first.
    """

    op: int
    items: tuple[Places, ...]
    idle: bool = False


Action: TypeAlias = (
    FreeDeviceSlots
    | FreeHostSlots
    | EvictExcessPathStates
    | CopyState
    | CopyPages
    | ClearState
    | Reserve
    | BackupToHost
    | LoadToDevice
)
