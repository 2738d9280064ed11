"""What a split does with each field of a node: every field has a rule, and every rule is true."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from tree.support import World, run

from phloem.actors.tree.node import NO_SLOT, SPAN_SPLIT_RULES, SPLIT_RULES, Node, Span

CUT, END = 2, 5


def field_names(struct: type[msgspec.Struct]) -> set[str]:
    return set(struct.__struct_fields__)


def test_s200_every_field_has_a_rule() -> None:
    assert field_names(Node) == set(SPLIT_RULES)
    assert field_names(Span) == set(SPAN_SPLIT_RULES)
    assert set(SPLIT_RULES.values()) | set(SPAN_SPLIT_RULES.values()) <= {
        "divide",
        "lower",
        "copy",
        "link",
    }


def test_s200_a_field_without_a_rule_is_noticed() -> None:
    class Later(Node):
        added: int = 0

    assert field_names(Later) - set(SPLIT_RULES) == {"added"}


def marked_world() -> tuple[World, Node, dict[str, object]]:
    """A node of 5 tokens with a value of its own in every field that a split must treat."""
    world = World()
    world.publish(run(1, END))
    node = world.node_at(run(1, END))
    for _ in range(3):
        world.pin(run(1, END))
    child = world.pin(run(1, END))
    world.publish(run(1, 7), lease=child)
    node.stamp, node.state_stamp, node.hits, node.born = 41, 42, 43, 44
    node.priority, node.keep_until, node.sessions, node.mark = 45, 46, 47, 48
    node.turn, node.rests, node.prompt_end = 49, 50, 51
    node.departures, node.departures_since = 52, 53
    before = {name: getattr(node, name) for name in SPLIT_RULES}
    elsewhere = {"parent", "host", "gone_children", "spans"}  # in test_host_rules, test_window
    for name in set(SPLIT_RULES) - elsewhere:
        assert before[name], f"{name} has no value to follow"
    return world, node, before


def empty_value(name: str) -> object:
    defaults = Node.__struct_defaults__
    return dict(zip(Node.__struct_fields__[-len(defaults) :], defaults, strict=True))[name]


@pytest.mark.parametrize("name", [n for n, rule in SPLIT_RULES.items() if rule != "link"])
def test_s196_each_rule_is_kept(name: str) -> None:
    world, node, before = marked_world()
    upper = world.tree.radix.split(node, CUT * world.tree.radix.page_bytes)
    rule, above, below = SPLIT_RULES[name], getattr(upper, name), getattr(node, name)
    if rule == "copy":
        assert above == below == before[name]
    elif rule == "lower":
        assert (above, below) == (empty_value(name), before[name])
    elif name == "end":
        assert (above, below) == (CUT, END)
    else:
        assert above + below == before[name]
        assert len(above) * END == len(before[name]) * CUT  # type: ignore[arg-type]  # a run


def test_s196_links_and_protection_after_a_cut() -> None:
    world, node, before = marked_world()
    root, child = node.parent, next(iter((node.children or {}).values()))
    upper = world.tree.radix.split(node, CUT * world.tree.radix.page_bytes)
    assert root is not None and root.children is not None
    assert list(root.children.values()) == [upper]
    assert (upper.parent, node.parent, child.parent) == (root, upper, node)
    assert list((upper.children or {}).values()) == [node]
    assert (node.id, node.children) == (before["id"], before["children"])
    assert upper.id > child.id
    assert (upper.protected_children, node.protected_children) == (1, 1)
    node.sessions = 0  # there were none
    world.check()


def test_an_unprotected_node_gives_an_unprotected_upper_part() -> None:
    world = World()
    world.publish(run(1, END))
    node = world.node_at(run(1, END))
    upper = world.tree.radix.split(node, CUT * world.tree.radix.page_bytes)
    assert (upper.leases, upper.protected_children, upper.state) == (0, 0, NO_SLOT)
    world.check()


def test_cutting_twice_gives_the_same_parts_in_any_order() -> None:
    shapes: list[list[tuple[bytes, array[int]]]] = []
    for cuts in ((2, 4), (4, 2)):
        world = World()
        world.publish(run(1, END))
        for cut in cuts:
            world.publish([*run(1, cut), 9])
        shapes.append(
            [
                (node.edge, node.pages)
                for end in (2, 4, END)
                for node in [world.node_at(run(1, end))]
            ]
        )
    assert shapes[0] == shapes[1]


def test_a_merge_undoes_a_cut() -> None:
    world = World()
    world.publish(run(1, END), state=False)
    node = world.node_at(run(1, END))
    before = (node.edge, list(node.pages), node.end, node.id)
    world.publish([1, 2, 9])
    world.reclaim_state(1)  # the newcomer has the only state
    assert world.nodes() == ["[1, 2, 3, 4, 5]F-"]
    merged = world.node_at(run(1, END))
    assert (merged.edge, list(merged.pages), merged.end, merged.id) == before
