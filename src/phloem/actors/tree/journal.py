"""A tree that writes down what becomes of its nodes, for the events of its actor.

It decides exactly as `Tree` does. What an operation changed is kept until it is taken; a tree
whose events nobody wants is a plain `Tree` and pays nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple

from phloem.actors.tree.components import SpanComponent
from phloem.actors.tree.eviction import CandidateIndex
from phloem.actors.tree.host import HostTier, NewIndex
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, Node
from phloem.actors.tree.operations import Kind, Operation, Operations
from phloem.actors.tree.policies import Score
from phloem.actors.tree.radix import Radix, RootName
from phloem.actors.tree.shedding import Tally
from phloem.actors.tree.tree import Actions, Tree
from phloem.events import (
    Change,
    KvPut,
    KvTaken,
    NodeAdded,
    NodeRemoved,
    NodesMerged,
    NodeSplit,
    RootAdded,
    RootRemoved,
    SpanPut,
    SpanTaken,
    StatePut,
    StateTaken,
    TailCut,
    Victim,
)

__all__ = ["Dropped", "Fallen", "Journal", "JournaledTree"]

_WORD = 64
_Loss = Literal["leaf", "tail", "state", "demoted", "leaving", "copy", "span"]


class Dropped(NamedTuple):
    """An operation that ended before its copy was submitted."""

    number: int
    kind: Kind
    why: Literal["no_room", "not_wanted"]


class Fallen(NamedTuple):
    """A lease whose load did not come: it stood at token `before`."""

    lease: Lease
    before: int


class Journal:
    """The changes of nodes and operations since they were last taken, in order."""

    def __init__(self) -> None:
        self.dropped: list[Dropped] = []
        self.fallen: list[Fallen] = []
        self._changes: list[Change] = []
        self._victims: list[Victim] = []
        self._chosen: tuple[Score, Node] | None = None
        self._copies: dict[int, Victim] = {}  # by node: what it lost on the host

    def note(self, change: Change) -> None:
        """Write a change of the shape down."""
        self._changes.append(change)

    def chosen(self, candidate: tuple[Score, Node]) -> None:
        """The policy has chosen this node to lose data next."""
        self._chosen = candidate

    def loses(self, node: Node, what: _Loss, pages: int) -> None:
        """`node` is about to lose so many pages, or its state, or all.

        `demoted`: the host has it; `leaving`: it goes when the host has it.
        """
        states = 1 if what not in ("tail", "span") and node.state != NO_SLOT else 0
        copy = self._copies.pop(node.id, None) if what == "leaf" else None
        on_host = (0, 0) if copy is None else (copy.host_pages, copy.host_states)
        score = self._score_of(node) if copy is None else copy.score
        self._victims.append(Victim(node.id, what, node.end, pages, states, score, *on_host))

    def loses_copy(self, node: Node, pages: int, states: int) -> None:
        """`node` is about to lose so much on the host; perhaps it goes altogether next."""
        before = self._copies.get(node.id)
        if before is not None:
            pages, states = pages + before.host_pages, states + before.host_states
        score = self._score_of(node)
        self._copies[node.id] = Victim(node.id, "copy", node.end, 0, 0, score, pages, states)

    def _score_of(self, node: Node) -> list[int]:
        if self._chosen is not None and self._chosen[1] is node:
            return _words(self._chosen[0])
        return []

    def take_changes(self) -> list[Change]:
        """The changes so far; empty from now on."""
        taken, self._changes = self._changes, []
        return taken

    def take_victims(self) -> list[Victim]:
        """The victims so far; empty from now on."""
        taken, self._victims, self._chosen = self._victims, [], None
        taken.extend(self._copies.values())
        self._copies.clear()
        return taken


def _words(score: Score) -> list[int]:
    """A score as words of 64 bits, the highest first; they compare as the scores do."""
    words: list[int] = []
    while True:
        words.append(score & ((1 << _WORD) - 1))
        score >>= _WORD
        if not score:
            return words[::-1]


class _JournaledIndex(CandidateIndex):
    def __init__(
        self,
        bit: int,
        score: Callable[[Node], Score],
        eligible: Callable[[Node], bool],
        journal: Journal,
    ) -> None:
        super().__init__(bit, score, eligible)
        self._journal = journal

    def take(self, first: tuple[Score, Node]) -> None:
        super().take(first)
        self._journal.chosen(first)


class _JournaledRadix(Radix):
    def __init__(self, page_size: int, spans: int, journal: Journal) -> None:
        super().__init__(page_size, spans)
        self._journal = journal

    def root(self, name: RootName) -> Node:
        known = name in self.roots
        root = super().root(name)
        if not known:
            adapter, salt, marks = name
            self._journal.note(RootAdded(root.id, (adapter, salt), marks.hex()))
        return root

    def attach_leaf(self, parent: Node, edge: bytes, pages: array[int]) -> Node:
        leaf = super().attach_leaf(parent, edge, pages)
        self._journal.note(NodeAdded(leaf.id, parent.id, len(edge) // TOKEN_BYTES))
        return leaf

    def put_kv(self, node: Node, page_ids: bytes) -> None:
        super().put_kv(node, page_ids)
        self._journal.note(KvPut(node.id, "device", node.pages.tolist()))

    def take_kv(self, node: Node) -> array[int]:
        self._journal.note(KvTaken(node.id, "device"))
        return super().take_kv(node)

    def put_span(self, node: Node, span: SpanComponent, page_ids: array[int]) -> None:
        super().put_span(node, span, page_ids)
        self._journal.note(SpanPut(node.id, span.name, page_ids.tolist()))

    def take_span(self, node: Node, span: SpanComponent, count: int) -> array[int]:
        self._journal.loses(node, "span", 0)
        self._journal.note(SpanTaken(node.id, span.name, count))
        return super().take_span(node, span, count)

    def put_state(self, node: Node, state: int) -> None:
        super().put_state(node, state)
        self._journal.note(StatePut(node.id, state))

    def take_state(self, node: Node) -> int:
        self._journal.note(StateTaken(node.id))
        return super().take_state(node)

    def split(self, node: Node, inside: int) -> Node:
        upper = super().split(node, inside)
        self._journal.note(NodeSplit(node.id, upper.id, inside // TOKEN_BYTES))
        return upper

    def merge_into_child(self, node: Node) -> Node | None:
        merged = super().merge_into_child(node)
        if merged is not None:
            self._journal.note(NodesMerged(node.id, merged.id))
        return merged

    def remove(self, leaf: Node) -> Node:
        self._journal.loses(leaf, "leaf", len(leaf.pages))
        self._journal.note(NodeRemoved(leaf.id))
        return super().remove(leaf)

    def cut_tail(self, leaf: Node, count: int) -> array[int]:
        self._journal.loses(leaf, "tail", count)
        self._journal.note(TailCut(leaf.id, count))
        return super().cut_tail(leaf, count)

    def rename_pages(self, node: Node, pages: array[int]) -> None:
        super().rename_pages(node, pages)
        self._journal.note(KvPut(node.id, "device", pages.tolist()))

    def drop_root_if_empty(self, node: Node) -> None:
        before = len(self.roots)
        super().drop_root_if_empty(node)
        if len(self.roots) < before:
            self._journal.note(RootRemoved(node.id))


class _JournaledHost(HostTier):
    def __init__(
        self,
        new_index: NewIndex,
        device_kv: CandidateIndex,
        device_states: CandidateIndex,
        journal: Journal,
    ) -> None:
        super().__init__(new_index, device_kv, device_states)
        self._journal = journal

    def put_kv(self, node: Node, page_ids: bytes) -> None:
        super().put_kv(node, page_ids)
        self._journal.note(KvPut(node.id, "host", array("i", page_ids).tolist()))

    def take_kv(self, node: Node) -> bytes:
        taken = super().take_kv(node)
        self._journal.note(KvTaken(node.id, "host"))
        self._journal.loses_copy(node, len(taken) // ID_BYTES, 0)
        return taken

    def put_state(self, node: Node, slot: int) -> None:
        super().put_state(node, slot)
        self._journal.note(StatePut(node.id, slot, "host"))

    def take_state(self, node: Node) -> int:
        self._journal.note(StateTaken(node.id, "host"))
        self._journal.loses_copy(node, 0, 1)
        return super().take_state(node)


class _JournaledOperations(Operations):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def end(self, operation: Operation, *, answered: bool = False) -> None:
        if operation.phase == "planned":
            why: Literal["no_room", "not_wanted"] = "no_room" if answered else "not_wanted"
            self._journal.dropped.append(Dropped(operation.number, operation.kind, why))
        super().end(operation, answered=answered)


class JournaledTree(Tree):
    """A `Tree` with a `journal`."""

    @cached_property
    def journal(self) -> Journal:
        """The record of changes; it exists before the first change."""
        return Journal()

    def new_radix(self, page_size: int, spans: int) -> Radix:
        """See `Tree.new_radix`."""
        return _JournaledRadix(page_size, spans, self.journal)

    def new_host(self) -> HostTier:
        """See `Tree.new_host`."""
        return _JournaledHost(self.new_index, self.kv_index, self.state_index, self.journal)

    def new_index(
        self, bit: int, score: Callable[[Node], Score], eligible: Callable[[Node], bool]
    ) -> CandidateIndex:
        """See `Tree.new_index`."""
        return _JournaledIndex(bit, score, eligible, self.journal)

    def new_operations(self) -> Operations:
        """See `Tree.new_operations`."""
        return _JournaledOperations(self.journal)

    def reached(self, key: TokenKey, limit: int | None = None) -> int:
        """The node in which the KV prefix of a key ends, or 0."""
        walk = self._look(key, limit).walk
        if walk.partial is not None and walk.inside:
            return walk.partial.id
        return walk.path[-1].id if walk.path else 0

    def _drop_state(self, node: Node, actions: Actions) -> None:
        self.journal.loses(node, "state", 0)
        super()._drop_state(node, actions)

    def _demote(self, host: HostTier, node: Node, actions: Actions) -> None:
        if node.host is not None and not node.host.leaving:  # what leaves was a victim before
            self.journal.loses(node, "demoted", node.page_count)
        super()._demote(host, node, actions)

    def _copy_first(self, host: HostTier, node: Node, gone: Tally) -> None:
        self.journal.loses(node, "leaving", node.page_count)
        super()._copy_first(host, node, gone)

    def _fall_back(self, lease: Lease) -> None:
        before = lease.anchor.end
        super()._fall_back(lease)
        if lease.anchor.end < before:  # else what failed was not what it stands on, or comes again
            self.journal.fallen.append(Fallen(lease, before))
