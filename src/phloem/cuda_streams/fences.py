"""Fences: the instant after which something will not touch its memory again.

Threads pass fences; the loop hears of it through a *post*: a function that takes a function and has
it called on the loop soon, from whichever thread. Nothing here polls.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from phloem.errors import InvalidRequest

__all__ = ["Fence", "LoopPoster", "Post", "StepTicket", "Stream"]

Post = Callable[[Callable[[], None]], None]


def _call(fn: Callable[[], None]) -> None:
    fn()


def _call_all(fns: list[Callable[[], None]]) -> None:
    """Call each, whatever the others do; then raise the first error, if there was one."""
    first: BaseException | None = None
    for fn in fns:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001  raised below
            first = first or error
    if first is not None:
        raise first


class LoopPoster:
    """A post for one event loop: any number of posts cost one wake-up until they are served.

    Thread-safe. Functions run on the loop in the order posted. Once the loop is closed posts are
    dropped: nobody is left to hear. `wakeups` counts the visits to the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wakeups = 0
        self._loop = loop
        self._queue: deque[Callable[[], None]] = deque()
        self._armed = False

    def __call__(self, fn: Callable[[], None]) -> None:
        self._queue.append(fn)
        if not self._armed:
            self._arm()

    def _arm(self) -> None:
        self._armed = True
        self.wakeups += 1
        try:
            self._loop.call_soon_threadsafe(self._serve)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._queue.clear()
            self._armed = False

    def _serve(self) -> None:
        self._armed = False  # before taking: whoever posts from now on arms again
        try:
            while self._queue:
                self._queue.popleft()()
        finally:
            if self._queue and not self._armed:  # one raised: the rest must still be served
                self._arm()


class Fence:
    """A one-shot flag, thread-safe. A fence that nobody has passed yet is never `passed`.

    Created by engines and streams; `post` brings callbacks to the loop (without one they run in
    the thread that passes the fence, which is right where that thread is the loop's own).

    Behind a device's fence stands an event of a stream, from the moment that it is *recorded*:
    from then on other streams of the device can be told to wait for it, long before it passes.
    """

    __slots__ = (
        "_callbacks", "_event", "_hooks", "_lock", "_passed", "_post", "_recorded_hooks", "label",
    )  # fmt: skip

    def __init__(self, post: Post | None = None, label: str = "") -> None:
        self.label = label
        self._post: Post = _call if post is None else post
        self._lock = threading.Lock()
        self._passed = False
        self._event: object | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._hooks: list[Callable[[], None]] = []
        self._recorded_hooks: list[Callable[[], None]] = []

    @classmethod
    def settled(cls, label: str = "") -> Fence:
        """A fence that has passed already."""
        fence = cls(label=label)
        fence._passed = True
        return fence

    def __repr__(self) -> str:
        return f"Fence({self.label!r}, {'passed' if self._passed else 'waiting'})"

    @property
    def passed(self) -> bool:
        """True from the moment that the memory behind the fence is left alone, in any thread."""
        return self._passed

    @property
    def event(self) -> object | None:
        """The device's event behind the fence; None before it is recorded and once passed."""
        return self._event

    def add_callback(self, fn: Callable[[], None]) -> None:
        """Have `fn()` called on the loop exactly once; to be called on the loop.

        Already passed: `fn` runs before this returns. Otherwise it is posted by the thread that
        passes the fence, in the order of adding.
        """
        with self._lock:
            if not self._passed:
                self._callbacks.append(fn)
                return
        fn()

    async def reached(self) -> None:
        """Wait on the loop until passed. A cancelled caller leaves nothing behind."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.add_callback(wake)
        try:
            await future
        finally:
            with self._lock:
                if wake in self._callbacks:  # its caller was cancelled
                    self._callbacks.remove(wake)

    def add_hook(self, fn: Callable[[], None]) -> None:
        """Have `fn()` called exactly once in the thread that passes the fence.

        Already passed: here and now. For engines and streams: `fn` must be short, must not raise
        and must not touch what belongs to the loop. Hooks run before callbacks are posted.
        """
        with self._lock:
            if not self._passed:
                self._hooks.append(fn)
                return
        fn()

    def add_recorded_hook(self, fn: Callable[[], None]) -> None:
        """Like `add_hook`, but called once the fence is recorded, or passed without that."""
        with self._lock:
            if not self._passed and self._event is None:
                self._recorded_hooks.append(fn)
                return
        fn()

    def mark_recorded(self, event: object) -> None:
        """Called by its owner once `event` is on a stream. Does nothing if the fence has passed."""
        with self._lock:
            if self._passed or self._event is not None:
                return
            self._event = event
            hooks, self._recorded_hooks = self._recorded_hooks, []
        _call_all(hooks)

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until passed; False when `timeout` seconds were not enough.

        For worker threads. Never call it on the loop.
        """
        if self._passed:
            return True
        gate = threading.Event()
        self.add_hook(gate.set)
        return gate.wait(timeout)

    def mark_passed(self) -> None:
        """Pass the fence: whoever owns it calls this, once or more; later calls do nothing.

        Without a post the callbacks run here. If one raises, the others are called all the same,
        and then the first error is raised.
        """
        with self._lock:
            if self._passed:
                return
            self._passed = True
            self._event = None
            told = self._recorded_hooks + self._hooks
            self._recorded_hooks, self._hooks = [], []
            told += [partial(self._post, callback) for callback in self._callbacks]
            self._callbacks = []
        _call_all(told)


