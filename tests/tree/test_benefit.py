"""Benefit per byte: what it learns, and what it keeps because of it."""

from __future__ import annotations

import random
from array import array

import pytest
from tree.support import run

from phloem.actors.actions import FreeDeviceSlots
from phloem.actors.tree import TokenKey, Tree, benefit
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.node import NO_SLOT, Node
from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import Benefit, Policy, PriorityFirst, policy_named
from phloem.actors.tree.returns import Returns

STATE_WEIGHT = 10


class Server:
    """Serves prompts one after another from a tree of so many bytes, a token of KV being one."""

    def __init__(
        self, policy: str | Policy, capacity: int, placement: Placement | None = None
    ) -> None:
        self.tree = Tree(page_size=1, policy=policy, placement=placement, state_weight=STATE_WEIGHT)
        self.capacity = capacity
        self.places = {"kv": array("i"), "state": array("i")}
        self.made = 0

    def take(self, component: str, count: int) -> array[int]:
        places = self.places[component]
        while len(places) < count:
            self.made += 1
            places.append(self.made)
        taken = places[len(places) - count :]
        del places[len(places) - count :]
        return taken

    def serve(self, tokens: list[int]) -> int:
        """The tokens of a prompt that were cached; afterwards all of it is."""
        tree, key = self.tree, TokenKey.of(tokens)
        lease, match = tree.open(key, owner="r", limit=len(tokens) - 1)
        at_end = tree.wanted_at_end(lease, len(tokens))
        wanted = {one.position for one in (*lease.wanted, at_end) if one is not None}
        need = len(tokens) - match.kv_prefix + STATE_WEIGHT * len(wanted)
        held = tree.radix.pages + STATE_WEIGHT * tree.radix.states
        guard = tree.leases.take(
            tree.radix.walk(key, 4 * match.kv_prefix).partial or lease.anchor,
            *(key, "guard", tree.generation),
            with_state=False,
        )
        _, actions = tree.evict_bytes(
            max(0, need + held - self.capacity), page_bytes=1, state_bytes=STATE_WEIGHT
        )
        for action in actions:
            assert isinstance(action, FreeDeviceSlots)
            self.places[action.component].extend(action.ids)
        for at in sorted(wanted | {len(tokens)}):
            state = self.take("state", 1)[0] if at in wanted else NO_SLOT
            tree.insert(key, self.take("kv", at - lease.boundary), state, lease, length=at)
        tree.leases.end(guard, 0)
        tree.release(lease)
        return match.usable


def hits_of_a_loop(policy: str | Policy) -> float:
    """The share of hits when 20 sessions come back in turn, for ten of which there is room."""
    server = Server(policy, capacity=10 * (30 + 2 * STATE_WEIGHT))
    hits = [server.serve([1000 + turn % 20, *run(1, 30)]) for turn in range(800)]
    audit_tree(server.tree)
    return sum(hit > 0 for hit in hits[400:]) / 400


def test_sessions_that_all_come_back_are_kept_in_part() -> None:
    assert hits_of_a_loop("lru") == 0
    assert hits_of_a_loop("benefit") > 0.25


def test_it_learns_below_another_policy_too() -> None:
    assert hits_of_a_loop(PriorityFirst(policy_named("benefit"))) > 0.25


