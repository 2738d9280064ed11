"""The transfer actor: carries out copies on its engine and tells the tree when they have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from phloem.actors.actions import BackupToHost, ClearState, CopyState, LoadToDevice, Places
from phloem.actors.domain import LATER, Actor, Domain, Handlers
from phloem.actors.messages import (
    AwaitFences,
    Copied,
    CopyAfter,
    Hasten,
    StateWritten,
    TimedOut,
    Written,
)
from phloem.cuda_streams.dispatch import waited_for
from phloem.cuda_streams.engine import (
    Channel,
    Clear,
    Copy,
    CopyBatch,
    CopyEngine,
    CopyItem,
    Fence,
    Ticket,
)
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.rows import RowPool
from phloem.errors import EngineDead, RuntimeClosed
from phloem.events import Context, CopyEnded, CopySubmitted, Sink

__all__ = ["Timer", "TransferActor", "Watchdog"]


_BULK = 1  # the priority of backups: loads that a request waits for go first ...
_IDLE = 2  # ... and those that nobody waits for last


class _Copy(NamedTuple):
    """A copy in flight, the device places it touches, and what its caller had bound.

    Each ticket with the model layer from which on it is needed.
    """

    tickets: tuple[tuple[int, Ticket], ...]
    pages: frozenset[int]
    states: frozenset[int]
    context: Context


class Timer(Protocol):
    """A call of a function at a later time, which can be cancelled (`asyncio.TimerHandle`)."""

    def cancel(self) -> None: ...


class Watchdog(NamedTuple):
    """How long a copy may take once it can begin, and by which clock, in seconds.

    `call_later` has a function called then; without it `look_at_clock` is called by somebody.
    """

    timeout_s: float
    seconds: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], Timer] | None = None


class TransferActor:
    """One actor for one engine. It never looks at the tree: an action says all it needs."""

    name = "transfer"

    def __init__(
        self,
        domain: Domain,
        engine: CopyEngine,
        pools: DevicePools,
        emit: Sink | None = None,
        host: HostPools | None = None,
        loaded: Callable[[int, float], None] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`loaded` is told how many bytes each load brought, and in how many seconds."""
        self._watchdog = watchdog
        self._domain = domain
        self._engine = engine
        self._pools = pools
        self._host = host
        self._emit = emit
        self._tree: Actor | None = None
        self._tickets: dict[int, _Copy] = {}
        self._writers: dict[int, tuple[Fence, ...]] = {}  # by state slot
        # When each of the copies takes too long, the first one first.
        self._deadlines: deque[tuple[float, int]] = deque()
        self._timer: Timer | None = None  # for the first of them
        self._by_layer: list[tuple[int, RowPool]] | None = None
        self._loaded = loaded
        self._writing: list[Fence] = []  # steps that may still write what was published
        self.handlers: Handlers = {
            CopyState: self._on_copy_state,
            ClearState: self._on_clear_state,
            CopyAfter: self._on_copy_after,
            StateWritten: self._on_state_written,
            Written: self._on_written,
            BackupToHost: self._on_backup,
            LoadToDevice: self._on_load,
            Hasten: self._on_hasten,
            AwaitFences: self._on_await_fences,
        }

    def connect(self, tree: Actor) -> None:
        """Say who hears of ended copies."""
        self._tree = tree

    def touching(self, slots: Collection[int]) -> tuple[Fence, ...]:
        """The fences of the copies in flight that read or write one of these state slots."""
        return tuple(
            ticket.quiesced
            for copy in self._tickets.values()
            if not copy.states.isdisjoint(slots)
            for _, ticket in copy.tickets
        )

    def touching_pages(self, pages: Collection[int]) -> tuple[Fence, ...]:
        """The fences of the copies in flight that read or write one of these pages."""
        return tuple(
            ticket.quiesced
            for copy in self._tickets.values()
            if not copy.pages.isdisjoint(pages)
            for _, ticket in copy.tickets
        )

    @property
    def in_flight(self) -> int:
        """Copies that have not ended."""
        return len(self._tickets)

    def goes_on_without(self, fences: Iterable[Fence]) -> bool:
        """Whether a copy in flight will end though none of these fences passes.

        That is one that waits for none of them, nor for a copy that does.
        """
        never = set(fences)
        for copy in self._tickets.values():  # as they were submitted: none waits for a later one
            for _, ticket in copy.tickets:
                if never.isdisjoint(waited_for(ticket.batch)):
                    return True
                never.add(ticket.quiesced)
        return False

    def operations(self) -> tuple[int, ...]:
        """The numbers of the operations whose copies have not ended."""
        return tuple(self._tickets)

    def tickets_of(self, op: int) -> tuple[tuple[int, Ticket], ...]:
        """The copies of an operation while one is in flight, and from which layer on each counts.

        Empty when they have ended, or could not be submitted.
        """
        copy = self._tickets.get(op)
        return () if copy is None else copy.tickets

    def _on_backup(self, action: BackupToHost) -> None:
        """After every step that may still write what has been published so far."""
        self._writing = [fence for fence in self._writing if not fence.passed]
        items = tuple(self._between(part, to_host=True) for part in action.items)
        pages, states = _device_places(action.items, to_host=True)
        after = tuple(self._writing)
        batch = self._batch(action.op, "backup", items, after, "d2h", priority=_BULK)
        self._submit(action.op, "backup", ((0, batch),), pages=pages, states=states)

    def _on_load(self, action: LoadToDevice) -> None:
        """Into places that were free, so after nothing; layer by layer, in the model's order."""
        items = tuple(self._between(part, to_host=False) for part in action.items)
        pages, states = _device_places(action.items, to_host=False)
        priority = _IDLE if action.idle else 0
        batch = self._batch(action.op, "load", items, (), "h2d", by_layer=True, priority=priority)
        self._submit(action.op, "load", ((0, batch),), pages=pages, states=states)

    def _on_hasten(self, message: Hasten) -> None:
        for _, ticket in self.tickets_of(message.op):
            self._engine.hasten(ticket)

    def _between(self, part: Places, *, to_host: bool) -> Copy:
        assert self._host is not None
        kv = part.component == "kv"
        device = self._pools.kv_rows if kv else self._pools.state_rows
        host = self._host.kv_rows if kv else self._host.state_rows
        if to_host:
            return Copy(device, host, part.sources, part.targets)
        return Copy(host, device, part.sources, part.targets)

    def _on_written(self, message: Written) -> None:
        self._writing = [fence for fence in self._writing if not fence.passed]
        self._writing.extend(message.after)

    def _on_copy_state(self, action: CopyState) -> None:
        self._copy_state(action, ())

    def _on_copy_after(self, message: CopyAfter) -> None:
        action = message.action
        after = tuple(fence for fence in message.after if not fence.passed)
        if isinstance(action, CopyState):
            self._copy_state(action, after, message.behind)
        elif isinstance(action, ClearState):
            self._clear_state(action, after)
        else:
            rows = self._pools.kv_rows
            item = Copy(rows, rows, action.sources, action.targets)
            pages = frozenset((*action.sources, *action.targets))
            batch = self._batch(action.op, "copy_pages", (item,), after)
            self._submit(action.op, "copy_pages", ((0, batch),), pages=pages)

    def _copy_state(self, action: CopyState, after: tuple[Fence, ...], behind: int = 0) -> None:
        """`behind`: the operation that brings the state, layer by layer, and so it is copied."""
        written = tuple(f for f in self._writers.get(action.source, ()) if not f.passed)
        after = (*after, *written)
        loads = [ticket for _, ticket in self.tickets_of(behind)]
        states = frozenset((action.source, action.target))
        places = (action.source,), (action.target,)
        rows = self._pools.state_rows
        if not loads:
            batch = self._batch(action.op, "copy_state", (Copy(rows, rows, *places),), after)
            self._submit(action.op, "copy_state", ((0, batch),), states=states)
            return
        batches: list[tuple[int, CopyBatch]] = []
        for layer, one in self._state_layers():
            landed = tuple(ticket.layer_fence(layer) for ticket in loads)
            item = Copy(one, one, *places)
            batch = self._batch(action.op, "copy_state", (item,), (*after, *landed))
            batches.append((layer, batch))
        self._submit(action.op, "copy_state", tuple(batches), states=states)

    def _state_layers(self) -> list[tuple[int, RowPool]]:
        """The layers that keep states, each as a pool of its own."""
        if self._by_layer is None:
            rows = self._pools.state_rows
            self._by_layer = [(k, rows.only(k)) for k in range(rows.layers) if rows.parts(k)]
        return self._by_layer

    def _on_clear_state(self, action: ClearState) -> None:
        self._clear_state(action, ())

    def _clear_state(self, action: ClearState, after: tuple[Fence, ...]) -> None:
        item = Clear(self._pools.state_rows, (action.target,))
        batch = self._batch(action.op, "clear_state", (item,), after)
        states = frozenset((action.target,))
        self._submit(action.op, "clear_state", ((0, batch),), states=states)

    def _on_await_fences(self, message: AwaitFences) -> object:
        left = [fence for fence in message.fences if not fence.passed]
        if not left:
            return None
        reply = self._domain.later()
        count = len(left)

        def one_passed() -> None:
            nonlocal count
            count -= 1
            if not count and not reply.done and not reply.abandoned:
                self._domain.complete(reply, None)

        for fence in left:
            fence.add_callback(one_passed)
        return LATER

    def _on_state_written(self, message: StateWritten) -> None:
        slot, fences = message.slot, message.after
        self._writers[slot] = fences
        for fence in fences:
            fence.add_callback(self._forget_when_passed(slot, fences))

    def _forget_when_passed(self, slot: int, fences: tuple[Fence, ...]) -> Callable[[], None]:
        def forget() -> None:
            if self._writers.get(slot) is fences and all(fence.passed for fence in fences):
                del self._writers[slot]

        return forget

    def _batch(
        self,
        op: int,
        kind: str,
        items: tuple[CopyItem, ...],
        after: tuple[Fence, ...],
        channel: Channel = "d2d",
        *,
        by_layer: bool = False,
        priority: int = 0,
    ) -> CopyBatch:
        label = f"{kind} {op}"
        return CopyBatch(
            channel, items, after=after, by_layer=by_layer, priority=priority, label=label
        )

    def _submit(
        self,
        op: int,
        kind: str,
        batches: tuple[tuple[int, CopyBatch], ...],
        *,
        pages: frozenset[int] = frozenset(),
        states: frozenset[int] = frozenset(),
    ) -> None:
        """Hand the batches of an operation to the engine, each with the layer it counts from."""
        assert self._tree is not None
        tickets: list[tuple[int, Ticket]] = []
        try:
            for layer, batch in batches:
                tickets.append((layer, self._engine.submit(batch)))
        except (EngineDead, RuntimeClosed) as error:
            if not tickets:
                self._domain.send(self._tree, Copied(op, error))
                return
            # The engine died in between: those before are failing, and tell.
        copy = self._tickets[op] = _Copy(tuple(tickets), pages, states, self._domain.context)
        if self._emit is not None:
            first = batches[0][1]
            self._emit(
                CopySubmitted(
                    **self._domain.joins(),
                    op=op,
                    kind=kind,
                    pages=sorted(pages),
                    states=sorted(states),
                    queue=first.channel,
                    bytes=sum(batch.nbytes for _, batch in batches),
                    after=len(first.after),
                )
            )
        self._watch_from(op, {fence for _, batch in batches for fence in waited_for(batch)})
        left = len(tickets)

        def one_ended(ticket: Ticket) -> None:
            nonlocal left
            del ticket
            left -= 1
            if not left:
                self._ended(op, copy)

        for _, ticket in tickets:
            ticket.add_done_callback(one_ended)

    def _watch_from(self, op: int, fences: Iterable[Fence]) -> None:
        """Watch a copy from when it has nothing to wait for: long passes are no slow copies."""
        if self._watchdog is None:
            return
        left = [fence for fence in fences if not fence.passed]
        count = len(left)

        def one_passed() -> None:
            nonlocal count
            count -= 1
            if not count and op in self._tickets:
                self._watch(op)

        for fence in left:
            fence.add_callback(one_passed)
        if not left:
            self._watch(op)

    def _watch(self, op: int) -> None:
        dog = self._watchdog
        if dog is None:
            return
        waiting = self._deadlines
        while waiting and waiting[0][1] not in self._tickets:
            waiting.popleft()
        waiting.append((dog.seconds() + dog.timeout_s, op))
        self._arm(dog, dog.timeout_s)

    def _arm(self, dog: Watchdog, seconds: float) -> None:
        if dog.call_later is not None and self._timer is None:
            self._timer = dog.call_later(seconds, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.look_at_clock()

    def stop_watching(self) -> None:
        """The runtime is closed: a timer would keep it, and its pools, until it fires."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look_at_clock(self) -> None:
        """Tell the tree of copies that take too long, once each."""
        dog, waiting = self._watchdog, self._deadlines
        if dog is None or self._domain.stopped is not None:
            return
        now = dog.seconds()
        while waiting and (waiting[0][0] <= now or waiting[0][1] not in self._tickets):
            _, op = waiting.popleft()
            copy = self._tickets.get(op)
            if copy is not None:
                assert self._tree is not None
                self._domain.send(self._tree, TimedOut(op), copy.context)
        if waiting:
            self._arm(dog, waiting[0][0] - now)

    @property
    def next_look_s(self) -> float | None:
        """Seconds until `look_at_clock` may have something to tell; None while it has not."""
        if self._watchdog is None or not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - self._watchdog.seconds())

    def _ended(self, op: int, copy: _Copy) -> None:
        """Conclude a copy that has ended, well or not. Called on the loop."""
        del self._tickets[op]
        tickets = [ticket for _, ticket in copy.tickets]
        error = next((ticket.error for ticket in tickets if ticket.error is not None), None)
        if self._loaded is not None and error is None and tickets[0].batch.channel == "h2d":
            began, over = tickets[0].started_ns, tickets[-1].ended_ns
            if began is not None and over is not None:
                self._loaded(sum(one.batch.nbytes for one in tickets), (over - began) / 1e9)
        if self._emit is not None:
            begun = tickets[0].submitted_ns
            self._emit(
                CopyEnded(
                    op=op,
                    error="" if error is None else repr(error),
                    started_ns=_since(begun, tickets[0].started_ns),
                    ended_ns=_since(begun, tickets[-1].ended_ns),
                    context=copy.context,
                )
            )
        assert self._tree is not None
        if self._domain.stopped is None:
            self._domain.send(self._tree, Copied(op, error), copy.context)


def _since(begun_ns: int | None, instant_ns: int | None) -> int | None:
    """An instant of a copy's as nanoseconds after its submission."""
    return None if begun_ns is None or instant_ns is None else instant_ns - begun_ns


def _device_places(
    items: tuple[Places, ...], *, to_host: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """The device pages and slots that a copy between the tiers reads or writes."""
    pages: set[int] = set()
    states: set[int] = set()
    for part in items:
        places = part.sources if to_host else part.targets
        (pages if part.component == "kv" else states).update(places)
    return frozenset(pages), frozenset(states)
