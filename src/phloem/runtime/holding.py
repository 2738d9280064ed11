"""What one request owns outside the tree: its part of the page table and its state slots."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.allocator import Grant
from phloem.actors.tree.results import PagesChanged
from phloem.cuda_streams.engine import Fence

if TYPE_CHECKING:
    from phloem.runtime.core import Core

__all__ = ["Holding", "Snapshot"]


class Snapshot(NamedTuple):
    """A slot of the request's own that holds, or will hold, its state at `position`."""

    slot: int
    position: int


class Holding:
    """The page table of a request and its slots, with the account that they are booked under.

    `pages[:own_from]` are the tree's and under the request's lease; the rest are its own. `spans`
    has a table like it for each span component, with the reserved page 0 for what is not needed.
    """

    def __init__(self, core: Core, tree_pages: Ids, tree_spans: Sequence[Ids] = ()) -> None:
        self._core = core
        self._page_size = core.config.page_size
        self.account = 0
        self.pages = tree_pages
        self.spans = [*tree_spans] or [array("i") for _ in core.tree.spans]
        self.own_from = len(tree_pages)
        self.working: int | None = None  # the slot of the working state
        self.snapshots: list[Snapshot] = []  # by position, ascending
        self.copying = 0  # the slot that receives a copy of the working state for a checkpoint

    @property
    def is_bare(self) -> bool:
        """Whether it was never granted anything, so that all its pages are the tree's."""
        return not self.account

    @property
    def room(self) -> int:
        """Tokens for which there are pages."""
        return len(self.pages) * self._page_size

    @property
    def own_pages(self) -> Ids:
        """The request's own pages, in order; a copy."""
        return self.pages[self.own_from :]

    @property
    def own_spans(self) -> tuple[Ids, ...]:
        """The request's own pages of each span component, in order; copies."""
        return tuple(_real(table[self.own_from :]) for table in self.spans)

    @property
    def own_states(self) -> Ids:
        """The request's own state slots; a copy."""
        states: Ids = array("i")
        if self.working is not None:
            states.append(self.working)
        states.extend(snapshot.slot for snapshot in self.snapshots)
        if self.copying:
            states.append(self.copying)
        return states

    def missing(self, tokens: int) -> int:
        """Pages that are missing to have room for `tokens` tokens in all."""
        return max(0, -(-tokens // self._page_size) - len(self.pages))

    def take(self, grant: Grant) -> None:
        """Take in room: pages at the end of the table, and the working slot if one was missing."""
        self.account = grant.account
        self.pages.extend(grant.pages)
        for table, more in zip(self.spans, grant.spans, strict=False):
            table.extend(more)
        if grant.states:
            self.working = grant.states[0]

    def take_slot(self, *, evict: bool, owner: str) -> int:
        """One more state slot, now; raises `NoRoom`."""
        grant = self._core.allocate_nowait(0, 1, owner, account=self.account, evict=evict)
        self.account = grant.account
        return grant.states[0]

    def offer(self, length: int) -> Ids:
        """The own pages that hold tokens below `length`; a copy."""
        return self.pages[self.own_from : length // self._page_size]

    def offer_spans(self, length: int) -> tuple[Ids, ...]:
        """The own pages of each span component for tokens below `length`: as far as not dropped."""
        end = length // self._page_size
        return tuple(_real(table[self.own_from : end]) for table in self.spans)

    def published(
        self, boundary: int, changed: Iterable[PagesChanged], tree_spans: Sequence[Ids]
    ) -> None:
        """The tree has taken over up to `boundary`, and put pages of its own in place of some.

        `tree_spans`: its pages of each span component up to there.
        """
        for change in changed:
            at = change.start // self._page_size
            self.pages[at : at + len(change.pages)] = change.pages
        for table, pages in zip(self.spans, tree_spans, strict=True):
            table[: len(pages)] = pages
        self.own_from = boundary // self._page_size

    def loaded(self, tree_pages: Ids) -> None:
        """The load of the tree's part has ended, perhaps with fewer pages; own room stays."""
        self.pages = tree_pages + self.own_pages
        self.own_from = len(tree_pages)

    def stand_on(self, tree_pages: Ids, tree_spans: Sequence[Ids]) -> None:
        """Read the tree's pages of a deeper boundary from now on; what they replace goes back."""
        count = len(tree_pages)
        replaced = self.pages[self.own_from : count]
        spans = tuple(_real(table[self.own_from : count]) for table in self.spans)
        self.pages = tree_pages + self.pages[count:]
        self.spans = [
            pages + table[count:] for pages, table in zip(tree_spans, self.spans, strict=True)
        ]
        self.own_from = count
        self.give_back(replaced, array("i"), (), spans)

    def drop_behind(self, position: int, after: tuple[Fence, ...]) -> None:
        """Give the own pages of spans back that nothing from token `position` on needs."""
        dropped: list[Ids] = []
        boundary = position // self._page_size * self._page_size
        for span, table in zip(self._core.tree.spans, self.spans, strict=True):
            end = min(span.needs_from(boundary) // self._page_size, len(table))
            dropped.append(_real(table[self.own_from : end]))
            for number in range(self.own_from, end):
                table[number] = 0
        if any(dropped):
            self.give_back(array("i"), array("i"), after, tuple(dropped))

    def serves(self, position: int) -> bool:
        """Whether it still has what a pass from token `position` on needs of spans."""
        boundary = position // self._page_size * self._page_size
        return all(
            all(table[span.needs_from(boundary) // self._page_size : boundary // self._page_size])
            for span, table in zip(self._core.tree.spans, self.spans, strict=True)
        )

    def keep_snapshot(self, slot: int, position: int) -> None:
        """Note that `slot` holds, or will hold, the state at `position`."""
        self.snapshots.append(Snapshot(slot, position))
        self.snapshots.sort(key=lambda snapshot: snapshot.position)

    def drop_snapshots(self, after: tuple[Fence, ...], beyond: int = -1) -> None:
        """Give the slots of all snapshots beyond a position back."""
        for snapshot in [s for s in self.snapshots if s.position > beyond]:
            self.snapshots.remove(snapshot)
            self.give_back_slot(snapshot.slot, after)

    def drop_snapshots_below(self, position: int, after: tuple[Fence, ...]) -> None:
        """Give the slots of all snapshots up to a position back."""
        while self.snapshots and self.snapshots[0].position <= position:
            self.give_back_slot(self.snapshots.pop(0).slot, after)

    def drop_working(self, after: tuple[Fence, ...]) -> None:
        """Give the working slot back, if there is one."""
        if self.working is not None:
            slot, self.working = self.working, None
            self.give_back_slot(slot, after)

    def give_back_slot(self, slot: int, after: tuple[Fence, ...]) -> None:
        """Give one state slot back after `after` and the copies that still touch it."""
        fences = after + self._core.touching((slot,), ())
        self.give_back(array("i"), array("i", (slot,)), fences)

    def give_back(
        self,
        pages: Ids,
        states: Ids,
        after: tuple[Fence, ...],
        spans: tuple[Ids, ...] = (),
    ) -> None:
        """Give places back once `after` has passed."""
        if pages or states or any(spans):
            self._core.run(m.GiveBack(self.account, pages, states, after, spans))


def _real(table: Ids) -> Ids:
    """The pages of a part of a table; those that are not needed stand in front."""
    return table[table.count(0) :]
