"""The ledger of owners of a tier: its pools, and the accounts that own outside the tree."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from phloem.actors.actions import TREE, Component, Ids
from phloem.actors.places import Indices, Pool, first_twice, owner_name
from phloem.cuda_streams.fences import Fence
from phloem.errors import OwnershipError

__all__ = ["Account", "Ledger"]


class Account(msgspec.Struct, eq=False):
    """The places that one grant holds outside the tree. `owner` names who asked, for logs.

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
        """The pools of pages, of states, and of each span component."""
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
        """How many pages and states have to be freed before so many fit."""
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
                raise OwnershipError(f"{pool.component} places repeat: {first_twice(ids)}")
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
