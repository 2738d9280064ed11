"""The protocol that all copy engines share. It knows bytes and time, and nothing of trees.

- `submit` never blocks and touches no memory itself; it returns a `Ticket`.
- Two tickets are ordered only if one names the other in `after` or `requires`. Engines and tests
  are free to reorder all others.
- A ticket is done when its outcome is known *and* its memory will not be touched again, neither by
  itself nor by what it named: so waiting for the last user of some memory is enough. Neither
  time-outs nor cancelled callers nor lost handles shorten that.
- Threads never touch what belongs to the loop: they pass fences, and the loop hears by `post`.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from phloem.cuda_streams.batches import (
    CHANNELS,
    Channel,
    Clear,
    Copy,
    CopyBatch,
    CopyItem,
)
from phloem.cuda_streams.fences import Fence, LoopPoster, Post, StepTicket, Stream
from phloem.errors import CopyCancelled, CopyFailed, InvalidRequest

__all__ = [
    # asking
    "CHANNELS", "Channel", "Clear", "Copy", "CopyBatch", "CopyItem",
    # waiting
    "CopyCancelled", "CopyFailed", "Fence", "LoopPoster", "Post", "StepTicket", "Stream",
    "Ticket", "TicketState",
    # engines
    "CopyEngine",
]  # fmt: skip


class TicketState(enum.Enum):
    """Where a copy stands; the last three are outcomes."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ticket:
    """A copy in flight. The engine keeps it alive: losing the handle does not lose the copy.

    `await ticket` waits for the end and raises what went wrong: `CopyFailed`, `CopyCancelled`,
    or `EngineDead`. Each waiter has a future of its own: cancelling one, or letting it time out,
    leaves the copy and the other waiters alone.
    """

    def __init__(self, seq: int, batch: CopyBatch, post: Post) -> None:
        """For engines."""
        self.seq = seq
        self.batch = batch
        self.quiesced = Fence(post, f"copy {seq}")
        self.placed = Fence(post, f"launch of copy {seq}")
        self.cancel_asked = False
        self.priority = batch.priority  # see `CopyEngine.hasten`
        # Nanoseconds of the engine's clock, None until it is so; `started_ns` for ever where it
        # never began, or where its end was heard of before the end of what it waited for.
        self.submitted_ns: int | None = None
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self._post = post
        self._state = TicketState.QUEUED
        self._error: BaseException | None = None
        self._layers_done = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []  # the loop's; see _wait
        self._lock = threading.Lock()
        self._layer_fences: dict[int, Fence] = {}  # under the lock
        self._layer_events: Sequence[object] = ()  # under the lock

    def __repr__(self) -> str:
        label = f" {self.batch.label}" if self.batch.label else ""
        return f"Ticket({self.seq} {self.batch.channel}{label}, {self._state.value})"

    # -- any thread

    @property
    def state(self) -> TicketState:
        """`done`, `failed` and `cancelled` are outcomes; look at `done` for the memory."""
        return self._state

    @property
    def done(self) -> bool:
        """The outcome is known and the memory will not be touched again."""
        return self.quiesced.passed

    @property
    def error(self) -> BaseException | None:
        """The error that the copy ended with, once known; else None."""
        return self._error

    @property
    def layers_done(self) -> int:
        """So many leading model layers have landed, counting those with nothing to copy."""
        return self._layers_done

    def cancel(self) -> None:
        """Ask the copy to end. Idempotent; its memory is free only when it is `done`.

        Not started: it never touches memory, and ends once what it waits for has ended (whoever
        waits for this ticket alone must find those quiet too). Running: it ends at a layer
        boundary or completes.
        """
        self.cancel_asked = True

    def layer_fence(self, layer: int) -> Fence:
        """Passes when model layers 0..`layer` have landed, or when the ticket is done without.

        For streams and threads: `stream.wait(ticket.layer_fence(k))`, once `placed` has passed
        (on a device that is the launch; elsewhere it has passed from the beginning). Whether the
        data is good is known only at the end, so what runs on it before then is provisional.
        """
        self._check_layer(layer)
        with self._lock:
            if self._layers_done > layer or self.done:
                return Fence.settled(f"layer {layer} of copy {self.seq}")
            fence = self._layer_fences.get(layer)
            if fence is None:
                fence = Fence(self._post, f"layer {layer} of copy {self.seq}")
                self._layer_fences[layer] = fence
                if self._layer_events:
                    fence.mark_recorded(self._layer_events[layer])
            return fence

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.batch.layers:
            raise InvalidRequest(f"layer {layer} of a model of {self.batch.layers} layers")

    # -- the loop

    def add_done_callback(self, fn: Callable[[Ticket], None]) -> None:
        """Have `fn(ticket)` called on the loop once done; at once if it is."""
        self.quiesced.add_callback(lambda: fn(self))

    def __await__(self) -> Generator[object, None, None]:
        return self._outcome().__await__()

    async def _outcome(self) -> None:
        await self.ended()
        if self._error is not None:
            raise self._error

    async def ended(self) -> None:
        """Wait for the end, whatever the outcome. A cancelled caller leaves nothing behind."""
        await self._wait(self.batch.layers)

    async def layer(self, layer: int) -> None:
        """Wait until model layers 0..`layer` have landed.

        Raises like `await ticket` if it ends before, InvalidRequest if there is no such layer.
        """
        self._check_layer(layer)
        await self._wait(layer)
        if self._layers_done <= layer and self._error is not None:
            raise self._error

    async def _wait(self, layer: int) -> None:
        if self.done or self._layers_done > layer:
            return
        waiter = (layer, asyncio.get_running_loop().create_future())
        # First wait, then look again: a thread that finishes in between either sees the waiter
        # and posts, or has finished before the look.
        self._waiters.append(waiter)
        self._wake()
        try:
            await waiter[1]
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        for layer, future in self._waiters:
            if (self.done or self._layers_done > layer) and not future.done():
                future.set_result(None)

    # -- engines

    def started(self, now_ns: int) -> None:
        """For engines: the copy may touch memory from now on."""
        self.started_ns = now_ns
        self._state = TicketState.RUNNING

    def launched(self, layer_events: Sequence[object]) -> None:
        """For engines of devices: the events that follow each layer are on the stream."""
        with self._lock:
            self._layer_events = layer_events
            fences = tuple(self._layer_fences.items())
        for layer, fence in fences:
            fence.mark_recorded(layer_events[layer])
        self.quiesced.mark_recorded(layer_events[-1])
        self.placed.mark_passed()

    def progress(self, layers_done: int) -> None:
        """For engines: so many leading model layers have landed."""
        with self._lock:
            self._layers_done = layers_done
            landed = [layer for layer in self._layer_fences if layer < layers_done]
            fences = [self._layer_fences.pop(layer) for layer in landed]
        for fence in fences:
            fence.mark_passed()
        if self._waiters:
            self._post(self._wake)

    def finish(self, error: BaseException | None = None) -> None:
        """For engines: the outcome is known and memory is left alone. Called exactly once."""
        assert not self.done, f"{self!r} ended twice"
        if error is None:
            self._layers_done = self.batch.layers
            self._state = TicketState.DONE
        else:
            self._error = error
            cancelled = isinstance(error, CopyCancelled)
            self._state = TicketState.CANCELLED if cancelled else TicketState.FAILED
        # The outcome before the fence, the fence before the waiters: whoever the fence wakes reads
        # the outcome, and whoever awaited finds its slots quiet.
        self.quiesced.mark_passed()
        self.placed.mark_passed()
        with self._lock:
            fences, self._layer_fences = self._layer_fences, {}
            self._layer_events = ()
        for fence in fences.values():
            fence.mark_passed()
        if self._waiters:
            self._post(self._wake)


class CopyEngine(Protocol):
    """Carries out batches. One engine serves one loop; `submit` is called there."""

    def submit(self, batch: CopyBatch) -> Ticket:
        """Queue a batch. Never blocks and touches no memory itself.

        Raises EngineDead when the device is lost and RuntimeClosed after `close`; nothing is
        queued then. (Bad descriptors raise InvalidRequest when the batch is made.)
        """
        ...

    def hasten(self, ticket: Ticket) -> None:
        """Somebody waits for a ticket now: unless it runs, it is as urgent as priority 0."""
        ...

    def inflight_bytes(self, channel: Channel | None = None) -> int:
        """Bytes of the tickets that are not done, of one channel or of all."""
        ...

    def record(self, stream: Stream) -> Fence:
        """A fence that passes when everything enqueued so far on the caller's stream has ended."""
        ...

    async def drain(self) -> None:
        """Wait until every ticket submitted so far is done, whatever its outcome."""
        ...

    def close(self) -> None:
        """Refuse new batches, cancel what is queued, let what runs come to an end. Idempotent."""
        ...
