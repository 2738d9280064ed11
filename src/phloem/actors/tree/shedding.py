"""How the tree gives data up: eviction, the cap for each path, reset."""

from __future__ import annotations

from array import array

from phloem.actors.actions import TREE, EvictExcessPathStates, FreeDeviceSlots
from phloem.actors.tree.core import Actions, TreeCore
from phloem.actors.tree.eviction import kv_may_go
from phloem.actors.tree.ghosts import mark_of
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.policies import Policy, policy_named
from phloem.actors.tree.results import Evicted
from phloem.errors import InvalidRequest

__all__ = ["SheddingTree"]


class SheddingTree(TreeCore):
    """A tree that can give up what it holds; `Tree` adds leases and inserts."""

    def evict(self, pages: int = 0, states: int = 0, by: str = "") -> tuple[Evicted, Actions]:
        """Free at least so many pages and states if nothing protects them; the rest is not there.

        One joint demand: a state that went with its leaf counts, and no more go than asked. `by`:
        who needs the room, for those who will ask what became of their data.
        """
        if pages < 0 or states < 0:
            raise InvalidRequest(f"evict of {pages} pages and {states} states")
        actions: Actions = []
        pages_gone = states_gone = 0
        while pages_gone < pages:
            popped = self.kv_index.pop()
            if popped is None:
                break
            score, node = popped
            self.policy.evicted(score, self.now)
            missing = pages - pages_gone
            if node.state == NO_SLOT and missing < node.page_count:
                tail = node.edge[-missing * self.radix.page_bytes :]
                actions.append(FreeDeviceSlots("kv", self.radix.cut_tail(node, missing), TREE))
                self.ghosts.note(mark_of(node), tail, by, self.now)
                self.kv_index.push(node)
                pages_gone += missing
                break
            pages_gone += node.page_count
            states_gone += node.state != NO_SLOT
            self._drop_leaf(node, actions, by)
        while states_gone < states:
            popped = self.state_index.pop()
            if popped is None:
                break
            score, node = popped
            self.policy.evicted(score, self.now)
            states_gone += 1
            if kv_may_go(node):
                pages_gone += node.page_count
                self._drop_leaf(node, actions, by)
            else:
                self._drop_state(node, actions)
        self.kv_index.shrink(self.radix.leaves)
        self.state_index.shrink(self.radix.states)
        return Evicted(pages_gone, states_gone), actions

    def _drop_leaf(self, leaf: Node, actions: Actions, by: str) -> None:
        if leaf.sessions:
            self.sessions.recede(leaf)
        actions.append(FreeDeviceSlots("kv", leaf.pages, TREE))
        if leaf.state != NO_SLOT:
            actions.append(FreeDeviceSlots("state", array("i", (leaf.state,)), TREE))
        stamp = leaf.stamp
        parent = self.radix.remove(leaf)
        self.ghosts.note(mark_of(parent), leaf.edge, by, self.now, leaf.mark)
        if stamp > parent.stamp:
            parent.stamp = stamp
        self._after_loss_below(parent)

    def _after_loss_below(self, parent: Node) -> None:
        """A child of `parent` has gone: it may be a candidate, a chain, or an empty root now."""
        if parent.parent is None:
            self.radix.drop_root_if_empty(parent)
        elif parent.children is None:
            if kv_may_go(parent):
                self.kv_index.push(parent)
        else:
            self.radix.merge_into_child(parent)

    def _drop_state(self, node: Node, actions: Actions) -> None:
        """The state goes, the KV stays."""
        if node.sessions:
            node_state, node.state = node.state, NO_SLOT
            self.sessions.recede(node)
            node.state = node_state
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
        self.policy = policy_named(policy) if isinstance(policy, str) else policy
        self.policy.tick(self.time)
        self.kv_index.score = self.policy.kv_score
        self.state_index.score = self.policy.state_score
        self.kv_index.rebuild()
        self.state_index.rebuild()

    def tick(self, time: int) -> None:
        """The time of the message that is about to be handled; priorities and sessions end by it.

        An integer that never falls, in any unit that the caller likes.
        """
        if time > self.time:
            self.time = time
            self.policy.tick(time)
            self.kv_index.expire(time)
            self.state_index.expire(time)
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
            if not fork and not candidate.state_leases:
                self._drop_state(candidate, actions)
                gone += 1
        return Evicted(0, gone), actions

    def reset(self) -> None:
        """Start a new generation, empty. `sweep` gives back what the former one held."""
        self.generation += 1
        self.former.take_over(self.radix)
        self.leases.pages_protected = self.leases.states_protected = 0
        self.kv_index.clear()
        self.state_index.clear()
        self._named.clear()
        self.running.clear()
        self.sessions.forget()
        self.ghosts.clear()

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
