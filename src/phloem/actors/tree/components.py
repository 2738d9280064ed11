"""The components: kinds of cached data, each with pools of its own, and the rules of each.

A component says here, and nowhere else,

* what a hit needs of it (`reach`, for spans `needs_from`),
* how a split divides it (`SPLIT_RULES` of `node.py`; for spans `divide`, `can_join`, `join`),
* what an eviction frees of a node (`held`), when it may go (`may_go`), in what order (`score_by`),
* what a lease at a boundary protects of it: what a hit there needs.

Which of them a tree has is its configuration: a text for each, like `"kv"` or `"window:128"`. The
tree itself is built around `kv`, whose edges everything stands on, and keeps a `state` at a node's
end in fields of its own, since every request pays for both. All others are *spans*, kept in
`Node.spans`: pages along the last part of an edge, of which a boundary needs those from some
position on. Another span is a class here with a row in `SPANS`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import lcm
from typing import TypeAlias

from phloem.actors.actions import Component as Name
from phloem.actors.actions import Ids
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, Node, Span, Walk
from phloem.actors.tree.policies import Policy, Score
from phloem.errors import InvalidRequest

__all__ = [
    "SPANS",
    "Boundary",
    "Component",
    "Components",
    "Kv",
    "SpanComponent",
    "State",
    "Window",
    "can_join",
    "divide",
    "join",
    "kv_may_go",
    "new_spans",
    "state_may_go",
]

# A position on a walk, after the last whole node that ends at or before it; None: the root.
Boundary: TypeAlias = tuple[Node | None, int]


def kv_may_go(node: Node) -> bool:
    """True when the node's KV may leave the device: nothing protects it or is there below it."""
    return (
        (node.children is None or len(node.children) == node.gone_children)
        and not node.leases
        and not node.protected_children
        and node.parent is not None
        and (node.host is None or (node.page_ids != b"" and not node.host.leaving))
    )


def state_may_go(node: Node) -> bool:
    """True when the node's state may leave the device: no lease has taken it."""
    return (
        node.state != NO_SLOT
        and not node.state_leases
        and node.parent is not None
        and (node.host is None or not node.host.state_leaving)
    )


class Component:
    """One kind of cached data. `may_go` says whether a node's device data may go now."""

    name: Name
    may_go: Callable[[Node], bool]

    def reach(self, walk: Walk, at: int, count: int | None = None) -> Boundary:
        """The deepest boundary of a walk that this component can serve, at or before `at`.

        `count` nodes of the walk's path end there or before, by default all.
        """
        raise NotImplementedError

    def score_by(self, policy: Policy) -> Callable[[Node], Score]:
        """The order in which a policy lets its data go."""
        raise NotImplementedError

    def held(self, node: Node) -> Ids:
        """The node's device places, in order; a copy."""
        raise NotImplementedError


class Kv(Component):
    """Keys and values of full attention: a page for each page of an edge.

    A boundary needs all from the start, and so a lease protects the whole path.
    """

    name = "kv"

    def __init__(self) -> None:
        self.may_go = kv_may_go

    def reach(self, walk: Walk, at: int, count: int | None = None) -> Boundary:
        """A walk goes no further than KV does."""
        path = walk.path if count is None else walk.path[:count]
        return path[-1] if path else None, at

    def score_by(self, policy: Policy) -> Callable[[Node], Score]:
        return policy.kv_score

    def held(self, node: Node) -> Ids:
        return node.pages


class State(Component):
    """Recurrent states: one slot, true at exactly a node's end, which is on the grid.

    A boundary needs the one at its end; a lease protects it for as long as it has taken it.
    """

    name = "state"

    def __init__(self) -> None:
        self.may_go = state_may_go

    def reach(self, walk: Walk, at: int, count: int | None = None) -> Boundary:
        """The deepest node's end with a state, in whatever tier."""
        del at  # a state is at the end of a node
        path = walk.path if count is None else walk.path[:count]
        for node in reversed(path):
            if node.state or (node.host is not None and node.host.state):
                return node, node.end
        return None, 0

    def score_by(self, policy: Policy) -> Callable[[Node], Score]:
        return policy.state_score

    def held(self, node: Node) -> Ids:
        return array("i", () if node.state == NO_SLOT else (node.state,))


class SpanComponent(Component):
    """Pages along edges, of which a boundary needs those from `needs_from` on.

    A node has them for the last part of its edge, whole or not: what lies too far back is never
    offered, and what goes first are the pages at the front. `number` is its place in `Node.spans`.
    `text` is its configuration; `letter` stands for it in pictures of a tree.
    """

    letter: str

    def __init__(self, text: str, number: int, page_size: int) -> None:
        self.text = text
        self.number = number
        self.page_size = page_size
        self.may_go = self._may_go

    def needs_from(self, boundary: int) -> int:
        """The position from which on a boundary needs the data, which a lease there protects.

        The end of a page, like all positions; before the boundary, and never falling with it.
        """
        raise NotImplementedError

    def first(self, node: Node) -> int:
        """The position from which on a node has data; its end when it has none."""
        return node.end - len(node.spans[self.number].page_ids) // ID_BYTES * self.page_size

    def reach(self, walk: Walk, at: int, count: int | None = None) -> Boundary:
        """See `Component.reach`. One pass upwards, from `at` to the first boundary that is served.

        A gap in a node's data serves no boundary within the node: the next one is where it begins.
        """
        path = walk.path
        count = len(path) if count is None else count
        served, low = count, self.needs_from(at)
        above = path[count - 1].end if count else 0
        if at > above:  # inside the edge where the walk ends
            assert walk.partial is not None
            first = self.first(walk.partial)
            if first <= low:
                return path[count - 1] if count else None, at
            if first > above:
                at, low = above, self.needs_from(above)
        while count:
            first = self.first(path[count - 1])
            if first <= low:
                break
            count -= 1
            above = path[count - 1].end if count else 0
            if first > above:
                served, at, low = count, above, self.needs_from(above)
        return path[served - 1] if served else None, at

    def _may_go(self, node: Node) -> bool:
        """Whenever there is something that no lease needs."""
        span = node.spans[self.number]
        return span.page_ids != b"" and not span.leases and node.parent is not None

    def score_by(self, policy: Policy) -> Callable[[Node], Score]:
        number = self.number

        def score(node: Node) -> Score:
            return policy.span_score(node, node.spans[number].stamp)

        return score

    def held(self, node: Node) -> Ids:
        return array("i", node.spans[self.number].page_ids)


