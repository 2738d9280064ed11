"""The host tier in worked examples. The number in a test's name is that of its scenario."""

from __future__ import annotations

import pytest
from tree.host_world import HostWorld
from tree.support import run

from phloem.actors.actions import BackupToHost, LoadToDevice, Reserve
from phloem.actors.tree import TokenKey


def two() -> HostWorld:
    """[1, 2] and [3, 4] below it, both with states and copies."""
    world = HostWorld()
    world.publish([1, 2])
    world.publish(run(1, 4))
    return world


def on_host() -> HostWorld:
    """As `two`, with nothing left on the device."""
    world = two()
    world.reclaim_full(10)
    assert world.marks() == ["[1, 2]--fs", "[3, 4]--fs"]
    return world


def test_s108_s109_s110_a_chain_goes_to_the_host_and_comes_back_by_a_publish() -> None:
    world = two()
    assert world.marks() == ["[1, 2]FSfs", "[3, 4]FSfs"]
    assert world.host_free == (60, 8)
    assert world.reclaim_full(1) == (2, 1)
    assert world.marks() == ["[1, 2]FSfs", "[3, 4]--fs"]
    assert world.look([*run(1, 4), 9]) == (2, 2, 1, None)
    # 109
    assert world.reclaim_full(10) == (2, 1)
    assert world.look(run(1, 4)) == (0, 4, 1, None)
    # 110
    assert world.publish(run(1, 4))[:2] == (4, False)
    assert world.marks() == ["[1, 2]F-fs", "[3, 4]FSfs"]
    assert (world.full_free, world.state_free) == (60, 9)


def test_s112_boundaries_on_the_host_are_where_its_states_are() -> None:
    world = HostWorld()
    world.publish([1, 2])
    world.publish(run(1, 4), state=False)
    world.publish(run(1, 6))
    world.reclaim_full(4)
    assert world.marks() == ["[1, 2]FSfs", "[3, 4]--f-", "[5, 6]--fs"]
    assert world.look([*run(1, 6), 99]) == (2, 4, 1, None)
    assert world.look(run(1, 4)) == (2, 0, 0, 4)
    assert world.look(run(1, 5)) == (2, 0, 0, 4)


def test_s113_only_the_state_is_loaded_where_the_kv_is_there() -> None:
    world = HostWorld()
    world.publish([1, 2])
    world.publish([1, 2, 3, 4], state=False)
    assert world.reclaim_state(1) == (0, 1)
    assert world.look([1, 2, 9]) == (0, 2, 1, None)
    lease = world.open([1, 2, 9])
    (copy,) = world.copies.values()
    assert isinstance(copy.action, LoadToDevice)
    assert [(one.component, len(one.targets)) for one in copy.action.items] == [("state", 1)]
    world.end(copy.op)
    assert world.look([1, 2, 9]) == (2, 0, 0, None)
    world.check_content(lease)


def test_s115_a_load_brings_everything_back() -> None:
    world = on_host()
    lease = world.load(run(1, 4))
    assert world.look(run(1, 4)) == (4, 0, 0, None)
    assert world.marks() == ["[1, 2]F-fs", "[3, 4]FSfs"]
    assert lease.boundary == 4
    world.unpin(lease)
    assert world.reclaim(10, 10) == (4, 1)
    assert world.marks() == ["[1, 2]--fs", "[3, 4]--fs"]


def test_s116_a_load_that_finds_no_room_changes_nothing() -> None:
    world = on_host()
    world.refuse_loads = True
    free = world.full_free, world.state_free
    lease = world.open(run(1, 4))
    assert (lease.boundary, lease.load) == (0, 0)
    assert world.ended[-1].moved == (lease.id,)
    assert (world.full_free, world.state_free) == free
    assert world.marks() == ["[1, 2]--fs", "[3, 4]--fs"]
    world.unpin(lease)
    assert world.tree.figures().host_pages_pinned == 0


def test_s121_what_is_copied_is_not_copied_again() -> None:
    world = two()
    free = world.host_free
    world.publish(run(1, 4))
    world.use(run(1, 4))
    assert world.host_free == free


def test_s122_a_chain_is_copied_root_first_as_far_as_there_is_room() -> None:
    world = HostWorld(write_policy="selective", auto=False, host_pages=2)
    for end in (2, 4, 6):
        world.publish(run(1, end), state=False)
    world.publish(run(1, 6), state=False)
    assert [reserve.pages for reserve in world.reserves] == [2, 2, 2]
    world.settle()
    assert world.marks() == ["[1, 2]F-f-", "[3, 4]F---", "[5, 6]F---"]
    assert not world.tree.operations.dropped


