"""The transfer actor: carries out copies on its engine and tells the tree when they have ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from phloem.actors.actions import BackupToHost, ClearState, CopyState, LoadToDevice, Places
from phloem.actors.domain import Actor, Domain, Handlers
from phloem.actors.messages import Copied, CopyAfter, StateWritten, Written
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
from phloem.errors import EngineDead, RuntimeClosed
from phloem.events import Context, CopyEnded, CopySubmitted, Sink

__all__ = ["TransferActor"]


_BULK = 1  # the priority of backups: loads that a request waits for go first


class _Copy(NamedTuple):
    """A copy in flight, the device places it touches, and what its caller had bound."""

    ticket: Ticket
    pages: frozenset[int]
    states: frozenset[int]
    context: Context


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
    ) -> None:
        self._domain = domain
        self._engine = engine
        self._pools = pools
        self._host = host
        self._emit = emit
        self._tree: Actor | None = None
        self._tickets: dict[int, _Copy] = {}
        self._writers: dict[int, tuple[Fence, ...]] = {}  # by state slot
        self._writing: list[Fence] = []  # steps that may still write what was published
        self.handlers: Handlers = {
            CopyState: self._on_copy_state,
            ClearState: self._on_clear_state,
            CopyAfter: self._on_copy_after,
            StateWritten: self._on_state_written,
            Written: self._on_written,
            BackupToHost: self._on_backup,
            LoadToDevice: self._on_load,
        }

    def connect(self, tree: Actor) -> None:
        """Say who hears of ended copies."""
        self._tree = tree

    def touching(self, slots: Collection[int]) -> tuple[Fence, ...]:
        """The fences of the copies in flight that read or write one of these state slots."""
        return tuple(
            copy.ticket.quiesced
            for copy in self._tickets.values()
            if not copy.states.isdisjoint(slots)
        )

    def touching_pages(self, pages: Collection[int]) -> tuple[Fence, ...]:
        """The fences of the copies in flight that read or write one of these pages."""
        return tuple(
            copy.ticket.quiesced
            for copy in self._tickets.values()
            if not copy.pages.isdisjoint(pages)
        )

    @property
    def in_flight(self) -> int:
        """Copies that have not ended."""
        return len(self._tickets)

    def operations(self) -> tuple[int, ...]:
        """The numbers of the operations whose copies have not ended."""
        return tuple(self._tickets)

    def ticket_of(self, op: int) -> Ticket | None:
        """The copy of an operation, while it is in flight."""
        copy = self._tickets.get(op)
        return None if copy is None else copy.ticket

    def _on_backup(self, action: BackupToHost) -> None:
        """After every step that may still write what has been published so far."""
        self._writing = [fence for fence in self._writing if not fence.passed]
        items = tuple(self._between(part, to_host=True) for part in action.items)
        pages, states = _device_places(action.items, to_host=True)
        after = tuple(self._writing)
        self._submit(
            action.op, "backup", items, after, "d2h", pages=pages, states=states, priority=_BULK
        )

    def _on_load(self, action: LoadToDevice) -> None:
        """Into places that were free, so after nothing; layer by layer, in the model's order."""
        items = tuple(self._between(part, to_host=False) for part in action.items)
        pages, states = _device_places(action.items, to_host=False)
        self._submit(action.op, "load", items, (), "h2d", pages=pages, states=states, by_layer=True)

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
            self._copy_state(action, after)
        else:
            rows = self._pools.kv_rows
            item = Copy(rows, rows, action.sources, action.targets)
            pages = frozenset((*action.sources, *action.targets))
            self._submit(action.op, "copy_pages", (item,), after, pages=pages)

    def _copy_state(self, action: CopyState, after: tuple[Fence, ...]) -> None:
        rows = self._pools.state_rows
        written = tuple(f for f in self._writers.get(action.source, ()) if not f.passed)
        item = Copy(rows, rows, (action.source,), (action.target,))
        states = frozenset((action.source, action.target))
        self._submit(action.op, "copy_state", (item,), (*after, *written), states=states)

    def _on_clear_state(self, action: ClearState) -> None:
        item = Clear(self._pools.state_rows, (action.target,))
        self._submit(action.op, "clear_state", (item,), (), states=frozenset((action.target,)))

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

    def _submit(
        self,
        op: int,
        kind: str,
        items: tuple[CopyItem, ...],
        after: tuple[Fence, ...],
        channel: Channel = "d2d",
        *,
        pages: frozenset[int] = frozenset(),
        states: frozenset[int] = frozenset(),
        by_layer: bool = False,
        priority: int = 0,
    ) -> None:
        assert self._tree is not None
        batch = CopyBatch(
            channel,
            items,
            after=after,
            by_layer=by_layer,
            priority=priority,
            label=f"{kind} {op}",
        )
        try:
            ticket = self._engine.submit(batch)
        except (EngineDead, RuntimeClosed) as error:
            self._domain.send(self._tree, Copied(op, error))
            return
        self._tickets[op] = _Copy(ticket, pages, states, self._domain.context)
        if self._emit is not None:
            self._emit(
                CopySubmitted(
                    **self._domain.joins(),
                    op=op,
                    kind=kind,
                    pages=sorted(pages),
                    states=sorted(states),
                    queue=batch.channel,
                    bytes=batch.nbytes,
                    after=len(after),
                )
            )
        ticket.add_done_callback(lambda ended: self._ended(op, ended))

    def _ended(self, op: int, ticket: Ticket) -> None:
        """On the loop: the copy is over, whatever its outcome."""
        context = self._tickets.pop(op).context
        if self._emit is not None:
            error = "" if ticket.error is None else repr(ticket.error)
            self._emit(
                CopyEnded(
                    op=op,
                    error=error,
                    started_ns=_since(ticket, ticket.started_ns),
                    ended_ns=_since(ticket, ticket.ended_ns),
                    context=context,
                )
            )
        assert self._tree is not None
        if self._domain.stopped is None:
            self._domain.send(self._tree, Copied(op, ticket.error), context)


def _since(ticket: Ticket, instant_ns: int | None) -> int | None:
    """An instant of a copy's as nanoseconds after its submission."""
    begun = ticket.submitted_ns
    return None if begun is None or instant_ns is None else instant_ns - begun


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
