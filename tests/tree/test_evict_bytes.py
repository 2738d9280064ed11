"""Eviction from one memory for KV and states: whatever the policy gives up first, and no more."""

from __future__ import annotations

import random

import pytest
from tree.support import World, run

from phloem.actors.tree import Evicted
from phloem.actors.tree.journal import JournaledTree
from phloem.actors.tree.node import NO_SLOT
from phloem.errors import InvalidRequest


def reclaim(world: World, nbytes: int, *, state_bytes: int, states: int = 0) -> Evicted:
    """Evict with pages of one byte, and check what went against what the pools got."""
    before = world.kv.free, world.state_free
    gone, actions = world.tree.evict_bytes(
        nbytes, page_bytes=1, state_bytes=state_bytes, states=states
    )
    world.carry_out(actions)
    world.check()
    assert (world.kv.free - before[0], world.state_free - before[1]) == (gone.pages, gone.states)
    return gone


def test_bytes_come_from_what_is_oldest_be_it_a_state_or_a_leaf() -> None:
    world = World()
    world.publish(run(1, 4))  # its state becomes an inner one, and the oldest of all
    world.publish(run(1, 8))
    world.publish(run(50, 55), state=False)
    assert reclaim(world, 10, state_bytes=10) == Evicted(0, 1)
    assert reclaim(world, 3, state_bytes=10) == Evicted(4, 1)  # a leaf with a state goes whole
    assert reclaim(world, 3, state_bytes=10) == Evicted(3, 0)  # one without gives its tail
    assert reclaim(world, 10, state_bytes=10) == Evicted(7, 0)
    assert world.nodes() == []


def test_states_asked_for_are_not_counted_as_bytes() -> None:
    world = World()
    world.publish(run(1, 4))
    world.publish(run(1, 8))
    world.publish(run(50, 55), state=False)
    assert reclaim(world, 0, states=1, state_bytes=10) == Evicted(0, 1)
    assert reclaim(world, 4, states=1, state_bytes=10) == Evicted(4, 1)  # its leaf pays the bytes
    assert reclaim(world, 5, states=1, state_bytes=10) == Evicted(5, 0)


def test_the_scores_of_victims_are_told() -> None:
    tree = JournaledTree(page_size=1)
    for tokens in (run(1, 4), run(1, 8), run(50, 55)):
        tree.insert(tokens, range(1, len(tokens) + 1), 1)
    tree.evict_bytes(100, page_bytes=1, state_bytes=1)
    told = [(victim.what, victim.end, victim.score) for victim in tree.journal.take_victims()]
    inner, last = ("state", 4, [1]), ("leaf", 6, [3])
    assert told == [inner, ("leaf", 8, [2]), ("leaf", 4, [2]), last]


def test_what_is_leased_stays() -> None:
    world = World()
    world.publish(run(1, 4))
    world.publish(run(10, 14), state=False)
    lease = world.pin(run(1, 4))
    assert reclaim(world, 100, states=2, state_bytes=10) == Evicted(5, 0)
    world.unpin(lease)
    assert reclaim(world, 100, state_bytes=10) == Evicted(4, 1)


def test_f084_a_state_is_paid_for_with_kv_when_states_have_to_stay() -> None:
    """One memory of 8: two states of 1 that are leased, 6 of KV; a third state needs 2."""
    world = World()
    leases = []
    for first in (10, 20):
        world.publish([first])
        leases.append(world.pin([first]))
    world.publish(run(1, 4), state=False)
    assert reclaim(world, 2, state_bytes=1, states=0) == Evicted(2, 0)
    assert [world.find(run(1, 4)).walk, world.find([10]).walk, world.find([20]).walk] == [2, 1, 1]
    for lease in leases:
        world.unpin(lease)


@pytest.mark.parametrize("bad", [(-1, 1, 1, 0), (1, 0, 1, 0), (1, 1, -1, 0), (1, 1, 1, -1)])
def test_bad_sizes_are_refused(bad: tuple[int, int, int, int]) -> None:
    nbytes, page_bytes, state_bytes, states = bad
    with pytest.raises(InvalidRequest, match="evict of"):
        World().tree.evict_bytes(
            nbytes, page_bytes=page_bytes, state_bytes=state_bytes, states=states
        )


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("seed", range(2))
def test_each_victim_is_the_least_of_all_and_none_goes_in_vain(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    world = World(policy=policy, pages=80, states=25)
    tree, state_bytes = world.tree, 7
    for _ in range(60):
        tokens = [chance.randint(1, 3) for _ in range(chance.randint(1, 6))]
        if world.kv.free >= 20 and world.state_free >= 5:
            world.publish(tokens, state=chance.random() < 0.6)
            world.use(tokens[: chance.randint(1, 6)])
            continue
        nbytes = chance.randint(1, 25)
        freed = 0
        while freed < nbytes:
            leaves = [
                (tree.policy.kv_score(node), 0, node.id)
                for node in tree.radix
                if tree.kv_index.eligible(node)
            ]
            states = [
                (tree.policy.state_score(node), 1, node.id)
                for node in tree.radix
                if tree.state_index.eligible(node)
            ]
            least = min(leaves + states)
            before = {node.id: node.state for node in tree.radix}
            gone = reclaim(world, 1, state_bytes=state_bytes)
            after = {node.id: node.state for node in tree.radix}
            if least[1]:
                assert after.get(least[2], NO_SLOT) == NO_SLOT != before[least[2]]
            freed += gone.pages + state_bytes * gone.states
            assert gone.pages == 1 or gone.states == 1
