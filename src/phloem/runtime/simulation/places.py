"""Who owns each page and slot of both tiers, rebuilt from events alone.

Nothing here looks at the runtime's own ledgers. Every change is checked against what the events
before it said, and `compare` holds the outcome against the live runtime.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from phloem.actors.actions import TREE, Component, Ids
from phloem.actors.ledger import Ledger
from phloem.actors.places import FREE, PARKED
from phloem.events import (
    CopyEnded,
    CopySubmitted,
    Event,
    Freed,
    Granted,
    Inserted,
    Kept,
    Parked,
    RuntimeStarted,
)
from phloem.runtime.simulation.model import Violation

__all__ = ["Places", "TierPlaces"]

_Spans: TypeAlias = Mapping[Component, Sequence[int]]
_NO_SPANS: _Spans = {}
_NAMES = 4096  # so many accounts are remembered before those that own nothing are forgotten


class TierPlaces:
    """The owners of one tier's places, and how many steps and copies touch each."""

    def __init__(
        self,
        prefix: str,
        pages: int = 0,
        states: int = 0,
        spans: Mapping[Component, int] | None = None,
    ) -> None:
        self.names: dict[int, str] = {}  # accounts by number
        self._prefix = prefix  # of its places in messages
        sizes = {"kv": pages, "state": states, **(spans or {})}
        self._owners: dict[Component, Ids] = {
            component: array("i", [FREE] * (size + 1)) for component, size in sizes.items()
        }
        self._touched: dict[Component, Counter[int]] = {c: Counter() for c in sizes}

    def move(
        self, component: Component, ids: Iterable[int], owner: int, to: int, event: Event
    ) -> None:
        """Places go from one owner to another; raises `Violation` where they are not `owner`'s."""
        owners, touched = self._owners[component], self._touched[component]
        for place in ids:
            if not 0 < place < len(owners):
                raise Violation(f"{self._prefix}{component} has no place {place}: {event}")
            if not self._same(owners[place], owner):
                raise Violation(f"{self.of(component, place)}: {event}")
            owners[place] = to
            if to == FREE and touched[place] > 0:
                raise Violation(
                    f"{self._prefix}{component} place {place} is free while a step or copy uses it"
                )

    def _same(self, owner: int, said: int) -> bool:
        """One owner's accounts are one: an insert may gather them."""
        if owner == said:
            return True
        return owner > 0 and said > 0 and self.names.get(owner) == self.names.get(said)

    def touch(
        self, who: str, pages: Iterable[int], states: Iterable[int], spans: _Spans = _NO_SPANS
    ) -> None:
        """`who` uses these from now on; raises `Violation` for one that is free."""
        for component, places in (("kv", pages), ("state", states), *spans.items()):
            owners, touched = self._owners[component], self._touched[component]
            for place in places:
                if owners[place] == FREE:
                    raise Violation(
                        f"{who} touches {self._prefix}{component} place {place}, which is free"
                    )
                touched[place] += 1

    def untouch(
        self, pages: Iterable[int], states: Iterable[int], spans: _Spans = _NO_SPANS
    ) -> None:
        """The reverse of `touch`."""
        for component, places in (("kv", pages), ("state", states), *spans.items()):
            self._touched[component].subtract(places)

    def holder(self, component: Component, place: int) -> int:
        """`FREE`, `PARKED`, `TREE`, or an account."""
        return self._owners[component][place]

    def of(self, component: Component, place: int) -> str:
        """Which place it is and who owns it, in words."""
        holder = self._owners[component][place]
        name = {FREE: "free", PARKED: "parked", TREE: "the tree's"}.get(holder)
        name = name or f"of {self.names.get(holder, '?')!r} (account {holder})"
        return f"{self._prefix}{component} place {place} is {name}"

    def compare(self, ledger: Ledger) -> None:
        """Raise `Violation` where the live ledger differs from what the events said."""
        for component, mine in self._owners.items():
            live = ledger.pool(component).owners()
            if live == mine[1:]:
                continue
            for place, owner in enumerate(live, 1):
                if not self._same(owner, mine[place]):
                    said = self.of(component, place)
                    raise Violation(f"{said} by the events, but {owner} in the ledger")
        if len(self.names) > _NAMES:
            living = {owner for owners in self._owners.values() for owner in owners}
            self.names = {number: self.names[number] for number in self.names if number in living}


class _Touched(NamedTuple):
    """What a copy reads or writes."""

    pages: Sequence[int]
    states: Sequence[int]
    host_pages: Sequence[int]
    host_states: Sequence[int]


