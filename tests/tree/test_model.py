"""The tree against the naive cache, in random operations that shrink to a short program."""

from __future__ import annotations

import os
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
from tree.naive import NAMESPACES, Compared, page_tokens

from phloem.actors.tree import TokenKey

FUZZ = int(os.environ.get("PHLOEM_FUZZ", "0"))
POLICIES = ["lru", "lfu", "slru", "fifo", "priority", "session", "benefit", "adaptive"]
CONFIGS: dict[str, tuple[Any, ...]] = {
    "page1": (1, 1, ("kv", "state")),
    "page1-session-cap1": (1, 1, ("kv", "state"), "session", 1),
    "page1-priority-cap2": (1, 1, ("kv", "state"), "priority", 2),
    "page4-grid8": (4, 8, ("kv", "state")),
    "page16": (16, 1, ("kv", "state")),
    "kv-page1": (1, 1, ("kv",)),
    "kv-page1-session": (1, 1, ("kv",), "session"),
    "kv-page4": (4, 1, ("kv",)),
    "kv-page16": (16, 1, ("kv",)),
    "window-page1": (1, 1, ("kv", "state", "window:2")),
    "window-page1-priority": (1, 1, ("kv", "state", "window:3"), "priority", 2),
    "window-page4-grid8": (4, 8, ("kv", "state", "window:5")),
    "window-page16": (16, 1, ("kv", "state", "window:16")),
    "kv-window-page1": (1, 1, ("kv", "window:2")),
    "kv-window-page4": (4, 1, ("kv", "window:6")),
    "kv-window-page16": (16, 1, ("kv", "window:40")),
    "four-page1": (1, 1, ("kv", "state", "window:2", "block:3")),
    "four-page4": (4, 1, ("kv", "window:4", "block:8")),
}
PATHS = st.lists(st.integers(1, 3), max_size=6)
SPACES = st.sampled_from(NAMESPACES)
INDEX = st.integers(0, 10**6)
SPANNED = st.integers(0, 8)  # pages for which the caller still has those of spans


