"""The simulated loop: order, time, deadlocks, and that asyncio and anyio programs run on it."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Coroutine

import anyio
import anyio.lowlevel
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phloem.errors import InvalidRequest
from phloem.runtime.simulation.draws import Draws, NotDeterministic
from phloem.runtime.simulation.loop import (
    POLICIES,
    Policy,
    SimDeadlock,
    SimLivelock,
    SimLoop,
)
from phloem.runtime.simulation.world import sim_run

Main = Callable[[], Coroutine[object, object, object]]


def history(main: Main, seed: int, policy: Policy = "task") -> list[tuple[int, str]]:
    loop = SimLoop(seed, policy=policy, history=100_000)
    sim_run(main, loop)
    return list(loop.history)


async def busy() -> None:
    """Task groups, streams, locks, time-outs, a mass cancellation, shielding, executor work."""
    send, receive = anyio.create_memory_object_stream[int](4)
    lock, total = anyio.Lock(), [0]

    async def produce(count: int, to: MemoryObjectSendStream[int]) -> None:
        async with to as out:
            for number in range(count):
                await out.send(number)
                await anyio.sleep(0.001 * (number % 3))

    async def consume(source: MemoryObjectReceiveStream[int]) -> None:
        async with source:
            async for number in source:
                async with lock:
                    total[0] += number
                    await anyio.lowlevel.checkpoint()

    async def stubborn(number: int) -> None:
        try:
            await anyio.sleep(3600)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.5 + number / 100)

    async with anyio.create_task_group() as group:
        for count in range(5, 15):
            group.start_soon(produce, count, send.clone())
        for _ in range(4):
            group.start_soon(consume, receive.clone())
        send.close()
        receive.close()
    with anyio.move_on_after(10):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(stubborn, number)
    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(asyncio.to_thread(pow, number, 2))
    assert total[0] == sum(sum(range(count)) for count in range(5, 15))


@pytest.mark.parametrize("policy", POLICIES)
def test_asyncio_and_anyio_run_on_it_and_a_seed_repeats(policy: Policy) -> None:
    first = history(busy, 1, policy)
    assert history(busy, 1, policy) == first
    assert history(busy, 2, policy) != first
    assert 10 < first[-1][0] / 1e9 < 20  # the shielded tasks take 10.5 to 10.7 virtual seconds


async def lost_update(fixed: bool = False) -> None:
    """Two workers read, wait, and write back: wrong if they interleave."""
    value, gate = [0], asyncio.Lock()

    async def worker(_: int) -> None:
        async with gate if fixed else asyncio.Lock():
            seen = value[0]
            await asyncio.sleep(0)
            value[0] = seen + 1

    async def later(number: int) -> None:
        for _ in range(6 * number):
            await asyncio.sleep(0)
        await worker(number)

    await asyncio.gather(later(0), later(1))
    assert value[0] == 2


def failing(main: Main, policy: Policy, seeds: int = 100) -> int:
    failed = 0
    for seed in range(seeds):
        try:
            sim_run(main, SimLoop(seed, policy=policy))
        except AssertionError:
            failed += 1
    return failed


def test_a_race_is_found_by_orders_that_asyncio_never_has() -> None:
    assert failing(lost_update, "fifo") == 0
    assert failing(lost_update, "task") > 0
    assert failing(lost_update, "pct") > 0
    assert failing(lambda: lost_update(fixed=True), "task") == 0


def test_a_shortened_schedule_is_asyncio_s_own_after_its_last_step() -> None:
    seed = next(seed for seed in range(100) if failing_seed(lost_update, seed))
    assert not failing_seed(lost_update, seed, scramble=0)
    assert failing_seed(lost_update, seed, scramble=10_000)


def failing_seed(main: Main, seed: int, scramble: int | None = None) -> bool:
    try:
        sim_run(main, SimLoop(seed, scramble=scramble))
    except AssertionError:
        return True
    return False


def test_hypothesis_shrinks_the_schedule() -> None:
    found: list[int] = []

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def schedule(rng: random.Random) -> None:
        loop = SimLoop(rng)
        try:
            sim_run(lost_update, loop)
        except AssertionError:
            found.append(loop.preemptions)
            raise

    with pytest.raises(AssertionError):
        schedule()
    assert min(found) <= found[0]


def test_a_deadlock_names_who_waits_for_what() -> None:
    async def holder(lock: asyncio.Lock) -> None:
        async with lock:
            await asyncio.Event().wait()

    async def main() -> None:
        lock = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            group.create_task(holder(lock), name="first")
            group.create_task(holder(lock), name="second")

    loop = SimLoop(3)
    loop.reporters.append(lambda: ["the mailbox is empty"])
    with pytest.raises(SimDeadlock) as caught:
        sim_run(main, loop)
    text = str(caught.value)
    assert "task first: " in text and "task second: " in text
    assert "holder > Event.wait" in text and "Lock.acquire (line " in text
    assert "the mailbox is empty" in text


def test_a_livelock_is_an_error_and_time_goes_on_in_it() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    loop = SimLoop(0, steps_max=2_000)
    with pytest.raises(SimLivelock, match="no end after 2000 steps"):
        sim_run(main, loop)
    assert loop.time() >= 0.002


def test_another_thread_is_an_error() -> None:
    """In that thread, and of the whole run, though it is over at the next step."""
    caught: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with pytest.raises(RuntimeError, match="called into a simulation"):
        sim_run(main, SimLoop(0))
    assert "called into a simulation" in str(caught[0])


def test_an_error_that_nobody_hears_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        sim_run(main, SimLoop(0))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no policy"):
        SimLoop(0, policy="random")  # type: ignore[arg-type]


def test_equal_timers_and_virtual_time() -> None:
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        loop.call_later(5, order.append, "five")
        loop.call_later(3600, order.append, "an hour")
        await asyncio.sleep(7200)
        assert 7200 <= loop.time() - started < 7200.001

    sim_run(main, SimLoop(0))
    assert order == ["five", "an hour"]


def test_two_runs_of_one_seed_are_compared_draw_by_draw() -> None:
    outside = iter(range(100))

    def run(rng: Draws, leak: bool) -> None:
        async def worker() -> None:
            for _ in range(next(outside) if leak else 3):
                await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(worker(), worker(), worker())

        sim_run(main, SimLoop(rng))

    first = Draws(7)
    run(first, leak=False)
    second = Draws(7, expected=first.drawn)
    run(second, leak=False)
    second.finish()
    first = Draws(7)
    run(first, leak=True)
    second = Draws(7, expected=first.drawn)
    with pytest.raises(NotDeterministic, match=r"draw \d+ .*step \d+"):
        run(second, leak=True)
        second.finish()
