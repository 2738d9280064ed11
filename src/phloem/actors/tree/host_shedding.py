"""How the tree gives up what it has on the host."""

from __future__ import annotations

from phloem.actors.tree.core import Actions
from phloem.actors.tree.host import HostTier, host_kv_may_go, part_of
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, Node
from phloem.actors.tree.results import Evicted
from phloem.actors.tree.shedding import SheddingTree, Tally
from phloem.errors import InvalidRequest

__all__ = ["HostSheddingTree"]


class HostSheddingTree(SheddingTree):
    """A tree that can give up what it holds, in both tiers."""

    def evict_host(self, pages: int = 0, states: int = 0, by: str = "") -> tuple[Evicted, Actions]:
        """Free at least so many host pages and states if nothing needs them there.

        Copies of what is on the device go first. What was on the host only is gone for good.
        """
        if pages < 0 or states < 0:
            raise InvalidRequest(f"evict of {pages} host pages and {states} host states")
        gone, host = Tally(by, []), self.host
        if host is None:
            return Evicted(0, 0), gone.actions
        while gone.pages < pages:
            popped = host.kv_index.pop()
            if popped is None:
                break
            node = popped[1]
            part = part_of(node)
            spare = len(part.page_ids) // ID_BYTES - (pages - gone.pages)
            if spare > 0 and not node.page_ids and part.state == NO_SLOT:
                self.radix.split(node, spare * self.radix.page_bytes)  # the tail is enough
            self._lose_copy(host, node, gone)
        while gone.states < states:
            popped = host.state_index.pop()
            if popped is None:
                break
            node = popped[1]
            if not node.page_ids and host_kv_may_go(node):
                self._lose_copy(host, node, gone)
                continue
            gone.states += 1
            if node.sessions and node.state == NO_SLOT:
                self._recede(node)
            self.radix.version += 1
            gone.add_host_state(host.take_state(node))
            above = node.parent
            self.radix.merge_into_child(node)
            if above is not None:
                self.radix.merge_into_child(above)
        gone.settle()
        host.shrink(self.radix.nodes)
        return Evicted(gone.pages, gone.states), gone.actions

    def _lose_copy(self, host: HostTier, node: Node, gone: Tally) -> None:
        """A node's host KV goes; if it was the only copy, the node goes with all it has."""
        part = part_of(node)
        gone.pages += len(part.page_ids) // ID_BYTES
        if node.page_ids:
            gone.add_host_pages(host.take_kv(node))
            return
        gone.states += part.state != NO_SLOT
        self._strip(host, node, gone)
        self._drop_leaf(node, gone.actions, gone.by)
