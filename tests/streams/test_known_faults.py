"""Faults of event, stream and pinned memory that systems of this kind have shipped with."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_streams import DeviceStream
from phloem.cuda_streams.dispatch import Dispatcher
from phloem.cuda_streams.fences import Fence, LoopPoster
from phloem.cuda_streams.host import PinnedMemory, ordinary_memory
from phloem.cuda_streams.pools import HostPools
from phloem.cuda_streams.threads import ThreadEngine
from phloem.errors import HostMemoryShort
from streams.bench import Bench, apply
from streams.fake_device import FakeDriver, FakeStream

pytestmark = pytest.mark.not_sim("real engines and their threads")


def post() -> LoopPoster:
    return LoopPoster(asyncio.get_running_loop())


@asynccontextmanager
async def forward(
    driver: FakeDriver,
) -> AsyncGenerator[tuple[DeviceStream, FakeStream, threading.Event]]:
    """The caller's stream, held up until the gate is open."""
    native, gate = driver.new_stream("forward"), threading.Event()
    stream = DeviceStream("forward", native, driver, post())
    native.put(lambda: (gate.wait(), None)[1])
    try:
        yield stream, native, gate
    finally:
        gate.set()
        stream.close()


def write(bench: Bench, page: int, value: int) -> None:
    for layer in (2, 3):
        for part in bench.device.kv_rows.parts(layer):
            part[page] = value


def host_is(bench: Bench, page: int, value: int) -> bool:
    return all(
        bool((part[page] == value).all()) for n in (2, 3) for part in bench.host.kv_rows.parts(n)
    )


@pytest.mark.parametrize("waits", [True, False])
async def test_f070_a_backup_waits_for_the_stream_that_computes(waits: bool) -> None:
    bench = Bench.make("device, batched")
    engine = bench.engine()
    async with forward(bench.driver) as (stream, native, gate):
        bench.driver.enqueue(native, lambda: write(bench, 1, 77))
        item = Copy(bench.device.kv_rows, bench.host.kv_rows, [1], [2])
        after = (stream.record(),) if waits else ()
        ticket = engine.submit(CopyBatch("d2h", (item,), after))
        if not waits:
            await ticket
        gate.set()
        await ticket
        assert host_is(bench, 2, 77) == waits, "without the wait it must be the old bytes"
    bench.close()


@pytest.mark.parametrize("kind", ["device, batched", "device, staged"])
async def test_f071_each_copy_in_flight_has_its_own_tables(kind: str) -> None:
    """Many copies of other rows are queued behind one that waits; each moves its own."""
    bench = Bench.make(kind)
    engine, images = bench.engine(), bench.images()
    async with forward(bench.driver) as (stream, _, gate):
        fence = stream.record()
        items = [
            Copy(bench.device.kv_rows, bench.host.kv_rows, [n + 1, 20 - n], [n, 23 - n])
            for n in range(9)
        ]
        tickets = [engine.submit(CopyBatch("d2h", (item,), (fence,))) for item in items]
        await tickets[-1].placed.reached()
        gate.set()
        for ticket in tickets:
            await ticket
    for item in items:
        apply(item, images)
    assert bench.same(images)
    bench.close()


async def test_f072_a_host_row_is_there_when_the_ticket_is_done_and_not_before() -> None:
    bench = Bench.make("device, batched")
    engine = bench.engine()
    write(bench, 1, 9)
    async with forward(bench.driver) as (stream, _, gate):
        item = Copy(bench.device.kv_rows, bench.host.kv_rows, [1], [2])
        ticket = engine.submit(CopyBatch("d2h", (item,), (stream.record(),), by_layer=True))
        await ticket.placed.reached()  # the call that copies has returned
        assert not ticket.done and ticket.layers_done == 0 and not host_is(bench, 2, 9)
        gate.set()
        await ticket
        assert host_is(bench, 2, 9)
    bench.close()


class OneStream(FakeDriver):
    """All its streams are the same."""

    def new_stream(self, name: str) -> FakeStream:
        return self.streams[0] if self.streams else super().new_stream(name)

    def close_stream(self, stream: object) -> None:
        del stream
        self.closed += 1


