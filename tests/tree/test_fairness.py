"""One hot session among many cold ones, all with the same system prompt."""

from __future__ import annotations

import pytest
from tree.support import World, run

PROMPT = 40  # tokens, the system prompt with them
PAGES, STATES = 400, 10  # room for ten prompts, with a state each


def serve_cold_and_hot(
    world: World, system: int, cold: int, joint: int | None = None
) -> tuple[int, list[bool]]:
    """A hot session's turn after each fifth of the cold ones, which never come back.

    How many cold ones did not find the system prompt's state, and which of the hot one's turns
    found the one before. `joint`: so many bytes for both kinds, a page being one; None: pools.
    """
    prefix = run(1, system)
    hot = [*prefix, *run(100, 99 + PROMPT - system)]
    lost = 0
    found_hot: list[bool] = []
    for session in range(cold):
        first = 1000 + PROMPT * session
        turns = [[*prefix, *run(first, first + PROMPT - system - 1)]]
        if session % 5 == 0:
            hot = [*hot, session + 10**6] if len(hot) < 2 * PROMPT else hot[:PROMPT]
            turns.append(hot)
        for tokens in turns:
            if joint is None:
                pages = max(0, len(tokens) - world.kv.free)
                world.reclaim(pages, max(0, 2 - world.states.free))
            else:
                make_room(world, joint, len(tokens), states=2)
            found = world.use(tokens)
            if found < system:
                world.publish(prefix)
            if found < len(tokens):
                world.publish(tokens)
            if tokens is hot:
                found_hot.append(found >= PROMPT)
            elif session > 10:
                lost += found != system
    return lost, found_hot


def make_room(world: World, capacity: int, pages: int, states: int) -> None:
    """Of one memory, by whatever the policy gives up first."""
    tree = world.tree
    weight = tree.state_weight
    held = tree.radix.pages + weight * tree.radix.states
    missing = held + pages + weight * states - capacity
    if missing > 0:
        _, actions = tree.evict_bytes(missing, page_bytes=1, state_bytes=weight)
        world.carry_out(actions)


@pytest.mark.parametrize(
    "policy", ["lru", "lfu", "slru", "priority", "session", "benefit", "adaptive"]
)
def test_s194_the_state_that_all_share_stays_under_pressure(policy: str) -> None:
    world = World(pages=PAGES, states=STATES, policy=policy, check_each=False)
    lost, hot = serve_cold_and_hot(world, system=4, cold=1000)
    assert not lost, "the fork point's state was gone"
    assert sum(hot) > 0.9 * len(hot), "the hot session starves"


# A state weighs as much as a tenth of a prompt up to 25 of them, the system prompt 5 to 30 %.
@pytest.mark.parametrize("joint", [False, True], ids=["pools", "one memory"])
@pytest.mark.parametrize(
    ("system", "weight"),
    [(2, 4), (2, 13), (2, 40), (4, 4), (4, 40), (4, 160), (4, 1024), (12, 13), (12, 1024)],
)
def test_the_learned_policy_sees_how_often_a_state_is_used(
    system: int, weight: int, joint: bool
) -> None:
    capacity = PAGES + weight * STATES
    world = World(
        pages=2 * capacity if joint else PAGES,
        states=PAGES if joint else STATES,
        policy="benefit",
        check_each=False,
        state_weight=weight,
    )
    lost, hot = serve_cold_and_hot(world, system, cold=400, joint=capacity if joint else None)
    assert not lost, "the fork point's state was gone"
    learned = hot[20:]
    assert sum(learned) > 0.9 * len(learned), "the hot session starves"
