"""The runtime: what a serving framework opens, asks and closes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Unpack

import torch

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.allocator import Grant
from phloem.actors.domain import nothing_to_undo
from phloem.actors.tree.dump import Dump
from phloem.actors.tree.keys import ContentMark, Namespace, TokenKey, Tokens, name_of
from phloem.actors.tree.policies import Policy
from phloem.actors.tree.results import TreeFigures
from phloem.actors.tree.tree import Evicted, InsertResult, Match
from phloem.cuda_streams.engine import Stream
from phloem.cuda_streams.workers import WorkerStream
from phloem.errors import InvalidRequest, StaleHandle
from phloem.runtime.checks import integer, seconds
from phloem.runtime.core import Core
from phloem.runtime.lease import Lease
from phloem.runtime.lifetime import OpenRuntime
from phloem.runtime.nowait import (
    insert_message,
    lease_and_match,
    limit_of,
    release_handle,
    span_ids,
)
from phloem.runtime.observe.explain import Explanation, explain_live
from phloem.runtime.opening import RequestOptions, open_message, undo_lease
from phloem.runtime.prefetching import prefetch
from phloem.runtime.request import Request
from phloem.runtime.stats import PoolStats, Stats, pool_stats
from phloem.runtime.step import Step

if TYPE_CHECKING:
    from phloem.runtime.observe.metrics import MetricsServer

__all__ = ["CacheRuntime", "PoolStats", "Stats"]


class CacheRuntime(OpenRuntime):
    """The cache of one model on one device, for one event loop.

        async with CacheRuntime(config, device="cpu") as cache:
            async with cache.request(tokens) as request:
                ...

    `pools` are allocated on `device` unless given; then their own sizes count, not the config's,
    and no other runtime may use them at the same time. `events` is a sink that gets every event
    (see `phloem.runtime.tracing`); None costs nothing. `metrics` counts them (see `serve_metrics`).
    `engine` makes the copy engine from a function that posts to the loop; the default copies in
    worker threads. May be opened in one task and closed in another.

    The default engine suits the pools: streams of the device where they are on a CUDA device,
    worker threads in CPU memory. `driver` is what the engine needs of a device, by default CUDA's.
    `host_memory` gives the host tier's memory, by default pinned where there is a driver; raises
    `HostMemoryShort`, with nothing taken, when it is not there.
    """

    # -- requests ------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self,
        tokens: Tokens,
        *,
        join: bool = False,
        join_timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Request]:
        """Open a request for a prompt; leaving the block without `finish` aborts it.

        `options` are those of `RequestOptions`. `join` first waits, up to `join_timeout` seconds,
        for another request that is computing the same prefix (see `Request.join`).
        """
        if join_timeout is not None:
            seconds("join_timeout", join_timeout)
        request = await self._open_request(tokens, options, join=join)
        try:
            if join:
                await request.join(timeout=join_timeout)
            yield request
        finally:
            request.abort()

    async def open_request(self, tokens: Tokens, **options: Unpack[RequestOptions]) -> Request:
        """`request` without the block: the caller must `finish` or `abort`.

        Raises `InvalidRequest` for bad tokens or options and for the name of a running request. A
        cancelled caller leaves nothing behind.
        """
        return await self._open_request(tokens, options)

    async def _open_request(
        self, tokens: Tokens, options: RequestOptions, *, join: bool = False
    ) -> Request:
        core = self.core
        message = open_message(core, tokens, options, join=join)
        if message.owner in core.requests:
            raise InvalidRequest(f"request {message.owner!r} is running")
        opened = await core.domain.call(core.tree_actor, message, undo_lease(core))
        lease, match = lease_and_match(opened)
        if message.owner in core.requests:  # by somebody else while this call was queued
            core.release_lease(lease)
            raise InvalidRequest(f"request {message.owner!r} is running")
        request = Request(core, message, lease, match)
        request.stands_on_loaded()
        core.opened(request)
        return request

    async def close_session(self, name: str) -> bool:
        """End a session; False when there was none. What it kept becomes ordinary cache."""
        core = self.core
        return bool(
            await core.domain.call(core.tree_actor, m.CloseSession(name_of("session", name)))
        )

    def step(
        self, requests: Sequence[Request], *, stream: Stream | torch.Stream | None = None
    ) -> Step:
        """Open a forward pass of `requests` on `stream`; see `Step`.

        With pools on a device there must be a stream, of the device: a worker made by
        `worker_stream`, or torch's own. Raises `StaleHandle` for a request that is over or of
        another runtime, `InvalidRequest` for one that is suspended or named twice, and for a stream
        that the runtime cannot use.
        """
        core = self.core
        if isinstance(requests, Request):
            raise InvalidRequest("a step is of a list of requests, also if there is only one")
        for request in requests:
            if core.requests.get(_id_of(request)) is not request:
                raise StaleHandle(f"{request} is not a live request of this runtime")
            request.check_open()  # of all, before any of them is told of the step
        if len({request.id for request in requests}) != len(requests):
            raise InvalidRequest("a request is named twice")
        named = core.streams.named(stream)
        self._steps += 1
        step = Step(core, self._steps, requests, named)
        for request in requests:
            request.step_opened(step)
        return step

    def worker_stream(self, name: str, on: torch.Stream | None = None) -> WorkerStream:
        """A named worker thread for a model; the caller closes it.

        With pools on a device `on` is the stream onto which its functions launch; see
        `DeviceWorker`. Raises `InvalidRequest` when it is missing there, or given without.
        """
        return self.core.streams.worker(name, on)

    # -- one level lower -----------------------------------------------------------------------

    async def match(
        self, tokens: Tokens, *, namespace: Namespace | None = None, whole: bool = False
    ) -> Match:
        """How far a prompt is cached; a pure read."""
        core = self.core
        key = TokenKey.of(tokens, namespace)
        message = m.Match(key, limit_of(key, whole))
        match = await core.domain.call(core.tree_actor, message, nothing_to_undo)
        assert isinstance(match, Match)
        return match

    async def explain(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        marks: Sequence[ContentMark] = (),
        whole: bool = False,
    ) -> Explanation:
        """Why a prompt would hit as far as it does and no further; a pure read, for the operator.

        It also says what other namespaces hold of the same tokens: not to be shown to callers.
        """
        key = TokenKey.of(tokens, namespace, marks)
        return explain_live(self.core, key, limit_of(key, whole))

    async def acquire(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        owner: str = "",
        whole: bool = False,
    ) -> Lease:
        """Lease the deepest boundary; a cancelled caller leaves nothing behind."""
        core = self.core
        key = TokenKey.of(tokens, namespace)
        message = m.Acquire(key, limit_of(key, whole), name_of("owner", owner))
        acquired = await core.domain.call(core.tree_actor, message, undo_lease(core))
        return Lease(core, *lease_and_match(acquired))

    async def prefetch(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = None,
        marks: Sequence[ContentMark] = (),
        whole: bool = False,
    ) -> int:
        """Bring what the host has of a prompt to the device, ahead of the request for it.

        Returns the tokens that the device can serve at the end. It is optional work: it takes only
        room that is free, and none while anybody waits for some; its copy goes behind all that
        requests wait for; and no more than `prefetches_max` are made at once. Where that forbids
        it, or the copy fails, it ends with what the device has. What was brought is cache like any
        other. A cancelled caller leaves a copy that was begun to its end.
        """
        key = TokenKey.of(tokens, namespace, marks)
        return await prefetch(self.core, key, limit_of(key, whole))

    async def allocate(
        self,
        *,
        pages: int = 0,
        states: int = 0,
        spans: Mapping[str, int] | None = None,
        owner: str = "",
        wait: bool = True,
        timeout: float | None = None,
    ) -> Grant:
        """Reserve pages and states, all or nothing; raises `NoRoom` with the figures.

        `spans`: and pages of other components by name, as `{"window": 4}`.
        """
        core = self.core
        counts = core.span_counts(spans)
        name_of("owner", owner)
        return await core.allocate(pages, states, owner, wait=wait, timeout=timeout, spans=counts)

    async def insert(
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
        """Publish data: see `phloem.actors.tree.Tree.insert`.

        `after`: the step that still writes what is offered. `spans`: by component, the pages for
        the last tokens of these, as many as the caller still has. `release` gives the lease back in
        the same turn, which costs less than a call of its own; after an error it is still held.
        Once queued it takes effect whatever becomes of its caller.
        """
        core = self.core
        more = span_ids(core, spans)
        message = insert_message(tokens, pages, state, lease, namespace, after, swap, more, release)
        try:
            result = await core.domain.call(core.tree_actor, message)
        except BaseException:
            if release and lease is not None:
                core.domain.drain()  # it may be on its way
                lease.released = not lease.inner.live
            raise
        if release and lease is not None:
            lease.released = True
        assert isinstance(result, InsertResult)
        return result

    async def evict(
        self, *, pages: int = 0, states: int = 0, spans: Mapping[str, int] | None = None
    ) -> Evicted:
        """Free at least so much, if nothing protects it; very much in slices.

        `spans`: and pages of other components by name. A cancelled caller leaves evicted what has
        been evicted.
        """
        return await self.core.evict(pages, states, spans)

    def release(self, handle: Lease | Grant, *, after: Step | None = None) -> None:
        """Give back a lease, or what is left of a grant. A plain function that always fits.

        After `close` nothing is left to give back. Raises `StaleHandle` for what was released
        before and for another runtime's handles.
        """
        release_handle(self._core_of_handles(), handle, after)

    # -- the whole -----------------------------------------------------------------------------

    def stats(self) -> Stats:
        """The runtime in numbers."""
        core = self.core
        return self._stats_of(core, core.tree.figures())

    def _stats_of(self, core: Core, tree: TreeFigures) -> Stats:
        """Reads numbers and changes nothing, so that any thread may call it."""
        host, border = core.host_ledger, core.tree_actor.border
        return Stats(
            kv=pool_stats(core.ledger.kv),
            state=pool_stats(core.ledger.state),
            spans={pool.component: pool_stats(pool) for pool in core.ledger.spans},
            host_kv=None if host is None else pool_stats(host.kv),
            host_state=None if host is None else pool_stats(host.state),
            host_bytes=0 if self.host_pools is None else self.host_pools.nbytes,
            tokens_loaded=core.tokens_loaded,
            frames_cleared=0 if border is None else border.frames_cleared,
            pages_moved=0 if border is None else border.pages_moved,
            tree=tree,
            requests=len(core.requests),
            waiting=core.allocator.waiting,
            copies_in_flight=core.transfer.in_flight,
            turns=core.domain.turns,
            actions=dict(sorted(core.tree_actor.counts.copy().items())),
            refused_checkpoints=core.refused_checkpoints,
            leases_leaked=core.leases_leaked,
            host_closed="" if core.tree_actor.tiers is None else core.tree_actor.tiers.closed,
            near="" if self._driver is None else self._driver.near.why,
        )

    def serve_metrics(self, *, port: int = 9464, host: str = "localhost") -> MetricsServer:
        """Serve metrics to Prometheus from a thread, until the server returned is closed.

        Needs `metrics=True` at the making of the runtime and the extra `metrics`; raises
        `InvalidRequest` without them, `OSError` when the port is taken (0: any that is free).
        """
        if self._counts is None:
            raise InvalidRequest("nothing is counted: make the runtime with metrics=True")
        try:
            from phloem.runtime.observe.metrics import MetricsServer
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                "metrics need prometheus_client: pip install 'phloem[metrics]'"
            ) from error
        core = self.core

        def stats() -> Stats:  # in the server's thread, beside the loop's
            core.check_open()
            return self._stats_of(core, core.tree.figures_unsettled())

        return MetricsServer(self._counts, stats, port=port, host=host)

    async def dump(self, limit: int = 1000) -> Dump:
        """Up to `limit` nodes of the tree as data; `phloem.actors.tree.dump.picture` draws them."""
        core = self.core
        dump = await core.domain.call(core.tree_actor, m.Dump(integer("limit", limit, 1)))
        assert isinstance(dump, Dump)
        return dump

    async def use_policy(self, policy: str | Policy) -> None:
        """Change the eviction policy; what is cached stays. Raises `InvalidRequest`."""
        core = self.core
        await core.domain.call(core.tree_actor, m.UsePolicy(policy))

    async def audit(self) -> None:
        """Check every invariant; raises `AssertionError` naming the first that is broken."""
        core = self.core
        await core.domain.call(core.tree_actor, m.Audit())

    async def reset(self) -> int:
        """Start a new generation, empty; returns its number. Running requests keep what they own.

        What nothing reads any more is given back in bounded slices.
        """
        core = self.core
        generation = await core.domain.call(core.tree_actor, m.Reset())
        assert isinstance(generation, int)
        return generation


def _id_of(request: object) -> str:
    if not isinstance(request, Request):
        raise InvalidRequest(f"a step is of requests; {request!r} is none")
    return request.id