async def test_f073_streams_that_are_the_same_are_slower_and_no_less_right() -> None:
    bench, driver = Bench.make("device, batched"), OneStream()
    images = bench.images()
    engines = [DeviceEngine(post(), driver) for _ in range(2)]
    device, host = bench.device.kv_rows, bench.host.kv_rows
    for n in range(1, 11):
        down = Copy(device, host, [n], [n])
        up = Copy(host, device, [n], [n + 11])
        store = engines[n % 2].submit(CopyBatch("d2h", (down,)))
        load = engines[1 - n % 2].submit(CopyBatch("h2d", (up,), requires=(store,), by_layer=True))
        await load
        for item in (down, up):
            apply(item, images)
    assert bench.same(images)
    for engine in engines:
        engine.close()


async def test_f085_memory_that_cannot_be_pinned_is_refused_and_the_engine_goes_on() -> None:
    bench = Bench.make("device, batched")
    engine = bench.engine()

    def refuse(address: int, nbytes: int) -> None:
        del address, nbytes
        raise RuntimeError("the driver answered 2")

    memory = PinnedMemory(refuse, lambda _: None)
    with pytest.raises(HostMemoryShort, match="pinning failed: the driver answered 2") as caught:
        HostPools.allocate(bench.device, pages=3, states=0, memory=memory)
    assert caught.value.asked == 3 * bench.host.kv_rows.row_bytes
    plain = HostPools.allocate(bench.device, pages=3, states=0, memory=ordinary_memory)
    item = Copy(bench.device.kv_rows, plain.kv_rows, [1], [2])
    await engine.submit(CopyBatch("d2h", (item,)))
    assert torch.equal(plain.kv_rows.parts(3)[0][2], bench.device.kv_rows.parts(3)[0][1])
    bench.close()


class CountingDriver(FakeDriver):
    """Knows what was asked of it."""

    def __init__(self) -> None:
        super().__init__(batched=False)
        self.taken: list[int] = []

    def empty(self, stream: object, nbytes: int) -> torch.Tensor:
        self.taken.append(nbytes)
        return super().empty(stream, nbytes)


async def test_f086_a_slow_copy_makes_no_memory_grow() -> None:
    bench, driver = Bench.make("device, staged"), CountingDriver()
    stage = 2 * bench.device.page_bytes
    engine = DeviceEngine(post(), driver, stage_bytes=stage)
    async with forward(driver) as (stream, _, gate):
        slow = Copy(bench.device.kv_rows, bench.host.kv_rows, [1], [1])
        first = engine.submit(CopyBatch("d2h", (slow,), (stream.record(),)))
        item = Copy(bench.device.kv_rows, bench.host.kv_rows, [2, 3, 4], [2, 3, 4])
        rest = [engine.submit(CopyBatch("d2h", (item,))) for _ in range(300)]
        await rest[-1].placed.reached()
        assert not first.done
        assert driver.taken == [stage] * 3 and not driver.pinned, "one buffer for each channel"
        gate.set()
        for ticket in rest:
            await ticket
    engine.close()


@pytest.mark.parametrize("kind", ["threads", "device, batched"])
async def test_f102_nothing_spins_while_it_waits(kind: str) -> None:
    bench = Bench.make(kind)
    engine: Dispatcher = bench.engine()
    assert isinstance(engine, ThreadEngine | DeviceEngine)
    gate = Fence()
    item = Copy(bench.device.kv_rows, bench.host.kv_rows, [1], [2])
    ticket = engine.submit(CopyBatch("d2h", (item,), (gate,)))
    async with forward(bench.driver) as (stream, _, _):
        behind = asyncio.create_task(stream.record().reached())
        used: list[float] = []
        for _ in range(3):  # once the collector may have come between
            cpu = time.process_time()
            await asyncio.sleep(0.1)
            used.append(time.process_time() - cpu)
        assert min(used) < 0.033, "what spins would take all of the time"
        assert not ticket.done and not behind.done()
    gate.mark_passed()
    await ticket
    await behind
    bench.close()