class Machine(RuleBasedStateMachine):
    """Every operation of the tree; `Compared` does the work."""

    config: tuple[Any, ...] = CONFIGS["page1"]
    steps = 0  # of all runs

    def __init__(self) -> None:
        super().__init__()
        type(self).steps -= 1  # the first count comes before the first step
        self.both = Compared(*self.config)
        self.page = self.config[0]

    def key(self, path: list[int], ns: Any, tail: int = 0) -> TokenKey:
        return TokenKey.of(page_tokens(path, self.page, tail % self.page), ns)

    def pick(self, index: int) -> int:
        return index % len(self.both.held)

    @property
    def holds(self) -> bool:
        return bool(self.both.held)

    @rule(path=PATHS, ns=SPACES, tail=INDEX, state=st.booleans(), swap=st.booleans(), spans=SPANNED)
    def insert(
        self, path: list[int], ns: Any, tail: int, state: bool, swap: bool, spans: int
    ) -> None:
        key = self.key(path, ns, tail)
        self.both.insert(key, key.length, state=state, swap=swap, tail=spans)

    @precondition(lambda self: self.holds)
    @rule(
        index=INDEX,
        more=PATHS,
        state=st.booleans(),
        swap=st.booleans(),
        spans=SPANNED,
        release=st.booleans(),
    )
    def insert_with_lease(
        self, index: int, more: list[int], state: bool, swap: bool, spans: int, release: bool
    ) -> None:
        number = self.pick(index)
        lease = self.both.held[number].lease
        covered = lease.key.data[: lease.boundary * 4]
        key = TokenKey(covered, lease.key.namespace).extended(page_tokens(more, self.page))
        self.both.insert(
            *(key, key.length),
            state=state,
            number=number,
            swap=swap,
            tail=spans,
            release=release,
        )

    @precondition(lambda self: self.holds)
    @rule(index=INDEX, pages=st.integers(0, 6), state=st.booleans(), spans=SPANNED)
    def checkpoint(self, index: int, pages: int, state: bool, spans: int) -> None:
        number = self.pick(index)
        lease = self.both.held[number].lease
        length = min(lease.boundary + pages * self.page, lease.key.length)
        self.both.insert(lease.key, length, state=state, number=number, tail=spans)

    @rule(path=PATHS, ns=SPACES, tail=INDEX, cut=st.integers(0, 3))
    def acquire(self, path: list[int], ns: Any, tail: int, cut: int) -> None:
        key = self.key(path, ns, tail)
        if len(self.both.held) < 8:
            self.both.acquire(key, max(key.length - cut, 0))

    @rule(path=PATHS, ns=SPACES, tail=INDEX, cut=st.integers(0, 3), taste=st.integers(0, 400))
    def open(self, path: list[int], ns: Any, tail: int, cut: int, taste: int) -> None:
        key = self.key(path, ns, tail)
        if len(self.both.held) < 8:
            self.both.acquire(key, max(key.length - cut, 0), opened=True, taste=taste)

    @precondition(lambda self: 0 < len(self.both.held) < 8)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        self.both.fork(self.pick(index))

    @precondition(lambda self: self.holds)
    @rule(index=INDEX, time=st.integers(0, 60))
    def prefer(self, index: int, time: int) -> None:
        self.both.prefer(self.pick(index), time)

    @rule(name=st.sampled_from(POLICIES), really=st.integers(0, 3))
    def use_policy(self, name: str, really: int) -> None:
        if not really:
            self.both.use_policy(name)

    @precondition(lambda self: self.holds)
    @rule(index=INDEX, beyond=st.integers(0, 20))
    def advance(self, index: int, beyond: int) -> None:
        self.both.advance(self.pick(index), beyond)

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.both.release(self.pick(index))

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def release_state(self, index: int) -> None:
        self.both.release_state(self.pick(index))

    @rule(
        pages=st.integers(0, 5),
        states=st.integers(0, 2),
        spans=st.lists(st.integers(0, 4), max_size=2),
    )
    def evict(self, pages: int, states: int, spans: list[int]) -> None:
        self.both.evict(pages, states, spans)

    @rule(sweep=st.booleans(), really=st.integers(0, 5))
    def reset(self, sweep: bool, really: int) -> None:
        if not really:
            self.both.reset(sweep=sweep)

    @precondition(lambda self: self.both.world.tree.sweeping)
    @rule()
    def sweep(self) -> None:
        self.both.world.sweep()
        self.both.compare()

    @precondition(lambda self: bool(self.both.former))
    @rule()
    def release_former(self) -> None:
        self.both.release_former()
        self.both.compare()

    @rule(path=PATHS, ns=SPACES, tail=INDEX, cut=st.integers(0, 3))
    def match(self, path: list[int], ns: Any, tail: int, cut: int) -> None:
        key = self.key(path, ns, tail)
        self.both.match(key)
        self.both.match(key, max(key.length - cut, 0))

    @rule(each=st.booleans(), really=st.integers(0, 3))
    def look(self, each: bool, really: int) -> None:
        """Not after each step: what is counted only when somebody asks stays uncounted for long."""
        if each:
            self.both.check_all()
        elif not really:
            self.both.world.check_each = False

    @invariant()
    def count(self) -> None:
        type(self).steps += 1

    def teardown(self) -> None:
        self.both.check_all()
        self.both.end()


def run_machine(config: str, examples: int, steps: int) -> int:
    """Returns how many steps there were."""

    class Configured(Machine):
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
def test_s190_s191_the_tree_agrees_with_the_naive_cache(config: str) -> None:
    run_machine(config, examples=15, steps=50)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FUZZ, reason="a long run: PHLOEM_FUZZ=1")
@pytest.mark.parametrize("config", CONFIGS)
def test_fuzz_the_tree_agrees_with_the_naive_cache(
    config: str, tried: Callable[[str, int], None]
) -> None:
    steps = run_machine(config, examples=400 * FUZZ, steps=100)
    tried("steps of the tree against the naive cache", steps)
    assert steps * len(CONFIGS) > 200_000
