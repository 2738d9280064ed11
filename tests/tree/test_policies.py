"""Eviction policies: the order each gives, preferences that end, and changing the policy."""

from __future__ import annotations

import random

import pytest
from tree.support import World, run

from phloem.actors.actions import FreeDeviceSlots
from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import (
    Lfu,
    Policy,
    PriorityFirst,
    SessionFirst,
    policy_named,
)
from phloem.errors import InvalidRequest

NAMES = ["lru", "lfu", "slru", "fifo", "priority", "session", "benefit", "adaptive"]


def leaves_in_order(world: World) -> list[int]:
    """Evict page by page; the first token of what went, in order."""
    order: list[int] = []
    while (before := {node.edge[0] for node in world.tree.radix}) and world.reclaim_full(1)[0]:
        order += sorted(before - {node.edge[0] for node in world.tree.radix})
    return order


def three_leaves(policy: str) -> World:
    """1, 2, 3 published in that order; then 1 used three times, 3 once, and 2 once, at the end."""
    world = World(policy=policy)
    for token in (1, 2, 3):
        world.publish([token])
    for token in (1, 1, 1, 3, 2):
        world.use([token])
    return world


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", [1, 3, 2]), ("lfu", [3, 2, 1]), ("fifo", [1, 2, 3]), ("session", [1, 3, 2])],
)
def test_the_order_of_a_policy(policy: str, order: list[int]) -> None:
    assert leaves_in_order(three_leaves(policy)) == order


def test_slru_gives_up_what_was_used_once_first() -> None:
    world = World(policy="slru")
    world.publish([1])
    world.use([1])
    world.publish([2])
    world.publish([3])
    assert leaves_in_order(world) == [2, 3, 1]


def first_to_go(tree: Tree) -> list[int]:
    """The pages that an eviction of one page takes."""
    action = tree.evict(1)[1][0]
    assert isinstance(action, FreeDeviceSlots)
    return action.ids.tolist()


@pytest.mark.parametrize(("again", "first"), [(None, 2), (20, 1)])
def test_s62_the_lowest_priority_goes_first(again: int | None, first: int) -> None:
    tree = Tree(page_size=1, components=("kv",), policy="priority")
    tree.insert([1], [1], priority=10)
    tree.insert([2], [2])
    if again is not None:
        tree.insert([2], [99], priority=again)
    assert first_to_go(tree) == [first]


def test_priority_ends_with_its_time() -> None:
    tree = Tree(page_size=1, components=("kv",), policy="priority")
    lease, _ = tree.open(TokenKey.of([1]), owner="r", priority=50, keep_until=100)
    tree.insert(lease.key, [1], 0, lease)
    tree.release(lease)
    tree.insert([2], [2])
    tree.tick(99)
    audit_tree(tree)
    assert first_to_go(tree) == [2]
    tree.insert([3], [3])
    tree.tick(100)
    audit_tree(tree)
    assert first_to_go(tree) == [1]


def test_a_priority_that_is_over_does_not_replace_one_that_lasts() -> None:
    world = World(kinds=("kv",), policy="priority")
    lasting, _ = world.tree.open(TokenKey.of([1]), owner="r", priority=10)
    late, _ = world.tree.open(TokenKey.of([1]), owner="s", priority=50, keep_until=5)
    world.publish([1], lease=lasting, state=False)
    world.tree.release(lasting)
    world.tree.tick(5)
    world.publish([1, 2], lease=late, state=False)
    assert world.node_at([1]).priority == 10
    world.tree.release(late)
    world.check()


def test_priority_of_a_path_follows_its_strongest_use() -> None:
    world = World(kinds=("kv",), policy="priority")
    for tokens, priority in ((run(1, 2), 10), (run(1, 4), 30), (run(1, 6), 20)):
        lease, _ = world.tree.open(TokenKey.of(tokens), owner="r", priority=priority)
        world.publish(lease.key, state=False, lease=lease)
        world.unpin(lease)
    assert world.find(run(1, 6)).walk == 6
    assert world.node_at(run(1, 6)).priority == 20
    assert world.node_at(run(1, 4)).priority == 30


