"""The runtime over a device's streams, on the fake device: hand-over, reuse, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import pytest
import torch
from streams.fake_device import FakeDriver, FakeStream

from phloem import CacheConfig, CacheRuntime, DevicePools, InvalidRequest, ModelLayout, StateSpec
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_streams import DeviceStream, DeviceWorker
from phloem.cuda_streams.host import PinnedMemory
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.workers import ThreadWorker
from phloem.runtime.devices import driver_for, engine_for
from phloem.runtime.request import Request
from phloem.runtime.sync import SyncCacheRuntime

pytestmark = pytest.mark.not_sim("the threads of a device")

PAGE = 4
LAYOUT = ModelLayout.hybrid(
    kv_layers=1, kv_heads=1, head_dim=4, kv_dtype="float32",
    states=[StateSpec("recurrent", (2, 4), layers=1)],
)  # fmt: skip
CONFIG = CacheConfig(
    layout=LAYOUT, page_size=PAGE, state_chunk=PAGE, device_pages=6, device_states=4
)
PROMPT = list(range(2 * PAGE + 1))


def native(driver: FakeDriver, name: str = "forward") -> tuple[FakeStream, torch.Stream]:
    """The fake stream, and the same as torch's, which is what callers name."""
    stream = driver.new_stream(name)
    return stream, cast("torch.Stream", stream)


@asynccontextmanager
async def opened(cache: CacheRuntime) -> AsyncGenerator[Request]:
    async with cache.request(PROMPT) as request:
        await request.allocate(len(PROMPT))
        await request.ready()
        yield request


async def test_f075_a_step_without_a_stream_of_the_device_is_refused() -> None:
    async with CacheRuntime(CONFIG, driver=FakeDriver()) as cache, opened(cache) as request:
        cpu = ThreadWorker("cpu", cache.core.post)
        for wrong in (None, cpu, torch.Stream(device="cpu")):
            with pytest.raises(InvalidRequest):
                cache.step([request], stream=wrong)
        with pytest.raises(InvalidRequest, match="needs a stream"):
            cache.worker_stream("model")
        assert not request.fences(), "no step was opened"
        cpu.close()


async def test_f020_pages_of_a_step_come_back_after_the_device_has_left_them() -> None:
    driver, gate = FakeDriver(), threading.Event()
    stream, handle = native(driver)
    async with CacheRuntime(CONFIG, driver=driver) as cache:
        async with opened(cache) as request:
            stream.put(lambda: (gate.wait(), None)[1])  # the pass, late
            with cache.step([request], stream=handle) as step:
                step.launched({request: len(PROMPT)})
            assert step.state == "ended" and not step.fence.passed
        stats = cache.stats()
        assert stats.kv.parked == 3 and stats.kv.free == 3, "aborted; the device still writes"
        waiting = asyncio.create_task(cache.allocate(pages=6, owner="next"))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        gate.set()
        grant = await waiting
        assert step.fence.passed and len(grant.pages) == 6
        cache.release(grant)


async def test_a_checkpoint_copies_what_the_late_pass_has_written() -> None:
    driver, gate = FakeDriver(), threading.Event()
    stream, handle = native(driver)
    async with CacheRuntime(CONFIG, driver=driver) as cache:
        async with opened(cache) as request:
            slot = request.state_slot
            assert slot is not None
            state = cache.pools.states[0]["recurrent"]

            def write() -> None:
                gate.wait()
                state[slot].fill_(5)

            stream.put(write)
            with cache.step([request], stream=handle) as step:
                step.launched({request: 2 * PAGE})
            kept = asyncio.create_task(request.checkpoint(state=True))
            await asyncio.sleep(0.02)
            assert not kept.done(), "it waits on the device"
            gate.set()
            assert await kept is not None
        async with cache.request([*PROMPT, 0]) as again:
            await again.allocate(2 * PAGE)
            await again.ready()
            assert again.usable == 2 * PAGE and again.state_slot is not None
            assert bool((state[again.state_slot] == 5).all())


async def test_a_worker_launches_and_the_step_is_told_before() -> None:
    driver, gate = FakeDriver(), threading.Event()
    stream, handle = native(driver)
    async with CacheRuntime(CONFIG, driver=driver) as cache:
        worker = cache.worker_stream("model", on=handle)
        assert isinstance(worker, DeviceWorker)
        async with opened(cache) as request:
            late: list[int] = []

            def forward() -> None:
                gate.wait()
                driver.enqueue(stream, lambda: late.append(1))

            with cache.step([request], stream=worker) as step:
                worker.run(forward)
                step.launched({request: len(PROMPT)})
            await asyncio.sleep(0.02)
            assert not step.fence.passed
            gate.set()
            await step.over()
            assert late == [1]
        worker.close()


