"""The device engine on a fake device: what waits where, what a lost device does, who goes first."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from time import monotonic_ns

import pytest
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_mover import _runs
from phloem.cuda_streams.device_streams import DeviceStream
from phloem.cuda_streams.engine import CopyCancelled, CopyFailed, Ticket
from phloem.cuda_streams.fences import Fence, LoopPoster, StepTicket
from phloem.cuda_streams.host import HostMemory
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.errors import EngineDead, InvalidRequest
from phloem.runtime.layout import ModelLayout
from streams.bench import LAYOUT, Bench, apply
from streams.fake_device import FakeDriver, FakeEvent, FakeStream

pytestmark = pytest.mark.not_sim("real engines and their threads")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench.make("device, batched")
    yield bench
    bench.close()
    assert all(engine.inflight_bytes() == 0 for engine in bench.engines)


def backup(bench: Bench, source: int, target: int) -> Copy:
    return Copy(bench.device.kv_rows, bench.host.kv_rows, [source], [target])


def load(bench: Bench, source: int, target: int) -> Copy:
    return Copy(bench.host.kv_rows, bench.device.kv_rows, [source], [target])


async def test_streams_wait_for_events_and_the_host_for_nothing(bench: Bench) -> None:
    engine, images = bench.engine(), bench.images()
    driver, post = bench.driver, LoopPoster(asyncio.get_running_loop())
    forward = driver.new_stream("forward")
    assert isinstance(forward, FakeStream)
    stream, gate = DeviceStream("forward", forward, driver, post), threading.Event()
    forward.put(lambda: (gate.wait(), None)[1])
    told, heard = threading.Event(), threading.Event()
    assert isinstance(engine, DeviceEngine)
    backups, loads = engine._streams["d2h"], engine._streams["h2d"]
    assert isinstance(backups, FakeStream) and isinstance(loads, FakeStream)
    # What runs next ends when it was told that what it waited for is over: then it has begun.
    backups.put(lambda: (told.wait(), None)[1])
    loads.put(lambda: (heard.wait(), None)[1])
    step = StepTicket(stream, post=post)
    step.launched()
    step.end()
    first = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),), after=(step.fence,)))
    second = engine.submit(CopyBatch("h2d", (load(bench, 2, 3),), requires=(first,), by_layer=True))
    await second.placed.reached()  # everything is on the streams while the step still runs
    assert not step.fence.passed and not first.done and not second.done
    assert bench.same(images)
    stream.wait(second.layer_fence(2))
    seen: list[bool] = []
    driver.enqueue(
        forward,
        lambda: seen.append(torch.equal(bench.device.kv[2].k[3], bench.device.kv[2].k[1])),
    )
    opened_ns = monotonic_ns()
    gate.set()
    await step.fence.reached()
    told.set()
    await first
    heard.set()
    await second
    # Launched long before, they began only when the device let them.
    assert first.started_ns is not None and first.started_ns >= opened_ns
    assert second.started_ns is not None and second.started_ns >= first.started_ns
    await stream.record().reached()
    for ticket in (first, second):
        apply(ticket.batch.items[0], images)
    assert bench.same(images) and seen == [True]
    stream.close()


async def test_a_stream_goes_no_further_before_the_event_it_waits_for(bench: Bench) -> None:
    engine, images = bench.engine(), bench.images()
    backups, event, fence = engine._streams["d2h"], FakeEvent(), Fence()  # type: ignore[attr-defined]
    fence.mark_recorded(event)
    copy = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),), after=(fence,)))
    await copy.placed.reached()
    behind = threading.Event()
    backups.put(behind.set)
    assert not behind.wait(0.1) and bench.same(images)
    event.flag.set()
    fence.mark_passed()
    await copy
    apply(copy.batch.items[0], images)
    assert bench.same(images) and behind.wait(60)


async def test_whether_a_copy_has_begun_is_not_guessed(bench: Bench) -> None:
    """Its end is heard before the end of one that it waited for: the device alone knows when."""
    engine, held = bench.engine(), FakeEvent()
    assert isinstance(engine, DeviceEngine)
    heard, recorded = Fence(), FakeEvent()
    heard.mark_recorded(recorded)
    engine._waiters["d2h"].after(held, lambda _: None)
    try:
        first = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))
        waits = CopyBatch("h2d", (load(bench, 2, 3),), after=(heard,), requires=(first,))
        second = engine.submit(waits)
        await second.placed.reached()
        assert second.started_ns is None, "it waits"
        recorded.flag.set()
        heard.mark_passed()
        await second
        assert not first.done and second.started_ns is None and second.ended_ns is not None
    finally:
        recorded.flag.set()
        held.flag.set()
    await first
    third = engine.submit(CopyBatch("h2d", (load(bench, 2, 3),), requires=(first,)))
    await third
    assert second.started_ns is None, "it is not made up later"
    times = [first.submitted_ns, first.started_ns, first.ended_ns, third.started_ns, third.ended_ns]
    known = [time for time in times if time is not None]
    assert len(known) == len(times) and known == sorted(known)


async def test_a_fence_that_is_not_recorded_is_refused(bench: Bench) -> None:
    engine, fence = bench.engine(), Fence()
    driver, post = bench.driver, LoopPoster(asyncio.get_running_loop())
    stream = DeviceStream("forward", driver.new_stream("forward"), driver, post)
    ticket = engine.submit(CopyBatch("h2d", (load(bench, 1, 2),), after=(fence,)))
    with pytest.raises(InvalidRequest, match="not recorded"):
        stream.wait(ticket.layer_fence(0))
    fence.mark_passed()
    await ticket.placed.reached()
    stream.wait(ticket.layer_fence(0))
    await ticket
    stream.wait(ticket.layer_fence(0))
    stream.close()


async def test_what_is_recorded_on_a_stream_that_was_closed_is_told(bench: Bench) -> None:
    driver, post = bench.driver, LoopPoster(asyncio.get_running_loop())
    forward = driver.new_stream("forward")
    assert isinstance(forward, FakeStream)
    stream, gate = DeviceStream("forward", forward, driver, post), threading.Event()
    step = StepTicket(stream, post=post)
    stream.close()
    forward.put(lambda: (gate.wait(), None)[1])
    step.abandon()
    await asyncio.sleep(0.01)
    assert not step.fence.passed, "it may be running"
    gate.set()
    await asyncio.wait_for(step.fence.reached(), 60)
    stream.close()


async def test_f103_bulk_goes_through_a_window_and_urgent_past_it(bench: Bench) -> None:
    gate, order = threading.Event(), list[int]()

    def note(ticket: Ticket, layer: int) -> None:
        if layer == 0:
            order.append(ticket.seq)

    engine = bench.engine(note)
    driver, post = bench.driver, LoopPoster(asyncio.get_running_loop())
    forward = driver.new_stream("forward")
    assert isinstance(forward, FakeStream)
    stream = DeviceStream("forward", forward, driver, post)
    forward.put(lambda: (gate.wait(), None)[1])
    after = (stream.record(),)
    bulk = [
        engine.submit(CopyBatch("d2h", (backup(bench, n, n),), after, priority=1))
        for n in range(1, 7)
    ]
    await bulk[1].placed.reached()
    urgent = engine.submit(CopyBatch("d2h", (backup(bench, 9, 9),), after))
    await urgent.placed.reached()
    launched = list(order)
    gate.set()
    assert launched == [0, 1, urgent.seq], "two of the bulk, then the urgent one"
    await engine.drain()
    assert order == [0, 1, urgent.seq, 2, 3, 4, 5] and all(ticket.done for ticket in bulk)
    stream.close()


async def test_s142_at_most_three_loads_are_on_the_stream(bench: Bench) -> None:
    """The fourth is deferred: it can still be cancelled, and then it never touches memory."""
    gate = threading.Event()
    engine = bench.engine()
    driver, post = bench.driver, LoopPoster(asyncio.get_running_loop())
    forward = driver.new_stream("forward")
    assert isinstance(forward, FakeStream)
    stream = DeviceStream("forward", forward, driver, post)
    forward.put(lambda: (gate.wait(), None)[1])
    after = (stream.record(),)
    loads = [
        engine.submit(CopyBatch("h2d", (load(bench, n, n),), after, by_layer=True))
        for n in range(1, 6)
    ]
    other = engine.submit(CopyBatch("d2h", (backup(bench, 9, 9),), after))
    await loads[2].placed.reached()
    await other.placed.reached()
    await asyncio.sleep(0.01)
    assert [ticket.placed.passed for ticket in loads] == [True, True, True, False, False]
    loads[3].cancel()
    gate.set()
    await engine.drain()
    assert [ticket.state.value for ticket in loads] == ["done"] * 3 + ["cancelled", "done"]
    assert loads[3].layers_done == 0
    stream.close()


async def test_cancelled_before_its_launch_it_ends_after_what_it_waits_for(bench: Bench) -> None:
    launcher, running = threading.Event(), threading.Event()
    engine = bench.engine(lambda ticket, _: (ticket.seq == 0 and launcher.wait(60), None)[1])
    driver, post = bench.driver, LoopPoster(asyncio.get_running_loop())
    forward = driver.new_stream("forward")
    assert isinstance(forward, FakeStream)
    stream = DeviceStream("forward", forward, driver, post)
    forward.put(lambda: (running.wait(), None)[1])
    fence = stream.record()  # recorded, so nothing keeps the ticket from being launched
    engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))
    cancelled = engine.submit(CopyBatch("d2h", (backup(bench, 3, 4),), after=(fence,)))
    cancelled.cancel()
    launcher.set()
    await asyncio.sleep(0.05)
    early = cancelled.done
    running.set()
    with pytest.raises(CopyCancelled, match="never started"):
        await cancelled
    assert not early and fence.passed
    stream.close()


async def test_a_lost_device_fails_everything_at_once(bench: Bench) -> None:
    engine = bench.engine()
    driver = bench.driver
    good = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))
    await good
    waits = engine.submit(CopyBatch("h2d", (load(bench, 1, 2),), after=(Fence(),)))
    driver.lost = True
    bad = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))
    for ticket in (bad, waits):
        with pytest.raises(EngineDead):
            await ticket
    with pytest.raises(EngineDead):
        engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))


async def test_a_device_lost_behind_the_last_layer_fails_the_copy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last piece of work and the event behind it: the launching thread goes on."""
    engine, driver = bench.engine(), bench.driver
    record = driver.record

    def lost(stream: object) -> object:
        driver.lost = True
        return record(stream)

    monkeypatch.setattr(driver, "record", lost)
    ticket = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead):
            await ticket


