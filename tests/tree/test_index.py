"""The candidate index: order, runs, dead entries, and what the garbage collector sees of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest

from phloem.actors.tree.eviction import CandidateIndex
from phloem.actors.tree.node import Node
from phloem.actors.tree.scoring import KEEP


def node(number: int, stamp: int) -> Node:
    """A node that has nothing but an id and a score."""
    return Node(number, None, b"", 0, b"", stamp=stamp)


def made(run_size: int) -> tuple[CandidateIndex, set[int]]:
    """An index by stamp, and the ids of the nodes that may go."""
    alive: set[int] = set()
    index = CandidateIndex(1, lambda one: one.stamp, lambda one: one.id in alive)
    index.run_size = run_size
    return index, alive


def test_what_is_watched_is_bounded_and_still_expires() -> None:
    """A priority that every use prolongs, in a cache from which nothing has to go for days."""
    index, alive = made(2048)
    index.score = lambda one: one.priority
    nodes = [node(number, 0) for number in range(1, 11)]
    for one in nodes[:5]:
        alive.add(one.id)
        index.push(one)
    for time in range(1, 2000):
        for one in nodes:
            one.priority, one.keep_until = 50, 10_000 + time
            index.watch(one)
    assert len(index._expiring) < 200
    for one in nodes[5:]:  # leased until now
        alive.add(one.id)
        index.push(one)
    for one in nodes:
        one.priority = 0
    index.expire(20_000)
    assert {entry for entry, of in index.entries() if of.id in alive} >= {0}
    assert all(index._entries[one.id] == one.id for one in nodes), "each was scored anew"


@pytest.mark.parametrize("run_size", [1, 3, 50, 2048])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_a_full_sort(run_size: int, seed: int) -> None:
    chance = random.Random(seed)
    index, alive = made(run_size)
    nodes: dict[int, Node] = {}
    for number in range(1, 600):
        step = chance.random()
        if step < 0.5:
            nodes[number] = node(number, chance.randint(0, 2**70))
            alive.add(number)
            index.push(nodes[number])
        elif nodes and step < 0.7:
            chance.choice(list(nodes.values())).stamp += chance.randint(0, 2**69)
        elif nodes and step < 0.8:
            one = chance.choice(list(nodes.values()))
            one.stamp //= 2
            index.lower(one)
        elif nodes and step < 0.85:
            gone = chance.choice(list(nodes))
            alive.discard(gone)
            del nodes[gone]
            index.shrink(len(alive))
        elif nodes:
            popped = index.pop()
            assert popped is not None
            expected = min(nodes.values(), key=lambda one: (one.stamp, one.id))
            assert popped == (expected.stamp, expected)
            alive.discard(expected.id)
            del nodes[expected.id]
        index.shrink(len(alive))
        assert all(number in index for number in nodes)
    left = sorted(nodes.values(), key=lambda one: (one.stamp, one.id))
    popped_all = []
    while (popped := index.pop()) is not None:
        alive.discard(popped[1].id)
        popped_all.append(popped[1])
    assert popped_all == left
    assert len(index) == 0


@pytest.mark.parametrize("run_size", [4, 64])
def test_dead_entries_do_not_outnumber_the_others_for_long(run_size: int) -> None:
    index, alive = made(run_size)
    for number in range(1, 3000):
        alive.add(number)
        index.push(node(number, number))
        if number > 100:
            alive.discard(number - 100)
        for _ in range(3):
            index.shrink(len(alive))
        assert len(index) <= 3 * 101 + 64 + run_size


def test_the_collector_sees_few_of_many_entries() -> None:
    index, alive = made(256)
    nodes = [node(number, number) for number in range(1, 20_001)]
    for one in nodes:
        alive.add(one.id)
        index.push(one)
    gc.collect()
    seen = sum(len(gc.get_referents(part)) for part in vars(index).values() if gc.is_tracked(part))
    assert seen < 2_000
    assert len(index) == 20_000


def counting(index: CandidateIndex, score: Callable[[Node], int]) -> list[int]:
    """Change the index to another score; what was asked for since then, by node id."""
    asked: list[int] = []

    def counted(one: Node) -> int:
        asked.append(one.id)
        return score(one)

    index.rescore(counted)
    return asked


@pytest.mark.parametrize("run_size", [50, 2048])
def test_another_score_is_asked_for_little_by_little(run_size: int) -> None:
    index, alive = made(run_size)
    nodes = {number: node(number, number) for number in range(1, 5001)}
    for one in nodes.values():
        alive.add(one.id)
        index.push(one)
    asked = counting(index, lambda one: 10_000 - one.stamp)
    assert len(asked) == 512
    popped: list[int] = []
    for turn in range(1, 5001):
        before = len(asked)
        first = index.first()
        assert first is not None and first[1].id == max({*asked} & alive)
        index.take(first)
        assert len(asked) <= before + 1 + 32
        assert len({*asked}) == min(5000, 512 + 32 * turn)
        alive.discard(first[1].id)
        popped.append(first[1].id)
    assert sorted(popped) == [*nodes]  # none was lost, and none came twice
    assert popped[0] == 512 and popped[300:] == sorted(popped[300:], reverse=True)
    assert index.pop() is None


def test_what_has_no_score_yet_may_be_touched_and_may_go() -> None:
    index, alive = made(64)
    nodes = [node(number, number) for number in range(1, 2001)]
    for one in nodes:
        alive.add(one.id)
        index.push(one)
    asked = counting(index, lambda one: one.stamp)
    for one in nodes[1000:1100]:
        one.stamp = 0
        index.lower(one)  # now it has one
    for one in nodes[1100:1200]:
        alive.discard(one.id)
    index.refresh()
    popped = [one[1].id for one in iter(index.pop, None)]
    assert popped[:100] == [*range(1001, 1101)]
    assert popped[100:] == [*range(1, 1001), *range(1201, 2001)]
    assert len(asked) < 2 * len(popped) + 600


def test_what_stays_is_not_the_first_while_others_have_no_score_yet() -> None:
    index, alive = made(64)
    for number in range(1, 1001):
        alive.add(number)
        index.push(node(number, number))
    index.rescore(lambda one: KEEP if one.id <= 900 else one.id)
    first = index.first()
    assert first is not None and first[0] < KEEP and first[1].id > 900


def test_scored_anew_at_once_the_order_is_that_of_a_full_sort() -> None:
    index, alive = made(64)
    nodes = [node(number, number) for number in range(1, 1001)]
    for one in nodes:
        alive.add(one.id)
        index.push(one)
        one.stamp = 5000 - one.stamp
    index.rescore(lambda one: one.stamp)
    index.rebuild()
    assert [one[1].id for one in iter(index.pop, None)] == [*range(1000, 0, -1)]
