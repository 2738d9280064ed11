"""What is done with leases: requests open at a boundary, go on to deeper ones, and let go."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.actors.tree.core import Look
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey, Tokens
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.moving import MovingTree
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.placement import Refusal, Wanted, choose_positions, end_of_response
from phloem.actors.tree.results import Match
from phloem.actors.tree.scoring import Visit
from phloem.errors import InvalidRequest, StaleHandle

__all__ = ["LeasingTree"]


class LeasingTree(MovingTree):
    """A tree whose boundaries are leased."""

    def acquire(
        self, tokens: Tokens, *, owner: str, limit: int | None = None
    ) -> tuple[Lease, Match]:
        """Lease the deepest boundary within the first `limit` tokens (all by default).

        Splits an edge only when the boundary lies inside it, which needs a model without states.
        With a host tier the boundary may be on the host: `plan` then says what brings it here.
        """
        key = tokens if type(tokens) is TokenKey else TokenKey.of(tokens)
        look = self._look(key, limit)
        walk, anchor, match = look.walk, look.anchor, look.match
        turn = self._visited(key, look) if self.policy.learns else 0
        if (
            walk.partial is not None
            and walk.inside
            and not self.has_states
            and match.usable == match.kv_prefix
        ):
            anchor = self.radix.split(walk.partial, walk.inside)
            walk.path.append(anchor)
        if anchor is None:
            anchor = self.radix.root(key.root)
        else:
            for node in walk.path:
                node.hits += 1
                if node is anchor:
                    break
        lease = self.leases.take(anchor, key, owner, self.generation, with_state=self.has_states)
        lease.turn, lease.prompt_end = turn, match.looked_up // self.grid * self.grid
        return lease, match

    def _visited(self, key: TokenKey, look: Look) -> int:
        """The policy learns of a request that opens; the turn of a conversation that it is."""
        walk = look.walk
        base = walk.path[-1] if walk.path else self.radix.roots.get(key.root)
        stop = look.match.looked_up * TOKEN_BYTES
        return self.policy.visited(Visit(walk, base, key.data, stop, self.now))

    def open(
        self,
        key: TokenKey,
        *,
        owner: str,
        limit: int | None = None,
        breakpoints: Sequence[int] = (),
        session: str | None = None,
        session_ends: int = 0,
        priority: int = 0,
        keep_until: int = 0,
    ) -> tuple[Lease, Match]:
        """Acquire for a request that computes on from here; the lease also says what is `wanted`.

        While it lives, other requests that open and take another way further down add the point of
        divergence to its wanted positions. `session` ties it to others until the time
        `session_ends`; `priority` (0 to 100) is for what it uses and publishes, until the time
        `keep_until`. Both are preferences for policies that know them; time 0 means no end.
        """
        if not 0 <= priority <= 100 or keep_until < 0 or session_ends < 0:
            raise InvalidRequest(
                f"priority {priority} (0 to 100), keep_until {keep_until}, "
                f"session_ends {session_ends}"
            )
        wants = self.has_states and self.enabled
        if wants and self.placement.departures:
            look = self._look(key, limit)
            self.departures.visited(look.walk, look.match, self.grid, self.placement.departures)
        lease, match = self.acquire(key, owner=owner, limit=limit)
        if session is not None:
            lease.session = self.sessions.join(session, session_ends)
        if priority:
            lease.priority, lease.keep_until = priority, keep_until
            self._prefer(lease.anchor, priority, keep_until)
        if wants:
            lease.wanted, lease.refused = choose_positions(
                self.placement,
                length=min(match.looked_up + 1, match.tokens),
                usable=match.usable,
                branch_point=match.branch_point,
                breakpoints=breakpoints,
                departures=self.departures.ahead(lease.prompt_end, match.kv_prefix),
                grid=self.grid,
            )
        if self.enabled:
            self._meet(lease, match.kv_prefix)
        return lease, match

    def stand_on(self, lease: Lease) -> None:
        """The lease's request has finished well: its session stands on its boundary from now on."""
        self.check_lease(lease)
        if lease.session is not None:
            self.sessions.stand(lease.session, lease.anchor)

    def close_session(self, name: str) -> bool:
        """End a session; False when there was none. What it stood on becomes ordinary cache."""
        return self.sessions.close(name)

    def _prefer(self, node: Node, priority: int, keep_until: int) -> None:
        """Raise the priority of a path, from its end up to where it is as high already."""
        if 0 < keep_until <= self.time:
            return  # over before it began
        at = node
        while at.parent is not None:
            ended = 0 < at.keep_until <= self.time
            if at.priority > priority and not ended:
                return
            if (
                at.priority == priority
                and not ended
                and (not at.keep_until or 0 < keep_until <= at.keep_until)
            ):
                return
            at.priority, at.keep_until = priority, keep_until
            if keep_until:
                for index in self.indexes:
                    index.watch(at)
            at = at.parent

    def _meet(self, lease: Lease, position: int) -> None:
        wants = self.has_states and self.placement.branch
        self.running.meet(lease, position, self.placement.budget if wants else 0)

    def why_not(self, lease: Lease, position: int, settled: int) -> Refusal | None:
        """Why a state of the lease's request at `position` would not be kept; None: it would.

        `settled` counts the tokens that the request may publish.
        """
        if position % self.grid or not position:
            return "off_grid"
        if position > settled:
            return "unsettled"
        if position < lease.boundary or (position == lease.boundary and lease.anchor.state):
            return "exists"
        return next((one.refusal for one in lease.refused if one.position == position), None)

    def wanted_at_end(self, lease: Lease, reached: int) -> Wanted | None:
        """Where to keep a state when the lease's request finishes, its state being at `reached`.

        None when the placement does not want it or the boundary has one as deep already.
        """
        position = end_of_response(reached, self.grid)
        exists = position == lease.boundary and lease.anchor.state != NO_SLOT
        if not self.placement.end_of_response or position < lease.boundary or exists:
            return None
        return Wanted(position, "end_of_response")

    def progress_ahead(self, lease: Lease, more_than: int) -> Lease | None:
        """Another request's lease that computes what `lease` needs next, if it is worth a wait.

        It is when both keys are equal for more than `more_than` tokens beyond the boundary.
        """
        found = self.running.leader_of(lease)
        if found is None or found[1] - lease.anchor.end <= more_than:
            return None
        return found[0]

    def fork(self, lease: Lease, *, owner: str) -> Lease:
        """A second lease at the same boundary, for a request that continues on its own.

        It does not take the state: the fork has a private copy of its own. After a reset it reads
        what the lease still protects, like the lease itself.
        """
        self._check_live(lease)
        # The anchor is protected already, so no total changes, whatever the generation.
        fork = self.leases.take(lease.anchor, lease.key, owner, lease.generation, with_state=False)
        fork.turn, fork.prompt_end = lease.turn, lease.prompt_end
        if lease.load in self.operations.live:
            self._wait(fork, self.operations.live[lease.load])
        return fork

    def protect_spans(self, lease: Lease, start: int) -> None:
        """Have a lease protect spans from position `start` on, also where its boundary needs less.

        For as long as it stands there: when it moves, it protects what its new boundary needs.
        Raises `StaleHandle` for a lease that has ended or is of an older generation.
        """
        self.check_lease(lease)
        self.leases.protect_spans(lease, start)

    def advance(self, lease: Lease, *, beyond: int, limit: int) -> Match:
        """Move a lease to a boundary deeper than `beyond`, if others have published one.

        It then covers the KV and the state there, even if it had given a former state up. Raises
        `StaleHandle` for a lease that has ended or is of an older generation.
        """
        self.check_lease(lease)
        key = lease.key
        look = self._look(key, limit)
        walk, anchor, match = look.walk, look.anchor, look.match
        if lease.running_at is not None and lease.running_at[1] != match.kv_prefix * TOKEN_BYTES:
            self.running.leave(lease)
            self._meet(lease, match.kv_prefix)
        if match.usable <= max(beyond, lease.boundary):
            return match
        if anchor is None or anchor.end < match.usable:
            assert walk.partial is not None and not self.has_states
            anchor = self.radix.split(walk.partial, walk.inside)
        if lease.load:
            self._leave_load(lease)
        self.now += 1
        self.leases.move(lease, anchor, self.now, with_state=self.has_states)
        lease.wanted = [wanted for wanted in lease.wanted if wanted.position > match.usable]
        return match

    def release(self, lease: Lease) -> None:
        """End a lease. Raises `StaleHandle` when it has ended before."""
        self._check_live(lease)
        self.now += 1
        if lease.running_at is not None:
            self.running.leave(lease, ended=True)
        if lease.load:
            self._leave_load(lease)
        anchor = lease.anchor
        former = lease.generation != self.generation
        self.leases.end(lease, self.now, former=former)
        if former:
            self.former.released(anchor)
        elif anchor.parent is None:
            self.radix.drop_root_if_empty(anchor)
        elif self.policy.learns:
            self.policy.rested(anchor, self.now)

    def release_state(self, lease: Lease) -> None:
        """Give up only the state part. Raises `StaleHandle` when it was not held any more."""
        self._check_live(lease)
        if not lease.has_state:
            raise StaleHandle(f"{lease} holds no state")
        self.now += 1
        self.leases.end_state(lease, self.now, former=lease.generation != self.generation)

    def take_state(self, lease: Lease) -> None:
        """Protect the state at the boundary, again if it was given up and is still there."""
        self._check_live(lease)
        if not lease.has_state:
            self.leases.take_state(lease, former=lease.generation != self.generation)
