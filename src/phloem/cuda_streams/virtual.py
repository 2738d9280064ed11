"""Copies and streams in virtual time: the same protocol, durations from a link model.

Bytes move at the virtual instant at which a layer lands, so a simulation may carry real data; pools
on torch's `meta` device carry none. Differs from a device in this: a layer lands all at once, one
batch of a channel runs at a time, and ending an engine ends its running copies at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify

from phloem.cuda_streams.batches import CHANNELS, Channel, Copy, CopyBatch, CopyItem
from phloem.cuda_streams.clocks import Clock
from phloem.cuda_streams.dispatch import Dispatcher, Fault
from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.fences import Fence, Post
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.mover import RowMover
from phloem.cuda_streams.remains import Remains
from phloem.errors import InvalidRequest

__all__ = [
    "PCIE5", "Delay", "Link", "VirtualEngine", "VirtualStream", "landings_ns", "overlapped_end_ns",
]  # fmt: skip

Delay = Callable[[Ticket, int], int]
"""Extra nanoseconds for a layer of a ticket: a link that is late, or one that hangs for long."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a copy costs: once per batch, per step (a layer, or the whole), per run, per byte.

    While the opposite direction is busy at the start of a step, `shared_percent` of the rate is
    left. Raises InvalidRequest for rates below one or negative costs.
    """

    bytes_per_s: int
    latency_ns: int = 0
    step_ns: int = 0
    run_ns: int = 0
    shared_percent: int = 100

    def __post_init__(self) -> None:
        rates = (self.bytes_per_s, self.shared_percent)
        if min(rates) < 1 or min(self.latency_ns, self.step_ns, self.run_ns) < 0:
            raise InvalidRequest(f"{self}: rates must be at least 1 and costs not negative")

    def cost_ns(self, nbytes: int, runs: int, *, first: bool, shared: bool) -> int:
        """The duration of one step of a batch; nothing to move in a later step costs nothing."""
        rate = self.bytes_per_s * (self.shared_percent if shared else 100)
        moving = -(-nbytes * 100_000_000_000 // rate)
        start = self.latency_ns if first else 0
        return start + (self.step_ns + runs * self.run_ns + moving if runs else 0)


PCIE5: Mapping[Channel, Link] = {
    "d2h": Link(52_000_000_000, 12_000, 500, 20, 85),
    "h2d": Link(52_000_000_000, 12_000, 500, 20, 85),
    "d2d": Link(1_800_000_000_000, 5_000, 2_000, 0),
}
"""Round figures of a PCIe 5 x16 device."""

_OPPOSITE: Mapping[Channel, Channel] = {"d2h": "h2d", "h2d": "d2h"}


def _work(items: Sequence[CopyItem], layers: Sequence[int]) -> tuple[int, int]:
    """(bytes, runs) of some layers of a batch."""
    nbytes = runs = 0
    for item in items:
        pieces = len(item.starts.both) if isinstance(item, Copy) else len(item.target_ids)
        source = item.source if isinstance(item, Copy) else item.target
        for layer in layers:
            # What is coded on one side crosses the link coded.
            parts = list(map(min, source.stored_bytes[layer], item.target.stored_bytes[layer]))
            nbytes += sum(parts) * len(item.target_ids)
            runs += pieces * len(parts)
    return nbytes, runs


def _steps(batch: CopyBatch) -> list[tuple[int, ...]]:
    """The layers that land together, in order."""
    layers = range(batch.layers)
    return [(layer,) for layer in layers] if batch.by_layer else [tuple(layers)]


def landings_ns(batch: CopyBatch, link: Link, *, start_ns: int = 0) -> list[int]:
    """When each model layer has landed, for a batch that starts at `start_ns` on an idle link."""
    now, out = start_ns, list[int]()
    for number, layers in enumerate(_steps(batch)):
        now += link.cost_ns(*_work(batch.items, layers), first=number == 0, shared=False)
        out += [now] * len(layers)
    return out


def overlapped_end_ns(
    landed_ns: Sequence[int], compute_ns: Sequence[int], start_ns: int = 0
) -> int:
    """When a forward pass ends that computes each layer as soon as it can: the closed form."""
    now = start_ns
    for landed, cost in zip(landed_ns, compute_ns, strict=True):
        now = max(now, landed) + cost
    return now


class VirtualEngine(Dispatcher):
    """`CopyEngine` in virtual time, on an injected clock. For one thread.

    `order_seed` lets a channel run what is ready in any order instead of by priority: nothing may
    depend on it. `hazards` reports misused memory. `fault` and `delay` break and slow copies.
    `on_event` hears (nanoseconds, event, ticket, layers done) for `start`, `layer` and the outcome.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        links: Mapping[Channel, Link] = PCIE5,
        post: Post | None = None,
        fault: Fault | None = None,
        delay: Delay | None = None,
        hazards: HazardChecker | None = None,
        order_seed: int | None = None,
        on_event: Callable[[int, str, Ticket, int], None] | None = None,
    ) -> None:
        super().__init__(post or self._soon, fault, clock.now_ns)
        self.delay = delay
        self._clock = clock
        self._links = links
        self._hazards = hazards
        self._rng = None if order_seed is None else random.Random(order_seed)
        self._on_event = on_event
        self._mover = RowMover(stage_bytes=1 << 20)
        self._running: dict[Channel, Ticket] = {}

    def close(self) -> None:
        """See `CopyEngine.close`; running copies end here and now."""
        self.stop()
        for channel in CHANNELS:
            self._kick(channel)
            self.take(channel)  # gives none any more, but ends what was queued

    def finish(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """See `Dispatcher.finish`; tells of copies that never began, too."""
        super().finish(ticket, error)
        self._tell(ticket.state.value, ticket)

    def _soon(self, fn: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.now_ns(), fn)

    def _woken(self, channel: Channel) -> None:
        self._soon(partial(self._kick, channel))

    def _choose(self, channel: Channel, ready: list[tuple[int, int]]) -> tuple[int, int] | None:
        if self._rng is None:
            return super()._choose(channel, ready)
        chosen = ready.pop(self._rng.randrange(len(ready)))
        heapify(ready)
        return chosen

    def _kick(self, channel: Channel) -> None:
        running = self._running.get(channel)
        if running is not None and (self.dead is not None or self._closed):
            self._end(running, self.interrupted(running))
        elif running is None and (ticket := self.take(channel)) is not None:
            self._running[channel] = ticket
            self._tell("start", ticket)
            if self._hazards is not None:
                self._hazards.begin(ticket)
            self._step(ticket, Remains(ticket.batch), _steps(ticket.batch), 0)

    def _step(
        self, ticket: Ticket, remains: Remains, steps: list[tuple[int, ...]], number: int
    ) -> None:
        if number == len(steps):
            self._end(ticket, remains.error)
            return
        if (why := self.interrupted(ticket)) is not None:
            self._end(ticket, why)
            return
        batch, layers = ticket.batch, steps[number]
        for layer in layers:
            error = self.attempt(ticket, layer, partial(self.inject, ticket, layer))
            if error is not None and not remains.cut(error):
                self._end(ticket, error)
                return
        shared = _OPPOSITE.get(batch.channel) in self._running
        cost = self._links[batch.channel].cost_ns(
            *_work(remains.items, layers), first=number == 0, shared=shared
        )
        if self.delay is not None:
            cost += sum(self.delay(ticket, layer) for layer in layers)
        land = partial(self._land, ticket, remains, steps, number)
        self._clock.call_at(self._clock.now_ns() + cost, land)

    def _land(
        self, ticket: Ticket, remains: Remains, steps: list[tuple[int, ...]], number: int
    ) -> None:
        if self._running.get(ticket.batch.channel) is not ticket:
            return  # ended in the meantime: its memory is no longer ours
        for layer in steps[number]:
            write = partial(self._write, ticket, remains, layer)
            if error := self.attempt(ticket, layer, write):
                self._end(ticket, error)
                return
        if ticket.batch.by_layer and remains.error is None:
            ticket.progress(steps[number][-1] + 1)
            self._tell("layer", ticket)
        self._step(ticket, remains, steps, number + 1)

    def _write(self, ticket: Ticket, remains: Remains, layer: int) -> None:
        if self._hazards is not None:
            self._hazards.landing(ticket, layer)
        for item in remains.items:
            if not item.target.is_meta:
                self._mover.add(item, layer)
                self._mover.flush()

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        channel = ticket.batch.channel
        del self._running[channel]
        if self._hazards is not None:
            self._hazards.end(ticket)
        self.finish(ticket, error)
        self._woken(channel)

    def _tell(self, event: str, ticket: Ticket) -> None:
        if self._on_event is not None:
            self._on_event(self._clock.now_ns(), event, ticket, ticket.layers_done)


class VirtualStream:
    """A caller's `Stream` in virtual time: work of a given duration, in order. For one thread."""

    def __init__(self, name: str, clock: Clock, post: Post | None = None) -> None:
        self.name = name
        self._clock = clock
        self._post: Post = post or self._soon
        self._queue: deque[tuple[int, Callable[[], None] | None] | Fence] = deque()
        self._busy = False

    def __repr__(self) -> str:
        return f"VirtualStream({self.name!r})"

    def run(self, cost_ns: int, fn: Callable[[], None] | None = None) -> None:
        """Enqueue work that takes `cost_ns`; `fn`, what it does to memory, runs at its end."""
        self._queue.append((cost_ns, fn))
        self._advance()

    def record(self) -> Fence:
        """See `Stream.record`."""
        if not self._busy:
            return Fence.settled(self.name)
        fence = Fence(self._post, self.name)
        self.run(0, fence.mark_passed)
        return fence

    def wait(self, fence: Fence) -> None:
        """See `Stream.wait`."""
        self._queue.append(fence)
        self._advance()

    def _soon(self, fn: Callable[[], None]) -> None:
        self._clock.call_at(self._clock.now_ns(), fn)

    def _advance(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        head = self._queue.popleft()
        if isinstance(head, Fence):
            head.add_hook(partial(self._soon, self._ended))
        else:
            cost_ns, fn = head
            self._clock.call_at(self._clock.now_ns() + cost_ns, partial(self._ended, fn))

    def _ended(self, fn: Callable[[], None] | None = None) -> None:
        # Still busy while `fn` runs: what it enqueues goes behind what is queued already.
        if fn is not None:
            fn()
        self._busy = False
        self._advance()
