"""Everything that is checked while a runtime runs, apart from the runtime's own code.

* Ownership: `places`, rebuilt from events and compared with the live ledgers of both tiers.
* Bytes: `model`. Whatever a step reads holds the tags that the tokens before it call for; at the
  end, whatever the tree has, on the device and on the host, does.
* Order, actions and acknowledgements: `protocol`.
* Fairness: `fairness`; nobody waits for ever, since a run that stands still is an error.
* History: the tree, leases and pools as rebuilt from the event log are those that live.
* Reasons: every token of a prompt is reused or lost for a reason.
* Bounds: queues stay within what was promised.
* The runtime's own audit, and at the end: nothing is owned by anybody who has left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import msgspec

from phloem.actors import messages as m
from phloem.actors.allocator import AllocatorActor
from phloem.actors.host_allocator import HostAllocatorActor
from phloem.actors.ledger import Ledger
from phloem.actors.transfer import TransferActor
from phloem.actors.tree.actor import TreeActor
from phloem.actors.tree.audit import audit_tree
from phloem.cuda_streams.engine import Ticket
from phloem.errors import InvalidRequest
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
from phloem.runtime.observe.history import History
from phloem.runtime.observe.state import live_state
from phloem.runtime.simulation.fairness import Fairness
from phloem.runtime.simulation.model import Violation
from phloem.runtime.simulation.places import Places
from phloem.runtime.simulation.protocol import Protocol
from phloem.runtime.simulation.reasons import Reasons

__all__ = ["EventLog", "Watch"]

Handler = Callable[..., object]

_NODES = 10  # a tree of so many nodes is audited half as often as a small one, and so on
_TURNS = 256  # but no tree makes audits rarer than one in so many turns
_TURNS_MAX = 100_000  # in one step of the loop
_AUDITS = 16  # every so many audits the history is compared, too


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
    passed and the domain rests, more where the tree is large (an audit looks at every node).
    `leaks_allowed`: leases that are collected unreleased are a fault
    that was asked for. `at_last` is one more check of the end.
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
        self.reasons = Reasons()
        self.protocol = Protocol(self.places)
        self.fairness = Fairness(now_ns)
        self.audits = 0
        self.evicted: Counter[str] = Counter()  # pages, states
        self.queue_max = 0  # messages queued at once
        self.tokens_loaded = 0  # from the host, known at the end
        self.at_last: list[Callable[[Core], None]] = []
        self._log = log
        self._now_ns = now_ns
        self._fail = fail
        self._audit_every = audit_every
        self._leaks_allowed = leaks_allowed
        self._history = History()
        self._core: Core | None = None
        self._audited_at = 0
        self._turns = 0  # within the current step of the loop
        self._leases: set[int] = set()

    # -- events --------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """The sink."""
        now_ns = self._now_ns()
        self._log.add(now_ns, event)
        try:
            self.places(event)
            self.reasons(event)
            self._note(event)
            self._history.add(now_ns / 1e9, event)
        except Violation as error:
            self._fail(error)
        except InvalidRequest as error:
            self._fail(Violation(f"the log contradicts itself: {error}"))

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
                self.fairness.waits(event.request, holder=event.holder)
            case Evicted():
                where = "host " if event.tier == "host" else ""
                self.evicted[f"{where}pages"] += event.pages
                self.evicted[f"{where}states"] += event.states
            case Granted(tier="device"):
                self.fairness.granted(event.request)
            case RequestEnded():
                self.fairness.left(event.request)
                self.protocol.left(event.request)
                if self._core is not None and event.request in self._core.requests:
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
        actors: list[TreeActor | AllocatorActor | TransferActor | HostAllocatorActor] = [
            core.tree_actor,
            core.allocator,
            core.transfer,
        ]
        if core.host_allocator is not None:
            actors.append(core.host_allocator)
        for actor in actors:
            grants = actor is core.allocator
            actor.handlers = {
                kind: self._watched(f"{actor.name} {kind.__name__}", handler, core, grants=grants)
                for kind, handler in actor.handlers.items()
            }

    def _watched(self, what: str, handler: Handler, core: Core, *, grants: bool) -> Handler:
        """`grants`: in these turns allocations are served."""
        protocol, fairness = self.protocol, self.fairness

        def turn(message: object) -> object:
            self._turns += 1
            if self._turns > _TURNS_MAX:  # the loop's own limit is of no use inside of a step
                raise Violation(f"no end of turns within one step of the loop, now {what}")
            waiting: list[m.Allocate] = []
            try:
                if grants:
                    waiting = fairness.begin(message, core)
                protocol.begin(what, message, core)
            except Violation as error:
                self._fail(error)
            try:
                return handler(message)
            finally:
                protocol.end()
                try:
                    self._check_bound(core)
                    if grants:
                        fairness.end(message, core, waiting)
                except Violation as error:
                    self._fail(error)

        return turn

    def _check_bound(self, core: Core) -> None:
        domain = core.domain
        queued = domain.queued
        if queued <= self.queue_max:
            return
        bound = core.config.queue_max + domain.unanswered + 8 * len(core.requests) + 64
        bound += 4 * len(core.tree.operations)
        self.queue_max = queued
        if queued > bound:
            raise Violation(f"{queued} messages are queued, bound {bound}")

    # -- between turns -------------------------------------------------------------------------

    def at_step(self) -> None:
        """To be called between callbacks of the loop: the checks of a domain at rest."""
        core = self._core
        self._turns = 0
        if core is None or core.domain.queued or core.stopped:
            return
        try:
            if core.allocator.waiting:
                self.fairness.at_rest(core, self.protocol.backup_refused)
            every = self._audit_every
            patience = min(every * (1 + core.tree.radix.nodes // _NODES), max(every, _TURNS))
            if core.domain.turns - self._audited_at >= patience:
                self._audited_at = core.domain.turns
                self.audit()
        except AssertionError as error:
            self._fail(error)

    def audit(self) -> None:
        """Everything that must hold while the domain rests."""
        core = self._core
        assert core is not None
        self.audits += 1
        audit_tree(core.tree)
        core.domain.audit()
        figures, host = core.tree.figures(), core.host_ledger
        _audit_ledger(core.ledger, figures.pages, figures.states)
        for span, pool in zip(figures.spans, core.ledger.spans, strict=True):
            assert span.pages == pool.tree, f"{span.pages} {span.component} pages, {pool.tree}"
        self.places.device.compare(core.ledger)
        if host is not None:
            _audit_ledger(host, figures.host_pages, figures.host_states)
            self.places.host.compare(host)
        own = {operation.hold.id for operation in core.tree.operations if operation.hold}
        live = core.tree.leases.live.keys() - own
        if self._leases != live:
            raise Violation(f"leases {self._leases ^ live} differ by the events and live")
        if core.transfer.in_flight != self.places.copies:
            raise Violation(
                f"{core.transfer.in_flight} copies in flight, {self.places.copies} by the events"
            )
        self.protocol.at_rest(core)
        if self.audits % _AUDITS == 0:
            self.check_history(whole=False)

    def check_history(self, *, whole: bool = True) -> None:
        """The state as rebuilt from the event log is the live one.

        Not `whole`: a request that has been opened need not be listed, for its caller may not have
        heard of it.
        """
        core = self._core
        assert core is not None
        rebuilt, live = self._history.state(), live_state(core)
        for name in live.__struct_fields__:
            said, found = getattr(rebuilt, name), getattr(live, name)
            if name == "requests" and not whole:
                said = [request for request in said if request in core.requests]
            if said != found:
                raise Violation(f"{name} by the event log: {said}, live: {found}")

    def at_end(self) -> None:
        """Everybody has left and every fence has passed: only the tree owns anything."""
        core = self._core
        assert core is not None
        self.tokens_loaded = core.tokens_loaded
        self.audit()
        self.check_history()
        for ledger in (core.ledger, core.host_ledger):
            if ledger is not None:
                _check_nothing_owned(ledger)
        figures = core.tree.figures()
        if figures.leases or figures.pages_protected or figures.states_protected:
            owners = sorted(lease.owner for lease in core.tree.leases.live.values())
            raise Violation(f"leases are left at the end, of {owners}: {figures}")
        if core.requests or core.allocator.waiting:
            raise Violation(
                f"{sorted(core.requests)} and {core.allocator.waiting} allocations are left"
            )
        if core.tree_actor.operations or core.tree.operations.live:
            raise Violation(f"operations are left at the end: {list(core.tree.operations)}")
        for check in self.at_last:
            check(core)

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
        for operation in core.tree.operations:
            yield f"{operation!r} has not ended; {len(operation.waiters)} requests wait for it"


def _audit_ledger(ledger: Ledger, pages: int, states: int) -> None:
    ledger.audit()
    assert pages == ledger.kv.tree, f"{pages} pages of the tree, ledger {ledger.kv.tree}"
    assert states == ledger.state.tree, f"{states} states, ledger {ledger.state.tree}"


def _check_nothing_owned(ledger: Ledger) -> None:
    for pool in ledger.pools:
        if pool.granted or pool.parked:
            owners = sorted({account.owner for account in ledger.accounts.values()})
            raise Violation(
                f"{pool.component}: {pool.granted} granted (to {owners}) and {pool.parked} "
                f"parked places are left at the end"
            )
