"""Sessions: where they stand, how they recede, close and end."""

from __future__ import annotations

import pytest
from tree.support import World, run

from phloem.actors.tree import TokenKey
from phloem.errors import InvalidRequest


def turn(world: World, tokens: list[int], session: str = "s", *, ends: int = 0) -> None:
    """One request of a session, from its opening to a good end."""
    lease, _ = world.tree.open(TokenKey.of(tokens), owner="r", session=session, session_ends=ends)
    world.publish(tokens, lease=lease)
    world.tree.stand_on(lease)
    world.unpin(lease)


def standing(world: World) -> dict[str, int]:
    """Where each open session stands."""
    return {
        name: 0 if session.anchor is None else session.anchor.end
        for name, session in world.tree.sessions.open.items()
    }


def test_s164_a_session_stands_on_its_boundary_until_it_is_closed() -> None:
    world = World(policy="session")
    turn(world, run(1, 4))
    assert world.node_at(run(1, 4)).sessions == 1
    assert world.tree.sessions.close("s")
    assert world.node_at(run(1, 4)).sessions == 0
    assert world.find(run(1, 4)).dev == 4
    assert not world.tree.sessions.close("s")
    world.check()


def test_s164_it_moves_on_with_each_turn() -> None:
    world = World(policy="session")
    for end in (2, 4, 6):
        turn(world, run(1, end))
        assert standing(world) == {"s": end}
    assert [node.sessions for node in sorted(world.tree.radix, key=lambda n: n.end)] == [0, 0, 1]


def test_s166_f115_two_sessions_on_one_path() -> None:
    world = World(policy="session")
    turn(world, run(1, 4), "one")
    turn(world, run(1, 4), "two")
    turn(world, run(11, 14), "other")
    world.tree.sessions.close("other")
    node = world.node_at(run(1, 4))
    assert node.sessions == 2
    world.tree.sessions.close("one")
    assert node.sessions == 1
    assert world.reclaim_full(1) == (4, 1)
    assert world.find(run(1, 4)).dev == 4
    lease = world.pin(run(1, 4))
    world.tree.sessions.close("two")
    assert world.reclaim_full(1) == (0, 0)
    world.unpin(lease)
    assert world.reclaim_full(1) == (4, 1)


def test_s167_f114_a_request_of_a_closed_session_leaves_ordinary_cache() -> None:
    world = World(policy="session")
    lease, _ = world.tree.open(TokenKey.of(run(1, 4)), owner="r", session="s")
    world.tree.sessions.close("s")
    world.publish(run(1, 4), lease=lease)
    world.tree.stand_on(lease)
    world.unpin(lease)
    assert standing(world) == {}
    assert world.node_at(run(1, 4)).sessions == 0
    turn(world, run(1, 4))
    assert standing(world) == {"s": 4}
    assert world.reclaim(128, 20) == (4, 1)


def test_f114_a_reopened_session_is_another_one() -> None:
    world = World(policy="session")
    late, _ = world.tree.open(TokenKey.of(run(1, 4)), owner="r", session="s")
    world.tree.sessions.close("s")
    turn(world, run(11, 12))
    world.publish(run(1, 4), lease=late)
    world.tree.stand_on(late)
    assert standing(world) == {"s": 2}


def test_f113_an_aborted_turn_leaves_the_session_where_it_stood() -> None:
    world = World(policy="session")
    turn(world, run(1, 8))
    lease, _ = world.tree.open(TokenKey.of([77]), owner="r", session="s")
    world.unpin(lease)
    assert standing(world) == {"s": 8}
    assert world.pin(run(1, 9)).boundary == 8


def test_s169_what_no_session_stands_on_goes_first() -> None:
    world = World(policy="session")
    turn(world, run(1, 4))
    world.publish([7, 8, 9])
    assert world.reclaim_full(1) == (3, 1)
    assert world.find(run(1, 4)).dev == 4
    assert world.reclaim_full(1) == (4, 1)