class Places:
    """The owners, as a listener of events; raises `Violation` at the first one that cannot be."""

    def __init__(self) -> None:
        self.device = TierPlaces("")
        self.host = TierPlaces("host ")
        self._between: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # not submitted yet
        self._copies: dict[int, _Touched] = {}
        self._quiet: set[int] = set()  # of those, the ones that touch nothing any more
        # Operations whose copy failed, with the pages that came all the same.
        self._failed: dict[int, Sequence[int]] = {}
        self._handlers: dict[type[Event], Callable[..., None]] = {
            RuntimeStarted: self._started,
            Granted: self._granted,
            Freed: self._freed,
            Parked: self._parked,
            Inserted: self._inserted,
            Kept: self._kept,
            CopySubmitted: self._copy_submitted,
            CopyEnded: self._copy_ended,
        }

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    # -- events --------------------------------------------------------------------------------

    def _started(self, event: RuntimeStarted) -> None:
        self.device = TierPlaces("", event.pages, event.states, event.spans)
        self.host = TierPlaces("host ", event.host_pages, event.host_states)

    def _tier(self, name: str) -> TierPlaces:
        return self.host if name == "host" else self.device

    def _granted(self, event: Granted) -> None:
        tier = self._tier(event.tier)
        known = tier.names.setdefault(event.account, event.request)
        if known != event.request:
            raise Violation(
                f"account {event.account} is of {known!r}, granted to {event.request!r}"
            )
        tier.move("kv", event.pages, FREE, event.account, event)
        tier.move("state", event.states, FREE, event.account, event)
        for component, ids in event.spans.items():
            tier.move(component, ids, FREE, event.account, event)

    def _freed(self, event: Freed) -> None:
        tier = self._tier(event.tier)
        tier.move(event.component, event.ids, event.owner, FREE, event)

    def _parked(self, event: Parked) -> None:
        self.device.move("kv", event.pages, event.owner, PARKED, event)
        self.device.move("state", event.states, event.owner, PARKED, event)
        for component, ids in event.spans.items():
            self.device.move(component, ids, event.owner, PARKED, event)

    def _inserted(self, event: Inserted) -> None:
        self.device.move("kv", event.adopted, event.account, TREE, event)
        if event.adopted_state:
            self.device.move("state", (event.adopted_state,), event.account, TREE, event)
        for component, ids in event.spans.items():
            self.device.move(component, ids, event.account, TREE, event)

    def _kept(self, event: Kept) -> None:
        tier = self._tier(event.tier)
        owner = tier.names.get(event.account, "")
        op = int(owner.removeprefix("op ") or 0)
        if op in self._copies:
            raise Violation(f"the copy of {owner} is in flight, and the tree shows data: {event}")
        came = self._failed.get(op)
        if came is not None and (event.component != "kv" or not set(event.ids) <= set(came)):
            raise Violation(f"the copy of {owner} failed, and the tree shows its data: {event}")
        tier.move(event.component, event.ids, event.account, TREE, event)

    def copies_between(self, op: int, pages: Sequence[int], states: Sequence[int]) -> None:
        """The copy of `op`, about to be submitted, reads or writes these places of the host."""
        self._between[op] = (pages, states)

    def _copy_submitted(self, event: CopySubmitted) -> None:
        if event.op in self._copies:
            raise Violation(f"copy {event.op} was submitted twice")
        on_host = self._between.pop(event.op, ((), ()))
        copy = self._copies[event.op] = _Touched(event.pages, event.states, *on_host)
        self.device.touch(f"copy {event.op}", copy.pages, copy.states)
        self.host.touch(f"copy {event.op}", copy.host_pages, copy.host_states)

    def _copy_ended(self, event: CopyEnded) -> None:
        if event.op not in self._copies:
            raise Violation(f"copy {event.op} ended, but was not in flight")
        self.copy_quiet(event.op)
        del self._copies[event.op]
        self._quiet.discard(event.op)
        if event.error:
            self._failed[event.op] = ()

    def copy_spared(self, op: int, pages: Sequence[int]) -> None:
        """Of a copy that failed, these pages have come."""
        if op in self._failed:
            self._failed[op] = pages

    def copy_quiet(self, op: int) -> None:
        """The engine has left a copy's memory alone; the runtime may hear of it later."""
        copy = self._copies[op]
        if op not in self._quiet:
            self._quiet.add(op)
            self.device.untouch(copy.pages, copy.states)
            self.host.untouch(copy.host_pages, copy.host_states)

    # -- for steps -----------------------------------------------------------------------------

    def step_begins(
        self, pages: Ids, states: Sequence[int], spans: Mapping[Component, Sequence[int]]
    ) -> Callable[[], None]:
        """See `Memory.step_begins`."""
        self.device.touch("a step", pages, states, spans)
        return partial(self.device.untouch, pages, states, spans)

    def check_write(self, component: Component, place: int, owner: str) -> None:
        """See `Memory.check_write`.

        A launched step may still write what was parked or published since.
        """
        device = self.device
        holder = device.holder(component, place)
        if holder not in (PARKED, TREE) and device.names.get(holder) != owner:
            raise Violation(f"{owner} writes, but {device.of(component, place)}")

    @property
    def copies(self) -> int:
        """Copies in flight."""
        return len(self._copies)
