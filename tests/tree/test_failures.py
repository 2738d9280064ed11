"""Faults known from systems of this kind, tried on the tree. The ids are those of the table
`tests/failure_modes.py`, which says where each of the others is tried."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import pytest
from tree.support import CALLER, World, run

from phloem.actors.actions import EvictExcessPathStates
from phloem.actors.tree import Lease, TokenKey, Tree
from phloem.errors import InvalidRequest, StaleHandle


def test_f003_what_was_asked_before_a_reset_does_nothing_after_it() -> None:
    world = World(cap=1)
    world.publish([1, 2])
    (one,) = world.states.take(1, CALLER)
    pages = array("i", world.kv.take(4, CALLER))
    _, actions = world.tree.insert(run(1, 4), pages, one, owner=CALLER)
    world.tree.reset()
    (excess,) = [a for a in actions if isinstance(a, EvictExcessPathStates)]
    assert world.tree.evict_excess(excess)[1] == []
    assert len(actions) == 2  # the duplicates go back, whatever the generation


def test_f003_leases_of_a_former_generation_keep_their_data_and_publish_nothing() -> None:
    world = World()
    world.publish(run(1, 4))
    lease = world.pin(run(1, 4))
    world.reset()
    assert world.full_free == 124
    with pytest.raises(StaleHandle, match="generation"):
        world.publish_own(TokenKey.of(run(1, 4)), array("i"), 0, lease)
    assert list(world.tree.pages_of(lease)) == [1, 2, 3, 4]
    world.publish(run(1, 4))
    world.unpin(lease)
    assert (world.full_free, world.find(run(1, 4)).dev) == (124, 4)


@pytest.mark.parametrize("end", ["released", "reset"])
def test_f009_f061_a_failed_admission_ends_by_its_receipt(end: str) -> None:
    world = World()
    world.publish([1, 2])
    kept, refused = world.pin([1, 2]), world.pin(run(1, 6))
    if end == "reset":
        world.reset()
    world.unpin(refused)
    with pytest.raises(StaleHandle):
        world.unpin(refused)
    assert world.tree.figures().leases == 1
    assert world.reclaim_full(2) == (0, 0)
    world.unpin(kept)
    world.reclaim_full(2)
    assert world.full_free == 128


def test_f010_a_pinned_entry_is_passed_over_and_comes_back() -> None:
    world = World()
    for token in (1, 2, 3):
        world.publish([token])
    oldest = world.pin([1])
    assert world.reclaim_full(1) == (1, 1)
    assert world.nodes() == ["[1]FS", "[3]FS"]
    world.unpin(oldest)
    assert world.reclaim_full(2) == (2, 2)


def test_f012_f015_a_release_ends_what_its_receipt_took() -> None:
    world = World()
    first = world.pin(run(1, 4))
    world.publish(run(1, 4), state=False, lease=first)
    world.publish(run(1, 4))
    second = world.pin(run(1, 4))
    world.tree.release_state(first)
    with pytest.raises(StaleHandle):
        world.tree.release_state(first)
    world.unpin(first)
    assert world.reclaim_state(1) == (0, 0)
    assert world.pinned() == (4, 1)
    world.unpin(second)
    assert world.reclaim_state(1) == (4, 1)


def test_f013_the_matched_node_itself_is_protected() -> None:
    world = World()
    world.publish([1, 2])
    world.publish(run(1, 4))
    lease = world.pin(run(1, 4))
    assert world.reclaim(128, 20) == (0, 1)
    assert world.find(run(1, 4)).dev == 4
    world.unpin(lease)
    assert world.reclaim(128, 20) == (4, 1)


def test_f014_totals_follow_every_change_of_shape() -> None:
    world = World()
    for tokens in ([1, 2, 3], run(1, 5), [1, 2, 9]):
        world.publish(tokens)
        assert sum(world.evictable()) == 128 - world.full_free + 20 - world.state_free
    for tokens in (run(1, 5), [1, 2, 9]):
        lease = world.pin(tokens)
        assert world.pinned()[0] == len(tokens)
        world.unpin(lease)
        with pytest.raises(StaleHandle):
            world.unpin(lease)
        assert world.pinned() == (0, 0)


def test_f021_f058_matching_and_leasing_are_one_step() -> None:
    world = World(pages=6)
    world.publish([1, 2])
    world.publish(run(11, 14))
    assert world.find(run(1, 6)).dev == 2
    lease = world.pin(run(1, 6))
    assert world.reclaim_full(4) == (4, 1)
    assert world.find(run(1, 6)).dev == 2
    world.unpin(lease)
    assert world.reclaim_full(6) == (2, 1)
    assert world.pin(run(1, 6)).boundary == 0  # what an earlier match promised is gone


def test_f025_one_boundary_serves_all_components() -> None:
    world = World(page=16)
    world.publish(run(1, 80), state=False)
    world.publish(run(1, 48))
    world.publish(run(1, 64))
    match = world.tree.match(run(1, 80), limit=63)
    assert (match.usable, match.kv_prefix) == (48, 48)
    assert world.tree.match(run(1, 80)).usable == 64


def test_f026_a_state_is_found_at_its_own_position() -> None:
    world = World(page=2, chunk=8)
    slots: list[int] = []
    for end in (8, 16, 24):
        world.publish(run(1, end))
        slots.append(world.node_at(run(1, end)).state)
    lease = world.pin(run(1, 30))
    assert (lease.boundary, world.tree.state_of(lease)) == (24, slots[2])


def test_f029_the_cap_of_a_path_spares_what_others_need() -> None:
    world = World(cap=1)
    world.tree.placement = type(world.tree.placement)()
    for tokens in ([1], [1, 9], run(1, 2)):
        world.publish(tokens)
    lease = world.pin(run(1, 2))
    world.publish(run(1, 3))
    world.tree.placement = type(world.tree.placement)(max_states_per_path=1)
    world.publish(run(1, 4))
    assert world.nodes() == ["[1]FS", "[2]FS", "[3]F-", "[4]FS", "[9]FS"]
    world.unpin(lease)


def test_f033_f041_less_than_a_page_matches_nothing() -> None:
    world = World(page=4, kinds=("kv",))
    world.publish(run(1, 8), state=False)
    shape = world.nodes()
    lease, match = world.tree.acquire(run(1, 8), owner="short", limit=3)
    assert (match.usable, lease.boundary) == (0, 0)
    other = world.pin([1, 2, 3, 9])
    assert world.nodes() == shape
    for each in (lease, other):
        world.unpin(each)
    assert world.publish([1, 2, 3], state=False).end == 0
    assert world.publish(run(21, 25), state=False).end == 4
    assert world.kv.free == 125
    world.reclaim(pages=128)
    assert world.nodes() == []


def test_f034_a_partial_match_protects_exactly_what_it_found() -> None:
    world = World(kinds=("kv",))
    world.publish(run(1, 4), state=False)
    lease = world.pin([1, 2, 9])
    assert world.pinned() == (2, 0)
    world.publish([1, 2, 9, 9], state=False)
    assert world.pinned() == (2, 0)
    world.unpin(lease)
    assert world.reclaim_full(128) == (6, 0)


def test_f036_a_state_and_its_lease_stay_below_a_cut() -> None:
    world = World()
    world.publish(run(1, 8))
    lease = world.pin(run(1, 8))
    world.publish([1, 2, 3, 4, 9])
    upper, lower = world.node_at(run(1, 4)), world.node_at(run(1, 8))
    assert (upper.state, upper.state_leases) == (0, 0)
    assert lower.state_leases == 1
    world.unpin(lease)
    assert world.reclaim(128, 20) == (9, 2)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_f038_f039_two_requests_at_one_boundary(order: tuple[int, int]) -> None:
    world = World(states=4)
    leases = [world.pin(run(1, 4)) for _ in range(2)]
    kept = [world.publish(run(1, 4), lease=leases[one]).state_dup for one in order]
    assert kept == [False, True]
    assert (world.full_free, world.state_free) == (124, 3)
    assert {world.tree.state_of(lease) for lease in leases} == {1}
    assert world.pinned() == (4, 1)


def test_f038_kv_beyond_the_last_state_is_the_trees_under_the_lease() -> None:
    world = World(page=2, chunk=4)
    lease = world.pin(run(1, 6))
    world.publish(run(1, 6), lease=lease, length=4)
    world.publish(run(1, 6), state=False, lease=lease)
    assert world.find(run(1, 6))[:2] == (4, 6)
    assert world.reclaim(128, 20) == (0, 1)  # nobody reads the state at 4
    assert world.pinned() == (6, 0)


@pytest.mark.parametrize("length", [-2, 9])
def test_f042_a_length_outside_the_key_is_refused(length: int) -> None:
    world = World()
    lease = world.pin(run(1, 8))
    before = world.tree.figures()
    with pytest.raises(InvalidRequest, match=f"length {length}"):
        world.tree.insert(run(1, 8), [], lease=lease, length=length)
    assert world.tree.figures() == before


def test_f042_nothing_settled_publishes_nothing() -> None:
    world = World(chunk=8)
    lease = world.pin([1, 2, 3])
    assert world.publish([1, 2, 3], state=False, lease=lease, length=0).end == 0
    assert (lease.boundary, lease.live) == (0, True)
    world.unpin(lease)
    assert world.tree.figures().namespaces == 0


REFUSED_INSERTS = {
    "too_few_pages": ({"pages": [1]}, "takes 2 pages"),
    "too_many_pages": ({"pages": [1, 2, 3]}, "takes 2 pages"),
    "state_off_grid": ({"length": 6, "pages": [1], "state": 3}, "off the grid"),
    "ends_before_the_lease": ({"length": 2, "pages": []}, "before the lease"),
}


@pytest.mark.parametrize("case", REFUSED_INSERTS)
def test_f042_refused_inserts_change_nothing(case: str) -> None:
    world = World(page=2, chunk=4)
    world.publish(run(1, 4))
    lease = world.pin(run(1, 8))
    before, shape = world.tree.figures(), world.nodes()
    arguments, says = REFUSED_INSERTS[case]
    with pytest.raises(InvalidRequest, match=says):
        world.tree.insert(run(1, 8), lease=lease, **arguments)  # type: ignore[arg-type]  # cases
    assert (world.tree.figures(), world.nodes()) == (before, shape)
    world.check()


def test_f042_a_key_that_leaves_the_leases_path_is_refused() -> None:
    """The last edge alone is equal: all of the path counts."""
    world = World()
    world.publish([1, 2])
    world.publish(run(1, 4))
    lease = world.pin(run(1, 4))
    with pytest.raises(InvalidRequest, match="does not continue"):
        world.tree.insert([7, 7, 3, 4, 5], [99], lease=lease)
    world.check()


def test_f043_the_grid_is_known_and_short_prompts_say_why() -> None:
    tree = Tree(page_size=48, state_chunk=64)
    assert tree.grid == 192
    tree.insert(run(1, 100), [1, 2])
    match = tree.match(run(1, 100))
    assert (match.usable, match.lost) == (0, {"partial_page": 4, "no_state": 96})
    assert Tree(page_size=5, state_chunk=7).grid == 35
    for page, chunk in ((0, 1), (1, 0), (-4, 4)):
        with pytest.raises(InvalidRequest):
            Tree(page_size=page, state_chunk=chunk)


@pytest.mark.parametrize(("length", "expected"), [(8, 4), (9, 8)])
def test_f044_an_identical_prompt_reuses_all_but_its_last_token(length: int, expected: int) -> None:
    world = World(page=4)
    lease, _ = world.tree.open(TokenKey.of(run(1, length)), owner="first", limit=length - 1)
    (wanted,) = lease.wanted
    assert wanted == (expected, "end_of_prompt")
    world.publish(run(1, length), lease=lease, length=wanted.position)
    assert world.tree.match(run(1, length), limit=length - 1).usable == expected


SCRIPT = """
from phloem.actors.tree import Namespace, TokenKey, Tree
tree, log = Tree(page_size=1), []
for turn in range(400):
    space = Namespace("a" * (turn % 3), "b" * (turn % 2))
    key = TokenKey.of([turn % 5, turn % 7, turn % 11], space)
    if turn % 4 == 3:
        log.append(tree.evict(2, 1))
    else:
        log.append(tree.insert(key, range(3 * turn + 1, 3 * turn + 4), turn + 1))
        lease, match = tree.open(TokenKey.of([turn % 5, turn % 7, 99], space), owner="x")
        log.append((match, lease.wanted, lease.boundary))
        tree.release(lease)
