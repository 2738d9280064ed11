"""The log of events that a runtime writes, as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from phloem.errors import InvalidRequest
from phloem.events import (
    LeaseEnded,
    RequestEnded,
    RequestForked,
    RequestOpened,
    RequestSuspended,
    RuntimeStarted,
)
from phloem.runtime.traces.request import TraceRequest
from phloem.runtime.tracing import read_log

__all__ = ["read_event_log"]


class _Request(msgspec.Struct):
    """One that was opened, with its lease; `made` once it has finished."""

    opened_s: float
    session: str
    lease: int
    suspended: bool = False
    made: TraceRequest | None = None


def read_event_log(path: Path, *, empty: bool = False) -> Iterator[TraceRequest]:
    """A log of events in `json` style, of runtimes with `CacheConfig.tell_prompts`.

    The requests that finished, as they were opened; a fork is a request with its parent's prompt.
    Left out are those that were aborted, whose opening or end is not in the log, and, but with
    `empty`, whose prompt fills no page. In memory are those since the oldest that is
    open. Raises `InvalidRequest` for a line that is no event, and for a request's end that does not
    tell its prompt.
    """
    waiting: dict[int, _Request] = {}  # in the order in which they were opened
    live: dict[str, int] = {}
    numbers: dict[int, int] = {}
    opened, start = 0, None
    for entry in read_log(path):
        event = entry.event
        if isinstance(event, RequestOpened | RequestForked):
            if event.request in live:  # it was suspended, and goes on
                request = waiting[live[event.request]]
                request.lease, request.suspended = event.lease, False
                continue
            start = entry.time if start is None else start
            session = event.session if isinstance(event, RequestOpened) else ""
            waiting[opened] = _Request(max(0.0, entry.time - start), session, event.lease)
            live[event.request] = opened
            opened += 1
            continue
        if isinstance(event, RuntimeStarted):
            for left in live.values():  # the run before has ended, and they with it
                del waiting[left]
            live.clear()
        elif isinstance(event, RequestSuspended) and event.request in live:
            waiting[live[event.request]].suspended = True
        elif isinstance(event, LeaseEnded) and not event.state_only and event.request in live:
            request = waiting[live[event.request]]
            if request.lease == event.lease and not request.suspended:
                del waiting[live.pop(event.request)]  # its caller left before it had it
        elif isinstance(event, RequestEnded):
            if not event.page_size:
                raise InvalidRequest(
                    f"{path.name}: request {event.request!r} ended without telling its prompt; the "
                    "log of a runtime with CacheConfig(tell_prompts=True) can be replayed"
                )
            at = live.pop(event.request, None)
            if at is not None and event.how == "finished":
                waiting[at].made = _served(waiting[at], event, numbers)
            elif at is not None:
                del waiting[at]
        while waiting and (made := next(iter(waiting.values())).made) is not None:
            del waiting[next(iter(waiting))]
            if len(made.blocks) or empty:
                yield made
    for request in waiting.values():
        if request.made is not None and (len(request.made.blocks) or empty):
            yield request.made


def _served(request: _Request, ended: RequestEnded, numbers: dict[int, int]) -> TraceRequest:
    """The page in which the answer begins is counted with the answer's."""
    ids = [numbers.setdefault(one, len(numbers)) for one in ended.blocks]
    whole = ended.prompt_tokens // ended.page_size
    return TraceRequest(
        at_s=request.opened_s,
        session=request.session,
        blocks=np.array(ids[:whole], np.int32),
        block_size=ended.page_size,
        length=ended.prompt_tokens,
        output=max(0, ended.tokens - ended.prompt_tokens),
        answer=np.array(ids[whole:], np.int32),
    )
