"""A request through its life: open, ready, steps, checkpoints, finished or aborted.

`tokens[:boundary]` is the tree's and under the request's lease; the pages from there on are the
request's own. Nothing it gives up is used again before the steps and copies that may still touch
it have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import anyio

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.tree.keys import TokenKey, Tokens
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.actors.tree.placement import Wanted
from phloem.actors.tree.tree import InsertResult, Match
from phloem.cuda_streams.engine import Fence
from phloem.errors import InvalidRequest, NoRoom, StaleHandle
from phloem.events import Refused, RequestEnded
from phloem.runtime.checks import integer
from phloem.runtime.forking import copy_private_data, lease_twin, tell_forked
from phloem.runtime.holding import Holding, Snapshot

if TYPE_CHECKING:
    from phloem.runtime.core import Core
    from phloem.runtime.step import Step

__all__ = ["Publish", "Request", "Resources"]

Publish = Literal["all", "prompt", "none"]
_PUBLISH: tuple[Publish, ...] = ("all", "prompt", "none")
Resources = dict[str, int]


class Request:
    """One prompt being served. Made by `CacheRuntime.request`; belongs to one task at a time.

    `tokens[:computed]` has been computed or reused; `state_slot` is the request's own working
    state, None until it is allocated. `wanted` names positions at which a checkpoint is worth a
    state.
    """

    def __init__(
        self, core: Core, name: str, key: TokenKey, lease: TreeLease, match: Match
    ) -> None:
        self.id = name
        self.match = match
        self.prompt_tokens = key.length
        self.usable = match.usable
        self.computed = match.usable
        self.status: Literal["open", "running", "finished", "aborted"] = "open"
        self._core = core
        self._key = key
        self._lease = lease
        self._holding = Holding(core, core.tree.pages_of(lease))
        self._state_at: int | None = None  # the position at which the working state is true
        self._tokens_computed = 0
        self._tokens_reused = match.usable
        self._steps: dict[int, Step] = {}  # opened and not over

    # -- what it is ----------------------------------------------------------------------------

    @property
    def boundary(self) -> int:
        """Tokens that are the tree's and protected by the request's lease."""
        return self._lease.boundary

    @property
    def state_slot(self) -> int | None:
        """The slot of the request's own working state, None until it is allocated."""
        return self._holding.working

    @property
    def settled(self) -> int:
        """Tokens that are accepted and written by launched steps: what can be published."""
        return min(self.computed, self._key.length)

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """Positions beyond what is computed at which a state is worth keeping, ascending."""
        return tuple(wanted for wanted in self._lease.wanted if wanted.position > self.computed)

    @property
    def length(self) -> int:
        """Tokens of the request so far."""
        return self._key.length

    @property
    def room(self) -> int:
        """Tokens for which the request has pages."""
        return self._holding.room

    def page_table(self) -> Ids:
        """The device page ids of all the request's tokens and room, in order; a copy."""
        return self._holding.pages[:]

    def resources(self) -> Resources:
        """What the request owns outside the tree; empty after its end and the last fence."""
        account = self._core.ledger.accounts.get(self._holding.account)
        held = {
            "pages": account.pages if account else 0,
            "states": account.states if account else 0,
            "leases": int(self._lease.live),
            "steps": len(self.fences()),
        }
        return {name: count for name, count in held.items() if count}

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.computed}/{self._key.length} tokens, {self.status})"

    # -- room and data -------------------------------------------------------------------------

    async def allocate(
        self, tokens: int, *, wait: bool = True, timeout: float | None = None
    ) -> None:
        """Room for `tokens` more tokens beyond what is computed, and the working state slot.

        All or nothing. Waits for room unless `wait=False`; raises `NoRoom` when there can be none,
        or after `timeout` seconds, and `StaleHandle` when the request ends while it waits. A
        cancelled caller leaves nothing behind.
        """
        pages, states = self._missing(tokens)
        if not pages and not states:
            return
        grant = await self._core.allocate(
            pages, states, self.id, account=self._holding.account, wait=wait, timeout=timeout
        )
        if self._over:  # ended by another task at the moment of the hand-over
            self._core.release_grant(grant)
            self._check_alive()
        self._holding.take(grant)

    def allocate_nowait(self, tokens: int) -> None:
        """`allocate` that never waits and never suspends."""
        pages, states = self._missing(tokens)
        if pages or states:
            account = self._holding.account
            grant = self._core.allocate_nowait(pages, states, self.id, account=account)
            self._holding.take(grant)

    def _missing(self, tokens: int) -> tuple[int, int]:
        self._check_alive()
        tokens = integer("room in tokens", tokens)
        pages = self._holding.missing(self.computed + tokens)
        return pages, int(self._core.has_states and self.state_slot is None)

    async def ready(self) -> Match:
        """Wait until the private copy of the boundary's state is complete (or cleared, at 0).

        For a model with states `allocate` comes first, since the copy needs the working slot. A
        cancelled caller may abort right after: the slot stays parked until the copy has ended.
        """
        self._check_alive()
        if self._core.has_states and self._state_at != self.computed:
            if self.state_slot is None:
                raise InvalidRequest(f"{self} has no state slot: allocate comes before ready")
            if self.computed != self.boundary:
                raise InvalidRequest(f"{self} has lost its working state and cannot go on")
            await self._core.call(m.Prepare(self._lease, self.state_slot))
            self._check_alive()
            self._state_at = self.boundary
        self.status = "running"
        return self.match

    async def advance(self) -> Match:
        """Take over what others have published meanwhile, KV and state of one boundary together.

        The pages that it replaces go back; unused room stays. Raises `InvalidRequest` while the
        request has a step that is not over. Returns the match it stands on. After a reset there is
        nothing to take over.
        """
        self._check_alive()
        self._check_no_steps("advance")
        if self._former_generation:
            return self.match
        match = self._run_unless_reset(
            m.Advance(self._lease, self.computed, max(0, self.prompt_tokens - 1))
        )
        if match is None:
            return self.match
        assert isinstance(match, Match)
        if match.usable <= self.computed:
            return self.match
        self._holding.stand_on(self._core.tree.pages_of(self._lease))
        self._tokens_reused += match.usable - self.computed
        self.computed = match.usable
        self.match = match
        self._holding.drop_snapshot(self.fences())
        if self.status == "running":
            await self.ready()
        return match

    async def join(self, *, min_tokens: int | None = None, timeout: float | None = None) -> Match:
        """Wait while another request computes what this one needs next, and take it over.

        Waits only when the common part is longer than `min_tokens` (by default the grid) beyond
        what this request has, looks again at each of the other's checkpoints, and gives up after
        `timeout` seconds. When the other one aborts, one of those who waited carries on and the
        rest wait for it. Returns the match it stands on. A cancelled caller leaves nothing behind.
        """
        self._check_alive()
        self._check_no_steps("join")
        more_than = self._core.grid if min_tokens is None else min_tokens
        if timeout is None:
            while await self._join_once(more_than):
                pass
        else:
            with anyio.move_on_after(timeout):
                while await self._join_once(more_than):
                    pass
        return self.match

    async def _join_once(self, more_than: int) -> bool:
        await self.advance()
        if self.computed > self.boundary or self._former_generation:
            return False  # it has computed something of its own: it is no follower any more
        return bool(await self._core.call(m.Join(self._lease, more_than), _undo_nothing))

    def extend(self, tokens: Tokens) -> None:
        """Append tokens: what the model said, or drafts of it."""
        self._check_alive()
        self._key = self._key.extended(tokens)

    async def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on: drafts that were rejected.

        Only the request's own tokens can go. A model with states needs a snapshot made at
        `position`; without one `InvalidRequest` is raised and nothing changes.
        """
        self._check_alive()
        position = integer("position", position)
        self._check_no_steps("rollback")
        if not self.boundary <= position <= self._key.length:
            raise InvalidRequest(
                f"rollback to {position}: own tokens go from {self.boundary} to {self._key.length}"
            )
        if self._core.has_states and position < self.computed and self._state_at != position:
            snapshot, slot = self._holding.snapshot, self.state_slot
            if snapshot is None or snapshot.position != position or slot is None:
                raise InvalidRequest(f"no snapshot of the state at {position}")
            self._state_at = None
            await self._core.call(m.CopyWorkingState(snapshot.slot, slot, self.id, self.fences()))
            self._check_alive()
            self._state_at = position
        self._key = self._key.cut(position)
        self.prompt_tokens = min(self.prompt_tokens, position)
        self.computed = min(self.computed, position)

    # -- steps ---------------------------------------------------------------------------------

    def next_stop(self, limit: int) -> tuple[int, int]:
        """Where the next chunk starts and should end, at most `limit` tokens further.

        Chunks end at multiples of `limit` and at wanted positions, so that a request that reuses
        something computes at the same boundaries as one that does not.
        """
        self._check_alive()
        limit = integer("limit of a chunk", limit, 1)
        start = self.computed
        end = min((start // limit + 1) * limit, self._key.length)
        for wanted in self._lease.wanted:
            if start < wanted.position < end:
                end = wanted.position
                break
        return start, end

    def step_opened(self, step: Step) -> None:
        """For `Step`: a pass over this request begins."""
        self._check_alive()
        self._steps[step.number] = step
        step.fence.add_callback(lambda: self._step_over(step.number))

    def _step_over(self, number: int) -> None:
        self._steps.pop(number, None)

    def check_end(self, end: int) -> None:
        """For `Step`: raise `InvalidRequest` unless a pass can compute up to `end`."""
        self._check_alive()
        if self._core.has_states and self._state_at != self.computed:
            raise InvalidRequest(
                f"{self} is not ready: its working state is not at {self.computed}"
            )
        if not self.computed <= end <= self._key.length or end > self.room:
            raise InvalidRequest(
                f"{self} computed up to {end}, with {self._key.length} tokens and room for "
                f"{self.room}"
            )

    def step_launched(self, end: int) -> None:
        """For `Step`: launched work computes up to `end`."""
        self._tokens_computed += end - self.computed
        self.computed = end
        if self._core.has_states:
            self._state_at = end

    def step_abandoned(self, start: int, *, was_launched: bool) -> None:
        """For `Step`: the pass was given up; what it may have written counts for nothing."""
        if self._over or self._core.stopped:
            return
        if was_launched:
            self._tokens_computed -= self.computed - start
            self.computed = start
        self._state_at = None  # an abandoned pass may have overwritten it, and a snapshot too
        snapshot = self._holding.snapshot
        if snapshot is not None and snapshot.position > self.computed:
            self._holding.drop_snapshot(self.fences())

    # -- publishing ----------------------------------------------------------------------------

    def try_snapshot_slot(self, position: int) -> int | None:
        """A slot into which the model's kernel writes its state at `position`, or None.

        Nothing is evicted for it. The next checkpoint or finish at or beyond `position` donates it.
        """
        self._check_alive()
        position = integer("position", position)
        core = self._core
        if not core.has_states or position % core.grid or position <= self.computed:
            self._refused("off_grid" if position % core.grid else "unsettled")
            return None
        kept = self._holding.snapshot
        if kept is None:
            try:
                slot = self._holding.take_slot(evict=False, owner=self.id)
            except NoRoom:
                self._refused("no_slot")
                return None
        else:
            slot = kept.slot
        self._holding.snapshot = Snapshot(slot, position)
        return slot

    async def checkpoint(self, *, state: bool | None = None) -> InsertResult | None:
        """Publish what is settled; donate a state when the position is wanted (or `state=True`).

        The state is a copy, made after the steps that wrote it; when no slot can be had the KV is
        published without. Returns None when there is nothing new to publish, when the cache was
        reset since the request opened, or when it is off. Raises `InvalidRequest` while a step of
        the request is opened and not launched.
        """
        self._check_alive()
        self._check_launched("checkpoint")
        if not self._publishes():
            return None
        position = self._publishable("all")
        offer = self._donatable_snapshot(position)
        if offer is not None:
            self._publish(offer.position, offer.slot)
        slot = await self._copy_for(position, state)
        if not self._publishes():  # reset while the copy was made
            if slot:
                self._holding.give_back_slot(slot, self.fences())
            return None
        end = position if slot else self._whole(position)
        return self._publish(end, slot) if slot or end > self.boundary else None

    def _publishes(self) -> bool:
        """False when the tree takes nothing of this request: the cache is off, or was reset."""
        if self._former_generation:
            self._refused("reset")
            return False
        return self._core.config.enabled

    def _publishable(self, publish: Publish) -> int:
        limit = self.settled
        if publish == "none":
            return self.boundary
        if publish == "prompt" or not self._core.config.reuse_decoded:
            limit = min(limit, self.prompt_tokens)
        return max(limit, self.boundary)

    def _whole(self, position: int) -> int:
        """How far KV is worth publishing when no state goes with it.

        With recurrent layers, KV beyond the last grid position is of no use before a state is made
        deeper, and by then it would stand for data that was computed in other chunks.
        """
        grid = self._core.grid  # without recurrent layers, a page
        return position // grid * grid

    def _donatable_snapshot(self, position: int) -> Snapshot | None:
        """The snapshot, taken out, if its position is settled; it is spent by an insert."""
        snapshot = self._holding.snapshot
        if snapshot is None or not self.boundary < snapshot.position <= position:
            return None
        self._holding.snapshot = None
        return snapshot

    async def _copy_for(self, position: int, state: bool | None) -> int:
        """A copy of the working state in a slot of its own, if one is worth it; else 0."""
        core = self._core
        if not core.has_states or state is False or self.state_slot is None:
            return 0
        settled = position if self._state_at == position else 0
        why = core.tree.why_not(self._lease, position, settled)
        if state is None and all(w.position != position for w in self._lease.wanted):
            if why in ("budget", "low_benefit"):
                self._refused(why)
            return 0
        if why in ("off_grid", "unsettled", "exists"):
            self._refused(why)
            return 0
        try:
            slot = self._holding.take_slot(evict=True, owner=self.id)
        except NoRoom:
            self._refused("no_slot")
            return 0
        self._holding.copying = slot
        try:
            await core.call(m.CopyWorkingState(self.state_slot, slot, self.id, self.fences()))
            self._check_alive()  # whoever ended the request meanwhile gave the slot back
        except BaseException:
            if not self._over:
                self._holding.copying = 0
                self._holding.give_back_slot(slot, self.fences())
            raise
        self._holding.copying = 0
        return slot

    def _publish(self, length: int, state: int) -> InsertResult | None:
        """Insert up to `length`, which is exact when a state goes with it; None after a reset."""
        offered = self._holding.offer(length)
        result: object = None
        try:
            result = self._run_unless_reset(
                m.Insert(
                    self._key, length, offered, state, self._lease, self.id, True, self.fences()
                )
            )
        finally:
            if state and result is None:
                self._holding.give_back_slot(state, self.fences())
        if result is None:
            self._refused("reset")
            return None
        assert isinstance(result, InsertResult)
        self._holding.published(self.boundary, result.pages_changed)
        return result

    async def fork(self, name: str | None = None) -> Request:
        """A second request that continues from here with its own private state.

        Publishes what is settled first. The fork reads the same pages; the last partial page and
        the working state are copied. Raises `NoRoom` rather than wait for room: who forks holds
        what others wait for, and nobody could know that it waits. A cancelled caller leaves
        nothing behind.
        """
        self._check_alive()
        self._check_launched("fork")
        if self.computed != self.settled or self.status != "running":
            raise InvalidRequest(f"{self} cannot be forked: not running, or beyond its tokens")
        core = self._core
        if name in core.requests:
            raise InvalidRequest(f"request {name!r} is running")
        await self.checkpoint(state=False)
        lease = lease_twin(core, self._lease, name or core.next_id())
        twin = Request(core, lease.owner, self._key, lease, self.match)
        twin.prompt_tokens = self.prompt_tokens
        ready = False
        try:
            twin.computed = self.computed
            await twin.allocate(0, wait=False)
            await copy_private_data(core, self._holding, twin._holding, twin.id, self.fences())
            self._check_alive()
            core.opened(twin)
            tell_forked(core, self.id, lease, self.computed)
            twin._state_at = self._state_at
            twin.status = "running"
            ready = True
        finally:
            if not ready:
                twin.abort()
        return twin

    # -- the end -------------------------------------------------------------------------------

    async def finish(self, *, publish: Publish = "all") -> None:
        """Publish the rest, give back what is left, end the lease.

        The request is spent when the call is made; it never suspends half way. The working state
        is handed over where it stands on the grid and no later step may write it. After a reset
        nothing is published and everything is given back.
        """
        self._check_alive()
        if publish not in _PUBLISH:
            raise InvalidRequest(f"publish is {publish!r}; there are {_PUBLISH}")
        self._check_launched("finish")
        position = self._publishable(publish)
        published = self.boundary
        try:
            if publish != "none" and self._publishes():
                published = self._publish_last(position)
                self._core.run(m.StandOn(self._lease))
        finally:
            self._end("finished", published)

    def _publish_last(self, position: int) -> int:
        snapshot = self._donatable_snapshot(position)
        if snapshot is not None:
            self._publish(snapshot.position, snapshot.slot)
        state = 0
        if (
            self._holding.working is not None
            and self._state_at == position == self.computed
            and self._wants_state(position)
        ):
            state, self._holding.working = self._holding.working, None
        end = position if state else self._whole(position)
        if state or end > self.boundary:
            self._publish(end, state)
        return self.boundary

    def _wants_state(self, position: int) -> bool:
        """Whether the working state is worth keeping where the request ends."""
        if position % self._core.grid or not position:
            return False
        at_end = self._core.tree.wanted_at_end(self._lease, position)
        return at_end is not None or any(w.position == position for w in self._lease.wanted)

    def abort(self) -> None:
        """Give everything back, publish nothing more. Legal at any time; idempotent.

        What steps and copies in flight may still touch comes back after them.
        """
        if not self._over:
            self._end("aborted", self.boundary)

    def _end(self, how: Literal["finished", "aborted"], published: int) -> None:
        self.status = how
        core = self._core
        core.closed(self)
        if core.stopped:
            return
        if core.emit is not None:
            core.emit(
                RequestEnded(
                    context=core.domain.caller_context(),
                    request=self.id,
                    how=how,
                    reused=self._tokens_reused,
                    computed=self._tokens_computed,
                    published=published,
                )
            )
        pages, states = self._holding.own_pages, self._holding.own_states
        fences = self.fences() + core.touching(states, pages)
        self._holding.give_back(pages, states, fences)
        core.release_lease_after(self._lease, fences)

    # -- small helpers -------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self.status in ("finished", "aborted")

    @property
    def _former_generation(self) -> bool:
        """The cache was reset since: the request goes on with what it has and publishes nothing."""
        return self._lease.generation != self._core.tree.generation

    def _run_unless_reset(self, message: m.Message) -> object:
        """The tree's answer; None when the cache was reset before the message had its turn."""
        try:
            return self._core.run(message)
        except StaleHandle:
            if self._lease.live and self._former_generation:
                return None
            raise

    def fences(self) -> tuple[Fence, ...]:
        """The fences of the request's steps that are not over."""
        return tuple(step.fence for step in self._steps.values() if not step.fence.passed)

    def _refused(self, why: str) -> None:
        core = self._core
        core.refused_checkpoints += 1
        if core.emit is not None:
            context = core.domain.caller_context()
            core.emit(Refused(context=context, request=self.id, what="checkpoint", why=why))

    def _check_alive(self) -> None:
        self._core.check_open()
        if self._over:
            raise StaleHandle(f"{self} is over")

    def _check_launched(self, what: str) -> None:
        if any(step.state == "opened" for step in self._steps.values()):
            raise InvalidRequest(f"{what} while a step of {self} is opened and not launched")

    def _check_no_steps(self, what: str) -> None:
        if self.fences():
            raise InvalidRequest(f"{what} while a step of {self} is not over")


def _undo_nothing(answer: object) -> None:
    del answer
