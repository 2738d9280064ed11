"""That the naive cache finds a wrong order of eviction: bugs are put in, and it must see each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tree.naive import Compared

from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.leases import Leases
from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import Fifo
from phloem.actors.tree.radix import Radix


def insert(both: Compared, *paths: list[int]) -> None:
    for path in paths:
        both.insert(TokenKey.of(path), len(path), state=True)


def use(both: Compared, path: list[int]) -> None:
    both.acquire(TokenKey.of(path))
    both.release(0)


def pages_by_recency(both: Compared) -> None:
    insert(both, [1], [2])
    use(both, [1])
    both.evict(1, 0)


def states_by_recency(both: Compared) -> None:
    insert(both, [1], [2])
    use(both, [1])
    both.evict(0, 1)


def what_lies_above_what_went(both: Compared) -> None:
    """Used last through the leaf that goes first, being the oldest."""
    insert(both, [1], [1, 1], [2])
    use(both, [1, 1])
    both.use_policy("fifo")
    both.evict(1, 0)
    both.use_policy("lru")
    both.evict(1, 0)


def what_was_split(both: Compared) -> None:
    insert(both, [1, 1], [2], [1])
    both.evict(1, 0)


def by_frequency(both: Compared) -> None:
    both.use_policy("lfu")
    insert(both, [1])
    use(both, [1])
    insert(both, [2])
    both.evict(1, 0)


def by_age(both: Compared) -> None:
    both.use_policy("fifo")
    insert(both, [1], [2])
    use(both, [1])
    both.evict(1, 0)


def a_lease_is_no_use(patch: pytest.MonkeyPatch) -> None:
    def wrong(leases: Leases, node: Node, now: int, former: bool) -> None:
        del now
        unprotect(leases, node, 0, former)

    unprotect = Leases._unprotect
    patch.setattr(Leases, "_unprotect", wrong)


def a_lease_is_no_use_of_the_state(patch: pytest.MonkeyPatch) -> None:
    def wrong(leases: Leases, lease: Any, now: int, *, former: bool = False) -> None:
        del now
        end_state(leases, lease, 0, former=former)

    end_state = Leases.end_state
    patch.setattr(Leases, "end_state", wrong)


def a_use_is_not_passed_up(patch: pytest.MonkeyPatch) -> None:
    def wrong(radix: Radix, leaf: Node) -> Node:
        leaf.stamp = 0
        return remove(radix, leaf)

    remove = Radix.remove
    patch.setattr(Radix, "remove", wrong)


def a_split_is_a_use(patch: pytest.MonkeyPatch) -> None:
    def wrong(radix: Radix, node: Node, at: int) -> Node:
        node.stamp += 3
        return split(radix, node, at)

    split = Radix.split
    patch.setattr(Radix, "split", wrong)


def acquires_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def wrong(tree: Tree, *args: Any, **options: Any) -> Any:
        lease, match = acquire(tree, *args, **options)
        lease.anchor.hits -= 1
        return lease, match

    acquire = Tree.acquire
    patch.setattr(Tree, "acquire", wrong)


def the_newest_goes_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fifo, "kv_score", lambda _, node: 10**6 - node.born)


@pytest.mark.parametrize(
    ("program", "kinds", "plant"),
    [
        (pages_by_recency, ("kv",), a_lease_is_no_use),
        (states_by_recency, ("kv", "state"), a_lease_is_no_use_of_the_state),
        (what_lies_above_what_went, ("kv",), a_use_is_not_passed_up),
        (what_was_split, ("kv",), a_split_is_a_use),
        (by_frequency, ("kv", "state"), acquires_do_not_count),
        (by_age, ("kv",), the_newest_goes_first),
    ],
)
def test_a_wrong_order_of_eviction_is_found(
    program: Callable[[Compared], None],
    kinds: tuple[str, ...],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> Compared:
        both = Compared(1, 1, kinds)
        both.world.check_each = False  # protection need not be counted before somebody asks
        for index in both.world.tree.indexes:
            index.scored_at_once = 100  # all that there are
        program(both)
        return both

    run().end()
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="another goes before it"):
        run()
