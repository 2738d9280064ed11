"""A deterministic event loop: virtual time, seeded order, no real waiting.

Time is an integer of nanoseconds that jumps to the next timer when nothing can run; each callback
costs one tick, so that a loop which retries does not freeze the clock. What real loops leave open
is drawn from the seed: the order in which runnable *tasks* get their turn. What they promise is
kept: timers, done-callbacks and the delivery of cancels run soon and in order.

Plain asyncio and anyio run on it unchanged. What a program gives to threads by way of the loop (its
executor, `asyncio.to_thread`, `anyio.to_thread`) or of a runtime (`worker_stream`) takes turns with
it, see `phloem.cuda_streams.lockstep`. A thread that the program starts by itself cannot be
repeated: when it calls into the loop, that is an error, never silent noise.
"""

# A loop is made of what the standard library keeps and does not publish; each Python version's
# tests say whether it is still so.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import threading
from asyncio.base_events import _run_until_complete_cb  # type: ignore[attr-defined]  # private
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextvars import Context
from functools import partial
from types import CoroutineType
from typing import Any, Literal, Protocol, TypeVar, TypeVarTuple, cast, get_args

from phloem.cuda_streams.clocks import LoopClock
from phloem.cuda_streams.lockstep import Lockstep
from phloem.errors import InvalidRequest
from phloem.runtime.simulation.anyio_threads import simulate_anyio_threads
from phloem.runtime.simulation.draws import Draws

__all__ = ["POLICIES", "Policy", "SimDeadlock", "SimLivelock", "SimLoop", "SimTask"]

Policy = Literal["fifo", "batch", "task", "pct"]
"""How much order the seed may change.

`fifo`   nothing: asyncio's own order, in virtual time
`batch`  every runnable task once a round, in drawn order
`task`   one drawn task a round, so that a task may fall arbitrarily far behind
`pct`    the task of the highest priority runs; priorities are drawn at birth and change at `depth`
         drawn steps only, so a bug that needs few preemptions is found with a known probability
"""
POLICIES: tuple[Policy, ...] = get_args(Policy)

