"""Faults of the host tier known from systems that do the same job; the ids are in the names."""

from __future__ import annotations

from array import array

import pytest
from tree.host_world import HostWorld
from tree.support import run

from phloem.actors.actions import FreeDeviceSlots, FreeHostSlots, LoadToDevice, Reserve


def test_f004_counters_of_each_tier_stay_right_when_data_move() -> None:
    world = HostWorld(pages=2, states=2, host_pages=2, host_states=2)
    world.publish([1, 2])
    for _ in range(20):
        assert world.reclaim_full(2) == (2, 1)
        lease = world.load([1, 2])
        world.unpin(lease)
    assert world.marks() == ["[1, 2]FSfs"]
    assert (world.full_free, world.host_free) == (0, (0, 1))


def test_f018_what_a_load_reads_is_not_reclaimed_before_it_ends() -> None:
    world = HostWorld(host_pages=2, host_states=1)
    world.publish([1, 2])
    world.reclaim_full(2)
    reader = world.open([1, 2])
    world.unpin(reader)  # the copy goes on without it
    world.publish([3, 4])  # its backup needs the room
    assert world.marks() == ["[1, 2]--fs", "[3, 4]FS--"]
    world.settle()
    assert world.marks()[0] == "[1, 2]FSfs"


def test_f019_one_sweep_does_not_take_what_it_has_just_targeted() -> None:
    world = HostWorld(write_policy="write_back", host_pages=1, kinds=("kv",), auto=False)
    world.publish([1], state=False)
    world.publish([2], state=False)
    assert world.reclaim_full(2) == (2, 0)
    world.settle()
    assert world.marks() == ["[1]--f-"]
    assert world.full_free == 64


def test_f022_room_for_a_copy_is_not_made_of_what_is_copied_below() -> None:
    world = HostWorld(host_pages=4, kinds=("kv",))
    for token in (2, 7, 8, 9):
        world.publish([token], state=False)
    assert world.host_free[0] == 0
    world.publish([2, 3, 4, 5], state=False)
    assert world.marks() == ["[2]F-f-", "[3, 4, 5]F-f-", "[7]F---", "[8]F---", "[9]F---"]
    other = HostWorld(host_pages=3, kinds=("kv",))
    for token in (2, 7, 8):
        other.publish([token], state=False)
    other.publish([2, 3, 4, 5], state=False)
    assert other.marks() == ["[2]F-f-", "[3, 4, 5]F---", "[7]F-f-", "[8]F-f-"]


def test_f028_a_load_that_fails_falls_back_to_a_boundary_with_its_state() -> None:
    world = HostWorld(chunk=4)
    world.publish(run(1, 4))
    world.publish(run(1, 8))
    for end in (4, 8):
        node = world.node_at(run(1, end))
        assert node.host is not None
    lease = world.pin(run(1, 4))
    world.reclaim_state(1)
    assert world.marks() == ["[1, 2, 3, 4]FSfs", "[5, 6, 7, 8]--fs"]
    world.unpin(lease)
    reader = world.open(run(1, 8))
    (op,) = world.copies
    world.end(op, ok=False)
    assert reader.boundary == 4
    assert world.tree.state_of(reader)
    world.check_content(reader)


def test_f030_the_host_states_of_a_long_conversation_are_bounded_by_the_pool() -> None:
    world = HostWorld(host_states=3, cap=1, pages=64)
    for turn in range(1, 9):
        world.publish(run(1, 2 * turn))
    assert world.host_free[1] == 0
    assert world.marks()[-1] == "[15, 16]FSfs"
    assert sum(line.endswith("s") for line in world.marks()) == 3
    assert sum("S" in line for line in world.marks()) == 1


@pytest.mark.parametrize("length", [2, 4, 6, 8, 16])
def test_f031_a_round_trip_over_the_host_changes_nothing(length: int) -> None:
    world = HostWorld(page=2, chunk=4)
    world.publish(run(1, length), state=length % 4 == 0)
    for _ in range(2):
        world.reclaim(100, 100)
        assert not world.tree.figures().pages
        lease = world.load(run(1, length))  # the pools' contents are compared
        assert lease.boundary == (length if length % 4 == 0 else 0)
        world.unpin(lease)


def test_f045_a_child_is_not_copied_before_its_parent() -> None:
    world = HostWorld(host_pages=1, kinds=("kv",), auto=False)
    world.publish([1, 2], state=False)
    world.settle()
    assert world.marks() == ["[1, 2]F---"]  # no room
    world.publish(run(1, 4), state=False)
    assert [one.pages for one in world.reserves] == [2, 2]
    world.settle()
    assert world.marks() == ["[1, 2]F---", "[3, 4]F---"]
    assert world.reclaim_full(10) == (4, 0)
    assert world.marks() == []