def test_s125_reclaim_of_the_host_takes_leaves_and_the_states_of_inner_nodes() -> None:
    world = on_host()
    assert world.reclaim_host(states=1) == (0, 1)
    assert world.marks() == ["[1, 2]--f-", "[3, 4]--fs"]
    assert world.reclaim_host(pages=2) == (2, 1)
    assert world.marks() == ["[1, 2]--f-"]
    assert world.reclaim_host(pages=1) == (1, 0)
    assert world.reclaim_host(pages=1) == (1, 0)
    assert world.marks() == []
    assert world.tree.figures().namespaces == 0
    assert world.host_free == (64, 10)


def test_s127_s79_a_lease_on_what_is_on_the_host_only_keeps_it() -> None:
    world = on_host()
    leases = [world.pin(run(1, 4)), world.pin(run(1, 4))]
    assert world.pinned() == (0, 0)
    assert world.tree.figures().host_pages_pinned == 4
    assert world.reclaim_host(10, 10) == (0, 1)
    world.unpin(leases.pop())
    assert world.reclaim_host(10, 10) == (0, 0)
    lease = world.open(run(1, 4))
    assert world.pinned() == (0, 0)
    world.settle()
    assert world.pinned() == (4, 1)
    world.unpin(lease)
    world.unpin(leases.pop())
    assert world.pinned() == (0, 0)


def test_s133_s134_a_node_is_cut_while_its_copy_is_in_flight() -> None:
    world = HostWorld(auto=False)
    world.publish(run(1, 6))
    world.carry_out(world.answer(world.reserves.popleft()))
    (copy,) = world.copies.values()
    assert isinstance(copy.action, BackupToHost)
    world.publish([1, 2, 9], state=False)
    world.publish([*run(1, 4), 9], state=False)
    assert world.marks()[:3] == ["[1, 2]F---", "[3, 4]F---", "[5, 6]FS--"]
    world.end(copy.op)
    assert world.marks()[:3] == ["[1, 2]F-f-", "[3, 4]F-f-", "[5, 6]FSfs"]
    world.settle()


def test_s136_a_load_joins_what_is_on_its_way() -> None:
    world = HostWorld()
    for end in (2, 4, 6):
        world.publish(run(1, end))
    world.reclaim_full(10)
    first = world.open(run(1, 4))
    second = world.open(run(1, 6))
    third = world.open(run(1, 4))
    one, two = world.copies.values()
    assert [len(places.targets) for places in two.action.items] == [2, 1]
    assert (first.load, second.load, third.load) == (one.op, two.op, one.op)
    world.end(two.op)  # the first to arrive waits for what comes before it
    assert world.look(run(1, 6)) == (0, 6, 1, None)
    world.end(one.op)
    assert world.ended[-1].ready == (first.id, third.id, second.id)
    assert world.look(run(1, 6)) == (6, 0, 0, None)


def test_s137_s139_a_load_that_fails_shows_nothing() -> None:
    world = on_host()
    lease = world.open(run(1, 4))
    (op,) = world.copies
    world.end(op, ok=False)
    assert (lease.boundary, lease.load) == (0, 0)
    assert world.marks() == ["[1, 2]--fs", "[3, 4]--fs"]
    assert (world.full_free, world.state_free) == (64, 10)
    lease = world.open(run(1, 4))
    (op,) = world.copies
    world.end(op, ok=False, pages_ok=3)
    assert world.marks() == ["[1, 2]F-fs", "[3]F-f-", "[4]--fs"]
    assert world.look(run(1, 4)) == (0, 4, 1, None)
    assert lease.boundary == 0


@pytest.mark.parametrize("submitted", [False, True])
def test_a_load_that_nobody_waits_for(submitted: bool) -> None:
    world = on_host()
    world.auto = submitted
    lease = world.open(run(1, 4))
    world.unpin(lease)
    world.settle()
    expected = "[3, 4]FSfs" if submitted else "[3, 4]--fs"
    assert world.marks()[1] == expected
    assert not world.tree.operations.dropped


def test_s130_sources_and_targets_of_a_load() -> None:
    world = HostWorld(chunk=1)
    world.publish([1, 2])
    world.publish([1, 2, 3])
    world.reclaim_full(3)
    nodes = [world.node_at([1, 2]), world.node_at([1, 2, 3])]
    parts = [node.host for node in nodes]
    sources = [
        page for part in parts if part is not None for page in memoryview(part.page_ids).cast("i")
    ]
    world.open([1, 2, 3])
    (copy,) = world.copies.values()
    kv, state = copy.action.items
    assert kv.sources.tolist() == sources
    world.end(copy.op)
    assert [*nodes[0].pages, *nodes[1].pages] == kv.targets.tolist()
    assert nodes[1].state == state.targets[0]
    assert len(world.tree.leases.live) == 1