class Stream(Protocol):
    """A caller's stream: work that runs in order, apart from the loop. It always has a name.

    There is no ambient current stream: work whose end matters is on a stream that was named.
    """

    @property
    def name(self) -> str: ...

    def record(self) -> Fence:
        """A fence that passes when everything enqueued so far has ended; never blocks."""
        ...

    def wait(self, fence: Fence) -> None:
        """Let everything enqueued from now on begin only after the fence; never blocks."""
        ...


class _StepState(enum.Enum):
    OPENED = "opened"
    LAUNCHED = "launched"
    ENDED = "ended"
    ABANDONED = "abandoned"


class StepTicket:
    """A forward pass as something to wait for. Calls out of order raise InvalidRequest.

        opened --launched()--> launched --end()--> ended
           \\______ abandon() ____/______ abandon() ___> abandoned

    `fence` passes when the pass is over and will touch nothing more. With a stream: when `end()`
    was called and what the stream held at `launched()` has ended; so everything that the pass
    enqueues must come before `launched()`. Without one: at `end()`. Abandoned: when what the
    stream holds at that moment has ended (a pass that was given up may be running); without a
    stream at once.
    """

    def __init__(
        self, stream: Stream | None = None, *, post: Post | None = None, label: str = ""
    ) -> None:
        self.fence = Fence(post, label)
        self._stream = stream
        self._recorded: Fence | None = None
        self._state = _StepState.OPENED

    @property
    def state(self) -> str:
        """`opened`, `launched`, `ended` or `abandoned`."""
        return self._state.value

    def launched(self, stream: Stream | None = None) -> None:
        """Everything that the pass runs is enqueued on `stream` (or on the one given at first)."""
        self._check((_StepState.OPENED,), _StepState.LAUNCHED)
        self._record(stream or self._stream)
        self._state = _StepState.LAUNCHED

    def end(self) -> None:
        """The caller is done with the pass: its results are accepted or queued behind it."""
        self._check((_StepState.LAUNCHED,), _StepState.ENDED)
        self._state = _StepState.ENDED
        self._over()

    def abandon(self) -> None:
        """Give the pass up; legal before and after `launched()`."""
        self._check((_StepState.OPENED, _StepState.LAUNCHED), _StepState.ABANDONED)
        self._record(self._stream)
        self._state = _StepState.ABANDONED
        self._over()

    def _check(self, allowed: tuple[_StepState, ...], to: _StepState) -> None:
        if self._state not in allowed:
            raise InvalidRequest(f"a step that is {self.state} cannot become {to.value}")

    def _record(self, stream: Stream | None) -> None:
        self._recorded = stream.record() if stream is not None else None
        self._stream = stream

    def _over(self) -> None:
        recorded = self._recorded
        if recorded is None:
            self.fence.mark_passed()
            return
        recorded.add_recorded_hook(lambda: self._same_event(recorded))
        recorded.add_hook(self.fence.mark_passed)

    def _same_event(self, recorded: Fence) -> None:
        if (event := recorded.event) is not None:
            self.fence.mark_recorded(event)