async def test_an_engine_that_cannot_be_made_leaves_nothing() -> None:
    driver, threads = FakeDriver(), threading.active_count()

    def no_memory(stream: object, nbytes: int) -> torch.Tensor:
        if driver.streams.index(stream) == 1:  # type: ignore[arg-type]  # it is one of these
            raise torch.OutOfMemoryError
        return torch.empty(nbytes, dtype=torch.uint8)

    driver.empty = no_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        DeviceEngine(LoopPoster(asyncio.get_running_loop()), driver)
    assert not driver.streams and driver.closed == 2
    async with asyncio.timeout(60):
        while threading.active_count() > threads:  # those of the fake streams  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_an_error_that_passes_fails_one_copy(bench: Bench) -> None:
    engine = bench.engine()
    driver = bench.driver
    stream = engine._streams["d2h"]  # type: ignore[attr-defined]
    assert isinstance(stream, FakeStream)
    stream.error = RuntimeError("invalid value")
    bad = engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),), by_layer=True))
    with pytest.raises(CopyFailed, match="invalid value"):
        await bad
    stream.error = None
    await engine.submit(CopyBatch("d2h", (backup(bench, 1, 2),)))
    assert driver.alive()


async def test_threads_enter_and_streams_are_given_back() -> None:
    driver = FakeDriver()
    engine = DeviceEngine(LoopPoster(asyncio.get_running_loop()), driver)
    engine.close()
    engine.close()
    names = {"phloem-launcher", "phloem-d2h", "phloem-h2d", "phloem-d2d"}
    assert set(driver.threads) == names and driver.closed == 3


