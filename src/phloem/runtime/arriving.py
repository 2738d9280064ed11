"""What a request builds on while it is still on its way: loads, and the copy of its state.

`ready()` waits for all of it. Whoever does not want to wait has a pass wait instead, as a whole
(`wait_on`) or each layer for its own part (`landing`, `ready(layer=)`). What runs before the
outcome is known is *provisional*: nothing of it is published before `ready()` has succeeded.
"""

from __future__ import annotations

import torch

from phloem.actors import messages as m
from phloem.actors.domain import nothing_to_undo
from phloem.actors.tree.tiering import standing_on
from phloem.actors.tree.tree import Match
from phloem.cuda_streams.engine import Fence, Stream, Ticket
from phloem.cuda_streams.landing import Landing
from phloem.errors import CacheReset, InvalidRequest, TransferFailed
from phloem.runtime.checks import integer
from phloem.runtime.publishing import Publishing
from phloem.runtime.standing import Begun

__all__ = ["Arriving"]


class Arriving(Publishing):
    """The part of a request that waits for its data; see `Request`."""

    async def ready(self, *, layer: int | None = None) -> Match:
        """Wait until the private copy of the boundary's state is complete (or cleared, at 0).

        Before that, what is only on the host is loaded. If that fails, the request stands on less
        than it was promised: the match that is returned says so, and `allocate` is called again for
        the room that is missing now. For a model with states `allocate` comes first, since the copy
        needs the working slot. Raises `CopyFailed` when that copy fails; if it takes too long, the
        slot is given up, too, and `allocate` is called again for another. `InvalidRequest` where a
        pass that was given up may have spoilt the working state and there is no other to begin
        with: end the request and open it again. A cancelled caller may abort right after: the slot
        stays parked until the copy has ended.

        With `layer` it waits only until model layers 0 to `layer` can be read. Passes may run on
        them from then on, but they are provisional: call `ready()` after them and before
        `checkpoint` or `finish`. It raises `TransferFailed` if what they ran on did not arrive: the
        request stands at its `tokens_ok` then, and after `allocate` and `ready` it computes from
        there, in passes that come after those that ran.
        """
        self._check_alive()
        if layer is not None:
            return await self._ready_up_to(self._checked_layer(layer))
        holding = self._holding
        if self._loads:
            await self._core.call(m.AwaitLoad(self._lease), nothing_to_undo)
            self._check_holds(holding)
        begun = self._begun
        if begun is not None and begun.copy is not None and begun.landing.loads_ended:
            await self._core.call(m.AwaitCopy(begun.copy), nothing_to_undo)
            self._check_holds(holding)
        self._arrived()
        if begun is not None and self._core.has_states and self.state_slot is None:
            return self.match  # it takes too long: `allocate` comes next, also for another slot
        if self._core.has_states and self._state_at != self.computed:
            slot = self._slot_for_state()
            await self._copied_to(slot, m.Prepare(self._lease, slot, self._touching(slot)))
            self._state_at, self._state_lag = self.boundary, 0
        self.status = "running"
        return self.match

    async def wait_on(self, stream: Stream | torch.Stream, *, layer: int | None = None) -> None:
        """Have `stream` wait, instead of the caller, until layers 0 to `layer` (all) can be read.

        What is enqueued on it from now on begins only then, and is provisional (see `ready`). Waits
        only for the copies to be launched. Raises like `ready`.
        """
        self._check_alive()
        named = self._core.streams.named(stream)
        count = len(self._core.config.layout.layers)
        last = self._checked_layer(count - 1 if layer is None else layer)
        landing = await self._landing()
        assert named is not None
        for fence in landing.fences(last):
            named.wait(fence)

    async def landing(self) -> Landing:
        """What a pass can wait for within one function on a worker stream, layer by layer.

        Waits only for the copies to be launched. The pass is provisional (see `ready`). If the
        data does not arrive, or the request ends before, the wait in it raises `CopyFailed`.
        """
        self._check_alive()
        return await self._landing()

    async def _landing(self) -> Landing:
        if self._loads and not self._lease.load:
            await self.ready()  # it has ended: this is where its outcome is told
        holding, landing = self._holding, self._begin()
        if placed := landing.placed():
            await self._core.await_fences(placed)
            self._check_holds(holding)
        return landing

    async def _ready_up_to(self, layer: int) -> Match:
        if self._loads and not self._lease.load:
            return await self.ready()
        holding = self._holding
        if fences := self._begin().fences(layer):
            await self._core.await_fences(fences)
            self._core.domain.drain()  # what passed them may have more to tell
            self._check_holds(holding)
        lost = self._begun is not None and self.boundary < self._begun.promised
        return await self.ready() if lost else self.match

    def _checked_layer(self, layer: int) -> int:
        layer, count = integer("layer", layer), len(self._core.config.layout.layers)
        if not 0 <= layer < count:
            raise InvalidRequest(f"layer {layer} of a model of {count} layers")
        return layer

    def _begin(self) -> Landing:
        """Start the private copy behind what is on its way; what is begun already stays."""
        if self._begun is not None:
            return self._begun.landing
        core, lease = self._core, self._lease
        if self._loads:
            self._stand_back(self.boundary)  # what it waits for may be less than it was promised
        copies: tuple[tuple[int, Ticket], ...] = ()
        copy: m.CopyOperation | None = None
        if core.has_states and self._state_at != self.computed:
            slot = self._slot_for_state()
            started = core.run(m.Prepare(lease, slot, self._touching(slot), at_once=True))
            assert isinstance(started, m.CopyOperation)
            copy = started
            copies = core.transfer.tickets_of(copy.number)
            self._state_at, self._state_lag = self.computed, 0
        loads = [
            ticket
            for load in core.tree.loads_of(lease)
            for _, ticket in core.transfer.tickets_of(load)
        ]
        landing = Landing(loads, copies)
        if self._loads or copy is not None:
            self._begun = Begun(landing, copy, self.computed)
            self._read_by(tuple(ticket.quiesced for _, ticket in copies))
            self._holding.loaded(core.tree.pages_of(lease))
        return landing

    @property
    def _promised(self) -> int:
        """Tokens that are reused if all that is on its way arrives."""
        return self.computed if self._begun is None else self._begun.promised

    def _slot_for_state(self) -> int:
        slot = self.state_slot
        if slot is None:
            raise InvalidRequest(f"{self} has no state slot: allocate comes before ready")
        if self.computed != self.boundary:
            raise InvalidRequest(f"{self} has lost its working state and cannot go on")
        return slot

    def _touching(self, slot: int) -> tuple[Fence, ...]:
        """The fences of all that may still write the working slot: passes given up, and copies.

        A pass that is only opened may be waiting for what the caller does next; when it is given
        up, the slot counts for nothing again.
        """
        steps = self._steps.values()
        ran = tuple(s.fence for s in steps if s.state != "opened" and not s.fence.passed)
        return ran + self._core.touching((slot,), ())

    def _read_by(self, fences: tuple[Fence, ...]) -> None:
        """Have what is being loaded given to nobody before these fences, even if the load fails."""
        if self._loads and fences:
            self._core.run(m.ReadBy(self._lease, fences))

    def _arrived(self) -> None:
        """Once all copies have ended: go on from what is there.

        Raises `TransferFailed` if passes have run on data that did not arrive.
        """
        promised = self._promised
        begun, self._begun = self._begun, None
        ran = self.computed - promised
        lost = self._loads and self.boundary < promised
        if self._loads:
            self._take_loaded()
        copy = None if begun is None else begun.copy
        if not lost and (copy is None or copy.error is None):
            return
        if begun is not None:
            begun.landing.give_up()
        self._tokens_computed -= ran
        self.computed = promised
        if lost:
            self._stand_back(self.boundary)
        self._state_at = None
        if copy is not None and not copy.ended:  # it may write the slot at any time, or never
            self._holding.drop_working(self.fences())
        self._holding.drop_snapshots(self.fences(), beyond=self.computed)
        self.setbacks += 1
        if ran:
            raise TransferFailed(f"{self} ran on data that did not arrive", tokens_ok=self.computed)

    def _take_loaded(self) -> None:
        """The load has ended, perhaps with less than was promised."""
        core, lease = self._core, self._lease
        self._loads = False
        pages = core.tree.pages_of(lease)
        self._holding.loaded(pages)
        whole = len(pages) * core.config.page_size == self.boundary
        if self._former_generation and not (
            whole and (core.tree.state_of(lease) or not self.boundary or not core.has_states)
        ):
            raise CacheReset(f"the cache was reset while data of {self} was on its way")
        self._count_loaded()

    def _stand_back(self, boundary: int) -> None:
        """Go back to `boundary` if that is less than what was promised to be reused."""
        if boundary < self.computed:
            self._tokens_reused -= self.computed - boundary
            self.computed = boundary
            self.match = standing_on(self._lease, self.match)
