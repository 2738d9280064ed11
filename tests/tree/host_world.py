"""A small world with a host tier: fake pools of both tiers, and copies that end when told.

A copy reads its source when it ends, as late as it may, so that places which were reused too early
show as wrong content.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from tree.support import CALLER, Pool, World, path_bytes

from phloem.actors.actions import (
    TREE,
    Action,
    BackupToHost,
    EvictExcessPathStates,
    FreeDeviceSlots,
    FreeHostSlots,
    LoadToDevice,
    Places,
    Reserve,
)
from phloem.actors.tree import Ended, Evicted, Lease, Tree, WritePolicy
from phloem.actors.tree.keys import TOKEN_BYTES, Namespace, Tokens
from phloem.actors.tree.node import ID_BYTES, NO_SLOT, Node
from phloem.actors.tree.placement import Placement

_ACCOUNTS = 1000  # numbers of operations' accounts begin here
_PARKED = -2


class FoundInTiers(NamedTuple):
    dev: int
    host: int
    state_host: int
    branch: int | None


class Copy(NamedTuple):
    op: int
    account: int
    action: BackupToHost | LoadToDevice


class HostWorld(World):
    """`auto`: reservations are answered, and backups end, before an operation returns."""

    def __init__(
        self,
        *,
        page: int = 1,
        chunk: int = 2,
        pages: int = 64,
        states: int = 10,
        host_pages: int = 64,
        host_states: int = 10,
        kinds: Sequence[str] = ("kv", "state"),
        policy: str = "lru",
        write_policy: WritePolicy = "write_through",
        cap: int | None = None,
        auto: bool = True,
        check_each: bool = True,
    ) -> None:
        super().__init__(
            page=page, pages=pages, states=states, kinds=kinds, cap=cap, check_each=check_each
        )
        self.tree = Tree(
            page_size=page,
            state_chunk=chunk,
            components=kinds,
            policy=policy,
            placement=Placement(max_states_per_path=cap),
            host=True,
            write_policy=write_policy,
        )
        self.host_kv = Pool("host kv", host_pages)
        self.host_states = Pool("host state", host_states)
        self.auto = auto
        self.reserves: deque[Reserve] = deque()
        self.copies: dict[int, Copy] = {}
        self.ended: list[Ended] = []
        self.leases: dict[int, Lease] = {}
        self.refuse_loads = False
        self.make_host_room = True

    # -- the words of the scenarios --------------------------------------------------------------

    def look(self, tokens: Tokens, ns: Namespace | None = None) -> FoundInTiers:
        """`find`, by tiers."""
        self.find(tokens, ns)
        match = self.tree.match(self.key(tokens, ns))
        assert match.device + match.host == match.usable
        on_host = int(match.state_tier == "host")
        return FoundInTiers(match.device, match.host, on_host, match.branch_point)

    def open(self, tokens: Tokens, ns: Namespace | None = None) -> Lease:
        """Lease the deepest boundary over the tiers and plan its load."""
        lease, _ = self.tree.acquire(self.key(tokens, ns), owner="scenario")
        self.leases[lease.id] = lease
        _, actions = self.tree.plan(lease)
        self.carry_out(actions)
        return lease

    def load(self, tokens: Tokens, ns: Namespace | None = None) -> Lease:
        """Open, and let the load succeed."""
        lease = self.open(tokens, ns)
        self.settle()
        assert not lease.load
        self.check_content(lease)
        return lease

    def check_content(self, lease: Lease) -> None:
        """A boundary on the host can be read only after its load."""
        if self.tree.match(lease.key, lease.boundary).device == lease.boundary:
            super().check_content(lease)

    def unpin(self, lease: Lease) -> None:
        self.leases.pop(lease.id, None)
        super().unpin(lease)

    def reclaim(
        self, pages: int = 0, states: int = 0, spans: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Evict from the device; what was promised counts, and its copies end at once if `auto`."""
        figures = self.tree.figures()
        assert not spans, "there are none with a host tier"
        evicted, actions = self.tree.evict(pages, states)
        assert self.freed(actions, "device") == (evicted.pages, evicted.states)
        gone = evicted.pages + evicted.pages_promised, evicted.states + evicted.states_promised
        after = self.tree.figures()
        # An operation that ends with a victim's plan also ends the protection of what it read.
        ends = figures.operations - after.operations
        assert figures.pages_evictable - after.pages_evictable == gone[0] or ends > 0
        assert figures.states_evictable - after.states_evictable == gone[1] or ends > 0
        assert gone[0] >= min(pages, figures.pages_evictable)
        assert gone[1] >= min(states, figures.states_evictable)
        self.carry_out(actions)
        return gone[0] * self.page, gone[1]

    def reclaim_host(self, pages: int = 0, states: int = 0) -> tuple[int, int]:
        figures = self.tree.figures()
        evicted, actions = self.tree.evict_host(pages, states)
        assert self.freed(actions, "host") == (evicted.pages, evicted.states)
        after = self.tree.figures()
        assert figures.host_pages_evictable - after.host_pages_evictable == evicted.pages
        assert figures.host_states_evictable - after.host_states_evictable == evicted.states
        assert evicted.pages >= min(pages, figures.host_pages_evictable)
        assert evicted.states >= min(states, figures.host_states_evictable)
        self.carry_out(actions)
        return evicted.pages, evicted.states

    def freed(self, actions: Iterable[Action], tier: str) -> tuple[int, int]:
        kind = FreeDeviceSlots if tier == "device" else FreeHostSlots
        sizes = {"kv": 0, "state": 0}
        for action in actions:
            if isinstance(action, kind) and action.owner == TREE:
                sizes[action.component] += len(action.ids)
        return sizes["kv"], sizes["state"]

    def marks(self) -> list[str]:
        """Every node as in the scenarios: `[1, 2]FSfs`, `-` where there is nothing."""
        lines: list[tuple[bytes, str]] = []
        for node in self.tree.radix:
            part = node.host
            letters = (
                ("F", bool(node.page_ids)),
                ("S", node.state != NO_SLOT),
                ("f", part is not None and bool(part.page_ids)),
                ("s", part is not None and part.state != NO_SLOT),
            )
            text = "".join(letter if there else "-" for letter, there in letters)
            lines.append((path_bytes(node), f"{list(array('i', node.edge))}{text}"))
        return [line for _, line in sorted(lines)]

    # -- carrying actions out --------------------------------------------------------------------

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Apply actions in order; copies start, and end when `end` says so."""
        waiting = deque(actions)
        while waiting or (self.auto and self.reserves):
            if not waiting:
                waiting.extend(self.answer(self.reserves.popleft()))
                continue
            action = waiting.popleft()
            self.log.append(action)
            match action:
                case FreeDeviceSlots() | FreeHostSlots():
                    self.free(action)
                case EvictExcessPathStates():
                    evicted, further = self.tree.evict_excess(action)
                    assert isinstance(evicted, Evicted)
                    waiting.extend(further)
                case Reserve():
                    self.reserves.append(action)
                case BackupToHost() | LoadToDevice():
                    account = _ACCOUNTS + action.op
                    self.copies[action.op] = Copy(action.op, account, action)
                    if self.auto and isinstance(action, BackupToHost):
                        waiting.extend(self.end_copy(action.op))
                case _:
                    raise AssertionError(action)
        self.check()

    def answer(self, reserve: Reserve) -> list[Action]:
        """Room for an operation, made if need be, or a refusal."""
        kv, state = self.pool(reserve.tier, "kv"), self.pool(reserve.tier, "state")
        actions: list[Action] = []
        short = max(0, reserve.pages - kv.free), max(0, reserve.states - state.free)
        if any(short) and reserve.tier == "host" and self.make_host_room:
            if self.tree.can_evict_host(*short):
                before = kv.free, state.free
                evicted, freeing = self.tree.evict_host(*short)
                self.carry_out_frees(freeing)
                assert (kv.free, state.free) >= before
                assert evicted.pages >= short[0] and evicted.states >= short[1]
        elif any(short) and reserve.tier == "device" and self.tree.can_evict(*short):
            _, freeing = self.tree.evict(*short)
            frees = (FreeDeviceSlots, FreeHostSlots)
            self.carry_out_frees([one for one in freeing if isinstance(one, frees)])
            self.reserves.extend(one for one in freeing if isinstance(one, Reserve))
        refused = self.refuse_loads and reserve.tier == "device"
        if refused or reserve.pages > kv.free or reserve.states > state.free:
            ended, more = self.tree.not_reserved(reserve.op)
            self.note(ended)
            return [*actions, *more]
        account = _ACCOUNTS + reserve.op
        pages, states = kv.take(reserve.pages, account), state.take(reserve.states, account)
        more = self.tree.reserved(reserve.op, account, array("i", pages), array("i", states))
        return [*actions, *more]

    def carry_out_frees(self, actions: Iterable[Action]) -> None:
        for action in actions:
            assert isinstance(action, (FreeDeviceSlots, FreeHostSlots))
            self.log.append(action)
            self.free(action)

    def free(self, action: FreeDeviceSlots | FreeHostSlots) -> None:
        """Places go back to their pool, once no copy reads them any more."""
        tier = "device" if isinstance(action, FreeDeviceSlots) else "host"
        pool = self.pool(tier, action.component)
        read: set[int] = set()
        for copy in self.copies.values():
            if isinstance(copy.action, BackupToHost) == (tier == "device"):
                for places in copy.action.items:
                    if places.component == action.component:
                        read.update(places.sources)
        pool.move([one for one in action.ids if one not in read], action.owner, None)
        pool.move([one for one in action.ids if one in read], action.owner, _PARKED)

    def unpark(self) -> None:
        """Copies have ended: what they were the last to read is free."""
        for tier, component in product(("device", "host"), ("kv", "state")):
            pool = self.pool(tier, component)
            parked = array("i", [one for one, owner in pool.owner.items() if owner == _PARKED])
            pool.move(parked, _PARKED, CALLER)
            kind = FreeDeviceSlots if tier == "device" else FreeHostSlots
            self.free(kind("kv" if component == "kv" else "state", parked, CALLER))

    def pool(self, tier: str, component: str) -> Pool:
        if tier == "device":
            return self.kv if component == "kv" else self.states
        return self.host_kv if component == "kv" else self.host_states

    def end_copy(self, op: int, *, ok: bool = True, pages_ok: int = 0) -> list[Action]:
        """The copy has ended: its bytes are there, or those of some leading pages."""
        copy = self.copies.pop(op)
        for places in copy.action.items:
            good = len(places.targets) if ok else pages_ok if places.component == "kv" else 0
            self._move_bytes(places, good, to_host=isinstance(copy.action, BackupToHost))
        self.unpark()
        ended, actions = self.tree.copied(op, ok, pages_ok=pages_ok)
        self.note(ended)
        return actions

    def _move_bytes(self, places: Places, good: int, *, to_host: bool) -> None:
        tiers = ("device", "host") if to_host else ("host", "device")
        source, target = (self.pool(tier, places.component) for tier in tiers)
        for number, (read, written) in enumerate(zip(places.sources, places.targets, strict=True)):
            if number < good:
                target.content[written] = source.content[read]
            else:
                target.content.pop(written, None)

    def end(self, op: int, *, ok: bool = True, pages_ok: int = 0) -> None:
        """A copy ends, and what comes of it is carried out."""
        self.carry_out(self.end_copy(op, ok=ok, pages_ok=pages_ok))

    def settle(self) -> None:
        """Every reservation is answered and every copy ends well."""
        while self.reserves or self.copies:
            while self.reserves:
                self.carry_out(self.answer(self.reserves.popleft()))
            for op in list(self.copies):
                self.end(op)

    def close_host(self, closed: bool) -> None:
        """The host tier is left alone from now on, or tried again."""
        ended, actions = self.tree.close_host(closed)
        self.note(ended)
        self.carry_out(actions)

    def note(self, ended: Ended) -> None:
        """Owners move as the result says."""
        self.ended.append(ended)
        for kept in ended.kept:
            self.pool(kept.tier, kept.component).move(kept.ids, kept.account, TREE)
        for number in (*ended.ready, *ended.moved):
            assert number in self.leases

    # -- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        if not self.check_each:
            return
        super().check()
        figures = self.tree.figures()
        for pool, held in (
            (self.host_kv, figures.host_pages),
            (self.host_states, figures.host_states),
        ):
            assert pool.held(TREE) == held, f"{pool.name}: the pool and the tree disagree"
            assert pool.free + len(pool.owner) == pool.size

    def check_owned(self) -> None:
        """What a node holds is the tree's, and has the bytes of exactly its tokens."""
        for name, root in self.tree.radix.roots.items():
            waiting: list[tuple[Node, bytes]] = [(root, b"")]
            while waiting:
                node, above = waiting.pop()
                data = above + node.edge
                self._check_node(node, name, above, data)
                waiting.extend((child, data) for child in (node.children or {}).values())

    def _check_node(
        self, node: Node, name: tuple[str, str, bytes], above: bytes, data: bytes
    ) -> None:
        step = self.page * TOKEN_BYTES
        part = node.host
        for tier, run in (("device", node.page_ids), ("host", part.page_ids if part else b"")):
            pool = self.pool(tier, "kv")
            assert len(run) // ID_BYTES in (0, len(node.edge) // step)
            for number, page in enumerate(array("i", run), 1):
                assert pool.owner.get(page) == TREE
                assert pool.content[page] == (name, data[: len(above) + number * step])
        for tier, slot in (("device", node.state), ("host", part.state if part else NO_SLOT)):
            if slot != NO_SLOT:
                assert self.pool(tier, "state").owner.get(slot) == TREE
                assert self.pool(tier, "state").content[slot] == (name, data)

    @property
    def host_free(self) -> tuple[int, int]:
        return self.host_kv.free, self.host_states.free


__all__ = ["CALLER", "Copy", "FoundInTiers", "HostWorld"]
