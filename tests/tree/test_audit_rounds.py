"""Audits in small parts: they follow a tree that changes, and notice what is broken."""

from __future__ import annotations

import random

import pytest
from tree.host_model import HostRun, wander
from tree.support import World, run
from tree.test_host_model import CONFIGS

from phloem.actors.tree.audit import AuditFailed, AuditRounds


@pytest.mark.parametrize("config", CONFIGS)
def test_they_go_round_while_the_tree_changes(config: str) -> None:
    host_run = HostRun(*CONFIGS[config])
    rounds = AuditRounds(host_run.world.tree, 3)
    chance = random.Random(7)
    for _ in range(150):
        wander(host_run, chance, 1)
        rounds.audit_some()
    assert rounds.rounds > 10
    host_run.end()


@pytest.mark.parametrize("field", ["leases", "counted", "end", "gone_children", "parent"])
def test_a_broken_node_is_found_within_a_round(field: str) -> None:
    world = World(states=40)
    for first in range(10, 30):
        world.publish([1, 2, first, first])
    node = world.node_at([1, 2, 20, 20])
    if field == "parent":
        node.parent = world.node_at([1, 2, 21, 21])
    else:
        setattr(node, field, type(getattr(node, field))(getattr(node, field) + 1))
    rounds = AuditRounds(world.tree, 2)
    with pytest.raises(AuditFailed, match="of 1$" if field == "counted" else str(node.id)):
        while rounds.rounds < 3:
            rounds.audit_some()


def test_a_reset_begins_a_new_round() -> None:
    world = World(states=40)
    for first in range(10, 30):
        world.publish([first])
    rounds = AuditRounds(world.tree, 1)
    for _ in range(5):
        rounds.audit_some()
    world.tree.reset()
    before = rounds.rounds
    rounds.audit_some()
    assert rounds.rounds == before + 1
    world.publish(run(1, 5))
    rounds.audit_some()
    rounds.audit_some()
    assert rounds.rounds == before + 2
    world.sweep()
