"""Where a request stands: what it has computed, what it owns, and how it ends.

`tokens[:boundary]` is the tree's and under the request's lease; the pages from there on are the
request's own. Nothing it gives up is used again before the steps and copies that may still touch
it have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.actors.tree.placement import Wanted
from phloem.actors.tree.tiering import standing_on
from phloem.actors.tree.tree import Match
from phloem.cuda_streams.engine import Fence
from phloem.cuda_streams.landing import Landing
from phloem.errors import CopyFailed, InvalidRequest, StaleHandle
from phloem.events import Refused, RequestEnded
from phloem.runtime.holding import Holding

if TYPE_CHECKING:
    from phloem.runtime.core import Core
    from phloem.runtime.step import Step

__all__ = ["Begun", "Resources", "Standing", "holding_under"]

Resources = dict[str, int]
Status = Literal["open", "running", "suspended", "finished", "aborted"]


class Begun(NamedTuple):
    """Copies under way that passes may build on.

    `copy` is that of the state, if there is one; `promised` are the tokens that are reused if all
    goes well.
    """

    landing: Landing
    copy: m.CopyOperation | None
    promised: int


class Standing:
    """The state of a request that all its parts work on; see `Request`."""

    def __init__(self, core: Core, opened: m.Open, lease: TreeLease, match: Match) -> None:
        match = standing_on(lease, match)  # a load may have failed since the answer was given
        self.id = opened.owner
        self.match = match
        self.prompt_tokens = opened.key.length
        self.computed = match.usable
        self.status: Status = "open"
        self._core = core
        self._opened = opened
        self._key = opened.key
        self._lease = lease
        self._holding = holding_under(core, lease)
        # The working state goes with so many computed tokens; it may lag so many behind them.
        self._state_at: int | None = None
        self._state_lag = 0
        self._lease_given_up = False  # released, or to be when what reads under it has ended
        self._tokens_computed: int = 0
        self._tokens_reused: int = match.usable
        self._tokens_loaded: int = 0
        self._loads = bool(lease.load)  # what it stands on is on its way from the host ...
        self._begun: Begun | None = None  # ... and passes may build on it already
        # How often what passes ran on was taken from under them: it did not arrive, or `suspend`.
        self.setbacks: int = 0
        self._steps: dict[int, Step] = {}  # opened and not over

    def stands_on_loaded(self) -> None:
        """Count as loaded what came from the host before the request was handed to its opener."""
        if not self._loads:
            self._count_loaded()

    def _count_loaded(self) -> None:
        loaded = max(0, self.boundary - self.match.device)
        self._tokens_loaded += loaded
        self._core.tokens_loaded += loaded

    @property
    def usable(self) -> int:
        """Tokens that are reused, by its `match`, which `advance` and `resume` renew."""
        return self.match.usable

    @property
    def boundary(self) -> int:
        """Tokens that are the tree's and protected by the request's lease."""
        return self._lease.boundary

    @property
    def state_slot(self) -> int | None:
        """The slot of the request's own working state, None until it is allocated."""
        return self._holding.working

    @property
    def _state_position(self) -> int:
        """The position at which the working state is true; 0 when it is at none."""
        return 0 if self._state_at is None else self._state_at - self._state_lag

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

    def span_table(self, component: str) -> Ids:
        """Like `page_table`, the pages of another component's layers, such as `window`; a copy.

        0, the reserved page, stands where they are not needed any more: for tokens further back
        than the window. Raises `InvalidRequest` for a component that the model has not.
        """
        for span, table in zip(self._core.tree.spans, self._holding.spans, strict=True):
            if span.name == component:
                return table[:]
        raise InvalidRequest(f"no component {component!r} keeps layers of this model")

    def resources(self) -> Resources:
        """What the request owns outside the tree; empty after its end and the last fence."""
        account = self._core.ledger.accounts.get(self._holding.account)
        held = {
            "pages": account.pages if account else 0,
            "states": account.states if account else 0,
            "spans": account.spans if account else 0,
            "leases": int(self._lease.live),
            "steps": len(self.fences()),
        }
        return {name: count for name, count in held.items() if count}

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.computed}/{self._key.length} tokens, {self.status})"

    def abort(self) -> None:
        """Give everything back, publish nothing more. Legal at any time; idempotent.

        What steps and copies in flight may still touch comes back after them.
        """
        if not self._over:
            self._end("aborted", self.boundary)

    def _end(self, how: Literal["finished", "aborted"], published: int) -> None:
        self.status = how
        core = self._core
        told = core.closed(self)  # else it is a fork of which nobody has heard
        if core.stopped:
            return
        if told and core.emit is not None:
            prompts = core.config.tell_prompts
            page_size = core.config.page_size
            core.emit(
                RequestEnded(
                    context=core.domain.caller_context(),
                    request=self.id,
                    how=how,
                    reused=self._tokens_reused,
                    loaded=self._tokens_loaded,
                    computed=self._tokens_computed,
                    published=published,
                    prompt_tokens=self.prompt_tokens if prompts else 0,
                    tokens=self._key.length if prompts else 0,
                    page_size=page_size if prompts else 0,
                    blocks=self._key.digests(page_size) if prompts else [],
                )
            )
        self._give_up_landing()
        pages, states = self._holding.own_pages, self._holding.own_states
        fences = self.fences() + core.touching(states, pages)
        self._holding.give_back(pages, states, fences, self._holding.own_spans)
        if not self._lease_given_up:
            core.release_lease_after(self._lease, fences)

    @property
    def _over(self) -> bool:
        return self.status in ("finished", "aborted")

    def _is_suspended(self) -> bool:
        return self.status == "suspended"

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

    async def _copied_to(self, slot: int, copy: m.Message) -> None:
        """Have the working slot written.

        Raises `CopyFailed`; if the copy takes too long, it may write the slot at any time, so that
        is the request's no more.
        """
        holding = self._holding
        try:
            await self._core.call(copy)
        except CopyFailed:
            if not self._over and slot == self.state_slot and self._core.touching((slot,), ()):
                self._holding.drop_working(self.fences())
            raise
        self._check_holds(holding)

    def _give_up_landing(self) -> None:
        """No pass waits any longer for what is on its way: nobody wants its results."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.landing.give_up()

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
        if self._is_suspended():
            raise InvalidRequest(f"{self} is suspended: resume comes first")

    def _check_holds(self, holding: Holding) -> None:
        """After a wait: raise unless the request lives and still holds what it held before."""
        self._check_alive()
        if self._holding is not holding:
            raise StaleHandle(f"{self} was suspended and resumed meanwhile")

    def _check_launched(self, what: str) -> None:
        if any(step.state == "opened" for step in self._steps.values()):
            raise InvalidRequest(f"{what} while a step of {self} is opened and not launched")

    def _check_arrived(self, what: str) -> None:
        """Raise `InvalidRequest` while the outcome of what the request builds on is not known."""
        if self._loads or self._begun is not None:
            raise InvalidRequest(f"{what} while data of {self} is on its way: ready() comes first")

    def _check_no_steps(self, what: str) -> None:
        if self.fences():
            raise InvalidRequest(f"{what} while a step of {self} is not over")


def holding_under(core: Core, lease: TreeLease) -> Holding:
    """What a request holds that has just been given `lease`: the tree's pages."""
    return Holding(core, core.tree.pages_of(lease), core.span_tables(lease))
