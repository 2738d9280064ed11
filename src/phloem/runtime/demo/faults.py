"""Loads from the host tier that go wrong on purpose: the outputs must be the same all the same."""

from __future__ import annotations

import threading
from typing import Literal, NamedTuple, get_args

from phloem.cuda_streams.engine import CopyEngine, Post, Ticket
from phloem.cuda_streams.threads import ThreadEngine
from phloem.errors import InvalidRequest

__all__ = ["LoadFaults", "parse_faults"]

How = Literal["fail", "hang", "late"]

HANG_TIMEOUT_S = 1.0
"""How long a copy may take where some of them hang: what a busy machine delays must not count."""
_LATE_S = 0.05


class LoadFaults(NamedTuple):
    """Every `every`-th load fails, hangs until somebody has given it up, or comes late."""

    how: How
    every: int

    @property
    def copy_timeout_s(self) -> float:
        """How long a copy may take."""
        return HANG_TIMEOUT_S if self.how == "hang" else 60.0

    def engine(self, post: Post) -> CopyEngine:
        """An engine of worker threads with these faults."""
        loads = 0
        never = threading.Event()

        def fault(ticket: Ticket, layer: int) -> None:
            nonlocal loads
            if ticket.batch.channel != "h2d" or layer:
                return
            loads += 1
            if loads % self.every:
                return
            if self.how == "fail":
                raise OSError(f"load {loads} fails on purpose")
            never.wait(2 * HANG_TIMEOUT_S if self.how == "hang" else _LATE_S)

        return ThreadEngine(post, fault=fault)


def parse_faults(text: str) -> LoadFaults:
    """Text like "fail:3". Raises `InvalidRequest` for anything else."""
    how, _, every = text.partition(":")
    if how not in get_args(How) or not every.isdecimal() or int(every) < 1:
        raise InvalidRequest(f"{text!r} is no fault; say fail:N, hang:N or late:N")
    return LoadFaults(how, int(every))  # type: ignore[arg-type]  # one of them
