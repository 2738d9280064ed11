"""Allocations that wait for room, in the order in which they are served.

Owners that already hold something are served before newcomers, and in each class whoever came
first: a holder may give back only when it goes on.
"""

from __future__ import annotations

from collections import deque

from phloem.actors.domain import Reply
from phloem.actors.messages import Allocate
from phloem.events import Context

__all__ = ["Waiter", "WaitingLine"]


class Waiter:
    """An allocation that waits, and whom to answer."""

    __slots__ = ("asked", "context", "holder", "message", "op", "patient", "reply", "tried")

    def __init__(
        self,
        message: Allocate,
        reply: Reply,
        holder: bool,
        asked: int,
        context: Context,
        op: int = 0,
        patient: bool = False,
    ) -> None:
        self.message = message
        self.reply = reply
        self.holder = holder
        self.asked = asked  # the turn of its message ...
        self.context = context  # ... and what its caller had bound
        self.op = op  # of the tree's operation that asks, which is answered by message; 0: a caller
        self.patient = patient  # it waits for room that copies in flight will free, no longer
        self.tried = False  # the tree could not help since anything last changed


class WaitingLine:
    """Allocations that wait. Those whose callers have gone are passed over."""

    def __init__(self) -> None:
        self.holders: deque[Waiter] = deque()
        self.newcomers: deque[Waiter] = deque()

    def __len__(self) -> int:
        return len(self.holders) + len(self.newcomers)

    def join(self, waiter: Waiter) -> None:
        """Add an allocation at the end of its class."""
        self._class_of(waiter).append(waiter)

    def head(self) -> Waiter | None:
        """The allocation that is served next; None when nobody waits."""
        for queue in (self.holders, self.newcomers):
            while queue and (queue[0].reply.abandoned or queue[0].reply.done):
                queue.popleft()
            if queue:
                return queue[0]
        return None

    def all(self) -> list[Waiter]:
        """All allocations that wait, in the order of service."""
        waiting = (*self.holders, *self.newcomers)
        return [w for w in waiting if not w.reply.abandoned and not w.reply.done]

    def leave(self, waiter: Waiter) -> None:
        """Take an allocation that was answered out of the line."""
        queue = self._class_of(waiter)
        if queue[0] is waiter:
            queue.popleft()
        else:
            queue.remove(waiter)

    def untry(self) -> None:
        """Let the tree be asked again for each of them."""
        for waiter in (*self.holders, *self.newcomers):
            waiter.tried = False

    def _class_of(self, waiter: Waiter) -> deque[Waiter]:
        return self.holders if waiter.holder else self.newcomers
