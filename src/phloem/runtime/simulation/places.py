"""Who owns each page and slot, rebuilt from events alone.

Nothing here looks at the runtime's own ledger. Every change is checked against what the events
before it said, and `compare` holds the outcome against the live runtime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from phloem.actors.actions import TREE, Component, Ids
from phloem.actors.ledger import FREE, PARKED, Ledger
from phloem.events import (
    CopyEnded,
    CopySubmitted,
    Event,
    Freed,
    Granted,
    Inserted,
    Parked,
    RuntimeStarted,
)
from phloem.runtime.simulation.model import Violation

__all__ = ["Places"]

_COMPONENTS: tuple[Component, ...] = ("kv", "state")


class Places:
    """The owners, as a listener of events; raises `Violation` at the first one that cannot be."""

    def __init__(self) -> None:
        self.touched: dict[Component, Counter[int]] = {c: Counter() for c in _COMPONENTS}
        self._owners: dict[Component, list[int]] = {c: [] for c in _COMPONENTS}
        self._names: dict[int, str] = {}  # accounts by number
        self._copies: dict[int, CopySubmitted] = {}
        self._quiet: set[int] = set()  # of those, the ones that touch nothing any more
        self._handlers: dict[type[Event], Callable[..., None]] = {
            RuntimeStarted: self._started,
            Granted: self._granted,
            Freed: self._freed,
            Parked: self._parked,
            Inserted: self._inserted,
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
        self._owners = {
            "kv": [FREE] * (event.pages + 1),
            "state": [FREE] * (event.states + 1),
        }

    def _granted(self, event: Granted) -> None:
        known = self._names.setdefault(event.account, event.request)
        if known != event.request:
            raise Violation(
                f"account {event.account} is of {known!r}, granted to {event.request!r}"
            )
        self._move("kv", event.pages, FREE, event.account, event)
        self._move("state", event.states, FREE, event.account, event)

    def _freed(self, event: Freed) -> None:
        component: Component = "kv" if event.component == "kv" else "state"
        self._move(component, event.ids, event.owner, FREE, event)
        for place in event.ids:
            if self.touched[component][place] > 0:
                raise Violation(f"{component} place {place} is free while a step or copy uses it")

    def _parked(self, event: Parked) -> None:
        self._move("kv", event.pages, event.owner, PARKED, event)
        self._move("state", event.states, event.owner, PARKED, event)

    def _inserted(self, event: Inserted) -> None:
        self._move("kv", event.adopted, event.account, TREE, event)
        if event.adopted_state:
            self._move("state", (event.adopted_state,), event.account, TREE, event)

    def _copy_submitted(self, event: CopySubmitted) -> None:
        if event.op in self._copies:
            raise Violation(f"copy {event.op} was submitted twice")
        self._copies[event.op] = event
        self._touch(f"copy {event.op}", event.pages, event.states)

    def _copy_ended(self, event: CopyEnded) -> None:
        if event.op not in self._copies:
            raise Violation(f"copy {event.op} ended, but was not in flight")
        self.copy_quiet(event.op)
        del self._copies[event.op]
        self._quiet.discard(event.op)

    def copy_quiet(self, op: int) -> None:
        """The engine has left a copy's memory alone; the runtime may hear of it later."""
        copy = self._copies[op]
        if op not in self._quiet:
            self._quiet.add(op)
            self._untouch(copy.pages, copy.states)

    def _move(
        self, component: Component, ids: Iterable[int], owner: int, to: int, event: Event
    ) -> None:
        owners = self._owners[component]
        for place in ids:
            if not 0 < place < len(owners):
                raise Violation(f"{component} has no place {place}: {event}")
            if not self._same(owners[place], owner):
                raise Violation(
                    f"{component} place {place} is {self.owner(component, place)}: {event}"
                )
            owners[place] = to

    def _same(self, owner: int, said: int) -> bool:
        """One owner's accounts are one: an insert may gather them."""
        if owner == said:
            return True
        return owner > 0 and said > 0 and self._names.get(owner) == self._names.get(said)

    def _touch(self, who: str, pages: Sequence[int], states: Sequence[int]) -> None:
        for component, places in zip(_COMPONENTS, (pages, states), strict=True):
            owners = self._owners[component]
            for place in places:
                if owners[place] == FREE:
                    raise Violation(f"{who} touches {component} place {place}, which is free")
            self.touched[component].update(places)

    def _untouch(self, pages: Iterable[int], states: Iterable[int]) -> None:
        self.touched["kv"].subtract(pages)
        self.touched["state"].subtract(states)

    # -- for steps -----------------------------------------------------------------------------

    def step_begins(self, pages: Ids, states: Sequence[int]) -> Callable[[], None]:
        """See `Memory.step_begins`."""
        self._touch("a step", pages, states)
        return partial(self._untouch, pages, states)

    def check_write(self, component: Component, place: int, owner: str) -> None:
        """See `Memory.check_write`.

        A launched step may still write what was parked or published since.
        """
        holder = self._owners[component][place]
        if holder in (PARKED, TREE) or self._names.get(holder) == owner:
            return
        raise Violation(
            f"{owner} writes {component} place {place}, which is {self.owner(component, place)}"
        )

    # -- against the live runtime --------------------------------------------------------------

    def owner(self, component: Component, place: int) -> str:
        """Who owns a place, in words."""
        holder = self._owners[component][place]
        name = {FREE: "free", PARKED: "parked", TREE: "the tree's"}.get(holder)
        return name or f"of {self._names.get(holder, '?')!r} (account {holder})"

    def counts(self, component: Component) -> Counter[int]:
        """Places by owner (`FREE`, `PARKED`, `TREE`, accounts), the reserved one left out."""
        return Counter(self._owners[component][1:])

    def compare(self, ledger: Ledger) -> None:
        """Raise `Violation` where the live ledger differs from what the events said."""
        for component in _COMPONENTS:
            pool = ledger.pool(component)
            for place in range(1, pool.size + 1):
                live = pool.owner_of(place)
                if not self._same(live, self._owners[component][place]):
                    raise Violation(
                        f"{component} place {place} is {self.owner(component, place)} by the "
                        f"events, but {live} in the ledger"
                    )

    @property
    def copies(self) -> int:
        """Copies in flight."""
        return len(self._copies)
