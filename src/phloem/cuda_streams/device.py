"""The engine for devices with streams and events, over a small driver.

Work of a channel goes onto a stream of its own. A ticket is launched as soon as everything that it
waits for is recorded: the stream itself waits for their events, so nothing waits for the host. One
thread launches; one thread for each stream blocks on its events, in order, and tells the loop.
`phloem.cuda_streams.cuda` has the driver for CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic_ns

import torch

from phloem.cuda_streams.batches import CHANNELS, Channel, CopyItem
from phloem.cuda_streams.device_mover import DeviceMover
from phloem.cuda_streams.device_streams import EventWaiter
from phloem.cuda_streams.dispatch import Dispatcher, Fault, waited_for
from phloem.cuda_streams.driver import Driver
from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.fences import Fence, Post
from phloem.cuda_streams.remains import Remains
from phloem.errors import CopyFailed, EngineDead

__all__ = ["DeviceEngine"]


class DeviceEngine(Dispatcher):
    """`CopyEngine` of a device.

    Once a copy is launched its place on the stream cannot be changed. So at most `bulk_window`
    tickets of a positive `priority` are on a stream at a time, and an urgent one waits for no
    more than those; of urgent loads at most `load_window`, so that those behind can be cancelled.
    A cancelled ticket that is launched completes.

    Make the pools first: what fills them, on whichever stream, has ended when the engine is made.
    """

    placed_at_launch = True

    def __init__(
        self,
        post: Post,
        driver: Driver,
        *,
        fault: Fault | None = None,
        stage_bytes: int = 16 << 20,
        bulk_window: int = 2,
        load_window: int = 3,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        super().__init__(post, fault, now_ns)
        driver.settle()
        self._driver = driver
        self._windows = bulk_window, load_window
        # By channel, the tickets on its stream: (bulk, urgent).
        self._launched: dict[Channel, tuple[set[int], set[int]]] = {
            channel: (set(), set()) for channel in CHANNELS
        }
        self._streams: dict[Channel, object] = {}
        self._movers: dict[Channel, DeviceMover] = {}
        with ExitStack() as undo:  # where the device has no memory left for a buffer, say
            for channel in CHANNELS:
                stream = self._streams[channel] = driver.new_stream(channel)
                undo.callback(driver.close_stream, stream)
                self._movers[channel] = DeviceMover(driver, stream, stage_bytes)
            undo.pop_all()
        self._waiters = {channel: EventWaiter(driver, channel) for channel in CHANNELS}
        self._wake = threading.Event()
        self._launcher = threading.Thread(target=self._serve, name="phloem-launcher", daemon=True)
        self._launcher.start()

    def close(self) -> None:
        """See `CopyEngine.close`. Blocks until what was launched has ended."""
        self.stop()
        self._launcher.join()
        for waiter in self._waiters.values():
            waiter.close()
        while self._streams:
            self._driver.close_stream(self._streams.popitem()[1])

    # -- choosing

    def _woken(self, channel: Channel) -> None:
        del channel
        self._wake.set()

    def _when_met(self, fence: Fence, fn: Callable[[], None]) -> None:
        fence.add_recorded_hook(fn)

    def _choose(self, channel: Channel, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
        priority, seq = ready[0]
        ending = self._closed or self._dead is not None or self._open[seq].cancel_asked
        if not ending and self._full(channel, bulk=priority > 0):
            return None
        return super()._choose(channel, ready)

    def _full(self, channel: Channel, *, bulk: bool) -> bool:
        on_stream, urgent = self._launched[channel]
        most, most_loads = self._windows
        if bulk:
            return len(on_stream) >= most
        return channel == "h2d" and len(urgent) >= most_loads

    # -- launching

    def _serve(self) -> None:
        self._driver.enter_thread()
        with torch.inference_mode():
            while True:
                self._wake.wait()
                self._wake.clear()  # before taking: whatever becomes ready from now on wakes us
                for channel in CHANNELS:
                    while (ticket := self.take(channel)) is not None:
                        self._launch(ticket)
                if self._closed:
                    return

    def _launch(self, ticket: Ticket) -> None:
        batch = ticket.batch
        bulk, urgent = self._launched[batch.channel]
        (bulk if ticket.priority > 0 else urgent).add(ticket.seq)
        mover, events, remains = self._movers[batch.channel], list[object](), Remains(batch)
        layered = [item for item in batch.items if batch.by_layer and mover.can_layer(item)]
        error = self.attempt(ticket, 0, partial(self._begin, ticket, layered))
        for layer in range(batch.layers):
            if error is None:
                error = self.interrupted(ticket)
            if error is None:
                enqueue = partial(self._enqueue_layer, ticket, layer, remains, events)
                error = self.one_layer(ticket, layer, remains, enqueue)
        error = error or remains.error
        if error is not None:
            self._abort(ticket, len(events), error)
            return
        if not batch.by_layer:
            events *= batch.layers  # the one behind all of it
        ticket.launched(events)
        waiter = self._waiters[batch.channel]
        for layer in range(batch.layers if batch.by_layer else 1):
            done = layer + 1 if batch.by_layer else batch.layers
            waiter.after(events[layer], partial(self._landed, ticket, done))

    def _begin(self, ticket: Ticket, layered: list[CopyItem]) -> None:
        batch = ticket.batch
        stream, mover = self._streams[batch.channel], self._movers[batch.channel]
        fences = [(fence, fence.event) for fence in waited_for(batch)]
        self._waits_for(ticket, [fence for fence, event in fences if event is not None])
        for _, event in fences:
            if event is not None:
                self._driver.wait_event(stream, event)
        for item in batch.items:
            if item not in layered:
                mover.whole(item)

    def _enqueue_layer(
        self,
        ticket: Ticket,
        layer: int,
        remains: Remains,
        events: list[object],
        items: Sequence[CopyItem],
    ) -> None:
        batch = ticket.batch
        if batch.by_layer:  # else all layers are on the stream already
            mover = self._movers[batch.channel]
            for item in items:
                if mover.can_layer(item):
                    mover.layer(item, layer)
        elif layer < batch.layers - 1:
            return
        if remains.error is None:
            events.append(self._driver.record(self._streams[batch.channel]))

    def _abort(self, ticket: Ticket, layers: int, error: BaseException) -> None:
        """End a ticket that is half way onto its stream: not before the stream has left it."""
        stream = self._streams[ticket.batch.channel]
        lost = self.attempt(ticket, layers, partial(self._settle, stream))
        if lost is None and layers:
            ticket.progress(layers)
            error = self.interrupted(ticket) or error  # says how far it came
        if lost is not None and isinstance(error, CopyFailed):
            error.rows_ok = 0
        self._over(ticket, self._verdict(error))

    def _settle(self, stream: object) -> None:
        self._driver.synchronize(self._driver.record(stream))

    # -- ending, in the waiters' threads

    def _landed(self, ticket: Ticket, layers: int, error: Exception | None) -> None:
        if ticket.done:
            return  # an earlier layer has failed
        if error is not None:
            failure = CopyFailed(f"{ticket!r} failed on the device: {error}")
            failure.__cause__ = error
            self._over(ticket, self._verdict(failure))
        elif layers < ticket.batch.layers:
            ticket.progress(layers)
        else:
            self._over(ticket, None)

    def _verdict(self, error: BaseException) -> BaseException:
        """Tells a copy that failed from a device that is lost."""
        if isinstance(error, EngineDead) or self._driver.alive():
            return error
        dead = EngineDead(f"the device answers no more: {error}")
        dead.__cause__ = error
        return dead

    def _over(self, ticket: Ticket, error: BaseException | None) -> None:
        channel = ticket.batch.channel
        for launched in self._launched[channel]:
            launched.discard(ticket.seq)
        self.finish(ticket, error)
        self._wake.set()
