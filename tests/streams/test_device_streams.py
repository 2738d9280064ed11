"""Streams of a device on a fake one: an event comes after the work that it stands for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.device_streams import CallerStreams, DeviceStream, DeviceWorker
from phloem.cuda_streams.fences import Fence, LoopPoster, StepTicket
from phloem.cuda_streams.workers import ThreadWorker
from phloem.errors import InvalidRequest, RuntimeClosed
from streams.bench import Bench
from streams.fake_device import FakeDriver, FakeStream

pytestmark = pytest.mark.not_sim("real engines and their threads")


def post() -> LoopPoster:
    return LoopPoster(asyncio.get_running_loop())


@contextmanager
def worker(driver: FakeDriver) -> Iterator[tuple[DeviceWorker, FakeStream]]:
    native = driver.new_stream("forward")
    made = DeviceWorker("model", native, driver, post())
    try:
        yield made, native
    finally:
        made.close()


async def test_f074_a_step_is_over_after_launches_that_are_still_to_come() -> None:
    """The step is told as launched while the worker has not come to its function yet."""
    driver, gate, ran = FakeDriver(), threading.Event(), list[str]()
    with worker(driver) as (model, native):

        def forward() -> None:
            gate.wait()
            driver.enqueue(native, lambda: (late.wait(), ran.append("kernel"))[1])

        late = threading.Event()
        step = StepTicket(model, post=post())
        work = model.run(forward)
        step.launched()
        step.end()
        assert step.fence.event is None and not step.fence.passed, "nothing is recorded yet"
        recorded = threading.Event()
        step.fence.add_recorded_hook(recorded.set)
        gate.set()
        await asyncio.wrap_future(work)
        assert recorded.wait(60) and not step.fence.passed and not ran
        assert step.fence.event is not None, "the device can wait for it before it has ended"
        late.set()
        await step.fence.reached()
        assert ran == ["kernel"]


async def test_a_copy_behind_a_step_of_a_worker_waits_on_the_device() -> None:
    bench = Bench.make("device, batched")
    engine, driver = bench.engine(), bench.driver
    late = threading.Event()
    with worker(driver) as (model, native):
        rows = bench.device.kv_rows

        def write() -> None:
            late.wait()
            for layer in range(rows.layers):
                for part in rows.parts(layer):
                    part[1] = 7

        step = StepTicket(model, post=post())
        model.run(lambda: driver.enqueue(native, write))
        step.launched()
        step.end()
        item = Copy(rows, bench.host.kv_rows, [1], [2])
        ticket = engine.submit(CopyBatch("d2h", (item,), after=(step.fence,)))
        await ticket.placed.reached()
        assert not ticket.done and not step.fence.passed
        late.set()
        await ticket
        assert all(bool((part[2] == 7).all()) for part in bench.host.kv_rows.parts(3))
    bench.close()


async def test_results_and_errors_come_from_the_stream_they_name() -> None:
    driver = FakeDriver()
    with worker(driver) as (model, native):
        order: list[str] = []
        native.put(lambda: order.append("before"))
        assert await model.call(lambda: (order.append("mine"), 5)[1]) == 5
        assert order == ["before", "mine"]
        with pytest.raises(ZeroDivisionError):
            await model.call(lambda: 1 // 0)
        assert await model.call(lambda: "alive") == "alive"


async def test_a_worker_waits_for_launches_by_itself_and_lets_the_device_wait_for_the_rest() -> (
    None
):
    driver = FakeDriver()
    with worker(driver) as (model, _):
        fence, other = Fence(), driver.new_stream("copies")
        model.wait(fence)
        work = model.run(lambda: None)
        await asyncio.sleep(0.01)
        assert not work.done()
        gate = threading.Event()
        other.put(lambda: (gate.wait(), None)[1])
        event = driver.record(other)
        fence.mark_recorded(event)
        await asyncio.sleep(0.01)
        assert not work.done(), "the device has not come to it"
        gate.set()
        await asyncio.wrap_future(work)
        assert driver.waits == [event]
        fence.mark_passed()
        model.wait(fence)
        strange = Fence()
        strange.mark_recorded("an event of another device")
        model.wait(strange)
        work = model.run(lambda: None)
        await asyncio.sleep(0.01)
        assert not work.done(), "no event to wait for: the thread waits for the fence itself"
        strange.mark_passed()
        await asyncio.wrap_future(work)


async def test_closing_waits_for_what_was_launched_and_refuses_the_rest() -> None:
    driver = FakeDriver()
    native = driver.new_stream("forward")
    model = DeviceWorker("model", native, driver, post())
    gate = threading.Event()
    await model.call(driver.enqueue, native, lambda: (gate.wait(), None)[1])
    fence = model.record()
    closing = asyncio.create_task(asyncio.to_thread(model.close))
    await asyncio.sleep(0.02)
    assert not closing.done() and not fence.passed and not model.record().passed
    gate.set()
    await closing
    assert fence.passed and model.record().passed
    with pytest.raises(RuntimeClosed):
        model.run(lambda: None)
    model.close()


async def test_a_lost_device_passes_every_fence() -> None:
    driver = FakeDriver()
    stream = DeviceStream("forward", driver.new_stream("forward"), driver, post())
    with worker(driver) as (model, _):
        driver.lost = True
        assert stream.record().passed
        await model.record().reached()
    stream.close()


async def test_what_was_on_the_device_before_has_ended() -> None:
    driver, done = FakeDriver(), list[int]()
    loading = driver.new_stream("weights")
    loading.put(lambda: (time.sleep(0.05), done.append(1))[1])
    with worker(driver) as (model, _):
        assert await model.call(lambda: list(done)) == [1]


class TestNamedStreams:
    """What a caller may name, f075: there is no ambient current stream."""

    async def test_f075_on_a_device_a_stream_of_it_must_be_named(self) -> None:
        driver, elsewhere = FakeDriver(), FakeDriver()
        streams, cpu = CallerStreams(driver, post()), ThreadWorker("cpu", post())
        foreign = DeviceStream("far", elsewhere.new_stream("far"), elsewhere, post())
        for wrong, why in (
            (None, "no ambient"),
            (cpu, "knows when functions return"),
            (foreign, "another runtime or device"),
            (torch.Stream(device="cpu"), "no fake stream"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                streams.named(wrong)
        with pytest.raises(InvalidRequest, match="needs a stream"):
            streams.worker("model", None)
        for one in (foreign, cpu, streams):
            one.close()

    async def test_without_a_device_only_streams_of_threads(self) -> None:
        driver = FakeDriver()
        streams, cpu = CallerStreams(None, post()), ThreadWorker("cpu", post())
        mine = DeviceStream("mine", driver.new_stream("mine"), driver, post())
        assert streams.named(None) is None and streams.named(cpu) is cpu
        for wrong in (mine, torch.Stream(device="cpu")):
            with pytest.raises(InvalidRequest, match="is a device's"):
                streams.named(wrong)
        with pytest.raises(InvalidRequest, match="is a device's"):
            streams.worker("model", torch.Stream(device="cpu"))
        for one in (mine, cpu, streams.worker("model", None)):
            one.close()

    async def test_a_native_stream_is_watched_once_and_there_is_a_limit(self) -> None:
        driver = FakeDriver()
        streams = CallerStreams(driver, post(), most=2)
        native = [driver.new_stream(f"n{n}") for n in range(3)]
        first = streams.named(native[0])  # type: ignore[arg-type]  # a fake, not torch's
        assert first is streams.named(native[0])  # type: ignore[arg-type]
        assert first is not streams.named(native[1])  # type: ignore[arg-type]
        assert streams.named(first) is first
        with pytest.raises(InvalidRequest, match="2 streams are in use"):
            streams.named(native[2])  # type: ignore[arg-type]
        done: list[int] = []
        native[0].put(lambda: done.append(1))
        assert first is not None
        first.record()
        native[0].capturing = True  # closing must not need to record
        await streams.settled()
        assert done == [1]
        streams.close()
        streams.close()

    async def test_a_stream_that_captures_runs_nothing(self) -> None:
        driver = FakeDriver()
        streams, native = CallerStreams(driver, post()), driver.new_stream("captured")
        native.capturing = True
        with pytest.raises(InvalidRequest, match="capturing"):
            streams.named(native)  # type: ignore[arg-type]
        native.capturing = False
        step = StepTicket(streams.named(native), post=post())  # type: ignore[arg-type]
        native.capturing = True
        with pytest.raises(InvalidRequest, match="capturing"):
            step.launched()
        assert step.state == "opened"
        native.capturing = False
        step.launched()
        step.end()
        await step.fence.reached()
        streams.close()
