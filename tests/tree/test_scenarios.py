"""Worked examples with literal numbers. The number in a test's name is that of its scenario.

`tests/scenarios.py` lists them all, with the later capability that covers what is not here.
"""

from __future__ import annotations

import random
from array import array

import pytest
from tree.support import CALLER, World, is_protected, run

from phloem.actors.actions import FreeDeviceSlots
from phloem.actors.tree import Lease, Namespace, Placement, TokenKey, Tree
from phloem.actors.tree.keys import TOKEN_BYTES, common_bytes
from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import Lru
from phloem.errors import InvalidRequest, StaleHandle

PAGES = pytest.mark.parametrize("page", [4, 16, 64, 128])


def chain(world: World, *ends: int) -> None:
    """Prefixes of one key, each with its state."""
    for end in ends:
        world.publish(run(1, end))


def forked() -> World:
    """Three ways that part at 2 and at 3."""
    world = World()
    for tokens in (run(1, 6), [1, 2, 3, 7, 8], [1, 2, 9]):
        world.publish(tokens)
    return world


# -- publish and find ------------------------------------------------------------------------------


def test_s8_nothing_is_found_in_an_empty_cache() -> None:
    assert World().find(run(1, 5)) == (0, 0, None)


def test_s9_s10_s11_s12_s13_s14_s15_a_fork_under_pressure() -> None:
    world = World()
    assert world.publish([1, 2, 3])[:2] == (0, False)
    assert world.find([1, 2, 3]).dev == 3
    assert (world.full_free, world.state_free) == (125, 19)
    # 10: an extension; the caller's copies of what was there go back
    assert world.publish(run(1, 7)).reused == 3
    assert world.full_free == 121
    assert world.find(run(1, 7)).dev == 7
    # 11: another way from 5 on cuts the edge 4..7
    assert world.publish([10, 11, 12]).reused == 0
    assert world.publish([1, 2, 3, 4, 5, 60, 70]).reused == 5
    assert world.nodes() == [
        "[1, 2, 3]FS",
        "[4, 5]F-",
        "[6, 7]FS",
        "[60, 70]FS",
        "[10, 11, 12]FS",
    ]
    assert (world.full_free, world.state_free) == (116, 16)
    # 12: the cut refreshed neither half, so the old tail is the oldest leaf
    assert world.reclaim_full(1) == (2, 1)
    # 13: the oldest state is that of an inner node, whose KV stays
    assert world.reclaim_state(1) == (0, 1)
    assert world.find([1, 2, 3, 4, 5]) == (0, 5, 5)
    # 14
    assert world.use([1, 2, 3, 4, 5, 60, 70]) == 7
    assert world.find(run(1, 7))[:2] == (0, 5)
    # 15: now the leaf has the oldest state, and goes with its KV
    assert world.reclaim_state(1) == (3, 1)
    assert (world.full_free, world.state_free) == (121, 19)


def test_s17_an_identical_publish_gives_everything_back() -> None:
    world = World()
    world.publish(run(1, 4))
    assert world.publish(run(1, 4)) == (4, True, 4)
    assert (world.state_free, world.full_free) == (19, 124)


def test_s19_a_three_way_fork() -> None:
    world = forked()
    assert world.nodes() == ["[1, 2]F-", "[3]F-", "[4, 5, 6]FS", "[7, 8]FS", "[9]FS"]
    assert world.full_free == 119
    expected = {(1, 2): 0, (1, 2, 3): 0, (1, 2, 3, 4, 5, 6): 6, (1, 2, 3, 7, 8): 5}
    expected |= {(1, 2, 9): 3, (1, 2, 9, 9): 3}
    for tokens, length in expected.items():
        assert world.find(list(tokens)).dev == length


def test_s20_a_partly_covered_edge_counts_as_known() -> None:
    world = World()
    world.publish(run(1, 8))
    assert world.find([1, 2, 3, 4, 99])[:2] == (0, 4)
    other = World()
    chain(other, 3, 7)
    assert other.find(run(1, 6))[:2] == (3, 6)


def test_s22_an_empty_key_keeps_nothing() -> None:
    world = World()
    assert world.publish([]) == (0, True, 0)
    assert (world.full_free, world.state_free) == (128, 20)
    assert world.tree.figures().namespaces == 0


