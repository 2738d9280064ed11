"""Pools of places: who owns each page or slot of one component, at every instant.

A cell holds `FREE`, `PARKED`, `TREE` or the number of an account. Every change names the owner it
takes from; a mismatch is an `OwnershipError` with nothing changed. Free lists are stacks of
integers. More than a few ids are checked and written in one go: as a slice when they are
consecutive places, as they mostly are, else as indices of numpy's own type, made once, since any
other makes each use of them several times dearer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from struct import Struct
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from phloem.actors.actions import TREE, Component, Ids
from phloem.errors import InvalidRequest, OwnershipError

__all__ = ["FREE", "PARKED", "Indices", "Pool", "first_twice", "owner_name"]

FREE = 0
PARKED = -2
_RESERVED = -3  # cell 0: owned by nobody who could ever be named
_FEW = 6  # up to so many ids a loop is faster than anything else
_BULK = 16  # from so many ids on numpy is faster than a loop, wherever they are
_CELL = Struct("i")
_CELL_BYTES = 4
_PLACE, _INDEX = np.dtype(np.uint32), np.dtype(np.intp)  # made once: a type would be looked up

if TYPE_CHECKING:
    Indices: TypeAlias = npt.NDArray[np.intp] | slice[int, int, None]
else:
    Indices = npt.NDArray[np.intp] | slice  # which has no subscript at run time


class Pool:
    """One pool: `size` cells, of which cell 0 is reserved and never granted."""

    place_bytes = 0  # of one place, for those who report; 0: not known

    def __init__(self, component: Component, size: int) -> None:
        if size < 1:
            raise InvalidRequest(f"the {component} pool has {size} places; place 0 is reserved")
        self.component: Component = component
        self.size = size - 1  # places that can be granted
        self._cells = array("i", bytes(4 * size))
        self._cells[0] = _RESERVED
        self._cells_np = np.frombuffer(self._cells, np.int32)
        # The free places are at the end of a stack of fixed length, since an array that grows and
        # shrinks is moved; they go from the front, at first the lowest.
        self._stack = array("i", range(1, size))
        self._order = array("i", range(size)).tobytes()  # consecutive places are a part of it
        self._order_np = np.frombuffer(self._order, np.int32)
        self.free = size - 1  # places that can be granted at once: the stack's first so many
        self.parked = 0
        self.tree = 0
        self.granted: int = 0

    @property
    def free_places(self) -> Ids:
        """The places that can be granted at once, the next one last; a copy."""
        return self._stack[self.size - self.free :][::-1]

    @property
    def room(self) -> int:
        """Places that can be granted at once; pools of one memory count the same bytes."""
        return self.free

    @property
    def extent(self) -> int:
        """Places that are owned or can be granted at once: room + parked + tree + granted."""
        return self.size

    def take(self, count: int, account: int) -> tuple[Ids, Indices | None]:
        """Grant `count` free places, of which there must be so many, to `account`.

        Also returns what picks their cells in one go, for `move`.
        """
        assert 0 <= count <= self.free
        top = self.size - self.free
        ids = self._stack[top : top + count]
        places = self._indices(ids)
        if places is None:
            self._write(ids, account, None)
        else:
            self._cells_np[places] = account
        self.free -= count
        self.granted += count
        return ids, places

    def take_one(self, account: int) -> int:
        """`take` for a single place."""
        place = self._stack[self.size - self.free]
        self._cells[place] = account
        self.free -= 1
        self.granted += 1
        return place

    def give(self, ids: Ids, owner: int) -> None:
        """Free `ids`, which must be `owner`'s. Raises `OwnershipError` with nothing changed."""
        count, top = len(ids), self.size - self.free
        if count == 1:
            place = ids[0]
            self.check_one(place, owner)
            self._cells[place] = FREE
            self._stack[top - 1] = place
        else:
            self._take_over(ids, owner, FREE)
            self._stack[top - count : top] = ids
        self.free += count
        self._leave(owner, count)

    def park(self, ids: Ids, owner: int) -> None:
        """Take `ids` from `owner` without freeing them yet."""
        self._take_over(ids, owner, PARKED)
        self._leave(owner, len(ids))
        self.parked += len(ids)

    def unpark(self, ids: Ids) -> None:
        """Free parked `ids`: nothing touches them any more."""
        self.give(ids, PARKED)

    def move(self, ids: Ids, account: int, to: int, places: Indices | None = None) -> None:
        """Give `ids`, which were checked to be `account`'s, to the tree or another account."""
        assert account > 0
        if places is None:
            self._write(ids, to, self._indices(ids))
        else:
            self._cells_np[places] = to
        if to == TREE:
            count = len(ids)
            self.granted -= count
            self.tree += count

    def move_one(self, place: int, account: int, to: int) -> None:
        """`move` for a single place."""
        assert account > 0
        self._cells[place] = to
        if to == TREE:
            self.granted -= 1
            self.tree += 1

    def owner_of(self, place: int) -> int:
        """The owner of a place; raises `OwnershipError` for one that is not in the pool."""
        if not 0 < place <= self.size:
            raise OwnershipError(f"{self.component} has no place {place}; they go to {self.size}")
        return self._cells[place]

    def owners(self) -> Ids:
        """The owner of each place, from place 1 on; a copy."""
        return self._cells[1:]

    def owners_of(self, ids: Ids) -> Ids:
        """The owner of each of `ids`; raises `OwnershipError` like `owner_of`."""
        return array("i", [self.owner_of(place) for place in ids])

    def check(self, ids: Ids, owner: int) -> None:
        """Raise `OwnershipError` unless all `ids` are different and `owner`'s."""
        self._take_over(ids, owner, owner)

    def check_one(self, place: int, owner: int) -> None:
        """`check` for a single place."""
        if not 0 < place <= self.size or self._cells[place] != owner:
            raise self._foreign(place, owner)

    def _take_over(self, ids: Ids, owner: int, to: int) -> None:
        """Check and write in one: `ids`, which must be different and `owner`'s, become `to`'s."""
        count = len(ids)
        places = self._indices(ids)
        if places is None:
            cells, size = self._cells, self.size
            for place in ids:
                if not 0 < place <= size or cells[place] != owner:
                    raise self._foreign(place, owner)
            if count > 1 and len(set(ids)) != count:
                raise OwnershipError(f"{self.component} places repeat: {first_twice(ids)}")
            for place in ids:
                cells[place] = to
            return
        many = self._cells_np
        try:
            owners = many[places]
        except IndexError:
            raise self._first_foreign(ids, owner) from None
        if owners.tobytes() != _CELL.pack(owner) * count:
            raise self._first_foreign(ids, owner)
        if not isinstance(places, slice):
            # Each cell says for a moment where its place was named last.
            many[places] = self._order_np[:count]
            if not self._order.startswith(many[places].tobytes()):
                many[places] = owner
                raise OwnershipError(f"{self.component} places repeat: {first_twice(ids)}")
        many[places] = to

    def _indices(self, ids: Ids) -> Indices | None:
        """A numpy index of the cells of `ids`, places of this pool; None if a loop is faster."""
        count = len(ids)
        if count <= _FEW:
            return None
        first = ids[0]
        if first > 0 and self._order.startswith(ids, first * _CELL_BYTES):
            return slice(first, first + count)
        if count < _BULK:
            return None
        # As unsigned, a negative place is out of range like any other that is too large.
        return np.frombuffer(ids, _PLACE).astype(_INDEX)

    def among(self, ids: Ids, owner: int) -> Ids:
        """The ones of `ids`, places of this pool, that `owner` owns."""
        places = self._indices(ids)
        if places is None:
            cells = self._cells
            return array("i", [place for place in ids if cells[place] == owner])
        mine = array("i")
        mine.frombytes(np.frombuffer(ids, np.int32)[self._cells_np[places] == owner].tobytes())
        return mine

    def owned_by(self, owner: int) -> Ids:
        """All places of one owner, ascending; looks at the whole pool."""
        return array("i", np.flatnonzero(self._cells_np == owner)[0:].tolist())

    def counts(self) -> Counter[int]:
        """How many places each owner has."""
        return Counter(self.owners())

    def audit(self) -> None:
        """Recount; raises `AssertionError` when a figure is wrong."""
        owned = self.counts()
        counts = {
            "free": (self.free, owned[FREE]),
            "parked": (self.parked, owned[PARKED]),
            "tree": (self.tree, owned[TREE]),
            "granted": (self.granted, sum(n for owner, n in owned.items() if owner > 0)),
        }
        for name, (kept, counted) in counts.items():
            assert kept == counted, f"{self.component}: {name} is {kept}, counted {counted}"
        assert sum(kept for kept, _ in counts.values()) == self.size
        free = self.free_places
        assert len(set(free)) == self.free, f"{self.component}: a place is free twice"
        cells = self._cells
        assert all(cells[place] == FREE for place in free), f"{self.component}: a free one is owned"

    def _write(self, ids: Ids, owner: int, places: Indices | None) -> None:
        if places is None:
            cells = self._cells
            for place in ids:
                cells[place] = owner
        else:
            self._cells_np[places] = owner

    def _leave(self, owner: int, count: int) -> None:
        if owner == TREE:
            self.tree -= count
        elif owner == PARKED:
            self.parked -= count
        else:
            self.granted -= count

    def _first_foreign(self, ids: Ids, owner: int) -> OwnershipError:
        cells, size = self._cells, self.size
        bad = next(place for place in ids if not 0 < place <= size or cells[place] != owner)
        return self._foreign(bad, owner)

    def _foreign(self, place: int, owner: int) -> OwnershipError:
        if not 0 < place <= self.size:
            return OwnershipError(f"{self.component} has no place {place}; they go to {self.size}")
        return OwnershipError(
            f"{self.component} place {place} is {owner_name(self._cells[place])}, "
            f"not {owner_name(owner)}"
        )


def owner_name(owner: int) -> str:
    """An owner as a person reads it."""
    return {FREE: "free", PARKED: "parked", TREE: "the tree's"}.get(owner, f"of account {owner}")


def first_twice(ids: Iterable[int]) -> int:
    """The first of the ids that comes a second time; there must be one."""
    seen: set[int] = set()
    for place in ids:
        if place in seen:
            return place
        seen.add(place)
    raise AssertionError("no place repeats")
