"""Where a node's data are: absent, arriving, present or leaving, for each component and tier.

The residency is read from the node, never kept twice. Whatever changes it says so first, and a
change that makes no sense is a bug of the tree.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from phloem.actors.actions import Component, Tier
from phloem.actors.tree.node import NO_SLOT, Node

__all__ = ["CHANGES", "Residency", "check_change", "residency"]

Residency: TypeAlias = Literal["absent", "arriving", "present", "leaving"]

# What each may become. A tier's data are visible when their copy has ended, never before.
CHANGES: dict[Residency, frozenset[Residency]] = {
    "absent": frozenset(("arriving", "present")),
    "arriving": frozenset(("present", "absent")),
    "present": frozenset(("leaving", "absent")),
    "leaving": frozenset(("present", "absent")),
}


def residency(node: Node, component: Component, tier: Tier) -> Residency:
    """Where the node stands with one component in one tier."""
    part = node.host
    if tier == "host":
        if part is None:
            return "absent"
        if component == "kv":
            return _read(bool(part.page_ids), part.kv_backup, leaving=False)
        return _read(part.state != NO_SLOT, part.state_backup, leaving=False)
    if component == "kv":
        if part is None:
            return "present" if node.page_ids else "absent"
        return _read(bool(node.page_ids), part.kv_load, leaving=part.leaving)
    if part is None:
        return "present" if node.state != NO_SLOT else "absent"
    return _read(node.state != NO_SLOT, part.state_load, leaving=part.state_leaving)


def _read(there: bool, arriving: int, *, leaving: bool) -> Residency:
    if there:
        return "leaving" if leaving else "present"
    return "arriving" if arriving else "absent"


def check_change(node: Node, component: Component, tier: Tier, after: Residency) -> None:
    """Raise `AssertionError` when the node's data cannot become `after` from where they are."""
    before = residency(node, component, tier)
    if after not in CHANGES[before]:
        raise AssertionError(
            f"{component} of node {node.id} on the {tier}: from {before} to {after}"
        )
