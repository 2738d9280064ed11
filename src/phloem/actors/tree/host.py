"""The host tier of a tree: which copies there are, which have to stay, and which may go first.

A copy whose device twin is present costs nothing but a copy when it goes, so it goes first, and of
those the one whose device copy is furthest from eviction. The others go least recently used first.
No node's KV goes while a child has KV on the host, or on its way there.

Host KV has to stay while it is the only copy and protected, while its device twin is leaving, and
while the KV of a child has to stay or is on its way: `HostPart.pins` counts these reasons, so that
the totals are exact.
"""

from __future__ import annotations

from collections.abc import Callable

from phloem.actors.tree.eviction import CandidateIndex, Remains
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, HostPart, Node
from phloem.actors.tree.policies import Score
from phloem.actors.tree.residency import check_change

__all__ = ["HostTier", "NewIndex", "has_or_awaits_kv", "host_kv_may_go", "part_of"]

_ONLY_COPY = 1 << 64  # above every score of a copy with a twin

NewIndex = Callable[[int, Callable[[Node], Score], Callable[[Node], bool]], CandidateIndex]


def part_of(node: Node) -> HostPart:
    """The node's part in the host tier, made if need be."""
    part = node.host
    if part is None:
        part = node.host = HostPart()
    return part


def has_or_awaits_kv(part: HostPart) -> bool:
    """Whether KV is on the host or on its way there."""
    return bool(part.page_ids) or part.kv_backup > 0


def _tidy(node: Node) -> None:
    if node.host is not None and node.host.empty:
        node.host = None


def _kv_score(node: Node) -> Score:
    return _ONLY_COPY - 1 - node.stamp if node.page_ids else _ONLY_COPY + node.stamp


def _state_score(node: Node) -> Score:
    return _ONLY_COPY - 1 - node.state_stamp if node.state else _ONLY_COPY + node.state_stamp


def host_kv_may_go(node: Node) -> bool:
    """Whether the node's host KV may go: nothing below it has any, and no pin keeps it."""
    part = node.host
    return (
        part is not None
        and bool(part.page_ids)
        and not part.kv_children
        and not part.pins
        and node.parent is not None
    )


def _state_may_go(node: Node) -> bool:
    part = node.host
    return (
        part is not None
        and part.state != NO_SLOT
        and not _state_pinned(node, part)
        and node.parent is not None
    )


def _state_pinned(node: Node, part: HostPart) -> bool:
    """Whether a host state has to stay: its twin is leaving, or it has none and is protected."""
    return part.leaving if node.state != NO_SLOT else node.state_leases > 0


