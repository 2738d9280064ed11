"""Residency, the steps of operations, and what a split does with a node's part on the host."""

from __future__ import annotations

from array import array
from itertools import product

import msgspec
import pytest
from tree.host_world import HostWorld
from tree.support import run

from phloem.actors.tree.node import HOST_SPLIT_RULES, ID_BYTES, HostPart, Node
from phloem.actors.tree.operations import Operation, Operations, Phase
from phloem.actors.tree.residency import CHANGES, Residency, check_change, residency
from phloem.errors import InvalidRequest

CUT, END = 2, 5
KINDS: tuple[Residency, ...] = ("absent", "arriving", "present", "leaving")


def node_with(component: str, tier: str, where: Residency) -> Node:
    """A node whose data of one component and tier are where they are said to be."""
    node, part = Node(1, None, b"", 0, b""), HostPart()
    node.host = part
    there = where in ("present", "leaving")
    if tier == "host":
        if component == "kv":
            part.page_ids, part.kv_backup = b"page" * there, int(where == "arriving")
        else:
            part.state, part.state_backup = int(there), int(where == "arriving")
    elif component == "kv":
        node.page_ids, part.kv_load = b"page" * there, int(where == "arriving")
        part.leaving = where == "leaving"
    else:
        node.state, part.state_load = int(there), int(where == "arriving")
        part.state_leaving = where == "leaving"
    return node


TRIED = [
    (tier, before, after)
    for tier, before, after in product(("device", "host"), KINDS, KINDS)
    if (tier, before) != ("host", "leaving")  # nothing leaves the host by a copy
]


@pytest.mark.parametrize("component", ["kv", "state"])
@pytest.mark.parametrize(("tier", "before", "after"), TRIED)
def test_only_changes_that_make_sense_are_made(
    component: str, tier: str, before: Residency, after: Residency
) -> None:
    node = node_with(component, tier, before)
    assert residency(node, component, tier) == before  # type: ignore[arg-type]  # a parameter
    if after in CHANGES[before]:
        check_change(node, component, tier, after)  # type: ignore[arg-type]  # a parameter
    else:
        with pytest.raises(AssertionError, match=f"from {before} to {after}"):
            check_change(node, component, tier, after)  # type: ignore[arg-type]  # a parameter


def test_a_node_without_a_part_has_what_it_holds() -> None:
    node = Node(1, None, b"", 0, b"page", state=3)
    assert residency(node, "kv", "device") == residency(node, "state", "device") == "present"
    assert residency(node, "kv", "host") == residency(node, "state", "host") == "absent"


STEPS: dict[Phase, set[Phase]] = {
    "planned": {"reserved", "ended"},
    "reserved": {"submitted"},
    "submitted": {"ended"},
    "ended": set(),
}


@pytest.mark.parametrize(("before", "after"), list(product(STEPS, STEPS)))
def test_operations_go_their_way(before: Phase, after: Phase) -> None:
    operation = Operation(7, "load", 0)
    operation.phase = before
    if after in STEPS[before]:
        operation.step(after)
        assert operation.phase == after
    else:
        with pytest.raises(AssertionError, match=f"operation 7: from {before} to {after}"):
            operation.step(after)


def test_an_operation_that_ends_planned_waits_for_its_answer() -> None:
    operations = Operations()
    first = operations.plan("load", 0, 0)
    second = operations.plan("backup", 0, first.number)
    assert first.dependants == [second.number]
    operations.end(second)
    assert (operations.dropped, first.dependants) == ({second.number: "host"}, [])
    operations.end(first, answered=True)
    assert (len(operations), operations.dropped) == (0, {second.number: "host"})


def test_answers_for_operations_that_never_were_are_refused() -> None:
    tree = HostWorld().tree
    none = array("i")
    with pytest.raises(InvalidRequest, match="operation 9"):
        tree.reserved(9, 1, none, none)
    with pytest.raises(InvalidRequest, match="operation 9"):
        tree.not_reserved(9)
    with pytest.raises(InvalidRequest, match="operation 9"):
        tree.copied(9, True)


def test_s203_a_second_end_of_a_copy_is_refused() -> None:
    world = HostWorld(auto=False)
    world.publish([1, 2])
    world.carry_out(world.answer(world.reserves.popleft()))
    (op,) = world.copies
    world.end(op)
    with pytest.raises(InvalidRequest, match="has ended"):
        world.tree.copied(op, True)