async def test_closing_waits_for_what_steps_have_on_streams() -> None:
    driver, gate = FakeDriver(), threading.Event()
    stream, handle = native(driver)
    cache = await CacheRuntime(CONFIG, driver=driver).open()
    async with opened(cache) as request:
        stream.put(lambda: (gate.wait(), None)[1])
        with cache.step([request], stream=handle) as step:
            step.launched({request: len(PROMPT)})
    closing = asyncio.create_task(cache.close())
    await asyncio.sleep(0.02)
    assert not closing.done()
    gate.set()
    await closing
    assert step.fence.passed
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("phloem-caller", "phloem-d2d"))}


async def test_the_engine_suits_the_device() -> None:
    driver = FakeDriver()
    async with CacheRuntime(CONFIG, driver=driver) as cache:
        assert isinstance(cache._engine, DeviceEngine) and cache.stats().near == "a fake"
    async with CacheRuntime(CONFIG) as cache:
        assert isinstance(cache._engine, ThreadEngine) and cache.stats().near == ""
    assert engine_for(None, None) is ThreadEngine
    assert driver_for(torch.device("cpu")) is None
    with pytest.raises(InvalidRequest, match="there are cpu and cuda"):
        driver_for(torch.device("xpu:0"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said_so_at_once() -> None:
    with pytest.raises(InvalidRequest, match="no CUDA device cuda:0"):
        driver_for(torch.device("cuda:0"))


def test_pools_that_are_given_decide_the_device() -> None:
    pools = DevicePools.allocate(LAYOUT, pages=7, states=5, page_size=PAGE)
    assert CacheRuntime(CONFIG, pools=pools, device="cpu").pools is pools
    with pytest.raises(InvalidRequest, match="the pools are on cpu, not on cuda:0"):
        CacheRuntime(CONFIG, pools=pools, device="cuda:0")


def test_without_a_loop_completions_of_the_device_come_by_poll() -> None:
    driver = FakeDriver()
    stream, handle = native(driver)
    with SyncCacheRuntime(CONFIG, driver=driver) as cache:
        with cache.request(PROMPT) as request:
            request.allocate(len(PROMPT))
            request.ready()
            done: list[int] = []
            with cache.step([request], stream=handle) as step:
                stream.put(lambda: done.append(1))
                cache.launched(step, {request: len(PROMPT)})
            step.fence.wait(60)
            cache.poll()
            request.finish()
            assert done == [1]
        assert cache.stats().kv.tree == 2


def test_a_stream_that_is_watched_is_the_runtimes() -> None:
    async def check() -> None:
        driver = FakeDriver()
        _, handle = native(driver)
        async with CacheRuntime(CONFIG, driver=driver) as cache, opened(cache) as request:
            with cache.step([request], stream=handle) as step:
                step.launched({request: len(PROMPT)}, stream=handle)
            watched = cache.core.streams.named(handle)
            assert isinstance(watched, DeviceStream)
            with cache.step([request], stream=watched) as step:
                step.launched({request: len(PROMPT)})
            await step.over()

    asyncio.run(check())


async def test_pinned_memory_is_given_back_when_the_engine_has_ended() -> None:
    """Not before: a copy that runs would write into memory that the device must not reach."""
    order: list[str] = []

    class Notes(FakeDriver):
        def close_stream(self, stream: object) -> None:
            order.append("stream")
            super().close_stream(stream)

        def pinned_memory(self) -> PinnedMemory:
            def unpin(address: int) -> None:
                order.append("unpin")
                del self.pinned[address]

            return PinnedMemory(self.pinned.__setitem__, unpin)

    driver = Notes()
    config = msgspec.structs.replace(CONFIG, host_bytes="1MiB")
    async with CacheRuntime(config, driver=driver) as cache:
        stream, handle = native(driver)
        async with opened(cache) as request:
            with cache.step([request], stream=handle) as step:
                step.launched({request: len(PROMPT)})
            await step.over()
            await request.finish()
        assert len(driver.pinned) == 2 and sum(driver.pinned.values()) == cache.stats().host_bytes
        del stream
    assert not driver.pinned
    assert order == ["stream"] * 3 + ["unpin"] * 2
    assert cache.host_pools is not None, "its bytes can still be looked at"


async def test_memory_of_the_callers_stays_pinned() -> None:
    driver = FakeDriver()
    memory = driver.pinned_memory()
    config = msgspec.structs.replace(CONFIG, host_bytes="1MiB")
    async with CacheRuntime(config, driver=driver, host_memory=memory):
        assert len(driver.pinned) == 2
    assert len(driver.pinned) == 2
    memory.close()
    assert not driver.pinned