def test_f046_a_node_is_no_leaf_of_the_host_while_a_copy_is_below_it() -> None:
    world = HostWorld()
    for end in (2, 4, 6):
        world.publish(run(1, end))
    world.reclaim_full(10)
    assert world.reclaim_host(pages=2) == (2, 1)
    lease = world.load(run(1, 4))
    world.publish(run(1, 6), lease=lease)
    world.unpin(lease)
    assert world.marks() == ["[1, 2]F-fs", "[3, 4]FSfs", "[5, 6]FSfs"]
    world.reclaim_full(3)
    assert world.marks() == ["[1, 2]F-fs", "[3, 4]--fs", "[5, 6]--fs"]
    assert world.reclaim_host(pages=1) == (2, 1)
    assert world.marks() == ["[1, 2]F-fs", "[3, 4]--fs"]


def test_f047_s68_what_a_lease_needs_stays_when_what_is_below_goes() -> None:
    world = HostWorld()
    for end in (2, 4):
        world.publish(run(1, end))
    world.reclaim_full(10)
    lease = world.pin([1, 2])
    assert world.reclaim_host(10, 10) == (2, 1)
    assert world.marks() == ["[1, 2]--fs"]
    assert world.reclaim_host(10, 10) == (0, 0)
    world.unpin(lease)
    assert world.reclaim_host(10, 10) == (2, 1)
    assert world.marks() == []


def test_f048_the_state_of_an_inner_node_is_copied_before_it_goes() -> None:
    world = HostWorld(write_policy="write_back", states=2, host_states=4)
    world.publish(run(1, 4))
    world.publish([*run(1, 4), 5], state=False)
    world.publish([*run(1, 4), 6], state=False)
    assert world.reclaim_state(1) == (0, 1)
    assert world.marks() == ["[1, 2, 3, 4]F--s", "[5]F---", "[6]F---"]
    world.reclaim_full(10)
    assert world.look([*run(1, 4), 9]) == (0, 4, 1, None)


def test_f048_an_inner_state_that_the_host_has_no_room_for_goes_for_good() -> None:
    world = HostWorld(write_policy="write_back", host_states=1)
    for first in (1, 11):
        world.publish(run(first, first + 1))
        world.publish(run(first, first + 2), state=False)
    world.make_host_room = False
    assert world.reclaim_state(2) == (0, 2)
    assert world.marks() == ["[1, 2]F--s", "[3]F---", "[11, 12, 13]F---"]
    assert world.state_free == 10


def test_f050_write_back_frees_what_was_asked_leaf_first() -> None:
    world = HostWorld(write_policy="write_back", kinds=("kv",))
    for end in (2, 4, 6):
        world.publish(run(1, end), state=False)
    lease = world.pin(run(1, 2))  # so that the chain stays in three nodes
    other = world.pin(run(1, 4))
    world.unpin(lease)
    world.unpin(other)
    assert world.reclaim_full(6) == (6, 0)
    assert world.full_free == 64
    assert all(line.endswith("--f-") for line in world.marks())


def test_f051_two_requests_fall_back_to_the_last_good_page() -> None:
    world = HostWorld(page=2, kinds=("kv",))
    world.publish(run(1, 8), state=False)
    world.reclaim_full(8)
    first, second = world.open(run(1, 8)), world.open(run(1, 8))
    (op,) = world.copies
    free = world.kv.free
    world.end(op, ok=False, pages_ok=3)
    assert (first.boundary, second.boundary) == (6, 6)
    assert set(world.ended[-1].moved) == {first.id, second.id}
    assert world.kv.free == free + 1
    assert world.marks() == ["[1, 2, 3, 4, 5, 6]F-f-", "[7, 8]--f-"]
    world.unpin(first)
    world.unpin(second)


def test_f052_a_copy_that_failed_is_not_there() -> None:
    world = HostWorld()
    world.publish([1, 2])
    world.reclaim_full(2)
    free = world.kv.free, world.states.free
    lease = world.open([1, 2])
    (op,) = world.copies
    world.end(op, ok=False)
    assert (lease.boundary, world.ended[-1].moved) == (0, (lease.id,))
    assert world.marks() == ["[1, 2]--fs"]
    assert (world.kv.free, world.states.free) == free
    world = HostWorld(auto=False)
    world.publish([1, 2])
    world.carry_out(world.answer(world.reserves.popleft()))
    (op,) = world.copies
    world.end(op, ok=False)
    assert world.marks() == ["[1, 2]FS--"]
    assert world.host_free == (64, 10)


