"""Backups: which data of the tree are copied to the host, and when."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from phloem.actors.actions import EvictExcessPathStates, FreeDeviceSlots, FreeHostSlots, Reserve
from phloem.actors.tree.core import BACKUP_HITS, Actions
from phloem.actors.tree.host import HostTier, has_or_awaits_kv, part_of
from phloem.actors.tree.keys import TokenKey
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.operations import Operation
from phloem.actors.tree.residency import check_change
from phloem.actors.tree.spans import SpanTree

__all__ = ["BackingTree"]

_NO_KEY = TokenKey(b"")
_CLIMB_MAX = 256  # nodes without a copy that one turn looks at above another


class Abandoned(NamedTuple):
    """Operations that have ended without effect, and who waited for one.

    `actions` give back the targets of those whose copy had ended already.
    """

    operations: list[int]
    waited: list[Lease]
    actions: Actions


class BackingTree(SpanTree):
    """A tree that plans backups, and forgets plans."""

    def _plan_backups(self, node: Node, actions: Actions) -> None:
        """Copy what is due on the path to `node`, root first and without gaps."""
        due = BACKUP_HITS[self.write_policy]
        if self.host is None or not due or self.host_closed:
            return
        chain: list[Node] = []
        at = node
        while at.parent is not None and (at.host is None or not has_or_awaits_kv(at.host)):
            chain.append(at)
            at = at.parent
            if len(chain) > _CLIMB_MAX:
                return
        for each in reversed(chain):
            if each.hits < due:
                return
            self._plan_backup(self.host, each, actions)
        if not chain and node.parent is not None and node.hits >= due:
            self._plan_backup(self.host, node, actions)

    def _plan_backup(
        self, host: HostTier, node: Node, actions: Actions, *, state_only: bool = False
    ) -> None:
        """Copy what the host lacks of a node and what is not on its way there already."""
        part, parent = node.host, node.parent
        kv = not state_only and bool(node.page_ids) and (part is None or not has_or_awaits_kv(part))
        state = node.state != NO_SLOT and (part is None or not (part.state or part.state_backup))
        if not kv and not state:
            return
        assert parent is not None
        # Under write-back children go first, so that nothing above has to be there.
        follows = kv and parent.host is not None and BACKUP_HITS[self.write_policy] > 0
        requires = parent.host.kv_backup if follows and parent.host is not None else 0
        operation = self.operations.plan("backup", self.generation, requires)
        if kv:
            operation.add(node, node.page_count)
            host.await_kv(node, operation.number)
        if state:
            check_change(node, "state", "host", "arriving")
            operation.state_node = node
            part_of(node).state_backup = operation.number
        actions.append(Reserve(operation.number, "host", operation.pages, operation.states))

    def _abandon(self, operation: Operation, *, answered: bool = False) -> Abandoned:
        """Give up an operation, and those that require it: nothing they bring is published.

        What is being copied keeps its targets and protects what it reads until its end. `answered`:
        no answer to its reservation is on its way.
        """
        ended: list[int] = []
        waited: list[Lease] = []
        actions: Actions = []
        stack = [operation]
        while stack:
            each = stack.pop()
            stack.extend(self.operations.live[number] for number in each.dependants)
            self._forget(each)
            waited.extend(each.waiters.values())
            for lease in each.waiters.values():
                lease.load = 0
            each.waiters.clear()
            self._cap_again(each, actions)
            if each.phase == "planned":
                self.operations.end(each, answered=answered and each is operation)
                self._let_go(each)
                ended.append(each.number)
            elif each.outcome is not None:
                self._give_back(each, actions)
                ended.append(each.number)
        return Abandoned(ended, waited, actions)

    def _cap_again(self, operation: Operation, actions: Actions) -> None:
        """Apply the cap for each path where a backup that is over now had kept states from it."""
        for tail in operation.spared:
            if tail.parent is not None:
                self._named[tail.id] = tail
                actions.append(EvictExcessPathStates(tail.id, self.generation))
        operation.spared.clear()

    def _forget(self, operation: Operation) -> None:
        """Have the nodes of an operation expect none of its data any more.

        What was to leave the device behind a backup stays there.
        """
        host = self.host
        assert host is not None
        backup = operation.kind == "backup"
        for node, _, _ in operation.pieces.values():
            part = part_of(node)
            if not backup:
                check_change(node, "kv", "device", "absent")
                part.kv_load = 0
            else:
                host.stay(node)
                host.forget_kv(node)
        operation.pieces.clear()
        at = operation.state_node
        if at is not None:
            if not backup:
                check_change(at, "state", "device", "absent")
                part_of(at).state_load = 0
            else:
                host.stay(at)
                if part_of(at).state_leaving:
                    host.stay_state(at)
                host.forget_state(at)
            operation.state_node = None

    def _give_back(self, operation: Operation, actions: Actions, pages_kept: int = 0) -> None:
        """End an operation whose copy has ended; what the tree has not taken goes back.

        The tree has taken the first `pages_kept` pages, and the state if there is no slot.
        """
        free = FreeHostSlots if operation.target == "host" else FreeDeviceSlots
        if pages_kept < len(operation.page_ids):
            actions.append(free("kv", operation.page_ids[pages_kept:], operation.account))
        if operation.slot != NO_SLOT:
            actions.append(free("state", array("i", (operation.slot,)), operation.account))
        self.operations.end(operation)
        self._let_go(operation)

    def _hold(self, operation: Operation, anchor: Node) -> Lease:
        """Protect what an operation reads, and the path to it."""
        with_state = operation.state_node is anchor
        owner = f"op {operation.number}"
        return self.leases.take(anchor, _NO_KEY, owner, operation.generation, with_state=with_state)

    def _keep_source(self, operation: Operation) -> None:
        """Protect what a backup in flight reads until its end, if nothing but its leaving did."""
        reads = operation.pieces or operation.state_node is not None
        if operation.kind == "backup" and operation.hold is None and reads:
            operation.hold = self._hold(operation, operation.source)

    def _let_go(self, operation: Operation) -> None:
        """End the lease by which an operation protects what it reads, if it has one."""
        lease = operation.hold
        if lease is None:
            return
        operation.hold = None
        former = lease.generation != self.generation
        self.leases.end(lease, 0, former=former)
        if former:
            self.former.released(lease.anchor)
        elif lease.anchor.parent is None:
            self.radix.drop_root_if_empty(lease.anchor)
