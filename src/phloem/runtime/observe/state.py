"""The state of a cache as a value: of a live one, or as rebuilt from events. Equal when equal."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

from phloem.actors.actions import TREE, Component
from phloem.actors.ledger import Ledger
from phloem.actors.places import FREE, PARKED
from phloem.runtime.core import Core

__all__ = ["CacheState", "LeaseState", "NodeState", "RootState", "live_state", "runs_of"]


class RootState(msgspec.Struct, frozen=True):
    """The tree of a namespace. `marks`: content that is part of the namespace, in hex."""

    node: int
    namespace: tuple[str, str]
    marks: str


class NodeState(msgspec.Struct, frozen=True):
    """A node, from token `start` to `end`; `pages` along its edge, `state`: a slot, or 0.

    Those are on the device; `host_pages` and `host_state` on the host. `spans` has the pages of
    each span component, along the last part of the edge.
    """

    id: int
    parent: int
    start: int
    end: int
    pages: list[int]
    state: int
    host_pages: list[int] = []
    host_state: int = 0
    spans: dict[str, list[int]] = {}


class LeaseState(msgspec.Struct, frozen=True):
    """A live lease; `state`: it protects the state at the boundary, too."""

    id: int
    owner: str
    node: int
    boundary: int
    state: bool


class CacheState(msgspec.Struct, frozen=True):
    """Tree, leases, pools and what is under way.

    `leases` are those of callers; what a copy protects while it is made is not among them. `pools`
    has for each pool (`kv`, `state`, span components by name, and with a host tier `host_kv`,
    `host_state`) the owners of its places as runs `(owner, count)`, from place 1 on; an owner is
    `free`, `parked`, `tree` or `grant of NAME`.
    """

    generation: int
    roots: list[RootState]
    nodes: list[NodeState]
    leases: list[LeaseState]
    pools: dict[str, list[tuple[str, int]]]
    copies: list[int]
    waiting: int
    requests: list[str]


def runs_of(owners: Iterable[str]) -> list[tuple[str, int]]:
    """`(owner, count)` for each run of equal owners."""
    return [(owner, sum(1 for _ in run)) for owner, run in groupby(owners)]


def live_state(core: Core) -> CacheState:
    """What a runtime looks like now, between two turns."""
    tree = core.tree
    roots = [
        RootState(root.id, (adapter, salt), marks.hex())
        for (adapter, salt, marks), root in tree.radix.roots.items()
    ]
    nodes: list[NodeState] = []
    for node in tree.radix:
        assert node.parent is not None
        part = node.host
        nodes.append(
            NodeState(
                node.id,
                node.parent.id,
                node.parent.end,
                node.end,
                node.pages.tolist(),
                node.state,
                [] if part is None else array("i", part.page_ids).tolist(),
                0 if part is None else part.state,
                {
                    span.name: held.tolist()
                    for span in sorted(tree.spans, key=lambda one: one.name)
                    if (held := span.held(node))
                },
            )
        )
    holds = set(tree.holds())
    leases = [
        LeaseState(lease.id, lease.owner, lease.anchor.id, lease.anchor.end, lease.has_state)
        for lease in tree.leases.live.values()
        if lease not in holds
    ]
    pools = {
        "kv": runs_of(_owners(core.ledger, "kv")),
        "state": runs_of(_owners(core.ledger, "state")),
    }
    for pool in core.ledger.spans:
        pools[pool.component] = runs_of(_owners(core.ledger, pool.component))
    if core.host_ledger is not None:
        pools["host_kv"] = runs_of(_owners(core.host_ledger, "kv"))
        pools["host_state"] = runs_of(_owners(core.host_ledger, "state"))
    return CacheState(
        generation=tree.generation,
        roots=sorted(roots, key=lambda root: root.node),
        nodes=sorted(nodes, key=lambda node: node.id),
        leases=sorted(leases, key=lambda lease: lease.id),
        pools=pools,
        copies=sorted(core.transfer.operations()),
        waiting=sum(message.wait for message in core.allocator.queue()),
        requests=sorted(core.requests),
    )


def _owners(ledger: Ledger, component: Component) -> Iterator[str]:
    pool = ledger.pool(component)
    names = {FREE: "free", PARKED: "parked", TREE: "tree"}
    for place in range(1, pool.size + 1):
        owner = pool.owner_of(place)
        name = names.get(owner)
        yield name if name is not None else f"grant of {ledger.accounts[owner].owner}"
