"""Deep and wide trees. Costs are counted in steps, not in seconds."""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Iterator

import pytest

from phloem.actors.actions import FreeDeviceSlots
from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import Lfu, Lru

DEEP = 200_000


@pytest.fixture
def shallow_stack() -> Iterator[None]:
    """Hardly more stack than the test itself stands on."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 60)
    yield
    sys.setrecursionlimit(limit)


def deep_chain(tree: Tree, key: TokenKey) -> None:
    """One node and one state for each token, through one growing lease."""
    lease, _ = tree.acquire(key, owner="deep")
    for end in range(1, key.length + 1):
        _, actions = tree.insert(key, array("i", (end,)), end, lease, length=end)
        assert not actions
    tree.release(lease)


@pytest.mark.usefixtures("shallow_stack")
def test_s193_f090_a_chain_of_200_000_nodes() -> None:
    tree = Tree(page_size=1)
    key = TokenKey.of(array("i", range(1, DEEP + 1)))
    deep_chain(tree, key)
    assert tree.figures().nodes == DEEP
    assert tree.match(key).usable == DEEP
    lease, _ = tree.acquire(key, owner="reader")
    assert len(tree.pages_of(lease)) == DEEP
    assert tree.figures().pages_protected == DEEP
    audit_tree(tree)
    assert tree.evict(pages=1) == (tree.evict(0)[0], [])  # all protected
    tree.release(lease)
    assert tree.figures().pages_protected == 0
    evicted, _ = tree.evict(pages=DEEP // 2)
    assert (evicted.pages, evicted.states) == (DEEP // 2, DEEP // 2)
    assert tree.match(key).usable == DEEP // 2
    tree.reset()
    more, freed = True, 0
    while more:
        more, actions = tree.sweep(limit=10_000)
        frees = [action for action in actions if isinstance(action, FreeDeviceSlots)]
        freed += sum(len(action.ids) for action in frees if action.component == "kv")
    assert freed == DEEP // 2
    assert tree.figures().nodes == 0
    audit_tree(tree)


@pytest.mark.usefixtures("shallow_stack")
def test_a_deep_chain_without_states_becomes_few_nodes() -> None:
    tree = Tree(page_size=1, components=("kv",))
    key = TokenKey.of(array("i", range(1, 20_001)))
    lease, _ = tree.acquire(key, owner="deep")
    for end in range(1, key.length + 1):
        tree.insert(key, array("i", (end,)), 0, lease, length=end)
    assert tree.figures().nodes < 10
    assert tree.match(key).usable == 20_000
    audit_tree(tree)


class Counting(Lru):
    """Counts how often it is asked for a score."""

    def __init__(self) -> None:
        self.asked = 0

    def kv_score(self, node: Node, /) -> int:
        """Count, then answer."""
        self.asked += 1
        return super().kv_score(node)

    def state_score(self, node: Node, /) -> int:
        """Count, then answer."""
        self.asked += 1
        return super().state_score(node)


def wide_tree(leaves: int, policy: Lru) -> Tree:
    tree = Tree(page_size=1, policy=policy)
    for leaf in range(1, leaves + 1):
        tree.insert(array("i", (leaf % 7, leaf)), array("i", (2 * leaf, 2 * leaf + 1)), leaf)
    return tree


@pytest.mark.parametrize("leaves", [100, 20_000])
def test_f098_evicting_asks_for_as_many_scores_as_it_frees(leaves: int) -> None:
    policy = Counting()
    tree = wide_tree(leaves, policy)
    policy.asked = 0
    for turn in range(50):
        evicted, _ = tree.evict(pages=1, states=1)
        assert (evicted.pages, evicted.states) == (1, 1)
        tree.insert([8, 10**6 + turn], [10**6 + 2 * turn, 10**6 + 2 * turn + 1], 10**6 + turn)
    assert policy.asked <= 12 * 50


@pytest.mark.parametrize("leaves", [100, 20_000])
def test_another_policy_asks_for_few_scores_in_each_turn(leaves: int) -> None:
    policy = Counting()
    tree = wide_tree(leaves, Lru())
    tree.use_policy(policy)
    assert 0 < policy.asked <= 2 * 512
    for turn in range(30):
        policy.asked = 0
        if turn == 10:
            tree.use_policy(policy)  # again, before all have been scored
            assert policy.asked <= 2 * 512
        evicted, _ = tree.evict(pages=1, states=1)
        assert (evicted.pages, evicted.states) == (1, 1)
        assert policy.asked <= 2 * (512 + 2 * 32) + 10
    audit_tree(tree)
    tree.evict(pages=2 * leaves + 7)
    assert tree.figures().nodes == 0  # whatever had no score then


def test_another_policy_scores_what_does_not_go_too() -> None:
    tree = wide_tree(2000, Lru())
    tree.use_policy(Lfu())
    for _ in range(2000 // 32):
        assert tree.evict_bytes(2, page_bytes=1, state_bytes=0)[0].pages == 2  # of leaves only
    audit_tree(tree)
    assert not tree.state_index._unscored


@pytest.mark.parametrize("leaves", [100, 20_000])
def test_f098_indexes_do_not_grow_with_what_was_used(leaves: int) -> None:
    tree = wide_tree(leaves, Lru())
    for turn in range(3 * leaves):
        lease, _ = tree.acquire(array("i", (turn % 7, turn % leaves + 1)), owner="busy")
        tree.release(lease)
    assert len(tree.kv_index) <= tree.figures().leaves
    assert len(tree.state_index) <= tree.figures().states
    audit_tree(tree)


def test_f098_dead_entries_are_swept_out() -> None:
    tree = Tree(page_size=1)
    for turn in range(1, 3001):
        tree.insert([turn], [turn], turn)
        tree.evict(states=1)
        assert len(tree.kv_index) <= 2 * tree.figures().leaves + 70


@pytest.mark.parametrize("way", ["evict", "reset"])
def test_nodes_that_have_gone_are_referred_to_by_nobody(way: str) -> None:
    """The collector does not see nodes, so the tree has to cut their cycles itself."""
    tree = wide_tree(500, Lru())
    for end in range(3, 8):  # and a chain of only children
        tree.insert(array("i", (1, 1, *range(3, end + 1))), array("i", [end] * end), 600 + end)
    nodes = list(tree.radix)
    assert any(node.only is not None for node in nodes)
    assert all(sys.getrefcount(node) > 3 for node in nodes)
    if way == "evict":
        tree.evict(pages=10**6)
        tree.state_index.rebuild()
    else:
        tree.reset()
        while tree.sweep(limit=7)[0]:
            pass
    assert tree.figures().nodes == 0
    # the list, the loop's name, and the argument of the call
    assert all(sys.getrefcount(node) == 3 for node in nodes)


def test_a_reset_lets_go_of_a_few_nodes_at_a_time() -> None:
    """Of the candidates, too: a dictionary of a million takes a tenth of a second to go."""
    tree = wide_tree(500, Lru())
    nodes = list(tree.radix)

    def references() -> int:
        return sum(map(sys.getrefcount, nodes))

    left = references()
    tree.reset()
    assert left - references() < 10
    more, sweeps = True, 0
    while more:
        left = references()
        more, _ = tree.sweep(limit=7)
        sweeps += 1
        assert left - references() < 7 * 8
    assert sweeps > 500 / 7


def test_the_collector_sees_nothing_of_the_nodes() -> None:
    gc.collect()
    before = len(gc.get_objects())
    tree = wide_tree(10_000, Lru())
    gc.collect()
    grown = len(gc.get_objects()) - before
    assert tree.figures().nodes > 10_000
    assert grown < 500


@pytest.mark.parametrize("host", [False, True])
def test_a_tree_has_fewer_attributes_than_slow_calls_begin_at(host: bool) -> None:
    """From 30 on CPython 3.11 looks methods up in a dictionary first: almost twice the time."""
    tree = Tree(host=host)
    tree.tick(1)
    tree.evict(1)
    assert len(vars(tree)) < 30
