"""What a request publishes: checkpoints, snapshots, and the rest when it finishes."""

from __future__ import annotations

from typing import Literal

from phloem.actors import messages as m
from phloem.actors.tree.tree import InsertResult
from phloem.errors import InvalidRequest, NoRoom
from phloem.runtime.checks import integer
from phloem.runtime.standing import Standing

__all__ = ["Publish", "Publishing"]

Publish = Literal["all", "prompt", "none"]
_PUBLISH: tuple[Publish, ...] = ("all", "prompt", "none")


class Publishing(Standing):
    """The publishing half of a request; see `Request`."""

    def try_snapshot_slot(self, position: int) -> int | None:
        """A slot into which the model's kernel writes its state at `position`, or None.

        Nothing is evicted for it. The next checkpoint or finish at or beyond `position` donates it.
        A request that holds `snapshot_slots` of them gets its oldest again, and has that no more.
        """
        self._check_alive()
        position = integer("position", position)
        core = self._core
        if not core.has_states or position % core.grid or position <= self.computed:
            self._refused("off_grid" if position % core.grid else "unsettled")
            return None
        slot = self._slot_for_snapshot(position)
        if slot is None:
            self._refused("no_slot")
        else:
            self._holding.keep_snapshot(slot, position)
        return slot

    def _slot_for_snapshot(self, position: int) -> int | None:
        """The slot that holds `position` already, else a new one, else that of the oldest."""
        kept = self._holding.snapshots
        for number, snapshot in enumerate(kept):
            if snapshot.position == position:
                return kept.pop(number).slot
        if len(kept) < self._core.config.snapshot_slots:
            try:
                return self._holding.take_slot(evict=False, owner=self.id)
            except NoRoom:
                pass  # then the oldest, if there is one
        return kept.pop(0).slot if kept else None

    async def checkpoint(self, *, state: bool | None = None) -> InsertResult | None:
        """Publish what is settled; donate a state when the position is wanted (or `state=True`).

        The state is a copy, made after the steps that wrote it; when no slot can be had the KV is
        published without. Returns what was published with a state, else what was without; None
        when there is nothing new to publish, when the cache was reset since the request opened, or
        when it is off. Raises `InvalidRequest` while a step of the request is opened and not
        launched.
        """
        self._check_alive()
        self._check_launched("checkpoint")
        self._check_arrived("checkpoint")
        if not self._publishes():
            return None
        position = self._publishable("all")
        published = self._publish_snapshots(position)
        state_at = min(position, self._state_position) if self._state_lag else position
        slot = await self._copy_for(state_at, state)
        publishes = self._publishes()  # False: reset while the copy was made
        position = min(position, self._publishable("all"))  # a pass may have been given up
        if slot and not (publishes and state_at <= position):
            self._holding.give_back_slot(slot, self.fences())
            slot = 0
        if not publishes:
            return None
        if slot:
            published = self._publish(state_at, slot)
        end = self._whole(position)
        rest = self._publish(end, 0) if end > self.boundary else None
        return published or rest

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
        self._check_arrived("finish")
        position = self._publishable(publish)
        published = self.boundary
        try:
            if publish != "none" and self._publishes():
                published = self._publish_last(position)
                self._core.run(m.StandOn(self._lease))
        finally:
            self._end("finished", published)

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

    def _publish_snapshots(self, position: int) -> InsertResult | None:
        """Donate the deepest snapshot that is settled, and those before it that are wanted."""
        holding, boundary = self._holding, self.boundary
        published: InsertResult | None = None
        settled = [s for s in holding.snapshots if boundary < s.position <= position]
        wanted = {wanted.position for wanted in self._lease.wanted}
        for snapshot in settled:
            if snapshot is settled[-1] or snapshot.position in wanted:
                holding.snapshots.remove(snapshot)
                published = self._publish(snapshot.position, snapshot.slot)
        if settled:
            holding.drop_snapshots_below(settled[-1].position, self.fences())
        return published

    async def _copy_for(self, position: int, state: bool | None) -> int:
        """A copy of the working state in a slot of its own, if one is worth it; else 0."""
        core = self._core
        if not core.has_states or state is False or self.state_slot is None:
            return 0
        settled = position if self._state_position == position else 0
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
        holding = self._holding
        holding.copying = slot
        try:
            await core.call(m.CopyWorkingState(self.state_slot, slot, self.id, self.fences()))
            self._check_holds(holding)
        except BaseException:
            # Whoever ended or suspended the request meanwhile gave the slot back.
            if not self._over and self._holding is holding:
                holding.copying = 0
                holding.give_back_slot(slot, self.fences())
            raise
        holding.copying = 0
        return slot

    def _publish(self, length: int, state: int) -> InsertResult | None:
        """Insert up to `length`, which is exact when a state goes with it; None after a reset."""
        offered, spans = self._holding.offer(length), self._holding.offer_spans(length)
        result: object = None
        try:
            result = self._run_unless_reset(
                m.Insert(
                    *(self._key, length, offered, state, self._lease, self.id, True),
                    *(self.fences(), spans),
                )
            )
        finally:
            if state and result is None:
                self._holding.give_back_slot(state, self.fences())
        if result is None:
            self._refused("reset")
            return None
        assert isinstance(result, InsertResult)
        tables = self._core.span_tables(self._lease)
        self._holding.published(self.boundary, result.pages_changed, tables)
        return result

    def _publish_last(self, position: int, *, give_state: bool = False) -> int:
        """Publish up to `position` and hand the working state over, if it is wanted or given."""
        self._publish_snapshots(position)
        at = self._state_position
        if (
            self._holding.working is not None
            and self._state_at == self.computed
            and max(self.boundary, 1) <= at <= position
            and at % self._core.grid == 0
            and (give_state or self._wants_state(at))
        ):
            state, self._holding.working = self._holding.working, None
            self._publish(at, state)
        end = self._whole(position)
        if end > self.boundary:
            self._publish(end, 0)
        return self.boundary

    def _wants_state(self, position: int) -> bool:
        """Whether the working state is worth keeping where the request ends."""
        at_end = self._core.tree.wanted_at_end(self._lease, position)
        return at_end is not None or any(w.position == position for w in self._lease.wanted)
