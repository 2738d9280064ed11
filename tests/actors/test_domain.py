"""The domain: one queue, turns, later replies, bounds, callers who leave, crashes, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import anyio
import pytest

from phloem.actors.domain import LATER, Domain, Handlers, Reply
from phloem.errors import CacheCrashed, InvalidRequest, OwnershipError, RuntimeClosed

pytestmark = pytest.mark.sim(seeds=1, policy="fifo")  # tests that count the rounds of a loop


@dataclass(frozen=True)
class Say:
    """Answered with its text, after sending what `then` says to the same actor."""

    text: str
    then: tuple[Say, ...] = ()


@dataclass(frozen=True)
class Promise:
    """Answered later, by `Keep` of the same name."""

    name: str


@dataclass(frozen=True)
class Keep:
    name: str
    error: Exception | None = None


@dataclass(frozen=True)
class Fail:
    error: Exception
    promised: bool = False


@dataclass(frozen=True)
class Ask:
    """Calls the domain from inside a turn, which is not allowed."""


@dataclass
class Echo:
    """An actor that notes each turn, with the turn's number and what caused it."""

    domain: Domain
    name: str = "echo"
    log: list[str] = field(default_factory=list)
    causes: list[tuple[int, int]] = field(default_factory=list)
    promised: dict[str, Reply] = field(default_factory=dict)
    inside: bool = False

    def __post_init__(self) -> None:
        self.handlers: Handlers = {
            Say: self._say,
            Promise: self._promise,
            Keep: self._keep,
            Fail: self._fail,
            Ask: self._ask,
        }

    def _say(self, message: Say) -> str:
        assert not self.inside, "turns nest"
        self.inside = True
        self.causes.append((self.domain.turns, self.domain.cause))
        for other in message.then:
            self.domain.send(self, other)
        self.log.append(message.text)
        self.inside = False
        return message.text

    def _promise(self, message: Promise) -> object:
        self.log.append(f"promise {message.name}")
        reply = self.promised[message.name] = self.domain.later()
        reply.on_abandoned = lambda: self.log.append(f"{message.name} has left")
        return LATER

    def _keep(self, message: Keep) -> None:
        self.log.append(f"keep {message.name}")
        reply = self.promised.pop(message.name)
        if message.error is None:
            self.domain.complete(reply, message.name)
        else:
            self.domain.fail(reply, message.error)

    def _fail(self, message: Fail) -> object:
        self.log.append("fail")
        if message.promised:
            self.domain.later()
        raise message.error

    def _ask(self, message: Ask) -> object:
        del message
        return self.domain.run(self, Say("nested"))


def made(
    *,
    inline: bool,
    capacity: int = 4096,
    inline_max: int = 256,
    batch: int = 256,
    on_crash: Callable[[BaseException], None] | None = None,
) -> tuple[Domain, Echo]:
    domain = Domain(
        inline=inline,
        capacity=capacity,
        inline_max=inline_max,
        batch=batch,
        on_crash=on_crash,
    )
    domain.loop = asyncio.get_running_loop()
    return domain, Echo(domain)


