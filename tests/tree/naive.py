"""A cache so simple that it is obviously right, and a run that compares the tree with it.

It keeps one entry for each known prefix of whole pages and recomputes everything from them: no
nodes, no splits, no counters. What an eviction may take is checked, how much, and what goes first,
by the definitions of recency and of the policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tree.fourth import Block
from tree.recency import Prefix, Uses
from tree.support import CALLER, World

from phloem.actors.actions import TREE, Action, FreeDeviceSlots, Ids
from phloem.actors.tree import Lease, Match, Namespace, TokenKey
from phloem.actors.tree.keys import TOKEN_BYTES
from phloem.actors.tree.node import NO_SLOT, Node


class Holding(NamedTuple):
    lease: Lease
    boundary: Prefix
    takes_state: bool
    opened: bool


class Compared:
    """A world and its naive twin; every operation is done to both and the results compared."""

    def __init__(
        self,
        page: int,
        chunk: int,
        kinds: tuple[str, ...],
        policy: str = "lru",
        cap: int | None = None,
    ) -> None:
        self.world = World(
            page=page, chunk=chunk, kinds=kinds, pages=24, states=5, policy=policy, cap=cap
        )
        for index in self.world.tree.indexes:
            index.run_size = 2  # so that entries lie in runs even here
            index.scored_at_once = index.scored_a_victim = 1  # and a new policy finds some unscored
        self.page_bytes = page * TOKEN_BYTES
        self.stateful = "state" in kinds
        self.needs = [need_of(kind, page) for kind in kinds if ":" in kind]
        # Of each span component, by number: the pages at the end of each prefix that has one.
        self.spans: list[dict[Prefix, int]] = [{} for _ in self.needs]
        self.kv: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.evicted: set[Prefix] = set()  # were there, and have not come back
        self.uses = Uses()
        self.held: list[Holding] = []  # of this generation
        self.former: list[Lease] = []

    # -- what the naive cache says ---------------------------------------------------------------

    def _prefixes(self, key: TokenKey, limit: int | None = None) -> list[Prefix]:
        tokens = key.length if limit is None else min(limit, key.length)
        end = tokens * TOKEN_BYTES // self.page_bytes * self.page_bytes
        return [
            (key.root, key.data[:at]) for at in range(self.page_bytes, end + 1, self.page_bytes)
        ]

    def _known(self, key: TokenKey, limit: int | None = None) -> Prefix:
        known: Prefix = (key.root, b"")
        for prefix in self._prefixes(key, limit):
            if prefix not in self.kv:
                break
            known = prefix
        return known

    def _boundary(self, key: TokenKey, limit: int | None = None, *, spans: bool = True) -> Prefix:
        """The deepest one that all components can serve; all but the spans without `spans`."""
        length = len(self._known(key, limit)[1])
        while length and not self._serves((key.root, key.data[:length]), spans):
            length -= self.page_bytes
        return key.root, key.data[:length]

    def _serves(self, prefix: Prefix, spans: bool) -> bool:
        if self.stateful and prefix not in self.states:
            return False
        return not spans or all(
            need <= held.keys() for need, held in zip(self._needed(prefix), self.spans, strict=True)
        )

    def _needed(self, prefix: Prefix) -> list[set[Prefix]]:
        """For each span component what a boundary at the end of a prefix needs of it."""
        root, data = prefix
        step, pages = self.page_bytes, len(data) // self.page_bytes
        return [
            {(root, data[: number * step]) for number in range(need(pages) + 1, pages + 1)}
            for need in self.needs
        ]

    def _protected_spans(self) -> list[set[Prefix]]:
        """What the boundaries of leases need; the tree protects whole nodes of it."""
        out: list[set[Prefix]] = [set() for _ in self.needs]
        for holding in self.held:
            for needed, one in zip(out, self._needed(holding.boundary), strict=True):
                needed.update(one)
        return out

    def _path(self, end: Prefix) -> list[Prefix]:
        root, data = end
        return [(root, data[:at]) for at in range(self.page_bytes, len(data) + 1, self.page_bytes)]

    def _protected(self) -> set[Prefix]:
        return {prefix for holding in self.held for prefix in self._path(holding.boundary)}

    def _protected_states(self) -> set[Prefix]:
        return {one.boundary for one in self.held if one.takes_state} & self.states.keys()

    # -- operations ------------------------------------------------------------------------------

    def match(self, key: TokenKey, limit: int | None = None) -> Match:
        match = self.world.tree.match(key, limit)
        known = len(self._known(key, limit)[1]) // TOKEN_BYTES
        usable = len(self._boundary(key, limit)[1]) // TOKEN_BYTES
        assert (match.usable, match.device, match.kv_prefix) == (usable, usable, known)
        grid = self.world.tree.grid
        branch = known // grid * grid
        assert match.branch_point == (branch if self.stateful and branch > usable else None)
        assert sum(match.lost.values()) == match.tokens - match.usable
        served = len(self._boundary(key, limit, spans=False)[1]) // TOKEN_BYTES
        assert match.lost.get("no_state", 0) == known - served
        assert match.short == served - usable
        gone = known // self.world.page
        prefixes = self._prefixes(key, limit)
        while gone < len(prefixes) and prefixes[gone] in self.evicted:
            gone += 1
        assert match.evicted == gone * self.world.page - known
        assert match.evicted_by == ("model" if match.evicted else "")
        assert not match.forgotten
        return match

    def acquire(
        self,
        key: TokenKey,
        limit: int | None = None,
        *,
        opened: bool = False,
        taste: int = 0,
    ) -> None:
        """`taste` varies the preferences of a request that is opened."""
        expected = self._boundary(key, limit)
        tree = self.world.tree
        if opened:
            lease, match = tree.open(
                key,
                owner="model",
                limit=limit,
                session=f"s{taste % 3}" if taste % 2 else None,
                session_ends=taste % 5 and tree.time + taste % 7,
                priority=taste % 4 * 10,
                keep_until=taste % 3 and tree.time + taste % 11,
            )
        else:
            lease, match = tree.acquire(key, owner="model", limit=limit)
        assert lease.boundary == match.usable == len(expected[1]) // TOKEN_BYTES
        self.world.check_content(lease)
        self.held.append(Holding(lease, expected, self.stateful, opened))
        self.uses.acquired(self._path(expected))
        self.compare()

    def fork(self, number: int) -> None:
        """A second lease at the same boundary, without the state."""
        holding = self.held[number]
        lease = self.world.tree.fork(holding.lease, owner="fork")
        self.held.append(Holding(lease, holding.boundary, False, False))
        self.compare()

    def prefer(self, number: int, time: int) -> None:
        """Time passes, a session stands where its request is, another one is closed."""
        self.world.tree.tick(time)
        self.world.tree.stand_on(self.held[number].lease)
        self.world.tree.close_session(f"s{time % 5}")
        self.compare()

    def advance(self, number: int, beyond: int) -> None:
        holding = self.held[number]
        lease = holding.lease
        beyond = max(beyond, lease.boundary)
        expected = self._boundary(lease.key)
        match = self.world.tree.advance(lease, beyond=beyond, limit=lease.key.length)
        if len(expected[1]) // TOKEN_BYTES > beyond:
            assert lease.boundary == match.usable
            self.world.check_content(lease)
            if holding.takes_state:
                self.uses.state_used(holding.boundary)
            self.held[number] = holding._replace(boundary=expected, takes_state=self.stateful)
        self.compare()

    def insert(
        self,
        key: TokenKey,
        length: int,
        *,
        state: bool,
        number: int | None = None,
        swap: bool = True,
        tail: int = 1000,
        release: bool = False,
    ) -> None:
        """Insert with the lease `number`, or without one; skipped when there is no room.

        With pages of spans for the last `tail` pages, if there are so many. `release`: and end the
        lease.
        """
        world = self.world
        holding = None if number is None else self.held[number]
        lease = None if holding is None else holding.lease
        start = 0 if lease is None else lease.boundary
        state = state and self.stateful and length % world.tree.grid == 0
        prefixes = self._prefixes(key, length)
        mine = prefixes[start * TOKEN_BYTES // self.page_bytes :]
        tail = min(tail, len(mine))
        if not self._make_room(len(mine), int(state), tail):
            return
        pages = array("i", world.kv.take(len(mine), CALLER))
        world.fill(key, start, pages)
        slot = NO_SLOT
        if state:
            (slot,) = world.states.take(1, CALLER)
            world.states.content[slot] = (key.root, key.data[: length * TOKEN_BYTES])
        reused = [prefix for prefix in mine if prefix in self.kv]
        end = prefixes[-1] if prefixes else (key.root, b"")
        logged = len(world.log)
        spans = world.take_spans(key, length, tail)
        published = world.publish_own(
            *(key, pages, slot, lease),
            length=length,
            swap=swap,
            spans=spans,
            release=release,
        )
        if prefixes:
            assert published.end == len(end[1]) // TOKEN_BYTES
            assert published.reused == start + len(reused) * world.page
        assert published.state_dup == (state and (end in self.states or not prefixes))
        for prefix, page in zip(mine, pages, strict=True):
            self.kv.setdefault(prefix, page)
            self.evicted.discard(prefix)
        if prefixes:
            self.uses.inserted(prefixes, len(prefixes) - len(mine))
        if not swap:
            kept = pages[: len(reused)]
            world.kv.move(kept, CALLER, None)
        if tail:
            self._publish_spans(end, mine[-tail:], spans, swap)
        if state and prefixes:
            self.states.setdefault(end, slot)
            self.uses.state_used(end)
        if holding is not None and number is not None and prefixes:
            if holding.takes_state and end != holding.boundary:
                self.uses.state_used(holding.boundary)
            holding = self.held[number] = holding._replace(boundary=end)
        if release and holding is not None and number is not None:
            assert not holding.lease.live
            self._rests(self.held.pop(number))
        self._forget_excess(world.log[logged:], slot)
        self._join()
        self.compare()

    def _publish_spans(
        self, end: Prefix, offered: list[Prefix], spans: list[Ids], swap: bool
    ) -> None:
        needed = self._needed(end)
        for number, pages in enumerate(spans):
            held, pool = self.spans[number], self.world.spans[number]
            for prefix, page in zip(offered, pages, strict=True):
                if prefix not in held and (not self.stateful or prefix in needed[number]):
                    held[prefix] = page
                elif not swap:
                    pool.move((page,), CALLER, None)

    def _forget_excess(self, actions: list[Action], offered: int) -> None:
        """What the cap for each path took: states that nobody leases and that are no tail."""
        cap = self.world.tree.placement.max_states_per_path
        for action in actions:
            if isinstance(action, FreeDeviceSlots) and action.component == "state":
                lost = {p for p, slot in self.states.items() if slot in action.ids}
                assert cap is not None or not lost
                assert not lost & self._protected_states()
                for prefix in lost:
                    assert self.states[prefix] != offered
                    del self.states[prefix]

    def _make_room(self, pages: int, states: int, tail: int) -> bool:
        world = self.world
        need = max(pages - world.kv.free, 0), max(states - world.states.free, 0)
        spans = [max(tail - pool.free, 0) for pool in world.spans]
        if any(need) or any(spans):
            self.evict(*need, spans)
        return (
            world.kv.free >= pages
            and world.states.free >= states
            and all(pool.free >= tail for pool in world.spans)
        )

    def evict(self, pages: int, states: int, spans: Sequence[int] = ()) -> None:
        world = self.world
        spans = spans[: len(self.spans)]
        free_pages = len(self.kv) - len(self._protected())
        free_states = len(self.states) - len(self._protected_states())
        enough = pages <= free_pages and states <= free_states
        assert world.tree.can_evict(pages, states) == enough
        victim = self._first_victim(pages, states)
        logged = len(world.log)
        figures = world.tree.figures().spans if self.needs else ()
        former = sum(span.pages for span in figures) - sum(map(len, self.spans))
        evicted, actions = world.tree.evict(pages, states, by="model", spans=spans)
        for asked, span, got in zip(spans, figures, evicted.spans, strict=False):
            assert got >= min(asked, span.evictable)
            if not pages and not states and len(spans) == 1 and not former:
                assert got <= asked, "more than asked"
        assert evicted.pages >= min(pages, free_pages)
        assert evicted.states >= min(states, free_states)
        world.carry_out(actions)
        if victim is not None:
            first = world.log[logged]
            assert isinstance(first, FreeDeviceSlots)
            assert first.ids[-1] == victim, f"another goes before it under {world.tree.policy.name}"
        gone = [action for action in world.log[logged:] if isinstance(action, FreeDeviceSlots)]
        self._forget(gone, pages, states, spans)
        self._join()
        self.compare()

    def use_policy(self, name: str) -> None:
        """The content stays, whatever the policy."""
        self.world.tree.use_policy(name)
        self.compare()

    def _first_victim(self, pages: int, states: int) -> int | None:
        """The last page, or the state, of the node that goes first, found by looking at all."""
        tree = self.world.tree
        index = tree.kv_index if pages else tree.state_index if states else None
        if index is None or index._unscored or not tree.policy.rises_only:
            return None
        inner = {(root, data[: -self.page_bytes]) for root, data in self.kv}
        kv = self.kv.keys() - inner - self._protected()
        free = kv if pages else self.states.keys() - self._protected_states()
        found: list[tuple[tuple[int, ...], int, Node]] = []
        for node, path in self._nodes():
            assert index.eligible(node) == (path[-1] in free)
            if path[-1] in free:
                score = self.uses.score(tree.policy, node, path, state=not pages)
                found.append((score or (index.score(node),), node.id, node))
        if not found:
            return None
        node = min(found)[2]
        return node.pages[-1] if pages or tree.kv_index.eligible(node) else node.state

    def _join(self) -> None:
        """Where nodes were joined they are one from now on, whose parts no use tells apart."""
        for _, path in self._nodes():
            self.uses.as_one(path)

    def _nodes(self) -> Iterator[tuple[Node, list[Prefix]]]:
        """All nodes of the tree, each with the prefixes that end with its pages."""
        tree = self.world.tree
        for name, root in tree.radix.roots.items():
            waiting: list[tuple[Node, bytes]] = [(root, b"")]
            while waiting:
                node, above = waiting.pop()
                data = above + node.edge
                if node is not root:
                    yield node, self._path((name, data))[-len(node.pages) :]
                waiting.extend((child, data) for child in (node.children or {}).values())

    def _forget(
        self, gone: list[FreeDeviceSlots], pages: int, states: int, spans: Sequence[int]
    ) -> None:
        ids = {
            kind: {one for action in gone if action.component == kind for one in action.ids}
            for kind in self.world.pools
        }
        lost_kv = {prefix for prefix, page in self.kv.items() if page in ids["kv"]}
        lost_states = {prefix for prefix, slot in self.states.items() if slot in ids["state"]}
        assert not lost_kv & self._protected()
        assert not lost_states & self._protected_states()
        if not states and not any(spans) and len(ids["kv"]) > pages:
            assert ids["state"], "more pages than asked went, with no state among them"
        for prefix in lost_kv:
            del self.kv[prefix]
            self.evicted.add(prefix)
            self.uses.gone(prefix)
        for prefix in lost_states:
            del self.states[prefix]
        for held, needed, pool in zip(
            self.spans, self._protected_spans(), self.world.spans, strict=True
        ):
            lost = {prefix for prefix, page in held.items() if page in ids[pool.name]}
            assert not lost & needed
            for prefix in lost:
                del held[prefix]
        for _, data in self.kv:
            assert len(data) == self.page_bytes or (_, data[: -self.page_bytes]) in self.kv

    def release(self, number: int) -> None:
        holding = self.held.pop(number)
        self.world.tree.release(holding.lease)
        self._rests(holding)
        self.compare()

    def _rests(self, holding: Holding) -> None:
        """A lease has ended, and with it a use of what it protected."""
        if holding.takes_state:
            self.uses.state_used(holding.boundary)
        self.uses.released(self._path(holding.boundary))

    def release_former(self) -> None:
        if self.former:
            self.world.unpin(self.former.pop())

    def release_state(self, number: int) -> None:
        holding = self.held[number]
        if holding.lease.has_state:
            self.world.tree.release_state(holding.lease)
            self.uses.state_used(holding.boundary)
            self.held[number] = holding._replace(takes_state=False)
        self.compare()

    def reset(self, *, sweep: bool) -> None:
        self.world.tree.reset()
        self.former.extend(holding.lease for holding in self.held)
        self.kv, self.states, self.held = {}, {}, []
        self.spans = [{} for _ in self.needs]
        self.evicted.clear()
        self.uses.clear()
        if sweep:
            self.world.sweep()
        self.compare()

    def end(self) -> None:
        """Everything comes back when the last holder has gone and all has been evicted."""
        while self.held:
            self.release(len(self.held) - 1)
        while self.former:
            self.release_former()
        self.world.sweep()
        self.evict(self.world.kv.size, self.world.states.size)
        assert (self.world.kv.free, self.world.states.free) == (24, 5)
        assert all(pool.free == pool.size for pool in self.world.spans)
        figures = self.world.tree.figures()
        assert (figures.nodes, figures.leaves, figures.namespaces, figures.leases) == (0, 0, 0, 0)
        assert len(self.world.tree.running) == 0

    # -- comparing -------------------------------------------------------------------------------

    def check_all(self) -> None:
        """Check from now on after every operation, and now."""
        self.world.check_each = True
        self.compare()

    def compare(self) -> None:
        """The audit, and the tree's contents page by page; nothing unless the world checks each."""
        world = self.world
        if not world.check_each:
            return
        world.check()
        tree = world.tree
        kv: dict[Prefix, int] = {}
        states: dict[Prefix, int] = {}
        spans: list[dict[Prefix, int]] = [{} for _ in self.spans]
        for node, path in self._nodes():
            kv.update(zip(path, node.pages, strict=True))
            if node.state != NO_SLOT:
                states[path[-1]] = node.state
            for held, span in zip(spans, tree.spans, strict=True):
                held.update(zip(reversed(path), reversed(span.held(node)), strict=False))
        assert kv == self.kv
        assert states == self.states
        assert spans == self.spans
        assert all(held.keys() <= kv.keys() for held in spans)
        assert all(world.kv.owner[page] == TREE for page in kv.values())
        self._compare_leases()

    def _compare_leases(self) -> None:
        tree = self.world.tree
        figures = tree.figures()
        assert figures.leases == len(self.held) + len(self.former)
        if not self.former and not tree.sweeping:
            assert figures.pages_protected == len(self._protected())
            assert figures.states_protected == len(self._protected_states())
            for span, needed, held in zip(
                figures.spans, self._protected_spans(), self.spans, strict=True
            ):
                assert span.protected >= len(needed & held.keys())
        for lease, boundary, takes_state, _ in self.held:
            assert lease.boundary * TOKEN_BYTES == len(boundary[1])
            assert lease.has_state == takes_state
            positions = [wanted.position for wanted in lease.wanted]
            assert positions == sorted(set(positions))
            assert all(p > lease.boundary and p % tree.grid == 0 for p in positions)


def need_of(kind: str, page: int) -> Callable[[int], int]:
    """How many of the pages before a boundary a span component does not need there."""
    name, _, number = kind.partition(":")
    if name == "window":
        return lambda pages: max(0, pages - -(-int(number) // page))
    assert name == Block.name
    return lambda pages: (pages * page - 1) // int(number) * int(number) // page


def page_tokens(kinds: list[int], page: int, tail: int = 0) -> list[int]:
    """Pages that differ in their last token only, then `tail` tokens that fill no page."""
    return [one for kind in kinds for one in [5] * (page - 1) + [kind]] + [6] * tail


NAMESPACES = (Namespace(), Namespace("adapter", "salt"))
