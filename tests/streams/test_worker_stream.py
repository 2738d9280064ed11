"""Worker streams: order, fences, cancelled callers, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phloem.cuda_streams.fences import Fence, LoopPoster, StepTicket
from phloem.cuda_streams.threads import WorkerStream
from phloem.errors import RuntimeClosed


@contextmanager
def worker() -> Iterator[WorkerStream]:
    stream = WorkerStream("model", LoopPoster(asyncio.get_running_loop()))
    try:
        yield stream
    finally:
        stream.close()


async def test_runs_in_order_on_one_named_thread() -> None:
    with worker() as stream:
        seen: list[tuple[int, str]] = []
        for number in range(50):
            stream.run(lambda n=number: seen.append((n, threading.current_thread().name)))
        assert await stream.call(lambda a, b: a + b, 2, b=3) == 5
        assert seen == [(number, "phloem-model") for number in range(50)]


async def test_an_exception_reaches_the_caller_and_the_stream_goes_on() -> None:
    with worker() as stream:
        with pytest.raises(ZeroDivisionError):
            await stream.call(lambda: 1 // 0)
        assert await stream.call(lambda: "alive") == "alive"


async def test_record_waits_for_what_was_enqueued_and_for_no_more() -> None:
    with worker() as stream:
        assert stream.record().passed, "idle"
        first, second = threading.Event(), threading.Event()
        stream.run(first.wait)
        fence = stream.record()
        stream.run(second.wait)
        assert not fence.passed
        heard = asyncio.Event()
        fence.add_callback(heard.set)
        first.set()
        await asyncio.wait_for(heard.wait(), 5)
        assert fence.passed
        second.set()


async def test_a_cancelled_caller_leaves_the_function_running() -> None:
    with worker() as stream:
        gate, ended = threading.Event(), list[str]()

        def work() -> None:
            gate.wait()
            ended.append("ended")

        caller = asyncio.create_task(stream.call(work))
        await asyncio.sleep(0.01)
        fence = stream.record()
        step = StepTicket(stream)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        step.abandon()  # what a `with` block does that is left before the launch was told
        assert not fence.passed and not step.fence.passed and not ended
        gate.set()
        await stream.call(lambda: None)
        assert fence.passed and step.fence.passed and ended == ["ended"]


async def test_wait_holds_the_stream_until_the_fence() -> None:
    with worker() as stream:
        fence, order = Fence(), list[str]()
        stream.wait(fence)
        work = stream.run(lambda: order.append("work"))
        recorded = stream.record()
        await asyncio.sleep(0.02)
        assert not work.done() and not recorded.passed
        order.append("fence")
        fence.mark_passed()
        await asyncio.wrap_future(work)
        assert order == ["fence", "work"]
        stream.wait(Fence.settled())
        assert await stream.call(lambda: 1) == 1


async def test_close_lets_what_runs_end_and_refuses_the_rest() -> None:
    stream = WorkerStream("model", LoopPoster(asyncio.get_running_loop()))
    began, gate, ran = threading.Event(), threading.Event(), list[str]()
    running = stream.run(lambda: (began.set(), gate.wait(), ran.append("running"))[1])
    began.wait()
    stream.wait(Fence())  # never passes: it must not keep the thread
    queued = stream.run(lambda: ran.append("queued"))
    fence = stream.record()
    closing = asyncio.create_task(asyncio.to_thread(stream.close))
    await asyncio.sleep(0.02)
    assert not closing.done()
    gate.set()
    await closing
    assert running.result() is True and ran == ["running"]
    assert fence.passed and stream.record().passed
    with pytest.raises(RuntimeClosed):
        queued.result()
    with pytest.raises(RuntimeClosed):
        stream.run(lambda: None)
    with pytest.raises(RuntimeClosed):
        await stream.call(lambda: None)
    stream.close()


async def test_a_queued_function_can_be_cancelled_by_its_holder() -> None:
    with worker() as stream:
        gate, ran = threading.Event(), list[str]()
        stream.run(gate.wait)
        queued = stream.run(lambda: ran.append("queued"))
        assert queued.cancel()
        gate.set()
        await stream.call(lambda: None)
        assert ran == []
