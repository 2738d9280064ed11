"""Copies between the tiers, as the tree sees them: what each one is to bring, and where.

An operation is planned in the turn that wants it, has its room reserved, is submitted, and ends. It
names nodes and page ranges; a split of a node divides its record in the same turn, and whoever
carries the copy out is not told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from phloem.actors.actions import Component, Ids, Tier
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT, Node

__all__ = ["Kind", "Operation", "Operations", "Phase", "Piece"]

Kind: TypeAlias = Literal["backup", "load"]
Phase: TypeAlias = Literal["planned", "reserved", "submitted", "ended"]

_STEPS: dict[Phase, frozenset[Phase]] = {
    "planned": frozenset(("reserved", "ended")),
    "reserved": frozenset(("submitted",)),
    "submitted": frozenset(("ended",)),
    "ended": frozenset(),
}


class Piece(NamedTuple):
    """The KV of one node within an operation: its pages are the operation's from `first` on."""

    node: Node
    first: int
    pages: int


class Operation:
    """One copy between the tiers through its life.

    `pages` and `state_node` say what it brings. It publishes only after `requires`, the operation
    that brings what comes before (0: that is there). `waiters` are the leases that wait for it.
    """

    __slots__ = (
        "account",
        "dependants",
        "generation",
        "good",
        "hold",
        "kind",
        "number",
        "outcome",
        "page_ids",
        "pages",
        "phase",
        "pieces",
        "requires",
        "slot",
        "spared",
        "state_node",
        "waiters",
    )

    def __init__(self, number: int, kind: Kind, generation: int) -> None:
        self.number = number
        self.kind: Kind = kind
        self.generation = generation
        self.phase: Phase = "planned"
        self.pieces: dict[int, Piece] = {}  # by node
        self.pages = 0
        self.state_node: Node | None = None
        self.requires = 0
        self.dependants: list[int] = []
        self.waiters: dict[int, Lease] = {}
        self.hold: Lease | None = None  # protects what it reads, and where it will publish
        self.account = 0  # owns its targets from the reservation to the end
        self.page_ids: Ids = array("i")
        self.slot = NO_SLOT
        self.outcome: int | None = None  # its copy has ended: so many leading pages are good ...
        self.good = False  # ... or all that it brings
        self.spared: list[Node] = []  # tails of paths whose cap is applied again at its end

    @property
    def target(self) -> Tier:
        """The tier that it brings data to."""
        return "host" if self.kind == "backup" else "device"

    @property
    def states(self) -> int:
        """States that it brings, 0 or 1."""
        return int(self.state_node is not None)

    def add(self, node: Node, count: int) -> None:
        """Bring the KV of one more node, `count` pages, below those before."""
        self.pieces[node.id] = Piece(node, self.pages, count)
        self.pages += count

    @property
    def source(self) -> Node:
        """The deepest node of which a backup reads something."""
        return self.top_down()[-1].node if self.state_node is None else self.state_node

    def top_down(self) -> list[Piece]:
        """The pieces in the order of their pages."""
        return sorted(self.pieces.values(), key=lambda piece: piece.first)

    def ids_of(self, piece: Piece) -> bytes:
        """The target pages of a piece, as nodes keep them."""
        return self.page_ids[piece.first : piece.first + piece.pages].tobytes()

    def step(self, phase: Phase) -> None:
        """Go on; raises `AssertionError` for a step that is none."""
        if phase not in _STEPS[self.phase]:
            raise AssertionError(f"operation {self.number}: from {self.phase} to {phase}")
        self.phase = phase

    def __repr__(self) -> str:
        what = f"{self.pages} pages, {self.states} states"
        return f"Operation({self.number}, {self.kind}, {self.phase}, {what})"


class Operations:
    """The operations that have not ended, and those that were dropped before their room came."""

    def __init__(self) -> None:
        self.live: dict[int, Operation] = {}
        self.dropped: dict[int, Tier] = {}  # answers to these reservations are given back
        self._last = 0

    def new_number(self) -> int:
        """A number for the next operation, of the tree or of whoever shares its numbers."""
        self._last += 1
        return self._last

    def plan(self, kind: Kind, generation: int, requires: int) -> Operation:
        """A new operation that publishes after `requires`."""
        operation = Operation(self.new_number(), kind, generation)
        self.live[operation.number] = operation
        if requires:
            operation.requires = requires
            self.live[requires].dependants.append(operation.number)
        return operation

    def end(self, operation: Operation, *, answered: bool = False) -> None:
        """End an operation. `answered`: no answer to its reservation is on its way any more."""
        if operation.phase == "planned" and not answered:
            self.dropped[operation.number] = operation.target
        operation.step("ended")
        del self.live[operation.number]
        above = self.live.get(operation.requires)
        if above is not None:
            above.dependants.remove(operation.number)

    def arriving(self) -> tuple[int, int]:
        """Device pages and states that the loads own."""
        loads = [one for one in self.live.values() if one.kind == "load" and one.account]
        return sum(len(one.page_ids) for one in loads), sum(bool(one.slot) for one in loads)

    def divide(self, node: Node, upper: Node, pages: int) -> None:
        """Divide what is under way over `node`, just split after `pages`, between its parts."""
        part = node.host
        assert part is not None
        for number in (part.kv_backup, part.kv_load):
            if number:
                pieces = self.live[number].pieces
                _, first, count = pieces[node.id]
                pieces[upper.id] = Piece(upper, first, pages)
                pieces[node.id] = Piece(node, first + pages, count - pages)

    def over(self, node: Node) -> Iterator[tuple[Component, Tier, Operation]]:
        """The operations that copy data of one node: for each, of what kind, to which tier."""
        part = node.host
        if part is None:
            return
        if part.kv_backup:
            yield "kv", "host", self.live[part.kv_backup]
        if part.state_backup:
            yield "state", "host", self.live[part.state_backup]
        if part.kv_load:
            yield "kv", "device", self.live[part.kv_load]
        if part.state_load:
            yield "state", "device", self.live[part.state_load]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.live.values())

    def __len__(self) -> int:
        return len(self.live)
