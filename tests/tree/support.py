"""A small world around one tree: fake pools, and the words in which the scenarios are written.

Every page and slot has one owner. A page remembers which tokens, in which namespace, stood before
its end when it was filled; a state likewise. So a lease can be asked whether what it leads to is
what its key says. After every step the tree is audited and every slot accounted for.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phloem.actors.actions import TREE, Action, EvictExcessPathStates, FreeDeviceSlots, Ids
from phloem.actors.tree import Evicted, Lease, Match, Placement, TokenKey, Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.keys import TOKEN_BYTES, Namespace, Tokens
from phloem.actors.tree.leases import protected
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, Node
from phloem.errors import OwnershipError

CALLER = 1  # the owner number of whoever publishes
Content = tuple[tuple[str, str, bytes], bytes]  # the root's name, and the key's bytes so far


def run(first: int, last: int) -> list[int]:
    """The tokens `first` to `last`, both included."""
    return list(range(first, last + 1))


class Pool:
    """Numbered slots, each with one owner or free; slot 0 is never granted."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(range(size, 0, -1))
        self.owner: dict[int, int] = {}
        self.content: dict[int, Content] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, owner: int) -> list[int]:
        assert count <= self.free, f"{self.name}: {count} asked, {self.free} free"
        taken = [self._free.pop() for _ in range(count)]
        self.owner.update(dict.fromkeys(taken, owner))
        return taken

    def move(self, ids: Iterable[int], source: int, target: int | None) -> None:
        """Hand slots on, or back to the pool; nothing changes when one is not `source`'s."""
        ids = list(ids)
        if len(set(ids)) != len(ids) or any(self.owner.get(one) != source for one in ids):
            raise OwnershipError(f"{self.name}: {ids} are not all {source}'s")
        for one in ids:
            if target is None:
                del self.owner[one]
                self.content.pop(one, None)
                self._free.append(one)
            else:
                self.owner[one] = target

    def held(self, owner: int) -> int:
        return sum(other == owner for other in self.owner.values())


class Published(NamedTuple):
    reused: int
    state_dup: bool
    end: int


class Found(NamedTuple):
    dev: int
    walk: int
    branch: int | None