def test_s23_what_a_publish_costs_its_caller() -> None:
    world = World()
    world.publish([1, 2, 3])
    assert world.full_free == 125
    assert world.publish(run(1, 7)).reused == 3
    assert world.full_free == 121
    lease = world.pin(run(1, 7))
    assert world.publish(run(1, 8), lease=lease).reused == 7
    assert world.full_free == 120


def test_s25_a_cache_that_is_off_keeps_nothing() -> None:
    world = World(enabled=False)
    assert world.publish(run(1, 4)).reused == 0
    assert (world.full_free, world.state_free) == (128, 20)
    assert world.find(run(1, 4)).dev == 0
    assert world.reclaim_full(10) == (0, 0)
    lease = world.pin(run(1, 4))
    assert lease.boundary == 0
    world.publish(run(1, 4), lease=lease)
    world.unpin(lease)
    assert (world.full_free, world.state_free) == (128, 20)


def test_s26_reset_forgets_everything() -> None:
    world = forked()
    world.reset()
    assert world.find(run(1, 6)) == (0, 0, None)
    assert world.evictable() == (0, 0)
    assert (world.full_free, world.state_free) == (128, 20)


# -- namespaces and keys ---------------------------------------------------------------------------


def test_s28_a_namespace_is_compared_as_a_pair() -> None:
    world = World()
    for ns in (Namespace("bc", "a"), Namespace("c", "ab")):
        assert world.publish([1, 2, 3], ns=ns).reused == 0
        assert world.find([1, 2, 3], ns=ns).dev == 3
    assert world.find([1, 2, 3]) == (0, 0, None)
    assert world.full_free == 122


def test_s29_an_empty_salt_is_no_salt() -> None:
    world = World()
    world.publish([1, 2, 3], ns=Namespace("", ""))
    assert world.find([1, 2, 3]).dev == 3


def test_s31_a_lease_of_another_namespace_cannot_carry_an_insert() -> None:
    world = World()
    world.publish([1, 2], ns=Namespace("a"))
    lease = world.pin([1, 2], ns=Namespace("a"))
    with pytest.raises(InvalidRequest, match="namespace"):
        world.tree.insert(TokenKey.of([1, 2, 3]), [77], lease=lease)
    world.check()


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        (run(1, 8), [*run(1, 8), 9, 9], 8),
        (run(1, 8), [*run(1, 7), 9], 4),
        (run(1, 8), [1, 2, 3], 0),
    ],
)
def test_s32_common_prefixes_are_whole_pages(
    left: list[int], right: list[int], common: int
) -> None:
    mine, theirs = TokenKey.of(left).data, TokenKey.of(right).data
    assert common_bytes(mine, 0, len(mine), theirs, 4 * TOKEN_BYTES) == common * TOKEN_BYTES


def test_s35_a_limit_is_a_shorter_key() -> None:
    world = World()
    chain(world, 2, 4, 8)
    limited, short = world.tree.match(run(1, 8), limit=4), world.tree.match(run(1, 4))
    assert (limited.usable, limited.kv_prefix) == (short.usable, short.kv_prefix) == (4, 4)
    lease, _ = world.tree.acquire(run(1, 8), owner="limited", limit=3)
    assert lease.boundary == 2


# -- pages of several tokens -----------------------------------------------------------------------


@PAGES
def test_s37_pages_are_reused_whole(page: int) -> None:
    world = World(page=page)
    short, long, other = run(1, 2 * page), run(1, 3 * page), run(5000, 5000 + page - 1)
    world.publish(short)
    assert world.publish(long).reused == 2 * page
    assert world.find(long).dev == 3 * page
    assert world.node_at(long).end == 3 * page
    assert world.find(short + other).dev == 2 * page
    assert world.find(other).dev == 0


@PAGES
def test_s38_branches_share_their_base(page: int) -> None:
    world = World(page=page)
    base = run(1, 2 * page)
    world.publish(base)
    world.publish(base + run(1000, 1000 + 2 * page - 1))
    assert world.publish(base + run(3000, 3000 + 2 * page - 1)).reused == 2 * page
    assert world.find([*base, *([9] * page)]).dev == 2 * page


