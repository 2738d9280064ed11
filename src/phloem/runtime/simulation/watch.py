"""Everything that is checked while a runtime runs, apart from the runtime's own code.

* Ownership: `Places`, rebuilt from events and compared with the live ledger.
* Order: turns never nest; what turns send is handled in the order in which it was sent.
* Actions and acknowledgements: each action is carried out once; each copy is submitted once, ends
  once and is acknowledged once; the tree is asked for room by one allocation at a time.
* Fairness: allocations are served in order; nobody waits for what is free or could be evicted;
  nobody waits for ever.
* Bounds: queues stay within what was promised.
* The runtime's own audit, and at the end: nothing is owned by anybody who has left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import msgspec

from phloem.actors import messages as m
from phloem.actors.actions import ClearState, CopyState, EvictExcessPathStates, FreeDeviceSlots
from phloem.actors.allocator import AllocatorActor
from phloem.actors.transfer import TransferActor
from phloem.actors.tree.actor import TreeActor
from phloem.actors.tree.audit import audit_tree
from phloem.cuda_streams.engine import Ticket
from phloem.events import (
    Event,
    Evicted,
    Granted,
    LeaseEnded,
    LeaseLeaked,
    LeaseTaken,
    RequestEnded,
    RuntimeStopped,
    Waited,
)
from phloem.runtime.core import Core
from phloem.runtime.simulation.model import Violation
from phloem.runtime.simulation.places import Places

__all__ = ["EventLog", "Watch"]

Handler = Callable[..., object]

_COPIES = (CopyState, ClearState, m.CopyAfter)


class EventLog:
    """The last events, how many there were of each kind, and a digest of all.

    The digest covers each event with its virtual time: equal digests are equal runs.
    """

    def __init__(self, *, kept: int = 400) -> None:
        self.last: deque[tuple[int, Event]] = deque(maxlen=kept)
        self.counts: Counter[str] = Counter()
        self._digest = blake2b(digest_size=16)
        self._encode = msgspec.json.Encoder().encode
        self._closed = False

    def add(self, now_ns: int, event: Event) -> None:
        """Write an event down, unless the log was closed."""
        if self._closed:
            return
        self.last.append((now_ns, event))
        self.counts[type(event).__name__] += 1
        self._digest.update(b"%d" % now_ns)
        self._digest.update(self._encode(event))

    def close(self) -> None:
        """Nothing counts from now on."""
        self._closed = True

    @property
    def digest(self) -> str:
        """Hexadecimal."""
        return self._digest.hexdigest()

    def lines(self, requests: Iterable[str] = ()) -> Iterator[str]:
        """The last events as text, those of some requests or all."""
        names = set(requests)
        for now_ns, event in self.last:
            if not names or event.request in names or not event.request:
                yield f"{now_ns / 1e9:.6f} {self._encode(event).decode()}"


class Watch:
    """Watches one runtime: a sink of its events that also stands between its actors.

    `fail` hears of the first violation. `audit_every`: a whole audit each time so many turns have
    passed and the domain rests. `leaks_allowed`: leases that are collected unreleased are a fault
    that was asked for.
    """

    def __init__(
        self,
        log: EventLog,
        now_ns: Callable[[], int],
        fail: Callable[[BaseException], None],
        *,
        audit_every: int = 1,
        leaks_allowed: bool = False,
    ) -> None:
        self.places = Places()
        self.audits = 0
        self.turns: Counter[str] = Counter()  # messages handled, by kind
        self.waits_ns: deque[int] = deque(maxlen=10_000)  # how long allocations waited
        self.evicted: Counter[str] = Counter()  # pages, states
        self.queue_max = 0  # messages queued at once
        self._log = log
        self._now_ns = now_ns
        self._fail = fail
        self._audit_every = audit_every
        self._leaks_allowed = leaks_allowed
        self._core: Core | None = None
        self._busy = ""
        self._cause = 0
        self._capped_by = -1  # the turn whose insert was the last to apply the cap of states
        self._audited_at = 0
        self._leases: set[int] = set()
        self._copies_asked = 0
        self._copied = 0
        self._asking = 0
        self._granted: list[str] = []  # in the current turn
        self._came_as_holder = False
        self._waits_as_holder: dict[str, bool] = {}
        self._waiting_since: dict[m.Allocate, int] = {}

    # -- events --------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """The sink."""
        self._log.add(self._now_ns(), event)
        try:
            self.places(event)
            self._note(event)
        except Violation as error:
            self._fail(error)

    def _note(self, event: Event) -> None:
        match event:
            case LeaseTaken(moved=False):
                self._leases.add(event.lease)
            case LeaseEnded(state_only=False):
                if event.lease not in self._leases:
                    raise Violation(f"a lease ended that was not live: {event}")
                self._leases.remove(event.lease)
            case LeaseLeaked() if not self._leaks_allowed:
                raise Violation(f"a lease of {event.request!r} was lost without release")
            case Waited():
                self._waits_as_holder[event.request] = event.holder
            case Evicted():
                self.evicted["pages"] += event.pages
                self.evicted["states"] += event.states
            case Granted():
                self._granted.append(event.request)
            case RequestEnded() if self._core is not None and event.request in self._core.requests:
                raise Violation(f"a request ended and is still listed: {event}")
            case RuntimeStopped() if event.why != "closed":
                raise Violation(f"the runtime {event.why}")
            case _:
                pass

    def copy_event(self, now_ns: int, event: str, ticket: Ticket, layers: int) -> None:
        """The `on_event` of a virtual engine: a copy has ended, though nobody was told yet."""
        del now_ns, event, layers
        if ticket.done:
            self.places.copy_quiet(int(ticket.batch.label.rpartition(" ")[2]))

    # -- turns ---------------------------------------------------------------------------------

    def attach(self, core: Core) -> None:
        """Stand before and behind every handler of every actor."""
        self._core = core
        actors: tuple[TreeActor | AllocatorActor | TransferActor, ...] = (
            core.tree_actor,
            core.allocator,
            core.transfer,
        )
        for actor in actors:
            actor.handlers = {
                kind: self._watched(f"{actor.name} {kind.__name__}", handler)
                for kind, handler in actor.handlers.items()
            }

    def _watched(self, what: str, handler: Handler) -> Handler:
        def turn(message: object) -> object:
            core = self._core
            assert core is not None
            waiting = list(core.allocator.queue()) if core.ledger.waiting else []
            self._guard(self._before, what, message, core)
            try:
                return handler(message)
            finally:
                self._busy = ""
                self._guard(self._after, message, core, waiting)

        return turn

    def _guard(self, check: Callable[..., None], *args: object) -> None:
        try:
            check(*args)
        except Violation as error:
            self._fail(error)

    def _before(self, what: str, message: object, core: Core) -> None:
        self.turns[what] += 1
        if self._busy:
            raise Violation(f"turns nest: {what} inside {self._busy}")
        self._busy = what
        self._granted.clear()
        cause = core.domain.cause
        if cause:
            if cause < self._cause:
                raise Violation(f"{what}, sent by turn {cause}, comes after one of {self._cause}")
            if cause >= core.domain.turns:
                raise Violation(f"turn {core.domain.turns}, {what}, was sent by turn {cause}")
            self._cause = cause
        if isinstance(message, EvictExcessPathStates):
            self._capped_by = cause
        elif isinstance(message, FreeDeviceSlots) and cause == self._capped_by:
            raise Violation(f"duplicates of turn {cause} are freed after its cap was applied")
        elif isinstance(message, _COPIES):
            self._copies_asked += 1
        elif isinstance(message, m.Copied):
            self._copied += 1
            if self._copied > self._copies_asked:
                raise Violation(f"copy {message.op} is acknowledged more often than asked for")
        elif isinstance(message, m.Allocate):
            self._came_as_holder = message.owner in self._holding(core)
        elif isinstance(message, m.MakeRoom) and message.tell:
            self._asking += 1
            if self._asking != 1:
                raise Violation("two allocations ask the tree for room at once")
        elif isinstance(message, m.MadeRoom):
            self._asking -= 1
            if self._asking:
                raise Violation("an answer about room that nobody asked for")

    def _after(self, message: object, core: Core, before: list[m.Allocate]) -> None:
        domain = core.domain
        bound = core.config.queue_max + domain.unanswered + 8 * len(core.requests) + 64
        self.queue_max = max(self.queue_max, domain.queued)
        if domain.queued > bound:
            raise Violation(f"{domain.queued} messages are queued, bound {bound}")
        if before or core.ledger.waiting or core.allocator.waiting:
            self._check_order(message, core, before, list(core.allocator.queue()))

    # -- fairness ------------------------------------------------------------------------------

    def _check_order(
        self, message: object, core: Core, before: list[m.Allocate], after: list[m.Allocate]
    ) -> None:
        now = self._now_ns()
        for waiter in after:
            self._waiting_since.setdefault(waiter, now)
        left = [waiter for waiter in before if waiter not in after]
        for waiter in left:
            self.waits_ns.append(now - self._waiting_since.pop(waiter, now))
        stayed = [waiter for waiter in before if waiter in after]
        if stayed != [waiter for waiter in after if waiter in stayed]:
            raise Violation("allocations that wait have changed places")
        served = [waiter for waiter in left if waiter.owner in self._granted]
        if isinstance(message, m.Allocate) and message.owner in self._granted:
            served.append(message)
        waiting = [*before, message] if isinstance(message, m.Allocate) else before
        if not served or self._every_holder_waits(core, waiting):
            return
        for waiter in served:
            ahead = before
            if waiter in before:
                ahead = before[: before.index(waiter)]
            elif self._came_as_holder:  # in this turn; it goes before all newcomers
                ahead = [other for other in before if self._waits_as_holder.get(other.owner)]
            overtaken = [other for other in ahead if other in stayed]
            if overtaken:
                raise Violation(
                    f"allocation of {waiter.owner!r} was served before {overtaken[0].owner!r}'s"
                )

    def _every_holder_waits(self, core: Core, waiting: list[m.Allocate]) -> bool:
        names = {waiter.owner for waiter in waiting}
        # A grant of this very turn has made its owner a holder; it was waiting before.
        return self._holding(core) <= names

    def _holding(self, core: Core) -> set[str]:
        owners = {account.owner for account in core.ledger.accounts.values()}
        owners.update(lease.owner for lease in core.tree.leases.live.values() if lease.boundary)
        return owners

    # -- between turns -------------------------------------------------------------------------

    def at_step(self) -> None:
        """To be called between callbacks of the loop: the checks of a domain at rest."""
        core = self._core
        if core is None or core.domain.queued or core.stopped:
            return
        try:
            if core.allocator.waiting:
                self._nobody_waits_for_nothing(core)
            if core.domain.turns - self._audited_at >= self._audit_every:
                self._audited_at = core.domain.turns
                self.audit()
        except AssertionError as error:
            self._fail(error)

    def _nobody_waits_for_nothing(self, core: Core) -> None:
        head = next(core.allocator.queue(), None)
        if head is None:
            return
        kv, state, tree = core.ledger.kv, core.ledger.state, core.tree.figures()
        if (
            head.pages <= kv.free + tree.pages_evictable
            and head.states <= state.free + tree.states_evictable
        ):
            raise Violation(
                f"{head.owner!r} waits for {head.pages} pages and {head.states} states: "
                f"{kv.free} and {state.free} are free, {tree.pages_evictable} and "
                f"{tree.states_evictable} can go"
            )

    def audit(self) -> None:
        """Everything that must hold while the domain rests."""
        core = self._core
        assert core is not None
        self.audits += 1
        audit_tree(core.tree)
        core.ledger.audit()
        core.domain.audit()
        figures, kv, state = core.tree.figures(), core.ledger.kv, core.ledger.state
        assert figures.pages == kv.tree, f"{figures.pages} pages of the tree, ledger {kv.tree}"
        assert figures.states == state.tree, f"{figures.states} states, ledger {state.tree}"
        self.places.compare(core.ledger)
        live = set(core.tree.leases.live)
        if self._leases != live:
            raise Violation(f"leases {self._leases ^ live} differ by the events and live")
        if core.transfer.in_flight != self.places.copies:
            raise Violation(
                f"{core.transfer.in_flight} copies in flight, {self.places.copies} by the events"
            )
        open_copies = self._copies_asked - self._copied
        if open_copies != len(core.tree_actor.operations):
            raise Violation(
                f"{open_copies} copies are not acknowledged, the tree knows "
                f"{len(core.tree_actor.operations)}"
            )
        self._all_carried_out(core)

    def _all_carried_out(self, core: Core) -> None:
        for kind, where in ((FreeDeviceSlots, "allocator"), (EvictExcessPathStates, "tree")):
            emitted = core.tree_actor.counts.get(kind.__name__, 0)
            handled = self.turns[f"{where} {kind.__name__}"]
            if emitted != handled:
                raise Violation(f"{emitted} {kind.__name__} were emitted, {handled} carried out")

    def at_end(self) -> None:
        """Everybody has left and every fence has passed: only the tree owns anything."""
        core = self._core
        assert core is not None
        self.audit()
        kv, state = core.ledger.kv, core.ledger.state
        for pool in (kv, state):
            if pool.granted or pool.parked:
                owners = sorted({account.owner for account in core.ledger.accounts.values()})
                raise Violation(
                    f"{pool.component}: {pool.granted} granted (to {owners}) and {pool.parked} "
                    f"parked places are left at the end"
                )
        figures = core.tree.figures()
        if figures.leases or figures.pages_protected or figures.states_protected:
            owners = sorted(lease.owner for lease in core.tree.leases.live.values())
            raise Violation(f"leases are left at the end, of {owners}: {figures}")
        if core.requests or core.allocator.waiting or core.tree_actor.operations:
            raise Violation(
                f"{sorted(core.requests)} and {core.allocator.waiting} allocations are left"
            )

    def describe(self) -> Iterator[str]:
        """What waits inside the runtime, for the reader of a deadlock."""
        core = self._core
        if core is None:
            return
        domain = core.domain
        yield (
            f"domain: {domain.queued} messages queued, {domain.unanswered} answers owed, "
            f"{domain.callers_waiting} callers wait for room in the queue"
        )
        kv, state = core.ledger.kv, core.ledger.state
        for waiter in core.allocator.queue():
            yield (
                f"allocation of {waiter.owner!r}: {waiter.pages} of {kv.free} free pages "
                f"({kv.parked} parked), {waiter.states} of {state.free} free states "
                f"({state.parked} parked)"
            )
        for number in sorted(core.tree_actor.operations):
            yield f"copy {number} is not acknowledged"
