"""The whole state of a compared run in one value: runs of equal values go on equally.

So of the sequences of operations that lead to one state, one needs to be continued. What is renamed
makes no difference: pages and slots are names, and of stamps and of node ids only the order counts.
A field of nodes or leases that has no row in the tables is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from tree.naive import Compared

from phloem.actors.tree import Lease, Tree
from phloem.actors.tree.eviction import _ID_BITS, CandidateIndex
from phloem.actors.tree.node import NO_SLOT, Node

Ranks = dict[int, int]
Encode = Callable[[Any, Ranks], object]  # of a field's value; the ranks are those of node ids


def itself(value: Any, _: Ranks) -> object:
    return value


def size(value: Any, _: Ranks) -> object:
    return len(value)


def rank(value: Any, ids: Ranks) -> object:
    return ids[value]


def node_rank(value: Any, ids: Ranks) -> object:
    return None if value is None else ids[value.id]


# A text says why a field is left out.
NODE: dict[str, Encode | str] = {
    "id": rank,
    "parent": node_rank,
    "edge": itself,
    "end": itself,
    "page_ids": size,
    "state": lambda state, _: state != NO_SLOT,
    "children": lambda children, ids: sorted(ids[one.id] for one in (children or {}).values()),
    "only": "the audit finds it in the children",
    "stamp": "the indexes' scores, which are there by order",
    "state_stamp": "the indexes' scores, which are there by order",
    "born": "for fifo",
    "hits": "for lfu, slru, and trees with a host tier",
    "turn": "for policies that learn",
    "rests": "for policies that learn",
    "departures": "for policies that learn",
    "departures_since": "for policies that learn",
    "prompt_end": "for departures, which say nothing before the sixteenth",
    "priority": itself,
    "keep_until": itself,
    "sessions": itself,
    "leases": itself,
    "state_leases": itself,
    "protected_children": itself,
    "counted": itself,
    "mark": itself,
    "queued": itself,
    "gone_children": itself,
    "host": itself,
    "spans": lambda spans, _: [(len(span.page_ids), span.leases) for span in spans],
}
LEASE: dict[str, Encode | str] = {
    "id": "they are there in the order of their ids",
    "owner": itself,
    "generation": itself,
    "key": lambda key, _: (key.root, key.data),
    "anchor": node_rank,
    "has_state": itself,
    "live": itself,
    "running_at": itself,
    "wanted": itself,
    "refused": "an answer to the caller",
    "session": itself,
    "priority": itself,
    "keep_until": itself,
    "turn": "for policies that learn",
    "prompt_end": "for departures, which say nothing before the sixteenth",
    "load": itself,
    "why_not": itself,
    "spans": itself,
}


def fingerprint(both: Compared) -> bytes:
    """All that what comes after depends on: the tree, its naive twin, the pools and the leases."""
    tree, nodes = both.world.tree, _nodes(both.world.tree)
    layouts = [_Layout.of(index) for index in tree.indexes]
    queued = (number for layout in layouts for _, number in layout.entries())
    ids = _ranks([*(node.id for node in nodes), *queued])
    leases = _ranks(tree.leases.live)
    assert not tree.departures.backs and not tree.former._released and not tree.former._owed
    state = (
        [_fields(node, NODE, ids) for node in nodes],
        [
            layout.encoded([index.score(node) for node in nodes], ids)
            for layout, index in zip(layouts, tree.indexes, strict=True)
        ],
        [_fields(lease, LEASE, ids) for lease in tree.leases.live.values()],
        [ids[number] for number in tree.leases.unsettled],
        sorted(
            (place, [leases[lease.id] for lease in waiting])
            for place, waiting in tree.running._at.items()
        ),
        tree.generation,
        tree.sweeping,
        [ids[node.id] for node, _ in tree.former._frames],
        sorted(
            (place, edge, end)
            for ghosts in (tree.ghosts._recent, tree.ghosts._older)
            for place, (edge, _, _, end) in ghosts.items()
        ),
        tree.ghosts.any,
        list(tree.radix._spaces.items()),
        [pool.free for pool in both.world.pools.values()],
        sorted(both.evicted),
        [(leases[one.lease.id], one.takes_state, one.opened) for one in both.held],
        [leases[lease.id] for lease in both.former],
    )
    return blake2b(repr(state).encode(), digest_size=16).digest()


class _Layout(NamedTuple):
    """The entries of a candidate index as they lie, and those of them that count."""

    parts: list[list[tuple[int, int]]]  # the heap's, those of the runs' heads, each run's

    @classmethod
    def of(cls, index: CandidateIndex) -> _Layout:
        heap, heads = sorted(index._soon), sorted(entry for entry, _ in index._heads)
        runs = (run.left() for run in index._runs.values())
        parts = (heap, heads, sorted(index._entries.values()), *runs)
        return cls([[divmod(entry, 1 << _ID_BITS) for entry in part] for part in parts])

    def entries(self) -> Iterator[tuple[int, int]]:
        return (entry for part in self.parts for entry in part)

    def encoded(self, scores: list[int], ids: Ranks) -> object:
        """With the nodes' scores as they are now; of scores only the order counts."""
        order = _ranks([*scores, *(score for score, _ in self.entries())])
        return (
            [order[score] for score in scores],
            [[(order[score], ids[number]) for score, number in part] for part in self.parts],
        )


def _ranks(numbers: Iterable[int]) -> Ranks:
    return {number: place for place, number in enumerate(sorted(set(numbers)))}


def _fields(one: Node | Lease, table: dict[str, Encode | str], ids: Ranks) -> list[object]:
    rules = ((name, table[name]) for name in one.__struct_fields__)
    return [rule(getattr(one, name), ids) for name, rule in rules if not isinstance(rule, str)]


def _nodes(tree: Tree) -> list[Node]:
    """All nodes, also roots and those of former generations, in the order of their ids."""
    waiting = [*tree.radix.roots.values(), *(node for node, _ in tree.former._frames)]
    for lease in tree.leases.live.values():
        above: Node | None = lease.anchor
        while above is not None:
            waiting.append(above)
            above = above.parent
    found: dict[int, Node] = {}
    while waiting:
        node = waiting.pop()
        if node.id not in found:
            found[node.id] = node
            waiting.extend((node.children or {}).values())
    return [found[number] for number in sorted(found)]
