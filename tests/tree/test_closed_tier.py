"""Evictions while the host tier is closed: what copies still read stays until they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tree.host_world import HostWorld
from tree.support import run

from phloem.actors.tree import Evicted, Tree
from phloem.actors.tree.core import Actions

WAYS: dict[str, Callable[[Tree], tuple[Evicted, Actions]]] = {
    "pages": lambda tree: tree.evict(4, 0),
    "states": lambda tree: tree.evict(0, 2),
    "bytes": lambda tree: tree.evict_bytes(50, page_bytes=1, state_bytes=10),
    "states of one memory": lambda tree: tree.evict_bytes(
        0, page_bytes=1, state_bytes=10, states=2
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_copy_reads_stays_while_the_tier_is_closed(way: str) -> None:
    world = HostWorld(write_policy="write_back", auto=False)
    world.publish(run(1, 2))
    world.publish(run(1, 4))
    _, actions = world.tree.evict(2, 0)  # the leaf leaves, once it has been copied
    world.carry_out(actions)
    while world.reserves:
        world.carry_out(world.answer(world.reserves.popleft()))
    (copy,) = world.copies
    world.tree.close_host(True)
    gone, actions = WAYS[way](world.tree)
    assert (gone, actions) == (Evicted(0, 0), [])
    world.carry_out(world.end_copy(copy, ok=False))
    gone, actions = WAYS[way](world.tree)
    assert gone.pages + gone.states > 0 and not gone.pages_promised
    world.carry_out(actions)
    world.check()