async def rounds(count: int = 5) -> None:
    """Let the loop go round a few times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_answers_and_order_are_the_same_inline_and_queued(inline: bool) -> None:
    domain, echo = made(inline=inline)
    tree = Say("a", then=(Say("b", then=(Say("d"),)), Say("c")))
    assert await domain.call(echo, tree) == "a"
    await rounds()
    assert await domain.call(echo, Say("e")) == "e"
    assert echo.log == ["a", "b", "c", "d", "e"]
    assert echo.causes == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 0)]
    domain.audit()


async def test_a_turns_messages_come_before_the_next_caller() -> None:
    domain, echo = made(inline=False)
    calls = [domain.call(echo, Say(name, then=(Say(name + "'"),))) for name in "xyz"]
    assert await asyncio.gather(*calls) == ["x", "y", "z"]
    await rounds()
    assert echo.log == ["x", "x'", "y", "y'", "z", "z'"]


async def test_what_a_turn_sends_is_done_before_an_inline_caller_goes_on() -> None:
    domain, echo = made(inline=True)
    await domain.call(echo, Say("a", then=(Say("b", then=(Say("c"),)),)))
    assert echo.log == ["a", "b", "c"]


async def test_nowait_drains_what_is_queued_first_and_never_suspends(inline: bool) -> None:
    domain, echo = made(inline=inline)
    domain.inline = False  # so that something is queued
    first = asyncio.ensure_future(domain.call(echo, Say("queued", then=(Say("after"),))))
    await asyncio.sleep(0)
    domain.inline = inline
    assert echo.log == []
    assert domain.run(echo, Say("now", then=(Say("then"),))) == "now"
    assert echo.log == ["queued", "after", "now", "then"]
    assert await first == "queued"


async def test_a_turn_cannot_call(inline: bool) -> None:
    domain, echo = made(inline=inline)
    with pytest.raises(InvalidRequest, match="turn"):
        await domain.call(echo, Ask())
    assert echo.log == []
    assert await domain.call(echo, Say("on")) == "on"


async def test_inline_calls_do_not_visit_the_loop_until_the_bound() -> None:
    domain, echo = made(inline=True, inline_max=10)
    visits = 0

    def visit() -> None:
        nonlocal visits
        visits += 1
        loop.call_soon(visit)

    loop = asyncio.get_running_loop()
    loop.call_soon(visit)
    for _ in range(9):
        await domain.call(echo, Say("x"))
    assert visits == 0, "an inline call is a function call"
    for _ in range(91):
        await domain.call(echo, Say("x"))
    assert 10 <= visits <= 20, "others run, once in ten calls"


async def test_one_visit_of_the_loop_takes_a_bounded_number_of_turns() -> None:
    domain, echo = made(inline=False, batch=4)
    seen: list[int] = []
    loop = asyncio.get_running_loop()

    def look() -> None:
        seen.append(len(echo.log))
        if len(echo.log) < 20:
            loop.call_soon(look)

    calls = [asyncio.ensure_future(domain.call(echo, Say("x"))) for _ in range(20)]
    loop.call_soon(look)
    await asyncio.gather(*calls)
    await rounds()
    assert max(after - before for before, after in pairwise(seen)) <= 4


async def test_later_replies_reach_their_callers(inline: bool) -> None:
    domain, echo = made(inline=inline)
    one = asyncio.ensure_future(domain.call(echo, Promise("one")))
    two = asyncio.ensure_future(domain.call(echo, Promise("two")))
    await rounds()
    assert not one.done() and not two.done()
    domain.audit()
    domain.run(echo, Keep("two", OwnershipError("not yours")))
    domain.run(echo, Keep("one"))
    assert await one == "one"
    with pytest.raises(OwnershipError):
        await two
    domain.audit()


async def test_a_nowait_form_cannot_wait_for_a_later_reply(inline: bool) -> None:
    domain, echo = made(inline=inline)
    with pytest.raises(AssertionError, match="nowait"):
        domain.run(echo, Promise("one"))


# -- the bound on callers --------------------------------------------------------------------------


async def test_callers_beyond_the_capacity_wait_in_order() -> None:
    domain, echo = made(inline=False, capacity=2, batch=1)
    order: list[str] = []

    async def caller(name: str) -> None:
        await domain.call(echo, Say(name))
        order.append(name)

    tasks = [asyncio.ensure_future(caller(name)) for name in "abcdefgh"]
    await asyncio.sleep(0)
    assert len(domain._queue) == 2, "the others wait outside"
    await asyncio.gather(*tasks)
    assert echo.log == order == list("abcdefgh")


async def test_a_newcomer_does_not_overtake_one_who_was_let_in() -> None:
    domain, echo = made(inline=False, capacity=1, batch=1)
    first = asyncio.ensure_future(domain.call(echo, Say("first")))
    waits = asyncio.ensure_future(domain.call(echo, Say("waits")))
    await asyncio.sleep(0)
    newcomer = asyncio.ensure_future(domain.call(echo, Say("newcomer")))
    domain.drain()  # lets `waits` in, which wakes up only after the newcomer's first step
    await asyncio.gather(first, waits, newcomer)
    assert echo.log == ["first", "waits", "newcomer"]


@pytest.mark.parametrize("cancelled", ["first", "middle", "last"])
async def test_f105_a_caller_cancelled_while_it_waits_for_room_lets_the_others_in(
    cancelled: str,
) -> None:
    domain, echo = made(inline=False, capacity=1, batch=1)
    tasks = {
        name: asyncio.ensure_future(domain.call(echo, Say(name)))
        for name in ("running", "first", "middle", "last")
    }
    await asyncio.sleep(0)
    tasks[cancelled].cancel()
    domain.drain()  # lets the next one in, in the same round as the cancellation
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for name, answer in zip(tasks, done, strict=True):
        if name == cancelled:
            assert isinstance(answer, asyncio.CancelledError)
        else:
            assert answer == name
    assert cancelled not in echo.log
    assert await domain.call(echo, Say("more")) == "more"
    domain.audit()


async def test_f105_a_caller_cancelled_after_it_was_let_in_passes_the_room_on() -> None:
    domain, echo = made(inline=False, capacity=1)
    running = asyncio.ensure_future(domain.call(echo, Say("running")))
    let_in = asyncio.ensure_future(domain.call(echo, Say("let in")))
    behind = asyncio.ensure_future(domain.call(echo, Say("behind")))
    await asyncio.sleep(0)
    domain.drain()
    let_in.cancel()  # the room is its own by now
    assert await asyncio.wait_for(behind, 60) == "behind"
    assert await running == "running"
    with pytest.raises(asyncio.CancelledError):
        await let_in
    assert echo.log == ["running", "behind"]


async def test_messages_of_turns_always_fit() -> None:
    domain, echo = made(inline=False, capacity=1)
    many = tuple(Say(str(number)) for number in range(50))
    assert await domain.call(echo, Say("root", then=many)) == "root"
    await rounds()
    assert len(echo.log) == 51


# -- callers who leave -----------------------------------------------------------------------------


async def test_a_message_whose_caller_left_while_it_was_queued_is_not_handled() -> None:
    domain, echo = made(inline=False, batch=1)
    undone: list[object] = []
    before = asyncio.ensure_future(domain.call(echo, Say("before")))
    ghost = asyncio.ensure_future(domain.call(echo, Say("ghost"), undone.append))
    stays = asyncio.ensure_future(domain.call(echo, Say("stays"), undone.append))
    await asyncio.sleep(0)
    ghost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ghost
    assert await before == "before" and await stays == "stays"
    assert echo.log == ["before", "stays"] and undone == []


async def test_a_message_without_undo_takes_effect_whoever_is_left() -> None:
    domain, echo = made(inline=False)
    call = asyncio.ensure_future(domain.call(echo, Say("insert")))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await rounds()
    assert echo.log == ["insert"]


async def test_f104_a_reply_lost_between_answer_and_wake_up_is_undone() -> None:
    domain, echo = made(inline=False)
    undone: list[object] = []
    call = asyncio.ensure_future(domain.call(echo, Say("lease"), undone.append))
    await asyncio.sleep(0)
    domain.drain()  # answered; the caller has not run yet
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert echo.log == ["lease"] and undone == ["lease"]


async def test_f104_a_later_reply_lost_at_the_hand_over_is_undone(inline: bool) -> None:
    domain, echo = made(inline=inline)
    undone: list[object] = []
    call = asyncio.ensure_future(domain.call(echo, Promise("room"), undone.append))
    await rounds()
    domain.run(echo, Keep("room"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert undone == ["room"]


async def test_f104_an_error_has_nothing_to_undo(inline: bool) -> None:
    domain, echo = made(inline=inline)
    undone: list[object] = []
    call = asyncio.ensure_future(domain.call(echo, Promise("room"), undone.append))
    await rounds()
    domain.run(echo, Keep("room", OwnershipError("no")))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert undone == []


async def test_f107_a_caller_who_left_is_told_to_the_actor_and_answered_without_harm(
    inline: bool,
) -> None:
    domain, echo = made(inline=inline)
    call = asyncio.ensure_future(domain.call(echo, Promise("room"), lambda _: None))
    await rounds()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert echo.log == ["promise room", "room has left"]
    domain.run(echo, Keep("room"))  # to a caller who has gone
    assert await domain.call(echo, Say("next")) == "next"
    domain.audit()


@pytest.mark.parametrize("how", ["scope", "fail_after", "wait_for", "timeout"])
async def test_f104_every_kind_of_cancellation_leaves_the_wait(how: str, inline: bool) -> None:
    domain, echo = made(inline=inline)
    undone: list[object] = []

    async def wait() -> None:
        call = domain.call(echo, Promise("room"), undone.append)
        if how == "scope":
            with anyio.CancelScope() as scope:
                asyncio.get_running_loop().call_later(0.01, scope.cancel)
                await call
            assert scope.cancelled_caught
        elif how == "fail_after":
            with pytest.raises(TimeoutError), anyio.fail_after(0.01):
                await call
        elif how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.01)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await call

    await wait()
    await rounds()
    assert "room has left" in echo.log
    domain.run(echo, Keep("room"))
    assert await domain.call(echo, Say("next")) == "next"


# -- mistakes and crashes --------------------------------------------------------------------------


async def test_a_callers_mistake_answers_that_caller_only(inline: bool) -> None:
    domain, echo = made(inline=inline)
    answers = await asyncio.gather(
        domain.call(echo, Say("a")),
        domain.call(echo, Fail(OwnershipError("not yours"))),
        domain.call(echo, Say("b")),
        return_exceptions=True,
    )
    assert answers[0] == "a" and answers[2] == "b"
    assert isinstance(answers[1], OwnershipError)
    assert domain.stopped is None


@pytest.mark.parametrize("promised", [False, True], ids=["at_once", "after_promising"])
async def test_a_broken_invariant_tells_everybody_and_nothing_hangs(
    inline: bool, promised: bool
) -> None:
    causes: list[BaseException] = []
    domain, echo = made(inline=inline, capacity=4, on_crash=causes.append)
    broken = ZeroDivisionError("broken")
    waiting = asyncio.ensure_future(domain.call(echo, Promise("waits")))
    await rounds()
    calls = [asyncio.ensure_future(domain.call(echo, Fail(broken, promised)))]
    calls += [asyncio.ensure_future(domain.call(echo, Say(str(n)))) for n in range(8)]
    answers = await asyncio.wait_for(
        asyncio.gather(waiting, *calls, return_exceptions=True), timeout=60
    )
    for answer in answers:
        assert isinstance(answer, CacheCrashed), answer
        assert answer.__cause__ is broken
    assert causes == [broken]
    with pytest.raises(CacheCrashed):
        await domain.call(echo, Say("later"))
    with pytest.raises(CacheCrashed):
        domain.run(echo, Say("later"))
    assert "later" not in echo.log


async def test_an_error_in_a_message_that_nobody_waits_for_is_a_crash(inline: bool) -> None:
    domain, echo = made(inline=inline)
    waiting = asyncio.ensure_future(domain.call(echo, Promise("waits")))
    await rounds()
    error = OwnershipError("a free of what is not there")
    if inline:
        with pytest.raises(CacheCrashed):
            domain.send(echo, Fail(error))
    else:
        domain.send(echo, Fail(error))
    with pytest.raises(CacheCrashed) as told:
        await asyncio.wait_for(waiting, 60)
    assert told.value.__cause__ is error


async def test_stop_answers_every_waiter_and_refuses_the_rest(inline: bool) -> None:
    domain, echo = made(inline=inline, capacity=2)
    waiting = [asyncio.ensure_future(domain.call(echo, Promise("waits")))]
    await rounds()
    domain.inline = False
    waiting += [asyncio.ensure_future(domain.call(echo, Say(str(n)))) for n in range(6)]
    await asyncio.sleep(0)
    domain.stop(RuntimeClosed("closed"))
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), timeout=60)
    assert all(isinstance(answer, RuntimeClosed) for answer in answers), answers
    assert echo.log == ["promise waits"]
    domain.stop(RuntimeClosed("again"))
    with pytest.raises(RuntimeClosed, match="closed"):
        await domain.call(echo, Say("later"))


async def test_after_the_end_no_turn_begins(inline: bool) -> None:
    domain, echo = made(inline=inline)
    domain.stop(RuntimeClosed("closed"))
    domain.send(echo, Say("late"))
    domain.send_soon(echo, Say("later"))
    await rounds()
    assert echo.log == []


async def test_refusals_after_the_end_hold_on_to_nobody(inline: bool) -> None:
    domain, echo = made(inline=inline)
    domain.stop(RuntimeClosed("closed"))
    for _ in range(100):
        with pytest.raises(RuntimeClosed):
            await domain.call(echo, Say("x"))
        with pytest.raises(RuntimeClosed):
            domain.run(echo, Say("x"))
    assert domain.stopped is not None
    frames, trace = 0, domain.stopped.__traceback__
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    assert frames < 10, "each refusal adds its frames to one error"


async def test_messages_sent_soon_leave_room_for_others(inline: bool) -> None:
    domain, echo = made(inline=inline)
    domain.send_soon(echo, Say("slice"))
    assert echo.log == []
    assert await domain.call(echo, Say("caller")) == "caller"
    await rounds()
    assert sorted(echo.log) == ["caller", "slice"]


def test_without_a_loop_everything_happens_at_once() -> None:
    domain = Domain(inline=False)
    echo = Echo(domain)
    domain.send(echo, Say("a", then=(Say("b"),)))
    assert echo.log == ["a", "b"]
    assert domain.run(echo, Say("c")) == "c"


@pytest.mark.parametrize("how", ["inline", "drained", "sent"])
def test_an_interrupt_within_a_turn_stops_the_domain(how: str) -> None:
    """What it has cut in two cannot go on, and whoever waits for something hears of it."""
    domain = Domain()
    echo = Echo(domain)
    waiting = domain.call(echo, Promise("later"))
    waiting.send(None)

    def interrupted(message: object) -> object:
        raise KeyboardInterrupt(message)

    echo.handlers = {**echo.handlers, Ask: interrupted}
    if how == "drained":
        domain.send_soon(echo, Say("before"))
    with pytest.raises(KeyboardInterrupt):
        if how == "sent":
            domain.send(echo, Ask())
        else:
            domain.run(echo, Ask())
    with pytest.raises(CacheCrashed, match="KeyboardInterrupt"):
        waiting.send(None)
    with pytest.raises(CacheCrashed, match="KeyboardInterrupt"):
        domain.check_running()


def test_nothing_is_sent_for_later_after_the_end() -> None:
    domain = Domain()
    echo = Echo(domain)
    domain.stop(RuntimeClosed("over"))
    domain.send_soon(echo, Say("a"))
    domain.drain()
    assert not domain.queued and not echo.log
