"""The host tier against what the pools hold, in random operations, answers and ends of copies."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tree.host_model import POLICIES, HostRun, wander
from tree.naive import NAMESPACES, page_tokens

from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.journal import JournaledTree
from phloem.actors.tree.recorder import TreeRecorder, replay

FUZZ = int(os.environ.get("PHLOEM_FUZZ", "0"))
HYBRID, PLAIN = ("kv", "state"), ("kv",)
CONFIGS: dict[str, tuple[Any, ...]] = {
    "write-through": (1, HYBRID, "write_through"),
    "write-through-cap1": (1, HYBRID, "write_through", 1),
    "write-through-page4": (4, HYBRID, "write_through"),
    "write-through-kv": (1, PLAIN, "write_through"),
    "selective": (1, HYBRID, "selective"),
    "selective-kv": (1, PLAIN, "selective", None, "lfu"),
    "write-back": (1, HYBRID, "write_back"),
    "write-back-cap2": (1, HYBRID, "write_back", 2, "session"),
    "write-back-kv": (1, PLAIN, "write_back"),
}
PATHS = st.lists(st.integers(1, 3), max_size=6)
SPACES = st.sampled_from(NAMESPACES)
INDEX = st.integers(0, 10**6)


class HostMachine(RuleBasedStateMachine):
    """Every operation of a tree with a host tier; `HostRun` does the work."""

    config: tuple[Any, ...] = CONFIGS["write-through"]
    steps = 0  # of all runs

    def __init__(self) -> None:
        super().__init__()
        type(self).steps -= 1  # the first count comes before the first step
        self.run = HostRun(*self.config)
        self.page = self.config[0]

    def key(self, path: list[int], ns: Any) -> TokenKey:
        return TokenKey.of(page_tokens(path, self.page), ns)

    @property
    def holds(self) -> bool:
        return bool(self.run.held)

    def pick(self, index: int) -> Any:
        return self.run.held[index % len(self.run.held)]

    @rule(path=PATHS, ns=SPACES, state=st.booleans())
    def publish(self, path: list[int], ns: Any, state: bool) -> None:
        key = self.key(path, ns)
        self.run.publish(key, key.length, state, None)

    @precondition(lambda self: self.holds)
    @rule(index=INDEX, more=PATHS, state=st.booleans())
    def publish_on(self, index: int, more: list[int], state: bool) -> None:
        lease = self.pick(index)
        if self.run.on_device(lease):
            covered = lease.key.data[: lease.boundary * 4]
            key = TokenKey(covered, lease.key.namespace).extended(page_tokens(more, self.page))
            self.run.publish(key, key.length, state, lease)

    @rule(
        path=PATHS,
        ns=SPACES,
        plan=st.integers(0, 3),
        session=st.integers(0, 3),
        priority=st.sampled_from([0, 10, 20]),
    )
    def acquire(self, path: list[int], ns: Any, plan: int, session: int, priority: int) -> None:
        key = self.key(path, ns)
        if len(self.run.held) < 6:
            name = f"s{session}" if session else None
            self.run.acquire(key, key.length, plan=plan > 0, session=name, priority=priority)

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def advance(self, index: int) -> None:
        self.run.advance(self.pick(index))

    @precondition(lambda self: 0 < len(self.run.held) < 6)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        self.run.fork(self.pick(index))

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def stand(self, index: int) -> None:
        self.run.stand(self.pick(index))

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.run.release(index % len(self.run.held))

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def release_state(self, index: int) -> None:
        lease = self.pick(index)
        if lease.has_state:
            self.run.world.tree.release_state(lease)
            self.run.check()

    @rule(pages=st.integers(0, 5), states=st.integers(0, 2))
    def evict(self, pages: int, states: int) -> None:
        self.run.evict(pages, states)

    @rule(pages=st.integers(0, 4), states=st.integers(0, 2))
    def evict_host(self, pages: int, states: int) -> None:
        self.run.evict_host(pages, states)

    @precondition(lambda self: self.run.world.reserves)
    @rule(index=INDEX, refuse=st.integers(0, 5))
    def answer(self, index: int, refuse: int) -> None:
        self.run.answer(index, refuse == 5)

    @precondition(lambda self: self.run.world.reserves)
    @rule()
    def answer_all(self) -> None:
        while self.run.world.reserves:
            self.run.answer(0, False)

    @precondition(lambda self: self.run.world.copies)
    @rule(index=INDEX, outcome=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def end_copy(self, index: int, outcome: int) -> None:
        self.run.end_copy(index, outcome)

    @precondition(lambda self: self.run.world.copies)
    @rule()
    def end_all_copies(self) -> None:
        while self.run.world.copies:
            self.run.end_copy(0, 0)

    @rule(sweep=st.booleans(), really=st.integers(0, 9))
    def reset(self, sweep: bool, really: int) -> None:
        if not really:
            self.run.reset(sweep)

    @rule(name=st.sampled_from(POLICIES), really=st.integers(0, 5))
    def use_policy(self, name: str, really: int) -> None:
        if not really:
            self.run.use_policy(name)

    @rule(closed=st.booleans(), really=st.integers(0, 3))
    def close_host(self, closed: bool, really: int) -> None:
        if not really:
            self.run.close_host(closed)

    @rule(session=st.integers(1, 3))
    def time_passes(self, session: int) -> None:
        self.run.tick()
        self.run.close_session(f"s{session}")

    @precondition(lambda self: bool(self.run.former))
    @rule()
    def release_former(self) -> None:
        self.run.release_former()

    @rule(path=PATHS, ns=SPACES, cut=st.integers(0, 3))
    def match(self, path: list[int], ns: Any, cut: int) -> None:
        key = self.key(path, ns)
        self.run.match(key, max(key.length - cut, 0))

    @invariant()
    def count(self) -> None:
        type(self).steps += 1

    def teardown(self) -> None:
        self.run.end()


def run_machine(config: str, examples: int, steps: int) -> int:
    """Returns how many steps there were."""

    class Configured(HostMachine):
        pass

    Configured.config, Configured.steps = CONFIGS[config], 0
    run_state_machine_as_test(
        Configured,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Configured.steps


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(12))
def test_s143_random_steps(config: str, seed: int) -> None:
    host_run = HostRun(*CONFIGS[config])
    wander(host_run, random.Random(seed), 80)
    host_run.end()


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FUZZ, reason="a long run: PHLOEM_FUZZ=1")
@pytest.mark.parametrize("config", CONFIGS)
def test_fuzz_random_steps(config: str, tried: Callable[[str, int], None]) -> None:
    seeds = 3000 * FUZZ
    for seed in range(seeds):
        host_run = HostRun(*CONFIGS[config])
        try:
            wander(host_run, random.Random(seed), 80)
            host_run.end()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    tried("random steps of the tiers", seeds * 80)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_replayed_with_and_without_a_journal(config: str, seed: int) -> None:
    host_run = HostRun(*CONFIGS[config])
    lines: list[bytes] = []
    TreeRecorder(host_run.world.tree, lines.append)
    wander(host_run, random.Random(100 + seed), 60)
    host_run.end()
    for make in (Tree, JournaledTree):
        assert replay(lines, make).figures() == host_run.world.tree.figures()


@pytest.mark.parametrize("config", CONFIGS)
def test_s143_the_tiers_agree_with_the_pools(config: str) -> None:
    run_machine(config, examples=12, steps=50)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FUZZ, reason="a long run: PHLOEM_FUZZ=1")
@pytest.mark.parametrize("config", CONFIGS)
def test_fuzz_the_tiers_agree_with_the_pools(
    config: str, tried: Callable[[str, int], None]
) -> None:
    steps = run_machine(config, examples=300 * FUZZ, steps=100)
    tried("steps of the tiers against the pools", steps)
    assert steps * len(CONFIGS) > 200_000


def test_kv_that_a_session_has_left_is_kept_no_longer() -> None:
    """Its state leaves the device first, and the session goes up; audits look at each score."""
    host_run = HostRun(*CONFIGS["write-back-cap2"])
    first, longer = TokenKey.of([1] * 6), TokenKey.of([1] * 11)
    host_run.acquire(first, 0, plan=False, session="s")
    lease = host_run.held[0]
    host_run.publish(first, 6, True, lease)
    host_run.stand(lease)
    host_run.publish(longer, 11, False, lease)
    host_run.end()
