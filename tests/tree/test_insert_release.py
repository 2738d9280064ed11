"""An insert that ends its lease: the same as an insert and a release after it, in one operation."""

from __future__ import annotations

import random
from itertools import product

import pytest
from tree.fingerprint import fingerprint
from tree.host_world import HostWorld
from tree.naive import Compared
from tree.support import World, run

from phloem.actors.tree import Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.keys import TokenKey
from phloem.errors import InvalidRequest, StaleHandle

KINDS = {"kv": ("kv",), "state": ("kv", "state"), "window": ("kv", "state", "window:2")}
POLICIES = ("lru", "lfu", "slru", "fifo", "priority", "session")


def insert(both: Compared, key: TokenKey, number: int, *, state: bool, at_once: bool) -> None:
    lease, compare = both.held[number].lease, both.compare
    both.compare = lambda: None  # type: ignore[method-assign]  # like this
    both.insert(key, key.length, state=state, number=number, release=at_once)
    if lease.live:  # it was not at once, or there was no room
        both.release(number)
    both.compare = compare  # type: ignore[method-assign]
    both.compare()
    assert not lease.live


def after(seed: int, kinds: tuple[str, ...], policy: str, *, at_once: bool) -> list[bytes]:
    """The whole state after each of some random steps."""
    chance = random.Random(seed)
    both = Compared(1, 1, kinds, policy)
    both.world.check_each = False  # it has what leases protect counted
    states: list[bytes] = []
    for _ in range(60):
        path = chance.choices((1, 2), k=chance.randrange(1, 7))
        number = chance.randrange(len(both.held)) if both.held else None
        match chance.randrange(6):
            case 0 | 1 if len(both.held) < 5:
                both.acquire(TokenKey.of(path), opened=chance.random() < 0.3, taste=len(states))
            case 2 | 3 if number is not None:
                held = both.held[number].lease
                covered = TokenKey(held.key.data[: held.boundary * 4], held.key.namespace)
                key = covered.extended(path[:2])
                insert(both, key, number, state=chance.random() < 0.7, at_once=at_once)
            case 4:
                both.evict(chance.randrange(4), chance.randrange(2))
            case _:
                both.insert(TokenKey.of(path), len(path), state=chance.random() < 0.7)
        states.append(fingerprint(both))
    both.end()
    return states


@pytest.mark.parametrize(("kinds", "policy"), [*product(KINDS, POLICIES)])
def test_it_comes_to_the_same_as_a_release_after_it(kinds: str, policy: str) -> None:
    for seed in range(6):
        at_once = after(seed, KINDS[kinds], policy, at_once=True)
        assert at_once == after(seed, KINDS[kinds], policy, at_once=False)


@pytest.mark.parametrize("policy", ["lru", "benefit", "adaptive"])
def test_both_evict_in_the_same_order(policy: str) -> None:
    left: list[list[int]] = []
    for at_once in (True, False):
        chance = random.Random(3)
        world = World(pages=400, states=200, policy=policy, check_each=False)
        for _ in range(60):
            tokens = chance.choices((1, 2), k=chance.randrange(1, 9))
            lease = world.pin(tokens)
            world.publish(tokens, lease=lease, release=at_once)
            if not at_once:
                world.unpin(lease)
        order = list[int]()
        while world.tree.figures().pages:
            world.carry_out(world.tree.evict(1)[1])
            order.append(world.tree.figures().nodes)
        left.append(order)
    assert left[0] == left[1]


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_with_a_host_tier(write_policy: str) -> None:
    logs = list[object]()
    for at_once in (True, False):
        world = HostWorld(write_policy=write_policy)  # type: ignore[arg-type]  # one of them
        for tokens in (run(1, 4), run(1, 8), run(1, 4) + run(20, 23)):
            lease = world.pin(tokens)
            world.publish(tokens, lease=lease, release=at_once)
            if not at_once:
                world.unpin(lease)
            assert not lease.live
        world.settle()
        audit_tree(world.tree)
        world.carry_out(world.tree.evict(8, 1)[1])
        world.settle()
        logs.append((world.log, world.tree.figures()))
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("length", "passed_on"), [(0, True), (2, False)])
def test_what_a_request_was_asked_to_keep_goes_to_one_that_stands_where_it_ends(
    length: int, passed_on: bool
) -> None:
    told = list[list[tuple[int, str]]]()
    for at_once in (True, False):
        tree = Tree(page_size=1, state_chunk=1)
        key, other = TokenKey.of(run(1, 8)), TokenKey.of(run(1, 4) + run(20, 23))
        first, _ = tree.open(key, owner="first")
        second, _ = tree.open(key, owner="second")
        tree.open(other, owner="other")
        pages = list(range(1, length + 1))
        tree.insert(key, pages, lease=first, length=length, release=at_once)
        if not at_once:
            tree.release(first)
        told.append([(one.position, one.why) for one in second.wanted])
    assert told[0] == told[1] and ((4, "branch") in told[0]) == passed_on


def test_nothing_to_publish_still_ends_the_lease() -> None:
    for enabled, tokens in ((True, []), (False, run(1, 4))):
        tree = Tree(page_size=1, enabled=enabled)
        lease, _ = tree.acquire(tokens, owner="one")
        result, _ = tree.insert(tokens, list(range(1, len(tokens) + 1)), lease=lease, release=True)
        assert not result.published and not lease.live and not tree.leases.live
        audit_tree(tree)


def test_what_is_refused_leaves_the_lease() -> None:
    tree = Tree(page_size=1)
    with pytest.raises(InvalidRequest, match="without a lease"):
        tree.insert(run(1, 2), [1, 2], release=True)
    lease, _ = tree.acquire(run(1, 4), owner="one")
    with pytest.raises(InvalidRequest):
        tree.insert(run(1, 4), [1, 2], lease=lease, release=True)
    assert lease.live
    tree.insert(run(1, 4), [1, 2, 3, 4], lease=lease, release=True)
    with pytest.raises(StaleHandle):
        tree.release(lease)
    assert not tree.figures().pages_protected
    audit_tree(tree)
