"""The node of the radix tree: plain data, no behaviour.

Nodes are not seen by the garbage collector (`gc=False`): a million of them would otherwise cost a
pause of a second. The price is that the links between parent and child form cycles that only the
tree can cut; `Radix.remove` and `Radix.sweep` do.
"""

from __future__ import annotations

from array import array

import msgspec

from phloem.actors.actions import Ids

__all__ = [
    "HOST_SPLIT_RULES",
    "ID_BYTES",
    "NO_MARK",
    "NO_SLOT",
    "SPLIT_RULES",
    "SPAN_SPLIT_RULES",
    "HostPart",
    "Node",
    "Span",
    "Walk",
    "state_anywhere",
]

ID_BYTES = 4  # of a page id
NO_MARK = -1  # no checksum of the prefix has been asked for yet
NO_SLOT = 0  # slot 0 of a pool is never granted, so it can stand for "none"


class Span(msgspec.Struct, gc=False, eq=False):
    """The part of a node that is of one span component: device pages of the end of its edge.

    `leases` counts those that need some of it; `stamp` is the latest use of it.
    """

    page_ids: bytes = b""
    leases: int = 0
    stamp: int = 0


class HostPart(msgspec.Struct, gc=False, eq=False):
    """The part of a node that concerns the host tier; nodes without any have none.

    `page_ids` and `state` are its copies there, `b""` and `NO_SLOT` when there are none. The other
    numbers name the operations that bring data to the host (backups) or to the device (loads); 0:
    none. `pins` counts the reasons why the node's host KV has to stay: each child whose host KV is
    on its way or has to stay itself, and its own: it is the only copy and protected, or the device
    copy is about to go.
    """

    page_ids: bytes = b""
    state: int = NO_SLOT
    kv_backup: int = 0
    state_backup: int = 0
    kv_load: int = 0
    state_load: int = 0
    leaving: bool = False  # its KV goes from the device once the copy has been made
    state_leaving: bool = False
    kv_children: int = 0  # children with KV on the host or on its way there
    leaving_children: int = 0
    pins: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing would be lost without it."""
        return not (
            self.page_ids
            or self.state
            or self.kv_backup
            or self.state_backup
            or self.kv_load
            or self.state_load
            or self.leaving
            or self.state_leaving
            or self.kv_children
            or self.leaving_children
            or self.pins
        )


class Node(msgspec.Struct, gc=False, eq=False):
    """One node; its edge label is the run of whole pages between its parent's end and its own.

    `end` is the token position at the end of the edge. `page_ids` are the device page ids along the
    edge, a 32-bit word for each page: bytes, which the garbage collector does not look at. `state`
    is the device slot of the recurrent state that is true at exactly `end`, or `NO_SLOT`. A node
    whose KV is in the host tier only has no `page_ids`. KV is on the device along a top segment of
    each path, and a state only where its KV is.
    """

    id: int
    parent: Node | None
    edge: bytes
    end: int
    page_ids: bytes
    state: int = NO_SLOT
    children: dict[bytes, Node] | None = None  # by first page; None when there are none
    only: Node | None = None  # the child, where there is just one: a walk needs no table then
    stamp: int = 0  # latest use of any key through the node, as far as it was passed up
    state_stamp: int = 0  # latest use of the state
    born: int = 0  # when the data were first cached
    hits: int = 1
    turn: int = 0  # how many requests in a row went on from one another, up to the one that made it
    rests: int = 0  # since when, for a policy that learns when it is used again; 0: it does not
    departures: int = 0  # requests that left the ways of others here, since `departures_since`
    departures_since: int = 0
    prompt_end: int = 0  # where the prompt ended of the request that made it
    priority: int = 0  # 0 to 100
    keep_until: int = 0  # the time when the priority ends; 0: it does not
    sessions: int = 0  # open sessions whose latest boundary is here
    leases: int = 0  # leases anchored here
    state_leases: int = 0  # of those, the ones that took the state
    protected_children: int = 0  # children that are protected, and counted here
    counted: bool = False  # among its parent's
    mark: int = NO_MARK  # namespace and checksum of the prefix up to the node's end
    queued: int = 0  # one bit for each candidate index that has an entry for the node
    gone_children: int = 0  # children whose KV is not on the device, or is leaving it
    host: HostPart | None = None
    spans: tuple[Span, ...] = ()  # one for each span component of the tree

    @property
    def page_count(self) -> int:
        """Device pages that the node holds."""
        return len(self.page_ids) // ID_BYTES

    @property
    def pages(self) -> Ids:
        """The device page ids along the edge, in order; a copy."""
        return array("i", self.page_ids)


# What a split does with each field; a test fails when a field is missing here. "divide": by
# position; "lower": stays with the lower part, the upper starts empty; "copy": both have it;
# "link": set by the split itself.
SPLIT_RULES: dict[str, str] = {
    "id": "link",
    "parent": "link",
    "edge": "divide",
    "end": "divide",
    "page_ids": "divide",
    "state": "lower",
    "children": "link",
    "only": "link",
    "stamp": "copy",
    "state_stamp": "lower",
    "born": "copy",
    "hits": "copy",
    "turn": "copy",
    "rests": "lower",
    "departures": "lower",
    "departures_since": "lower",
    "prompt_end": "copy",
    "priority": "copy",
    "keep_until": "copy",
    "sessions": "lower",
    "leases": "lower",
    "state_leases": "lower",
    "protected_children": "link",
    "counted": "copy",
    "mark": "lower",
    "queued": "lower",
    "gone_children": "link",
    "host": "link",
    "spans": "link",
}
SPAN_SPLIT_RULES: dict[str, str] = {"page_ids": "divide", "leases": "copy", "stamp": "copy"}
HOST_SPLIT_RULES: dict[str, str] = {
    "page_ids": "divide",
    "state": "lower",
    "kv_backup": "copy",
    "state_backup": "lower",
    "kv_load": "copy",
    "state_load": "lower",
    "leaving": "copy",
    "state_leaving": "lower",
    "kv_children": "link",
    "leaving_children": "link",
    "pins": "link",
}


class Walk(msgspec.Struct, frozen=True, gc=False):
    """How far a key leads: whole nodes along `path`, then `inside` bytes of `partial`'s edge."""

    path: list[Node]
    offset: int  # bytes of the key covered by `path`
    partial: Node | None
    inside: int


def state_anywhere(node: Node) -> bool:
    """Whether a tier has the state at the node's end."""
    return node.state != NO_SLOT or (node.host is not None and node.host.state != NO_SLOT)