def test_f059_what_a_load_writes_belongs_to_it_until_its_end() -> None:
    world = HostWorld(pages=4)
    world.publish(run(1, 4))
    world.reclaim_full(4)
    lease = world.open(run(1, 4))
    assert world.full_free == 0
    world.unpin(lease)
    assert world.full_free == 0
    (op,) = world.copies
    world.end(op)
    assert world.marks() == ["[1, 2, 3, 4]FSfs"]
    assert world.reclaim_full(4) == (4, 1)


def test_f100_what_is_on_the_device_waits_for_no_load() -> None:
    world = HostWorld()
    world.publish([1, 2])
    world.publish(run(1, 4))
    world.reclaim_full(1)
    sharers = [world.open([1, 2, 9]) for _ in range(3)]
    others = [world.open(run(1, 4)) for _ in range(3)]
    assert [lease.load for lease in sharers] == [0, 0, 0]
    assert len({lease.load for lease in others}) == len(world.copies) == 1
    world.settle()
    assert world.ended[-1].ready == tuple(lease.id for lease in others)


def test_f101_a_copy_can_be_used_as_soon_as_it_has_ended() -> None:
    world = HostWorld()
    runner = world.open(run(1, 8))
    world.publish(run(1, 4), lease=runner)
    world.publish(run(1, 8), lease=runner, state=False)
    assert world.marks()[0] == "[1, 2, 3, 4]FSfs"
    assert world.look(run(1, 5))[:2] == (4, 0)
    assert runner.live


def test_s107_s184_within_a_victim_device_places_go_back_before_host_places() -> None:
    world = HostWorld(write_policy="write_back")
    world.publish([1, 2])
    world.publish(run(1, 4))
    world.reclaim_full(2)
    world.make_host_room = False
    world.host_kv.take(world.host_kv.free, 99)
    begun = len(world.log)
    assert world.reclaim_full(2) == (2, 1)
    kinds = [type(one) for one in world.log[begun:] if not isinstance(one, Reserve)]
    assert kinds == [FreeDeviceSlots, FreeDeviceSlots, FreeHostSlots, FreeHostSlots]
    world.host_kv.move([one for one, who in world.host_kv.owner.items() if who == 99], 99, None)


def test_s128_kv_on_the_host_alone_is_known_and_no_boundary() -> None:
    world = HostWorld()
    for end in (2, 4):
        world.publish(run(1, end))
    world.reclaim_full(10)
    assert world.reclaim_host(states=1) == (0, 1)
    assert world.marks() == ["[1, 2]--f-", "[3, 4]--fs"]
    assert world.look([1, 2, 9]) == (0, 0, 0, 2)
    assert world.tree.match(world.key([1, 2, 9])).kv_prefix == 2
    lease = world.open([1, 2, 9])
    assert (lease.boundary, lease.load, world.copies) == (0, 0, {})
    world.unpin(lease)


def test_s181_a_copy_that_fails_leaves_no_operation_open() -> None:
    world = HostWorld(auto=False)
    world.publish([1, 2])
    world.publish(run(1, 4))
    while world.reserves:
        world.carry_out(world.answer(world.reserves.popleft()))
    first, second = world.copies
    world.end(second)
    world.end(first, ok=False)
    assert not world.tree.operations.live
    assert world.host_free == (64, 10)
    assert world.marks() == ["[1, 2]FS--", "[3, 4]FS--"]
    world.publish(run(1, 4))
    world.settle()
    assert world.marks() == ["[1, 2]FSfs", "[3, 4]FSfs"]


def test_a_fallen_back_lease_can_wait_for_a_load_that_ends_above() -> None:
    world = HostWorld()
    for end in (2, 4):
        world.publish(run(1, end))
    world.reclaim_full(10)
    above = world.open([1, 2])
    below = world.open(run(1, 4))
    one, two = world.copies
    world.end(two, ok=False)
    assert (below.boundary, below.load) == (2, above.load)
    world.end(one)
    assert (below.load, above.load) == (0, 0)
    world.check_content(below)


def test_actions_are_complete_in_themselves() -> None:
    world = HostWorld()
    world.publish([1, 2])
    world.reclaim_full(2)
    world.open([1, 2])
    (copy,) = world.copies.values()
    assert isinstance(copy.action, LoadToDevice)
    for places in copy.action.items:
        assert len(places.sources) == len(places.targets)
        assert isinstance(places.sources, array)
        assert places.sources.typecode == places.targets.typecode == "i"
