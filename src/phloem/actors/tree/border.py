"""Where pages and states share one memory: how room is made, and how the border between them moves.

A state that goes leaves a whole frame, which pages or another state can use at once. Pages that go
leave holes; they are worth a frame only together. So when frames run out, as many pages go as make
one frame, by the policy's choice, and what is left in the frame that holds least is copied into the
holes. Never more than one frame is cleared at a time, by at most one copy of less than a frame.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from phloem.actors import messages as m
from phloem.actors.actions import TREE, CopyPages, FreeDeviceSlots, Ids
from phloem.actors.domain import Actor, Domain, Handlers
from phloem.actors.frames import SharedLedger
from phloem.actors.telling import Teller
from phloem.actors.tree.core import Actions
from phloem.actors.tree.results import Kept
from phloem.actors.tree.tree import Tree

__all__ = ["Border"]

_CHOICES = 32  # frames looked at for one that nobody uses, the emptiest first
_PAUSE = 32  # so many times it is done without after a copy has failed or takes too long
_OVERDUE_MAX = 4  # copies that take too long; after so many, frames are not cleared any more


class _Move(NamedTuple):
    """A copy out of `frame` in flight: `pages[i]` to `to[i]`, which `account` owns."""

    op: int
    frame: int
    pages: Ids
    to: Ids
    account: int


class Border:
    """The shared memory's part of a tree actor. Everything here runs in turns of the domain."""

    def __init__(
        self,
        domain: Domain,
        tree: Tree,
        ledger: SharedLedger,
        dispatch: Callable[[Actions], None],
        tree_actor: Actor,
        tell: Teller | None = None,
    ) -> None:
        self._domain = domain
        self._tree = tree
        self._ledger = ledger
        self._dispatch = dispatch
        self._tree_actor = tree_actor
        self._tell = tell
        self._allocator: Actor | None = None
        self._transfer: Actor | None = None
        self._move: _Move | None = None
        self._overdue: dict[int, _Move] = {}  # by operation: nobody waits for them any longer
        self._pause = 0  # so many times more nothing is copied
        self._again = False  # pages are on their way back, to be looked at when they are there
        self.frames_cleared = 0
        self.pages_moved = 0
        self.handlers: Handlers = {m.MoveBorder: self._on_move_border}
        tree.track_pages(ledger.kv.size + 1)

    def connect(self, allocator: Actor, transfer: Actor) -> None:
        """Say who grants and who copies."""
        self._allocator = allocator
        self._transfer = transfer

    @property
    def busy(self) -> bool:
        """True while a frame is being cleared: it will be free without anybody's doing."""
        return self._again or self._move is not None

    def make_room(self, message: m.MakeRoom) -> bool:
        """Free exactly a shortfall, or nothing; false when even a cleared frame will not help.

        States come from states, which is possible at once; where there are none left to go, a frame
        is cleared of pages. Pages come from whatever the policy gives up first.
        """
        tree, per_frame = self._tree, self._ledger.pages_per_frame
        figures = tree.figures()
        states = max(0, message.states - figures.states_leaving)
        pages = message.pages - figures.pages_leaving
        pages -= per_frame * max(0, figures.states_leaving - message.states)
        if states > figures.states_evictable:
            missing = per_frame * (states - figures.states_evictable) + max(0, pages)
            enough = figures.pages_evictable + self._ledger.kv.free >= missing
            return enough and self._clear_a_frame(message.owner)
        most = figures.pages_evictable + per_frame * (figures.states_evictable - states)
        if pages > most:  # without the frames that are kept for states, then
            pages -= per_frame * min(self._ledger.spare, self._ledger.frames.blank)
        if pages > most:
            return False
        if states or pages > 0:
            self._evict(max(0, pages), states, message.owner)
        return True

    def _evict(self, pages: int, states: int, by: str) -> None:
        gone, actions = self._tree.evict_bytes(
            pages,
            page_bytes=1,
            state_bytes=self._ledger.pages_per_frame,
            states=states,
            by=by,
        )
        if self._tell is not None:
            self._tell.evicted(gone, "room", by)
        self._dispatch(actions)

    # -- clearing a frame ----------------------------------------------------------------------

    def _on_move_border(self, message: m.MoveBorder) -> None:
        """Sent when a state would find no frame, when what was freed is there, after each copy."""
        del message
        frames, waits = self._ledger.frames, self._again
        self._again = False
        if frames.closed >= 0 and self._move is None:
            self._ledger.pages.reopen(frames.closed)
            waits = True
        if frames.blank < max(1, self._ledger.spare):
            self._clear_a_frame("")
        self._ledger.spare_answered()
        if waits and self._ledger.waiting:
            assert self._allocator is not None
            self._domain.send(self._allocator, m.Retry())

    def _clear_a_frame(self, by: str) -> bool:
        """Do the next step towards a blank frame; false when there is none that can be done."""
        if self.busy:
            return True
        if self._pause:
            self._pause -= 1
            return False
        if len(self._overdue) >= _OVERDUE_MAX:
            return False
        tree, ledger = self._tree, self._ledger
        frame = self._choose()
        missing = ledger.pages_per_frame - ledger.kv.free
        if missing <= 0:
            if frame is not None:
                self._start(*frame)
            return frame is not None
        figures = tree.figures()
        if figures.pages_leaving >= missing:
            return True
        if figures.states_evictable or (frame is not None and figures.pages_evictable >= missing):
            self._evict(missing, 0, by)
            self._again = True
            self._domain.send(self._tree_actor, m.MoveBorder())
        return self._again

    def _choose(self) -> tuple[int, Ids] | None:
        """The frame with the fewest pages of those that nobody uses, and its pages."""
        if self._tree.sweeping:
            return None
        for frame, pages in self._ledger.pages.clearable(_CHOICES):
            if self._tree.movable(pages):
                return frame, pages
        return None

    def _start(self, frame: int, pages: Ids) -> None:
        """Copy what is left in a frame to where there is room."""
        assert self._transfer is not None
        tree, ledger = self._tree, self._ledger
        ledger.pages.close(frame)
        number = tree.operations.new_number()
        owner = f"op {number}"
        account, to, _ = ledger.grant(len(pages), 0, owner)
        if self._tell is not None:
            self._tell.planned(number, "move_pages", "", None)
            self._tell.granted(owner, account, to)
        tree.begin_move(number, pages)
        self._move = _Move(number, frame, pages, to, account)
        self._domain.send(self._transfer, m.CopyAfter(CopyPages(number, pages, to), ()))

    def copied(self, message: m.Copied) -> bool:
        """The copy of an operation has ended; false if it was none of these.

        Pages that somebody has come to use keep their places: then the frame is as it was.
        """
        overdue = self._overdue.pop(message.op, None)
        move = overdue or self._move
        if move is None or move.op != message.op:
            return False
        ok = message.error is None
        if overdue is None:
            self._move = None
            if not ok:
                self._pause = _PAUSE
        moved = self._tree.end_move(move.op, move.pages, move.to, ok=ok)
        stays = set(range(len(move.pages))).difference(moved)
        taken = array("i", [move.to[number] for number in moved])
        left = array("i", [move.pages[number] for number in moved])
        spared = array("i", [move.to[number] for number in sorted(stays)])
        if taken:
            self._ledger.kv.move(taken, move.account, TREE)
            self._ledger.left(move.account, len(taken), 0)
            self.pages_moved += len(taken)
            if self._tell is not None:
                self._tell.changed("")
                self._tell.kept(Kept("kv", "device", taken, move.account))
        actions: Actions = []
        if left:
            actions.append(FreeDeviceSlots("kv", left, TREE))
        if spared:
            actions.append(FreeDeviceSlots("kv", spared, move.account))
        self.frames_cleared += overdue is None and not stays
        self._dispatch(actions)
        self._domain.send(self._tree_actor, m.MoveBorder())
        return True

    def timed_out(self, message: m.TimedOut) -> bool:
        """A copy takes too long; false if it was none of these.

        Room is found without it. What it touches stays as it is until its end.
        """
        move = self._move
        if move is None or move.op != message.op:
            return False
        self._move = None
        self._overdue[move.op] = move
        self._pause = _PAUSE
        self._domain.send(self._tree_actor, m.MoveBorder())
        return True
