"""Which positions are wanted, and why others are not."""

from __future__ import annotations

import pytest
from tree.support import World, run

from phloem.actors.tree import Lease, Placement, TokenKey, Wanted
from phloem.actors.tree.placement import Refused, choose_positions, end_of_prompt, end_of_response
from phloem.errors import InvalidRequest


def choose(
    placement: Placement | None = None,
    *,
    length: int = 100,
    usable: int = 0,
    branch: int | None = None,
    breakpoints: tuple[int, ...] = (),
    grid: int = 8,
) -> tuple[list[Wanted], list[Refused]]:
    """`choose_positions` with defaults."""
    return choose_positions(
        placement or Placement(),
        length=length,
        usable=usable,
        branch_point=branch,
        breakpoints=breakpoints,
        grid=grid,
    )


def test_reasons_in_the_order_of_positions() -> None:
    wanted, refused = choose(branch=40, breakpoints=(70, 20))
    assert wanted == [
        (16, "breakpoint"),
        (40, "branch"),
        (64, "breakpoint"),
        (96, "end_of_prompt"),
    ]
    assert refused == []


@pytest.mark.parametrize(
    ("length", "position"), [(0, 0), (1, 0), (8, 0), (9, 8), (16, 8), (17, 16), (100, 96)]
)
def test_end_of_prompt_leaves_a_token_to_compute(length: int, position: int) -> None:
    assert end_of_prompt(length, 8) == position
    assert choose(length=length)[0] == ([(position, "end_of_prompt")] if position else [])


def test_two_reasons_for_one_position_are_one() -> None:
    assert choose(branch=96, breakpoints=(96, 99))[0] == [(96, "breakpoint")]
    assert choose(branch=96)[0] == [(96, "branch")]


def test_what_is_usable_is_not_wanted_again() -> None:
    wanted, refused = choose(usable=96, breakpoints=(40, 101))
    assert wanted == []
    assert refused == [(96, "breakpoint", "exists"), (40, "breakpoint", "exists")]


def test_periodic_positions_lie_on_the_grid_within_the_prompt() -> None:
    wanted, refused = choose(Placement(periodic=20, end_of_prompt=False), usable=24)
    assert wanted == [(48, "periodic"), (72, "periodic"), (96, "periodic")]
    assert refused == []


def test_the_budget_keeps_the_strongest_and_deepest() -> None:
    placement = Placement(periodic=8, budget=3)
    wanted, refused = choose(placement, branch=40, length=10**9)
    assert wanted == [(40, "branch"), (10**9 - 16, "periodic"), (10**9 - 8, "end_of_prompt")]
    assert refused == [(10**9 - 24, "periodic", "budget")]
    none, all_refused = choose(Placement(budget=0), branch=40)
    assert none == []
    assert [one.refusal for one in all_refused] == ["budget", "budget"]


def test_a_small_gain_is_refused_except_to_a_breakpoint() -> None:
    placement = Placement(gain_min=50)
    wanted, refused = choose(placement, usable=8, branch=40, breakpoints=(64,))
    assert wanted == [(64, "breakpoint")]
    assert refused == [(40, "branch", "low_benefit"), (96, "end_of_prompt", "low_benefit")]


@pytest.mark.parametrize("bad", [{"budget": -1}, {"gain_min": -1}, {"periodic": 0}])
def test_a_bad_placement_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        Placement(**bad)  # type: ignore[arg-type]  # cases


@pytest.mark.parametrize(
    ("position", "settled", "refusal"),
    [
        (0, 100, "off_grid"),
        (12, 100, "off_grid"),
        (96, 95, "unsettled"),
        (8, 100, "exists"),
        (16, 100, "exists"),
        (40, 100, "budget"),
        (96, 96, None),
        (24, 100, None),
    ],
)
def test_a_refusal_has_its_reason(position: int, settled: int, refusal: str | None) -> None:
    world = World(page=8, pages=64)
    world.tree.placement = Placement(budget=1)
    world.publish(run(1, 16))
    lease, _ = world.tree.open(TokenKey.of(run(1, 100)), owner="r", limit=99, breakpoints=(96, 40))
    assert world.tree.why_not(lease, position, settled) == refusal


