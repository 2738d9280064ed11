"""Protection that is counted late: two trees do the same, one settles after every step."""

from __future__ import annotations

import random

import pytest
from tree.support import World, run

from phloem.actors.tree import Lease, Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.leases import protected

KINDS = {"kv": ("kv",), "state": ("kv", "state"), "window": ("kv", "state", "window:2")}


def steps(seed: int, kinds: tuple[str, ...], *, late: bool) -> tuple[list[object], Tree]:
    """What happens in the course of random steps; without `late` all is settled after each."""
    chance = random.Random(seed)
    world = World(pages=60, states=12, kinds=kinds, check_each=False)
    tree, leases = world.tree, list[Lease]()
    told: list[object] = []
    for _ in range(150):
        tokens = chance.choices((1, 2), k=chance.randrange(1, 9))
        lease = chance.choice(leases) if leases else None
        match chance.randrange(8):
            case 0 | 1 if len(leases) < 6:
                leases.append(tree.acquire(tokens, owner="some")[0])
            case 2 | 3 if world.kv.free > 8 and world.states.free:
                if lease is not None and lease.generation == tree.generation:
                    before = tree.radix.walk(lease.key, lease.boundary * 4)
                    tokens = [t for node in before.path for t in memoryview(node.edge).cast("I")]
                    tokens += chance.choices((1, 2), k=2)
                else:
                    lease = None
                told.append(world.publish(tokens, lease=lease, state=chance.random() < 0.7))
            case 4 if lease is not None:
                leases.remove(lease)
                tree.release(lease)
            case 5 if lease is not None and lease.generation == tree.generation:
                told.append(tree.advance(lease, beyond=0, limit=lease.key.length))
            case 6:
                pages = chance.randrange(6)
                told.append(tree.can_evict(pages, 0))
                evicted, actions = tree.evict(pages, chance.randrange(2))
                world.carry_out(actions)
                told.append(evicted)
            case 7 if chance.random() < 0.1:
                world.reset()
                told.append(tree.figures())
            case _:
                leases.extend(tree.fork(one, owner="fork") for one in leases[:1] if len(leases) < 9)
        world.sweep()
        if not late:
            tree.leases.settle()
        audit_tree(tree)
        told.append([node.id for node in tree.radix])
    for lease in leases:
        told.append(tree.figures())
        tree.release(lease)
    world.sweep()
    return [*told, tree.figures(), world.log], tree


@pytest.mark.parametrize("kinds", KINDS)
def test_when_it_is_counted_makes_no_difference(kinds: str) -> None:
    unsettled = 0
    for seed in range(12):
        late, tree = steps(seed, KINDS[kinds], late=True)
        at_once, _ = steps(seed, KINDS[kinds], late=False)
        assert late == at_once
        unsettled += len(tree.leases.unsettled)
    assert not unsettled, "nothing is leased any more"


def test_what_is_above_an_unsettled_node_is_counted_when_somebody_asks() -> None:
    world = World(check_each=False)
    for length in (2, 4, 6):
        world.publish(run(1, length))
    lease = world.pin(run(1, 6))
    top = world.node_at(run(1, 2))
    assert (world.tree.leases.pages_protected, protected(top)) == (0, False)
    assert not world.tree.can_evict(1, 0), "the figures would have to be exact"
    assert (world.tree.leases.pages_protected, protected(top)) == (6, True)
    world.unpin(lease)
    assert (world.tree.leases.pages_protected, protected(top)) == (0, False)


def test_room_that_is_there_in_any_case_needs_no_counting() -> None:
    world = World(check_each=False)
    world.publish(run(1, 6))
    world.publish(run(11, 16))
    world.pin(run(1, 6))
    assert world.tree.can_evict(6, 0) and world.tree.leases.unsettled
    assert not world.tree.can_evict(7, 0) and not world.tree.leases.unsettled


def test_no_more_than_a_few_are_ever_unsettled() -> None:
    world = World(pages=400, states=200, check_each=False)
    for first in range(100):
        world.publish([first, first, first])
        world.pin([first, first, first])
    assert len(world.tree.leases.unsettled) == 64
    assert world.tree.leases.pages_protected == 36 * 3
    audit_tree(world.tree)
    assert world.tree.figures_unsettled().pages_protected == 300
    assert world.tree.leases.unsettled, "only `figures` counts them"
    assert world.tree.figures().pages_protected == 300


def test_a_lease_that_is_counted_stays_so_when_it_moves() -> None:
    world = World(check_each=False)
    world.publish(run(1, 2))
    lease = world.pin(run(1, 2))
    world.tree.leases.settle()
    world.publish(run(1, 4), lease=lease)
    assert not world.tree.leases.unsettled and world.tree.leases.pages_protected == 4
    audit_tree(world.tree)