def test_what_comes_once_is_not_kept_for_what_comes_again() -> None:
    kept: dict[str, int] = {}
    for policy in ("lru", "benefit"):
        server = Server(policy, capacity=12 * (30 + 2 * STATE_WEIGHT))
        kept[policy] = 0
        conversations = [[1000 + number] for number in range(6)]
        for turn in range(1200):
            if turn % 4 == 0:
                conversation = conversations[turn // 4 % 6]
                conversation.extend(range(2 * turn, 2 * turn + 6))
                kept[policy] += server.serve(conversation) > 0
                if len(conversation) > 40:
                    conversations[turn // 4 % 6] = [10_000 + turn]
            else:
                server.serve([100_000 + turn, *run(1, 30)])
    assert kept["benefit"] > 1.5 * kept["lru"]


def test_a_state_is_worth_the_tokens_since_the_nearest_one_above() -> None:
    tree = Tree(page_size=1, policy="benefit", state_weight=10)
    tree.insert(run(1, 10), range(1, 11), 1)
    tree.insert(run(1, 30), range(11, 41), 2)
    score = tree.policy.kv_score
    shallow, deep = sorted(tree.radix, key=lambda node: node.end)
    alone = score(deep)
    tree.insert([99], [41], 3)
    tree.insert([99, *run(1, 20)], range(42, 63), 4)
    (other,) = (node for node in tree.radix if node.end == 21)
    assert score(other) == pytest.approx(alone, rel=0.3)  # about as long, about as old
    tree.insert(run(1, 20), range(63, 83), 5)
    assert score(deep) < alone  # the new state saves half of it
    assert tree.policy.state_score(shallow) > 0


def test_a_long_prefix_outlives_a_short_one_but_not_for_ever() -> None:
    tree = Tree(page_size=1, policy="benefit", state_weight=10)
    tree.insert(run(1, 100), range(1, 101), 1)
    slot = 2
    for turn in range(1, 5):
        tree.insert([1000 + turn, 1], [slot * 1000, slot * 1000 + 1], slot)
        slot += 1
    assert tree.evict(states=3)[0].pages == 6  # the short ones, though newer
    for turn in range(5, 400):
        tree.insert([1000 + turn, 1], [slot * 1000, slot * 1000 + 1], slot)
        slot += 1
        tree.evict(states=1)
        audit_tree(tree)
        if not tree.match(run(1, 100)).usable:
            return
    pytest.fail("an old long prefix was kept for ever")


def test_states_that_were_passed_go_before_the_conversations_they_are_in() -> None:
    server = Server("benefit", capacity=100_000)
    conversations = [[number] for number in range(1, 9)]
    for turn in range(400):
        conversation = conversations[turn % 8]
        conversation.extend(range(100 * turn, 100 * turn + 20))
        server.serve(conversation)
    tree = server.tree
    inner = [node for node in tree.radix if node.state and node.children]
    assert len(inner) > 300
    tree.evict_bytes(STATE_WEIGHT * len(inner) // 2, page_bytes=1, state_bytes=STATE_WEIGHT)
    assert all(tree.match(one).usable >= len(one) - 1 for one in conversations)


def test_a_reset_forgets_what_rests() -> None:
    server = Server("benefit", capacity=300)
    for turn in range(200):
        server.serve([turn % 7, *run(1, 30)])
    server.tree.reset()
    while server.tree.sweep()[0]:
        pass
    for turn in range(200):
        server.serve([turn % 7, *run(1, 30)])
        audit_tree(server.tree)


# -- returns ---------------------------------------------------------------------------------------


def test_with_nothing_learned_the_oldest_go_first() -> None:
    returns = Returns(1)
    returns.learn(1 << 20)
    rates = [returns.rate(0, 1 << power) for power in range(20)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 20


def pauses(returns: Returns, kind: int, pause: int, count: int) -> int:
    """Things of that kind rest for so long; the time afterwards."""
    now = 1
    for _ in range(count):
        returns.rests(kind)
        now += pause
        returns.ended(kind, now - pause, now, returned=True)
        returns.learn(now)
    return now


def test_what_comes_back_after_a_pause_gains_by_waiting() -> None:
    returns = Returns(1)
    pauses(returns, 0, 100, 200)
    assert returns.rate(0, 70) > 2 * returns.rate(0, 1)
    assert returns.rate(0, 1) > 2 * returns.rate(0, 300)


def test_what_does_not_come_back_is_worth_less() -> None:
    returns = Returns(2)
    for now in range(1, 2000, 10):
        returns.rests(0)
        returns.rests(1)
        returns.ended(0, now, now + 5, returned=True)
        returns.learn(now + 5)
    assert returns.rate(0, 1) > 10 * returns.rate(1, 1)


@pytest.mark.parametrize("age", [0, 1, 10**6, 1 << 70, -5])
def test_any_age_has_a_rate(age: int) -> None:
    returns = Returns(1)
    pauses(returns, 0, 7, 300)  # more epochs than are kept apart
    returns.ended(0, 3, 10**12, returned=False)  # of an epoch that was joined with others
    assert 0 <= returns.rate(0, age) <= 1.2
    returns.forget_resting()
    returns.learn(10**12 + 1)
    assert 0 <= returns.rate(0, age) <= 1.2


# -- departures ------------------------------------------------------------------------------------


def documents(placement: Placement) -> list[int]:
    """Documents that are asked about twice, with questions of other lengths than their answers."""
    server = Server("benefit", capacity=1_000_000, placement=placement)
    second: list[int] = []
    for number in range(60):
        document = [10_000 + number, *run(1, 40 + number % 3)]
        server.serve([*document, *range(50_000 + 10 * number, 50_000 + 10 * number + 5)])
        second.append(server.serve([*document, *range(70_000, 70_005)]))
    return second


def test_the_first_to_leave_a_way_finds_a_state_where_others_left_before() -> None:
    without = documents(Placement(departures=0))
    learned = documents(Placement())
    assert not any(without)
    assert learned[0] == 0
    assert [hit > 40 for hit in learned[20:]] == [True] * 40


@pytest.mark.parametrize("seed", range(5))
def test_the_latest_evicted_leaves_are_remembered_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benefit, "_GONE_MAX", 6)
    chance, policy = random.Random(seed), Benefit()
    expected: dict[int, int] = {}
    for now in range(1, 400):
        place = chance.randrange(12)
        if chance.random() < 0.4 and place in expected:  # as when it is asked for again
            del expected[place], policy._gone[place]
        else:
            policy.lost(Node(now, None, bytes(8), 2, b"", turn=now), place, now)
            expected.pop(place, None)
            expected[place] = now
            if len(expected) > 6:
                del expected[next(iter(expected))]
        assert [(gone[0], gone[-2]) for gone in policy._gone.values()] == [*expected.items()]
        assert len(policy._gone_in_order) <= 12
