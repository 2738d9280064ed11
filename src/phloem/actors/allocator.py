"""The allocator of the device tier: grants, parking behind fences, and who waits for room.

Room is short in one joint demand over all pools, and the tree is asked for exactly that. Owners
that already hold something are served before newcomers, in order of arrival within each class;
while somebody waits, nobody of the same or a lower class overtakes. When every holder waits,
whoever fits is served, else the youngest holder is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from phloem.actors.actions import Component, FreeDeviceSlots, Ids, Reserve
from phloem.actors.domain import LATER, Actor, Domain, Handlers, Reply
from phloem.actors.ledger import Ledger
from phloem.actors.messages import (
    Allocate,
    GiveBack,
    MadeRoom,
    MakeRoom,
    MoveBorder,
    NotReserved,
    Reserved,
    Retry,
    Ripe,
    Withdraw,
)
from phloem.actors.refusals import pool_figures
from phloem.actors.view import TreeView
from phloem.actors.waiting import Waiter, WaitingLine
from phloem.cuda_streams.fences import Fence
from phloem.errors import InvalidRequest, NoRoom, PoolFigures, StaleHandle
from phloem.events import Freed, Granted, Parked, Refused, Sink, Waited

__all__ = ["AllocatorActor", "Grant"]


class Grant(msgspec.Struct, eq=False, gc=False):
    """Pages and state slots reserved for an owner, not yet in the tree.

    `pages` and `states` are ids as granted, `spans` those of each span component; what was inserted
    since is the tree's. Give the rest back with `release`, once.
    """

    ledger: Ledger
    account: int
    owner: str
    pages: Ids
    states: Ids
    released: bool = False
    spans: tuple[Ids, ...] = ()

    def __repr__(self) -> str:
        return f"Grant({self.account}, owner={self.owner!r}, {len(self.pages)} pages)"


class AllocatorActor:
    """One allocator for one tier. Only it takes from the pools and gives back to them."""

    name = "allocator"

    def __init__(
        self, domain: Domain, ledger: Ledger, view: TreeView, emit: Sink | None = None
    ) -> None:
        self._domain = domain
        self._ledger = ledger
        self._view = view
        self._emit = emit
        self._tree: Actor | None = None
        self._line = WaitingLine()
        self._asking: Waiter | None = None  # for whom the tree is making room
        self._moved = False  # something has changed since it was asked
        self.handlers: Handlers = {
            Allocate: self._on_allocate,
            FreeDeviceSlots: self._on_free,
            GiveBack: self._on_give_back,
            MadeRoom: self._on_made_room,
            Retry: self._on_retry,
            Ripe: self._on_ripe,
            Reserve: self._on_reserve,
            Withdraw: self._on_withdraw,
        }

    def connect(self, tree: Actor) -> None:
        """Say who is asked for room."""
        self._tree = tree

    @property
    def waiting(self) -> int:
        """Allocations that wait."""
        return len(self._line)

    def queue(self) -> Iterator[Allocate]:
        """The allocations that wait and whose callers are still there, in the order of service."""
        for waiter in self._line.all():
            yield waiter.message

    # -- granting ------------------------------------------------------------------------------

    def _on_allocate(self, message: Allocate) -> object:
        pages, states, spans = message.pages, message.states, message.spans
        if pages < 0 or states < 0 or (spans and min(spans) < 0):
            raise InvalidRequest(f"allocate of {pages} pages, {states} states, spans {spans}")
        ledger = self._ledger
        if not pages and not states and not any(spans):
            none: Ids = array("i")  # nothing opens no account: nobody would ever close it
            return Grant(ledger, message.account, message.owner, none, none[:])
        ahead = self._line.holders or self._line.newcomers
        fits = not ahead and ledger.fits(pages, states, last=not message.evict)
        if fits and not spans:
            return self._grant(message, self._domain.turns)
        if not ledger.ever_fits(pages, states) or (spans and not ledger.spans_ever_fit(spans)):
            raise self._no_room(message)
        if fits and not any(ledger.spans_short(spans)):
            return self._grant(message, self._domain.turns)
        if not message.evict:
            raise self._no_room(message)
        holder = self._is_holder(message)
        reply = self._domain.later()
        waiter = Waiter(message, reply, holder, self._domain.turns, self._domain.context)
        self._line.join(waiter)
        reply.on_abandoned = partial(self._left, waiter)
        self._pump()
        if not reply.done and message.wait and self._emit is not None:
            self._emit(
                Waited(
                    turn=waiter.asked,
                    context=waiter.context,
                    request=message.owner,
                    pages=pages,
                    states=states,
                    holder=holder,
                    spans=spans,
                )
            )
        return LATER

    def _on_reserve(self, action: Reserve) -> None:
        """Room for an operation of the tree, which never waits behind anybody.

        It waits only for what leaves the device already: whoever computes its data instead would
        need the same room.
        """
        domain, ledger = self._domain, self._ledger
        message = Allocate(action.pages, action.states, f"op {action.op}")
        assert self._tree is not None
        too_much = not ledger.ever_fits(action.pages, action.states) or (
            action.idle and not ledger.fits(action.pages, action.states)
        )
        if too_much or self._line:
            domain.send(self._tree, NotReserved(action.op))
            return
        waiter = Waiter(
            message, Reply(), False, domain.turns, domain.context, action.op, action.wait
        )
        self._line.join(waiter)
        self._pump()

    def _fits(self, waiter: Waiter) -> bool:
        message, ledger = waiter.message, self._ledger
        fits = ledger.fits(message.pages, message.states, last=waiter.tried)
        return fits and not (message.spans and any(ledger.spans_short(message.spans)))

    def _grant(self, message: Allocate, asked: int) -> Grant:
        account, pages, states = self._ledger.grant(
            message.pages, message.states, message.owner, message.account
        )
        spans = self._ledger.grant_spans(account, message.spans) if message.spans else ()
        if states and self._ledger.ask_for_spare():
            assert self._tree is not None
            self._domain.send(self._tree, MoveBorder())
        if self._emit is not None:
            self._emit(
                Granted(
                    **self._domain.joins(),
                    request=message.owner,
                    account=account,
                    pages=pages.tolist(),
                    states=states.tolist(),
                    asked=asked,
                    spans=self._by_component(spans),
                )
            )
        return Grant(self._ledger, account, message.owner, pages, states, False, spans)

    def _by_component(self, spans: Sequence[Ids]) -> dict[str, list[int]]:
        """The pages of span components by the component's name, as events have them."""
        pools = self._ledger.spans
        return {pool.component: ids.tolist() for pool, ids in zip(pools, spans, strict=False)}

    def _is_holder(self, message: Allocate) -> bool:
        ledger = self._ledger
        return (
            message.account in ledger.accounts
            or message.owner in ledger.owners
            or message.owner in self._view.lease_owners
        )

    def _holding(self) -> set[str]:
        """The owners that hold places outside the tree, or a lease on data in it."""
        return {*self._ledger.owners, *self._view.lease_owners}

    # -- waiting -------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Serve those who wait, in order, until the first one who cannot be served."""
        while self._asking is None:
            waiter = self._line.head()
            if waiter is None:
                break
            if self._fits(waiter):
                self._serve(waiter)
            elif not waiter.tried:
                self._ask(waiter)
            elif waiter.patient and self._is_promised(waiter.message):
                self._refuse_impatient(behind=waiter)
                break
            elif not waiter.message.wait:
                self._refuse(waiter)
            elif not self._break_deadlock():
                self._refuse_impatient(behind=waiter)
                break
        self._ledger.waiting = len(self._line)

    def _refuse_impatient(self, behind: Waiter) -> None:
        """Refuse now all callers in line, but `behind`, that asked not to wait."""
        for other in self._line.all():
            if other is not behind and not other.message.wait:
                self._refuse(other)

    def _is_promised(self, message: Allocate) -> bool:
        """Whether the copies in flight will free what is short."""
        ledger, tree = self._ledger, self._view.figures()
        return (
            message.pages <= ledger.kv.free + tree.pages_leaving
            and message.states <= ledger.state.free + tree.states_leaving
        )

    def _serve(self, waiter: Waiter) -> None:
        self._line.leave(waiter)
        others, self._domain.context = self._domain.context, waiter.context
        grant = self._grant(waiter.message, waiter.asked)
        if waiter.op:
            assert self._tree is not None
            reserved = Reserved(waiter.op, grant.account, grant.pages, grant.states)
            self._domain.send(self._tree, reserved)
        else:
            self._domain.complete(waiter.reply, grant)
        self._domain.context = others
        self._untry()  # what it took may be missing to those behind it now

    def _refuse(self, waiter: Waiter, *, deadlock: bool = False) -> None:
        self._line.leave(waiter)
        others, self._domain.context = self._domain.context, waiter.context
        error = self._no_room(waiter.message, deadlock=deadlock, asked=waiter.asked)
        if waiter.op:
            assert self._tree is not None
            self._domain.send(self._tree, NotReserved(waiter.op))
        else:
            self._domain.fail(waiter.reply, error)
        self._domain.context = others

    def _ask(self, waiter: Waiter) -> None:
        assert self._tree is not None
        waiter.tried = True
        self._asking = waiter
        message = waiter.message
        short = self._ledger.short_of(message.pages, message.states)
        spans = self._ledger.spans_short(message.spans) if message.spans else ()
        room = MakeRoom(*short, message.owner, True, spans)
        self._domain.send(self._tree, room, waiter.context)

    def _on_made_room(self, message: MadeRoom) -> None:
        del message
        self._asking = None
        if self._moved:
            self._untry()
        self._pump()

    def _on_retry(self, message: Retry) -> None:
        del message
        self._changed()

    def _changed(self) -> None:
        """Try again for the line: places became free, or the tree may be able to help now."""
        if self._asking is not None:
            self._moved = True  # the tree's answer is on its way, and with it comes a look around
        elif self._line:
            self._untry()
            self._pump()

    def _untry(self) -> None:
        """Let the tree be asked again for each in line, also for the one it was last asked for."""
        self._moved = False
        self._line.untry()

    def _on_withdraw(self, message: Withdraw) -> None:
        for waiter in self._line.all():
            if waiter.message.owner == message.owner:
                self._line.leave(waiter)
                self._tell_refused(waiter, "ended")
                ended = StaleHandle(
                    f"{message.owner!r} ended or was suspended while it waited for room"
                )
                self._domain.fail(waiter.reply, ended)
        self._changed()

    def _left(self, waiter: Waiter) -> None:
        """A waiter has left, cancelled or out of time, which may let the next one go on."""
        self._tell_refused(waiter, "left")
        self._line.leave(waiter)
        self._ledger.waiting = len(self._line)
        if self._domain.stopped is None:
            self._domain.send(self, Retry())

    def _break_deadlock(self) -> bool:
        """When every holder waits: serve whoever fits, else refuse the youngest holder."""
        ledger = self._ledger
        if any(pool.parked for pool in ledger.pools) or self._view.sweeping():
            return False
        waiters = [waiter for waiter in self._line.all() if waiter.message.wait]
        holding = self._holding()
        waiting = {waiter.message.owner for waiter in waiters}.union(self._view.joiners())
        if "" in holding or not holding <= waiting:
            return False  # somebody may give back; who gave no name may be anybody
        for waiter in waiters:
            if self._fits(waiter):
                self._serve(waiter)
                return True
        for waiter in waiters:
            if not waiter.tried:
                self._ask(waiter)
                return True
        youngest = next((w for w in reversed(waiters) if w.holder), waiters[-1])
        self._refuse(youngest, deadlock=True)
        return True

    def _no_room(self, message: Allocate, *, deadlock: bool = False, asked: int = 0) -> NoRoom:
        figures = self.figures(message.pages, message.states, message.spans)
        error = NoRoom(figures, deadlock=deadlock)
        if self._emit is not None:
            self._emit(
                Refused(
                    **self._domain.joins(),
                    request=message.owner,
                    what="room",
                    why="deadlock" if deadlock else "no_room",
                    detail=str(error),
                    asked=asked or self._domain.turns,
                )
            )
        return error

    def _tell_refused(self, waiter: Waiter, why: str) -> None:
        if self._emit is not None and waiter.message.wait:
            self._emit(
                Refused(
                    turn=self._domain.turns,
                    context=waiter.context,
                    request=waiter.message.owner,
                    what="room",
                    why=why,
                    asked=waiter.asked,
                )
            )

    def figures(
        self, pages: int, states: int, spans: Sequence[int] = ()
    ) -> tuple[PoolFigures, ...]:
        """The pools as a refusal of `pages`, `states` and pages of span components reports them."""
        asked = (pages, states, *spans)
        return pool_figures(asked, self._ledger, self._view.figures(), self._view.arriving())

    # -- giving back ---------------------------------------------------------------------------

    def _on_free(self, action: FreeDeviceSlots) -> None:
        ledger, owner, ids = self._ledger, action.owner, action.ids
        if owner > 0:
            component, none = action.component, ids[:0]
            self._take_back(
                owner,
                ids if component == "kv" else none,
                ids if component == "state" else none,
                ledger.accounts[owner].fences,
                self._span_ids(component, ids) if component not in ("kv", "state") else (),
            )
        else:
            ledger.pool(action.component).give(ids, owner)
            if self._emit is not None:
                self._freed(action.component, ids, owner)
        if ledger.waiting:
            self._changed()

    def _on_give_back(self, message: GiveBack) -> None:
        ledger = self._ledger
        if message.account not in ledger.accounts:
            raise StaleHandle(f"account {message.account} is closed")
        ledger.kv.check(message.pages, message.account)
        ledger.state.check(message.states, message.account)
        for pool, ids in zip(ledger.spans, message.spans, strict=False):
            pool.check(ids, message.account)
        self._take_back(
            message.account, message.pages, message.states, message.after, message.spans
        )
        if ledger.waiting:
            self._changed()

    def _span_ids(self, component: Component, ids: Ids) -> tuple[Ids, ...]:
        """`ids` in the place of their span component."""
        pools = self._ledger.spans
        return tuple(ids if pool.component == component else ids[:0] for pool in pools)

    def _take_back(
        self,
        account: int,
        pages: Ids,
        states: Ids,
        after: tuple[Fence, ...],
        spans: tuple[Ids, ...] = (),
    ) -> None:
        ledger = self._ledger
        pending = [fence for fence in after if not fence.passed] if after else None
        if pending:
            ledger.kv.park(pages, account)
            ledger.state.park(states, account)
            for pool, ids in zip(ledger.spans, spans, strict=False):
                pool.park(ids, account)
            self._await_fences(pending, Ripe(pages, states, spans))
            if self._emit is not None:
                self._emit(
                    Parked(
                        **self._domain.joins(),
                        request=ledger.accounts[account].owner,
                        pages=pages.tolist(),
                        states=states.tolist(),
                        owner=account,
                        spans=self._by_component(spans),
                    )
                )
        else:
            if pages:
                ledger.kv.give(pages, account)
                self._freed("kv", pages, account)
            if states:
                ledger.state.give(states, account)
                self._freed("state", states, account)
            for pool, ids in zip(ledger.spans, spans, strict=False):
                pool.give(ids, account)
                self._freed(pool.component, ids, account)
        ledger.left(account, len(pages), len(states), sum(map(len, spans)) if spans else 0)

    def _await_fences(self, fences: list[Fence], ripe: Ripe) -> None:
        left, context = len(fences), self._domain.context

        def one_passed() -> None:
            nonlocal left
            left -= 1
            if not left and self._domain.stopped is None:
                self._domain.send(self, ripe, context)

        for fence in fences:
            fence.add_callback(one_passed)

    def _on_ripe(self, message: Ripe) -> None:
        self._ledger.kv.unpark(message.pages)
        self._ledger.state.unpark(message.states)
        self._freed("kv", message.pages, -2)
        self._freed("state", message.states, -2)
        for pool, ids in zip(self._ledger.spans, message.spans, strict=False):
            pool.unpark(ids)
            self._freed(pool.component, ids, -2)
        self._changed()

    def _freed(self, component: str, ids: Ids, owner: int) -> None:
        if self._emit is not None and ids:
            self._emit(
                Freed(
                    **self._domain.joins(),
                    component=component,
                    ids=ids.tolist(),
                    owner=owner,
                )
            )