class HostTier:
    """Copies on the host, their totals and candidates; also what is leaving the device for it."""

    def __init__(
        self, new_index: NewIndex, device_kv: CandidateIndex, device_states: CandidateIndex
    ) -> None:
        self._device_kv = device_kv
        self._device_states = device_states
        self.kv_index = new_index(4, _kv_score, host_kv_may_go)
        self.state_index = new_index(8, _state_score, _state_may_go)
        self.clear()

    def clear(self) -> Remains:
        """Forget everything: the tree was reset. To let go of what is returned takes long."""
        self.pages = 0
        self.pages_pinned = 0
        self.states = 0
        self.states_pinned = 0
        self.pages_leaving = 0
        self.states_leaving = 0
        self.stayed = False  # something that was to leave: who waits for its room has to look again
        return self.kv_index.clear() + self.state_index.clear()

    def shrink(self, nodes: int) -> None:
        """Sweep the indexes when they have many dead entries."""
        self.kv_index.shrink(nodes)
        self.state_index.shrink(self.states)

    # -- KV ------------------------------------------------------------------------------------

    def await_kv(self, node: Node, operation: int) -> None:
        """KV is on its way to the host."""
        check_change(node, "kv", "host", "arriving")
        part_of(node).kv_backup = operation
        self._child_came(node)

    def put_kv(self, node: Node, page_ids: bytes) -> None:
        """The KV that was on its way is there."""
        check_change(node, "kv", "host", "present")
        part = part_of(node)
        assert part.kv_backup
        part.kv_backup = 0
        part.page_ids = page_ids
        count = len(page_ids) // ID_BYTES
        self.pages += count
        part.pins += part.leaving
        if part.pins:
            self.pages_pinned += count
        else:
            self._unpin_parent(node)
            self.kv_index.push(node)

    def forget_kv(self, node: Node) -> None:
        """The KV that was on its way will not come."""
        check_change(node, "kv", "host", "absent")
        part = part_of(node)
        part.kv_backup = 0
        self._unpin_parent(node)
        self._child_went(node)
        _tidy(node)

    def take_kv(self, node: Node) -> bytes:
        """The host KV goes; its page ids."""
        check_change(node, "kv", "host", "absent")
        part = part_of(node)
        assert not part.pins and not part.kv_children, f"host KV of {node.id} has to stay"
        taken, part.page_ids = part.page_ids, b""
        self.pages -= len(taken) // ID_BYTES
        self._child_went(node)
        _tidy(node)
        return taken

    # -- states --------------------------------------------------------------------------------

    def put_state(self, node: Node, slot: int) -> None:
        """The state that was on its way is there."""
        check_change(node, "state", "host", "present")
        part = part_of(node)
        part.state_backup = 0
        part.state = slot
        self.states += 1
        if _state_pinned(node, part):
            self.states_pinned += 1
        else:
            self.state_index.push(node)

    def forget_state(self, node: Node) -> None:
        """The state that was on its way will not come."""
        check_change(node, "state", "host", "absent")
        part_of(node).state_backup = 0
        _tidy(node)

    def take_state(self, node: Node) -> int:
        """The host state goes; its slot."""
        check_change(node, "state", "host", "absent")
        part = part_of(node)
        assert not _state_pinned(node, part), f"host state of {node.id} has to stay"
        slot, part.state = part.state, NO_SLOT
        self.states -= 1
        _tidy(node)
        return slot

    # -- the device side of nodes that have a part here ------------------------------------------

    def leave(self, node: Node) -> None:
        """The node's device KV goes as soon as the host has it; until then it can be used."""
        check_change(node, "kv", "device", "leaving")
        part, parent = part_of(node), node.parent
        assert parent is not None
        part.leaving = True
        if part.state != NO_SLOT and node.state != NO_SLOT:
            self.states_pinned += 1
        parent.gone_children += 1
        if parent.parent is not None:
            part_of(parent).leaving_children += 1
        self.pages_leaving += node.page_count
        if part.page_ids:
            self._pin(node)

    def stay(self, node: Node) -> None:
        """Keep on the device what was leaving at `node`, and at those above it that were leaving.

        For when it is used again, or cannot be copied. What is above cannot go before it.
        """
        at: Node | None = node
        while at is not None and at.host is not None and at.host.leaving:
            check_change(at, "kv", "device", "present")
            self.stayed = True
            if at.host.state_leaving:
                self.stay_state(at)
            self.left(at)
            self._device_kv.push(at)
            at = at.parent

    def left(self, node: Node) -> None:
        """The node's device KV is leaving no longer, whether it has gone or stays."""
        part, parent = part_of(node), node.parent
        assert parent is not None and part.leaving
        part.leaving = False
        if part.state != NO_SLOT and node.state != NO_SLOT:
            self.states_pinned -= 1
            self.state_index.push(node)
        parent.gone_children -= 1
        if parent.parent is not None:
            part_of(parent).leaving_children -= 1
            _tidy(parent)
        self.pages_leaving -= node.page_count
        if part.page_ids:
            self._unpin(node)
        _tidy(node)

    def leave_state(self, node: Node) -> None:
        """The node's device state goes as soon as the host has it."""
        check_change(node, "state", "device", "leaving")
        part_of(node).state_leaving = True
        self.states_leaving += 1

    def stay_state(self, node: Node) -> None:
        """The state that was leaving stays."""
        check_change(node, "state", "device", "present")
        part_of(node).state_leaving = False
        self.states_leaving -= 1
        self.stayed = True
        _tidy(node)
        self._device_states.push(node)

    def kv_gone(self, node: Node) -> None:
        """The node's device KV has gone and its copy is the only one; it is not protected."""
        self.kv_index.push(node)

    def kv_came(self, node: Node, *, protected: bool) -> None:
        """The node has KV on the device again, beside its copy."""
        part = node.host
        if part is None or not part.page_ids:
            return
        if protected:
            self._unpin(node)
        self.kv_index.lower(node)

    def state_came(self, node: Node) -> None:
        """The node has a state on the device, perhaps beside its copy."""
        part = node.host
        if part is not None and part.state != NO_SLOT:
            if node.state_leases:
                self.states_pinned -= 1
                self.state_index.push(node)
            else:
                self.state_index.lower(node)

    # -- what leases change ----------------------------------------------------------------------

    def protected(self, node: Node) -> None:
        """A node with a part here has become protected."""
        if node.page_ids:
            self.stay(node)
        else:
            self._pin(node)

    def unprotected(self, node: Node) -> None:
        """A node with a part here is protected no longer."""
        if not node.page_ids:
            self._unpin(node)

    def state_protected(self, node: Node) -> None:
        """The state of a node with a part here has become protected."""
        part = part_of(node)
        if part.state_leaving:
            self.stay_state(node)
        elif node.state == NO_SLOT and part.state != NO_SLOT:
            self.states_pinned += 1

    def state_unprotected(self, node: Node) -> None:
        """The state of a node with a part here is protected no longer."""
        part = part_of(node)
        if node.state == NO_SLOT and part.state != NO_SLOT:
            self.states_pinned -= 1
            self.state_index.push(node)

    # -- pins ------------------------------------------------------------------------------------

    def _pin(self, node: Node) -> None:
        """One more reason for the node's host KV to stay; as far up as that makes a difference."""
        while node.parent is not None:
            part = part_of(node)
            part.pins += 1
            if part.pins > 1 or not part.page_ids:
                return
            self.pages_pinned += len(part.page_ids) // ID_BYTES
            node = node.parent

    def _unpin(self, node: Node) -> None:
        while node.parent is not None:
            part = part_of(node)
            part.pins -= 1
            assert part.pins >= 0
            if part.pins:
                return
            if not part.page_ids:
                _tidy(node)
                return
            self.pages_pinned -= len(part.page_ids) // ID_BYTES
            if not part.kv_children:
                self.kv_index.push(node)
            node = node.parent

    def _unpin_parent(self, node: Node) -> None:
        if node.parent is not None:
            self._unpin(node.parent)

    def _child_came(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.parent is not None:
            part_of(parent).kv_children += 1
            self._pin(parent)

    def _child_went(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.parent is not None:
            part = part_of(parent)
            part.kv_children -= 1
            assert part.kv_children >= 0
            if not part.kv_children and part.page_ids and not part.pins:
                self.kv_index.push(parent)
            _tidy(parent)