_PCT_WINDOWS = (32, 256, 2_048)  # priorities change a few times within a drawn one, in steps
_GRAINS_NS = (1, 20_000, 500_000)  # threads begin and end at multiples of one of these
_PCT_PATIENCE = 64  # a task that ran so often in a row gives way: it may be waiting by polling

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Loop(Protocol):
    """What the base class of every event loop keeps and does not publish."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _thread_id: int | None


class _Handle(Protocol):
    """What a handle keeps and does not publish."""

    _callback: object
    _scheduled: bool

    def _run(self) -> None: ...


class SimDeadlock(RuntimeError):
    """Everybody waits and no timer is set. The message names who waits for what."""


class SimLivelock(RuntimeError):
    """The limit of steps was reached: something goes round without getting anywhere."""


class SimTask(asyncio.Task[T]):
    """A task that knows its birth number: a name that is the same in every process."""

    def __init__(
        self,
        coro: Coroutine[object, object, T],
        *,
        born: int,
        loop: asyncio.AbstractEventLoop,
        name: str | None = None,
        context: Context | None = None,
    ) -> None:
        self.born = born
        self.priority = 0.0
        super().__init__(coro, loop=loop, name=name or f"task-{born}", context=context)
        self.label = f"task {self.get_name()}"


def _task_of(handle: asyncio.Handle) -> SimTask[object] | None:
    task: object = getattr(cast("_Handle", handle)._callback, "__self__", None)
    return cast("SimTask[object]", task) if isinstance(task, SimTask) else None


def _born(handle: asyncio.Handle) -> int:
    task = _task_of(handle)
    assert task is not None
    return task.born


class SimLoop(asyncio.BaseEventLoop):
    """The loop. `rng` is what everything else of the run draws from too.

    `scramble`: after so many steps the order is `fifo`, which shortens a failing schedule.
    `reporters` tell a deadlock's reader what is waiting beyond coroutines; hooks in `before_step`
    run before each step, those in `at_end` when the run is over. `errors` are exceptions that no
    task was there to hear; `fail` ends the run at the next step.
    """

    def __init__(
        self,
        seed: int | random.Random = 0,
        *,
        policy: Policy = "task",
        tick_ns: int = 1_000,
        steps_max: int = 5_000_000,
        scramble: int | None = None,
        history: int = 100,
    ) -> None:
        super().__init__()
        self.lockstep = Lockstep()
        if policy not in POLICIES:
            self.close()
            raise InvalidRequest(f"no policy is called {policy!r}; there are {POLICIES}")
        self.rng = random.Random(seed) if isinstance(seed, int) else seed
        self.policy: Policy = policy
        self.steps = 0
        self.preemptions = 0  # times a task ran that was not the one asyncio would have run
        self.history: deque[tuple[int, str]] = deque(maxlen=history)  # (nanoseconds, what ran)
        self.reporters: list[Callable[[], Iterable[str]]] = []
        self.before_step: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.errors: list[BaseException] = []
        self._now_ns = 0
        self._tick_ns = tick_ns
        self._grain_ns = 0  # drawn when the first thread begins
        self._steps_max = steps_max
        self._scramble = scramble
        self._failure: BaseException | None = None
        self._ending = False
        self._round: deque[asyncio.Handle] = deque()
        self._held: list[asyncio.Handle] = []  # tasks that can run and were not drawn
        self._demotions = 0.0
        self._changes: list[int] = []  # pct: steps at which the running task loses its priority
        self._window_end = 0
        self._last: tuple[int, int] = (-1, 0)  # pct: the task that ran last, and how often
        self._births = itertools.count()
        self.set_task_factory(cast("Any", self._new_task))
        self.set_exception_handler(self._unheard)
        self.clock = LoopClock(self)
        simulate_anyio_threads()
        if isinstance(self.rng, Draws):
            self.rng.where = self._where

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[object, object, T], **how: Any
    ) -> SimTask[T]:
        return SimTask(coro, born=next(self._births), loop=loop, **how)

    # -- time and order ------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now_ns / 1e9

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the start."""
        return self._now_ns

    def ready_tasks(self) -> list[SimTask[object]]:
        """The tasks that could run now: what they waited for has come, and they do not know yet."""
        waiting = (*self._held, *self._round, *cast("_Loop", self)._ready)
        return [task for task in map(_task_of, waiting) if task is not None]

    def fail(self, error: BaseException) -> None:
        """Have the run end with `error` before anything else happens; the first one counts."""
        if self._failure is None and not self._ending:
            self._failure = error

    def raise_unheard(self) -> None:
        """Raise what has gone wrong and nobody was told of yet."""
        if self._failure is not None:
            raise self._failure
        if self.errors:
            raise self.errors[0]

    def wind_up(self) -> None:
        """The run is over, for good or bad: nothing counts any more but that everybody leaves."""
        self._ending = True
        self._failure = None
        for hook in self.at_end:
            hook()
        self.before_step.clear()

    def _run_once(self) -> None:
        """Run exactly one callback; `run_forever` calls this until the loop is stopped."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._forget_stop()
            raise failure
        if self.steps >= self._steps_max:
            self._steps_max += 1_000_000  # the cancellation that follows must be able to run
            raise SimLivelock(
                f"no end after {self.steps} steps, {self.time():.6f} virtual s; the last ones:\n"
                + "\n".join(f"  {what}" for _, what in list(self.history)[-8:])
            )
        for hook in self.before_step:
            hook()
        if not self._round:
            self._fill_round()
        handle = self._round.popleft()
        if handle.cancelled():
            return
        self.steps += 1
        self._now_ns += self._tick_ns
        task = _task_of(handle)
        if not self._ending:
            what = _name_of(handle) if task is None else task.label
            self.history.append((self._now_ns, what))
        ready = cast("_Loop", self)._ready
        before = len(ready)
        cast("_Handle", handle)._run()
        if len(ready) > before + 1 and self._keeps_order():
            arrived = [ready.pop() for _ in range(len(ready) - before)]
            ready.extend(_tasks_by_birth(arrived[::-1], task))

    def _forget_stop(self) -> None:
        """A run that has failed at its last step must not end the next one, which tidies up."""
        for handles in (cast("_Loop", self)._ready, self._round):
            for handle in handles:
                if cast("_Handle", handle)._callback is _run_until_complete_cb:
                    handle.cancel()

    def _keeps_order(self) -> bool:
        return self.policy == "fifo" or (self._scramble is not None and self.steps > self._scramble)

    def _fill_round(self) -> None:
        inside = cast("_Loop", self)
        ready, timers = inside._ready, inside._scheduled
        while timers and timers[0].cancelled():
            _unscheduled(heapq.heappop(timers))
        if not ready and not self._held:
            if not timers:
                raise SimDeadlock(self._who_waits())
            self._now_ns = max(self._now_ns, _due_ns(timers[0]))
        while timers and _due_ns(timers[0]) <= self._now_ns:
            ready.append(_unscheduled(heapq.heappop(timers)))
        arrived = list(ready)
        ready.clear()
        if self._keeps_order():
            self._round.extend(self._held)
            self._round.extend(arrived)
            self._held.clear()
            return
        # What is not a task keeps the loop's promise: in order, and before the next task.
        self._round.extend(handle for handle in arrived if _task_of(handle) is None)
        tasks = self._held + [handle for handle in arrived if _task_of(handle) is not None]
        if not tasks:
            return
        asyncio_next = tasks[0]
        # Arrival may hang on the order of a set, so on addresses; birth does not.
        tasks.sort(key=_born)
        if self.policy == "batch":
            self.rng.shuffle(tasks)
            self._round.extend(tasks)
            self._held = []
        else:
            index = self._by_priority(tasks) if self.policy == "pct" else self._drawn(tasks)
            self._round.append(tasks.pop(index))
            self._held = tasks
        self.preemptions += self._round[-1] is not asyncio_next

    def _drawn(self, tasks: list[asyncio.Handle]) -> int:
        return self.rng.randrange(len(tasks)) if len(tasks) > 1 else 0

    def _by_priority(self, tasks: list[asyncio.Handle]) -> int:
        best, best_priority = 0, -math.inf
        for index, handle in enumerate(tasks):
            task = _task_of(handle)
            assert task is not None
            if not task.priority:
                task.priority = 1 + self.rng.random()
            if task.priority > best_priority:
                best, best_priority = index, task.priority
        chosen = _task_of(tasks[best])
        assert chosen is not None
        born, times = self._last
        times = times + 1 if born == chosen.born else 1
        self._last = (chosen.born, times)
        if self._must_change() or times >= _PCT_PATIENCE:
            self._last = (-1, 0)
            self._demotions -= 1
            chosen.priority = self._demotions
        return best

    def _must_change(self) -> bool:
        """True once for each drawn step; the next window is drawn when this one is over."""
        if self.steps >= self._window_end:
            window = self.rng.choice(_PCT_WINDOWS)
            self._window_end = self.steps + window
            count = self.rng.randrange(1, 4)
            self._changes = sorted(self.steps + self.rng.randrange(window) for _ in range(count))
        if not self._changes or self._changes[0] > self.steps:
            return False
        self._changes.pop(0)
        return True

    # -- who waits -----------------------------------------------------------------------------

    def _who_waits(self) -> str:
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask)]
        lines = [
            f"  task {task.get_name()}: {where_it_waits(task)}"
            for task in sorted(tasks, key=lambda task: task.born)
        ]
        for reporter in self.reporters:
            lines.extend(f"  {line}" for line in reporter())
        return (
            f"everybody waits after {self.steps} steps, at {self.time():.6f} virtual s:\n"
            + "\n".join(lines)
        )

    def _where(self) -> str:
        what = self.history[-1][1] if self.history else "the start"
        return f"step {self.steps} ({what})"

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        error: object = context.get("exception")
        what = str(context.get("message", ""))
        found = error if isinstance(error, BaseException) else RuntimeError(what)
        if hasattr(found, "add_note"):
            found.add_note(f"reported by the event loop: {what}")
        self.errors.append(found)

    # -- what a simulated loop cannot pass on --------------------------------------------------

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """`func` runs at one instant of virtual time (`asyncio.to_thread` comes here).

        A caller that is cancelled before a thread would have begun keeps it from running; later it
        runs all the same, with nobody to hear of it.
        """
        del executor
        future: asyncio.Future[T] = self.create_future()
        outcome: list[Callable[[], None]] = []

        def run() -> None:
            try:
                value = func(*args)
            except BaseException as error:  # noqa: BLE001  whoever awaits gets it
                outcome.append(partial(future.set_exception, error))
            else:
                outcome.append(partial(future.set_result, value))

        def end() -> None:
            if not future.done():
                outcome.pop()()

        def begin() -> None:
            if not future.cancelled():
                self.clock.call_at(self._thread_ns(), self.lockstep.turn(run, end).go_on)

        self.clock.call_at(self._thread_ns(), begin)
        return future

    def thread_delay_ns(self) -> int:
        """See `SimulatedLoop`: a tenth of a millisecond, more or less.

        Up to an instant that may be many threads': a real loop that was busy hears of several that
        have ended meanwhile at once, and what comes of that would not be seen otherwise.
        """
        if not self._grain_ns:
            self._grain_ns = self.rng.choice(_GRAINS_NS)
        instant = self._now_ns + self.rng.expovariate(1e4) * 1e9
        return math.ceil(instant / self._grain_ns) * self._grain_ns - self._now_ns

    def _thread_ns(self) -> int:
        return self.clock.now_ns() + self.thread_delay_ns()

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """`call_soon`; raises `RuntimeError` when a thread calls while the loop runs.

        But for those whose turn it is: they may.
        """
        mine = cast("_Loop", self)._thread_id in (None, threading.get_ident())
        if not mine and not self.lockstep.here:
            error = RuntimeError(
                f"the thread {threading.current_thread().name!r} called into a simulation; only "
                "work given to it by asyncio.to_thread, anyio.to_thread, run_in_executor or "
                "CacheRuntime.worker_stream takes turns with it, and copies of a virtual engine"
            )
            self.fail(error)
            raise error
        return super().call_soon(callback, *args, context=context)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`. Raises `RuntimeError` in work given to a thread.

        There a future that is set, say, would wake nobody on a real loop.
        """
        if self.lockstep.current is not None and self.lockstep.here:
            raise RuntimeError(
                "work given to a thread touched what belongs to the loop: a real one may not hear "
                "of it; use loop.call_soon_threadsafe"
            )
        return super().call_soon(callback, *args, context=context)

    def close(self) -> None:
        """See `asyncio.loop.close`; work that waits in the middle is given up."""
        self.lockstep.close()
        super().close()