class Window(SpanComponent):
    """KV of sliding-window attention: of the tokens before a boundary only the last W are needed.

    Configured as `window:W`. What lies further back may be evicted alone.
    """

    name = "window"
    letter = "W"

    def __init__(self, text: str, number: int, page_size: int) -> None:
        super().__init__(text, number, page_size)
        self.tokens = _number(text)
        self._reserve = -(-self.tokens // page_size) * page_size

    def needs_from(self, boundary: int) -> int:
        """The last W tokens, in whole pages."""
        return max(0, boundary - self._reserve)


def _number(text: str) -> int:
    """The number in a text like `window:128`."""
    digits = text.partition(":")[2]
    if not digits.isdecimal() or not int(digits):
        raise InvalidRequest(f"component {text!r}: a number of tokens follows, as in 'window:128'")
    return int(digits)


SPANS: dict[str, Callable[[str, int, int], SpanComponent]] = {"window": Window}

_KV, _STATE = Kv(), State()


class Components:
    """The components of one tree, by their texts; raises `InvalidRequest` for what is unknown.

    `reach` finds the deepest boundary that KV and states can serve, whatever spans say. Nodes of a
    tree without states have none, but `all` lists them.
    """

    def __init__(self, texts: Sequence[str], page_size: int, state_chunk: int) -> None:
        self.texts = tuple(texts)
        self.has_states = "state" in texts
        basic = ("kv", "state") if self.has_states else ("kv",)
        further = self.texts[len(basic) :]
        kinds = [text.partition(":")[0] for text in further]
        if self.texts[: len(basic)] != basic or not set(kinds) <= SPANS.keys():
            raise InvalidRequest(
                f"unknown components {self.texts}; there are kv, then state, then {[*SPANS]}"
            )
        if len(set(kinds)) < len(kinds):
            raise InvalidRequest(f"components {self.texts} name one twice")
        self.spans = tuple(
            SPANS[kind](text, number, page_size)
            for number, (kind, text) in enumerate(zip(kinds, further, strict=True))
        )
        self.grid = lcm(page_size, state_chunk) if self.has_states else page_size
        self.reach = _STATE.reach if self.has_states else _KV.reach
        self.all: tuple[Component, ...] = (_KV, _STATE, *self.spans)

    def deepest(self, walk: Walk, at: int) -> tuple[Node | None, int, str]:
        """The deepest boundary, at or before `at`, that all can serve, where spans limit it, too.

        `at` is one for KV and states. The third is the span that could not serve it, the first one
        if there are several.
        """
        lacking, first = "", at
        anchor, served = self.reach(walk, at, _ending(walk, at))
        while True:
            at = served
            for span in self.spans:
                anchor, served = span.reach(walk, served, _ending(walk, served))
                if served < first and not lacking:
                    lacking = span.name
            if served == at:
                return anchor, at, lacking
            anchor, served = self.reach(walk, served, _ending(walk, served))


def _ending(walk: Walk, at: int) -> int:
    """How many nodes of a walk's path end at or before a position."""
    return bisect_right(walk.path, at, key=_end_of)


def _end_of(node: Node) -> int:
    return node.end


def divide(upper: Node, lower: Node, below: int) -> None:
    """A node's spans after a split: `lower` keeps what lies along the last `below` pages."""
    for over, under in zip(upper.spans, lower.spans, strict=True):
        kept = below * ID_BYTES
        over.leases, over.stamp = under.leases, under.stamp
        if len(under.page_ids) > kept:
            over.page_ids, under.page_ids = under.page_ids[:-kept], under.page_ids[-kept:]


def can_join(upper: Node, lower: Node, below: int) -> bool:
    """Whether two nodes' spans can be those of one: no gap, and the same leases on both.

    `below` counts the pages along the lower node's edge.
    """
    return all(
        over.leases == under.leases
        and (not over.page_ids or len(under.page_ids) == below * ID_BYTES)
        for over, under in zip(upper.spans, lower.spans, strict=True)
    )


def join(upper: Node, lower: Node) -> None:
    """The lower node's spans become those of both."""
    for over, under in zip(upper.spans, lower.spans, strict=True):
        under.page_ids = over.page_ids + under.page_ids
        under.stamp = max(over.stamp, under.stamp)


def new_spans(count: int) -> tuple[Span, ...]:
    """The spans of a new node."""
    return tuple(Span() for _ in range(count))
