"""One queue for the actors that decide together.

Actors of a domain share one queue and never await: a turn is the handling of one message by one
actor, a plain function, so nothing interleaves with it. Turns never nest: what a turn sends is
handled after it, in the order sent, before the next caller has his turn.

A caller whose message finds nobody draining drains the queue itself and has its answer without
visiting the event loop (*inline*). Otherwise, or with `inline=False`, the queue is drained by the
loop and the caller waits. The order of turns, and so every result, is the same either way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Final, Protocol, TypeAlias

import msgspec

from phloem.errors import CacheCrashed, InvalidRequest, PhloemError
from phloem.events import Context, Joins

__all__ = ["LATER", "Actor", "Domain", "Handlers", "Parked", "Reply", "nothing_to_undo"]

Handlers = Mapping[type, Callable[..., object]]

_NOTHING_BOUND: Context = {}  # never written to


_Entry: TypeAlias = "tuple[Actor, object, Reply | None, int, Context]"


class _Later:
    def __repr__(self) -> str:
        return "LATER"


LATER: Final = _Later()  # what a handler returns when it will complete its reply in a later turn


class Actor(Protocol):
    """Receives messages: one handler for each type of message."""

    name: str
    handlers: Handlers


class Parked:
    """Where a caller without an event loop waits: it yields itself until it is done."""

    def __init__(self) -> None:
        self._done = False

    def done(self) -> bool:
        """True once the caller may go on."""
        return self._done

    def set_result(self, result: None) -> None:
        """Let the caller go on."""
        self._done = result is None

    def __await__(self) -> Generator[Parked, None, None]:
        while not self._done:
            yield self


class Reply(msgspec.Struct, eq=False):
    """The answer to one message, given once; `abandoned` when nobody is left to hear it."""

    done: bool = False
    abandoned: bool = False
    value: object = None
    error: BaseException | None = None
    future: asyncio.Future[None] | Parked | None = None
    on_abandoned: Callable[[], None] | None = None

    def wake(self) -> None:
        """Let whoever awaits the answer go on."""
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def result(self) -> object:
        """The value, or the error raised."""
        assert self.done
        if self.error is not None:
            raise self.error.with_traceback(None)  # a crash is the answer to many
        return self.value


def nothing_to_undo(answer: object) -> None:
    """For `Domain.call`: a caller who has left need not be answered, and leaves nothing."""
    del answer


class Domain:
    """The queue and its turns. Belongs to one event loop, or to one thread without a loop.

    `capacity` bounds the messages of callers that wait for a turn; what turns send is bounded by
    what causes it. `inline_max`: after so many inline calls in a row a caller lets the loop run.
    `batch`: turns that one visit of the loop takes at most. `caller_context` reads what the running
    task has bound: it goes with the task's messages, and with all that these send in turn.
    """

    def __init__(
        self,
        *,
        inline: bool = True,
        capacity: int = 4096,
        inline_max: int = 8,
        batch: int = 256,
        on_crash: Callable[[BaseException], None] | None = None,
        caller_context: Callable[[], Context] | None = None,
    ) -> None:
        self.inline = inline
        self.turns = 0  # turns begun so far; the number of the current one inside a turn
        self.cause = 0  # the turn that sent the current turn's message; 0: a caller
        self.context: Context = _NOTHING_BOUND  # of the caller whom the current turn serves
        self.stopped: PhloemError | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._capacity = capacity
        self.inline_max = inline_max
        self.batch = batch
        self._on_crash = on_crash
        self._caller_context = caller_context
        self._queue: deque[_Entry] = deque()  # callers, and what happens outside turns
        self._sent: deque[_Entry] = deque()  # by turns: handled before the next of the queue
        self._room: deque[asyncio.Future[None]] = deque()
        self._let_in = 0  # callers who were given room and have not run since
        self._outstanding: dict[Reply, None] = {}  # in the order promised
        self._draining = False
        self._scheduled = False
        self._inline_run = 0
        self._current: Reply | None = None

    @property
    def queued(self) -> int:
        """Messages that wait for their turn."""
        return len(self._queue) + len(self._sent)

    @property
    def unanswered(self) -> int:
        """Callers whose turn is over and whose answer is to come in a later one."""
        return len(self._outstanding)

    @property
    def callers_waiting(self) -> int:
        """Callers who wait for room in the queue."""
        return len(self._room)

    # -- inside turns --------------------------------------------------------------------------

    def send(self, actor: Actor, message: object, context: Context | None = None) -> None:
        """Send without waiting for an answer; always fits.

        Inside a turn the message is handled after what turns have sent before, and before the next
        caller has his turn.
        Outside, it is handled at once, or by the loop when the domain is not inline; after the end
        it is dropped. Outside, `context` is that of the caller whom it serves, if any.
        """
        if self.stopped is not None:
            return
        if self._draining:
            context = self.context if context is None else context
            self._sent.append((actor, message, None, self.turns, context))
            return
        self._queue.append((actor, message, None, 0, context or _NOTHING_BOUND))
        if self.inline or self.loop is None:
            self.drain()
        else:
            self._schedule()

    def send_soon(self, actor: Actor, message: object) -> None:
        """Send for the loop's next round, so that long work leaves room for others.

        Without a loop for the next drain; after the end it is dropped.
        """
        if self.stopped is not None:
            return
        if self.loop is None:
            self._queue.append((actor, message, None, self.turns, self.context))
        else:
            self.loop.call_soon(self.send, actor, message, self.context)

    def later(self) -> Reply:
        """The reply of the current turn's message, to be completed in a later turn."""
        reply = self._current
        if reply is None:
            reply = self._current = Reply()
        self._outstanding[reply] = None
        return reply

    def complete(self, reply: Reply, value: object) -> None:
        """Give the answer promised by `later`."""
        self._settle(reply, value, None)

    def fail(self, reply: Reply, error: BaseException) -> None:
        """Give an error as the answer promised by `later`."""
        self._settle(reply, None, error)

    def joins(self) -> Joins:
        """The fields that say which turn an event is of, what caused it, and for what context."""
        return {"turn": self.turns, "cause": self.cause, "context": self.context}

    def caller_context(self) -> Context:
        """The context that the running task has bound; empty if nobody reads it."""
        return _NOTHING_BOUND if self._caller_context is None else self._caller_context()

    def check_running(self) -> None:
        """Raise what stopped the domain, if anything did."""
        if self.stopped is not None:
            raise self.stopped.with_traceback(None)  # one error for all: it keeps no one's frames

    def _settle(self, reply: Reply, value: object, error: BaseException | None) -> None:
        assert not reply.done
        self._outstanding.pop(reply, None)
        reply.value, reply.error, reply.done = value, error, True
        reply.wake()

    # -- callers -------------------------------------------------------------------------------

    def run(self, actor: Actor, message: object) -> object:
        """Have `message` handled now, after all that is queued; never suspends.

        For messages that are answered within the drain.
        """
        if self._draining:
            raise InvalidRequest("a turn cannot call: it sends, or answers later")
        if self.stopped is not None:
            self.check_running()
        if self._queue or self._sent:
            reply = Reply()
            self._queue.append((actor, message, reply, 0, self.caller_context()))
            self.drain()
            return self._answer(reply)
        value = self._turn_inline(actor, message)
        if value is LATER:
            later = self._current
            self.drain()
            return self._answer(later)
        if self._sent:
            self.drain()
        return value

    async def call(
        self,
        actor: Actor,
        message: object,
        undo: Callable[[object], None] | None = None,
    ) -> object:
        """Have `message` handled and wait for its answer.

        `undo` says what to do with an answer that nobody is left to hear: a caller who is cancelled
        before the turn leaves nothing behind, and after it `undo` is applied to the answer. Without
        `undo` the message takes effect whatever becomes of its caller.
        """
        self.check_running()
        if self.inline and not self._draining:
            self._inline_run += 1
            if self._inline_run >= self.inline_max:
                self._inline_run = 0
                await self.pause()
            if not self._queue and not self._sent and self.stopped is None:
                value = self._turn_inline(actor, message)
                later = self._current
                if self._sent:
                    self.drain()
                if value is not LATER:
                    return value
                assert later is not None
                return later.result() if later.done else await self._wait(later, undo)
        if self._room or self._let_in or len(self._queue) >= self._capacity:
            await self._wait_for_room()
        self.check_running()
        reply = Reply()
        self._queue.append((actor, message, reply, 0, self.caller_context()))
        if self.inline and not self._draining:
            self.drain()
        else:
            self._schedule()
        return reply.result() if reply.done else await self._wait(reply, undo)

    async def _wait(self, reply: Reply, undo: Callable[[object], None] | None) -> object:
        reply.future = Parked() if self.loop is None else self.loop.create_future()
        try:
            await reply.future
        except BaseException:  # cancelled, or given up by whoever drives a caller without a loop
            if undo is not None:
                reply.abandoned = True
                self._outstanding.pop(reply, None)  # it may never be settled
                if reply.done:
                    if reply.error is None:
                        undo(reply.value)
                elif reply.on_abandoned is not None:
                    reply.on_abandoned()
            raise
        return reply.result()

    async def pause(self) -> None:
        """Let the loop, if there is one, and other callers run."""
        if self.loop is not None:
            await asyncio.sleep(0)

    # -- draining ------------------------------------------------------------------------------

    def drain(self, limit: int | None = None) -> None:
        """Handle queued messages until none is left, or `limit` turns are done."""
        if self._draining:
            return
        queue, sent = self._queue, self._sent
        turns = 0
        while (sent or queue) and (limit is None or turns < limit):
            turns += 1
            entry = sent.popleft() if sent else queue.popleft()
            actor, message, reply, cause, self.context = entry
            if self._room and len(queue) + self._let_in < self._capacity:
                self._admit()
            if reply is None or not reply.abandoned:
                self._turn(actor, message, reply, cause)

    def _turn_inline(self, actor: Actor, message: object) -> object:
        """One turn for a caller that waits right here.

        Its answer; after `LATER` the reply that will come is the current one, until the next turn.
        """
        self._draining = True
        self.turns += 1
        self.cause = 0
        self._current = None
        if self._caller_context is not None:
            self.context = self._caller_context()
        try:
            return actor.handlers[type(message)](message)
        except PhloemError:
            raise
        except Exception as error:
            raise self._crash(error) from error
        except BaseException as error:  # an interrupt: the turn may be half done
            self._crash(error)
            raise
        finally:
            self._draining = False

    def _turn(self, actor: Actor, message: object, reply: Reply | None, cause: int) -> None:
        self._draining = True
        self.turns += 1
        self.cause = cause
        self._current = reply
        try:
            value = actor.handlers[type(message)](message)
        except PhloemError as error:
            if reply is None:
                crash = self._crash(error)
                raise crash from error
            self._settle(reply, None, error)
        except Exception as error:
            crash = self._crash(error)
            if reply is None:
                raise crash from error
            if not reply.done:  # a reply promised before the crash was told with the others
                self._settle(reply, None, crash)
        except BaseException as error:  # an interrupt: the turn may be half done
            crash = self._crash(error)
            if reply is not None and not reply.done:
                self._settle(reply, None, crash)
            raise
        else:
            if reply is not None and value is not LATER:
                self._settle(reply, value, None)
        finally:
            self._draining = False

    def _answer(self, reply: Reply | None) -> object:
        if reply is None or not reply.done:
            raise AssertionError("a message that is answered later was sent by a nowait form")
        return reply.result()

    def _schedule(self) -> None:
        if not self._scheduled:
            assert self.loop is not None, "the domain has no loop to be drained by"
            self._scheduled = True
            self.loop.call_soon(self._drain_scheduled)

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self._inline_run = 0
        try:
            self.drain(self.batch)
        except CacheCrashed:
            return  # every waiter has been told
        if self._queue or self._sent:
            self._schedule()

    # -- bounds and the end --------------------------------------------------------------------

    async def _wait_for_room(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room.append(turn)
        try:
            await turn
        except BaseException:  # cancelled, or closed by whoever drove the coroutine
            if turn in self._room:
                self._room.remove(turn)
            elif not turn.cancelled():
                self._let_in -= 1
                self._admit()  # the room given to this caller goes to the next one
            raise
        self._let_in -= 1

    def _admit(self) -> None:
        while self._room:
            turn = self._room.popleft()
            if not turn.done():
                self._let_in += 1
                turn.set_result(None)
                return

    def _crash(self, error: BaseException) -> CacheCrashed:
        crash = CacheCrashed(f"an invariant of the cache broke: {error!r}")
        crash.__cause__ = error
        self.stop(crash)
        if self._on_crash is not None:
            self._on_crash(error)
        return crash

    def stop(self, error: PhloemError) -> None:
        """Refuse everything from now on; whoever waits gets `error`."""
        if self.stopped is None:
            self.stopped = error
        queued = [reply for _, _, reply, _, _ in self._queue if reply is not None]
        self._queue.clear()
        self._sent.clear()
        for reply in [*queued, *self._outstanding]:
            if not reply.done:
                self._settle(reply, None, error)
        while self._room:
            self._admit()

    def audit(self) -> None:
        """Raise `AssertionError` when the queue's own bookkeeping is wrong."""
        assert not self._draining, "an audit inside a turn"
        assert len(self._queue) <= self._capacity + len(self._outstanding) + self.batch
        assert all(not reply.done for reply in self._outstanding)