@pytest.mark.parametrize("kinds", [("kv",), ("kv", "state")])
def test_s170_a_session_recedes_when_its_boundary_goes(kinds: tuple[str, ...]) -> None:
    world = World(policy="session", kinds=kinds)
    stateful = "state" in kinds
    for tokens in ([1, 2], [1, 2, 5, 6]):
        world.publish(tokens, state=stateful)
    lease, _ = world.tree.open(TokenKey.of(run(1, 4)), owner="r", session="s")
    world.publish(run(1, 4), lease=lease, state=stateful)
    world.tree.stand_on(lease)
    world.unpin(lease)
    pinned = world.pin([1, 2, 5, 6])
    assert world.reclaim_full(2) == (2, int(stateful))
    assert standing(world) == {"s": 2}
    world.unpin(pinned)


def test_s170_a_session_whose_state_goes_falls_back_to_the_one_above() -> None:
    world = World(policy="lru")
    world.publish([1, 2])
    turn(world, run(1, 4))
    lease = world.pin(run(1, 4), full_only=True)
    world.use([1, 2])
    assert world.reclaim_state(1) == (0, 1)
    assert standing(world) == {"s": 2}
    world.reclaim_state(1)
    assert standing(world) == {"s": 0}
    world.unpin(lease)


def test_s172_only_boundaries_with_a_state_are_stood_on() -> None:
    world = World(chunk=4)
    lease, _ = world.tree.open(TokenKey.of(run(1, 6)), owner="r", session="s")
    world.publish(run(1, 6), lease=lease, length=4)
    world.publish(run(1, 6), lease=lease, state=False)
    world.tree.stand_on(lease)
    assert standing(world) == {"s": 4}
    other, _ = world.tree.open(TokenKey.of(run(21, 26)), owner="r", session="none")
    world.publish(run(21, 26), lease=other, state=False)
    world.tree.stand_on(other)
    assert standing(world) == {"s": 4, "none": 0}


def test_a_session_ends_with_its_time() -> None:
    world = World(policy="session")
    turn(world, run(1, 4), ends=100)
    turn(world, run(1, 6), ends=200)
    world.tree.tick(150)
    assert standing(world) == {"s": 6}
    world.tree.tick(200)
    assert standing(world) == {}
    assert world.node_at(run(1, 6)).sessions == 0
    world.check()


def test_too_many_sessions_close_the_one_used_longest_ago() -> None:
    world = World()
    world.tree.sessions._limit = 2
    for name, token in (("a", 1), ("b", 2), ("a", 1), ("c", 3)):
        turn(world, [token], name)
    assert standing(world) == {"a": 1, "c": 1}
    assert world.node_at([2]).sessions == 0
    with pytest.raises(InvalidRequest):
        type(world.tree)(sessions_max=0)


def test_many_short_sessions_leave_no_record() -> None:
    world = World(check_each=False)
    world.tree.sessions._limit = 8
    for number in range(200):
        world.tree.tick(number)
        turn(world, [1, 2], f"s{number}", ends=number + 3)
    assert len(world.tree.sessions.open) <= 4
    assert len(world.tree.sessions._ending) <= 33
    world.tree.tick(1000)
    assert world.node_at([1, 2]).sessions == 0
    assert world.tree.sessions._standing == {}


def test_a_reset_leaves_sessions_open_and_nowhere() -> None:
    world = World(policy="session")
    turn(world, run(1, 4))
    world.reset()
    assert standing(world) == {"s": 0}
    turn(world, run(1, 4))
    assert standing(world) == {"s": 4}


def test_a_cut_and_a_merge_leave_the_session_where_it_stands() -> None:
    world = World(policy="session", kinds=("kv",))
    lease, _ = world.tree.open(TokenKey.of(run(1, 4)), owner="r", session="s")
    world.publish(run(1, 4), lease=lease, state=False)
    world.tree.stand_on(lease)
    world.unpin(lease)
    world.publish([1, 2, 9], state=False)
    world.publish(run(1, 6), state=False)
    assert standing(world) == {"s": 4}
    world.reclaim_full(1)
    world.check()
    assert standing(world) == {"s": 4}
