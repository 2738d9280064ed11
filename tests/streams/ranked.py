"""Two ranks in virtual time: wires that are late and take values only, a shard for each rank."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from phloem.cuda_streams.batches import Channel
from phloem.cuda_streams.clocks import Clock
from phloem.cuda_streams.dispatch import Dispatcher, Fault
from phloem.cuda_streams.fences import Fence, Post
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.orders import Answer, Order, Pass
from phloem.cuda_streams.rank import Rank
from phloem.cuda_streams.ranks import RankedEngine, RankedStream
from phloem.cuda_streams.rows import RowPool
from phloem.cuda_streams.virtual import Link, VirtualEngine, VirtualStream

T = TypeVar("T")


FAST: dict[Channel, Link] = {
    "d2h": Link(10**12, 1000, 100, 10, 50),
    "h2d": Link(10**12, 1000, 100, 10, 50),
    "d2d": Link(10**13, 500),
}


def slower(links: dict[Channel, Link], times: int) -> dict[Channel, Link]:
    return {
        channel: Link(link.bytes_per_s // times, link.latency_ns * times)
        for channel, link in links.items()
    }


class LateWire(Generic[T]):
    """Brings values to the other end in order, each after a delay; while `held` they stay here."""

    def __init__(
        self,
        clock: Clock,
        to: Callable[[T], None],
        delay_ns: Callable[[], int],
    ) -> None:
        self.sent: list[bytes] = []
        self.held = False
        self._clock, self._to, self._delay_ns = clock, to, delay_ns
        self._arrives_ns = 0
        self._kept: list[bytes] = []

    def __call__(self, value: T) -> None:
        data = pickle.dumps(value)
        self.sent.append(data)
        if self.held:
            self._kept.append(data)
        else:
            self._go(data)

    def release(self) -> None:
        self.held = False
        kept, self._kept = self._kept, []
        for data in kept:
            self._go(data)

    def _go(self, data: bytes) -> None:
        self._arrives_ns = max(self._arrives_ns, self._clock.now_ns() + self._delay_ns())
        self._clock.call_at(self._arrives_ns, lambda: self._to(pickle.loads(data)))


@dataclass
class Ranks:
    """The head's engine with the ranks behind it."""

    head: RankedEngine
    ranks: list[Rank]
    engines: list[Dispatcher]
    orders: list[LateWire[Order]]
    answers: list[LateWire[Answer]]


def over_ranks(
    post: Post,
    clock: Clock,
    shards: Sequence[Sequence[RowPool]],
    engines: Sequence[Dispatcher],
    *,
    delay_ns: Callable[[], int] = lambda: 300,
) -> Ranks:
    """One rank for each shard and engine."""
    orders: list[LateWire[Order]] = []

    def send(number: int, order: Order) -> None:
        orders[number](order)

    head = RankedEngine(
        post, [partial(send, number) for number in range(len(shards))], now_ns=clock.now_ns
    )
    answers = [LateWire(clock, head.acknowledge, delay_ns) for _ in shards]
    ranks = [
        Rank(number, engine, pools, answers[number])
        for number, (pools, engine) in enumerate(zip(shards, engines, strict=True))
    ]
    orders += [LateWire(clock, rank.receive, delay_ns) for rank in ranks]
    return Ranks(head, ranks, list(engines), orders, answers)


def virtual_engines(
    clock: Clock,
    hazards: Sequence[HazardChecker],
    *,
    faults: Sequence[Fault | None] | None = None,
    order_seed: int | None = None,
) -> list[VirtualEngine]:
    """An engine for each checker, each slower than the one before."""
    return [
        VirtualEngine(
            clock,
            links=slower(FAST, 1 + 3 * number),
            fault=None if faults is None else faults[number],
            hazards=checker,
            order_seed=None if order_seed is None else order_seed + number,
        )
        for number, checker in enumerate(hazards)
    ]


def jitter(seed: int, most_ns: int) -> Callable[[], int]:
    rng = random.Random(seed)
    return lambda: rng.randrange(most_ns)


class Fleet:
    """The models of all ranks: each runs the head's passes on its own stream, when told to.

    The batch goes another way than the orders, and may be there before them.
    """

    def __init__(self, ranks: Ranks, clock: Clock, delay_ns: Callable[[], int]) -> None:
        self.head = RankedStream("forward", ranks.head)
        self.streams = [VirtualStream(f"rank {rank.number}", clock) for rank in ranks.ranks]
        self._ranks, self._clock, self._delay_ns = ranks, clock, delay_ns
        self._arrive_ns = [0 for _ in ranks.ranks]

    def run(self, waits: Sequence[Fence], write: Callable[[int], None]) -> Fence:
        """One pass, which on each rank waits for its part of `waits`; passes when all are over."""
        over, left = Fence(label="pass"), list(waits)

        def begin() -> None:
            while left:
                if left[-1].event is None and not left[-1].passed:  # not known to the ranks yet
                    left[-1].add_recorded_hook(begin)
                    return
                self.head.wait(left.pop())
            made = self.head.begin()
            for rank in self._ranks.ranks:
                at_ns = max(self._clock.now_ns() + self._delay_ns(), self._arrive_ns[rank.number])
                self._arrive_ns[rank.number] = at_ns
                self._clock.call_at(at_ns, partial(self._told, rank, made, write))
            recorded = self.head.record()
            over.mark_recorded(recorded.event)
            recorded.add_hook(over.mark_passed)

        begin()
        return over

    def _told(self, rank: Rank, made: Pass, write: Callable[[int], None]) -> None:
        rank.ready_for(made).add_hook(partial(self._launch, rank, made, write))

    def _launch(self, rank: Rank, made: Pass, write: Callable[[int], None]) -> None:
        stream = self.streams[rank.number]
        rank.enter(made, stream)
        stream.run(self._delay_ns(), partial(write, rank.number))
        rank.launched(made, stream)
