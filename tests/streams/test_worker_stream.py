"""Worker streams: order, fences, cancelled callers, closing."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from phloem.cuda_streams.fences import Fence, LoopPoster, StepTicket
from phloem.cuda_streams.lockstep import new_worker
from phloem.cuda_streams.workers import WorkerStream
from phloem.errors import RuntimeClosed


def new() -> WorkerStream:
    """Of a thread, or in virtual time on the simulated loop."""
    loop = asyncio.get_running_loop()
    return new_worker("model", LoopPoster(loop), loop)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  any test's condition
            await asyncio.sleep(0.001)


@contextmanager
def worker() -> Iterator[WorkerStream]:
    stream = new()
    try:
        yield stream
    finally:
        stream.close()


async def test_nothing_of_a_function_is_held_when_it_is_over() -> None:
    """An idle stream would keep the memory of the last pass."""

    class Big:
        pass

    with worker() as stream:
        big = Big()
        held = weakref.ref(big)
        await stream.call(lambda one: one is not None, big)
        del big
        await until(lambda: held() is None)


async def test_runs_in_order_on_one_named_thread() -> None:
    with worker() as stream:
        seen: list[tuple[int, threading.Thread]] = []
        for number in range(50):
            stream.run(lambda n: seen.append((n, threading.current_thread())), number)
        assert await stream.call(lambda a, b: a + b, 2, b=3) == 5
        assert [number for number, _ in seen] == list(range(50))
        (thread,) = {thread for _, thread in seen}
        assert thread is not threading.current_thread() and thread.name.startswith("phloem-")


async def test_an_exception_reaches_the_caller_and_the_stream_goes_on() -> None:
    with worker() as stream:
        with pytest.raises(ZeroDivisionError):
            await stream.call(lambda: 1 // 0)
        assert await stream.call(lambda: "alive") == "alive"


async def test_record_waits_for_what_was_enqueued_and_for_no_more() -> None:
    with worker() as stream:
        assert stream.record().passed, "idle"
        first, second = Fence(), Fence()
        stream.run(stream.hold, first)
        fence = stream.record()
        stream.run(stream.hold, second)
        await asyncio.sleep(0.01)
        assert not fence.passed
        heard = asyncio.Event()
        fence.add_callback(heard.set)
        first.mark_passed()
        await asyncio.wait_for(heard.wait(), 60)
        assert fence.passed
        second.mark_passed()


async def test_a_cancelled_caller_leaves_the_function_running() -> None:
    with worker() as stream:
        gate, ended = Fence(), list[str]()

        def work() -> None:
            stream.hold(gate)
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
        gate.mark_passed()
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
        await until(work.done)
        assert order == ["fence", "work"]
        stream.wait(Fence.settled())
        assert await stream.call(lambda: 1) == 1


@pytest.mark.not_sim("close blocks a thread")
async def test_close_lets_what_runs_end_and_refuses_the_rest() -> None:
    stream = new()
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
        gate, ran = Fence(), list[str]()
        stream.run(stream.hold, gate)
        queued = stream.run(lambda: ran.append("queued"))
        assert queued.cancel()
        gate.mark_passed()
        await stream.call(lambda: None)
        assert ran == []
