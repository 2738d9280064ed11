"""What the tree actor does about the host tier.

The tree plans loads and backups; this carries the answers back and forth: reservations that were
granted or refused, copies that have ended, and requests that wait for a load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import structs

from phloem.actors import messages as m
from phloem.actors.actions import TREE, Action, LoadToDevice, Reserve
from phloem.actors.domain import LATER, Actor, Domain, Handlers, Reply
from phloem.actors.ledger import Ledger
from phloem.actors.telling import Teller
from phloem.actors.tree.choosing import Ahead, Costs, alternatives, cheapest
from phloem.actors.tree.core import Actions
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.results import Ended, Kept, Match
from phloem.actors.tree.tree import Tree
from phloem.errors import CacheReset, CopyCancelled, CopyFailed, EngineDead

__all__ = ["CLOSED_MS", "FAILURES_MAX", "Tiering", "standing_on"]

FAILURES_MAX = 3  # so many copies in a row that fail or take too long close the tier ...
CLOSED_MS = 30_000  # ... for so long


class Tiering:
    """The host tier's part of a tree actor. Everything here runs in turns of the domain."""

    def __init__(
        self,
        domain: Domain,
        tree: Tree,
        device: Ledger,
        host: Ledger,
        dispatch: Callable[[Actions], None],
        tree_actor: Actor,
        let_waiters_retry: Callable[[], None],
        tell: Teller | None = None,
        clock: Callable[[], int] = lambda: 0,
    ) -> None:
        self.closed = ""  # why the tier is left alone, if it is
        self._failures = 0  # in a row
        self._opens_at: int | None = None
        self._clock = clock  # milliseconds
        self._given_up: set[int] = set()  # operations whose copies take too long
        self._idle: set[int] = set()  # loads for which nobody waits
        self._tell = tell
        self._let_waiters_retry = let_waiters_retry
        self._tree_actor = tree_actor
        self._domain = domain
        self._tree = tree
        self._ledgers = {"device": device, "host": host}
        self._dispatch = dispatch
        self._host_allocator: Actor | None = None
        self._transfer: Actor | None = None
        self._costs: Costs | None = None  # None: what the host has is loaded
        # By operation: leases whose holders are answered when it is known whether there is room.
        self._answers: dict[int, list[tuple[Lease, Match, Reply]]] = {}
        self._loading: dict[int, list[Reply]] = {}  # by lease: who waits for its load
        self.handlers: Handlers = {
            m.Reserved: self._on_reserved,
            m.NotReserved: self._on_not_reserved,
            m.MakeHostRoom: self._on_make_host_room,
            m.AwaitLoad: self._on_await_load,
        }

    def connect(self, host_allocator: Actor, transfer: Actor) -> None:
        """Say who gives room on the host, and who copies."""
        self._host_allocator = host_allocator
        self._transfer = transfer

    @property
    def host_ledger(self) -> Ledger:
        """The ledger of the host's pools."""
        return self._ledgers["host"]

    # -- plans ---------------------------------------------------------------------------------

    def weigh_by(self, costs: Costs) -> None:
        """Plan loads, from now on, only where they are the cheapest way to the data."""
        self._costs = costs

    def choose(self, lease: Lease, match: Match, *, may_wait: bool) -> Match:
        """Give up a load that takes longer than it saves, and say what was weighed.

        `may_wait`: the holder is going to wait for who computes what it needs. The lease stands on
        what the chosen way reuses at once.
        """
        if self._costs is None or not match.host:
            return match
        loads = self._tree.loadable(lease)
        if not loads:
            return match
        found = self._tree.running.leader_of(lease)
        ahead = None if found is None else Ahead(found[0].anchor.end, found[1])
        if ahead is not None and ahead.until <= lease.boundary:
            ahead = None
        ways = alternatives(match.device, match.looked_up, loads, ahead, self._costs)
        best = cheapest(ways, may_wait=may_wait)
        if best is None:
            return match
        usable, tier = best.boundary, match.state_tier
        if best.way != "load":
            usable, tier = match.device, "device" if match.device and tier else ""
        if usable < lease.boundary:
            self._tree.settle(lease, usable)
        if usable < match.usable:
            not_loaded = match.not_loaded + match.usable - usable
            why_not = "arriving" if best.way == "wait" else "dearer"
            match = structs.replace(match, not_loaded=not_loaded, why_not=why_not)
        return structs.replace(match, usable=usable, state_tier=tier, alternatives=ways)

    def answer(
        self, lease: Lease, match: Match, *, wait: bool = True, idle: bool = False
    ) -> object:
        """Plan what a lease just taken leads to, and answer its caller when room is certain.

        Who does not `wait` is answered in this drain: a load of its own is refused rather than
        wait for room, and of one that waits for others it is not known whether it gets any.
        `idle`: a load of its own is refused rather than have anything evicted.
        """
        number, actions = self._tree.plan(lease)
        if not wait:
            actions = [_at_once(action, idle=idle) for action in actions]
        if idle and any(isinstance(a, Reserve) and a.tier == "device" for a in actions):
            self._idle.add(number)
        elif not idle and self._idle:
            self._hasten(lease)
        self._dispatch(actions)
        self.look_again()
        operation = self._tree.operations.live.get(number)
        if operation is None or operation.phase != "planned":
            return lease, standing_on(lease, match)
        if not wait and not any(isinstance(a, Reserve) and a.op == number for a in actions):
            return lease, match
        reply = self._domain.later()
        tree_actor = self._tree_actor
        reply.on_abandoned = lambda: self._domain.send(tree_actor, m.Release(lease))
        self._answers.setdefault(number, []).append((lease, match, reply))
        return LATER

    def _hasten(self, lease: Lease) -> None:
        """Make loads that were planned with `idle` urgent, now that `lease` waits for them."""
        assert self._transfer is not None
        for number in self._idle.intersection(self._tree.loads_of(lease)):
            self._idle.discard(number)
            self._domain.send(self._transfer, m.Hasten(number))

    def look_again(self) -> None:
        """Let allocations retry if room that was promised to them will not come.

        That is so when a lease just taken needs what was leaving.
        """
        host = self._tree.host
        if host is not None and host.stayed:
            host.stayed = False
            self._let_waiters_retry()

    def _answer_all(self, number: int) -> None:
        for lease, match, reply in self._answers.pop(number, ()):
            if not reply.done and not reply.abandoned:
                self._domain.complete(reply, (lease, standing_on(lease, match)))

    # -- operations ----------------------------------------------------------------------------

    def _on_reserved(self, message: m.Reserved) -> None:
        actions = self._tree.reserved(message.op, message.account, message.pages, message.states)
        if message.op in self._idle:
            actions = [
                structs.replace(action, idle=True) if isinstance(action, LoadToDevice) else action
                for action in actions
            ]
        self._dispatch(actions)
        self._answer_all(message.op)

    def _on_not_reserved(self, message: m.NotReserved) -> None:
        self._idle.discard(message.op)
        ended, actions = self._tree.not_reserved(message.op)
        self._ended(ended, actions, "no_room")
        if ended.moved:  # what their leases protected may go
            self._let_waiters_retry()
        self._answer_all(message.op)

    def copied(self, message: m.Copied) -> None:
        """The copy of an operation has ended."""
        error = message.error
        late = message.op in self._given_up
        self._idle.discard(message.op)
        self._given_up.discard(message.op)
        rows_ok = error.rows_ok if isinstance(error, CopyFailed) else 0
        ended, actions = self._tree.copied(message.op, error is None, pages_ok=rows_ok)
        self._ended(ended, actions, "copy_failed")
        if not late and not isinstance(error, CopyCancelled):
            self._went(well=error is None, for_good=isinstance(error, EngineDead))
        self._let_waiters_retry()

    def timed_out(self, message: m.TimedOut) -> None:
        """The copy of an operation takes too long: nobody waits for it any longer."""
        if message.op not in self._tree.operations.live:
            return  # it has ended meanwhile
        ended, actions = self._tree.give_up(message.op)
        self._given_up.add(message.op)
        self._ended(ended, actions, "timed_out")
        self._went(well=False)
        self._let_waiters_retry()

    def _went(self, *, well: bool, for_good: bool = False) -> None:
        """A copy has ended. The tier is closed after several in a row that have not ended well."""
        self._failures = 0 if well else self._failures + 1
        if self.closed or (self._failures < FAILURES_MAX and not for_good):
            return
        self.closed = "the device is lost" if for_good else f"{FAILURES_MAX} copies in a row failed"
        self._opens_at = None if for_good else self._clock() + CLOSED_MS
        ended, actions = self._tree.close_host(True)
        self._tell_tier()
        self._ended(ended, actions, "tier_failed")

    def look_at_clock(self) -> None:
        """Try a closed tier again when its time has come; one more failure closes it again."""
        if self.closed and self._opens_at is not None and self._clock() >= self._opens_at:
            self.closed = ""
            self._failures = FAILURES_MAX - 1
            self._tree.close_host(False)
            self._tell_tier()

    def _tell_tier(self) -> None:
        if self._tell is not None:
            self._tell.tier_changed("host", self.closed)

    def _ended(self, ended: Ended, actions: Actions, why_not: str) -> None:
        for kept in ended.kept:
            self._keep(kept)
        if self._tell is not None:
            self._tell.operation_ended(why_not)
        self._dispatch(actions)
        for number in ended.operations:
            self._answer_all(number)
        for number in (*ended.ready, *ended.moved):
            self._wake(number)

    def _keep(self, kept: Kept) -> None:
        ledger, count = self._ledgers[kept.tier], len(kept.ids)
        kv = kept.component == "kv"
        ledger.pool(kept.component).move(kept.ids, kept.account, TREE)
        ledger.left(kept.account, count if kv else 0, 0 if kv else count)
        if self._tell is not None:
            self._tell.kept(kept)

    def _on_make_host_room(self, message: m.MakeHostRoom) -> None:
        assert self._host_allocator is not None
        figures = self._tree.figures()
        if (
            message.pages <= figures.host_pages_evictable
            and message.states <= figures.host_states_evictable
        ):
            by = f"op {message.op}"
            gone, actions = self._tree.evict_host(message.pages, message.states, by)
            if self._tell is not None:
                self._tell.evicted(gone, "room", by, "host")
            self._dispatch(actions)
        self._domain.send(self._host_allocator, m.MadeHostRoom())

    # -- loads ---------------------------------------------------------------------------------

    def _on_await_load(self, message: m.AwaitLoad) -> object:
        lease = message.lease
        if not lease.load:
            return None
        reply = self._domain.later()
        waiting = self._loading.setdefault(lease.id, [])
        waiting.append(reply)
        reply.on_abandoned = partial(waiting.remove, reply)
        return LATER

    def _wake(self, number: int) -> None:
        lease = self._tree.leases.live.get(number)
        if lease is not None and lease.load:
            return  # it waits for another load now
        self.let_go(number)

    def let_go(self, number: int) -> None:
        """Answer all who wait for the load of lease `number`: it has ended, well or not."""
        for reply in self._loading.pop(number, ()):
            if not reply.done and not reply.abandoned:
                self._domain.complete(reply, None)

    def let_all_go(self) -> None:
        """After a reset: answer all who wait for a load, and release leases just taken.

        Callers whose lease was not handed out yet get `CacheReset`.
        """
        for number in list(self._loading):
            self.let_go(number)
        answers, self._answers = self._answers, {}
        for lease, _, reply in [one for waiting in answers.values() for one in waiting]:
            if not reply.done and not reply.abandoned:
                self._domain.send(self._tree_actor, m.Release(lease))
                reset = CacheReset(f"the cache was reset while {lease.owner!r} waited for a load")
                self._domain.fail(reply, reset)


def _at_once(action: Action, *, idle: bool) -> Action:
    if not isinstance(action, Reserve):
        return action
    return structs.replace(action, wait=False, idle=idle and action.tier == "device")


def standing_on(lease: Lease, match: Match) -> Match:
    """`match`, lowered to the lease's boundary where that could not be loaded as deep as found."""
    if lease.boundary >= match.usable:
        return match
    boundary = lease.boundary
    tier = "device" if boundary else ""
    return structs.replace(
        match,
        usable=boundary,
        device=min(match.device, boundary),
        state_tier=tier,
        not_loaded=match.not_loaded + match.usable - boundary,
        why_not=lease.why_not or "tier_failed",
    )
