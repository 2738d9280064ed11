"""Every sequence of operations up to a length, over an alphabet small enough to try them all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from tree.fingerprint import fingerprint
from tree.naive import Compared

from phloem.actors.tree import TokenKey, Tree
from phloem.actors.tree.former import Former

FUZZ = int(os.environ.get("PHLOEM_FUZZ", "0"))
KINDS = {
    "kv": ("kv",),
    "kv+state": ("kv", "state"),
    "kv+window": ("kv", "window:1"),
    "kv+state+window": ("kv", "state", "window:2"),
}
SHORT, LONG, OTHER = (TokenKey.of(tokens) for tokens in ([1, 2], [1, 2, 3, 4], [1, 9]))


def on_lease(number: int, do: Callable[[Compared, int], None]) -> Callable[[Compared], None]:
    """`do` with one of the leases held, the oldest (0) or the newest (-1); nothing without one."""

    def step(both: Compared) -> None:
        if both.held:
            do(both, number % len(both.held))

    return step


def publish_on(both: Compared, number: int) -> None:
    lease = both.held[number].lease
    both.insert(lease.key, min(lease.boundary + 2, lease.key.length), state=True, number=number)


def reset(both: Compared) -> None:
    both.reset(sweep=len(both.former) % 2 == 0)


OPERATIONS: dict[str, Callable[[Compared], None]] = {
    "publish_short": lambda both: both.insert(SHORT, 2, state=True),
    "publish_long_stateless": lambda both: both.insert(LONG, 4, state=False),
    "publish_other": lambda both: both.insert(OTHER, 2, state=True),
    "open_long": lambda both: both.acquire(LONG, opened=True),
    "publish_on_lease": on_lease(-1, publish_on),
    "advance": on_lease(0, lambda both, number: both.advance(number, 0)),
    "release_oldest": on_lease(0, Compared.release),
    "release_state": on_lease(-1, Compared.release_state),
    "evict_pages": lambda both: both.evict(1, 0),
    "evict_state": lambda both: both.evict(0, 1),
    "reset": reset,
}
ON_WINDOWS: dict[str, Callable[[Compared], None]] = {
    "publish_long_without_windows": lambda both: both.insert(LONG, 4, state=True, tail=0),
    "publish_long_with_last_window": lambda both: both.insert(LONG, 4, state=True, tail=1),
    "evict_window": lambda both: both.evict(0, 0, [1]),
    "evict_windows": lambda both: both.evict(0, 0, [2]),
}


def alphabet(kinds: tuple[str, ...]) -> dict[str, Callable[[Compared], None]]:
    return OPERATIONS if ":" not in kinds[-1] else OPERATIONS | ON_WINDOWS


class Exploration:
    """All sequences of operations; of those that lead to one state, a shortest is continued.

    So each operation is tried once in each state, and checked as if each sequence had been run: a
    state is all that what comes after depends on.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self._operations = alphabet(kinds)
        self.start = fingerprint(self.run(()))
        self.reached: dict[bytes, tuple[str, ...]] = {self.start: ()}
        self._after: dict[bytes, dict[str, bytes]] = {}

    def try_all(self, length: int) -> int:
        """Try every sequence of exactly `length` operations; how many there are."""
        sequences = Counter({self.start: 1})
        for _ in range(length):
            longer: Counter[bytes] = Counter()
            for state, count in sequences.items():
                for after in self.after(state).values():
                    longer[after] += count
            sequences = longer
        return sequences.total()

    def after(self, state: bytes) -> dict[str, bytes]:
        """To which state each operation leads from a state that has been reached."""
        known = self._after.get(state)
        if known is None:
            before = self.reached[state]
            known = {name: self._try((*before, name)) for name in self._operations}
            self._after[state] = known
        return known

    def _try(self, names: tuple[str, ...]) -> bytes:
        """A sequence whose beginning has been tried before."""
        try:
            both = self.run(names)
            state = fingerprint(both)  # before the checks: who asks for figures has all counted
            both.check_all()
            if state not in self.reached:
                self.reached[state] = names
                for key in (SHORT, LONG, OTHER):
                    both.match(key)
                both.end()
        except BaseException as error:
            error.add_note(f"in the sequence {', '.join(names)}")
            raise
        return state

    def run(self, names: tuple[str, ...]) -> Compared:
        """A new run of some operations; what they answer is compared, what is there is not."""
        both = Compared(1, 1, self._kinds)
        both.world.check_each = False
        for name in names:
            self._operations[name](both)
        return both

    def sequences(self, length: int) -> Iterator[tuple[str, ...]]:
        """Every sequence of exactly `length` operations."""
        return product(self._operations, repeat=length)


