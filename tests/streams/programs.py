"""Random programs of steps, backups, loads, copies on write, clears, cancels and faults.

Each row knows who reads and who wrote it last, and every use waits for them, as the runtime does.
At the end the bytes must be those of a plain replay.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from phloem.cuda_streams.batches import Channel, Clear, Copy, CopyBatch, CopyItem
from phloem.cuda_streams.clocks import VirtualClock
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_streams import DeviceStream
from phloem.cuda_streams.dispatch import Dispatcher
from phloem.cuda_streams.engine import Ticket, TicketState
from phloem.cuda_streams.fences import Fence, LoopPoster, Stream
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.rows import RowPool
from phloem.cuda_streams.virtual import VirtualEngine, VirtualStream
from phloem.cuda_streams.workers import ThreadWorker
from streams.bench import RANKS, Bench, apply
from streams.ranked import FAST, Fleet, jitter, over_ranks, virtual_engines

OPS = (
    "step", "backup", "load", "state down", "state up", "cow", "clear", "free", "allocate",
    "cancel", "pause",
)  # fmt: skip
Op = tuple[str, int, int]


@dataclass
class Row:
    """Who uses a row. `writer` is a ticket where its data may fail, else a fence."""

    writer: Fence | Ticket = field(default_factory=Fence.settled)
    readers: list[Fence | Ticket] = field(default_factory=list)


@dataclass
class Program:
    bench: Bench
    engine: Dispatcher
    fenced: bool
    write_on_stream: Callable[[list[Fence], Callable[[int], None]], Fence]  # for each rank
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)
    # Device pages that nobody owns, oldest first, each with those who may still touch it.
    free: dict[int, list[Fence | Ticket]] = field(default_factory=dict)
    log: list[tuple[Ticket | None, CopyItem, int]] = field(default_factory=list)

    def row(self, pool: RowPool, number: int) -> Row:
        return self.rows.setdefault((pool.name, number), Row())

    def copy(self, channel: Channel, item: CopyItem, *, by_layer: bool) -> None:
        target = self.row(item.target, item.target_ids[0])
        after = [*target.readers, target.writer]
        requires: list[Ticket] = []
        if isinstance(item, Copy):
            source = self.row(item.source, item.source_ids[0])
            if isinstance(source.writer, Ticket):
                requires.append(source.writer)
            else:
                after.append(source.writer)
        if not self.fenced:
            after, requires = [], []
        label = f"{channel} {len(self.log)}"
        batch = CopyBatch(
            channel, (item,), tuple(after), tuple(requires), by_layer=by_layer, label=label
        )
        ticket = self.engine.submit(batch)
        if isinstance(item, Copy):
            self.row(item.source, item.source_ids[0]).readers.append(ticket)
        self.rows[item.target.name, item.target_ids[0]] = Row(writer=ticket)
        self.log.append((ticket, item, 0))

    def step(self, number: int, seed: int) -> None:
        """A forward pass writes a page; a step writes whatever became of the page before."""
        row = self.row(self.bench.device.kv_rows, number)
        self.write(number, seed, [*row.readers, row.writer])

    def write(self, number: int, seed: int, uses: list[Fence | Ticket]) -> None:
        pool = self.bench.device.kv_rows
        if not self.fenced:
            uses = []
        fences = [use.quiesced if isinstance(use, Ticket) else use for use in uses]

        def write(rank: int) -> None:
            scribble(self.bench.shards[rank][0], number, seed)

        ended = self.write_on_stream(fences, write)
        self.rows[pool.name, number] = Row(writer=ended)
        self.log.append((None, Clear(pool, [number]), seed))

    def give_back(self, number: int) -> None:
        """Its owner leaves, whatever still runs: only these fences say when it may be written."""
        row = self.row(self.bench.device.kv_rows, number)
        self.free[number] = [*row.readers, row.writer]
        del self.rows[self.bench.device.kv_rows.name, number]

    def allocate(self, seed: int) -> None:
        """Somebody takes the page that has been free for longest, and writes it at once."""
        number = next(iter(self.free))
        self.write(number, seed, self.free.pop(number))

    def do(self, op: Op) -> None:
        kind, a, b = op
        device, host = self.bench.device, self.bench.host
        page, other = 1 + a % (device.pages - 1), b % host.kv_rows.count
        slot, slot2 = 1 + a % (device.slots - 1), b % host.state_rows.count
        by_layer = (a + b) % 2 == 0
        if kind == "allocate":
            if self.free:
                self.allocate(a * 1000 + b)
        elif kind in ("step", "backup", "load", "free") and page in self.free:
            pass  # nobody owns it, so nobody uses it
        elif kind == "free":
            self.give_back(page)
        elif kind == "step":
            self.step(page, a * 1000 + b)
        elif kind == "backup":
            self.copy("d2h", Copy(device.kv_rows, host.kv_rows, [page], [other]), by_layer=by_layer)
        elif kind == "load":
            self.copy("h2d", Copy(host.kv_rows, device.kv_rows, [other], [page]), by_layer=by_layer)
        elif kind == "state down":
            item = Copy(device.state_rows, host.state_rows, [slot], [slot2])
            self.copy("d2h", item, by_layer=by_layer)
        elif kind == "state up":
            item = Copy(host.state_rows, device.state_rows, [slot2], [slot])
            self.copy("h2d", item, by_layer=by_layer)
        elif kind == "cow" and slot != 1 + b % (device.slots - 1):
            target = 1 + b % (device.slots - 1)
            item = Copy(device.state_rows, device.state_rows, [slot], [target])
            self.copy("d2d", item, by_layer=by_layer)
        elif kind == "clear":
            self.copy("d2d", Clear(device.state_rows, [slot]), by_layer=by_layer)
        elif kind == "cancel" and self.log:
            ticket = self.log[a % len(self.log)][0]
            if ticket is not None:
                ticket.cancel()

    def verdict(self, images: dict[str, list[torch.Tensor]]) -> str:
        """What is wrong at the end, in words; empty if nothing is."""
        unknown: set[tuple[str, int]] = set()
        for ticket, item, seed in self.log:
            target = (item.target.name, item.target_ids[0])
            source = (item.source.name, item.source_ids[0]) if isinstance(item, Copy) else None
            if ticket is None:
                for rank in RANKS:
                    scribble_image(images.get(item.target.name + rank, []), target[1], seed)
                unknown.discard(target)
                continue
            if not ticket.done:
                return f"{ticket} hangs"
            if ticket.state is TicketState.DONE:
                apply(item, images)
            # A failed copy leaves its target undefined, and so does a copy of what is undefined.
            lost = ticket.state is not TicketState.DONE or source in unknown
            (unknown.add if lost else unknown.discard)(target)
        for name, parts in self.bench.images().items():
            for part, want in zip(parts, images[name], strict=True):
                for row in range(len(part)):
                    known = (name.removesuffix(RANKS[1]), row) not in unknown
                    if known and not torch.equal(part[row], want[row]):
                        return f"row {row} of {name} has the wrong bytes"
        left = self.engine.inflight_bytes()
        return f"{left} bytes still in flight" if left else ""


def new_bytes(size: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=rng, dtype=torch.uint8)


def scribble(pool: RowPool, row: int, seed: int) -> None:
    for layer in range(pool.layers):
        for part in pool.parts(layer):
            part[row] = new_bytes(part.shape[1], seed)


def scribble_image(parts: list[torch.Tensor], row: int, seed: int) -> None:
    for part in parts:
        part[row] = new_bytes(part.shape[1], seed)


def faults(seed: int) -> Callable[[Ticket, int], None]:
    """Every tenth copy or so fails at some layer."""

    def fault(ticket: Ticket, layer: int) -> None:
        if random.Random(seed * 1_000_003 + ticket.seq * 101 + layer).random() < 0.03:
            raise OSError(f"injected at layer {layer}")

    return fault


def run_virtual(ops: list[Op], seed: int, *, fenced: bool = True) -> tuple[str, int]:
    """(verdict, hazards found)."""
    bench, clock, rng = (
        Bench.make("virtual", pages=6, states=5),
        VirtualClock(),
        random.Random(seed),
    )
    engine = VirtualEngine(
        clock, links=FAST, hazards=bench.hazards, order_seed=seed, fault=faults(seed)
    )
    stream = VirtualStream("forward", clock)

    def write(fences: list[Fence], fn: Callable[[int], None]) -> Fence:
        for fence in fences:
            stream.wait(fence)
        stream.run(rng.randrange(2000), partial(fn, 0))
        return stream.record()

    program, images = Program(bench, engine, fenced, write), bench.images()
    for op in ops:
        program.do(op)
        if op[0] == "pause" or rng.random() < 0.3:
            clock.run(until_ns=clock.now_ns() + rng.randrange(3000))
    clock.run()
    return program.verdict(images), len(bench.hazards.found)


def run_ranked(ops: list[Op], seed: int, *, fenced: bool = True) -> tuple[str, int]:
    """(verdict, hazards found) on two ranks: one slow, wires late, faults on either."""
    bench, clock, rng = (
        Bench.make("two ranks", pages=6, states=5),
        VirtualClock(),
        random.Random(seed),
    )
    checkers = (bench.hazards, HazardChecker())
    engines = virtual_engines(
        clock, checkers, faults=(faults(seed), faults(seed + 1)), order_seed=seed
    )

    def post(fn: Callable[[], None]) -> None:
        clock.call_at(clock.now_ns(), fn)

    ranks = over_ranks(post, clock, bench.shards, engines, delay_ns=jitter(seed, 2000))
    fleet = Fleet(ranks, clock, jitter(seed + 1, 2000))

    def write(fences: list[Fence], fn: Callable[[int], None]) -> Fence:
        return fleet.run(fences, fn)

    program, images = Program(bench, ranks.head, fenced, write), bench.images()
    for op in ops:
        program.do(op)
        if op[0] == "pause" or rng.random() < 0.3:
            clock.run(until_ns=clock.now_ns() + rng.randrange(6000))
    clock.run()
    verdict = program.verdict(images)
    ranks.head.submit(CopyBatch("d2d", (Clear(bench.device.state_rows, [1]),)))
    clock.run()
    if any(rank.remembered > 1 for rank in ranks.ranks):
        verdict += f"{ranks.ranks} remember what nobody will speak of"
    return verdict, sum(len(checker.found) for checker in checkers)


async def run_real(kind: str, ops: list[Op], seed: int) -> str:
    """The verdict on an engine that moves bytes by threads."""
    bench, rng = Bench.make(kind, pages=6, states=5), random.Random(seed)
    post = LoopPoster(asyncio.get_running_loop())
    engine = bench.engine(faults(seed))
    on_device, driver = isinstance(engine, DeviceEngine), bench.cuda or bench.driver
    forward = driver.new_stream("forward")
    device_stream = DeviceStream("forward", forward, driver, post)
    worker = ThreadWorker("forward", post)
    stream: Stream = device_stream if on_device else worker

    def write(fences: list[Fence], fn: Callable[[int], None]) -> Fence:
        for fence in fences:
            if on_device:  # a device waits for events only: see `Ticket.placed`
                placed = threading.Event()
                fence.add_recorded_hook(placed.set)
                assert placed.wait(60)
            stream.wait(fence)
        if on_device:
            driver.enqueue(forward, partial(fn, 0))
        else:
            worker.run(fn, 0)
        return stream.record()

    program, images = Program(bench, engine, True, write), bench.images()
    try:
        for op in ops:
            program.do(op)
            if op[0] == "pause":
                await asyncio.sleep(rng.random() * 0.002)
        await engine.drain()
        await stream.record().reached()
        return program.verdict(images)
    finally:
        bench.close()
        worker.close()
        device_stream.close()


def some_ops(seed: int, count: int = 60) -> list[Op]:
    rng = random.Random(seed)
    return [(rng.choice(OPS), rng.randrange(40), rng.randrange(40)) for _ in range(count)]
