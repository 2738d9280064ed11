"""What engines share: admission, dependencies, the choice of the next ticket, accounting."""

from __future__ import annotations

import heapq
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic_ns

from phloem.cuda_streams.batches import CHANNELS, Channel, CopyBatch, CopyItem
from phloem.cuda_streams.engine import Ticket, TicketState
from phloem.cuda_streams.fences import Fence, Post, Stream
from phloem.cuda_streams.remains import Remains
from phloem.errors import CopyCancelled, CopyFailed, EngineDead, InvalidRequest, RuntimeClosed

__all__ = ["Dispatcher", "Fault", "waited_for"]

Fault = Callable[[Ticket, int], None]
"""Called before each model layer of each ticket. Raising fails the ticket; raising CopyFailed with
`rows_ok` leaves the first rows of its first item to be copied all the same; raising EngineDead
stands for a lost device and ends the engine."""


class Dispatcher(ABC):
    """Keeps tickets until they may start and hands them out, lowest (priority, seq) first.

    Engines call `take`, run the copy, and call `finish`. Thread-safe. `_woken` tells the engine
    that a channel has a ticket to take; it is called without the lock, from any thread, and must
    not take it there and then.
    """

    placed_at_launch = False
    """True for engines whose streams can wait for a ticket only once it is launched."""

    def __init__(
        self, post: Post, fault: Fault | None = None, now_ns: Callable[[], int] = monotonic_ns
    ) -> None:
        """`now_ns`: the clock by which tickets say when they began and ended."""
        self.fault = fault
        self._post = post
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._seq = 0
        self._closed = False
        self._dead: BaseException | None = None
        # Under the lock. A ticket is in `_blockers` while it waits, then once in `_ready`: when it
        # may start, or earlier when `take` is to end it. Nothing but `take` ends a queued ticket.
        self._open: dict[int, Ticket] = {}
        self._blockers: dict[int, int] = {}
        self._ready: dict[Channel, list[tuple[int, int]]] = {channel: [] for channel in CHANNELS}
        self._inflight: dict[Channel, int] = dict.fromkeys(CHANNELS, 0)
        self._waiting: dict[int, int] = {}  # launched tickets: so many fences are to be heard of
        self._free_ns: dict[Channel, int] = dict.fromkeys(CHANNELS, 0)  # when a queue was last

    # -- the loop

    def submit(self, batch: CopyBatch) -> Ticket:
        """Queue a batch; see `CopyEngine.submit`."""
        waits = waited_for(batch)
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead)) from self._dead
            if self._closed:
                raise RuntimeClosed("the copy engine is closed")
            ticket = Ticket(self._seq, batch, self._post)
            ticket.submitted_ns = self._now_ns()
            self._seq += 1
            self._open[ticket.seq] = ticket
            self._inflight[batch.channel] += batch.nbytes
            self._blockers[ticket.seq] = len(waits) + 1  # + 1: not before all are hooked
        if not self.placed_at_launch:
            ticket.placed.mark_passed()
        ticket.quiesced.add_hook(lambda: self._forget(ticket))
        for fence in waits:
            self._when_met(fence, lambda: self._unblock(ticket))
        self._unblock(ticket)
        return ticket

    def hasten(self, ticket: Ticket) -> None:
        """See `CopyEngine.hasten`."""
        with self._lock:
            queued = (ticket.priority, ticket.seq)
            ticket.priority = min(0, ticket.priority)
            ready = self._ready[ticket.batch.channel]
            if queued in ready:
                ready.remove(queued)
                heapq.heapify(ready)
                self._push(ticket)
        self._woken(ticket.batch.channel)

    def inflight_bytes(self, channel: Channel | None = None) -> int:
        """Bytes of the tickets that are not done, of one channel or of all."""
        with self._lock:
            return sum(self._inflight.values()) if channel is None else self._inflight[channel]

    @property
    def dead(self) -> BaseException | None:
        """Why the engine is dead, if it is."""
        return self._dead

    def record(self, stream: Stream | None) -> Fence:
        """See `CopyEngine.record`. Raises InvalidRequest without a stream: none is ambient."""
        if stream is None:
            raise InvalidRequest("name the stream: there is no ambient current one")
        return stream.record()

    async def drain(self) -> None:
        """See `CopyEngine.drain`. A cancelled caller leaves nothing behind."""
        with self._lock:
            tickets = tuple(self._open.values())
        for ticket in tickets:
            await ticket.ended()

    @abstractmethod
    def close(self) -> None:
        """See `CopyEngine.close`."""

    # -- any thread

    def take(self, channel: Channel) -> Ticket | None:
        """The next ticket to run, started; or None. Ends those that cannot run on the way."""
        while (ticket := self._pop(channel)) is not None:
            error = self._refusal(ticket)
            if error is None:
                ticket.started(self._now_ns())
                return ticket
            self._end_unstarted(ticket, error)
        return None

    def finish(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """The ticket's memory is left alone; EngineDead as `error` ends the engine."""
        dies = isinstance(error, EngineDead) and self._dead is None
        channel, now_ns = ticket.batch.channel, self._now_ns()
        with self._lock:
            self._inflight[ticket.batch.channel] -= ticket.batch.nbytes
            if dies:  # before the ticket tells: what requires it should hear of the cause
                self._dead = error
            self._waiting.pop(ticket.seq, None)
            ticket.ended_ns = now_ns
            if ticket.state is TicketState.RUNNING:
                if ticket.started_ns is not None:  # not before the one before it had ended
                    ticket.started_ns = max(ticket.started_ns, self._free_ns[channel])
                self._free_ns[channel] = now_ns
        ticket.finish(error)
        if dies:
            self._flush()

    def attempt(self, ticket: Ticket, layer: int, act: Callable[[], None]) -> BaseException | None:
        """Run `act`, the work of one layer; gives back what ends the ticket if it raises."""
        try:
            act()
        except EngineDead as error:
            return error
        except Exception as error:  # noqa: BLE001  an engine outlives whatever a copy throws
            rows_ok = error.rows_ok if isinstance(error, CopyFailed) else 0
            failure = CopyFailed(f"{ticket!r} failed at layer {layer}: {error}", rows_ok=rows_ok)
            failure.__cause__ = error
            return failure
        return None

    def one_layer(
        self,
        ticket: Ticket,
        layer: int,
        remains: Remains,
        copy: Callable[[Sequence[CopyItem]], None],
    ) -> BaseException | None:
        """Have `copy` carry out one layer of what remains; gives back what ends the ticket here.

        A failure that spares some rows cuts the rest off; these it copies once more.
        """

        def act() -> None:
            self.inject(ticket, layer)
            copy(remains.items)

        error = self.attempt(ticket, layer, act)
        if error is None or not remains.cut(error):
            return error
        error = self.attempt(ticket, layer, lambda: copy(remains.items))
        if isinstance(error, CopyFailed):
            error.rows_ok = 0
        return error

    def inject(self, ticket: Ticket, layer: int) -> None:
        """Let the injected fault, if there is one, raise before a layer."""
        if self.fault is not None:
            self.fault(ticket, layer)

    def interrupted(self, ticket: Ticket) -> BaseException | None:
        """Why a running ticket should stop at the next layer boundary, if it should."""
        if self._dead is not None:
            return _dead_error(self._dead)
        if ticket.cancel_asked or self._closed:
            return CopyCancelled(f"{ticket!r} was cancelled after {ticket.layers_done} layers")
        return None

    def stop(self) -> None:
        """Refuse new batches and cancel what is queued. Idempotent."""
        with self._lock:
            self._closed = True
        self._flush()

    # -- inside

    def _waits_for(self, ticket: Ticket, fences: Sequence[Fence]) -> None:
        """For engines that launch tickets which wait: this one begins when all of these pass.

        When that was is not known (`started_ns` stays None) if its end is heard of before.
        """
        if not fences:
            return
        with self._lock:
            self._waiting[ticket.seq] = len(fences)
            ticket.started_ns = None
        for fence in fences:
            fence.add_hook(lambda: self._one_passed(ticket))

    def _one_passed(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.seq not in self._waiting:
                return  # it is over
            self._waiting[ticket.seq] -= 1
            if not self._waiting[ticket.seq]:
                del self._waiting[ticket.seq]
                ticket.started_ns = self._now_ns()

    @abstractmethod
    def _woken(self, channel: Channel) -> None: ...

    def _when_met(self, fence: Fence, fn: Callable[[], None]) -> None:
        """Call `fn` once nothing of `fence` keeps a ticket from being taken."""
        fence.add_hook(fn)

    def _flush(self) -> None:
        """Bring every waiting ticket to where `take` will end it."""
        with self._lock:
            for seq in self._blockers:
                self._push(self._open[seq])
            self._blockers.clear()
        for channel in CHANNELS:
            self._woken(channel)

    def _push(self, ticket: Ticket) -> None:
        key = (ticket.priority, ticket.seq)
        heapq.heappush(self._ready[ticket.batch.channel], key)

    def _pop(self, channel: Channel) -> Ticket | None:
        with self._lock:
            ready = self._ready[channel]
            key = self._choose(channel, ready) if ready else None
            return None if key is None else self._open[key[1]]

    def _choose(self, channel: Channel, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
        """Take a key (priority, seq) out of a heap that is not empty, or none for the time being.

        For engines that fuzz the order or hold something back. Called under the lock.
        """
        del channel
        return heapq.heappop(ready)

    def _unblock(self, ticket: Ticket) -> None:
        with self._lock:
            left = self._blockers.get(ticket.seq)
            if left is None:  # it has ended early
                return
            if left > 1:
                self._blockers[ticket.seq] = left - 1
                return
            del self._blockers[ticket.seq]
            self._push(ticket)
        self._woken(ticket.batch.channel)

    def _end_unstarted(self, ticket: Ticket, error: BaseException) -> None:
        """End a ticket that was not started, but not before what it waits for (see `_when_met`)."""
        if self._dead is None and not self._closed:
            for fence in waited_for(ticket.batch):
                if not fence.passed:
                    fence.add_hook(lambda: self._end_unstarted(ticket, error))
                    return
        self.finish(ticket, error)

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._open.pop(ticket.seq, None)

    def _refusal(self, ticket: Ticket) -> BaseException | None:
        if self._dead is not None:
            return _dead_error(self._dead)
        if ticket.cancel_asked or self._closed:
            why = "it was asked for" if ticket.cancel_asked else "the engine closed"
            return CopyCancelled(f"{ticket!r} never started: {why}")
        for needed in ticket.batch.requires:
            if needed.error is not None:
                failure = CopyFailed(f"{ticket!r} needs {needed!r}, which ended without its data")
                failure.__cause__ = needed.error
                return failure
        return None


def waited_for(batch: CopyBatch) -> list[Fence]:
    """The fences of everything that a batch names in `after` and `requires`."""
    named = (*batch.after, *batch.requires)
    return [one.quiesced if isinstance(one, Ticket) else one for one in named]


def _dead_error(cause: BaseException) -> EngineDead:
    error = EngineDead(str(cause))
    error.__cause__ = cause
    return error