@pytest.mark.parametrize("batched", [True, False])
async def test_pieces_and_buffers_of_any_size(batched: bool) -> None:
    # Runs are cut where host memory was registered in pieces, chunks where the buffer ends.
    device = DevicePools.allocate(LAYOUT, pages=20, states=1, page_size=2)

    def memory(count: int, row_bytes: int) -> HostMemory:
        return HostMemory(torch.zeros((count, row_bytes), dtype=torch.uint8), 3)

    host = HostPools.allocate(device, pages=20, states=1, memory=memory)
    for part in (*device.kv_rows.parts(2), *device.kv_rows.parts(3)):
        part.random_(0, 256)
    want = [part.clone() for layer in (2, 3) for part in device.kv_rows.parts(layer)]
    rng, post = random.Random(1), LoopPoster(asyncio.get_running_loop())
    for rows in (1, 4, 50):
        stage_bytes = rows * device.page_bytes
        engine = DeviceEngine(post, FakeDriver(batched=batched), stage_bytes=stage_bytes)
        ids = list(range(20))
        there = rng.sample(ids, 20)
        await engine.submit(CopyBatch("d2h", (Copy(device.kv_rows, host.kv_rows, ids, there),)))
        for part in (*device.kv_rows.parts(2), *device.kv_rows.parts(3)):
            part.zero_()
        await engine.submit(CopyBatch("h2d", (Copy(host.kv_rows, device.kv_rows, there, ids),)))
        got = [part for layer in (2, 3) for part in device.kv_rows.parts(layer)]
        assert all(map(torch.equal, got, want))
        engine.close()


def test_runs_end_at_pieces() -> None:
    assert _runs([2, 3, 4, 5, 9, 8], 4) == [(0, 2, 2), (2, 4, 2), (4, 9, 1), (5, 8, 1)]
    assert _runs([0], 1) == [(0, 0, 1)]


async def test_large_parts_go_direct() -> None:
    layout = ModelLayout.attention_only(layers=2, kv_heads=8, head_dim=128)
    device = DevicePools.allocate(layout, pages=4, states=0, page_size=16)
    host = HostPools.allocate(device, pages=4, states=0)
    device.kv[1].k[2].fill_(3)
    driver, pieces = FakeDriver(), list[list[int]]()
    inner = driver.batch_copy
    assert inner is not None
    driver.batch_copy = lambda stream, targets, sources, sizes: (
        pieces.append(sizes.tolist()), inner(stream, targets, sources, sizes))[1]  # fmt: skip
    engine = DeviceEngine(LoopPoster(asyncio.get_running_loop()), driver)
    await engine.submit(CopyBatch("d2h", (Copy(device.kv_rows, host.kv_rows, [2, 1], [0, 3]),)))
    assert pieces == [[64 << 10] * 2] * 2, "one call a layer, a piece for each page"
    assert host.kv_rows.parts(1)[0][0].equal(device.kv_rows.parts(1)[0][2])
    engine.close()
