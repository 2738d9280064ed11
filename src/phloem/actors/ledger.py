"""The ledger of owners: who owns each page and slot of a tier, at every instant.

A cell holds `FREE`, `PARKED`, `TREE` or the number of an account. Every change names the owner it
takes from; a mismatch is an `OwnershipError` with nothing changed. Free lists are stacks of
integers. More than a few ids are checked and written in one go: as a slice when they are
consecutive places, as they mostly are, else as indices of numpy's own type, made once, since any
other makes each use of them several times dearer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from phloem.actors.actions import TREE, Component, Ids
from phloem.cuda_streams.fences import Fence
from phloem.errors import InvalidRequest, OwnershipError

__all__ = ["FREE", "PARKED", "Account", "Ledger", "Pool"]

FREE = 0
PARKED = -2
_RESERVED = -3  # cell 0: owned by nobody who could ever be named
_FEW = 6  # up to so many ids a loop is faster than anything else
_BULK = 16  # from so many ids on numpy is faster than a loop, wherever they are
_CELL = Struct("i")

Indices: TypeAlias = "npt.NDArray[np.intp] | slice[int, int, None]"


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
                raise OwnershipError(f"{self.component} places repeat: {_first_twice(ids)}")
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
                raise OwnershipError(f"{self.component} places repeat: {_first_twice(ids)}")
        many[places] = to

    def _indices(self, ids: Ids) -> Indices | None:
        """What picks the cells of `ids`, if they are places of this pool; None for a few."""
        count = len(ids)
        if count <= _FEW:
            return None
        first = ids[0]
        if first > 0 and self._order.startswith(ids, first * _CELL.size):
            return slice(first, first + count)
        if count < _BULK:
            return None
        # As unsigned, a negative place is out of range like any other that is too large.
        return np.frombuffer(ids, np.uint32).astype(np.intp)

    def among(self, ids: Ids, owner: int) -> Ids:
        """Those of `ids`, places of this pool, that are `owner`'s."""
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


class Account(msgspec.Struct, eq=False):
    """What one grant holds outside the tree. `owner` names who asked, for logs and waiters.

    `fences` are the steps that may still touch what it gives up. `whole` lists its pages while it
    has all it was granted at once and nothing else, so that offering exactly these needs no search;
    `places` then picks their cells.
    """

    number: int
    owner: str
    pages: int = 0
    states: int = 0
    spans: int = 0  # places of span components, of all together
    fences: tuple[Fence, ...] = ()
    whole: Ids | None = None
    places: Indices | None = None


