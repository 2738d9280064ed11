"""The tree as data and as a picture."""

from __future__ import annotations

import msgspec
import pytest
from tree.host_world import HostWorld
from tree.support import World, run

from phloem.actors.tree import Namespace, TokenKey, Tree
from phloem.actors.tree.dump import Dump, dump_tree, picture
from phloem.actors.tree.results import TreeFigures


def small_world() -> World:
    world = World(policy="session")
    world.publish(run(1, 6))
    world.publish([1, 2, 3, 7, 8])
    world.publish([1, 2, 9], state=False)
    world.publish([5], ns=Namespace("lora", "tenant"))
    lease, _ = world.tree.open(TokenKey.of([1, 2, 3, 7, 8]), owner="r7", session="s", priority=30)
    world.tree.stand_on(lease)
    return world


def test_a_picture_of_a_small_tree() -> None:
    assert picture(dump_tree(small_world().tree)).splitlines() == [
        "generation 0: 6 nodes, 4 leaves, 1 leases; page 1, grid 1, session",
        "pages 10 (5 protected), states 3 (1 protected)",
        "default namespace",
        "└─ [1 2] 0-2 F- protected priority 30",
        "   ├─ [3] 2-3 F- protected priority 30",
        "   │  ├─ [4 5 6] 3-6 FS",
        "   │  └─ [7 8] 3-5 FS held by r7 sessions 1 priority 30",
        "   └─ [9] 2-3 F-",
        "adapter 'lora', salt 'tenant'",
        "└─ [5] 0-1 FS",
    ]


def test_a_dump_is_data() -> None:
    dump = dump_tree(small_world().tree)
    assert msgspec.json.decode(msgspec.json.encode(dump.figures), type=TreeFigures) == dump.figures
    views = [view for _, space in dump.spaces for view in space]
    assert sum(view.device_pages for view in views) == dump.figures.pages
    assert sum(view.state > 0 for view in views) == dump.figures.states
    assert sum(len(view.leases) for view in views) == dump.figures.leases
    ids = {view.id for view in views}
    assert all(view.parent in ids or view.depth == 1 for view in views)


@pytest.mark.parametrize("limit", [0, 1, 4, 5, 6, 7])
def test_a_dump_is_bounded_and_says_what_is_missing(limit: int) -> None:
    dump = dump_tree(small_world().tree, limit=limit)
    shown = sum(len(views) for _, views in dump.spaces)
    assert shown == min(limit, 6)
    assert shown + dump.left_out == 6
    assert ("more nodes" in picture(dump)) == (limit < 6)


def test_s193_a_deep_chain_is_drawn_in_lines_of_bounded_length() -> None:
    tree = Tree(page_size=1)
    key = TokenKey.of(run(1, 3000))
    lease, _ = tree.acquire(key, owner="deep")
    for end in range(1, 3001):
        tree.insert(key, [end], end, lease, length=end)
    dump: Dump = dump_tree(tree, limit=2500)
    lines = picture(dump).splitlines()
    assert len(lines) == 2 + 1 + 2500 + 1
    assert max(map(len, lines)) < 120


def test_long_edges_and_marked_content_are_cut_short() -> None:
    world = World()
    world.publish(run(1, 100))
    assert "[1 2 3 4 ..] 0-100 FS" in picture(dump_tree(world.tree))


def test_a_picture_shows_both_tiers_and_what_is_under_way() -> None:
    world = HostWorld()
    for end in (2, 4, 6):
        world.publish(run(1, end))
    world.reclaim_full(4)
    lease, _ = world.tree.acquire(world.key(run(1, 4)), owner="r1")
    world.tree.plan(lease)
    assert picture(dump_tree(world.tree)).splitlines() == [
        "generation 0: 3 nodes, 1 leaves, 2 leases; page 1, grid 2, lru",
        "pages 2 (2 protected), states 1 (0 protected)",
        "host: pages 6 (4 pinned), states 3 (1 pinned); 1 operations",
        "default namespace",
        "└─ [1 2] 0-2 FSfs protected",
        "   └─ [3 4] 2-4 --fs load held by r1, op 4",
        "      └─ [5 6] 4-6 --fs",
    ]