print(log)
"""


def test_f082_f093_the_same_messages_give_the_same_actions_in_every_process() -> None:
    logs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    (log,) = logs
    assert len(log) > 10_000


def test_f087_the_deepest_of_too_many_positions_is_kept() -> None:
    world = World(page=4)
    world.tree.placement = type(world.tree.placement)(budget=1)
    world.publish(run(1, 8), state=False)
    lease, _ = world.tree.open(TokenKey.of(run(1, 12)), owner="r", limit=11)
    assert lease.wanted == [(8, "branch")]


def test_f091_a_long_key_is_neither_copied_nor_walked() -> None:
    """A chunk of a million tokens is published by a few slices, whatever has gone before."""
    tree = Tree(page_size=64)
    key = TokenKey.of(array("i", bytes(4 * 2**20)))
    lease, _ = tree.acquire(key, owner="long")
    chunk = 8192
    for end in range(chunk, key.length + 1, chunk):
        first = (end - chunk) // 64 + 1
        tree.insert(key, array("i", range(first, first + chunk // 64)), 0, lease, length=end)
    nodes = list(tree.radix)
    assert lease.boundary == 2**20
    assert max(len(node.edge) for node in nodes) <= 64 * 1024
    assert len(nodes) < 200


def test_f099_wanted_states_are_the_tails_and_the_forks() -> None:
    world = World(page=4, chunk=4, states=6)
    chains = [run(100 * chain, 100 * chain + 32) for chain in (1, 2, 3)]

    def serve(tokens: list[int]) -> int:
        """Open, compute to each wanted position, and publish there; what was reused."""
        key = TokenKey.of(tokens)
        lease, match = world.tree.open(key, owner="r", limit=len(tokens) - 1)
        for position in [wanted.position for wanted in lease.wanted]:
            world.publish(key, lease=lease, length=position)
        world.unpin(lease)
        return match.usable

    assert [serve(chain) for chain in chains] == [0, 0, 0]
    fork = chains[0][:18] + run(900, 912)
    assert serve(fork) == 0
    assert serve(chains[0][:18] + run(950, 962)) == 16
    assert [serve(chain) for chain in chains] == [32, 32, 32]


def test_f116_a_cut_announces_nothing() -> None:
    world = World()
    world.publish(run(1, 4))
    leases: list[Lease] = [world.pin(run(1, 4))]
    world.publish([1, 2, 9, 9], lease=None)
    world.unpin(leases[0])
    assert [action.ids for action in world.log] == [array("i", [5, 6])]  # type: ignore[union-attr]  # frees only