class World:
    """A tree with its pools. Every call applies its actions and then checks everything."""

    def __init__(
        self,
        *,
        page: int = 1,
        chunk: int = 1,
        pages: int = 128,
        states: int = 20,
        kinds: Sequence[str] = ("kv", "state"),
        policy: str = "lru",
        cap: int | None = None,
        enabled: bool = True,
        check_each: bool = True,
        state_weight: int = 1024,
    ) -> None:
        self.page = page
        self.kv = Pool("kv", pages)
        self.states = Pool("state", states)
        self.spans = [Pool(kind.partition(":")[0], pages) for kind in kinds if ":" in kind]
        self.pools = {pool.name: pool for pool in (self.kv, self.states, *self.spans)}
        self.tree = Tree(
            page_size=page,
            state_chunk=chunk,
            components=kinds,
            policy=policy,
            placement=Placement(max_states_per_path=cap),
            enabled=enabled,
            state_weight=state_weight,
        )
        self.check_each = check_each
        self.log: list[Action] = []

    # -- the words of the scenarios --------------------------------------------------------------

    def key(self, tokens: Tokens, ns: Namespace | None = None) -> TokenKey:
        return TokenKey.of(tokens, ns)

    def publish(
        self,
        tokens: Tokens,
        *,
        state: bool = True,
        lease: Lease | None = None,
        ns: Namespace | None = None,
        length: int | None = None,
        swap: bool = True,
        tail: int | None = None,
        release: bool = False,
    ) -> Published:
        """Allocate what the insert takes, fill it, insert, and carry the actions out.

        Of each span component for the last `tail` pages, by default for all.
        """
        key = self.key(tokens, ns)
        length = key.length if length is None else length
        start = lease.boundary if lease is not None else 0
        count = max(length // self.page - start // self.page, 0)
        pages = array("i", self.kv.take(count, CALLER))
        self.fill(key, start, pages)
        slot = NO_SLOT
        if state and self.tree.has_states:
            (slot,) = self.states.take(1, CALLER)
            self.states.content[slot] = (key.root, key.data[: length * TOKEN_BYTES])
        spans = self.take_spans(key, length, count if tail is None else tail)
        return self.publish_own(
            *(key, pages, slot, lease),
            length=length,
            swap=swap,
            spans=spans,
            release=release,
        )

    def take_spans(self, key: TokenKey, length: int, count: int) -> list[Ids]:
        """The caller's pages of each span component for the last `count` pages of the key."""
        taken = [array("i", pool.take(count, CALLER)) for pool in self.spans]
        for pool, pages in zip(self.spans, taken, strict=True):
            self.fill(key, (length // self.page - count) * self.page, pages, pool)
        return taken

    def publish_own(
        self,
        key: TokenKey,
        pages: Ids,
        slot: int,
        lease: Lease | None = None,
        *,
        length: int | None = None,
        swap: bool = True,
        spans: Sequence[Ids] = (),
        release: bool = False,
    ) -> Published:
        """Insert what the caller holds already; the tree becomes the owner of what it adopts."""
        start = lease.boundary if lease is not None else 0
        result, actions = self.tree.insert(
            *(key, pages, slot, lease),
            length=length,
            owner=CALLER,
            swap=swap,
            spans=spans,
            release=release,
        )
        for pool, taken in zip(self.spans, result.spans, strict=False):
            pool.move(taken, CALLER, TREE)
        for first, last in result.adopted:
            adopted = pages[(first - start) // self.page : (last - start) // self.page]
            self.kv.move(adopted, CALLER, TREE)
        if result.state == "adopted":
            self.states.move([slot], CALLER, TREE)
        self.carry_out(actions)
        return Published(result.reused, result.state == "duplicate", result.published)

    def find(self, tokens: Tokens, ns: Namespace | None = None) -> Found:
        """A match, asked twice: a read changes nothing, so both answers are the same."""
        key = self.key(tokens, ns)
        before = self.tree.figures()
        match = self.tree.match(key)
        assert self.tree.match(key) == match
        assert self.tree.figures() == before
        assert sum(match.lost.values()) == match.tokens - match.usable
        return found(match)

    def pin(self, tokens: Tokens, *, full_only: bool = False, ns: Namespace | None = None) -> Lease:
        """Lease the deepest boundary of `tokens`; `full_only` gives the state up at once."""
        lease, _ = self.tree.acquire(self.key(tokens, ns), owner="scenario")
        self.check_content(lease)
        if full_only and lease.has_state:
            self.tree.release_state(lease)
        self.check()
        return lease

    def unpin(self, lease: Lease) -> None:
        self.tree.release(lease)
        self.sweep()
        self.check()

    def use(self, tokens: Tokens, ns: Namespace | None = None) -> int:
        """Acquire and release: a find that counts as a use. The length found."""
        lease = self.pin(tokens, ns=ns)
        length = lease.boundary
        self.unpin(lease)
        return length

    def reclaim(
        self, pages: int = 0, states: int = 0, spans: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Evict, and check what the tree says against what the pools got and the totals lost."""
        figures, free = self.tree.figures(), (self.kv.free, self.states.free)
        spans_free = [pool.free for pool in self.spans]
        evicted, actions = self.tree.evict(pages, states, spans=spans)
        self.carry_out(actions)
        after = self.tree.figures()
        assert self.kv.free - free[0] == evicted.pages
        assert self.states.free - free[1] == evicted.states
        assert figures.pages_evictable - after.pages_evictable == evicted.pages
        assert figures.states_evictable - after.states_evictable == evicted.states
        assert evicted.pages >= min(pages, figures.pages_evictable)
        assert evicted.states >= min(states, figures.states_evictable)
        freed = [pool.free - before for pool, before in zip(self.spans, spans_free, strict=True)]
        assert [*evicted.spans] == freed
        for asked, got, span in zip(spans, freed, figures.spans, strict=False):
            assert got >= min(asked, span.evictable)
        return evicted.pages * self.page, evicted.states

    def reclaim_full(self, tokens: int) -> tuple[int, int]:
        return self.reclaim(pages=-(-tokens // self.page))

    def reclaim_state(self, states: int) -> tuple[int, int]:
        return self.reclaim(states=states)

    def reset(self) -> None:
        self.tree.reset()
        self.sweep()
        self.check()

    def sweep(self) -> None:
        more = self.tree.sweeping
        while more:
            more, actions = self.tree.sweep(limit=3)
            self.carry_out(actions)

    @property
    def full_free(self) -> int:
        return self.kv.free * self.page

    @property
    def state_free(self) -> int:
        return self.states.free

    # -- what stands behind them -----------------------------------------------------------------

    def fill(
        self, key: TokenKey, start: int, pages: Sequence[int], pool: Pool | None = None
    ) -> None:
        """Note what the caller writes into its pages, of KV by default, from token `start` on."""
        content = (self.kv if pool is None else pool).content
        for number, page in enumerate(pages, start // self.page + 1):
            content[page] = (key.root, key.data[: number * self.page * TOKEN_BYTES])

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Apply actions in order; what is addressed to the tree is its next turn."""
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            self.log.append(action)
            if isinstance(action, FreeDeviceSlots):
                self.pools[action.component].move(action.ids, action.owner, None)
            else:
                assert isinstance(action, EvictExcessPathStates)
                evicted, further = self.tree.evict_excess(action)
                assert isinstance(evicted, Evicted)
                waiting.extend(further)
        self.check()

    def check(self) -> None:
        """The audit, and one owner for each slot: free + tree + caller = pool."""
        if not self.check_each:
            return
        audit_tree(self.tree)
        figures = self.tree.figures()
        spans = [(self.pools[span.component], span.pages) for span in figures.spans]
        for pool, held in ((self.kv, figures.pages), (self.states, figures.states), *spans):
            assert pool.held(TREE) == held, f"{pool.name}: the pool and the tree disagree"
            assert pool.free + len(pool.owner) == pool.size
        if not self.tree.sweeping:
            self.check_owned()

    def check_owned(self) -> None:
        for node in self.tree.radix:
            assert all(self.kv.owner.get(page) == TREE for page in node.pages)
            assert node.state == NO_SLOT or self.states.owner.get(node.state) == TREE
            for pool, span in zip(self.spans, self.tree.spans, strict=True):
                assert all(pool.owner.get(page) == TREE for page in span.held(node))

    def check_content(self, lease: Lease) -> None:
        """What the lease leads to was written for exactly its tokens in its namespace."""
        data = path_bytes(lease.anchor)
        pages = self.tree.pages_of(lease)
        assert len(pages) * self.page == lease.boundary
        step = self.page * TOKEN_BYTES
        for number, page in enumerate(pages, 1):
            assert self.kv.content[page] == (lease.root, data[: number * step])
        if (slot := self.tree.state_of(lease)) != NO_SLOT:
            assert self.states.content[slot] == (lease.root, data)
        for pool, span in zip(self.spans, self.tree.spans, strict=True):
            pages = self.tree.span_of(lease, span.number)
            first = span.needs_from(lease.boundary) // self.page
            assert first + len(pages) == lease.boundary // self.page
            for number, page in enumerate(pages, first + 1):
                assert pool.content[page] == (lease.root, data[: number * step])

    def nodes(self) -> list[str]:
        """Every node as `tokens` + F + S (- where there is none), in the order of their paths.

        For each span component W and how many pages of it there are.
        """
        lines: list[tuple[bytes, str]] = []
        for node in self.tree.radix:
            words = array("i", node.edge)
            mark = "S" if node.state != NO_SLOT else "-"
            for span in node.spans:
                mark += f"W{len(span.page_ids) // ID_BYTES}" if span.page_ids else "-"
            lines.append((path_bytes(node), f"{list(words)}F{mark}"))
        return [line for _, line in sorted(lines)]

    def node_at(self, tokens: Tokens, ns: Namespace | None = None) -> Node:
        """The node that ends exactly after `tokens`."""
        key = self.key(tokens, ns)
        walk = self.tree.radix.walk(key, len(key.data))
        assert walk.partial is None and walk.offset == len(key.data), "no node ends there"
        return walk.path[-1]

    def evictable(self) -> tuple[int, int]:
        figures = self.tree.figures()
        return figures.pages_evictable * self.page, figures.states_evictable

    def pinned(self) -> tuple[int, int]:
        figures = self.tree.figures()
        return figures.pages_protected * self.page, figures.states_protected


def found(match: Match) -> Found:
    return Found(match.device, match.kv_prefix, match.branch_point)


def path_bytes(node: Node) -> bytes:
    """The key from the start to the node's end."""
    edges: list[bytes] = []
    above: Node | None = node
    while above is not None:
        edges.append(above.edge)
        above = above.parent
    return b"".join(reversed(edges))


def is_protected(world: World, tokens: Tokens) -> bool:
    world.tree.leases.settle()
    return protected(world.node_at(tokens))