@PAGES
def test_s40_less_than_a_page_is_never_kept(page: int) -> None:
    world = World(page=page)
    assert world.publish(run(1, page - 1)) == (0, True, 0)
    assert (world.kv.free, world.state_free) == (128, 20)


@PAGES
def test_s41_a_difference_inside_a_page_loses_the_page(page: int) -> None:
    world = World(page=page, kinds=("kv",))
    world.publish(run(1, 3 * page), state=False)
    second = run(1, 3 * page)
    second[page + page // 2] = 9999
    assert world.find(second)[:2] == (page, page)
    first = run(1, 3 * page)
    first[0] = 9999
    assert world.find(first)[:2] == (0, 0)


def test_s43_branch_points_lie_on_the_grid() -> None:
    world = World(page=96, chunk=64)
    assert world.tree.grid == 192
    world.publish(run(1, 480), state=False)
    world.publish(run(1, 192))
    assert world.find(run(1, 480)) == (192, 480, 384)
    other = World(page=32, chunk=64)
    assert other.tree.grid == 64
    other.publish(run(1, 160), state=False)
    assert other.find(run(1, 160)) == (0, 160, 128)


def test_s44_a_lost_state_leaves_a_branch_point() -> None:
    world = World(pages=256, chunk=64)
    world.publish(run(1, 128))
    lease = world.pin(run(1, 128), full_only=True)
    assert world.reclaim_state(1) == (0, 1)
    world.unpin(lease)
    assert world.find(run(1, 129)) == (0, 128, 128)


def test_s46_both_ends_of_an_extension_are_wanted() -> None:
    world = World(pages=512, chunk=64)
    world.publish(run(1, 128), state=False)
    lease, match = world.tree.open(TokenKey.of(run(1, 257)), owner="r", limit=256)
    assert match.branch_point == 128
    assert lease.wanted == [(128, "branch"), (256, "end_of_prompt")]


# -- reclaim ---------------------------------------------------------------------------------------


def test_s47_nothing_is_reclaimed_from_an_empty_cache() -> None:
    world = World()
    assert world.reclaim_full(5) == world.reclaim_state(5) == (0, 0)


def test_s49_states_of_a_chain_go_shallow_first() -> None:
    world = World()
    chain(world, 2, 4, 6)
    assert world.reclaim_state(1) == (0, 1)
    assert world.reclaim_state(1) == (0, 1)
    assert world.find([1, 2, 99]).dev == 0
    assert world.find([*run(1, 4), 99]).dev == 0
    assert world.find(run(1, 6)).dev == 6
    assert world.reclaim_state(1) == (2, 1)
    assert world.nodes() == ["[1, 2, 3, 4]F-"]


def test_s50_reclaiming_all_empties_the_structure() -> None:
    world = World()
    chain(world, 2, 4, 6)
    assert world.reclaim_full(6) == (6, 3)
    assert world.nodes() == []
    assert world.tree.figures().namespaces == 0
    assert (world.full_free, world.state_free) == (128, 20)


def test_s52_what_is_returned_is_what_the_pools_and_totals_gain() -> None:
    world = World()
    chain(world, 2, 4, 6)
    before = world.evictable()
    assert world.reclaim(pages=3, states=1) == (4, 2)
    assert world.evictable() == (before[0] - 4, before[1] - 2)
    assert (world.full_free, world.state_free) == (126, 19)


def test_s53_a_parent_is_a_candidate_when_its_last_child_has_gone() -> None:
    world = World()
    chain(world, 2, 4)
    assert world.reclaim_full(2) == (2, 1)
    assert world.nodes() == ["[1, 2]FS"]
    assert world.reclaim_full(2) == (2, 1)
    assert world.nodes() == []


def test_s55_a_pinned_branch_stays() -> None:
    world = World()
    for tokens in ([1, 2], run(1, 4), [1, 2, 5, 6]):
        world.publish(tokens)
    lease = world.pin(run(1, 4))
    assert world.reclaim_full(100) == (2, 1)
    assert world.nodes() == ["[1, 2]FS", "[3, 4]FS"]
    world.unpin(lease)
    assert world.reclaim_full(100) == (4, 2)


def test_s56_only_the_state_of_the_pinned_end_is_protected() -> None:
    world = World()
    chain(world, 2, 4)
    lease = world.pin(run(1, 4))
    assert world.reclaim_state(5) == (0, 1)
    world.unpin(lease)
    assert world.reclaim_state(5) == (2, 1)


def test_s58_a_leaf_takes_its_state_along() -> None:
    world = World()
    world.publish(run(1, 4))
    assert world.reclaim_full(1) == (4, 1)


def test_s59_only_the_state_that_was_used_is_refreshed() -> None:
    world = World()
    for tokens in ([1, 2, 3], run(1, 6), [7, 8, 9], run(7, 12)):
        world.publish(tokens)
    assert world.use(run(1, 6)) == 6
    assert [world.reclaim_state(1) for _ in range(4)] == [(0, 1), (0, 1), (3, 1), (3, 1)]


def test_s61_a_cut_does_not_refresh_the_tail() -> None:
    world = World()
    for tokens in (run(1, 4), run(11, 14), [1, 2, 9]):
        world.publish(tokens)
    assert world.reclaim_full(1) == (2, 1)
    assert world.find(run(11, 14)).dev == 4
    assert world.find(run(1, 4))[:2] == (0, 2)


def test_s64_reclaim_stops_at_what_was_asked() -> None:
    world = World()
    chain(world, 2, 4, 6)
    world.states.take(17, CALLER)
    assert world.state_free == 0
    assert world.reclaim_state(1) == (0, 1)
    assert world.find(run(1, 4)).dev == 4
    other = World()
    chain(other, 2, 4, 6)
    assert other.reclaim_state(2) == (0, 2)
    assert other.find(run(1, 6)).dev == 6


def test_s65_what_goes_on_the_side_counts() -> None:
    world = World()
    world.publish([1, 2])
    world.publish(run(11, 14))
    world.use([1, 2])
    assert world.reclaim(pages=4, states=1) == (4, 1)
    assert world.find([1, 2]).dev == 2


def test_s67_a_leaf_without_state_is_kept_until_there_is_pressure() -> None:
    world = World()
    world.publish(run(1, 4), state=False)
    assert world.find(run(1, 4))[:2] == (0, 4)
    assert world.reclaim_full(4) == (4, 0)
    assert world.find(run(1, 4))[:2] == (0, 0)


def test_s67_a_leaf_without_state_gives_only_its_tail() -> None:
    world = World()
    world.publish(run(1, 4), state=False)
    assert world.reclaim_full(1) == (1, 0)
    assert world.find(run(1, 4))[:2] == (0, 3)


@pytest.mark.parametrize("leaves", [40, 40_000])
def test_s70_one_page_costs_the_same_among_many_leaves(leaves: int) -> None:
    class Counting(Lru):
        asked = 0

        def kv_score(self, node: Node, /) -> int:
            self.asked += 1
            return super().kv_score(node)

    policy = Counting()
    tree = Tree(page_size=1, components=("kv",), policy=policy)
    for leaf in range(1, leaves + 1):
        tree.insert([leaf], [leaf])
    policy.asked = 0
    evicted, actions = tree.evict(pages=1)
    assert (evicted.pages, evicted.states) == (1, 0)
    assert actions == [FreeDeviceSlots("kv", array("i", [1]), -1)]
    assert policy.asked <= 2


def test_s71_a_state_is_refused_while_all_are_pinned() -> None:
    world = World(states=2)
    leases: list[Lease] = []
    for tokens in ([1, 2], [3, 4]):
        world.publish(tokens)
        leases.append(world.pin(tokens))
    assert world.reclaim_state(1) == (0, 0)
    world.unpin(leases.pop())
    assert world.reclaim_state(1) == (2, 1)


# -- pins ------------------------------------------------------------------------------------------


def test_s73_only_the_first_pin_and_the_last_unpin_move_totals() -> None:
    world = World()
    world.publish([1, 2])
    world.publish(run(1, 5))
    seen = [world.evictable()[0]]
    leases = []
    for _ in range(3):
        leases.append(world.pin(run(1, 5)))
        seen.append(world.evictable()[0])
    for lease in leases:
        world.unpin(lease)
        seen.append(world.evictable()[0])
    assert seen == [5, 0, 0, 0, 0, 0, 5]
    with pytest.raises(StaleHandle):
        world.unpin(leases[0])
    assert world.evictable()[0] == 5


def test_s74_a_lease_is_released_once_and_only_by_its_tree() -> None:
    world, other = World(), World()
    for each in (world, other):
        each.publish([1, 2])
    lease, foreign = world.pin([1, 2]), other.pin([1, 2])
    assert lease.id == foreign.id
    for use in (world.tree.release, world.tree.release_state, world.tree.check_lease):
        with pytest.raises(StaleHandle):
            use(foreign)
        world.check()
        other.check()
    world.unpin(lease)
    with pytest.raises(StaleHandle):
        world.tree.release(lease)
    with pytest.raises(StaleHandle):
        world.tree.release_state(lease)
    assert (world.pinned(), other.pinned()) == ((0, 0), (2, 1))


def test_s76_a_state_that_appears_under_a_pin_is_protected_at_once() -> None:
    world = World()
    lease = world.pin(run(1, 4))
    world.publish(run(1, 4), state=False, lease=lease)
    assert world.pinned() == (4, 0)
    world.publish(run(1, 4))
    assert world.pinned() == (4, 1)
    world.unpin(lease)
    assert world.evictable() == (4, 1)


def test_s77_a_holder_without_the_state_cannot_release_anothers() -> None:
    world = World()
    world.publish([1, 2])
    full_only, whole = world.pin([1, 2], full_only=True), world.pin([1, 2])
    with pytest.raises(StaleHandle):
        world.tree.release_state(full_only)
    world.unpin(full_only)
    assert world.pinned() == (2, 1)
    assert world.reclaim_state(1) == (0, 0)
    world.unpin(whole)
    assert world.evictable() == (2, 1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_s80_random_steps_end_with_full_pools(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    leases: list[Lease] = []

    def key() -> list[int]:
        return [chance.randint(1, 3) for _ in range(chance.randint(1, 6))]

    for _ in range(120):
        step = chance.random()
        if step < 0.35:
            if world.kv.free >= 6 and world.state_free:
                world.publish(key(), state=chance.random() < 0.7)
        elif step < 0.6:
            leases.append(world.pin(key()))
        elif step < 0.8 and leases:
            world.unpin(leases.pop(chance.randrange(len(leases))))
        elif step < 0.9 and leases:
            lease = chance.choice(leases)
            if lease.has_state:
                world.tree.release_state(lease)
                world.check()
        else:
            world.reclaim(chance.randint(0, 4), chance.randint(0, 2))
    for lease in leases:
        world.unpin(lease)
    world.reclaim(128, 20)
    assert (world.full_free, world.state_free) == (128, 20)


# -- a request's life, as far as the tree goes -----------------------------------------------------


def test_s82_output_goes_before_the_prompt() -> None:
    world = World(kinds=("kv",))
    world.publish(run(1, 4), state=False)
    world.publish(run(1, 6), state=False)
    assert world.reclaim_full(1) == (1, 0)
    assert world.find(run(1, 6)).dev == 5
    assert world.reclaim_full(1) == (1, 0)
    assert world.find(run(1, 6)).dev == 4


def test_s85_a_checkpoint_protects_what_it_publishes() -> None:
    world = World()
    lease = world.pin(run(1, 8))
    world.publish(run(1, 8), lease=lease, length=4)
    assert lease.boundary == 4
    assert world.pinned() == (4, 1)
    world.check_content(lease)


def test_s86_the_second_of_two_equal_prompts_reads_the_firsts_pages() -> None:
    world = World()
    first, second = world.pin(run(1, 4)), world.pin(run(1, 4))
    key = TokenKey.of(run(1, 4))
    mine, theirs = world.kv.take(4, CALLER), world.kv.take(4, CALLER)
    for lease, pages in ((first, mine), (second, theirs)):
        world.fill(key, 0, pages)
        world.publish_own(key, array("i", pages), 0, lease)
    assert list(world.tree.pages_of(second)) == mine
    assert world.log[-1] == FreeDeviceSlots("kv", array("i", theirs), CALLER)
    assert world.full_free == 124


def test_s86_the_table_to_rewrite_is_named() -> None:
    tree = Tree(page_size=1, components=("kv",))
    tree.insert(run(1, 2), [1, 2])
    tree.insert(run(1, 4), [1, 2, 3, 4])
    result, actions = tree.insert(run(1, 6), [11, 12, 13, 14, 15, 16], owner=CALLER)
    assert [(c.start, list(c.pages)) for c in result.pages_changed] == [(0, [1, 2]), (2, [3, 4])]
    assert (result.reused, result.adopted) == (4, ((4, 6),))
    assert actions == [FreeDeviceSlots("kv", array("i", [11, 12, 13, 14]), CALLER)]


def test_s86_without_swap_the_caller_keeps_its_pages() -> None:
    tree = Tree(page_size=1, components=("kv",))
    tree.insert(run(1, 2), [1, 2])
    result, actions = tree.insert(run(1, 3), [11, 12, 13], owner=CALLER, swap=False)
    assert (result.reused, result.adopted, result.pages_changed) == (2, ((2, 3),), ())
    assert actions == []


def test_s91_a_checkpoint_without_state_protects_its_kv() -> None:
    world = World(chunk=64)
    lease = world.pin(run(1, 8))
    world.publish(run(1, 8), state=False, lease=lease, length=4)
    assert lease.boundary == 4
    assert world.pinned() == (4, 0)
    assert world.find(run(1, 8))[:2] == (0, 4)


def test_s94_refused_admissions_leave_nothing_behind() -> None:
    world = World()
    world.publish(run(1, 4))
    before = world.tree.figures()
    for _ in range(100):
        world.unpin(world.pin([*run(1, 4), 9]))
    assert world.tree.figures() == before
    assert world.state_free == 19


def test_s98_chunks_of_a_prefill_grow_what_is_protected() -> None:
    world = World()
    lease = world.pin(run(1, 12))
    key = TokenKey.of(run(1, 12))
    for end in (4, 8, 12):
        world.publish(key, lease=lease, length=end)
        assert world.pinned() == (end, 1)
    world.unpin(lease)
    assert world.find(key).dev == 12
    assert (world.full_free, world.state_free) == (116, 17)
    assert world.reclaim(12, 3) == (12, 3)


# -- the cap for each path -------------------------------------------------------------------------


def test_s100_the_shallowest_state_beyond_the_cap_goes() -> None:
    world = World(cap=2)
    chain(world, 2, 4, 6)
    assert (world.state_free, world.full_free) == (18, 122)
    assert world.find([1, 2, 99]).dev == 0
    assert world.find([*run(1, 4), 99]).dev == 4
    assert world.find([*run(1, 6), 99]).dev == 6


def test_s101_forks_pins_and_the_tail_are_spared() -> None:
    world = World(cap=100)
    chain(world, 2, 4, 6, 8)
    world.publish([1, 2, 90, 91])
    lease = world.pin(run(1, 4))
    world.tree.placement = Placement(max_states_per_path=1)
    world.publish(run(1, 8))
    assert world.nodes() == [
        "[1, 2]FS",
        "[3, 4]FS",
        "[5, 6]F-",
        "[7, 8]FS",
        "[90, 91]FS",
    ]
    world.unpin(lease)


def test_s103_a_cap_starts_at_one() -> None:
    assert Placement().max_states_per_path is None
    for cap in (0, -1):
        with pytest.raises(InvalidRequest, match="max_states_per_path"):
            Placement(max_states_per_path=cap)


# -- effects of one step ---------------------------------------------------------------------------


def test_s187_a_publish_of_new_tokens_asks_for_nothing() -> None:
    world = World()
    world.publish(run(1, 4))
    assert world.log == []


# -- splits ----------------------------------------------------------------------------------------


def test_s196_a_cut_divides_pages_and_leaves_pins_below() -> None:
    world = World()
    world.publish(run(1, 5))
    pages = list(world.node_at(run(1, 5)).pages)
    leases = [world.pin(run(1, 5)) for _ in range(3)]
    world.publish([1, 2, 9])
    upper, lower = world.node_at([1, 2]), world.node_at(run(1, 5))
    assert (list(upper.pages), list(lower.pages)) == (pages[:2], pages[2:])
    assert (upper.leases, upper.state_leases, upper.state) == (0, 0, 0)
    assert (lower.leases, lower.state_leases) == (3, 3)
    assert is_protected(world, [1, 2])
    assert world.reclaim(128, 20) == (1, 1)
    for lease in leases:
        world.unpin(lease)
    assert world.reclaim(128, 20) == (5, 1)