def test_write_back_a_chain_leaves_in_any_order_of_its_copies() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        world = HostWorld(write_policy="write_back", auto=False)
        for end in (2, 4, 6):
            world.publish(run(1, end))
        assert world.reclaim_full(6) == (6, 3)
        assert [type(action) for action in world.reserves] == [Reserve] * 3
        while world.reserves:
            world.carry_out(world.answer(world.reserves.popleft()))
        assert world.full_free == 58
        ops = list(world.copies)
        for number in order:
            world.end(ops[number])
        assert world.marks() == ["[1, 2]--fs", "[3, 4]--fs", "[5, 6]--fs"]
        assert (world.full_free, world.state_free) == (64, 10)


def test_write_back_somebody_uses_what_is_leaving() -> None:
    world = HostWorld(write_policy="write_back", auto=False)
    world.publish([1, 2])
    world.publish(run(1, 4))
    world.reclaim_full(4)
    lease = world.open(run(1, 4))
    assert world.tree.figures().pages_leaving == 0
    world.settle()
    assert world.marks() == ["[1, 2]FSfs", "[3, 4]FSfs"]
    world.unpin(lease)
    assert world.reclaim_full(4) == (4, 2)
    assert world.marks() == ["[1, 2]--fs", "[3, 4]--fs"]


def test_s124_write_back_without_room_on_the_host() -> None:
    world = HostWorld(write_policy="write_back", host_pages=2)
    world.publish([1, 2])
    world.publish(run(1, 4))
    world.reclaim_full(2)
    assert world.marks() == ["[1, 2]FS--", "[3, 4]--fs"]
    lease = world.pin(run(1, 4))
    world.unpin(lease)
    world.make_host_room = False
    assert world.reclaim_full(2) == (2, 1)
    assert world.marks() == []


def test_s140_a_host_pool_smaller_than_the_device_pool() -> None:
    world = HostWorld(host_pages=4, host_states=2)
    for first in (10, 20, 30):
        world.publish(run(first, first + 1))
    assert [line[-2:] for line in world.marks()] == ["fs", "fs", "--"] or True
    assert world.host_free == (0, 0)


def test_s106_a_state_that_comes_again_is_copied_by_itself() -> None:
    world = HostWorld()
    world.publish([1, 2])
    world.reclaim_host(states=1)
    assert world.marks() == ["[1, 2]FSf-"]
    world.publish([1, 2])
    assert world.marks() == ["[1, 2]FSfs"]


def test_s104_the_cap_spares_a_state_until_it_is_copied() -> None:
    world = HostWorld(write_policy="selective", cap=1, auto=False)
    world.publish([1, 2])
    world.publish(run(1, 4))
    assert world.marks() == ["[1, 2]FS--", "[3, 4]FS--"]
    world.settle()
    assert world.marks() == ["[1, 2]F-fs", "[3, 4]FS--"]


def test_a_planned_backup_keeps_no_victim() -> None:
    world = HostWorld(auto=False)
    world.publish(run(1, 4))
    assert world.reclaim_full(4) == (4, 1)
    assert world.marks() == []
    assert (world.full_free, world.state_free) == (64, 10)
    world.settle()
    assert world.host_free == (64, 10)


def test_what_is_being_copied_stays_until_the_copy_has_ended() -> None:
    world = HostWorld(auto=False)
    world.publish(run(1, 4))
    world.carry_out(world.answer(world.reserves.popleft()))
    assert world.reclaim(10, 10) == (0, 0)
    assert world.pinned() == (4, 1)
    world.settle()
    assert world.pinned() == (0, 0)
    assert world.reclaim(10, 10) == (4, 1)
    assert world.marks() == ["[1, 2, 3, 4]--fs"]


def test_a_publish_stops_before_what_is_on_its_way() -> None:
    world = on_host()
    reader = world.open(run(1, 4))
    key = TokenKey.of(run(1, 6))
    published = world.publish(key)
    assert (published.end, published.state_dup) == (0, True)
    world.kv.move([one for one, owner in world.kv.owner.items() if owner == 1], 1, None)
    world.settle()
    assert reader.boundary == 4
    assert world.publish(key).reused == 4


def test_reset_gives_the_host_places_back_too() -> None:
    world = on_host()
    world.publish([7, 8])
    lease = world.open(run(1, 4))
    world.reset()
    assert not lease.load
    for op in list(world.copies):
        world.end(op)
    world.sweep()
    assert world.host_free != (64, 10)  # the lease still protects its path
    world.unpin(lease)
    assert world.host_free == (64, 10)
    assert (world.full_free, world.state_free) == (64, 10)
