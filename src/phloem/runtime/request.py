"""A request through its life: open, ready, steps, checkpoints, finished or aborted."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import anyio
from msgspec import structs

from phloem.actors import messages as m
from phloem.actors.domain import nothing_to_undo
from phloem.actors.tree.keys import Tokens, name_of
from phloem.actors.tree.tiering import standing_on
from phloem.actors.tree.tree import Match
from phloem.errors import InvalidRequest, StaleHandle
from phloem.events import RequestSuspended
from phloem.runtime.arriving import Arriving
from phloem.runtime.checks import integer, seconds
from phloem.runtime.forking import copy_private_data, lease_twin, tell_forked
from phloem.runtime.holding import Holding
from phloem.runtime.nowait import lease_and_match
from phloem.runtime.opening import undo_lease
from phloem.runtime.publishing import Publish
from phloem.runtime.standing import Resources, holding_under

if TYPE_CHECKING:
    from phloem.runtime.step import Step

__all__ = ["Publish", "Request", "Resources"]


class Request(Arriving):
    """One prompt being served. Made by `CacheRuntime.request`; belongs to one task at a time.

    `tokens[:computed]` has been computed or reused; `state_slot` is the request's own working
    state, None until it is allocated. `wanted` names positions at which a checkpoint is worth a
    state.
    """

    # -- room and data -------------------------------------------------------------------------

    async def allocate(
        self, tokens: int, *, wait: bool = True, timeout: float | None = None
    ) -> None:
        """Room for `tokens` more tokens beyond what is computed, and the working state slot.

        All or nothing. Waits for room unless `wait=False`; raises `NoRoom` when there can be none,
        or after `timeout` seconds, and `StaleHandle` when the request ends or is suspended while it
        waits. A cancelled caller leaves nothing behind.
        """
        pages, states = self._missing(tokens)
        if not pages and not states:
            return
        holding = self._holding
        grant = await self._core.allocate(
            *(pages, states, self.id),
            account=holding.account,
            wait=wait,
            timeout=timeout,
            spans=self._spans_missing(pages),
        )
        # Ended, suspended or opened again by another task at the moment of the hand-over?
        if self._over or self._holding is not holding:
            self._core.release_grant(grant)
            self._check_holds(holding)
        holding.take(grant)

    def allocate_nowait(self, tokens: int) -> None:
        """`allocate` that never waits and never suspends."""
        pages, states = self._missing(tokens)
        if pages or states:
            account = self._holding.account
            grant = self._core.allocate_nowait(
                pages, states, self.id, account=account, spans=self._spans_missing(pages)
            )
            self._holding.take(grant)

    def _missing(self, tokens: int) -> tuple[int, int]:
        self._check_alive()
        tokens = integer("room in tokens", tokens)
        pages = self._holding.missing(self.computed + tokens)
        return pages, int(self._core.has_states and self.state_slot is None)

    def _spans_missing(self, pages: int) -> tuple[int, ...]:
        """Pages of each span component for as many new ones; what is out of reach goes back first.

        Out of reach of all that may be computed from here on, or published, or computed again.
        """
        if not self._core.tree.spans:
            return ()
        back = [step.start_of(self) for step in self._steps.values()]
        back += [snapshot.position for snapshot in self._holding.snapshots]
        self._holding.drop_behind(min([self.computed, *back]), self.fences())
        return (pages,) * len(self._core.tree.spans)

    async def advance(self) -> Match:
        """Take over what others have published meanwhile, KV and state of one boundary together.

        The pages that it replaces go back; unused room stays. A request that has no room yet, and
        was refused a load because others waited for some, asks for it again when nobody does.
        Raises `InvalidRequest` while the request has a step that is not over. Returns the match it
        stands on. After a reset there is nothing to take over.
        """
        self._check_alive()
        self._check_no_steps("advance")
        if self._former_generation or self._loads or self._begun is not None:
            return self.match
        if self.status == "open" and self.match.why_not == "refused" and self._may_load_now:
            await self._load_after_all()
            return self.match
        match = self._run_unless_reset(
            m.Advance(self._lease, self.computed, max(0, self.prompt_tokens - 1))
        )
        if match is None:
            return self.match
        assert isinstance(match, Match)
        if match.usable <= self.computed:
            return self.match
        lease = self._lease
        self._holding.stand_on(self._core.tree.pages_of(lease), self._core.span_tables(lease))
        self._tokens_reused += match.usable - self.computed
        self.computed = match.usable
        self.match = match
        self._holding.drop_snapshots(self.fences())
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
        deadline = None if timeout is None else anyio.current_time() + seconds("timeout", timeout)
        while await self._join_once(more_than, deadline):
            pass
        return self.match

    async def _join_once(self, more_than: int, deadline: float | None) -> bool:
        await self.advance()
        if self.computed > self.boundary or self._former_generation:
            return False  # it has computed something of its own: it is no follower any more
        join = m.Join(self._lease, more_than, for_good=deadline is None)
        if deadline is None:
            return bool(await self._core.call(join, nothing_to_undo))
        # Only the wait is cut short: whoever has taken something over gets ready to go on.
        with anyio.CancelScope(deadline=deadline):
            return bool(await self._core.call(join, nothing_to_undo))
        return False

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
        self._check_arrived("rollback")
        if not self.boundary <= position <= self._key.length:
            raise InvalidRequest(
                f"rollback to {position}: own tokens go from {self.boundary} to {self._key.length}"
            )
        if not self._holding.serves(min(position, self.computed)):
            raise InvalidRequest(f"rollback to {position}: its window was given back already")
        if self._core.has_states and position < self.computed and self._state_at != position:
            slot = self.state_slot
            snapshot = next((s for s in self._holding.snapshots if s.position == position), None)
            if snapshot is None or slot is None:
                raise InvalidRequest(f"no snapshot of the state at {position}")
            self._state_at = None
            copy = m.CopyWorkingState(snapshot.slot, slot, self.id, self.fences())
            await self._copied_to(slot, copy)
            self._state_at, self._state_lag = position, 0
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

    def check_open(self) -> None:
        """For `CacheRuntime.step`: raise `StaleHandle` or `InvalidRequest` where none can begin."""
        self._check_alive()

    def step_opened(self, step: Step) -> None:
        """For `CacheRuntime.step`, after `check_open`: a pass over this request begins."""
        self._read_by((step.fence,))
        self._steps[step.number] = step
        step.fence.add_callback(lambda: self._step_over(step.number))

    def _step_over(self, number: int) -> None:
        self._steps.pop(number, None)

    def check_end(self, end: int, state_at: int) -> None:
        """For `Step`: raise `InvalidRequest` unless a pass can compute up to `end`.

        The working state is then true at `state_at`.
        """
        self._check_alive()
        if self._loads and self._begun is None:
            raise InvalidRequest(f"{self} is not ready: it is being loaded")
        if self._core.has_states and self._state_at != self.computed:
            raise InvalidRequest(
                f"{self} is not ready: its working state is not at {self.computed}; "
                "await `allocate` and `ready` before a pass"
            )
        if not self.computed <= end <= self._key.length or end > self.room:
            raise InvalidRequest(
                f"{self} computed up to {end}, with {self._key.length} tokens and room for "
                f"{self.room}"
            )
        if not 0 <= state_at <= end:
            raise InvalidRequest(f"{self} computed up to {end}, with its state at {state_at}")

    def step_launched(self, end: int, state_at: int) -> None:
        """For `Step`: launched work computes up to `end`, and the state up to `state_at`."""
        self._tokens_computed += end - self.computed
        self.computed = end
        if self._core.has_states:
            self._state_at, self._state_lag = end, end - state_at

    def step_abandoned(self, start: int, *, was_launched: bool) -> None:
        """For `Step`: the pass was given up; what it may have written counts for nothing."""
        if self._over or self._core.stopped:
            return
        start = max(start, self.boundary)  # the tree's pages are not computed again
        if was_launched and start < self.computed:
            self._tokens_computed -= self.computed - start
            self.computed = start
        self._state_at = None  # an abandoned pass may have overwritten it, and a snapshot too
        self._holding.drop_snapshots(self.fences(), beyond=self.computed)

    async def suspend(self, *, keep_lease: bool = False) -> None:
        """Give back room and state, to go on later by `resume`; for preemption.

        What is settled is published first, and the working state handed over if it stands on the
        grid: nothing is copied, and nothing is waited for. Whatever another task awaits of the
        request, such as `allocate`, raises there.
        `keep_lease` protects it until then; otherwise it is cache like any other and may go. Raises
        `InvalidRequest` while a step of the request is opened and not launched.
        """
        self._check_alive()
        self._check_launched("suspend")
        if not self._loads and self._begun is None and self._publishes():
            self._publish_last(self._publishable("all"), give_state=True)
        pages, states = self._holding.own_pages, self._holding.own_states
        fences = self.fences() + self._core.touching(states, pages)
        self._holding.give_back(pages, states, fences, self._holding.own_spans)
        self._holding = Holding(self._core, array("i"))
        self._give_up_landing()
        self._state_at = None
        self._loads = False
        self.setbacks += 1
        self.status = "suspended"
        core = self._core
        core.withdraw(self.id)
        if core.emit is not None:
            core.emit(
                RequestSuspended(
                    context=core.domain.caller_context(),
                    request=self.id,
                    computed=self.computed,
                    keeps_lease=keep_lease,
                )
            )
        if not keep_lease:
            self._lease_given_up = True
            core.release_lease_after(self._lease, fences)

    async def resume(self) -> Match:
        """Open a suspended request again on the deepest boundary of what it had.

        It stands where it stood when it was opened: `allocate` and `ready` come next, and what is
        not cached any more is computed again. A cancelled caller leaves it suspended. Raises
        `InvalidRequest` if it is not suspended, `StaleHandle` once it is over.
        """
        self._core.check_open()
        if self._over:
            raise StaleHandle(f"{self} is over")
        if not self._is_suspended():
            raise InvalidRequest(f"{self} is not suspended")
        if not await self._open_again(max(0, self._key.length - 1)):
            raise StaleHandle(f"{self} was ended or resumed meanwhile")
        self._tokens_reused += self.computed
        self.status = "open"
        return self.match

    @property
    def _may_load_now(self) -> bool:
        """Whether it may load: it holds nothing of its own, and nobody waits for room before it."""
        return self._holding.is_bare and not self._core.ledger.waiting

    async def _load_after_all(self) -> None:
        before = self.computed
        if not await self._open_again(self._opened.limit):
            self._check_alive()
            return  # it has got room meanwhile
        self._tokens_reused += self.computed - before

    async def _open_again(self, limit: int) -> bool:
        """Stand on what is cached by now of all tokens so far; nothing but a lease may be held.

        False, with nothing changed, if somebody else has changed the request meanwhile.
        """
        core, status, holding = self._core, self.status, self._holding
        message = structs.replace(self._opened, key=self._key, limit=limit)
        lease, match = lease_and_match(await core.call(message, undo_lease(core)))
        if self.status != status or self._holding is not holding or not holding.is_bare:
            core.release_lease(lease)
            return False
        if not self._lease_given_up:
            core.release_lease_after(self._lease, self.fences())  # passes may yet read under it
        self._lease, self._lease_given_up = lease, False
        self.match = standing_on(lease, match)
        self._holding = holding_under(core, lease)
        self._loads = bool(lease.load)
        self.computed = self.match.usable
        self.stands_on_loaded()
        return True

    async def fork(self, name: str | None = None) -> Request:
        """A second request that continues from here with its own private state.

        The caller must `finish` or `abort` it.

        Publishes what is settled first. The fork reads the same pages; the last partial page and
        the working state are copied. Raises `NoRoom` rather than wait for room: who forks holds
        what others wait for, and nobody could know that it waits. With sliding windows it raises
        `InvalidRequest` where the tree does not take the last tokens, whose window is not copied,
        and `StaleHandle` after a reset. A cancelled caller leaves nothing behind.
        """
        self._check_alive()
        self._check_launched("fork")
        if self.computed != self.settled or self.status != "running" or self._state_lag:
            raise InvalidRequest(
                f"{self} cannot be forked: not running, beyond its tokens, or its state lags"
            )
        core = self._core
        if core.tree.spans and self.computed % core.grid:
            raise InvalidRequest(
                f"{self} cannot be forked off the grid of {core.grid}: the window of its last "
                "tokens is not copied"
            )
        if name is not None and name_of("the name of a fork", name) in core.requests:
            raise InvalidRequest(f"request {name!r} is running")
        await self.checkpoint(state=False)
        if core.tree.spans and self.boundary < self.computed:
            why = StaleHandle if self._former_generation else InvalidRequest
            raise why(
                f"{self} cannot be forked: the tree has not taken the window of its last tokens"
            )
        lease = lease_twin(core, self._lease, name or core.next_id())
        opened = structs.replace(self._opened, key=self._key, owner=lease.owner)
        twin = Request(core, opened, lease, self.match)
        twin.prompt_tokens = self.prompt_tokens
        ready = False
        try:
            twin.computed = self.computed
            await twin.allocate(0, wait=False)
            held = self._holding
            await copy_private_data(
                *(core, held, twin._holding, twin.id, self.fences()),
                lambda: self._check_holds(held),
            )
            self._check_holds(held)
            core.opened(twin)
            tell_forked(core, self.id, lease, self.computed)
            twin._state_at = self._state_at
            twin.status = "running"
            ready = True
        finally:
            if not ready:
                twin.abort()
        return twin
