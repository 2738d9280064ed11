"""One memory for several pools: frames that hold places of one kind at a time.

A frame holds so many places of each pool: one state, or the pages that fit into the same bytes. It
is *blank* while none of its places is owned; whoever is short of places takes a blank frame, so the
border between pools moves without a copy wherever a frame empties by itself. Ids are stable: a
place has the same number, and the same bytes, whatever its frame held in between.

Pages gather in the lowest frames and states in the highest, so that what grows meets emptier
frames. The first frame of each pool, its home, never changes hands: place 0 is in it, which padded
rows of a batch write to, so that it must not be overlaid by data of another kind.

A place that is parked is owned, so a frame changes hands only when every fence over it has passed.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np

from phloem.actors.actions import TREE, Component, Ids
from phloem.actors.ledger import Ledger
from phloem.actors.places import FREE, PARKED, Pool
from phloem.errors import InvalidRequest

__all__ = ["FramePool", "Frames", "SharedLedger"]

_BLANK = 0  # kinds are numbered from 1
_FEW = 16  # up to so many places a loop is faster than numpy


class Frames:
    """The frames of one memory and what kind each is of."""

    def __init__(self, count: int, kinds: int) -> None:
        if count < kinds:
            raise InvalidRequest(f"{count} frames; each of {kinds} pools needs one at least")
        self.count = count
        self.kinds = bytearray(count)
        self.kinds[:kinds] = bytes(range(1, kinds + 1))  # the homes
        self.homes = kinds
        self.blank = count - kinds
        self.closed = -1  # the frame that is being cleared, -1: none. Nothing in it is granted

    def claim(self, kind: int, *, highest: bool) -> int:
        """Make a blank frame, of which there must be one, one of `kind`."""
        frame = self.kinds.rfind(_BLANK) if highest else self.kinds.find(_BLANK)
        assert frame >= 0
        self.kinds[frame] = kind
        self.blank -= 1
        return frame

    def release(self, frame: int) -> None:
        """Make `frame`, in which nothing is owned any more, a blank one."""
        assert self.kinds[frame] != _BLANK and frame >= self.homes
        self.kinds[frame] = _BLANK
        self.blank += 1


class FramePool(Pool):
    """A pool whose places lie in frames that it shares with others.

    `free` counts the free places of its own frames; blank frames are taken in when they run out.
    """

    def __init__(
        self, component: Component, frames: Frames, kind: int, places: int, *, highest: bool
    ) -> None:
        """`kind` numbers the pools of `frames` from 1 on; a frame holds `places` of this one.

        `highest`: they are taken from the other end of the memory.
        """
        self._home = kind - 1
        super().__init__(component, (frames.count - self._home) * places)
        self._frames = frames
        self._kind = kind
        self.places = places
        self._highest = highest
        # By frame: its free places, the one to go next last. Empty where a frame is not ours.
        self._vacant: list[Ids] = [array("i") for _ in range(frames.count - self._home)]
        self._open = bytearray(frames.count - self._home)  # frames that have something to grant
        self.free = 0
        self._take_in(0)

    @property
    def free_places(self) -> Ids:
        """The places of its own frames that can be granted at once; a copy."""
        found: Ids = array("i")
        for number, vacant in enumerate(self._vacant):
            if self._open[number]:
                found.extend(vacant)
        return found

    @property
    def room(self) -> int:
        """Places that can be granted at once, those of blank frames included."""
        return self.free + self._frames.blank * self.places

    @property
    def extent(self) -> int:
        """Places that are owned or could be granted at once."""
        return self.room + self.parked + self.tree + self.granted

    def take(self, count: int, account: int) -> tuple[Ids, None]:
        """Grant `count` places, of which there must be so many in own and blank frames."""
        assert 0 <= count <= self.room
        ids = self._take_open(min(count, self.free))
        while (missing := count - len(ids)) > 0:
            number = self._frames.claim(self._kind, highest=self._highest) - self._home
            if missing < self.places:
                self._take_in(number)
                ids += self._take_open(missing)
            else:
                first = number * self.places
                ids.extend(range(first, first + self.places))
        self._write(ids, account, self._indices(ids))
        self.granted += count
        return ids, None

    def _take_open(self, count: int) -> Ids:
        """The next `count` free places of the pool's own frames, which have so many."""
        self.free -= count
        ids: Ids = array("i")
        while (missing := count - len(ids)) > 0:
            number = self._open.rfind(1) if self._highest else self._open.find(1)
            vacant = self._vacant[number]
            run = vacant[-missing:]
            del vacant[-missing:]
            run.reverse()
            ids.extend(run)
            if not vacant:
                self._open[number] = 0
        return ids

    def take_one(self, account: int) -> int:
        """`take` for a single place."""
        return self.take(1, account)[0][0]

    def give(self, ids: Ids, owner: int) -> None:
        """Free `ids`, which must be `owner`'s. Raises `OwnershipError` with nothing changed."""
        self._take_over(ids, owner, FREE)
        self._leave(owner, len(ids))
        for run in self._by_frame(ids):
            self._put_back(run)

    def _put_back(self, run: Ids) -> None:
        """Free places of one frame; the frame is blank when they were its last."""
        number = run[0] // self.places
        is_closed = number + self._home == self._frames.closed
        if len(run) == self.places and number and not is_closed:
            self._frames.release(number + self._home)
            return
        self._vacant[number].extend(run)
        if not is_closed:
            self.free += len(run)
            self._open[number] = 1
            self._release_if_empty(number)

    def _release_if_empty(self, number: int) -> None:
        if number and len(self._vacant[number]) == self.places:
            self.free -= self.places
            self._open[number] = 0
            del self._vacant[number][:]
            self._frames.release(number + self._home)

    def _by_frame(self, ids: Ids) -> list[Ids]:
        """`ids` as runs of one frame each."""
        places = self.places
        if len(ids) <= _FEW:
            cuts = [at for at in range(1, len(ids)) if ids[at] // places != ids[at - 1] // places]
        else:
            frames = np.frombuffer(ids, np.int32) // places
            cuts = (np.flatnonzero(np.diff(frames)) + 1).tolist()
        edges = [0, *cuts, len(ids)] if ids else [0]
        return [ids[start:end] for start, end in pairwise(edges)]

    def _take_in(self, number: int) -> None:
        """Have all places of a frame granted from now on that has just become one of this pool."""
        first = number * self.places
        lowest = first or 1  # place 0 is never granted
        self._vacant[number] = array("i", range(first + self.places - 1, lowest - 1, -1))
        if self._vacant[number]:
            self._open[number] = 1
            self.free += len(self._vacant[number])

    # -- clearing a frame ----------------------------------------------------------------------

    def clearable(self, count: int | None = None) -> list[tuple[int, Ids]]:
        """Frames that hold nothing but what the tree has, with its places; the emptiest first.

        `count`: no more than so many.
        """
        cells = self._cells_np.reshape(-1, self.places)
        of_tree = (cells == TREE).sum(1)
        only_tree = (of_tree > 0) & (of_tree + (cells == FREE).sum(1) == self.places)
        only_tree[0] = False
        numbers = np.flatnonzero(only_tree)
        numbers = numbers[np.argsort(of_tree[numbers], kind="stable")][:count]
        found: list[tuple[int, Ids]] = []
        for number in numbers.tolist():
            first = number * self.places
            held = np.flatnonzero(cells[number] == TREE) + first
            found.append((number + self._home, array("i", held.tolist())))
        return found

    def close(self, frame: int) -> None:
        """Grant nothing of `frame` until `reopen`: what it holds is being copied out of it."""
        assert self._frames.closed < 0 and self._frames.kinds[frame] == self._kind
        self._frames.closed = frame
        number = frame - self._home
        if self._open[number]:
            self._open[number] = 0
            self.free -= len(self._vacant[number])

    def reopen(self, frame: int) -> None:
        """Nothing copies out of `frame` any more; it is blank if nothing in it is owned."""
        assert self._frames.closed == frame
        self._frames.closed = -1
        number = frame - self._home
        if self._vacant[number]:
            self._open[number] = 1
            self.free += len(self._vacant[number])
            self._release_if_empty(number)

    # -- checks --------------------------------------------------------------------------------

    def audit(self) -> None:
        """Recount; raises `AssertionError` when a figure is wrong."""
        cells = self._cells_np
        for name, kept, owner in (("parked", self.parked, PARKED), ("tree", self.tree, TREE)):
            assert kept == int((cells == owner).sum()), f"{self.component}: {name} is {kept}"
        assert self.granted == int((cells > 0).sum()), f"{self.component}: granted"
        free = 0
        for number, vacant in enumerate(self._vacant):
            frame = number + self._home
            first = number * self.places
            owners = cells[first : first + self.places]
            ours = self._frames.kinds[frame] == self._kind
            where = f"{self.component} frame {frame}"
            empty = np.flatnonzero(owners == FREE) + first
            assert sorted(vacant) == (empty.tolist() if ours else []), f"{where}: vacant places"
            assert ours or len(empty) == self.places, f"{where} of another kind is owned"
            is_closed = frame == self._frames.closed
            full = len(empty) < self.places
            assert not number or not ours or full or is_closed, f"{where} is empty"
            is_open = bool(vacant) and not is_closed
            assert bool(self._open[number]) == is_open, f"{where}: open"
            free += len(vacant) * is_open
        assert free == self.free, f"{self.component}: free is {self.free}, counted {free}"


class SharedLedger(Ledger):
    """A ledger whose pools share the frames of one memory.

    A frame holds `pages` pages or one state. `spare` blank frames are left to states as long as
    pages can be had otherwise, since a state needs a whole frame at once.
    """

    def __init__(self, frames: int, pages: int, *, spare: int = 1) -> None:
        self.frames = Frames(frames, 2)
        self.spare = spare
        self._spare_asked = False
        self.pages_per_frame = pages
        super().__init__(1, 1)
        self.kv = self.pages = FramePool("kv", self.frames, 1, pages, highest=False)
        self.state = FramePool("state", self.frames, 2, 1, highest=True)
        self._by_component = {"kv": self.kv, "state": self.state}

    def ask_for_spare(self) -> bool:
        """See `Ledger.ask_for_spare`; once until `spare_answered`."""
        ask = self.frames.blank < self.spare and not self._spare_asked
        self._spare_asked = self._spare_asked or ask
        return ask

    def spare_answered(self) -> None:
        """The tree has done what it could about a spare frame."""
        self._spare_asked = False

    def _left_for_pages(self, states: int) -> int:
        """Blank frames that `states` states leave; negative if they are not enough."""
        return self.frames.blank - max(0, states - self.state.free)

    def fits(self, pages: int, states: int, *, last: bool = False) -> bool:
        """See `Ledger.fits`. `last`: nothing else can be had, so pages take the spare frames."""
        left = self._left_for_pages(states)
        if left < 0:
            return False
        usable = left if last else max(0, left - self.spare)
        return pages <= self.kv.free + usable * self.pages_per_frame

    def short_of(self, pages: int, states: int) -> tuple[int, int]:
        """See `Ledger.short_of`; of a frame that is short for a state nothing counts as pages."""
        left = self._left_for_pages(states)
        usable = max(0, left - self.spare) * self.pages_per_frame
        return max(0, pages - self.kv.free - usable), max(0, -left)

    def ever_fits(self, pages: int, states: int) -> bool:
        """See `Ledger.ever_fits`."""
        whole = -(-max(0, pages - (self.pages_per_frame - 1)) // self.pages_per_frame)
        return whole + states <= self.frames.count - self.frames.homes

    def audit(self) -> None:
        """Recount; also that each frame is of one kind, so that each byte has one owner."""
        super().audit()
        frames = self.frames
        assert frames.blank == frames.kinds.count(_BLANK), "blank frames"
        assert frames.closed < 0 or frames.kinds[frames.closed] != _BLANK, "a blank frame is closed"
