"""Bugs that simulations have found, each as a small program that failed before it was mended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phloem.actors.domain import Domain


class _Echo:
    """Answers every message with itself."""

    name = "echo"

    def __init__(self) -> None:
        self.handlers: dict[type, Callable[..., object]] = {str: str}


async def test_callers_are_let_in_when_sent_messages_leave_the_queue() -> None:
    """A queue full of messages without callers kept the callers behind it out for ever."""
    domain = Domain(inline=False, capacity=1)
    domain.loop = asyncio.get_running_loop()
    echo = _Echo()
    callers = [asyncio.create_task(domain.call(echo, f"asked {number}")) for number in range(3)]
    domain.send(echo, "sent, not asked")  # fills the queue before any of them has run
    answers = await asyncio.wait_for(asyncio.gather(*callers), 5)
    assert answers == ["asked 0", "asked 1", "asked 2"]
