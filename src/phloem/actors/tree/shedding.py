"""How the tree gives data up: eviction, the cap for each path, reset."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from phloem.actors.actions import TREE, EvictExcessPathStates, FreeDeviceSlots, FreeHostSlots, Ids
from phloem.actors.tree.backing import BackingTree
from phloem.actors.tree.components import SpanComponent, kv_may_go
from phloem.actors.tree.core import Actions
from phloem.actors.tree.ghosts import mark_after, mark_of
from phloem.actors.tree.host import HostTier, part_of
from phloem.actors.tree.node import ID_BYTES, NO_MARK, NO_SLOT, Node
from phloem.actors.tree.policies import KEEP, Policy, Score, policy_of
from phloem.actors.tree.results import Evicted
from phloem.errors import InvalidRequest

__all__ = ["SheddingTree", "Tally"]


class Tally(msgspec.Struct, gc=False):
    """What an eviction has freed so far, counted while it runs. `by` names who asked for it.

    `pages` and `states` count all; of these, `pages_promised` and `states_promised` are not free
    yet: they are once copies to the host have ended.
    """

    by: str
    actions: Actions
    pages: int = 0
    states: int = 0
    pages_promised: int = 0
    states_promised: int = 0
    host_pages: Ids | None = None
    host_states: Ids | None = None
    spans: tuple[int, ...] = ()  # pages of each span component before

    def add_host_pages(self, page_ids: bytes) -> None:
        """Gather host pages to free; `settle` frees all that were gathered by one action."""
        if self.host_pages is None:
            self.host_pages = array("i")
        self.host_pages.frombytes(page_ids)

    def add_host_state(self, slot: int) -> None:
        """Gather a host state slot to free, as `add_host_pages` does pages."""
        if self.host_states is None:
            self.host_states = array("i")
        self.host_states.append(slot)

    def result(self) -> Evicted:
        """The counts for the caller: what is free now, and what is promised."""
        pages, states = self.pages_promised, self.states_promised
        return Evicted(self.pages - pages, self.states - states, pages, states)

    def settle(self) -> None:
        """Emit the actions that free the host pages and states gathered so far."""
        if self.host_pages is not None:
            self.actions.append(FreeHostSlots("kv", self.host_pages, TREE))
            self.host_pages = None
        if self.host_states is not None:
            self.actions.append(FreeHostSlots("state", self.host_states, TREE))
            self.host_states = None


class SheddingTree(BackingTree):
    """A tree that can give up what it holds."""

    def evict(
        self, pages: int = 0, states: int = 0, by: str = "", spans: Sequence[int] = ()
    ) -> tuple[Evicted, Actions]:
        """Free at least so many device pages and states, if nothing protects them.

        One joint demand: a state that went with its leaf counts, and no more go than asked. What
        the host has, or gets first under write-back, is only gone from the device. `by`: who needs
        the room, for those who will ask what became of their data. `spans`: so many pages of each
        span component, too.
        """
        if pages < 0 or states < 0:
            raise InvalidRequest(f"evict of {pages} pages and {states} states")
        if spans and (min(spans) < 0 or len(spans) > len(self.spans)):
            raise InvalidRequest(f"evict of {[*spans]} pages of {len(self.spans)} spans")
        self.shared = False
        gone = Tally(by, [])
        if self.spans:
            gone.spans = tuple(self.radix.span_pages)
        while gone.pages < pages:
            popped = self.kv_index.pop()
            if popped is None:
                break
            self._lose_of_leaf(popped, pages - gone.pages, gone)
        while gone.states < states:
            popped = self.state_index.pop()
            if popped is None:
                break
            self._lose_of_state(popped, gone)
        if spans:
            for span, wanted in zip(self.spans, spans, strict=False):
                self._evict_span(span, gone.spans[span.number] - wanted, gone)
        return self._evicted(gone)

    def evict_bytes(
        self, nbytes: int, *, page_bytes: int, state_bytes: int, states: int = 0, by: str = ""
    ) -> tuple[Evicted, Actions]:
        """Free `states` states, and `nbytes` bytes beyond them, of one memory for both kinds.

        The bytes come from whichever the policy gives up first: a leaf, of which a stateless one
        gives only as many tail pages as are needed, or a state. A page frees `page_bytes`, a state
        `state_bytes`; what goes with a leaf counts. What the policy scores `KEEP` stays. Raises
        `InvalidRequest` for negative sizes.
        """
        if nbytes < 0 or states < 0 or page_bytes < 1 or state_bytes < 0:
            raise InvalidRequest(
                f"evict of {nbytes} bytes and {states} states, {page_bytes} bytes a page, "
                f"{state_bytes} a state"
            )
        self.shared = True
        gone, kv_index, state_index = Tally(by, []), self.kv_index, self.state_index
        if self.spans:
            gone.spans = tuple(self.radix.span_pages)
        while gone.states < states:
            popped = state_index.pop()
            if popped is None:
                break
            self._lose_of_state(popped, gone)
        missing = nbytes + min(states, gone.states) * state_bytes
        missing -= gone.pages * page_bytes + gone.states * state_bytes
        while missing > 0:
            pages, states = gone.pages, gone.states
            leaf = kv_index.first()
            below = KEEP if leaf is None else leaf[0]
            state = state_index.first(below) if state_bytes else None
            if state is not None:
                state_index.take(state)
                self._lose_of_state(state, gone)
            elif leaf is not None and below != KEEP:
                kv_index.take(leaf)
                self._lose_of_leaf(leaf, -(-missing // page_bytes), gone)
            else:
                break
            missing -= (gone.pages - pages) * page_bytes + (gone.states - states) * state_bytes
        return self._evicted(gone)

    def _lose_of_leaf(self, popped: tuple[Score, Node], missing: int, gone: Tally) -> None:
        """Evict a leaf; of a stateless one only the last pages, if `missing` pages are enough."""
        score, node = popped
        policy = self.policy
        policy.evicted(score, self.now)
        if not policy.rises_only:
            self.kv_index.refresh()
        if (not node.state or policy.apart) and missing < node.page_count:
            if node.state:
                self._lose_state(node, gone)
            if not node.state:
                self._lose_tail(node, missing, gone)
                return
        self._lose_kv(node, gone)

    def _lose_of_state(self, popped: tuple[Score, Node], gone: Tally) -> None:
        """Evict a state, with its whole node if that is a leaf."""
        score, node = popped
        policy = self.policy
        policy.evicted(score, self.now)
        if not policy.rises_only:
            self.state_index.refresh()
        if not policy.apart and kv_may_go(node):
            self._lose_kv(node, gone)
        else:
            self._lose_state(node, gone)

    def _evicted(self, gone: Tally) -> tuple[Evicted, Actions]:
        """The result of an eviction that is over; drops stale entries of the indexes."""
        self.kv_index.shrink(self.radix.leaves)
        self.state_index.shrink(self.radix.states)
        result = gone.result()
        if gone.spans:
            result = msgspec.structs.replace(result, spans=self._spans_lost_since(gone.spans))
        return result, gone.actions

    def _evict_span(self, span: SpanComponent, left: int, gone: Tally) -> None:
        """Free pages of a span component until the tree has no more than `left`."""
        number = span.number
        index, held = self.span_indexes[number], self.radix.span_pages
        while held[number] > left:
            popped = index.pop()
            if popped is None:
                break
            score, node = popped
            self.policy.evicted(score, self.now)
            missing = held[number] - left
            if kv_may_go(node) and len(node.spans[number].page_ids) <= missing * ID_BYTES:
                self._lose_kv(node, gone)  # without them the end of a leaf is no boundary
            else:
                self._lose_span(node, span, missing, gone.actions)

    # -- victims -------------------------------------------------------------------------------

    def _lose_tail(self, node: Node, count: int, gone: Tally) -> None:
        """A stateless node loses its last pages on the device; the rest may go later."""
        if self.host is None or (node.host is None and self.write_policy != "write_back"):
            tail = node.edge[-count * self.radix.page_bytes :]
            cuts = self._cut_spans(node, count)
            cut = self.radix.cut_tail(node, count)
            gone.actions.append(FreeDeviceSlots("kv", cut, TREE))
            gone.actions.extend(cuts)
            place = mark_after(mark_of(node), tail[: self.radix.page_bytes])
            self.ghosts.note(place, tail, gone.by, self.now)
            self.kv_index.push(node)
            gone.pages += count
        else:
            upper = self.radix.split(node, (node.page_count - count) * self.radix.page_bytes)
            self._lose_kv(node, gone)
            self.kv_index.push(upper)

    def _lose_kv(self, node: Node, gone: Tally) -> None:
        """A node loses its device KV with its state: to the host where possible, else for good."""
        host = self.host
        if host is None:
            gone.pages += len(node.page_ids) // ID_BYTES
            if node.state:
                gone.states += 1
            self._drop_leaf(node, gone.actions, gone.by)
        elif self._waits_for_copies(node):
            self._copy_first(host, node, gone)
        else:
            self._lose_for_good(host, node, gone)

    def _lose_for_good(self, host: HostTier, node: Node, gone: Tally) -> None:
        """A node loses its device KV now; what the host lacks of it is lost."""
        gone.pages += node.page_count
        gone.states += node.state != NO_SLOT
        self._forget_plans(node, gone.actions)
        if node.host is not None and node.host.page_ids:
            self._demote(host, node, gone.actions)
        else:
            self._drop_below(host, node, gone)
            self._drop_leaf(node, gone.actions, gone.by)
            gone.settle()

    def _lose_state(self, node: Node, gone: Tally) -> None:
        host, part = self.host, node.host
        gone.states += 1
        if host is not None and self._copies_first and (part is None or not part.state):
            self._plan_backup(host, node, gone.actions, state_only=True)
            host.leave_state(node)
            gone.states_promised += 1
            return
        self._forget_plans(node, gone.actions, state_only=True)
        self._drop_state(node, gone.actions)

    @property
    def _copies_first(self) -> bool:
        """Whether what leaves the device is copied to the host before."""
        return self.write_policy == "write_back" and not self.host_closed

    def _waits_for_copies(self, node: Node) -> bool:
        """Whether KV may only go when copies have ended: its own, or those of what is below it."""
        part = node.host
        return self._copies_first and (
            self._lacks_copy(node) or (part is not None and part.leaving_children > 0)
        )

    def _lacks_copy(self, node: Node) -> bool:
        """Whether the host lacks something that the node has on the device."""
        part = node.host
        return (
            part is None or not part.page_ids or (node.state != NO_SLOT and part.state == NO_SLOT)
        )

    def _copy_first(self, host: HostTier, node: Node, gone: Tally) -> None:
        """A node's device data go once the host has them; the copy may be under way already."""
        self._plan_backup(host, node, gone.actions)
        host.leave(node)
        gone.pages += node.page_count
        gone.pages_promised += node.page_count
        if node.state != NO_SLOT and not part_of(node).state_leaving:
            host.leave_state(node)
            gone.states += 1
            gone.states_promised += 1
        parent = node.parent
        assert parent is not None
        if kv_may_go(parent):
            self.kv_index.push(parent)

    def _left(self, node: Node, actions: Actions) -> None:
        """Evict from the device what was leaving at `node`, and above it, and can go now.

        It can when the host has a copy and no child of it is still leaving.
        """
        host = self.host
        assert host is not None
        while node.parent is not None and node.host is not None:
            part, above = node.host, node.parent
            if part.leaving and not part.leaving_children and not self._lacks_copy(node):
                self._demote(host, node, actions)
                node = above
                continue
            if part.state_leaving and not part.leaving and part.state != NO_SLOT:
                self._drop_state(node, actions)
            return

    def _demote(self, host: HostTier, node: Node, actions: Actions) -> None:
        """The device loses what it has of a node; its KV is on the host."""
        part = part_of(node)
        if part.state_leaving:
            host.stay_state(node)
        if part.leaving:
            host.left(node)
        state = NO_SLOT
        if node.state != NO_SLOT:
            if node.sessions and part.state == NO_SLOT:
                self._recede(node)
            state = self.radix.take_state(node)
        actions.append(FreeDeviceSlots("kv", self.radix.take_kv(node), TREE))
        if state != NO_SLOT:
            actions.append(FreeDeviceSlots("state", array("i", (state,)), TREE))
        host.kv_gone(node)
        parent = node.parent
        assert parent is not None
        self.radix.merge_into_child(node)
        if kv_may_go(parent):
            self.kv_index.push(parent)

    def _drop_below(self, host: HostTier, node: Node, gone: Tally) -> None:
        """The host-only descendants of a node go, and its own part on the host."""
        waiting = [node]
        order: list[Node] = []
        while waiting:
            each = waiting.pop()
            order.append(each)
            waiting.extend(each.children.values() if each.children is not None else ())
        for each in reversed(order):
            self._strip(host, each, gone)
            if each is not node:
                if each.sessions:
                    self.sessions.recede(each)
                parent = self.radix.remove(each)
                self._note_lost(each, parent, gone.by)

    def _strip(self, host: HostTier, node: Node, gone: Tally) -> None:
        """A node's copies on the host go."""
        part = node.host
        if part is None:
            return
        self.radix.version += 1
        if part.state != NO_SLOT:
            gone.add_host_state(host.take_state(node))
        if part.page_ids:
            gone.add_host_pages(host.take_kv(node))

    def _forget_plans(self, node: Node, actions: Actions, *, state_only: bool = False) -> None:
        """A backup that is planned keeps no victim: it is cancelled."""
        for component, _, operation in list(self.operations.over(node)):
            if (
                component == "state" or not state_only
            ) and operation.number in self.operations.live:
                actions.extend(self._abandon(operation).actions)

    def _drop_leaf(self, leaf: Node, actions: Actions, by: str) -> None:
        """A leaf goes with what it has on the device; it has nothing on the host any more."""
        if leaf.sessions:
            self.sessions.recede(leaf)
        if leaf.page_ids:
            actions.append(FreeDeviceSlots("kv", array("i", leaf.page_ids), TREE))
        if leaf.state:
            actions.append(FreeDeviceSlots("state", array("i", (leaf.state,)), TREE))
        if self.spans:
            self._free_spans(leaf, actions)
        parent = self.radix.remove(leaf)
        self._note_lost(leaf, parent, by)
        if leaf.stamp > parent.stamp:
            parent.stamp = leaf.stamp
        self._after_loss_below(parent, actions)

    def _note_lost(self, leaf: Node, parent: Node, by: str) -> None:
        """Remember a leaf that no tier has now, to explain misses and for policies that learn."""
        mark, now = parent.mark, self.now
        if mark == NO_MARK:
            mark = mark_of(parent)
        edge = leaf.edge
        place = mark_after(mark, edge[: self.radix.page_bytes])
        self.ghosts.note(place, edge, by, now, leaf.mark)
        if self.policy.learns:
            self.policy.lost(leaf, place, now)

    def _after_loss_below(self, parent: Node, actions: Actions) -> None:
        """A child of `parent` has gone: it may be a candidate, a chain, or an empty root now."""
        if parent.parent is None:
            self.radix.drop_root_if_empty(parent)
            return
        if parent.host is not None and parent.host.leaving:
            self._left(parent, actions)
        elif (parent.children is None or parent.gone_children) and kv_may_go(parent):
            self.kv_index.push(parent)
        if parent.children is not None:
            self.radix.merge_into_child(parent)
            if self.policy.by_shape:
                self.state_index.lower(parent)

    def _recede(self, node: Node) -> None:
        """Move sessions that stand on the node's state, about to be dropped, to the next above."""
        state, node.state = node.state, NO_SLOT
        self.sessions.recede(node)
        node.state = state

    def _drop_state(self, node: Node, actions: Actions) -> None:
        """The device state goes, the KV stays."""
        part = node.host
        if part is not None and self.host is not None:
            self.host.stay(node)
            if part.state_leaving:
                self.host.stay_state(node)
        if node.sessions and (part is None or part.state == NO_SLOT):
            self._recede(node)
        slot = self.radix.take_state(node)
        actions.append(FreeDeviceSlots("state", array("i", (slot,)), TREE))
        parent = node.parent
        merged = self.radix.merge_into_child(node)
        if parent is not None and parent.parent is not None:
            self.radix.merge_into_child(parent)
        if merged is None and kv_may_go(node):
            self.kv_index.push(node)

    def use_policy(self, policy: str | Policy) -> None:
        """Change the eviction policy; what is cached stays. Raises `InvalidRequest`."""
        self.policy = policy_of(policy)
        self.policy.serve(self.radix.page_bytes, self.state_weight, self.now)
        self.policy.tick(self.time)
        self.policy.attach(self)
        self.rescore()

    def tick(self, time: int) -> None:
        """The time of the message that is about to be handled; priorities and sessions end by it.

        An integer that never falls, in any unit that the caller likes.
        """
        if time > self.time:
            self.time = time
            self.policy.tick(time)
            for index in self.indexes:
                index.expire(time)
            self.sessions.expire(time)

    def _name_excess(self, node: Node, actions: Actions) -> None:
        if node.state != NO_SLOT:
            self._named[node.id] = node
            actions.append(EvictExcessPathStates(node.id, self.generation))

    def evict_excess(self, action: EvictExcessPathStates) -> tuple[Evicted, Actions]:
        """Drop the shallow states of a path beyond the cap.

        Spares the tail, forks and protected states. A no-op when the node is gone.
        """
        node = self._named.pop(action.node, None)
        cap = self.placement.max_states_per_path
        actions: Actions = []
        if node is None or node.parent is None or action.generation != self.generation:
            return Evicted(0, 0), actions
        assert cap is not None
        path: list[Node] = []
        above: Node | None = node
        while above is not None:
            if above.state != NO_SLOT:
                path.append(above)
            above = above.parent
        excess = len(path) - cap
        gone = 0
        for candidate in reversed(path[1:]):
            if gone >= excess:
                break
            fork = candidate.children is not None and len(candidate.children) > 1
            backup = 0 if candidate.host is None else candidate.host.state_backup
            if backup:
                self.operations.live[backup].spared.append(node)  # and looked at again at its end
            elif not fork and not candidate.state_leases:
                self._drop_state(candidate, actions)
                gone += 1
        return Evicted(0, gone), actions

    def reset(self) -> None:
        """Start a new generation, empty. `sweep` gives back what the former one held."""
        self.generation += 1
        self._forget_operations()
        self.leases.settle()
        self.former.take_over(self.radix, self.host)
        self.leases.forget_totals()
        for index in self.indexes:
            self.former.let_go(index.clear())
        self._named.clear()
        self.running.clear()
        self.sessions.forget()
        self.ghosts.clear()
        self.policy.forget()

    def _forget_operations(self) -> None:
        """For a reset: drop all planned operations.

        One that is being copied keeps its targets, and what it reads, until its copy has ended.
        """
        for operation in list(self.operations):
            reads = operation.phase == "submitted" and operation.outcome is None
            if reads:
                self._keep_source(operation)
            for lease in operation.waiters.values():
                lease.load = 0
            operation.waiters.clear()
            operation.pieces.clear()
            operation.state_node = None
            if operation.phase == "planned":
                self.operations.end(operation)
                self._let_go(operation)
            elif operation.outcome is not None:
                actions: Actions = []
                self._give_back(operation, actions)
                self.former.owe(actions)

    def sweep(self, limit: int = 1024) -> tuple[bool, Actions]:
        """Take apart up to `limit` nodes of former generations; True while more remain.

        What a lease of a former generation protects stays until that lease ends.
        """
        actions = self.former.sweep(limit)
        return self.former.unfinished, actions

    @property
    def sweeping(self) -> bool:
        """True while `sweep` has something to do."""
        return self.former.unfinished
