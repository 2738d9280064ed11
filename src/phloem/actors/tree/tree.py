"""The tree: every decision about what is cached, pure and synchronous.

No clock but an integer of its own, no randomness, no I/O. An operation checks its arguments, then
changes the structure, and returns its result together with the actions that others carry out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from phloem.actors.actions import TREE, FreeDeviceSlots, Ids
from phloem.actors.tree.components import kv_may_go
from phloem.actors.tree.core import Actions
from phloem.actors.tree.ghosts import mark_of
from phloem.actors.tree.host import part_of
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey, Tokens, common_bytes
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.leasing import LeasingTree
from phloem.actors.tree.node import NO_MARK, NO_SLOT, Node
from phloem.actors.tree.policies import Policy
from phloem.actors.tree.results import Evicted, InsertResult, Match, PagesChanged, TreeFigures
from phloem.errors import InvalidRequest

__all__ = ["Actions", "Evicted", "InsertResult", "Match", "PagesChanged", "Tree", "TreeFigures"]

_NONE_CHANGED: Sequence[PagesChanged] = ()


class Tree(LeasingTree):
    """The radix tree with its leases and candidate indexes.

    `state_chunk` is the model's own chunk of positions at which a state may be kept; with pages it
    makes the grid. `components` is `("kv",)` for pure attention, `("kv", "state")` for hybrids,
    each with `"window:128"` behind them for sliding-window layers of 128 tokens.
    """

    def twin(self, policy: Policy) -> Tree:
        """An empty tree like this one, without spans or a host tier, under another policy."""
        return Tree(
            page_size=self.page_size,
            state_chunk=self.grid,
            components=("kv", "state") if self.has_states else ("kv",),
            policy=policy,
            placement=self.placement,
            ghosts_max=0,
            state_weight=max(self.state_weight, 1),
        )

    def check_insert(
        self,
        key: TokenKey,
        length: int,
        pages: int,
        state: int,
        lease: Lease | None,
        spans: Sequence[int] = (),
    ) -> int:
        """Check an insert's figures; returns the token position at which its pages start.

        Raises `InvalidRequest` or `StaleHandle` with nothing changed.
        """
        if not 0 <= length <= key.length:
            raise InvalidRequest(f"length {length} of a key of {key.length} tokens")
        start = 0
        if lease is not None:
            self.check_lease(lease)
            start = lease.anchor.end
            if lease.key is not key:
                if lease.root != key.root:
                    raise InvalidRequest(
                        f"{lease} is of namespace {lease.root}, the key of {key.root}"
                    )
                if not lease.leads_into(key):
                    raise InvalidRequest(f"the key does not continue the path of {lease}")
            if lease.load or (start and not lease.anchor.page_ids):
                raise InvalidRequest(f"the boundary of {lease} is not on the device yet")
        whole = length // self.page_size * self.page_size
        if whole < start:
            raise InvalidRequest(f"insert of {length} tokens ends before the lease's {start}")
        if pages != (whole - start) // self.page_size:
            raise InvalidRequest(
                f"insert of {length} tokens from {start} on takes "
                f"{(whole - start) // self.page_size} pages of {self.page_size}, not {pages}"
            )
        if state != NO_SLOT and whole:
            if not self.has_states:
                raise InvalidRequest("a state was offered, but the model has none")
            if length % self.grid:
                raise InvalidRequest(f"a state at {length} tokens is off the grid of {self.grid}")
        if spans and (len(spans) > len(self.spans) or max(spans) > pages):
            raise InvalidRequest(
                f"{[*spans]} pages of spans for {pages} pages and components "
                f"{self.components.texts}: at most as many of each span"
            )
        return start

    def insert(
        self,
        tokens: Tokens,
        pages: Ids | Sequence[int],
        state: int = NO_SLOT,
        lease: Lease | None = None,
        *,
        length: int | None = None,
        owner: int = TREE,
        swap: bool = True,
        priority: int = 0,
        spans: Sequence[Ids] = (),
        release: bool = False,
    ) -> tuple[InsertResult, Actions]:
        """Publish the first `length` tokens (all by default).

        `pages` are the caller's device pages from the lease's boundary (or the start) on, `state`
        the slot of the state at exactly `length`. What the tree has already is a duplicate: the
        caller's pages go back by action and `pages_changed` names the tree's own; with
        `swap=False` the caller keeps them. A lease moves to the new boundary in the same turn, or
        ends there with `release`. `spans`: of each span component the caller's pages for the last
        tokens of these, as many as it still has.
        """
        if release and lease is None:
            raise InvalidRequest("release=True without a lease to release")
        key = TokenKey.of(tokens)
        length = key.length if length is None else length
        if not isinstance(pages, array) or pages.typecode != "i":
            pages = array("i", pages)
        counts = [*map(len, spans)] if spans else ()
        start = self.check_insert(key, length, len(pages), state, lease, counts)
        return self.insert_checked(
            key, length, start, pages, state, lease, owner, swap, priority, spans, release
        )

    def insert_checked(
        self,
        key: TokenKey,
        length: int,
        start: int,
        pages: Ids,
        state: int,
        lease: Lease | None,
        owner: int,
        swap: bool,
        priority: int = 0,
        spans: Sequence[Ids] = (),
        release: bool = False,
    ) -> tuple[InsertResult, Actions]:
        """`insert` of what `check_insert` has just let pass; it answered `start`."""
        stop = length // self.page_size * self.radix.page_bytes
        if not self.enabled or not stop:
            if release and lease is not None:
                self.release(lease)
            return self._give_all_back(
                pages if swap else pages[:0], state, owner, spans if swap else ()
            )
        node = lease.anchor if lease is not None else self.radix.root(key.root)
        self.now += 1
        node.stamp = self.now
        if node.children is None:  # as after a lease's boundary, mostly
            offset, changed = start * TOKEN_BYTES, _NONE_CHANGED
        else:
            node, offset, changed = self._walk_for_insert(key, node, start, stop)
        present = offset // TOKEN_BYTES
        taken = (present - start) // self.page_size  # pages of the caller that are duplicates
        actions: Actions = []
        if taken and swap:
            actions.append(FreeDeviceSlots("kv", pages[:taken], owner))
        own = pages[taken:] if taken else pages
        offered = stop
        if self.host is not None and offset < stop:
            node, offset, stop, own = self._walk_on_host(key, node, offset, stop, own)
        reused = offset // TOKEN_BYTES
        if offset < stop:
            node = self._grow(node, key.data[offset:stop], own)
            if lease is not None:
                node.turn, node.prompt_end = lease.turn, lease.prompt_end
        former: Node | None = None
        if lease is not None:
            former = lease.anchor
            lease.key = key
            if release and self._end_with_insert(lease, node):
                lease = None
            else:
                self._move_with_insert(lease, node)
                if lease.priority:
                    self._prefer(node, lease.priority, lease.keep_until)
        if priority:
            self._prefer(node, priority, 0)
        outcome = self._offer_state(node, state, owner, actions, arrived=stop == offered)
        adopted_spans: tuple[Ids, ...] = ()
        if spans:
            adopted_spans = self._offer_spans(node, spans, owner if swap else 0, actions)
        if former is not None and former is not node and former.state == NO_SLOT:
            self.radix.merge_into_child(former)
        if lease is None and kv_may_go(node):
            self.kv_index.push(node)
            if self.policy.learns:
                self.policy.rested(node, self.now)
        if self.host is not None or self.placement.max_states_per_path is not None:
            self._follow_up(node, actions)
        if release and lease is not None:
            self.release(lease)
        end = stop // TOKEN_BYTES
        adopted = ((present, end),) if end > present else ()
        pages_changed = tuple(changed) if swap else ()
        result = InsertResult(reused, end, adopted, outcome, pages_changed, adopted_spans)
        return result, actions

    def _give_all_back(
        self, pages: Ids, state: int, owner: int, spans: Sequence[Ids]
    ) -> tuple[InsertResult, Actions]:
        actions: Actions = []
        if pages:
            actions.append(FreeDeviceSlots("kv", pages, owner))
        if state != NO_SLOT:
            actions.append(FreeDeviceSlots("state", array("i", (state,)), owner))
        for span, offered in zip(self.spans, spans, strict=False):
            if offered:
                actions.append(FreeDeviceSlots(span.name, offered, owner))
        outcome: Literal["duplicate", "none"] = "none" if state == NO_SLOT else "duplicate"
        return InsertResult(reused=0, published=0, adopted=(), state=outcome), actions

    def _walk_for_insert(
        self, key: TokenKey, node: Node, start: int, stop: int
    ) -> tuple[Node, int, list[PagesChanged]]:
        """Follow what exists from `node` on, stamp it, and split where the key leaves it."""
        data, page_bytes, now = key.data, self.radix.page_bytes, self.now
        offset = start * TOKEN_BYTES
        changed: list[PagesChanged] = []
        while offset < stop and node.children is not None:
            child = node.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            if child.host is not None and self.host is not None:
                if not child.page_ids:
                    break
                self.host.stay(child)
            edge = child.edge
            if offset + len(edge) > stop or not data.startswith(edge, offset):
                inside = common_bytes(data, offset, stop, edge, page_bytes)
                child = self.radix.split(child, inside)
            changed.append(PagesChanged(offset // TOKEN_BYTES, child.pages))
            offset += len(child.edge)
            child.stamp = now
            child.hits += 1
            node = child
        return node, offset, changed

    def _walk_on_host(
        self, key: TokenKey, node: Node, offset: int, stop: int, pages: Ids
    ) -> tuple[Node, int, int, Ids]:
        """Go on along nodes whose KV is on the host only: they adopt the caller's pages.

        Before a node whose KV is on its way to the device the insert stops. Returns the last node,
        how far it leads, where the insert stops, and the pages that are left.
        """
        data, page_bytes = key.data, self.radix.page_bytes
        while offset < stop and node.children is not None:
            child = node.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            if part_of(child).kv_load:
                return node, offset, offset, pages[:0]
            if offset + len(child.edge) > stop or not data.startswith(child.edge, offset):
                inside = common_bytes(data, offset, stop, child.edge, page_bytes)
                child = self.radix.split(child, inside)
            count = len(child.edge) // page_bytes
            self.radix.put_kv(child, pages[:count].tobytes())
            self.leases.kv_appeared(child)
            pages = pages[count:]
            offset += len(child.edge)
            child.stamp = self.now
            child.hits += 1
            node = child
        return node, offset, stop, pages

    def _grow(self, parent: Node, edge: bytes, pages: Ids) -> Node:
        mark = self.ghosts.revived(mark_of(parent), edge) if self.ghosts.any else NO_MARK
        leaf = self.radix.attach_leaf(parent, edge, pages)
        leaf.stamp = leaf.born = self.now
        leaf.mark = mark
        return leaf

    def _follow_up(self, node: Node, actions: Actions) -> None:
        """After an insert that ends at `node`: plan backups, and apply the cap for its path."""
        if self.host is not None and node.parent is not None:
            self._plan_backups(node.parent, actions)
        if self.placement.max_states_per_path is not None:
            self._name_excess(node, actions)
        if self.host is not None:
            self._plan_backups(node, actions)

    def _offer_state(
        self, node: Node, state: int, owner: int, actions: Actions, *, arrived: bool
    ) -> Literal["adopted", "duplicate", "none"]:
        """`arrived`: the insert came as far as the state's position."""
        if state == NO_SLOT:
            return "none"
        if arrived:
            node.state_stamp = self.now
        if node.state != NO_SLOT or not arrived or (node.host and node.host.state_load):
            actions.append(FreeDeviceSlots("state", array("i", (state,)), owner))
            return "duplicate"
        self.radix.put_state(node, state)
        self.leases.state_appeared(node)
        return "adopted"

    def _end_with_insert(self, lease: Lease, node: Node) -> bool:
        """End a lease where it stands instead of moving it to `node` and ending it there.

        Returns False with nothing changed where the move itself has effects: on counts that are
        passed up, on requests that follow this one, on priorities, spans or the host tier.
        """
        anchor = lease.anchor
        if node is anchor or anchor.counted or lease.running_at is not None or lease.priority:
            return False
        if self.host is not None or self.spans:
            return False
        had_state = lease.has_state
        self.leases.end(lease, self.now)
        lease.anchor = node
        self.now += 1
        node.stamp = self.now
        if had_state:
            node.state_stamp = self.now
        return True

    def _move_with_insert(self, lease: Lease, node: Node) -> None:
        if node is not lease.anchor:
            self.leases.move(lease, node, self.now, with_state=lease.has_state)
        if lease.wanted:
            lease.wanted = [wanted for wanted in lease.wanted if wanted.position > node.end]
        if lease.running_at is not None:
            self.running.leave(lease)
            self.running.join(lease, node.end)