class Ledger:
    """The pools of one tier and the accounts that own outside the tree.

    `spans` are the sizes of the pools of span components, by name; what is asked and given of them
    is in this order. Belongs to the actors of one domain: they change it in their turns only.
    """

    def __init__(
        self, pages: int, states: int, spans: Mapping[Component, int] | None = None
    ) -> None:
        self.kv = Pool("kv", pages)
        self.state = Pool("state", states)
        self.spans = tuple(Pool(name, size) for name, size in (spans or {}).items())
        self._by_component: dict[Component, Pool] = {pool.component: pool for pool in self.pools}
        self.accounts: dict[int, Account] = {}
        self.owners: dict[str, int] = {}  # how many accounts each has
        self.waiting = 0  # allocations that wait; the tree tells the allocator when that may help
        self._next = 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All pools."""
        return self.kv, self.state, *self.spans

    def pool(self, component: Component) -> Pool:
        """The pool of a component."""
        return self._by_component[component]

    def ask_for_spare(self) -> bool:
        """Whether the tree is to be asked, and has not been, to leave room for one more state."""
        return False

    def fits(self, pages: int, states: int, *, last: bool = False) -> bool:
        """Whether so much can be granted at once. `last`: nothing is to be freed for it."""
        del last
        return pages <= self.kv.free and states <= self.state.free

    def short_of(self, pages: int, states: int) -> tuple[int, int]:
        """What has to be freed before so many pages and states fit."""
        return max(0, pages - self.kv.free), max(0, states - self.state.free)

    def ever_fits(self, pages: int, states: int) -> bool:
        """Whether so much could be granted if nothing else were owned."""
        return pages <= self.kv.size and states <= self.state.size

    def spans_short(self, spans: Sequence[int]) -> tuple[int, ...]:
        """How many pages of each span component have to be freed before so many fit."""
        return tuple(
            max(0, asked - pool.free) for asked, pool in zip(spans, self.spans, strict=False)
        )

    def spans_ever_fit(self, spans: Sequence[int]) -> bool:
        """Whether so many pages of span components could be granted if nothing else were owned."""
        return len(spans) <= len(self.spans) and not any(
            asked > pool.size for asked, pool in zip(spans, self.spans, strict=False)
        )

    def grant_spans(self, account: int, spans: Sequence[int]) -> tuple[Ids, ...]:
        """More for an account that was just granted something: pages of span components."""
        self.accounts[account].spans += sum(spans)
        return tuple(
            pool.take(count, account)[0] for count, pool in zip(spans, self.spans, strict=False)
        )

    def grant(self, pages: int, states: int, owner: str, account: int = 0) -> tuple[int, Ids, Ids]:
        """Take from both pools for a new account, or for an existing one; both must have room."""
        held = self.accounts.get(account)
        if held is None:
            self._next = account = self._next + 1
            held = self._open(account, owner)
            page_ids, held.places = self.kv.take(pages, account)
            held.whole = page_ids[:]  # the caller may write to its own
            held.pages, held.states = pages, states
        else:
            page_ids, _ = self.kv.take(pages, account)
            if pages:
                held.whole = held.places = None
            held.pages += pages
            held.states += states
        if states == 1:
            return account, page_ids, array("i", (self.state.take_one(account),))
        return account, page_ids, self.state.take(states, account)[0]

    def adopt(self, account: int, pages: Ids, state: int, spans: Sequence[Ids] = ()) -> None:
        """Move `pages` and `state` (0: none), which were checked, from an account to the tree.

        And pages of span components.
        """
        count, of_spans = len(pages), 0
        if count:
            held = self.accounts[account]
            whole = held.whole is not None and count == held.pages
            self.kv.move(pages, account, TREE, held.places if whole else None)
        if state:
            self.state.move_one(state, account, TREE)
        if spans:
            of_spans = sum(map(len, spans))
            for pool, ids in zip(self.spans, spans, strict=False):
                pool.move(ids, account, TREE)
        self.left(account, count, 1 if state else 0, of_spans)

    def left(self, account: int, pages: int, states: int, spans: int = 0) -> None:
        """Note that an account holds less; an empty one is closed."""
        held = self.accounts[account]
        if held.pages == pages and held.states == states and held.spans == spans:
            self._close(held)
            return
        held.pages -= pages
        held.states -= states
        held.spans -= spans
        assert held.pages >= 0 and held.states >= 0 and held.spans >= 0
        if pages:
            held.whole = held.places = None

    def _open(self, number: int, owner: str) -> Account:
        owners = self.owners
        owners[owner] = owners.get(owner, 0) + 1
        account = self.accounts[number] = Account(number, owner)
        return account

    def _close(self, account: Account) -> None:
        del self.accounts[account.number]
        others = self.owners[account.owner] - 1
        if others:
            self.owners[account.owner] = others
        else:
            del self.owners[account.owner]

    def account_of(
        self, pages: Ids, state: int, owner: str | None, spans: Sequence[Ids] = ()
    ) -> int:
        """The one account that owns all `pages` and `state`, gathering them there if need be.

        `spans`: and pages of each span component. `owner` restricts it to accounts of that owner;
        None takes any. Raises `OwnershipError` with nothing changed when something is not granted,
        repeats, or is somebody else's.
        """
        if pages:
            pool, place = self.kv, pages[0]
        elif state:
            pool, place = self.state, state
        elif any(spans):
            pool, place = next(
                (p, ids[0]) for p, ids in zip(self.spans, spans, strict=False) if ids
            )
        else:
            return 0
        first = pool.owner_of(place)
        account = self.accounts.get(first)
        if account is None:
            what = f"{pool.component} place {place}"
            raise OwnershipError(f"{what} is {owner_name(first)}, not granted")
        if owner is not None and account.owner != owner:
            raise OwnershipError(f"granted to {account.owner!r}, offered by {owner!r}")
        try:
            if pages != account.whole:
                self.kv.check(pages, first)
            if state:
                self.state.check_one(state, first)
            if spans:
                for pool, ids in zip(self.spans, spans, strict=False):
                    pool.check(ids, first)
        except OwnershipError:
            self._gather(pages, state, spans, account)
        return first

    def _gather(self, pages: Ids, state: int, spans: Sequence[Ids], into: Account) -> None:
        """Move ids of several accounts of one owner into one of them."""
        offered = [(self.kv, pages), *zip(self.spans, spans, strict=False)]
        if state:
            offered.append((self.state, array("i", (state,))))
        for pool, ids in offered:
            if len(set(ids)) != len(ids):
                raise OwnershipError(f"{pool.component} places repeat: {_first_twice(ids)}")
        homes = [
            (pool.component, place, self._home(pool.component, place, into.owner))
            for pool, ids in offered
            for place in ids
        ]
        for component, place, home in homes:
            self._reassign(component, place, home, into)

    def put_back(self, pages: Ids, homes: Ids, account: int) -> None:
        """Undo `account_of` for pages that nobody took: `homes` names where each one was."""
        owner = self.accounts[account].owner
        for page, number in zip(pages, homes, strict=True):
            if number == account:
                continue
            home = self.accounts.get(number) or self._open(number, owner)
            self.kv.move(array("i", (page,)), account, number)
            home.pages += 1
            self.left(account, 1, 0)

    def _home(self, component: Component, place: int, owner: str) -> Account:
        number = self.pool(component).owner_of(place)
        account = self.accounts.get(number)
        if account is None or account.owner != owner:
            raise OwnershipError(
                f"{component} place {place} is {owner_name(number)}, not {owner!r}'s"
            )
        return account

    def _reassign(self, component: Component, place: int, home: Account, into: Account) -> None:
        if home is into:
            return
        self.pool(component).move(array("i", (place,)), home.number, into.number)
        kv, state = int(component == "kv"), int(component == "state")
        into.whole = into.places = None
        into.pages += kv
        into.states += state
        into.spans += 1 - kv - state
        self.left(home.number, kv, state, 1 - kv - state)

    def audit(self) -> None:
        """Recount every pool and account; raises `AssertionError` when a figure is wrong."""
        for pool in self.pools:
            pool.audit()
        assert sum(a.spans for a in self.accounts.values()) == sum(p.granted for p in self.spans)
        assert sum(a.pages for a in self.accounts.values()) == self.kv.granted
        assert sum(a.states for a in self.accounts.values()) == self.state.granted
        assert Counter(a.owner for a in self.accounts.values()) == self.owners
        pages, states = self.kv.counts(), self.state.counts()
        for number, account in self.accounts.items():
            assert pages[number] == account.pages, f"pages of account {number}"
            assert states[number] == account.states, f"states of {number}"
            if account.whole is not None:
                assert sorted(account.whole) == self.kv.owned_by(number).tolist()


def owner_name(owner: int) -> str:
    """An owner as a person reads it."""
    return {FREE: "free", PARKED: "parked", TREE: "the tree's"}.get(owner, f"of account {owner}")


def _first_twice(ids: Iterable[int]) -> int:
    seen: set[int] = set()
    for place in ids:
        if place in seen:
            return place
        seen.add(place)
    raise AssertionError("no place repeats")
