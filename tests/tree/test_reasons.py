"""Why tokens were not reused: the reasons, their sums, and how long evictions are remembered."""

from __future__ import annotations

import pytest
from tree.support import World, run

from phloem.actors.tree import Namespace, TokenKey, Tree
from phloem.actors.tree.ghosts import Ghosts


def lost(world: World, tokens: list[int], limit: int | None = None) -> dict[str, int]:
    """The reasons of a match; they add up."""
    match = world.tree.match(tokens, limit)
    assert sum(match.lost.values()) == match.tokens - match.usable
    return {str(reason): count for reason, count in match.lost.items()}


def test_all_reasons_of_one_match() -> None:
    world = World(page=2)
    world.publish(run(1, 8))
    world.publish(run(1, 12), state=False)
    world.publish(run(1, 16), state=False)
    world.reclaim(pages=2)
    assert lost(world, run(1, 21), 20) == {
        "last_token": 1,
        "never_seen": 4,
        "evicted": 4,
        "no_state": 4,
    }
    assert lost(world, run(1, 10), 9) == {"last_token": 1, "partial_page": 1}
    assert lost(world, run(1, 8)) == {}


def test_an_eviction_says_who_and_when() -> None:
    tree = Tree(page_size=1, components=("kv",))
    tree.insert(run(1, 4), range(1, 5))
    tree.insert([9], [9])
    tree.evict(4, by="r7")
    match = tree.match(run(1, 6))
    assert (match.evicted, match.evicted_by, match.evicted_at) == (4, "r7", 2)
    assert match.lost == {"never_seen": 2, "evicted": 4}
    assert tree.match([7, 8]).lost == {"never_seen": 2}


def test_a_namespace_that_lost_everything_is_remembered() -> None:
    world = World()
    space = Namespace("adapter", "salt")
    world.publish(run(1, 4), ns=space)
    world.reclaim_full(4)
    assert world.tree.figures().namespaces == 0
    assert world.tree.match(TokenKey.of(run(1, 4), space)).evicted == 4
    assert lost(world, run(1, 4)) == {"never_seen": 4}


def test_what_another_namespace_lost_is_never_told() -> None:
    world = World()
    for salt in ("a", "b", "c"):
        world.publish(run(1, 4), ns=Namespace("", salt))
    world.reclaim_full(8)
    assert [world.tree.match(TokenKey.of(run(1, 4), Namespace("", s))).evicted for s in "abc"] == [
        4,
        4,
        0,
    ]
    assert world.tree.match(TokenKey.of(run(1, 4), Namespace("a", ""))).evicted == 0


@pytest.mark.parametrize("again", [[1, 2], [1, 2, 3], [1, 2, 9], run(1, 4), run(1, 6)])
def test_what_came_back_is_no_ghost(again: list[int]) -> None:
    world = World(kinds=("kv",))
    world.publish(run(1, 4), state=False)
    world.reclaim_full(4)
    world.publish(again, state=False)
    match = world.tree.match(run(1, 4))
    assert (match.usable + match.evicted, match.usable) == (4, min(len(again), match.usable))
    assert match.usable == len([t for t, u in zip(again, run(1, 4), strict=False) if t == u])


def test_a_ghost_is_found_however_the_prefix_is_cut_now() -> None:
    world = World(kinds=("kv",))
    world.publish(run(1, 8), state=False)
    world.publish([1, 2, 3, 4, 50], state=False)
    world.use([1, 2, 3, 4, 50])
    world.reclaim_full(4)
    world.publish([1, 2, 60], state=False)
    world.publish([1, 2, 3, 4, 50, 51], state=False)
    assert world.tree.match(run(1, 8)).evicted == 4


def test_old_records_are_forgotten_and_then_unknown() -> None:
    tree = Tree(page_size=1, components=("kv",), ghosts_max=8)
    seen: list[str] = []
    for turn in range(1, 60):
        tree.insert([turn, 1], [2 * turn, 2 * turn + 1])
        tree.evict(2, by=f"r{turn}")
    for turn in range(1, 60):
        (reason,) = tree.match([turn, 1]).lost
        seen.append(reason)
    changes = [reason for at, reason in enumerate(seen) if not at or seen[at - 1] != reason]
    assert changes == ["never_seen", "forgotten", "evicted"]
    assert seen.count("evicted") <= 8


def test_records_are_bounded_in_number_and_bytes() -> None:
    ghosts = Ghosts(page_bytes=4, limit=100, bytes_max=1000)
    for mark in range(10_000):
        ghosts.note(mark, bytes(40), "r", mark)
        assert len(ghosts) <= 100
    held = sum(len(edge) for edge, *_ in [*ghosts._recent.values(), *ghosts._older.values()])
    assert held <= 1000 + 2 * 40


def test_without_ghosts_everything_unknown_was_never_seen() -> None:
    tree = Tree(page_size=1, components=("kv",), ghosts_max=0)
    tree.insert([1, 2], [1, 2])
    tree.evict(2)
    assert tree.match([1, 2]).lost == {"never_seen": 2}


def test_a_reset_forgets_what_was_evicted() -> None:
    world = World()
    world.publish(run(1, 4))
    world.reclaim_full(4)
    world.reset()
    assert lost(world, run(1, 4)) == {"never_seen": 4}
