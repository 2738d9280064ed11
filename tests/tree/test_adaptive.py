"""The policy that follows others: whom, when, and what its shadows cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tree.support import World, run
from tree.test_benefit import Server

from phloem.actors.tree import TokenKey
from phloem.actors.tree.adaptive import Adaptive
from phloem.actors.tree.audit import AuditFailed, audit_tree
from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import Benefit, Lru, Policy, PriorityFirst, Slru, policy_named
from phloem.actors.tree.scoring import Score
from phloem.actors.tree.shadows import Beginnings, Shadows


class Newest(Policy):
    """The latest used goes first: bad for conversations, good for a loop."""

    name = "newest"
    rises_only = False

    def kv_score(self, node: Node, /) -> Score:
        return (1 << 64) - node.stamp

    def state_score(self, node: Node, /) -> Score:
        return (1 << 64) - node.state_stamp


def a_loop(server: Server, rounds: int, sessions: int = 20) -> list[int]:
    """Hits, when sessions come back in turn."""
    return [
        server.serve([1000 + turn % sessions, *run(1, 30)]) for turn in range(rounds * sessions)
    ]


def conversations(server: Server, turns: int, first: int = 10**6) -> list[int]:
    """Hits, when four conversations go on beside prompts that never come again."""
    hits: list[int] = []
    talks = [[first + number] for number in range(4)]
    for turn in range(turns):
        talk = talks[turn % 4]
        if len(talk) > 60:
            talks[turn % 4] = talk = [first + 100 * turn]
        talk.extend(range(first * 2 + 10 * turn, first * 2 + 10 * turn + 5))
        hits.append(server.serve(talk))
        server.serve([first * 3 + turn, *run(1, 30)])
    return hits


def small(policy: Policy) -> Server:
    """Room for ten sessions of 30 tokens with two states each."""
    return Server(policy, capacity=500)


def rate(hits: Sequence[int]) -> float:
    return sum(hit > 0 for hit in hits) / len(hits)


def test_it_leaves_a_policy_that_does_worse_and_keeps_what_is_cached() -> None:
    policy = Adaptive([Lru, Newest])
    server = small(policy)
    hits = a_loop(server, 40)
    assert isinstance(policy.followed, Newest)
    assert rate(a_loop(small(Lru()), 40)) == 0
    assert rate(hits[400:]) > 0.3
    audit_tree(server.tree)


def test_it_comes_back_when_the_requests_change() -> None:
    policy = Adaptive([Lru, Newest])
    server = small(policy)
    a_loop(server, 40)
    hits = conversations(server, 600)
    assert isinstance(policy.followed, Lru)
    assert rate(hits[300:]) > 0.9 * rate(conversations(small(Lru()), 600)[300:]) > 0.5
    audit_tree(server.tree)


def test_an_audit_looks_at_the_shadows() -> None:
    policy = PriorityFirst(Adaptive([Lru, Newest]))  # passed on by what stands before it, too
    server = small(policy)
    a_loop(server, 2)
    audit_tree(server.tree)
    shadows = list(policy.shadows())
    assert len(shadows) == 2
    shadows[1].radix.pages += 1
    with pytest.raises(AuditFailed, match="pages: the tree counts"):
        audit_tree(server.tree)
    shadows[1].radix.pages -= 1
    shadows[0].acquire([1000], owner="a request")
    with pytest.raises(AuditFailed, match="a request of a shadow has not ended"):
        audit_tree(server.tree)


@pytest.mark.parametrize("work", [a_loop, conversations])
def test_it_is_not_far_below_the_better_of_two(work: object) -> None:
    def served(policy: Policy) -> float:
        server = small(policy)
        hits = a_loop(server, 60) if work is a_loop else conversations(server, 600)
        return rate(hits)

    both = served(Adaptive([Lru, Newest]))
    assert both > 0.8 * max(served(Lru()), served(Newest()))


def test_the_same_requests_give_the_same_decisions() -> None:
    first, second = small(policy_named("adaptive")), small(policy_named("adaptive"))
    for server in (first, second):
        a_loop(server, 10)
        conversations(server, 100)
    lists = [
        [(node.id, node.end, node.state) for node in one.tree.radix] for one in (first, second)
    ]
    assert lists[0] == lists[1]
    assert a_loop(first, 5) == a_loop(second, 5)


def test_shadows_stay_small_by_taking_fewer_requests() -> None:
    server = Server("lru", capacity=10**9)
    shadows = Shadows(server.tree, [Benefit, Lru])
    policy = Adaptive([Benefit, Lru])
    policy.visited = lambda visit: int(shadows.visited(visit))  # type: ignore[method-assign]  # a probe
    server.tree.policy = policy
    for turn in range(3000):
        server.serve([turn, *run(1, 10), 10**6 + turn])
    assert shadows.one_in >= 4
    assert 500 < shadows.sampled < 1500
    assert server.tree.radix.nodes > 3000


def test_requests_of_one_conversation_have_one_beginning() -> None:
    beginnings = Beginnings(page_bytes=4)
    system = run(1, 16)  # all share it
    talks = [[*system, 1000 + number, *run(1, 40)] for number in range(100)]
    marks = [
        [beginnings.of(TokenKey.of(talk[:length]).data) for talk in talks]
        for length in (40, 45, 50, 57)
    ]
    settled = marks[1:]
    assert all(turn == settled[0] for turn in settled)
    assert len(set(settled[0])) > 90, "the system prompt does not make them one"


def test_a_reset_and_another_policy_begin_anew() -> None:
    server = small(policy_named("adaptive"))
    a_loop(server, 5)
    server.tree.reset()
    while server.tree.sweep()[0]:
        pass
    a_loop(server, 5)
    for policy in (PriorityFirst(policy_named("adaptive")), policy_named("lru")):
        server.tree.use_policy(policy)
        a_loop(server, 5)
        audit_tree(server.tree)


@pytest.mark.parametrize("kinds", [("kv",), ("kv", "state"), ("kv", "state", "window:8")])
def test_it_serves_trees_of_any_components_in_pools(kinds: tuple[str, ...]) -> None:
    world = World(pages=200, states=10, kinds=kinds, policy="adaptive")
    for turn in range(60):
        tokens = [1000 + turn % 9, *run(1, 30)]
        spans = [max(0, 40 - pool.free) for pool in world.spans]
        world.reclaim(max(0, 40 - world.kv.free), max(0, 2 - world.states.free), spans)
        if world.use(tokens) < len(tokens):
            world.publish(tokens)


def test_slru_is_among_those_that_the_named_one_follows() -> None:
    policy = policy_named("adaptive")
    assert isinstance(policy, Adaptive)
    assert [type(one) for one in policy.policies] == [Benefit, Lru, Slru]
