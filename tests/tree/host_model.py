"""A run of the host tier that is compared with what the pools hold, after each step.

The pools know the owner of each place and which tokens stood before its end when it was filled. So
what a tier has is known without the tree: what a match must say is recomputed from that alone.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from tree.host_world import HostWorld
from tree.naive import NAMESPACES, page_tokens
from tree.support import CALLER, Content, Pool

from phloem.actors.actions import TREE
from phloem.actors.tree import Lease, TokenKey, WritePolicy
from phloem.actors.tree.keys import TOKEN_BYTES
from phloem.actors.tree.node import NO_SLOT

POLICIES = ["lru", "lfu", "slru", "fifo", "priority", "session", "benefit"]


def has(pool: Pool) -> set[Content]:
    """What the tree has in a pool."""
    return {pool.content[one] for one, owner in pool.owner.items() if owner == TREE}


class HostRun:
    """A world whose operations are tried in any order; copies and answers come when they come."""

    def __init__(
        self,
        page: int,
        kinds: Sequence[str],
        write_policy: WritePolicy,
        cap: int | None = None,
        policy: str = "lru",
    ) -> None:
        self.world = HostWorld(
            page=page,
            chunk=1,
            pages=14,
            states=4,
            host_pages=10,
            host_states=3,
            kinds=kinds,
            write_policy=write_policy,
            cap=cap,
            policy=policy,
            auto=False,
        )
        tree = self.world.tree
        assert tree.host is not None
        for index in (tree.kv_index, tree.state_index, tree.host.kv_index, tree.host.state_index):
            index.run_size = 2
            index.scored_at_once = index.scored_a_victim = 1
        self.page_bytes = page * TOKEN_BYTES
        self.stateful = "state" in kinds
        self.held: list[Lease] = []
        self.former: list[Lease] = []

    # -- what the pools say ----------------------------------------------------------------------

    def boundaries(self, key: TokenKey, limit: int) -> tuple[int, int, int]:
        """How far KV is known, the deepest boundary, and the deepest on the device; in bytes."""
        world = self.world
        device, host = has(world.kv), has(world.host_kv)
        states = has(world.states)
        all_states = states | has(world.host_states)
        known = usable = on_device = 0
        whole = True  # all of it is on the device
        step = self.page_bytes
        for at in range(step, min(limit, key.length) * TOKEN_BYTES // step * step + 1, step):
            prefix = (key.root, key.data[:at])
            if prefix not in device and prefix not in host:
                break
            known = at
            whole = whole and prefix in device
            if not self.stateful or prefix in all_states:
                usable = at
            if whole and (not self.stateful or prefix in states):
                on_device = at
        return known, usable, on_device

    @property
    def clean(self) -> bool:
        """Whether nothing is left of former generations, so that the pools say all."""
        return not self.world.tree.former.nodes

    def match(self, key: TokenKey, limit: int) -> None:
        match = self.world.tree.match(key, limit)
        if not self.clean:
            return
        known, usable, device = (at // TOKEN_BYTES for at in self.boundaries(key, limit))
        if self.world.tree.host_closed:  # only what the device has can be had
            assert match.lost.get("tier_failed", 0) == usable - device
            usable = device
        assert (match.kv_prefix, match.usable, match.device) == (known, usable, device)
        assert match.host == match.usable - match.device
        assert sum(match.lost.values()) == match.tokens - match.usable
        tier = ""
        if self.stateful and match.usable:
            prefix = (key.root, key.data[: match.usable * TOKEN_BYTES])
            tier = "device" if prefix in has(self.world.states) else "host"
        assert match.state_tier == tier

    # -- operations ------------------------------------------------------------------------------

    def acquire(
        self, key: TokenKey, limit: int, *, plan: bool, session: str | None, priority: int = 0
    ) -> None:
        tree, world = self.world.tree, self.world
        _, anywhere, device = self.boundaries(key, limit)
        expected = (device if tree.host_closed else anywhere) // TOKEN_BYTES
        if session is None:
            lease, match = tree.acquire(key, owner="model", limit=limit)
        else:
            lease, match = tree.open(
                key,
                owner="model",
                limit=limit,
                session=session,
                priority=priority,
                keep_until=tree.time + 3 if priority == 10 else 0,
            )
        assert lease.boundary == match.usable
        assert lease.boundary == expected or not self.clean
        self.held.append(lease)
        world.leases[lease.id] = lease
        if plan:
            self.plan(lease)
        self.check()

    def plan(self, lease: Lease) -> None:
        number, actions = self.world.tree.plan(lease)
        assert number == lease.load
        self.world.carry_out(actions)

    def advance(self, lease: Lease) -> None:
        before = lease.boundary
        match = self.world.tree.advance(lease, beyond=before, limit=lease.key.length)
        if match.usable > before:
            assert lease.boundary == match.usable
        self.plan(lease)
        self.check()

    def fork(self, lease: Lease) -> None:
        fork = self.world.tree.fork(lease, owner="fork")
        self.held.append(fork)
        self.world.leases[fork.id] = fork
        self.check()

    def stand(self, lease: Lease) -> None:
        self.world.tree.stand_on(lease)
        self.check()

    def release(self, number: int) -> None:
        self.world.unpin(self.held.pop(number))
        self.check()

    def on_device(self, lease: Lease) -> bool:
        return not lease.load and (not lease.boundary or bool(lease.anchor.page_ids))

    def publish(self, key: TokenKey, length: int, state: bool, lease: Lease | None) -> None:
        world = self.world
        start = 0 if lease is None else lease.boundary
        pages = length // world.page - start // world.page
        state = state and self.stateful and length % world.page == 0
        if pages < 0 or not self.make_room(pages, int(state)):
            return
        ids = array("i", world.kv.take(pages, CALLER))
        world.fill(key, start, ids)
        slot = NO_SLOT
        if state:
            (slot,) = world.states.take(1, CALLER)
            world.states.content[slot] = (key.root, key.data[: length * TOKEN_BYTES])
        if lease is not None and not lease.live:
            lease = None
        published = world.publish_own(key, ids, slot, lease, length=length)
        left = [page for page, owner in world.kv.owner.items() if owner == CALLER]
        assert len(left) == length // world.page - published.end // world.page
        world.kv.move(left, CALLER, None)
        assert CALLER not in world.states.owner.values()
        self.check()

    def make_room(self, pages: int, states: int) -> bool:
        world = self.world
        short = max(0, pages - world.kv.free), max(0, states - world.states.free)
        if any(short) and world.tree.can_evict(*short):
            world.reclaim(*short)
        return world.kv.free >= pages and world.states.free >= states

    def evict(self, pages: int, states: int) -> None:
        self.world.reclaim(pages, states)
        self.check()

    def evict_host(self, pages: int, states: int) -> None:
        self.world.reclaim_host(pages, states)
        self.check()

    def answer(self, index: int, refuse: bool) -> None:
        world = self.world
        number = index % len(world.reserves)
        reserve = world.reserves[number]
        del world.reserves[number]
        if refuse:
            ended, actions = world.tree.not_reserved(reserve.op)
            world.note(ended)
        else:
            actions = world.answer(reserve)
        world.carry_out(actions)
        self.check()

    def end_copy(self, index: int, outcome: int) -> None:
        world = self.world
        op = list(world.copies)[index % len(world.copies)]
        world.end(op, ok=outcome == 0, pages_ok=max(0, outcome - 1))
        self.check()

    def use_policy(self, name: str) -> None:
        self.world.tree.use_policy(name)
        self.check()

    def close_host(self, closed: bool) -> None:
        self.world.close_host(closed)
        self.check()

    def tick(self) -> None:
        self.world.tree.tick(self.world.tree.time + 1)
        self.check()

    def close_session(self, name: str) -> None:
        self.world.tree.close_session(name)
        self.check()

    def reset(self, sweep: bool) -> None:
        world = self.world
        world.tree.reset()
        self.former.extend(self.held)
        self.held.clear()
        world.leases.clear()
        if sweep:
            self.sweep()
        self.check()

    def sweep(self) -> None:
        self.world.sweep()

    def release_former(self) -> None:
        self.world.unpin(self.former.pop())
        self.check()

    def check(self) -> None:
        self.world.check()
        for lease in self.held:
            assert lease.live
            if self.on_device(lease):
                self.world.check_content(lease)

    def end(self) -> None:
        """Everything comes back."""
        world = self.world
        while self.held:
            self.release(len(self.held) - 1)
        while self.former:
            self.release_former()
        world.settle()
        self.sweep()
        while world.tree.figures().pages:
            before = world.tree.figures()
            world.reclaim(100, 100)
            world.settle()
            assert world.tree.figures() != before, "what was promised does not go"
        world.reclaim_host(100, 100)
        self.sweep()
        for pool in (world.kv, world.states, world.host_kv, world.host_states):
            assert pool.free == pool.size, pool.name
        figures = world.tree.figures()
        assert (figures.nodes, figures.leaves, figures.namespaces, figures.leases) == (0, 0, 0, 0)
        assert not world.tree.operations.live
        assert not world.tree.operations.dropped


def wander(run: HostRun, chance: random.Random, steps: int) -> None:
    """Do so many steps by chance."""
    for _ in range(steps):
        _wander_once(run, chance)


def _wander_once(run: HostRun, chance: random.Random) -> None:
    world, page = run.world, run.world.page
    step = chance.random()
    path = [chance.randint(1, 3) for _ in range(chance.randint(0, 6))]
    key = TokenKey.of(page_tokens(path, page), NAMESPACES[chance.random() < 0.2])
    lease = chance.choice(run.held) if run.held else None
    state = chance.random() < 0.5
    if step < 0.2:
        run.publish(key, key.length, state, None)
    elif step < 0.3:
        if lease is not None and run.on_device(lease):
            covered = lease.key.data[: lease.boundary * TOKEN_BYTES]
            longer = TokenKey(covered, lease.key.namespace).extended(page_tokens(path[:3], page))
            run.publish(longer, longer.length, state, lease)
    elif step < 0.45:
        if len(run.held) < 6:
            session = chance.choice([None, "a", "b"])
            plan, priority = chance.random() < 0.8, chance.choice([0, 10, 20])
            run.acquire(key, key.length, plan=plan, session=session, priority=priority)
    elif step < 0.64:
        if lease is not None:
            _use(run, lease, chance)
    elif step < 0.76:
        evict = run.evict if step < 0.72 else run.evict_host
        evict(chance.randint(0, 5), chance.randint(0, 2))
    elif step < 0.86:
        if world.reserves:
            run.answer(chance.choice([0, 0, chance.randrange(10)]), chance.random() < 0.15)
    elif step < 0.93:
        if world.copies:
            run.end_copy(chance.randrange(10), chance.choice([0, 0, 0, 0, 1, 2, 3]))
    elif step < 0.935:
        run.reset(state)
    elif step < 0.95:
        if run.former:
            run.release_former()
    elif step < 0.955:
        run.use_policy(chance.choice(POLICIES))
    elif step < 0.96:
        run.tick()
    elif step < 0.965:
        run.close_session("a")
    elif step < 0.975:
        run.close_host(state)
    else:
        run.match(key, key.length)


def _use(run: HostRun, lease: Lease, chance: random.Random) -> None:
    step = chance.randrange(8)
    if step < 2:
        run.advance(lease)
    elif step == 2 and len(run.held) < 6:
        run.fork(lease)
    elif step == 3:
        run.stand(lease)
    elif step == 4 and lease.has_state:
        run.world.tree.release_state(lease)
        run.check()
    else:
        run.release(run.held.index(lease))
