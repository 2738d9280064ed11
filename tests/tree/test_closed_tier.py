"""The host tier is closed: nothing is promised from it, nothing waits for it, copies go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tree.host_world import HostWorld
from tree.support import run

from phloem.actors.tree import Evicted, Tree
from phloem.actors.tree.core import Actions

WAYS: dict[str, Callable[[Tree], tuple[Evicted, Actions]]] = {
    "pages": lambda tree: tree.evict(8, 0),
    "states": lambda tree: tree.evict(0, 4),
    "bytes": lambda tree: tree.evict_bytes(100, page_bytes=1, state_bytes=10),
    "states of one memory": lambda tree: tree.evict_bytes(
        0, page_bytes=1, state_bytes=10, states=4
    ),
}
READ, OTHER = run(1, 4), run(50, 53)


def answer_all(world: HostWorld) -> None:
    while world.reserves:
        world.carry_out(world.answer(world.reserves.popleft()))


def read_by_a_copy(world: HostWorld) -> int:
    """The first to go is being copied, to leave then; behind it is another branch. The copy."""
    world.publish(READ)
    world.publish(OTHER)
    _, actions = world.tree.evict(4, 0)
    world.carry_out(actions)
    answer_all(world)
    (copy,) = world.copies
    return copy


@pytest.mark.parametrize("way", WAYS)
def test_what_a_copy_reads_is_passed_over_and_counts_nowhere(way: str) -> None:
    """An eviction stopped there, and what it could not take counted as what may go."""
    world = HostWorld(write_policy="write_back", auto=False)
    copy = read_by_a_copy(world)
    world.close_host(True)
    tree = world.tree
    figures = tree.figures()
    assert (figures.pages_leaving, figures.states_leaving) == (0, 0), "nothing waits for the tier"
    assert (figures.pages_evictable, figures.states_evictable) == (4, 1)
    assert tree.can_evict(4, 1) and not tree.can_evict(5, 0) and not tree.can_evict(0, 2)
    gone, actions = WAYS[way](tree)
    assert gone == Evicted(4, 1), "the other branch, without a copy"
    world.carry_out(actions)
    assert world.marks() == ["[1, 2, 3, 4]FS--"]
    world.end(copy, ok=False)
    gone, actions = WAYS[way](tree)
    assert gone == Evicted(4, 1), "it is read no more"
    world.carry_out(actions)
    assert not tree.figures().nodes


def test_a_copy_that_ends_well_is_kept_and_its_source_is_a_candidate_again() -> None:
    world = HostWorld(write_policy="write_back", auto=False)
    copy = read_by_a_copy(world)
    world.close_host(True)
    world.end(copy)
    assert world.marks() == ["[1, 2, 3, 4]FSfs", "[50, 51, 52, 53]FS--"]
    assert world.reclaim(4) == (4, 1)
    assert world.marks() == ["[1, 2, 3, 4]--fs", "[50, 51, 52, 53]FS--"]


def test_copies_that_are_only_planned_are_not_made() -> None:
    """Their reservations were granted, and the tier was written to though it was closed."""
    world = HostWorld(write_policy="write_back", auto=False)
    world.publish(READ)
    _, actions = world.tree.evict(4, 0)
    world.carry_out(actions)
    assert world.tree.figures().pages_leaving == 4 and world.reserves
    world.close_host(True)
    assert world.tree.figures().pages_leaving == 0 and not world.tree.operations.live
    answer_all(world)  # what comes too late goes back
    assert not world.copies and world.host_free == (64, 10)
    assert world.reclaim(4) == (4, 1), "without a copy"


def test_who_waits_for_a_planned_load_stands_on_what_the_device_has() -> None:
    world = HostWorld(auto=False)
    world.publish(run(1, 2))
    world.publish(READ)
    world.settle()
    world.reclaim(2)
    assert world.marks() == ["[1, 2]FSfs", "[3, 4]--fs"]
    lease = world.open(READ)
    assert (lease.boundary, bool(lease.load)) == (4, True)
    world.close_host(True)
    assert (lease.boundary, lease.load, lease.why_not) == (2, 0, "tier_failed")
    answer_all(world)
    assert not world.copies and world.kv.free == 62
    world.unpin(lease)


@pytest.mark.parametrize("kinds", [("kv",), ("kv", "state")])
def test_matches_and_leases_promise_only_what_the_device_has(kinds: tuple[str, ...]) -> None:
    """A match counted what is on the host, and a lease stood there until its load was refused."""
    world = HostWorld(kinds=kinds, auto=False)
    states = int("state" in kinds)
    world.publish(run(1, 2))
    world.publish(READ)
    world.settle()
    world.reclaim(2)
    open_match = world.tree.match(READ)
    assert (open_match.usable, open_match.device) == (4, 2)
    world.close_host(True)
    match = world.tree.match(READ)
    assert (match.usable, match.device, match.kv_prefix) == (2, 2, 4)
    assert match.lost == {"tier_failed": 2}
    assert match.state_tier == ("device" if states else "")
    assert match.branch_point == (4 if states else None), "a state made there would be a hit"
    lease, opened = world.tree.acquire(world.key(READ), owner="o")
    assert (lease.boundary, opened) == (2, match)
    world.tree.release(lease)
    world.reclaim(2, states)
    match = world.tree.match([*READ, 9])
    assert (match.usable, match.state_tier) == (0, "")
    assert match.lost == {"tier_failed": 4, "never_seen": 1}
    world.close_host(False)
    assert world.tree.match(READ).usable == 4


def test_inside_of_an_edge_the_device_counts_where_it_has_the_edge() -> None:
    """Without states a boundary may lie inside an edge: on the device, or on the host only."""
    world = HostWorld(kinds=("kv",), auto=False)
    world.publish(READ)
    world.settle()
    world.close_host(True)
    assert world.tree.match([1, 2, 3]).usable == 3
    world.close_host(False)
    world.reclaim(4)
    assert world.tree.match([1, 2, 3]).usable == 3
    world.close_host(True)
    assert world.tree.match([1, 2, 3]).lost == {"tier_failed": 3}
