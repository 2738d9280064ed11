"""What happened, as values: one struct for each kind of event, and the sink they are given to.

Every event carries ids that join it to others: `request` (who asked, or whose it is), `op` (a copy
through its life), `turn` (the turn in which it happened) and `cause` (the turn that sent the
message; 0 for a caller). Counts are pages, slots or tokens as named. Times are added by whoever
writes events down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

__all__ = [
    "CopyEnded",
    "CopySubmitted",
    "Event",
    "Evicted",
    "Freed",
    "Granted",
    "Inserted",
    "LeaseEnded",
    "LeaseLeaked",
    "LeaseTaken",
    "Parked",
    "Refused",
    "RequestEnded",
    "RequestOpened",
    "ResetDone",
    "RuntimeStarted",
    "RuntimeStopped",
    "Sink",
    "StepChanged",
    "Waited",
]


class Event(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="event", kw_only=True):
    """The ids that every event has."""

    turn: int = 0
    cause: int = 0
    request: str = ""


class RequestOpened(Event, frozen=True, gc=False, kw_only=True):
    """A request was opened: how far it matched, what it lost and which positions are wanted."""

    tokens: int
    usable: int
    kv_prefix: int
    lost: dict[str, int]
    wanted: list[tuple[int, str]]
    namespace: tuple[str, str]


class RequestEnded(Event, frozen=True, gc=False, kw_only=True):
    """A request finished or aborted, with what it computed and published, in tokens."""

    how: str
    reused: int
    computed: int
    published: int


class LeaseTaken(Event, frozen=True, gc=False, kw_only=True):
    """A boundary is protected from now on. `moved`: an existing lease came here from another."""

    lease: int
    boundary: int
    moved: bool = False


class LeaseEnded(Event, frozen=True, gc=False, kw_only=True):
    """A lease ended, or gave up only its state part."""

    lease: int
    boundary: int
    state_only: bool = False


class LeaseLeaked(Event, frozen=True, gc=False, kw_only=True):
    """A lease was collected by Python without having been released; it was released then."""

    lease: int


class Inserted(Event, frozen=True, gc=False, kw_only=True):
    """Tokens were published; `reused` of them were there before. `state`: what became of it.

    The places `adopted` and `adopted_state` (0: none) went from `account` to the tree.
    """

    reused: int
    published: int
    pages: int
    state: str
    account: int
    adopted: list[int]
    adopted_state: int


class Evicted(Event, frozen=True, gc=False, kw_only=True):
    """Data left the tree. `why`: `room` for an allocation, `asked` by a caller, `path_cap`."""

    pages: int
    states: int
    why: str


class Freed(Event, frozen=True, gc=False, kw_only=True):
    """Places went back to their pool."""

    component: str
    ids: list[int]
    owner: int


class Parked(Event, frozen=True, gc=False, kw_only=True):
    """Places that account `owner` gave up wait for fences before they are free."""

    pages: list[int]
    states: list[int]
    owner: int


class Granted(Event, frozen=True, gc=False, kw_only=True):
    """Places were granted to an account."""

    account: int
    pages: list[int]
    states: list[int]


class Waited(Event, frozen=True, gc=False, kw_only=True):
    """An allocation waits for room. `holder`: its owner holds something already."""

    pages: int
    states: int
    holder: bool


class Refused(Event, frozen=True, gc=False, kw_only=True):
    """Something optional or impossible was not done. `what`: `room`, `checkpoint`, ..."""

    what: str
    why: str


class CopySubmitted(Event, frozen=True, gc=False, kw_only=True):
    """A copy was handed to the engine."""

    op: int
    kind: str
    pages: list[int]
    states: list[int]


class CopyEnded(Event, frozen=True, gc=False, kw_only=True):
    """A copy ended; `error` is empty when it succeeded."""

    op: int
    error: str


class StepChanged(Event, frozen=True, gc=False, kw_only=True):
    """A forward pass was opened, launched, ended or abandoned."""

    step: int
    state: str
    requests: list[str]


class RuntimeStarted(Event, frozen=True, gc=False, kw_only=True):
    """The runtime opened. `grid`: states can be kept at multiples of so many tokens."""

    page_size: int
    grid: int
    pages: int
    states: int
    layout: str


class ResetDone(Event, frozen=True, gc=False, kw_only=True):
    """The cache was reset to a new generation."""

    generation: int


class RuntimeStopped(Event, frozen=True, gc=False, kw_only=True):
    """The runtime closed or crashed, with what was still owned then."""

    why: str
    leases: list[str]
    pages: int
    states: int


Sink: TypeAlias = Callable[[Event], None]