def test_a_reservation_of_another_size_is_refused() -> None:
    world = HostWorld(auto=False)
    world.publish([1, 2])
    reserve = world.reserves[0]
    with pytest.raises(InvalidRequest, match="was given 1 pages"):
        world.tree.reserved(reserve.op, 1, array("i", [1]), array("i", [1]))
    world.settle()
    assert world.marks() == ["[1, 2]FSfs"]


# -- splits ----------------------------------------------------------------------------------------


def test_s200_every_field_of_the_part_has_a_rule() -> None:
    assert set(HostPart.__struct_fields__) == set(HOST_SPLIT_RULES)
    assert set(HOST_SPLIT_RULES.values()) <= {"divide", "lower", "copy", "link"}


def test_s200_a_field_of_the_part_without_a_rule_is_noticed() -> None:
    class Later(HostPart):
        added: int = 0

    assert set(Later.__struct_fields__) - set(HOST_SPLIT_RULES) == {"added"}


def test_an_empty_part_is_one_that_says_nothing() -> None:
    assert HostPart().empty
    for name in HostPart.__struct_fields__:
        value = b"page" if name == "page_ids" else 1
        assert not msgspec.structs.replace(HostPart(), **{name: value}).empty, name


@pytest.mark.parametrize("name", [n for n, rule in HOST_SPLIT_RULES.items() if rule != "link"])
def test_s196_each_rule_of_the_part_is_kept(name: str) -> None:
    world = HostWorld()
    world.publish(run(1, 4))
    node = world.node_at(run(1, 4))
    part = node.host
    assert part is not None
    values = {field: 40 + number for number, field in enumerate(HostPart.__struct_fields__)}
    for field in ("kv_backup", "state_backup", "kv_load", "state_load", "state"):
        setattr(part, field, values[field])
    part.leaving = part.state_leaving = True
    before = {field: getattr(part, field) for field in HostPart.__struct_fields__}
    divided: list[tuple[Node, Node, int]] = []
    world.tree.radix.on_split = lambda *split: divided.append(split)
    upper = world.tree.radix.split(node, CUT * world.tree.radix.page_bytes)
    assert divided == [(node, upper, CUT)]
    assert upper.host is not None
    above, below = getattr(upper.host, name), getattr(part, name)
    if HOST_SPLIT_RULES[name] == "copy":
        assert above == below == before[name]
    elif HOST_SPLIT_RULES[name] == "lower":
        assert (above, below) == (getattr(HostPart(), name), before[name])
    else:
        assert above + below == before[name]
        assert len(above) == CUT * ID_BYTES


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("leased", [True, False])
def test_s196_f032_f036_both_parts_of_a_cut_are_protected_in_all_tiers(
    device: bool, leased: bool
) -> None:
    world = HostWorld(kinds=("kv",))
    world.publish(run(1, 4), state=False)
    if not device:
        world.reclaim_full(4)
    lease = world.pin(run(1, 4)) if leased else None
    world.publish([1, 2, 9, 9], state=False)  # cuts the edge, and loads its first part
    assert world.marks()[0] == "[1, 2]F-f-"
    assert world.marks()[1] == ("[3, 4]F-f-" if device else "[3, 4]--f-")
    pinned = world.tree.figures().host_pages_pinned
    assert pinned == (4 if leased and not device else 0)
    world.reclaim_host(pages=100)
    expected = "F---" if device else "--f-" if leased else ""
    assert [line for line in world.marks() if "3, 4" in line] == (
        [f"[3, 4]{expected}"] if expected else []
    )
    if lease is not None:
        world.unpin(lease)


def test_a_merge_undoes_a_cut_in_both_tiers() -> None:
    world = HostWorld(kinds=("kv",))
    world.publish(run(1, 4), state=False)
    node = world.node_at(run(1, 4))
    assert node.host is not None
    before = node.host.page_ids
    world.reclaim_full(4)
    world.publish([1, 2, 9, 9], state=False)
    world.use(run(1, 4))
    world.reclaim_full(10)
    world.reclaim_host(pages=2)
    assert world.marks() == ["[1, 2, 3, 4]--f-"]
    assert node.host.page_ids == before


def test_a_held_copy_ends_once() -> None:
    world = HostWorld()
    for end in (2, 4):
        world.publish(run(1, end))
    world.reclaim_full(10)
    world.open([1, 2])
    world.open(run(1, 4))
    one, two = world.copies
    world.end(two)
    with pytest.raises(InvalidRequest, match="is not being copied"):
        world.tree.copied(two, True)
    with pytest.raises(InvalidRequest, match="has its room already"):
        world.tree.not_reserved(one)
    world.end(one)
    assert world.look(run(1, 4)) == (4, 0, 0, None)
