"""Where virtual engines and streams get their time from: integer nanoseconds, injected."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "LoopClock", "VirtualClock"]


class Clock(Protocol):
    """A source of time and timers."""

    def now_ns(self) -> int: ...

    def call_at(self, when_ns: int, fn: Callable[[], None]) -> None:
        """Call `fn` at an instant, or soon if it is past. Never inside this call.

        Among equal instants the order of asking holds.
        """
        ...


class _Agenda:
    """Functions by instant, first asked first among equals (a bare heap would not keep that)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def add(self, when_ns: int, fn: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_ns, self._asked, fn))
        self._asked += 1

    def next_ns(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Callable[[], None]:
        return heapq.heappop(self._heap)[2]


class VirtualClock:
    """Time that passes only when told to: `run` jumps from one timer to the next."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._agenda = _Agenda()

    def now_ns(self) -> int:
        return self._now_ns

    def call_at(self, when_ns: int, fn: Callable[[], None]) -> None:
        """See `Clock.call_at`."""
        self._agenda.add(when_ns, fn)

    def step(self) -> bool:
        """Jump to the next timer and call it; False if there is none."""
        when_ns = self._agenda.next_ns()
        if when_ns is None:
            return False
        self._now_ns = max(self._now_ns, when_ns)
        self._agenda.pop()()
        return True

    def run(self, until_ns: int | None = None) -> None:
        """Call everything that is due up to `until_ns` and stand there; or all that there is."""
        while True:
            when_ns = self._agenda.next_ns()
            if when_ns is None or (until_ns is not None and when_ns > until_ns):
                break
            self.step()
        if until_ns is not None:
            self._now_ns = max(self._now_ns, until_ns)


class LoopClock:
    """The time of an event loop: real on an ordinary loop, virtual on a simulated one.

    All its timers stand behind a single one of the loop's. Once the loop is closed nothing fires.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now_ns = 0
        self._agenda = _Agenda()
        self._timer: tuple[int, asyncio.TimerHandle] | None = None

    def now_ns(self) -> int:
        self._now_ns = max(self._now_ns, round(self._loop.time() * 1e9))
        return self._now_ns

    def call_at(self, when_ns: int, fn: Callable[[], None]) -> None:
        """See `Clock.call_at`."""
        self._agenda.add(when_ns, fn)
        self._arm()

    def _arm(self) -> None:
        when_ns = self._agenda.next_ns()
        if when_ns is None or self._loop.is_closed():
            return
        if self._timer is not None:
            if self._timer[0] <= when_ns:
                return
            self._timer[1].cancel()
        self._timer = when_ns, self._loop.call_at(when_ns / 1e9, self._fire, when_ns)

    def _fire(self, armed_ns: int) -> None:
        # Seconds as floats may read a hair early; the timer that fired is due all the same.
        self._now_ns = max(self.now_ns(), armed_ns)
        self._timer = None
        try:
            self._agenda.pop()()  # one for each round of the loop, so that tasks get their turn
        finally:
            self._arm()
