"""Allocations are served in order; nobody waits for what is free or could be evicted."""

from __future__ import annotations

from collections.abc import Callable

from phloem.actors import messages as m
from phloem.actors.frames import SharedLedger
from phloem.runtime.core import Core
from phloem.runtime.simulation.model import Violation

__all__ = ["Fairness"]


class Fairness:
    """Watches the allocations of one runtime that wait.

    Holders go before newcomers, each in the order of arrival, unless every holder waits.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.longest_ns = 0  # that an allocation waited
        self._now_ns = now_ns
        self._granted: list[str] = []  # in the current turn
        self._came_as_holder = False
        self._waits_as_holder: dict[str, bool] = {}
        self._waiting_since: dict[m.Allocate, int] = {}

    def waits(self, owner: str, *, holder: bool) -> None:
        """An allocation of `owner` has to wait."""
        self._waits_as_holder[owner] = holder

    def granted(self, owner: str) -> None:
        """An allocation of `owner` was served."""
        self._granted.append(owner)

    def left(self, owner: str) -> None:
        """`owner` is over: nothing about it is kept."""
        self._waits_as_holder.pop(owner, None)

    def begin(self, message: object, core: Core) -> list[m.Allocate]:
        """A turn begins; those who wait."""
        self._granted.clear()
        if isinstance(message, m.Allocate):
            self._came_as_holder = message.owner in _holding(core)
        return list(core.allocator.queue()) if core.ledger.waiting else []

    def end(self, message: object, core: Core, before: list[m.Allocate]) -> None:
        """The turn is over, before which `before` waited."""
        if before or core.ledger.waiting or core.allocator.waiting:
            self._check(message, core, before, list(core.allocator.queue()))

    def _check(
        self, message: object, core: Core, before: list[m.Allocate], after: list[m.Allocate]
    ) -> None:
        now = self._now_ns()
        for waiter in after:
            self._waiting_since.setdefault(waiter, now)
        left = [waiter for waiter in before if waiter not in after]
        for waiter in left:
            waited = now - self._waiting_since.pop(waiter, now)
            self.longest_ns = max(self.longest_ns, waited)
        stayed = [waiter for waiter in before if waiter in after]
        if stayed != [waiter for waiter in after if waiter in stayed]:
            raise Violation("allocations that wait have changed places")
        served = [waiter for waiter in left if waiter.owner in self._granted]
        if isinstance(message, m.Allocate) and message.owner in self._granted:
            served.append(message)
        waiting = [*before, message] if isinstance(message, m.Allocate) else before
        if not served or _every_holder_waits(core, waiting):
            return
        for waiter in served:
            ahead = before
            if waiter in before:
                ahead = before[: before.index(waiter)]
            elif self._came_as_holder:  # in this turn; it goes before all newcomers
                ahead = [other for other in before if self._waits_as_holder.get(other.owner)]
            overtaken = [other for other in ahead if other in stayed]
            if overtaken:
                raise Violation(
                    f"allocation of {waiter.owner!r} was served before {overtaken[0].owner!r}'s"
                )

    def at_rest(self, core: Core, backup_refused: Callable[[str], bool]) -> None:
        """Nothing is queued: the first who waits cannot be served.

        `backup_refused`: for want of room on the host, since the tree was asked for room for that
        owner. What it was to copy stays until what leaves below it is gone, and no other backup
        reads it: asked again, it is refused again. Who waits is served when those backups have
        ended.
        """
        head = next(core.allocator.queue(), None)
        if head is None:
            return
        kv, state, tree = core.ledger.kv, core.ledger.state, core.tree.figures()
        leaving = tree.pages_leaving + tree.states_leaving
        if leaving and isinstance(core.ledger, SharedLedger):
            return  # in one memory pages and states make room for each other, in frames
        operations = core.tree.operations.live.values()
        reads = any(one.kind == "backup" and one.phase == "submitted" for one in operations)
        if (leaving or reads) and backup_refused(head.owner):
            return
        short = max(0, head.pages - kv.free), max(0, head.states - state.free)
        pages, states = core.tree.beyond_leaving(*short)
        if leaving and not pages and not states:
            return  # all that it waits for comes with the backups in flight
        spans = zip(head.spans, core.ledger.spans, tree.spans, strict=False)
        if (
            pages <= tree.pages_evictable
            and states <= tree.states_evictable
            and all(asked <= pool.free + of.evictable for asked, pool, of in spans)
        ):
            raise Violation(
                f"{head.owner!r} waits for {head.pages} pages and {head.states} states: "
                f"{kv.free} and {state.free} are free, {tree.pages_leaving} and "
                f"{tree.states_leaving} leave, {tree.pages_evictable} and "
                f"{tree.states_evictable} can go"
            )


def _every_holder_waits(core: Core, waiting: list[m.Allocate]) -> bool:
    names = {waiter.owner for waiter in waiting}.union(core.tree_actor.joiners())
    # A grant of this very turn has made its owner a holder; it was waiting before.
    return _holding(core) <= names


def _holding(core: Core) -> set[str]:
    owners = {account.owner for account in core.ledger.accounts.values()}
    owners.update(lease.owner for lease in core.tree.leases.live.values() if lease.boundary)
    return owners