@pytest.mark.parametrize("arguments", [{"priority": -1}, {"priority": 101}, {"keep_until": -1}])
def test_bad_preferences_are_refused(arguments: dict[str, int]) -> None:
    world = World()
    with pytest.raises(InvalidRequest):
        world.tree.open(TokenKey.of([1]), owner="r", **arguments)  # type: ignore[arg-type]  # cases
    assert world.tree.figures().leases == 0


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'clock'.*lru, lfu"):
        policy_named("clock")


# -- all of them -----------------------------------------------------------------------------------


def scan(world: World, policy: Policy) -> Node:
    """The candidate with the smallest score, found by looking at each."""
    index = world.tree.kv_index
    candidates = [node for node in world.tree.radix if index.eligible(node)]
    return min(candidates, key=lambda node: (policy.kv_score(node), node.id))


@pytest.mark.parametrize("name", NAMES)
def test_the_index_finds_what_a_full_scan_finds(name: str) -> None:
    chance = random.Random(7)
    world = World(policy=name, pages=120, states=60)
    policy = world.tree.policy
    for turn in range(200):
        world.tree.tick(turn)
        tokens = [chance.randint(1, 3) for _ in range(chance.randint(1, 5))]
        lease, _ = world.tree.open(
            TokenKey.of(tokens),
            owner="r",
            session=f"s{turn % 5}",
            session_ends=turn + chance.randint(1, 40),
            priority=chance.choice([0, 10, 20]),
            keep_until=turn + chance.randint(1, 40),
        )
        if world.kv.free < 10 or world.state_free < 5:
            world.unpin(lease)
            for _ in range(20):
                victim = scan(world, policy)
                last = victim.pages[-1]
                world.reclaim(pages=1)
                assert not policy.rises_only or last not in world.kv.owner
            continue
        world.publish(lease.key, lease=lease, state=chance.random() < 0.7)
        if chance.random() < 0.5:
            world.tree.stand_on(lease)
        world.unpin(lease)
    world.reclaim(120, 60)
    assert (world.kv.free, world.state_free) == (120, 60)


@pytest.mark.parametrize("other", NAMES)
def test_changing_the_policy_keeps_the_content(other: str) -> None:
    world = three_leaves("lru")
    before, figures = world.nodes(), world.tree.figures()
    world.tree.use_policy(other)
    world.check()
    assert (world.nodes(), world.tree.figures()) == (before, figures)
    assert sorted(leaves_in_order(world)) == [1, 2, 3]


def test_changing_the_policy_changes_the_order() -> None:
    world = three_leaves("lru")
    world.tree.use_policy(Lfu())
    assert leaves_in_order(world) == [3, 2, 1]


def test_policies_stand_within_others() -> None:
    world = three_leaves("lru")
    world.tree.use_policy(PriorityFirst(SessionFirst(Lfu())))
    world.check()
    assert leaves_in_order(world) == [3, 2, 1]


def test_policies_do_not_stand_within_others_for_ever() -> None:
    policy: Policy = Lfu()
    with pytest.raises(InvalidRequest, match="bits"):
        for _ in range(20):
            policy = PriorityFirst(policy)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (SessionFirst(PriorityFirst()), [3, 2, 4, 1]),
        (PriorityFirst(SessionFirst()), [3, 4, 2, 1]),
    ],
)
def test_the_outer_policy_decides_first(policy: Policy, order: list[int]) -> None:
    """1 has both a session and a priority, 2 a priority, 4 a session, 3 neither."""
    world = World(policy="lru")
    world.tree.use_policy(policy)
    for token, session, priority in ((1, "a", 9), (2, None, 9), (4, "b", 0), (3, None, 0)):
        lease, _ = world.tree.open(
            TokenKey.of([token]), owner="r", session=session, priority=priority, keep_until=50
        )
        world.publish([token], lease=lease)
        world.tree.stand_on(lease)
        world.unpin(lease)
    assert leaves_in_order(world) == order


def test_a_priority_ends_within_another_policy() -> None:
    tree = Tree(page_size=1, components=("kv",), policy=SessionFirst(PriorityFirst()))
    lease, _ = tree.open(TokenKey.of([1]), owner="r", priority=50, keep_until=100)
    tree.insert(lease.key, [1], 0, lease)
    tree.release(lease)
    tree.insert([2], [2])
    tree.tick(100)
    assert first_to_go(tree) == [1]
