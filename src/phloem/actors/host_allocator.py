"""The allocator of the host tier: room for operations of the tree, and nothing else.

Nobody waits for host room: a backup that finds none is dropped. What it is short of is asked of the
tree exactly, one reservation after another, in the order in which they were asked for.
"""

from __future__ import annotations

from collections import deque

from phloem.actors.actions import FreeHostSlots, Reserve
from phloem.actors.domain import Actor, Domain, Handlers
from phloem.actors.ledger import Ledger
from phloem.actors.messages import MadeHostRoom, MakeHostRoom, NotReserved, Reserved
from phloem.events import Freed, Granted, Sink

__all__ = ["HostAllocatorActor"]


class HostAllocatorActor:
    """One allocator for the host tier. Only it takes from the tier's pools and gives back."""

    name = "host allocator"

    def __init__(self, domain: Domain, ledger: Ledger, emit: Sink | None = None) -> None:
        self._domain = domain
        self._ledger = ledger
        self._emit = emit
        self._tree: Actor | None = None
        self._asking: deque[Reserve] = deque()  # the tree makes room for the first
        self.handlers: Handlers = {
            Reserve: self._on_reserve,
            FreeHostSlots: self._on_free,
            MadeHostRoom: self._on_made_room,
        }

    def connect(self, tree: Actor) -> None:
        """Say who is asked for room and answered."""
        self._tree = tree

    def _on_reserve(self, action: Reserve) -> None:
        assert self._tree is not None
        ledger = self._ledger
        if not ledger.ever_fits(action.pages, action.states):
            self._domain.send(self._tree, NotReserved(action.op))
        elif not self._asking and self._fits(action):
            self._grant(action)
        else:
            self._asking.append(action)
            if len(self._asking) == 1:
                self._ask()

    def _fits(self, action: Reserve) -> bool:
        return self._ledger.fits(action.pages, action.states)

    def _grant(self, action: Reserve) -> None:
        assert self._tree is not None
        owner = f"op {action.op}"
        account, pages, states = self._ledger.grant(action.pages, action.states, owner)
        if self._emit is not None:
            self._emit(
                Granted(
                    **self._domain.joins(),
                    request=owner,
                    account=account,
                    pages=pages.tolist(),
                    states=states.tolist(),
                    tier="host",
                )
            )
        self._domain.send(self._tree, Reserved(action.op, account, pages, states))

    def _ask(self) -> None:
        assert self._tree is not None
        action = self._asking[0]
        short = self._ledger.short_of(action.pages, action.states)
        self._domain.send(self._tree, MakeHostRoom(*short, action.op))

    def _on_made_room(self, message: MadeHostRoom) -> None:
        del message
        assert self._tree is not None
        action = self._asking.popleft()
        if self._fits(action):
            self._grant(action)
        else:
            self._domain.send(self._tree, NotReserved(action.op))
        while self._asking and self._fits(self._asking[0]):
            self._grant(self._asking.popleft())
        if self._asking:
            self._ask()

    def _on_free(self, action: FreeHostSlots) -> None:
        ledger, owner = self._ledger, action.owner
        ledger.pool(action.component).give(action.ids, owner)
        if owner > 0:
            kv = action.component == "kv"
            ledger.left(owner, len(action.ids) if kv else 0, 0 if kv else len(action.ids))
        if self._emit is not None:
            self._emit(
                Freed(
                    **self._domain.joins(),
                    component=action.component,
                    ids=action.ids.tolist(),
                    owner=owner,
                    tier="host",
                )
            )
