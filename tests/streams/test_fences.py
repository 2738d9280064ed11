"""Fences, posts and step tickets: each thing once, in the right thread, in the right order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from phloem.cuda_streams.fences import Fence, LoopPoster, StepTicket
from phloem.errors import InvalidRequest

pytestmark = pytest.mark.not_sim("real engines and their threads")


class HandStream:
    """A stream whose records pass when the test says so."""

    name = "by hand"

    def __init__(self) -> None:
        self.records: list[Fence] = []

    def record(self) -> Fence:
        self.records.append(Fence(label=self.name))
        return self.records[-1]

    def wait(self, fence: Fence) -> None:
        raise AssertionError(f"not used here, but asked to wait for {fence}")


class TestFence:
    def test_nobody_passed_it(self) -> None:
        assert not Fence().passed
        assert not Fence().wait(timeout=0.01)

    def test_one_that_raises_keeps_nothing_from_the_others(self) -> None:
        fence, heard = Fence(), list[str]()

        def raises(name: str) -> None:
            heard.append(name)
            raise ValueError(name)

        fence.add_recorded_hook(partial(raises, "recorded"))
        fence.add_recorded_hook(partial(heard.append, "recorded too"))
        with pytest.raises(ValueError, match=r"^recorded$"):
            fence.mark_recorded(object())
        fence.add_hook(partial(raises, "hook"))
        fence.add_hook(partial(heard.append, "hook too"))
        fence.add_callback(partial(raises, "callback"))
        fence.add_callback(partial(heard.append, "callback too"))
        with pytest.raises(ValueError, match=r"^hook$"):
            fence.mark_passed()
        assert heard == ["recorded", "recorded too", "hook", "hook too", "callback", "callback too"]

    async def test_who_is_cancelled_while_he_waits_leaves_nothing(self) -> None:
        fence = Fence()
        waiting = [asyncio.ensure_future(fence.reached()) for _ in range(3)]
        await asyncio.sleep(0)
        for number, one in enumerate(waiting[:2]):
            assert len(fence._callbacks) == 3 - number
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        fence.mark_passed()
        await waiting[2]
        assert not fence._callbacks

    def test_settled(self) -> None:
        fence, heard = Fence.settled(), list[str]()
        fence.add_callback(lambda: heard.append("callback"))
        fence.add_hook(lambda: heard.append("hook"))
        assert fence.passed and fence.wait() and heard == ["callback", "hook"]

    def test_callbacks_go_through_post_once_and_in_order(self) -> None:
        posted: list[Callable[[], None]] = []
        heard: list[str] = []
        fence = Fence(posted.append)
        fence.add_callback(lambda: heard.append("first"))
        fence.add_callback(lambda: heard.append("second"))
        fence.mark_passed()
        fence.mark_passed()
        assert fence.passed and heard == []
        fence.add_callback(lambda: heard.append("late"))
        assert heard == ["late"], "already passed: at once"
        for fn in posted:
            fn()
        assert heard == ["late", "first", "second"]

    def test_hooks_see_a_passed_fence_before_callbacks_are_posted(self) -> None:
        order: list[str] = []
        fence = Fence(lambda _: order.append("posted"))
        fence.add_callback(lambda: None)
        fence.add_hook(lambda: order.append(f"hook, passed={fence.passed}"))
        fence.mark_passed()
        assert order == ["hook, passed=True", "posted"]

    def test_adding_while_it_passes_loses_nothing(self) -> None:
        for _ in range(200):
            fence, heard = Fence(), list[int]()
            start = threading.Barrier(2)

            def passer(fence: Fence = fence, start: threading.Barrier = start) -> None:
                start.wait()
                fence.mark_passed()

            thread = threading.Thread(target=passer)
            thread.start()
            start.wait()
            for number in range(20):
                fence.add_hook(partial(heard.append, number))
            thread.join()
            assert sorted(heard) == list(range(20))

    def test_wait_wakes_a_thread(self) -> None:
        fence, woke = Fence(), list[bool]()
        thread = threading.Thread(target=lambda: woke.append(fence.wait(timeout=60)))
        thread.start()
        fence.mark_passed()
        thread.join()
        assert woke == [True]


class TestLoopPoster:
    async def test_many_posts_few_wakeups_none_lost(self) -> None:
        poster, heard = LoopPoster(asyncio.get_running_loop()), list[int]()
        done = asyncio.Event()

        def work() -> None:
            for number in range(1000):
                poster(partial(heard.append, number))
            poster(done.set)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()  # the loop is blocked, as if it were busy
        await done.wait()
        assert heard == list(range(1000))
        assert poster.wakeups == 1

    async def test_from_many_threads(self) -> None:
        poster, heard = LoopPoster(asyncio.get_running_loop()), list[int]()

        def work() -> None:
            for number in range(500):
                poster(partial(heard.append, number))

        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
        await asyncio.sleep(0.01)
        assert sorted(heard) == sorted(list(range(500)) * 4)

    async def test_one_that_raises_does_not_take_the_rest_along(self) -> None:
        loop, errors, heard = asyncio.get_running_loop(), list[object](), list[str]()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        poster = LoopPoster(loop)

        def boom() -> None:
            raise ValueError("boom")

        poster(boom)
        poster(lambda: heard.append("after"))
        await asyncio.sleep(0.01)
        assert heard == ["after"] and len(errors) == 1

    def test_closed_loop(self) -> None:
        loop = asyncio.new_event_loop()
        poster = LoopPoster(loop)
        loop.close()
        for _ in range(3):
            poster(lambda: None)
        assert not poster._queue, "posts to a closed loop are dropped, not kept"


class TestStepTicket:
    def test_without_a_stream_it_is_over_at_end(self) -> None:
        step = StepTicket()
        step.launched()
        assert not step.fence.passed and step.state == "launched"
        step.end()
        assert step.fence.passed and step.state == "ended"

    @pytest.mark.parametrize("end_first", [True, False])
    def test_needs_both_the_end_and_the_stream(self, end_first: bool) -> None:
        stream = HandStream()
        step = StepTicket()
        step.launched(stream)
        actions = [step.end, stream.records[0].mark_passed]
        for action in actions if end_first else reversed(actions):
            assert not step.fence.passed
            action()
        assert step.fence.passed

    def test_abandoned_before_launch_without_stream_at_once(self) -> None:
        step = StepTicket()
        step.abandon()
        assert step.fence.passed and step.state == "abandoned"

    @pytest.mark.parametrize("launched", [True, False])
    def test_abandoned_waits_for_what_its_stream_still_runs(self, launched: bool) -> None:
        stream = HandStream()
        step = StepTicket(stream)
        if launched:
            step.launched()
        step.abandon()
        assert not step.fence.passed
        stream.records[-1].mark_passed()
        assert step.fence.passed

    def test_callbacks_on_the_loop_side(self) -> None:
        posted: list[Callable[[], None]] = []
        step, heard = StepTicket(post=posted.append), list[str]()
        step.fence.add_callback(lambda: heard.append("over"))
        step.abandon()
        assert heard == [] and len(posted) == 1
        posted[0]()
        assert heard == ["over"]

    def test_out_of_order(self) -> None:
        step = StepTicket()
        with pytest.raises(InvalidRequest, match="opened cannot become ended"):
            step.end()
        step.launched()
        with pytest.raises(InvalidRequest, match="launched"):
            step.launched()
        step.end()
        for again in (step.end, step.abandon, step.launched):
            with pytest.raises(InvalidRequest, match="ended"):
                again()
