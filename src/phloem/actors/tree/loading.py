"""The life of operations: planning loads, taking the room they asked for, ending copies."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from phloem.actors.actions import (
    BackupToHost,
    FreeDeviceSlots,
    FreeHostSlots,
    Ids,
    LoadToDevice,
    Places,
    Reserve,
)
from phloem.actors.tree.backing import Abandoned
from phloem.actors.tree.choosing import Load
from phloem.actors.tree.components import kv_may_go, state_may_go
from phloem.actors.tree.core import Actions
from phloem.actors.tree.host import part_of
from phloem.actors.tree.host_shedding import HostSheddingTree
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT, HostPart, Node
from phloem.actors.tree.operations import Operation
from phloem.actors.tree.residency import check_change
from phloem.actors.tree.results import Ended, Kept
from phloem.actors.tree.shedding import Tally
from phloem.errors import InvalidRequest

__all__ = ["LoadingTree"]


class _Ending(NamedTuple):
    """What the end of operations led to, gathered while it is worked out.

    Numbers of those that ended, what was published, leases whose data are there, leases that
    waited in vain, and the actions to carry out.
    """

    operations: list[int]
    kept: list[Kept]
    ready: list[int]
    waited: list[Lease]
    actions: Actions

    def add(self, abandoned: Abandoned) -> None:
        """Add operations that were abandoned, and the leases that waited for them."""
        self.operations.extend(abandoned.operations)
        self.waited.extend(abandoned.waited)
        self.actions.extend(abandoned.actions)


class LoadingTree(HostSheddingTree):
    """A tree whose operations are carried out; `Tree` adds leases and inserts."""

    def plan(self, lease: Lease) -> tuple[int, Actions]:
        """Plan the operations that a lease just taken or moved calls for.

        First the load of what its boundary lacks on the device, which joins what is on its way
        already; then the backups that are due on its path. Returns the operation that the lease
        waits for (`Lease.load`; 0: it stands on the device), which also waits for those that it
        requires.
        """
        self.check_lease(lease)
        actions: Actions = []
        if self.host is not None:
            if not lease.load and self.host_closed:
                self._do_without(lease)
            elif not lease.load:
                self._plan_load(lease, actions)
            self._plan_backups(lease.anchor, actions)
        return lease.load, actions

    def loadable(self, lease: Lease) -> list[Load]:
        """The boundaries on a lease's path that need a load, the deepest first.

        Empty while a load over the path is on its way: then there is nothing to choose.
        """
        found: list[Load] = []
        missing, at = 0, lease.anchor
        below: list[tuple[Node, int]] = []
        while at.parent is not None:
            part = at.host
            if part is not None and (part.kv_load or part.state_load):
                return []
            if not at.page_ids:
                missing += len(at.edge) // self.radix.page_bytes
            below.append((at, missing))
            at = at.parent
        for node, so_far in below:
            part = node.host
            if not self.has_states:
                return [Load(node.end, missing, 0)] if missing else []
            if node.state != NO_SLOT:
                break
            if part is not None and part.state != NO_SLOT:
                own = 0 if node.page_ids else len(node.edge) // self.radix.page_bytes
                pages = missing - so_far + own
                found.append(Load(node.end, pages, 1))
        return found

    def settle(self, lease: Lease, boundary: int) -> None:
        """Move a lease up to a boundary on its path, since what is below costs more than it saves.

        `boundary` is one of `loadable`, or what the device has; before its load is planned.
        """
        self.check_lease(lease)
        assert not lease.load and boundary <= lease.boundary
        at = lease.anchor
        while at.parent is not None and at.end > boundary:
            at = at.parent
        self.leases.move(lease, at, 0, with_state=lease.has_state)

    def _do_without(self, lease: Lease) -> None:
        """A lease on what is only on the host moves up to what the device has."""
        anchor = lease.anchor
        there = anchor.state != NO_SLOT if lease.has_state else anchor.page_ids != b""
        if anchor.parent is not None and not there:
            lease.why_not = "tier_failed"
            self._fall_back(lease)

    def _plan_load(self, lease: Lease, actions: Actions) -> None:
        anchor = lease.anchor
        missing: list[Node] = []
        at = anchor
        while at.parent is not None and not at.page_ids and not part_of(at).kv_load:
            missing.append(at)
            at = at.parent
        requires = 0 if at.host is None else at.host.kv_load
        part = anchor.host
        if part is None:
            return  # everything is on the device
        state = lease.has_state and anchor.state == NO_SLOT and part.state != NO_SLOT
        if state and part.state_load:
            self._wait(lease, self.operations.live[part.state_load])
        elif missing or state:
            operation = self.operations.plan("load", self.generation, requires)
            for node in reversed(missing):
                check_change(node, "kv", "device", "arriving")
                operation.add(node, len(node.edge) // self.radix.page_bytes)
                part_of(node).kv_load = operation.number
            if state:
                check_change(anchor, "state", "device", "arriving")
                operation.state_node = anchor
                part.state_load = operation.number
            operation.hold = self._hold(operation, anchor)
            self._wait(lease, operation)
            pages, states = operation.pages, operation.states
            actions.append(Reserve(operation.number, "device", pages, states, wait=True))
        elif requires:
            self._wait(lease, self.operations.live[requires])

    def _wait(self, lease: Lease, operation: Operation) -> None:
        lease.load = operation.number
        operation.waiters[lease.id] = lease

    def _leave_load(self, lease: Lease) -> None:
        """A lease waits no longer. A load that nobody waits for is dropped, unless it is copied."""
        operation = self.operations.live.get(lease.load)
        lease.load = 0
        if operation is not None:
            operation.waiters.pop(lease.id, None)
        while (
            operation is not None
            and operation.phase == "planned"
            and not operation.waiters
            and not operation.dependants
        ):
            above = self.operations.live.get(operation.requires)
            self._abandon(operation)
            operation = above

    def loads_of(self, lease: Lease) -> list[int]:
        """The loads that a lease waits for: the last one, and those that it requires."""
        numbers: list[int] = []
        operation = self.operations.live.get(lease.load)
        while operation is not None:
            numbers.append(operation.number)
            operation = self.operations.live.get(operation.requires)
        return numbers

    def state_arriving(self, lease: Lease) -> tuple[int, int]:
        """The device slot that the state at a lease's boundary is on its way to, and its load.

        `NO_SLOT` and 0 when none is on its way, or it is not known yet where to.
        """
        part = lease.anchor.host
        operation = None if part is None else self.operations.live.get(part.state_load)
        if operation is None or operation.slot == NO_SLOT:
            return NO_SLOT, 0
        return operation.slot, operation.number

    # -- answers -------------------------------------------------------------------------------

    def reserved(self, number: int, account: int, pages: Ids, states: Ids) -> Actions:
        """The room that an operation asked for, owned by `account` until its copy has ended.

        Returns its copy, or what gives the room back when it is not wanted any more.
        """
        tier = self.operations.dropped.pop(number, None)
        if tier is not None:
            free = FreeHostSlots if tier == "host" else FreeDeviceSlots
            back: Actions = []
            if pages:
                back.append(free("kv", pages, account))
            if states:
                back.append(free("state", states, account))
            return back
        operation = self._operation(number)
        if operation.phase != "planned":
            raise InvalidRequest(f"{operation} has its room already")
        if len(pages) != operation.pages or len(states) != operation.states:
            raise InvalidRequest(f"{operation} was given {len(pages)} pages, {len(states)} states")
        operation.step("reserved")
        operation.account, operation.page_ids = account, pages
        if states:
            operation.slot = states[0]
        if operation.kind == "backup":
            source = part_of(operation.source)
            if not source.leaving and not source.state_leaving:  # else whoever uses it keeps it
                self._keep_source(operation)
        operation.step("submitted")
        items = self._items(operation)
        copy = BackupToHost if operation.kind == "backup" else LoadToDevice
        return [copy(number, items)]

    def _items(self, operation: Operation) -> tuple[Places, ...]:
        backup = operation.kind == "backup"
        items: list[Places] = []
        if operation.pages:
            runs = [
                piece.node.page_ids if backup else part_of(piece.node).page_ids
                for piece in operation.top_down()
            ]
            items.append(Places("kv", array("i", b"".join(runs)), operation.page_ids))
        node = operation.state_node
        if node is not None:
            source = node.state if backup else part_of(node).state
            items.append(Places("state", array("i", (source,)), array("i", (operation.slot,))))
        return tuple(items)

    def not_reserved(self, number: int) -> tuple[Ended, Actions]:
        """There is no room for an operation.

        Leases that wait for a load move up to the deepest boundary that needs none. What was to
        leave the device behind a backup goes without.
        """
        end = _Ending([], [], [], [], [])
        if self.operations.dropped.pop(number, None) is None:
            operation = self._operation(number)
            if operation.phase != "planned":
                raise InvalidRequest(f"{operation} has its room already")
            self._fail(operation, end, answered=True)
        return self._concluded(end, "refused")

    def give_up(self, number: int) -> tuple[Ended, Actions]:
        """Expect nothing more of a copy that takes too long; nothing if it has ended meanwhile.

        Leases that wait for it fall back, and what was to leave the device behind it stays. The
        copy may still touch its memory: what it reads is protected and its targets are owned until
        `copied` tells its end, and then they go back.
        """
        end = _Ending([], [], [], [], [])
        operation = self.operations.live.get(number)
        expected = operation is not None and (operation.pieces or operation.state_node is not None)
        if operation is None or not expected or operation.phase != "submitted":
            return self._concluded(end)
        if operation.outcome is not None:
            return self._concluded(end)
        self._keep_source(operation)
        end.add(self._abandon(operation))
        return self._concluded(end)

    def close_host(self, closed: bool) -> tuple[Ended, Actions]:
        """While it is closed the host tier is left alone: nothing is loaded or copied there.

        What is planned is given up: leases that wait for such a load fall back. What is being
        copied may yet end well, and protects what it reads until then. So nothing is leaving the
        device while the tier is closed.
        """
        end = _Ending([], [], [], [], [])
        if closed != self.host_closed:
            self.host_closed = closed
            self.radix.version += 1  # matches see less, or more
            for operation in list(self.operations) if closed else ():
                if operation.phase == "planned":
                    end.add(self._abandon(operation))
                elif operation.phase == "submitted":  # and did not end with one that it requires
                    self._keep_source(operation)
        return self._concluded(end)

    def copied(self, number: int, ok: bool, *, pages_ok: int = 0) -> tuple[Ended, Actions]:
        """The copy of an operation has ended; if it failed, its first `pages_ok` pages are good.

        What has arrived is visible from now on, unless what comes before it is still on its way.
        """
        operation = self._operation(number)
        if operation.phase != "submitted" or operation.outcome is not None:
            raise InvalidRequest(f"{operation} is not being copied")
        end = _Ending([], [], [], [], [])
        if not (operation.pieces or operation.state_node):  # given up, by a reset or before
            end.operations.append(number)
            self._give_back(operation, end.actions)
            return self._concluded(end)
        good_pages = min(pages_ok, operation.pages) if operation.kind == "load" else 0
        operation.outcome = operation.pages if ok else good_pages
        operation.good = ok
        waits = operation.requires in self.operations.live and (ok or good_pages > 0)
        ready = [] if waits else [operation]
        while ready:
            each = ready.pop()
            if each.good:
                following = [self.operations.live[one] for one in each.dependants]
                ready.extend(one for one in reversed(following) if one.outcome is not None)
                self._publish(each, end)
            else:
                self._publish_some(each, end)
        return self._concluded(end)

    def _operation(self, number: int) -> Operation:
        operation = self.operations.live.get(number)
        if operation is None:
            raise InvalidRequest(f"operation {number} has ended or never was")
        return operation

    # -- ends ----------------------------------------------------------------------------------

    def _publish(self, operation: Operation, end: _Ending) -> None:
        """Enter all that an operation has copied into the tree, and end the operation."""
        pieces, node = operation.top_down(), operation.state_node
        backup = operation.kind == "backup"
        for piece in pieces:
            self._put_kv(operation, piece.node, operation.ids_of(piece))
        if operation.pages:
            end.kept.append(Kept("kv", operation.target, operation.page_ids, operation.account))
        if node is not None:
            self._put_state(operation, node)
            slots = array("i", (operation.slot,))
            end.kept.append(Kept("state", operation.target, slots, operation.account))
            operation.slot = NO_SLOT
        for lease in operation.waiters.values():
            lease.load = 0
            end.ready.append(lease.id)
        end.operations.append(operation.number)
        self._give_back(operation, end.actions, operation.pages)
        if backup:
            for piece in reversed(pieces):
                self._left(piece.node, end.actions)
            if node is not None and not pieces:
                self._left(node, end.actions)
        self._cap_again(operation, end.actions)

    def _put_kv(self, operation: Operation, node: Node, page_ids: bytes) -> None:
        assert self.host is not None
        if operation.kind == "backup":
            self.host.put_kv(node, page_ids)
        else:
            self.radix.put_kv(node, page_ids)
            part_of(node).kv_load = 0
            self.leases.kv_appeared(node)

    def _put_state(self, operation: Operation, node: Node) -> None:
        assert self.host is not None
        if operation.kind == "backup":
            self.host.put_state(node, operation.slot)
        else:
            check_change(node, "state", "device", "present")
            self.radix.put_state(node, operation.slot)
            part_of(node).state_load = 0
            self.leases.state_appeared(node)

    def _publish_some(self, operation: Operation, end: _Ending) -> None:
        """A copy has failed: leading pages of a load that are good are kept, the rest is not."""
        good = operation.outcome
        assert good is not None
        for node, first, count in operation.top_down():
            if first >= good:
                break
            at = node
            if first + count > good:
                at = self.radix.split(node, (good - first) * self.radix.page_bytes)
            piece = operation.pieces.pop(at.id)
            self._put_kv(operation, at, operation.ids_of(piece))
        if good:
            taken = operation.page_ids[:good]
            end.kept.append(Kept("kv", "device", taken, operation.account))
            operation.page_ids = operation.page_ids[good:]
        self._fail(operation, end)

    def _fail(self, operation: Operation, end: _Ending, *, answered: bool = False) -> None:
        """End an operation that will bring nothing more.

        What was to leave the device once a backup had copied it leaves without a copy.
        `answered`: see `_abandon`.
        """
        nodes = [piece.node for piece in operation.top_down() if part_of(piece.node).leaving]
        node = operation.state_node
        state_node = node if node is not None and part_of(node).state_leaving else None
        end.add(self._abandon(operation, answered=answered))
        if nodes or state_node is not None:
            end.actions.extend(self._go_without(nodes, state_node))

    def _go_without(self, nodes: list[Node], state_node: Node | None) -> Actions:
        """Evict what waited for a copy that will not be made, where it may go."""
        gone, host = Tally("", []), self.host
        assert host is not None
        for node in reversed(nodes):
            part = node.host
            if kv_may_go(node) and (part is None or not self._is_held_by_copies(part)):
                self._lose_for_good(host, node, gone)
        if state_node is not None and state_may_go(state_node):
            self._drop_state(state_node, gone.actions)
        gone.settle()
        return gone.actions

    def _is_held_by_copies(self, part: HostPart) -> bool:
        """Whether a copy still reads the node, or something below it that is leaving."""
        return (
            part.leaving_children > 0
            or self._is_read_by(part.kv_backup)
            or self._is_read_by(part.state_backup)
        )

    def _is_read_by(self, number: int) -> bool:
        """Whether a backup is being copied; what was to leave behind it has no other protection."""
        backup = self.operations.live.get(number)
        return backup is not None and backup.phase == "submitted"

    def _concluded(self, end: _Ending, why: str = "tier_failed") -> tuple[Ended, Actions]:
        """Move leases that waited in vain to where they can be read, and sum up.

        `why` is what their holders read in `Match.why_not`.
        """
        for lease in end.waited:
            lease.why_not = why
            self._fall_back(lease)
        moved = tuple(lease.id for lease in end.waited)
        return Ended(tuple(end.operations), tuple(end.kept), tuple(end.ready), moved), end.actions

    def _fall_back(self, lease: Lease) -> None:
        """Move a lease up to the deepest boundary that is on the device, or on its way there."""
        at = lease.anchor
        coming = 0
        while at.parent is not None:
            part = at.host
            if self.has_states:
                if at.state != NO_SLOT:
                    break
                coming = 0 if part is None else part.state_load
            else:
                if at.page_ids:
                    break
                coming = 0 if part is None else part.kv_load
            if coming:
                break
            at = at.parent
        self.leases.move(lease, at, 0, with_state=lease.has_state)
        if coming:
            self._wait(lease, self.operations.live[coming])
