"""Windows in small cases: what a split divides, what leases protect, what goes first, what fits."""

from __future__ import annotations

import pytest
from tree.support import World, run

from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.dump import dump_tree, picture
from phloem.actors.tree.node import SPAN_SPLIT_RULES
from phloem.errors import InvalidRequest

HYBRID = ("kv", "state", "window:3")
ATTENTION = ("kv", "window:3")


def world_of(kinds: tuple[str, ...] = ATTENTION) -> World:
    return World(kinds=kinds)


def held(world: World) -> list[str]:
    return world.nodes()


def test_s197_a_split_divides_a_window_where_the_edge_is_cut() -> None:
    for kept, above, below in ((5, 2, 3), (4, 1, 3), (2, 0, 2), (0, 0, 0)):
        world = world_of()
        world.publish(run(1, 5), tail=kept)
        node = world.node_at(run(1, 5))
        before = node.spans[0].page_ids
        for _ in range(2):
            world.tree.leases.take(node, TokenKey.of(run(1, 5)), "r", 0, with_state=False)
        node.spans[0].stamp = 41
        upper = world.tree.radix.split(node, 2 * world.tree.radix.page_bytes)
        over, under = upper.spans[0], node.spans[0]
        assert (len(over.page_ids) // 4, len(under.page_ids) // 4) == (above, below)
        for field, rule in SPAN_SPLIT_RULES.items():
            values = getattr(over, field), getattr(under, field)
            assert values == ((2, 2) if field == "leases" else (41, 41)) if rule == "copy" else True
        assert over.page_ids + under.page_ids == before
        audit_tree(world.tree)


def test_a_lease_protects_the_last_tokens_and_no_more() -> None:
    world = world_of(HYBRID)
    world.publish(run(1, 4))
    world.publish(run(1, 8))
    world.publish(run(1, 12))
    lease = world.pin(run(1, 12))
    assert lease.spans == (8,)  # the last node has all that is needed
    assert world.tree.figures().spans[0].protected == 3
    world.reclaim(spans=(100,))
    assert held(world) == [
        "[1, 2, 3, 4]FS-",
        "[5, 6, 7, 8]FS-",
        "[9, 10, 11, 12]FSW3",
    ]
    world.unpin(lease)
    assert world.tree.figures().spans[0].protected == 0


def test_a_lease_that_was_taken_before_a_split_covers_both_parts_until_it_ends() -> None:
    world = world_of()
    world.publish(run(1, 6))
    lease = world.pin(run(1, 6))
    world.publish([1, 2, 9])
    assert world.tree.figures().spans[0].protected == 6
    later = world.pin(run(1, 6))
    assert (lease.spans, later.spans) == ((0,), (2,))
    world.unpin(lease)
    assert world.tree.figures().spans[0].protected == 4
    world.unpin(later)
    assert world.tree.figures().spans[0].protected == 0


def test_what_lies_further_back_is_given_up_first_and_alone() -> None:
    world = world_of()
    world.publish(run(1, 6))
    assert world.reclaim(spans=(3,)) == (0, 0)
    assert held(world) == ["[1, 2, 3, 4, 5, 6]F-W3"]
    assert world.tree.match(run(1, 6)).usable == 6
    assert world.tree.match(run(1, 5)).lost == {"no_window": 5}
    assert world.reclaim(spans=(1,)) == (0, 0)
    assert world.tree.match(run(1, 6)).usable == 0
    assert world.reclaim(spans=(2,))[0] == 6  # with the rest of its window a leaf goes whole
    assert held(world) == []


def test_a_shortfall_is_one_demand_over_all_pools_and_met_exactly() -> None:
    world = world_of(HYBRID)
    for first in (1, 11, 21):
        world.publish(run(first, first + 5))
    assert world.tree.can_evict(6, 3, (9,))
    assert not world.tree.can_evict(6, 3, (10,))
    figures = world.tree.figures()
    world.reclaim(pages=6, states=1, spans=(3,))  # one leaf has all of it
    after = world.tree.figures()
    assert (figures.pages - after.pages, figures.states - after.states) == (6, 1)
    assert figures.spans[0].pages - after.spans[0].pages == 3


def test_a_node_without_a_window_adopts_one_and_duplicates_go_back() -> None:
    world = world_of(HYBRID)
    world.publish(run(1, 6), tail=0)
    assert world.tree.match(run(1, 6)).lost == {"no_window": 6}
    world.publish(run(1, 6), tail=2)
    assert held(world) == ["[1, 2, 3, 4, 5, 6]FSW2"]
    world.publish(run(1, 6))  # of six, one is new, two are duplicates and three of no use
    assert held(world) == ["[1, 2, 3, 4, 5, 6]FSW3"]
    assert world.tree.match(run(1, 6)).usable == 6
    assert world.spans[0].held(1) == 0


def test_the_end_of_a_window_goes_with_the_tail_of_its_leaf() -> None:
    world = world_of()
    world.publish(run(1, 6), tail=4)
    world.reclaim(pages=2)
    assert held(world) == ["[1, 2, 3, 4]F-W2"]


def test_chains_merge_when_what_kept_them_apart_has_gone() -> None:
    world = world_of(HYBRID)
    lease = world.pin([1])
    for end in (3, 9):
        world.publish(run(1, end), lease=lease, state=False, tail=3)
    assert len(held(world)) == 2  # the first has a window of its own
    world.unpin(lease)
    world.reclaim(spans=(3,))
    assert held(world) == [f"{run(1, 9)}F-W3"]


def test_a_picture_shows_windows() -> None:
    world = world_of(HYBRID)
    world.publish(run(1, 3))
    world.publish(run(1, 6), tail=0)
    assert picture(dump_tree(world.tree)).splitlines()[2:] == [
        "window: pages 3 (0 protected)",
        "default namespace",
        "└─ [1 2 3] 0-3 FSW",
        "   └─ [4 5 6] 3-6 FS-",
    ]


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("kv", "window"), "a number of tokens"),
        (("kv", "window:0"), "a number of tokens"),
        (("kv", "window:2", "window:3"), "name one twice"),
        (("window:2",), "unknown components"),
        (("kv", "windows:2"), "unknown components"),
    ],
)
def test_components_that_there_are_not(kinds: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Tree(page_size=1, components=kinds)


def test_windows_have_no_host_tier_yet() -> None:
    with pytest.raises(InvalidRequest, match="no host tier for trees with window:2"):
        Tree(page_size=1, components=("kv", "window:2"), host=True)


def test_an_insert_offers_no_more_of_a_window_than_it_has_pages() -> None:
    tree = Tree(page_size=1, components=ATTENTION)
    from array import array

    with pytest.raises(InvalidRequest, match="pages of spans"):
        tree.insert(run(1, 2), [1, 2], spans=[array("i", [1, 2, 3])])
    with pytest.raises(InvalidRequest, match="evict of"):
        tree.evict(0, 0, spans=[1, 2])
