"""What a simulated server serves, within which limits, and in which order.

The orders of admission:

fcfs       first come, first served
shortest   the shortest prompt first
longest    the longest prefix match first, looked up again at each admission
priority   the most urgent first; less urgent requests give way when there is no room
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from phloem.runtime.cache import CacheRuntime
from phloem.runtime.simulation.workloads import Prompt

__all__ = ["ORDERS", "Job", "Limits", "Order", "Preempted", "Served", "StepFailed"]


class Preempted(Exception):
    """A request gave its room to others; it starts again from what is cached by then."""


class StepFailed(Exception):
    """A forward pass did not happen; its requests try again."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server may do at once.

    `chunk`: tokens of one prompt in a pass. `batch_tokens`: tokens of a pass. `running`: requests
    that are admitted. `reserve`: ask for room for the whole answer at once; otherwise page by page,
    which admits more and has to preempt. `ahead`: passes that may be launched and not over.
    `stride`: tokens that one pass adds to an answer. `tries`: a request that was preempted so often
    is refused. `samples`: answers to each prompt; all but one by forks. `join_s`: how long a
    request waits for another one that computes what it needs. `snapshots`: chunks are not cut where
    a state is wanted; the kernel writes it into a slot on the way.

    `joins_at_open`: a request waits for another one before it asks for room, not after. `suspends`:
    who gives way is suspended, and goes on with what is cached by then; with its lease kept
    (`keeps_lease`) it only queues up for room again. `sessions`: the requests of a conversation are
    tied together, for `session_ttl_s` seconds or until its last one. `drafts`: so many tokens are
    guessed behind those of an answer, computed, and rejected. `early`: the first pass is launched
    behind the copies that it needs, before their outcome is known. `prefetches`: what the host has
    of a prompt is brought while the request waits to be admitted.
    """

    chunk: int = 16
    batch_tokens: int = 64
    running: int = 8
    reserve: bool = True
    ahead: int = 1
    stride: int = 1
    room_timeout_s: float | None = None
    tries: int = 20
    samples: int = 1
    join_s: float | None = None
    snapshots: bool = False
    joins_at_open: bool = False
    suspends: bool = False
    keeps_lease: bool = False
    sessions: bool = False
    session_ttl_s: float | None = None
    drafts: int = 0
    early: bool = False
    prefetches: bool = False


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went. `how`: `finished`, or `refused` with the reason in `why`."""

    name: str
    how: str
    why: str = ""
    prompt: int = 0
    reused: int = 0
    output: int = 0
    preempted: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


class Job:
    """A prompt on its way through the server."""

    def __init__(self, prompt: Prompt, number: int, now: float) -> None:
        self.prompt = prompt
        self.number = number
        self.arrived = now
        self.admitted = 0.0
        self.first_token = 0.0
        self.reused = 0
        self.preempted = 0
        self.give_way = False  # asked to free its room at its next chunk
        self.turn: asyncio.Event = asyncio.Event()


Order = Callable[[Sequence[Job], CacheRuntime], Job]


def fcfs(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The job that has waited longest."""
    del cache
    return min(waiting, key=lambda job: job.number)


def shortest(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The job with the shortest prompt."""
    del cache
    return min(waiting, key=lambda job: (len(job.prompt.tokens), job.number))


def longest(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The job with the longest usable prefix at this moment."""
    matches = [
        cache.nowait.match(job.prompt.tokens, namespace=job.prompt.namespace) for job in waiting
    ]
    ranked = zip(waiting, matches, strict=True)
    return min(ranked, key=lambda pair: (-pair[1].usable, pair[0].number))[0]


def priority(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The most urgent job."""
    del cache
    return min(waiting, key=lambda job: (job.prompt.priority, job.number))


ORDERS: Mapping[str, Order] = {
    "fcfs": fcfs,
    "shortest": shortest,
    "longest": longest,
    "priority": priority,
}