def test_the_end_of_a_response_is_as_deep_as_the_state_reached() -> None:
    assert [end_of_response(reached, 8) for reached in (7, 8, 20)] == [0, 8, 16]
    world = World(page=8)
    world.publish(run(1, 16))
    lease = world.pin(run(1, 16))
    assert world.tree.wanted_at_end(lease, 39) == (32, "end_of_response")
    assert world.tree.wanted_at_end(lease, 23) is None
    world.tree.placement = Placement(end_of_response=False)
    assert world.tree.wanted_at_end(lease, 39) is None


# -- requests that run together --------------------------------------------------------------------


def open_all(world: World, *keys: list[int]) -> list[Lease]:
    """Open requests one after another; none has published anything yet."""
    return [
        world.tree.open(TokenKey.of(key), owner=f"r{number}", limit=len(key) - 1)[0]
        for number, key in enumerate(keys)
    ]


def test_the_first_is_told_where_the_second_parts() -> None:
    world = World()
    first, second = open_all(world, run(1, 20), [*run(1, 10), *run(50, 60)])
    assert first.wanted == [(10, "branch"), (19, "end_of_prompt")]
    assert second.wanted == [(20, "end_of_prompt")]


def test_requests_that_share_nothing_ask_for_nothing() -> None:
    world = World()
    first, second = open_all(world, run(1, 20), run(30, 50))
    assert [lease.wanted for lease in (first, second)] == [
        [(19, "end_of_prompt")],
        [(20, "end_of_prompt")],
    ]


def test_each_point_of_parting_is_wanted_once() -> None:
    world = World()
    first, *_ = open_all(
        world,
        run(1, 20),
        [*run(1, 10), 50, 51],
        [*run(1, 10), 60, 61],
        [*run(1, 5), 70, 71],
    )
    assert first.wanted == [(5, "branch"), (10, "branch"), (19, "end_of_prompt")]


def test_who_follows_inherits_what_the_leader_did_not_reach() -> None:
    world = World()
    first, second, third = open_all(world, run(1, 20), [*run(1, 10), 50, 51], [*run(1, 10), 60, 61])
    world.unpin(first)
    assert second.wanted == [(10, "branch"), (11, "end_of_prompt")]
    assert third.wanted == [(11, "end_of_prompt")]
    world.unpin(second)
    assert third.wanted == [(10, "branch"), (11, "end_of_prompt")]
    world.unpin(third)
    assert len(world.tree.running) == 0


def test_what_was_published_is_inherited_by_nobody() -> None:
    world = World()
    first, second = open_all(world, run(1, 20), [*run(1, 10), 50, 51])
    world.publish(first.key, lease=first, length=10)
    assert first.wanted == [(19, "end_of_prompt")]
    world.tree.advance(second, beyond=0, limit=11)
    assert second.boundary == 10
    assert second.wanted == [(11, "end_of_prompt")]
    world.unpin(first)
    assert second.wanted == [(11, "end_of_prompt")]


def test_without_branches_nobody_is_asked() -> None:
    world = World()
    world.tree.placement = Placement(branch=False)
    first, _ = open_all(world, run(1, 20), [*run(1, 10), 50, 51])
    assert first.wanted == [(19, "end_of_prompt")]


def test_a_reset_ends_what_requests_wanted_of_each_other() -> None:
    world = World()
    first, second = open_all(world, run(1, 20), [*run(1, 10), 50, 51])
    world.tree.reset()
    assert len(world.tree.running) == 0
    for lease in (first, second):
        world.unpin(lease)


def test_no_state_is_wanted_of_a_model_without_states() -> None:
    world = World(kinds=("kv",))
    first, second = open_all(world, run(1, 20), [*run(1, 10), 50, 51])
    assert first.wanted == second.wanted == []
