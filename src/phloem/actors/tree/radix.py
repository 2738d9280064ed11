"""The shape of the tree: roots, walk, split, merge, remove. No policy, no leases."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from phloem.actors.actions import Ids
from phloem.actors.tree.components import SpanComponent, can_join, divide, join, new_spans
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey, common_bytes
from phloem.actors.tree.node import ID_BYTES, NO_MARK, NO_SLOT, HostPart, Node, Walk
from phloem.actors.tree.residency import check_change

__all__ = ["MERGED_EDGE_BYTES_MAX", "Radix"]

# A merge copies both edges. Longer chains stay as they are: one node for 16k tokens costs nothing.
MERGED_EDGE_BYTES_MAX = 64 * 1024

SPACES_REMEMBERED = 4096  # namespaces whose number is known after their last data have gone

RootName = tuple[str, str, bytes]


class Radix:
    """A forest of radix trees, one root for each namespace, whose edges are runs of whole pages.

    Each node has `spans` spans.
    """

    def __init__(self, page_size: int, spans: int = 0) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.roots: dict[RootName, Node] = {}
        self._root_names: dict[int, RootName] = {}
        self.nodes = 0  # without roots
        self.leaves = 0
        self.pages = 0
        self.states = 0
        self.span_pages = [0] * spans
        self.version = 0  # rises with every change of what a walk can find
        # Whether a part without a state is one with its child even if that has a state.
        self.whole_edges = False
        # Told of the node, the new upper part and its pages when a node that the host tier has to
        # do with is split.
        self.on_split: Callable[[Node, Node, int], None] | None = None
        # Told of a node whose spans may be more than they were, by a split or a merge.
        self.on_spans: Callable[[Node], None] | None = None
        self._spans = spans
        # By page: the node that holds it, or held it last. None: nobody asks.
        self.holders: list[Node | None] | None = None
        self._next_id = 0
        self._spaces: OrderedDict[RootName, int] = OrderedDict()
        self._next_space = 0

    def new_node(self, parent: Node | None, edge: bytes, end: int, page_ids: bytes) -> Node:
        """A node with the next id; linking it in is the caller's."""
        self._next_id += 1
        node = Node(self._next_id, parent, edge, end, page_ids)
        if self._spans:
            node.spans = new_spans(self._spans)
        return node

    def root(self, name: RootName) -> Node:
        """The root of a namespace, made on first use."""
        root = self.roots.get(name)
        if root is None:
            self.version += 1
            root = self.roots[name] = self.new_node(None, b"", 0, b"")
            root.mark = self._space(name) << 32
            self._root_names[root.id] = name
        return root

    def mark_of_root(self, name: RootName) -> int | None:
        """The mark of a namespace that was there before, even if it holds nothing now."""
        number = self._spaces.get(name)
        return None if number is None else number << 32

    def _space(self, name: RootName) -> int:
        """A number for the namespace, remembered after its root has gone, of the latest many."""
        number = self._spaces.pop(name, None)
        if number is None:
            self._next_space += 1
            number = self._next_space
            if len(self._spaces) >= SPACES_REMEMBERED:
                self._spaces.popitem(last=False)
        self._spaces[name] = number
        return number

    def walk(self, key: TokenKey, limit: int) -> Walk:
        """Follow the first `limit` bytes (whole pages) of `key` from its root."""
        path: list[Node] = []
        offset = 0
        root = self.roots.get(key.root)
        if root is None:
            return Walk(path, 0, None, 0)
        data, page_bytes = key.data, self.page_bytes
        node = root
        while offset < limit:
            child = node.only
            if child is None:
                if node.children is None:
                    break
                child = node.children.get(data[offset : offset + page_bytes])
                if child is None:
                    break
            edge = child.edge
            if data.startswith(edge, offset, limit):
                path.append(child)
                offset += len(edge)
                node = child
                continue
            inside = common_bytes(data, offset, limit, edge, page_bytes)
            if not inside:
                break
            return Walk(path, offset, child, inside)
        return Walk(path, offset, None, 0)

    def put_state(self, node: Node, state: int) -> None:
        """Give a node that has no state one."""
        assert node.state == NO_SLOT and state != NO_SLOT
        self.version += 1
        node.state = state
        self.states += 1

    def take_state(self, node: Node) -> int:
        """Take a node's state from it."""
        state = node.state
        assert state != NO_SLOT
        self.version += 1
        node.state = NO_SLOT
        self.states -= 1
        return state

    def put_span(self, node: Node, span: SpanComponent, page_ids: Ids) -> None:
        """More pages of a span component for a node, right before those it has."""
        self.version += 1
        part = node.spans[span.number]
        part.page_ids = page_ids.tobytes() + part.page_ids
        self.span_pages[span.number] += len(page_ids)

    def take_span(self, node: Node, span: SpanComponent, count: int) -> Ids:
        """Take the first `count` pages of a span component that a node has."""
        self.version += 1
        part = node.spans[span.number]
        taken = array("i", part.page_ids[: count * ID_BYTES])
        assert len(taken) == count
        part.page_ids = part.page_ids[count * ID_BYTES :]
        self.span_pages[span.number] -= count
        return taken

    def cut_span(self, leaf: Node, number: int, count: int) -> Ids:
        """Take what a leaf has of a span component along its last `count` pages."""
        span = leaf.spans[number]
        cut = array("i", span.page_ids[-count * ID_BYTES :])
        span.page_ids = span.page_ids[: -count * ID_BYTES]
        self.span_pages[number] -= len(cut)
        return cut

    def attach_leaf(self, parent: Node, edge: bytes, pages: array[int]) -> Node:
        """Hang a new leaf under `parent`."""
        self.version += 1
        end = parent.end + len(edge) // TOKEN_BYTES
        leaf = self.new_node(parent, edge, end, pages.tobytes())
        children, first = parent.children, edge[: self.page_bytes]
        if children is None:
            parent.children, parent.only = {first: leaf}, leaf
            if parent.parent is None:
                self.leaves += 1  # a root was no leaf
        else:
            children[first], parent.only = leaf, None
            self.leaves += 1
        self.nodes += 1
        self.pages += len(pages)
        if self.holders is not None:
            self._holds(leaf)
        return leaf

    def split(self, node: Node, inside: int) -> Node:
        """Cut `node` after `inside` bytes of its edge; the new upper part is returned.

        The node itself stays the lower part, so whoever is anchored at its end stays anchored.
        Every field is treated as `SPLIT_RULES` says.
        """
        assert 0 < inside < len(node.edge) and inside % self.page_bytes == 0
        parent = node.parent
        assert parent is not None and parent.children is not None
        self.version += 1
        ids = inside // self.page_bytes * ID_BYTES
        first = node.edge[: self.page_bytes]
        upper = self.new_node(
            parent, node.edge[:inside], parent.end + inside // TOKEN_BYTES, node.page_ids[:ids]
        )
        upper.stamp, upper.born, upper.hits = node.stamp, node.born, node.hits
        upper.turn, upper.prompt_end = node.turn, node.prompt_end
        upper.priority, upper.keep_until = node.priority, node.keep_until
        if node.counted:
            upper.counted = True
            upper.protected_children = 1
        if node.host is not None:
            self._split_part(node, node.host, upper, ids)
        node.edge = node.edge[inside:]
        node.page_ids = node.page_ids[ids:]
        node.parent = upper
        upper.children = {node.edge[: self.page_bytes]: node}
        upper.only = node
        parent.children[first] = upper
        if parent.only is not None:
            parent.only = upper
        self.nodes += 1
        if node.spans:
            divide(upper, node, len(node.edge) // self.page_bytes)
            if self.on_spans is not None:
                self.on_spans(upper)
        self._holds(upper)
        return upper

    def _split_part(self, node: Node, part: HostPart, upper: Node, ids: int) -> None:
        """Divide what the node has on the host, and what is under way over it."""
        above = upper.host = HostPart(
            page_ids=part.page_ids[:ids],
            kv_backup=part.kv_backup,
            kv_load=part.kv_load,
            leaving=part.leaving,
            kv_children=int(bool(part.page_ids) or part.kv_backup > 0),
            leaving_children=int(part.leaving),
        )
        part.page_ids = part.page_ids[ids:]
        upper.gone_children = int(part.leaving or not node.page_ids)
        if above.page_ids:
            only_copy = not node.page_ids and upper.protected_children > 0
            above.pins = int(part.leaving or only_copy) + int(part.pins > 0)
        else:
            above.pins = int(part.kv_backup > 0)
        if self.on_split is not None:
            self.on_split(node, upper, ids // ID_BYTES)
        if above.empty:
            upper.host = None

    def put_kv(self, node: Node, page_ids: bytes) -> None:
        """Give a node whose KV was not on the device its pages there."""
        check_change(node, "kv", "device", "present")
        parent = node.parent
        assert parent is not None and len(page_ids) * self.page_bytes == len(node.edge) * ID_BYTES
        assert parent.parent is None or parent.page_ids, "KV on the device below KV that is not"
        self.version += 1
        node.page_ids = page_ids
        parent.gone_children -= 1
        self.pages += node.page_count
        self._holds(node)

    def take_kv(self, node: Node) -> array[int]:
        """Take a node's device pages from it; it stays for what it has elsewhere."""
        check_change(node, "kv", "device", "absent")
        parent, taken = node.parent, node.pages
        assert parent is not None and node.state == NO_SLOT
        self.version += 1
        node.page_ids = b""
        parent.gone_children += 1
        self.pages -= len(taken)
        return taken

    def merge_into_child(self, node: Node) -> Node | None:
        """Undo a split where nothing tells the two parts apart; the merged node, or None.

        The child lives on, since leases are anchored at its end.
        """
        children, parent = node.children, node.parent
        if parent is None or children is None or len(children) != 1:
            return None
        if node.state or node.leases or node.state_leases or node.sessions:
            return None
        (child,) = children.values()
        if child.state and not self.whole_edges:
            return None
        if len(node.edge) + len(child.edge) > MERGED_EDGE_BYTES_MAX:
            return None
        if (node.host is not None or child.host is not None) and not _equal_tiers(node, child):
            return None
        if (node.priority, node.keep_until) != (child.priority, child.keep_until):
            return None
        if node.spans and not can_join(node, child, len(child.edge) // self.page_bytes):
            return None
        assert parent.children is not None
        self.version += 1
        self._holds(child, node.page_ids)
        child.edge = node.edge + child.edge
        child.page_ids = node.page_ids + child.page_ids
        if node.host is not None and child.host is not None:
            child.host.page_ids = node.host.page_ids + child.host.page_ids
        child.parent = parent
        child.stamp = max(child.stamp, node.stamp)
        child.hits = max(child.hits, node.hits)
        parent.children[node.edge[: self.page_bytes]] = child
        if parent.only is not None:
            parent.only = child
        node.parent = node.children = node.only = None
        self.nodes -= 1
        if child.spans:
            join(node, child)
            if self.on_spans is not None:
                self.on_spans(child)
        return child

    def remove(self, leaf: Node) -> Node:
        """Take a leaf out and cut its links; its former parent is returned."""
        parent = leaf.parent
        assert parent is not None and leaf.children is None and leaf.host is None
        self.version += 1
        if not leaf.page_ids:
            parent.gone_children -= 1
        if parent.only is leaf:
            parent.children = parent.only = None
            if parent.parent is None:
                self.leaves -= 1
        else:
            children = parent.children
            assert children is not None
            del children[leaf.edge[: self.page_bytes]]
            self.leaves -= 1
            if len(children) == 1:
                (parent.only,) = children.values()
        leaf.parent = None
        self.nodes -= 1
        self.pages -= len(leaf.page_ids) // ID_BYTES
        if leaf.state != NO_SLOT:
            self.states -= 1
        if leaf.spans:
            for number, span in enumerate(leaf.spans):
                self.span_pages[number] -= len(span.page_ids) // ID_BYTES
        return parent

    def cut_tail(self, leaf: Node, count: int) -> array[int]:
        """Shorten a stateless leaf by its last `count` pages, which are returned.

        What spans have along these is taken before, by `cut_span`.
        """
        assert leaf.children is None and leaf.state == NO_SLOT and 0 < count < leaf.page_count
        self.version += 1
        tail = array("i", leaf.page_ids[-count * ID_BYTES :])
        leaf.page_ids = leaf.page_ids[: -count * ID_BYTES]
        leaf.edge = leaf.edge[: -count * self.page_bytes]
        leaf.end -= count * self.page_size
        leaf.mark = NO_MARK
        self.pages -= count
        return tail

    def track_pages(self, count: int) -> None:
        """Note from now on which node holds which of the pages below `count`."""
        holders: list[Node | None] = [None] * count
        self.holders = holders

    def rename_pages(self, node: Node, pages: array[int]) -> None:
        """The node's data are in other pages."""
        assert len(pages) == node.page_count
        self.version += 1
        node.page_ids = pages.tobytes()
        self._holds(node)

    def _holds(self, node: Node, page_ids: bytes | None = None) -> None:
        """`node` holds its pages, or these, from now on."""
        holders = self.holders
        if holders is not None:
            for page in array("i", node.page_ids if page_ids is None else page_ids):
                holders[page] = node

    def drop_root_if_empty(self, node: Node) -> None:
        """Forget a namespace that holds nothing and that nobody leases."""
        if node.children is None and not node.leases and node.id in self._root_names:
            self.version += 1
            del self.roots[self._root_names.pop(node.id)]

    def detach_roots(self) -> list[Node]:
        """Start empty; the former roots are the caller's to take apart."""
        self.version += 1
        former = list(self.roots.values())
        self.roots = {}
        self._root_names = {}
        self.nodes = self.leaves = self.pages = self.states = 0
        self.span_pages = [0] * self._spans
        return former

    def __iter__(self) -> Iterator[Node]:
        """Every node but the roots, parents first; for audits and dumps, not for decisions."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children is not None:
                stack.extend(node.children.values())


def _equal_tiers(node: Node, child: Node) -> bool:
    """Whether nothing but KV in the same tiers is in either node, and nothing is under way."""
    above, below = node.host, child.host
    return (
        above is not None
        and below is not None
        and bool(above.page_ids) == bool(below.page_ids)
        and bool(node.page_ids) == bool(child.page_ids)
        and not any(
            part.state
            or part.kv_backup
            or part.state_backup
            or part.kv_load
            or part.state_load
            or part.leaving
            for part in (above, below)
        )
    )
