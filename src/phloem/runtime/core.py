"""The actors of one runtime, wired together; what requests, steps and leases work on."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.allocator import AllocatorActor, Grant
from phloem.actors.domain import Domain, nothing_to_undo
from phloem.actors.frames import SharedLedger
from phloem.actors.host_allocator import HostAllocatorActor
from phloem.actors.ledger import Ledger
from phloem.actors.transfer import Timer, TransferActor, Watchdog
from phloem.actors.tree.actor import TreeActor
from phloem.actors.tree.journal import JournaledTree
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.actors.tree.results import Evicted
from phloem.actors.tree.tree import Tree
from phloem.actors.view import TreeView
from phloem.cuda_streams.device_streams import CallerStreams
from phloem.cuda_streams.engine import CopyEngine, Fence, Post
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.errors import InvalidRequest, NoRoom, RuntimeClosed, StaleHandle
from phloem.events import Context, Sink
from phloem.runtime.checks import integer, seconds
from phloem.runtime.config import CacheConfig
from phloem.runtime.costs.estimates import Estimates

if TYPE_CHECKING:
    from phloem.runtime.request import Request
    from phloem.runtime.standing import Standing

__all__ = ["Core"]

_SLICE = 256  # pages or states that one turn evicts at most when a caller wants many gone


class Core:
    """One domain with its tree, allocator and transfer actor. Lives as long as the runtime is open.

    Everything here is for the event loop's thread, but `lease_leaked`.
    """

    def __init__(
        self,
        config: CacheConfig,
        pools: DevicePools,
        engine: CopyEngine,
        streams: CallerStreams,
        post: Post,
        emit: Sink | None,
        on_crash: Callable[[BaseException], None],
        caller_context: Callable[[], Context] | None = None,
        seconds: Callable[[], float] = lambda: 0.0,
        host: HostPools | None = None,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self.config = config
        self._seconds = seconds
        self.emit = emit
        self.post = post
        self.streams = streams
        self.has_states = config.layout.has_states
        self.tree = (Tree if emit is None else JournaledTree)(
            page_size=config.page_size,
            state_chunk=config.state_chunk,
            components=config.components,
            policy=config.eviction,
            placement=config.placement,
            enabled=config.enabled,
            host=host is not None,
            write_policy=config.write_policy,
            state_weight=config.layout.state_weight,
        )
        self.grid = self.tree.grid
        self.ledger = _ledger_of(pools)
        self.domain = Domain(
            inline=config.inline,
            capacity=config.queue_max,
            on_crash=on_crash,
            caller_context=None if emit is None else caller_context,
        )
        self.host_ledger: Ledger | None = None
        self.host_allocator: HostAllocatorActor | None = None
        if host is not None:
            self.host_ledger = Ledger(host.kv_rows.count, host.state_rows.count)
            self.host_allocator = HostAllocatorActor(self.domain, self.host_ledger, emit)
        self.tree_actor = TreeActor(
            self.domain, self.tree, self.ledger, emit, self.clock, self.host_ledger
        )
        view = TreeView(
            self.tree.figures,
            self.tree.operations.arriving,
            self.tree.leases.owners,
            self._gives_back_by_itself,
            self.tree_actor.joiners,
        )
        self.allocator = AllocatorActor(self.domain, self.ledger, view, emit)
        self.estimates = _estimates_of(config, pools) if host is not None else None
        loaded = None if self.estimates is None else self.estimates.loaded
        dog = Watchdog(config.copy_timeout_s, seconds, call_later)
        self.transfer = TransferActor(self.domain, engine, pools, emit, host, loaded, dog)
        if self.estimates is not None and self.tree_actor.tiers is not None:
            self.tree_actor.tiers.weigh_by(self.estimates)
        self.tree_actor.connect(self.allocator, self.transfer, self.host_allocator)
        if self.host_allocator is not None:
            self.host_allocator.connect(self.tree_actor)
        self.allocator.connect(self.tree_actor)
        self.transfer.connect(self.tree_actor)
        if config.audit_nodes:
            self.tree_actor.audit_each_turn(config.audit_nodes)
        self.requests: dict[str, Request] = {}
        self.refused_checkpoints = 0
        self.tokens_loaded = 0
        self.leases_leaked = 0
        self.prefetches = 0  # under way
        self.closing = False
        self._leaked: deque[TreeLease] = deque()
        self._ids = 0

    def _gives_back_by_itself(self) -> bool:
        """Whether something will become free by itself: by a sweep, or a copy in flight."""
        border = self.tree_actor.border
        moves = border is not None and border.busy
        return self.tree.sweeping or bool(self.tree.operations.live) or moves

    def watch_pass(self, spans: Sequence[tuple[int, int]], fence: Fence) -> None:
        """A pass over these spans was launched: its time counts, if anybody asks for costs."""
        estimates = self.estimates
        if estimates is not None:
            launched = self._seconds()
            fence.add_callback(lambda: estimates.computed(spans, launched, self._seconds()))

    def clock(self) -> int:
        """Milliseconds of the loop's clock; sessions and priorities end by it."""
        return int(self._seconds() * 1000)

    # -- messages ------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """True once nothing is answered any more: closed or crashed."""
        return self.domain.stopped is not None

    def check_open(self) -> None:
        """Raise `RuntimeClosed` or `CacheCrashed` when the runtime serves nobody any more."""
        self.domain.check_running()
        if self.closing:
            raise RuntimeClosed("the runtime is closing")

    def run(self, message: m.Message) -> object:
        """Have the tree or the allocator answer now."""
        return self.domain.run(self._actor_for(message), message)

    async def call(
        self, message: m.Message, undo: Callable[[object], None] | None = None
    ) -> object:
        """Have the tree or the allocator answer, waiting for it if need be."""
        return await self.domain.call(self._actor_for(message), message, undo)

    async def await_fences(self, fences: tuple[Fence, ...]) -> None:
        """Wait until all have passed; a cancelled caller leaves nothing behind."""
        await self.domain.call(self.transfer, m.AwaitFences(fences), nothing_to_undo)

    def _actor_for(self, message: m.Message) -> TreeActor | AllocatorActor:
        return self.tree_actor if type(message) in self.tree_actor.handlers else self.allocator

    # -- room ----------------------------------------------------------------------------------

    async def allocate(
        self,
        pages: int,
        states: int,
        owner: str,
        *,
        account: int = 0,
        wait: bool = True,
        timeout: float | None = None,
        spans: tuple[int, ...] = (),
    ) -> Grant:
        """Grant places, or raise `NoRoom`. A cancelled caller leaves nothing behind."""
        pages, states = integer("pages", pages), integer("states", states)
        limit = None if timeout is None else seconds("timeout", timeout)
        message = m.Allocate(pages, states, owner, account, wait, True, spans)
        if limit is None:
            return _granted(await self.domain.call(self.allocator, message, self._undo_grant))
        try:
            with anyio.fail_after(limit):
                grant = await self.domain.call(self.allocator, message, self._undo_grant)
        except TimeoutError:
            raise NoRoom(self.allocator.figures(pages, states, spans)) from None
        return _granted(grant)

    def allocate_nowait(
        self,
        pages: int,
        states: int,
        owner: str,
        *,
        account: int = 0,
        evict: bool = True,
        spans: tuple[int, ...] = (),
    ) -> Grant:
        """Grant or `NoRoom`, now."""
        pages, states = integer("pages", pages), integer("states", states)
        domain, ledger = self.domain, self.ledger
        spans_short = ledger.spans_short(spans) if spans else ()
        fits = ledger.fits(pages, states) and not (spans and any(spans_short))
        if not fits and evict and not domain.queued and not ledger.waiting:
            # Nobody is ahead: the tree can be asked first, and no allocation waits for its answer.
            few_pages, few_states = ledger.short_of(pages, states)
            room = m.MakeRoom(few_pages, few_states, owner, False, spans_short)
            domain.run(self.tree_actor, room)
        message = m.Allocate(pages, states, owner, account, False, evict, spans)
        return _granted(domain.run(self.allocator, message))

    def span_counts(self, spans: Mapping[str, int] | None) -> tuple[int, ...]:
        """Counts by the name of a span component, in order. Raises `InvalidRequest`."""
        if not spans:
            return ()
        names = [span.name for span in self.tree.spans]
        if unknown := spans.keys() - set(names):
            raise InvalidRequest(f"no span component {min(unknown)!r}; there are {names}")
        return tuple(integer(f"pages of {name}", spans.get(name, 0)) for name in names)

    def span_tables(self, lease: TreeLease) -> list[Ids]:
        """For each span component the tree's pages up to a lease's boundary: 0 where not needed."""
        count = lease.boundary // self.config.page_size
        tables: list[Ids] = []
        for span in self.tree.spans:
            needed = self.tree.span_of(lease, span.number)
            tables.append(array("i", bytes(4 * (count - len(needed)))) + needed)
        return tables

    async def evict(
        self, pages: int, states: int, spans: Mapping[str, int] | None = None
    ) -> Evicted:
        """Free at least so much, in slices between which others have their turns.

        A cancelled caller leaves evicted what has been evicted.
        """
        pages, states = integer("pages", pages), integer("states", states)
        counts = self.span_counts(spans)
        total = Evicted(0, 0)
        while any(counts):
            counts_now = tuple(min(count, _SLICE) for count in counts)
            gone = await self._evict_at_once(m.Evict(0, 0, counts_now))
            total = total.plus(gone)
            counts = tuple(map(_left, counts, counts_now, gone.spans))
            await self.domain.pause()
        while True:
            pages_now = min(pages, _SLICE)
            states_now = min(states, _SLICE) if pages <= _SLICE else 0  # states that go along count
            gone = await self._evict_at_once(m.Evict(pages_now, states_now))
            total = total.plus(gone)
            pages = _left(pages, pages_now, gone.pages + gone.pages_promised)
            states = _left(states, states_now, gone.states + gone.states_promised)
            if not pages and not states:
                return total
            await self.domain.pause()

    async def _evict_at_once(self, message: m.Evict) -> Evicted:
        gone = await self.domain.call(self.tree_actor, message)
        assert isinstance(gone, Evicted)
        return gone

    def _undo_grant(self, answer: object) -> None:
        grant = _granted(answer)
        nothing = not (grant.pages or grant.states or any(grant.spans))  # and maybe no account
        if not self.stopped and not nothing:
            self.domain.send(
                self.allocator,
                m.GiveBack(grant.account, grant.pages, grant.states, (), grant.spans),
                self.domain.caller_context(),
            )

    def release_grant(self, grant: Grant, after: tuple[Fence, ...] = ()) -> None:
        """Give back what a grant still owns; nothing when all of it went to the tree.

        Raises `StaleHandle` for a grant that was given back before.
        """
        if self.stopped:
            return
        if grant.released:
            raise StaleHandle(f"{grant} was released before")
        grant.released = True
        self.domain.drain()  # an insert on its way may yet take some of it
        if grant.account not in self.ledger.accounts:
            return
        pages = self.ledger.kv.among(grant.pages, grant.account)
        states = self.ledger.state.among(grant.states, grant.account)
        spans = tuple(
            pool.among(ids, grant.account)
            for pool, ids in zip(self.ledger.spans, grant.spans, strict=False)
        )
        if pages or states or any(spans):
            self.run(m.GiveBack(grant.account, pages, states, after, spans))

    def touching(self, states: Collection[int], pages: Collection[int]) -> tuple[Fence, ...]:
        """The fences of copies in flight that read or write any of these places."""
        self.domain.drain()  # what is still queued may submit copies of them
        transfer = self.transfer
        if not transfer.in_flight:
            return ()
        return transfer.touching(states) + transfer.touching_pages(pages)

    @property
    def in_flight(self) -> bool:
        """True while copies or parked places will come to an end by themselves."""
        ledger = self.ledger
        return bool(self.transfer.in_flight or any(pool.parked for pool in ledger.pools))

    # -- leases --------------------------------------------------------------------------------

    def release_lease(self, lease: TreeLease) -> None:
        """End a lease now. After the runtime's end there is nothing left to release."""
        domain = self.domain
        if domain.stopped is None:
            domain.run(self.tree_actor, m.Release(lease))

    def release_lease_after(self, lease: TreeLease, fences: tuple[Fence, ...]) -> None:
        """End a lease once nothing in flight reads what it protects."""
        pending = [fence for fence in fences if not fence.passed] if fences else None
        if not pending:
            self.release_lease(lease)
            return
        if self.tree.leases.live.get(lease.id) is not lease:
            raise StaleHandle(f"{lease} is not a live lease of this runtime")
        context, left = self.domain.caller_context(), len(pending)

        def one_passed() -> None:
            nonlocal left
            left -= 1
            if not left and not self.stopped:
                self.domain.send(self.tree_actor, m.Release(lease), context)

        for fence in pending:  # threads may have passed some meanwhile: these call back at once
            fence.add_callback(one_passed)

    def lease_leaked(self, lease: TreeLease) -> None:
        """A handle was collected unreleased; called by the collector, in any thread."""
        self._leaked.append(lease)
        if not self.stopped:
            self.post(self._collect_leaked)

    def _collect_leaked(self) -> None:
        while self._leaked:
            lease = self._leaked.popleft()
            if lease.live and not self.stopped:
                self.leases_leaked += 1
                self.domain.send(self.tree_actor, m.Release(lease, leaked=True))

    # -- requests ------------------------------------------------------------------------------

    def next_id(self) -> str:
        """A name for a request that was given none."""
        self._ids += 1
        while (name := f"request-{self._ids}") in self.requests:
            self._ids += 1
        return name

    def opened(self, request: Request) -> None:
        """Note a request that lives. Raises `InvalidRequest` when its name is taken."""
        if request.id in self.requests:
            raise InvalidRequest(f"request {request.id!r} is running")
        self.requests[request.id] = request

    def closed(self, request: Standing) -> bool:
        """Note that a request is over: what it waits for is not wanted any more.

        False for one that was not noted as `opened`.
        """
        if self.requests.get(request.id) is not request:
            return False
        del self.requests[request.id]
        self.withdraw(request.id)
        return True

    def withdraw(self, owner: str) -> None:
        """Have whoever waits for room for a request hear that it is not wanted any more."""
        if self.allocator.waiting:
            context = self.domain.caller_context()
            self.domain.send(self.allocator, m.Withdraw(owner), context)


def _estimates_of(config: CacheConfig, pools: DevicePools) -> Estimates | None:
    if config.loads == "always":
        return None
    return Estimates(
        pools.page_bytes,
        pools.slot_bytes,
        prefill_tokens_per_s=config.prefill_tokens_per_s,
        load_bytes_per_s=config.load_bytes_per_s,
        geometry=config.prefill_geometry,
    )


def _ledger_of(pools: DevicePools) -> Ledger:
    if pools.frame is None:
        spans = {name: rows.count for name, rows in pools.span_rows.items()}
        ledger = Ledger(pools.pages, pools.slots, spans)
        for pool in ledger.spans:
            pool.place_bytes = pools.span_rows[pool.component].row_bytes
    else:
        ledger = SharedLedger(pools.pages // pools.frame.pages, pools.frame.pages)
    ledger.kv.place_bytes, ledger.state.place_bytes = pools.page_bytes, pools.slot_bytes
    return ledger


def _granted(answer: object) -> Grant:
    assert isinstance(answer, Grant)
    return answer


def _left(wanted: int, asked: int, gone: int) -> int:
    """How much of `wanted` is left to evict; 0 when less than `asked` went: there is no more."""
    return 0 if gone < asked else max(0, wanted - gone)
