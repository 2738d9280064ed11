"""The operations without `await`, for a scheduler that decides about a batch in one step.

Also what these forms and the awaiting ones share: how a call becomes a message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.allocator import Grant
from phloem.actors.tree.keys import Namespace, TokenKey, Tokens, name_of
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.actors.tree.results import Evicted, InsertResult, Match
from phloem.cuda_streams.engine import Fence
from phloem.errors import InvalidRequest, NoRoom, StaleHandle
from phloem.runtime.checks import integer
from phloem.runtime.core import Core
from phloem.runtime.lease import Lease
from phloem.runtime.step import Step

__all__ = [
    "Admission",
    "Admitted",
    "Nowait",
    "insert_message",
    "lease_and_match",
    "limit_of",
    "release_handle",
    "span_ids",
]


class Admission(msgspec.Struct, frozen=True):
    """One item of `admit_many`: lease what `key` matches and reserve pages and states for it."""

    key: Tokens
    pages: int
    states: int = 0
    owner: str = ""


class Admitted(msgspec.Struct, frozen=True):
    """An admission that succeeded: both are the caller's to give back."""

    lease: Lease
    grant: Grant


class Nowait:
    """The same operations as the runtime's: they never suspend and never wait for room."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._domain = core.domain
        self._tree = core.tree_actor

    def match(
        self, tokens: Tokens, *, namespace: Namespace | None = None, whole: bool = False
    ) -> Match:
        """How far a prompt is cached; a pure read."""
        key = TokenKey.of(tokens, namespace)
        limit = key.length if whole else limit_of(key)
        match = self._domain.run(self._tree, m.Match(key, limit))
        assert isinstance(match, Match)
        return match

    def acquire(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        owner: str = "",
        whole: bool = False,
    ) -> Lease:
        """Lease the deepest boundary."""
        key = TokenKey.of(tokens, namespace)
        limit = key.length if whole else limit_of(key)
        if owner != "":
            name_of("owner", owner)
        acquired = self._domain.run(self._tree, m.Acquire(key, limit, owner, False))
        inner, match = lease_and_match(acquired)
        return Lease(self._core, inner, match)

    def allocate(
        self,
        *,
        pages: int = 0,
        states: int = 0,
        spans: Mapping[str, int] | None = None,
        owner: str = "",
    ) -> Grant:
        """Reserve pages and states, all or nothing; raises `NoRoom` with the figures."""
        core = self._core
        counts = core.span_counts(spans) if spans else ()
        if owner != "":
            name_of("owner", owner)
        return core.allocate_nowait(pages, states, owner, spans=counts)

    def insert(
        self,
        tokens: Tokens,
        *,
        pages: Ids | Sequence[int],
        state: int = 0,
        lease: Lease | None = None,
        namespace: Namespace | None = None,
        after: Step | None = None,
        swap: bool = True,
        spans: Mapping[str, Ids | Sequence[int]] | None = None,
        release: bool = False,
    ) -> InsertResult:
        """Publish data; see `CacheRuntime.insert`."""
        more = span_ids(self._core, spans) if spans else ()
        message = insert_message(tokens, pages, state, lease, namespace, after, swap, more, release)
        result = self._domain.run(self._tree, message)
        if release and lease is not None:
            lease.released = True
        assert isinstance(result, InsertResult)
        return result

    def evict(
        self, *, pages: int = 0, states: int = 0, spans: Mapping[str, int] | None = None
    ) -> Evicted:
        """Free at least so much, if nothing protects it."""
        counts = self._core.span_counts(spans)
        message = m.Evict(integer("pages", pages), integer("states", states), counts)
        gone = self._domain.run(self._tree, message)
        assert isinstance(gone, Evicted)
        return gone

    def release(self, handle: Lease | Grant, *, after: Step | None = None) -> None:
        """Give back a lease, or what is left of a grant."""
        if after is None and type(handle) is Lease:
            handle.release_after(self._core)
        else:
            release_handle(self._core, handle, after)

    def match_many(self, keys: Iterable[Tokens], *, whole: bool = False) -> list[Match]:
        """Match a batch of prompts."""
        return [self.match(key, whole=whole) for key in keys]

    def admit_many(self, admissions: Iterable[Admission]) -> list[Admitted | NoRoom]:
        """Match, lease and reserve for each in turn; what finds no room leaves nothing behind.

        Raises `InvalidRequest` for a bad item before anything is done for any of them.
        """
        checked = [
            (
                TokenKey.of(a.key),
                integer("pages", a.pages),
                integer("states", a.states),
                name_of("owner", a.owner),
            )
            for a in map(_admission, admissions)
        ]
        answers: list[Admitted | NoRoom] = []
        for key, pages, states, owner in checked:
            lease = self.acquire(key, owner=owner)
            try:
                grant = self.allocate(pages=pages, states=states, owner=owner)
            except NoRoom as error:
                lease.release()
                answers.append(error)
            except BaseException:
                lease.release()
                raise
            else:
                answers.append(Admitted(lease, grant))
        return answers


def _admission(item: object) -> Admission:
    if not isinstance(item, Admission):
        raise InvalidRequest(f"{item!r} is no Admission")
    return item


def limit_of(key: TokenKey, whole: bool = False) -> int:
    """Tokens to look up: all but the last, which must be computed for its logits."""
    return key.length if whole or not key.length else key.length - 1


def lease_and_match(answer: object) -> tuple[TreeLease, Match]:
    """The answer to `Acquire` and `Open`."""
    return cast("tuple[TreeLease, Match]", answer)


def insert_message(
    tokens: Tokens,
    pages: Ids | Sequence[int],
    state: int,
    lease: Lease | None,
    namespace: Namespace | None,
    after: Step | None,
    swap: bool,
    spans: tuple[Ids, ...],
    release: bool,
) -> m.Insert:
    """Raises `InvalidRequest` for tokens or ids that are none, or no lease to `release`."""
    if release and lease is None:
        raise InvalidRequest("release=True without a lease to release")
    key = TokenKey.of(tokens, namespace)
    fences: tuple[Fence, ...] = () if after is None else (after.fence,)
    if lease is not None:
        if type(lease) is not Lease:
            raise InvalidRequest(f"lease is {lease!r}, not what acquire has returned")
        if lease.released:
            raise StaleHandle(f"{lease} was released before")
    inner = None if lease is None else lease.inner
    owner = None if inner is None else inner.owner
    slot = integer("state", state)
    return m.Insert(key, key.length, _ids(pages), slot, inner, owner, swap, fences, spans, release)


def span_ids(core: Core, spans: Mapping[str, Ids | Sequence[int]] | None) -> tuple[Ids, ...]:
    """Page ids by the name of a span component, in order. Raises `InvalidRequest`."""
    if not spans:
        return ()
    core.span_counts({name: len(ids) for name, ids in spans.items()})
    return tuple(_ids(spans.get(span.name, ())) for span in core.tree.spans)


def _ids(pages: Ids | Sequence[int]) -> Ids:
    """The caller's ids in an array of our own, which it cannot write to later."""
    if isinstance(pages, array) and pages.typecode == "i":
        return pages[:]
    try:
        return array("i", pages)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"page ids are 32-bit integers: {error}") from None


def release_handle(core: Core, handle: object, after: Step | None) -> None:
    """Give back a lease or a grant, once the step `after` has ended."""
    fences: tuple[Fence, ...] = () if after is None or after.fence.passed else (after.fence,)
    if isinstance(handle, Grant):
        if handle.ledger is not core.ledger:
            raise StaleHandle(f"{handle} is of another runtime")
        core.release_grant(handle, fences)
    elif isinstance(handle, Lease):
        handle.release_after(core, fences)
    else:
        raise InvalidRequest(f"{handle!r} is neither a lease nor a grant")