def where_it_waits(task: asyncio.Task[Any]) -> str:
    """The chain of coroutines of a waiting task, outermost first, with the line of the last."""
    names: list[str] = []
    line = ""
    coro: object = task.get_coro()
    while isinstance(coro, CoroutineType):
        names.append(coro.__qualname__.rpartition("<locals>.")[2])
        frame = coro.cr_frame
        if frame is not None:
            line = f" (line {frame.f_lineno})"
        coro = coro.cr_await
    return " > ".join(names) + line


def _tasks_by_birth(
    handles: list[asyncio.Handle], running: SimTask[object] | None
) -> list[asyncio.Handle]:
    """What one callback made ready, its tasks in order of birth and the one that runs it last.

    The order in which it did so may hang on that of a set, so on addresses.
    """

    def turn(handle: asyncio.Handle) -> tuple[bool, int]:
        return _task_of(handle) is running, _born(handle)

    tasks = iter(sorted((handle for handle in handles if _task_of(handle) is not None), key=turn))
    return [handle if _task_of(handle) is None else next(tasks) for handle in handles]


def _name_of(handle: asyncio.Handle) -> str:
    """What a handle that is no task's runs."""
    callback = cast("_Handle", handle)._callback
    name = str(getattr(callback, "__qualname__", type(callback).__name__))
    return f"loop {name.rpartition('<locals>.')[2]}"


def _due_ns(timer: asyncio.TimerHandle) -> int:
    # In integers on both sides: a division may round to just before the instant that was jumped to.
    return math.ceil(timer.when() * 1e9)


def _unscheduled(timer: asyncio.TimerHandle) -> asyncio.TimerHandle:
    cast("_Handle", timer)._scheduled = False
    return timer
