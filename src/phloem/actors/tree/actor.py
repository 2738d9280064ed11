"""The tree actor: messages in, results and actions out.

It alone touches the tree. A turn checks everything, lets the tree decide, moves owners in the
ledger, and sends the tree's actions in the order in which they were emitted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

from phloem.actors import messages as m
from phloem.actors.actions import (
    Action,
    EvictExcessPathStates,
    FreeDeviceSlots,
    FreeHostSlots,
    Ids,
    Reserve,
)
from phloem.actors.copying import Copies
from phloem.actors.domain import LATER, Actor, Domain, Handlers, Reply
from phloem.actors.frames import SharedLedger
from phloem.actors.ledger import Ledger
from phloem.actors.telling import Teller
from phloem.actors.tree.audit import AuditRounds, audit_tree
from phloem.actors.tree.border import Border
from phloem.actors.tree.dump import Dump, dump_tree
from phloem.actors.tree.journal import JournaledTree
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT
from phloem.actors.tree.tiering import Tiering
from phloem.actors.tree.tree import Actions, InsertResult, Tree
from phloem.actors.tree.tree import Evicted as EvictedFigures
from phloem.actors.tree.tree import Match as MatchResult
from phloem.cuda_streams.fences import Fence
from phloem.errors import StaleHandle
from phloem.events import Sink

__all__ = ["TreeActor"]


class TreeActor:
    """One actor for one tree. `emit` gets the events of a tree that keeps a journal of them."""

    name = "tree"

    def __init__(
        self,
        domain: Domain,
        tree: Tree,
        ledger: Ledger,
        emit: Sink | None = None,
        clock: Callable[[], int] = lambda: 0,
        host_ledger: Ledger | None = None,
    ) -> None:
        self.tree = tree
        self._clock = clock  # milliseconds; priorities and sessions end by it
        self._domain = domain
        self._ledger = ledger
        self._tell: Teller | None = None
        if emit is not None and isinstance(tree, JournaledTree):
            self._tell = Teller(emit, domain, tree)
        self.tiers: Tiering | None = None
        if host_ledger is not None:
            self.tiers = Tiering(
                domain,
                tree,
                ledger,
                host_ledger,
                self._dispatch,
                self,
                self._let_waiters_retry,
                self._tell,
                clock,
            )
        self.border: Border | None = None
        if isinstance(ledger, SharedLedger):
            self.border = Border(domain, tree, ledger, self._dispatch, self, self._tell)
        self.counts: dict[str, int] = {}  # actions emitted so far, by kind
        self._copies = Copies(
            domain,
            tree,
            ledger,
            self._check_ours,
            self._release_soon,
            self._release_state,
            self._look_again,
            self.counts,
            self._tell,
        )
        self._allocator: Actor | None = None
        self._transfer: Actor | None = None
        self._host_allocator: Actor | None = None
        # By the lease whose progress is waited for: who waits as long as it takes, or "", and his
        # answer.
        self._joined: dict[int, list[tuple[str, Reply]]] = {}
        self.handlers: Handlers = {
            **({} if self.tiers is None else self.tiers.handlers),
            **({} if self.border is None else self.border.handlers),
            **self._copies.handlers,
            m.Match: self._on_match,
            m.Acquire: self._on_acquire,
            m.Open: self._on_open,
            m.Advance: self._on_advance,
            m.Insert: self._on_insert,
            m.Release: self._on_release,
            m.ReleaseState: self._on_release_state,
            m.StandOn: self._on_stand_on,
            m.CloseSession: self._on_close_session,
            m.UsePolicy: self._on_use_policy,
            m.Dump: self._on_dump,
            m.Fork: self._on_fork,
            m.Join: self._on_join,
            m.Copied: self._on_copied,
            m.TimedOut: self._on_timed_out,
            m.Evict: self._on_evict,
            m.MakeRoom: self._on_make_room,
            EvictExcessPathStates: self._on_evict_excess,
            m.Reset: self._on_reset,
            m.Sweep: self._on_sweep,
            m.Audit: self._on_audit,
        }

    def connect(
        self, allocator: Actor, transfer: Actor, host_allocator: Actor | None = None
    ) -> None:
        """Say who carries out the tree's actions."""
        self._allocator = allocator
        self._transfer = transfer
        self._copies.connect(transfer)
        self._host_allocator = host_allocator
        if self.tiers is not None and host_allocator is not None:
            self.tiers.connect(host_allocator, transfer)
        if self.border is not None:
            self.border.connect(allocator, transfer)

    def audit_each_turn(self, nodes: int) -> None:
        """From now on so many nodes are audited after each turn; see `AuditRounds`."""
        rounds = AuditRounds(self.tree, nodes)

        def audited(handler: Callable[..., object]) -> Callable[..., object]:
            def handle(message: object) -> object:
                answer = handler(message)
                rounds.audit_some()
                return answer

            return handle

        self.handlers = {kind: audited(handler) for kind, handler in self.handlers.items()}

    # -- match and leases ----------------------------------------------------------------------

    def _on_match(self, message: m.Match) -> MatchResult:
        if self.tiers is not None:
            self.tiers.look_at_clock()
        return self.tree.match(message.key, message.limit)

    def _on_acquire(self, message: m.Acquire) -> object:
        if self.tiers is not None:
            self.tiers.look_at_clock()
        lease, match = self.tree.acquire(message.key, owner=message.owner, limit=message.limit)
        if self._tell is not None:
            self._tell.acquired(message, lease, match)
        if self.tiers is None:
            return lease, match
        return self.tiers.answer(lease, match, wait=message.wait, idle=message.idle)

    def _on_open(self, message: m.Open) -> object:
        self.tree.tick(self._clock())
        if self.tiers is not None:
            self.tiers.look_at_clock()
        lease, match = self.tree.open(
            message.key,
            owner=message.owner,
            limit=message.limit,
            breakpoints=message.breakpoints,
            session=message.session,
            session_ends=message.session_ends,
            priority=message.priority,
            keep_until=message.keep_until,
        )
        if self.tiers is not None:
            match = self.tiers.choose(lease, match, may_wait=message.join)
        if self._tell is not None:
            self._tell.opened(message, lease, match)
        return (lease, match) if self.tiers is None else self.tiers.answer(lease, match)

    def _on_advance(self, message: m.Advance) -> MatchResult:
        self._check_ours(message.lease)
        before = message.lease.anchor.end
        limit = message.limit
        if self.tiers is not None:  # only what needs no load: a running request does not wait
            limit = min(limit, self.tree.match(message.lease.key, limit).device)
        match = self.tree.advance(message.lease, beyond=message.beyond, limit=limit)
        if self._tell is not None and message.lease.anchor.end != before:
            self._tell.taken(message.lease, moved=True)
        self._let_waiters_retry()
        return match

    def _on_stand_on(self, message: m.StandOn) -> None:
        self._check_ours(message.lease)
        if message.lease.generation == self.tree.generation:
            self.tree.stand_on(message.lease)

    def _on_close_session(self, message: m.CloseSession) -> bool:
        return self.tree.close_session(message.name)

    def _on_use_policy(self, message: m.UsePolicy) -> None:
        self.tree.use_policy(message.policy)

    def _on_dump(self, message: m.Dump) -> Dump:
        return dump_tree(self.tree, message.limit)

    def _on_fork(self, message: m.Fork) -> Lease:
        self._check_ours(message.lease)
        lease = self.tree.fork(message.lease, owner=message.owner)
        if self._tell is not None:
            self._tell.taken(lease)
        return lease

    def _on_join(self, message: m.Join) -> object:
        self._check_ours(message.lease)
        leader = self.tree.progress_ahead(message.lease, message.more_than)
        if leader is None:
            return False
        joined = (message.lease.owner if message.for_good else "", self._domain.later())
        waiting = self._joined.setdefault(leader.id, [])
        waiting.append(joined)
        joined[1].on_abandoned = partial(waiting.remove, joined)
        if message.for_good:
            self._let_waiters_retry()  # one less who might give back
        return LATER

    def joiners(self) -> set[str]:
        """The owners who wait, without limit, until another request has computed what they need."""
        waiting = [one for joined in self._joined.values() for one in joined]
        return {who for who, reply in waiting if who and not reply.done and not reply.abandoned}

    def _went_on(self, lease: Lease) -> None:
        """`lease` has published something or ended: whoever waits for it looks again."""
        for _, reply in self._joined.pop(lease.id, ()):
            if not reply.done and not reply.abandoned:
                self._domain.complete(reply, True)

    def _on_release(self, message: m.Release) -> None:
        lease = message.lease
        if message.leaked and not lease.live:
            return
        self.tree.release(lease)
        if self._joined:
            self._went_on(lease)
        if self.tree.generation and self.tree.sweeping:
            self._domain.send(self, m.Sweep())
        self._ended(lease, leaked=message.leaked)
        if self._ledger.waiting:
            self._let_waiters_retry()

    def _ended(self, lease: Lease, *, leaked: bool = False) -> None:
        if self.tiers is not None:
            self.tiers.let_go(lease.id)
        if self._tell is not None:
            self._tell.ended(lease, leaked=leaked)

    def _on_release_state(self, message: m.ReleaseState) -> None:
        self._check_ours(message.lease)
        self._release_state(message.lease)

    def _release_state(self, lease: Lease) -> None:
        self.tree.release_state(lease)
        if self._tell is not None:
            self._tell.ended(lease, state_only=True)
        self._let_waiters_retry()

    def _check_ours(self, lease: Lease) -> None:
        if self.tree.leases.live.get(lease.id) is not lease:
            raise StaleHandle(f"{lease} is not a live lease of this runtime")

    def _release_soon(self, lease: Lease) -> None:
        self._domain.send(self, m.Release(lease))

    def _let_waiters_retry(self) -> None:
        if self._ledger.waiting:
            assert self._allocator is not None
            self._domain.send(self._allocator, m.Retry())

    # -- insert --------------------------------------------------------------------------------

    def _on_insert(self, message: m.Insert) -> InsertResult:
        tree, ledger, pages, state = self.tree, self._ledger, message.pages, message.state
        key, length, lease = message.key, message.length, message.lease
        spans = message.spans
        counts = [*map(len, spans)] if spans else ()
        start = tree.check_insert(key, length, len(pages), state, lease, counts)
        homes = None if message.swap else ledger.kv.owners_of(pages)
        account = ledger.account_of(pages, state, message.owner, spans)
        writing = [fence for fence in message.after if not fence.passed] if message.after else []
        guard: Lease | None = None
        if writing and lease is None:
            lease = guard = tree.acquire(key, owner="", limit=0)[0]
        elif writing and lease is not None and tree.spans and start:
            # Steps may yet read what the lease leaves behind, which no boundary needs any more.
            self._guard(tree.fork(lease, owner=lease.owner), writing, lease.boundary, own=True)
        result, actions = tree.insert_checked(
            *(key, length, start, pages, state, lease, account, message.swap, 0, spans),
            message.release and not writing,
        )
        taken: Ids = array("i")
        if account:
            held = ledger.accounts[account]
            if message.after or held.fences:
                # Together with those of an insert whose duplicates are still on their way back.
                before = (fence for fence in held.fences if not fence.passed)
                held.fences = (*before, *message.after)
            taken = self._adopt(message, result, account, start)
            if homes is not None and len(taken) < len(pages):
                kept = len(pages) - len(taken)
                ledger.put_back(pages[:kept], homes[:kept], account)
        if self._tell is not None:
            self._tell.inserted(message, result, account, taken)
        if writing and lease is not None:
            self._guard(lease if guard is None else guard, writing, start, own=guard is not None)
            assert self._transfer is not None
            self._domain.send(self._transfer, m.Written(tuple(writing)))
        if message.release and message.lease is not None:
            if writing:
                tree.release(message.lease)
            self._ended(message.lease)
        if actions:
            self._dispatch(actions)
        if self._joined and lease is not None:
            self._went_on(lease)
        if ledger.waiting:
            self._let_waiters_retry()
        return result

    def _guard(self, lease: Lease, writing: list[Fence], start: int, *, own: bool) -> None:
        """Protect what `writing` steps may still write, from token `start` on, until they end.

        Their caller's lease may end before, and need not cover the state, nor spans that its
        boundary does not need: a lease of our own does.
        """
        hold = lease if own else self.tree.fork(lease, owner=lease.owner)
        if self.tree.spans:
            self.tree.protect_spans(hold, start)
        if self.tree.has_states and not hold.has_state:
            self.tree.take_state(hold)
        if self._tell is not None:
            self._tell.taken(hold)
        left = len(writing)

        def one_passed() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._domain.send(self, m.Release(hold))

        for fence in writing:
            fence.add_callback(one_passed)

    def _adopt(self, message: m.Insert, result: InsertResult, account: int, start: int) -> Ids:
        """Move what the tree took of the pages from token `start` on; the pages of it."""
        pages, page_size = message.pages, self.tree.page_size
        taken = pages[:0]
        for first, end in result.adopted:
            if end - first == len(pages) * page_size:
                taken = pages
                break
            run = pages[(first - start) // page_size : (end - start) // page_size]
            taken = taken + run if taken else run
        state = message.state if result.state == "adopted" else NO_SLOT
        if taken or state or (result.spans and any(result.spans)):
            self._ledger.adopt(account, taken, state, result.spans)
        if state and message.after:
            after = tuple(fence for fence in message.after if not fence.passed)
            if after:
                assert self._transfer is not None
                self._domain.send(self._transfer, m.StateWritten(state, after))
        return taken

    def _dispatch(self, actions: Actions) -> None:
        assert self._allocator is not None
        counts, send = self.counts, self._domain.send
        for action in actions:
            kind = type(action).__name__
            counts[kind] = counts.get(kind, 0) + 1
            if type(action) is FreeDeviceSlots:
                send(self._allocator, action)
            else:
                if self._tell is not None and isinstance(action, Reserve):
                    self._tell.reserves(action)
                send(self._executor_of(action), action)

    def _executor_of(self, action: Action) -> Actor:
        if isinstance(action, EvictExcessPathStates):
            return self
        on_host = isinstance(action, FreeHostSlots)
        if isinstance(action, Reserve):
            on_host = action.tier == "host"
            if not on_host:
                assert self._allocator is not None
                return self._allocator
        executor = self._host_allocator if on_host else self._transfer
        assert executor is not None, f"nobody carries out {action}"
        return executor

    # -- copies ----------------------------------------------------------------------------------

    @property
    def operations(self) -> dict[int, m.CopyOperation]:
        """The copies that requests asked for and that have not ended, by number."""
        return self._copies.live

    def _on_copied(self, message: m.Copied) -> None:
        if self._copies.copied(message):
            return
        if self.border is None or not self.border.copied(message):
            assert self.tiers is not None
            self.tiers.copied(message)
        if self.tree.sweeping:
            self._domain.send(self, m.Sweep())

    def _on_timed_out(self, message: m.TimedOut) -> None:
        moves = self.border is not None and self.border.timed_out(message)
        if not moves and not self._copies.timed_out(message) and self.tiers is not None:
            self.tiers.timed_out(message)

    def _look_again(self) -> None:
        if self.tiers is not None:
            self.tiers.look_again()

    # -- eviction ------------------------------------------------------------------------------

    def _on_evict(self, message: m.Evict) -> EvictedFigures:
        gone, actions = self.tree.evict(message.pages, message.states, spans=message.spans)
        if self._tell is not None:
            self._tell.evicted(gone, "asked", "")
        self._dispatch(actions)
        return gone

    def _on_make_room(self, message: m.MakeRoom) -> None:
        """Evict what is short for an allocation; what is leaving already counts as room to come."""
        assert self._allocator is not None
        if self.border is not None:
            enough = self.border.make_room(message)
        else:
            tree, spans = self.tree, message.spans
            pages, states = tree.beyond_leaving(message.pages, message.states)
            enough = tree.can_evict(pages, states, spans)
            if enough and (pages or states or any(spans)):
                gone, actions = tree.evict(pages, states, message.owner, spans)
                if self._tell is not None:
                    self._tell.evicted(gone, "room", message.owner)
                self._dispatch(actions)
        if message.tell:
            self._domain.send(self._allocator, m.MadeRoom(enough))

    def _on_evict_excess(self, action: EvictExcessPathStates) -> None:
        gone, actions = self.tree.evict_excess(action)
        if self._tell is not None and gone.states:
            self._tell.evicted(gone, "path_cap", "")
        self._dispatch(actions)

    # -- reset and audit -----------------------------------------------------------------------

    def _on_reset(self, message: m.Reset) -> int:
        del message
        self.tree.reset()
        if self.tiers is not None:
            self.tiers.let_all_go()
        for number in list(self._joined):
            for _, reply in self._joined.pop(number):
                if not reply.done and not reply.abandoned:
                    self._domain.complete(reply, True)
        if self._tell is not None:
            self._tell.reset()
        self._domain.send(self, m.Sweep())
        return self.tree.generation

    def _on_sweep(self, message: m.Sweep) -> None:
        del message
        more, actions = self.tree.sweep()
        self._dispatch(actions)
        if more:
            self._domain.send_soon(self, m.Sweep())
        else:
            self._let_waiters_retry()

    def _on_audit(self, message: m.Audit) -> None:
        del message
        audit_tree(self.tree)
        self._ledger.audit()
        figures = self.tree.figures()
        assert figures.pages == self._ledger.kv.tree, "pages of the tree and of the ledger differ"
        assert figures.states == self._ledger.state.tree, "states of tree and ledger differ"
        for span in figures.spans:
            pool = self._ledger.pool(span.component)
            assert span.pages == pool.tree, f"{span.component} pages of tree and ledger differ"
        if self.tiers is not None:
            host = self.tiers.host_ledger
            host.audit()
            assert figures.host_pages == host.kv.tree, "host pages of tree and ledger differ"
            assert figures.host_states == host.state.tree, "host states of tree and ledger differ"
