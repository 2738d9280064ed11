"""Worker threads on a loop of virtual time: they and the loop take turns, nothing runs beside them.

What a program gives to a thread runs on a thread here, too, and finds there what it finds in life:
no running loop, thread-local data of its own. But the loop stands still while it runs, and decides
when it begins and when it goes on; so a run can be repeated.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from phloem.cuda_streams.clocks import Clock
from phloem.cuda_streams.fences import Fence, Post
from phloem.cuda_streams.workers import ThreadWorker, WorkerStream
from phloem.errors import InvalidRequest

__all__ = ["Lockstep", "SimulatedLoop", "Turn", "VirtualWorker", "new_worker"]

P = ParamSpec("P")
R = TypeVar("R")


class _GivenUp(BaseException):
    """The run is over: unwinds a function that has paused."""


class _Thread:
    """A thread that works between `go` and `back`, two locks that are held until given."""

    def __init__(self, number: int) -> None:
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.turn: Turn | None = None
        self.thread = threading.Thread(target=self._serve, name=f"phloem-sim-{number}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            if self.turn is None:
                return
            self.turn.serve()
            self.turn = None
            self.back.release()


class Turn:
    """A function on a thread of a `Lockstep`; it begins when it is first let go on."""

    def __init__(
        self,
        house: Lockstep,
        thread: _Thread,
        fn: Callable[[], object],
        then: Callable[[], object],
    ) -> None:
        self.thread = thread
        self.ended = False
        self.lost = False
        self._house = house
        self._fn = fn
        self._then = then
        self._error: BaseException | None = None
        self._given_up = False

    @property
    def over(self) -> bool:
        """Whether it has ended or is stuck for ever."""
        return self.ended or self.lost

    def go_on(self) -> None:
        """Let the function run until it ends or pauses. For whoever has the turn, but itself.

        Nothing when it has ended. Raises what the function raises, and RuntimeError when it neither
        ends nor pauses for `patience_s` of real time.
        """
        house = self._house
        if house.current is self:
            raise RuntimeError("a function on a worker cannot wait for its own end")
        if self.over:
            return
        before, house.current = house.current, self
        self.thread.go.release()
        came_back = False
        try:
            came_back = self.thread.back.acquire(timeout=house.patience_s)
        finally:  # interrupted, it may go on for ever as well
            house.current = before
            if not came_back:
                self.lost = True
                house.forget(self)
        if not came_back:
            raise RuntimeError(
                f"a function on a simulated worker did not return for {house.patience_s} s: if it "
                "waits for something that the loop or another thread should do, it waits for ever, "
                "since these stand still meanwhile; waiting for a fence (`stream.wait(fence)` "
                "before it, `stream.hold(fence)` in it) lets them go on"
            )
        if self.ended:
            house.take_back(self)
            if self._error is not None:
                raise self._error
            self._then()

    def pause(self) -> None:
        """In the function: give the turn back until somebody lets it go on."""
        assert self._house.current is self, "only the function itself can pause"
        if not self._given_up:
            self.thread.back.release()
            self.thread.go.acquire()
        if self._given_up:
            raise _GivenUp

    def give_up(self) -> None:
        """Unwind the function where it has paused."""
        self._given_up = True
        self.go_on()

    def serve(self) -> None:
        """Run the function; called by its thread."""
        try:
            self._fn()
        except _GivenUp:
            pass
        except BaseException as error:  # noqa: BLE001  whoever lets it go on gets it
            self._error = error
        self.ended = True


class Lockstep:
    """The threads of one loop. `current` is the function whose turn it is; None: the loop's."""

    def __init__(self, *, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s
        self.current: Turn | None = None
        self._made = 0
        self._idle: list[_Thread] = []
        self._turns: dict[Turn, None] = {}

    def turn(self, fn: Callable[[], object], then: Callable[[], object]) -> Turn:
        """`fn` on a thread of its own; `then()` is called where it was let go on to its end."""
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = _Thread(self._made)
            self._made += 1
        thread.turn = turn = Turn(self, thread, fn, then)
        self._turns[turn] = None
        return turn

    @property
    def here(self) -> bool:
        """Whether the calling thread is the one whose turn it is."""
        turn = self.current
        return turn is not None and turn.thread.thread is threading.current_thread()

    def take_back(self, turn: Turn) -> None:
        """Keep the thread of a turn that is over for the next one. Called by turns."""
        del self._turns[turn]
        self._idle.append(turn.thread)

    def forget(self, turn: Turn) -> None:
        """Give up the thread of a turn, which is stuck for ever. Called by turns."""
        del self._turns[turn]

    def pause(
        self,
        *until: Callable[[Callable[[], None]], object],
        post: Post,
        unless: Callable[[], bool] = bool,
    ) -> None:
        """In a function: give the turn back until one of `until` calls what it is handed.

        Or until it is let go on and `unless` holds. Raises InvalidRequest for the loop itself.
        """
        turn = self.current
        if turn is None:
            raise InvalidRequest(
                "blocking the loop of a simulation for what is yet to come would block it for ever"
            )
        called = False

        def tell() -> None:
            nonlocal called
            called = True
            post(turn.go_on)

        for one in until:
            one(tell)
        while not called and not unless():
            turn.pause()

    def close(self) -> None:
        """Unwind what has paused, end the threads. Idempotent."""
        while self._turns:
            next(reversed(self._turns)).give_up()
        while self._idle:
            thread = self._idle.pop()
            thread.go.release()
            thread.thread.join()


@runtime_checkable
class SimulatedLoop(Protocol):
    """By these a runtime knows an event loop for one of virtual time."""

    @property
    def clock(self) -> Clock: ...
    @property
    def lockstep(self) -> Lockstep: ...
    def thread_delay_ns(self) -> int:
        """How long a thread takes to begin with what it was given; drawn."""
        ...

    def fail(self, error: BaseException) -> None:
        """Have the run end with `error`."""
        ...


class _Later(Future[R]):
    """A result on which another worker's function may block, but not the loop."""

    def __init__(self, lockstep: Lockstep, post: Post) -> None:
        super().__init__()
        self._lockstep = lockstep
        self._post = post

    def result(self, timeout: float | None = None) -> R:
        """See `Future.result`; InvalidRequest where the loop would block."""
        self._wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`; InvalidRequest where the loop would block."""
        self._wait()
        return super().exception(timeout)

    def _wait(self) -> None:
        if not self.done():
            self._lockstep.pause(lambda fn: self.add_done_callback(lambda _: fn()), post=self._post)


class VirtualWorker(WorkerStream):
    """A worker stream in virtual time: a function runs at one instant, after a drawn delay.

    Only where it holds for a fence does time pass within it.
    """

    def __init__(self, name: str, loop: SimulatedLoop, post: Post) -> None:
        super().__init__(name, post)
        self._clock = loop.clock
        self._lockstep = loop.lockstep
        self._delay_ns = loop.thread_delay_ns
        # (what to begin, what to do instead once closed), in order. `_busy` is true from the
        # moment that something is enqueued until nothing is left.
        self._queue: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._busy = False
        self._closed = False
        self._refuse: Callable[[], None] | None = None  # of a function that has not begun yet
        self._turn: Turn | None = None  # of one that has

    def record(self) -> Fence:
        """See `WorkerStream.record`."""
        if not self._busy:
            return Fence.settled(self.name)
        fence = Fence(self._post, self.name)
        self._enqueue(partial(self._pass, fence), fence.mark_passed)
        return fence

    def wait(self, fence: Fence) -> None:
        """See `WorkerStream.wait`."""
        if not fence.passed and not self._closed:
            self._enqueue(partial(fence.add_hook, partial(self._post, self._next)), _nothing)

    def hold(self, fence: Fence, *, unless: Fence | None = None) -> None:
        """See `WorkerStream.hold`; meanwhile virtual time goes on.

        Raises InvalidRequest for whoever is no function of this stream.
        """
        fences = (fence,) if unless is None else (fence, unless)
        if self._closed or any(one.passed for one in fences):
            return
        if self._turn is None or self._turn is not self._lockstep.current:
            raise InvalidRequest(f"{self!r} can be held by a function that runs on it, only")
        self._lockstep.pause(
            *(one.add_hook for one in fences), post=self._post, unless=lambda: self._closed
        )

    @property
    def closing(self) -> bool:
        """See `WorkerStream.closing`."""
        return self._closed

    def close(self) -> None:
        """See `WorkerStream.close`. Here and now; what holds goes on.

        Raises InvalidRequest when what runs waits for something else: a real loop would block.
        """
        self._closed = True
        if self._refuse is not None:
            self._refuse()
            self._refuse = None
        if (turn := self._turn) is not None:
            turn.go_on()
            if not turn.over:
                raise InvalidRequest(f"{self!r} cannot be closed: its function waits for the loop")
        while self._queue:
            self._queue.popleft()[1]()
        self._busy = False

    def _future_of(self, fn: Callable[P, R]) -> Future[R]:
        del fn
        return _Later(self._lockstep, self._post)

    def _give(self, act: Callable[[], None], refuse: Callable[[], None]) -> None:
        if self._closed:
            raise self._closed_error()
        self._enqueue(partial(self._ask, act, refuse), refuse)

    def _enqueue(self, begin: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._queue.append((begin, refuse))
        if not self._busy:
            self._busy = True
            self._post(self._next)

    def _next(self) -> None:
        if self._queue:
            self._queue.popleft()[0]()
        else:
            self._busy = False

    def _pass(self, fence: Fence) -> None:
        fence.mark_passed()
        self._next()

    def _ask(self, act: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._clock.call_at(self._clock.now_ns() + self._delay_ns(), partial(self._begin, act))

    def _begin(self, act: Callable[[], None]) -> None:
        if self._closed:
            return
        self._refuse = None
        self._turn = self._lockstep.turn(act, self._over)
        self._turn.go_on()

    def _over(self) -> None:
        self._turn = None
        self._next()


def new_worker(name: str, post: Post, loop: object) -> WorkerStream:
    """A worker stream for memory of the CPU: a thread, or in virtual time where the loop has it."""
    if isinstance(loop, SimulatedLoop):
        return VirtualWorker(name, loop, post)
    return ThreadWorker(name, post)


def _nothing() -> None:
    pass
