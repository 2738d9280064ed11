"""How a request is opened: its options, checked and put into one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, TypedDict

from phloem.actors import messages as m
from phloem.actors.tree.keys import ContentMark, Namespace, TokenKey, Tokens, name_of
from phloem.errors import InvalidRequest
from phloem.runtime.checks import integer, seconds
from phloem.runtime.nowait import lease_and_match, limit_of

if TYPE_CHECKING:
    from phloem.runtime.core import Core

__all__ = ["RequestOptions", "open_message", "undo_lease"]

_PRIORITY_MAX = 100


class RequestOptions(TypedDict, total=False):
    """What may be said about a request when it is opened; nothing is required.

    `id` names it in logs and errors; no two that run may have the same. `namespace` and `marks`
    belong to its key. `breakpoints` are positions after which other continuations are expected.
    `whole` matches all tokens; otherwise the last one is left to be computed for its logits.

    Preferences, for the policies that know them: `session` ties requests together, and the latest
    boundary of a session is kept longer, for `session_ttl` seconds (None: until it is closed);
    `priority` (0 to 100) is for what the request uses and publishes, for `keep_for` seconds (None:
    as long as it is cached).
    """

    id: str | None
    namespace: Namespace | None
    marks: Sequence[ContentMark]
    breakpoints: Sequence[int]
    whole: bool
    session: str | None
    session_ttl: float | None
    priority: int
    keep_for: float | None


def open_message(
    core: Core, tokens: Tokens, options: RequestOptions, *, join: bool = False
) -> m.Open:
    """The message that opens a request. Raises `InvalidRequest` for anything that is wrong."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise InvalidRequest(f"a request has no option {min(unknown)!r}")
    key = TokenKey.of(tokens, options.get("namespace"), options.get("marks", ()))
    if not key.length:
        raise InvalidRequest("a request needs at least one token")
    breakpoints = tuple(integer("breakpoint", one) for one in options.get("breakpoints", ()))
    for position in breakpoints:
        if position > key.length:
            raise InvalidRequest(f"breakpoint {position} of a prompt of {key.length} tokens")
    session = options.get("session")
    priority = integer("priority", options.get("priority", 0))
    if priority > _PRIORITY_MAX:
        raise InvalidRequest(f"priority is {priority}; at most {_PRIORITY_MAX}")
    return m.Open(
        key,
        limit_of(key, options.get("whole", False)),
        name_of("id", options.get("id") or core.next_id()),
        breakpoints,
        None if session is None else name_of("session", session),
        _ends(core, "session_ttl", options.get("session_ttl")),
        priority,
        _ends(core, "keep_for", options.get("keep_for")),
        join,
    )


def _ends(core: Core, what: str, lasts_s: float | None) -> int:
    """The time, in milliseconds, at which something ends that lasts so long; 0: never."""
    if lasts_s is None:
        return 0
    if not 0 < seconds(what, lasts_s) < inf:
        raise InvalidRequest(f"{what} is {lasts_s} seconds; it is above 0, or None for no end")
    return core.clock() + max(1, round(lasts_s * 1000))


def undo_lease(core: Core) -> Callable[[object], None]:
    """A function that releases a lease whose taker left before it had it."""

    def undo(answer: object) -> None:
        lease, _ = lease_and_match(answer)
        if not core.stopped:
            core.domain.send(core.tree_actor, m.Release(lease))

    return undo