@pytest.mark.parametrize(
    ("kinds", "length"), [("kv", 4), ("kv+state", 4), ("kv+window", 3), ("kv+state+window", 3)]
)
def test_all_short_sequences(kinds: str, length: int) -> None:
    every = Exploration(KINDS[kinds])
    assert every.try_all(length) == len(alphabet(KINDS[kinds])) ** length
    assert len(every.reached) > 100


def check_states(kinds: str, length: int) -> None:
    """Every sequence, run without the others, goes where the exploration says."""
    every = Exploration(KINDS[kinds])
    every.try_all(length)
    for names in every.sequences(length):
        both = every.run(names)
        state = every.start
        for name in names:
            state = every.after(state)[name]
        assert fingerprint(both) == state, f"another state after {', '.join(names)}"


@pytest.mark.parametrize("kinds", KINDS)
def test_a_state_is_all_that_what_comes_after_depends_on(kinds: str) -> None:
    check_states(kinds, 3)


def evicts_too_much(patch: pytest.MonkeyPatch) -> None:
    """A page more than asked, if there are two leaves, from the second reset on."""
    evict = Tree.evict

    def wrong(tree: Tree, pages: int = 0, *args: Any, **kwargs: Any) -> Any:
        too_much = pages == 1 and tree.radix.leaves == 2 and tree.generation == 2
        return evict(tree, pages + too_much, *args, **kwargs)

    patch.setattr(Tree, "evict", wrong)


def forgets_a_lease(patch: pytest.MonkeyPatch) -> None:
    """A reset takes a leaf apart that two leases protect, if it has a sibling."""
    step = Former._step

    def wrong(former: Former, frames: Any, freed: Any) -> None:
        children = frames[-1][0].children or {}
        if len(children) > 1 and (last := [*children.values()][-1]).leases == 2:
            last.leases = 0
        step(former, frames, freed)

    patch.setattr(Former, "_step", wrong)


@pytest.mark.parametrize("plant", [evicts_too_much, forgets_a_lease])
def test_a_bug_that_shows_at_the_fifth_operation_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    every = Exploration(KINDS["kv"])
    assert every.try_all(4) == 11**4
    with pytest.raises(AssertionError) as caught:
        every.try_all(5)
    names = tuple(caught.value.__notes__[0].removeprefix("in the sequence ").split(", "))
    assert len(names) == 5
    every.run(names[:4]).check_all()
    with pytest.raises(AssertionError):
        both = every.run(names)
        both.check_all()
        both.end()


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FUZZ, reason="a long run: PHLOEM_FUZZ=1")
@pytest.mark.parametrize("kinds", KINDS)
def test_fuzz_all_sequences_of_six(kinds: str, tried: Callable[[str, int], None]) -> None:
    every = Exploration(KINDS[kinds])
    count = every.try_all(6)
    assert count == len(alphabet(KINDS[kinds])) ** 6
    tried("sequences of six operations", count)
    tried("states after at most six operations", len(every.reached))


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FUZZ, reason="a long run: PHLOEM_FUZZ=1")
@pytest.mark.parametrize("kinds", KINDS)
def test_fuzz_a_state_is_all_that_what_comes_after_depends_on(kinds: str) -> None:
    check_states(kinds, 4)
