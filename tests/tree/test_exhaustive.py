"""Every sequence of operations up to a length, over an alphabet small enough to try them all."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product

import pytest
from tree.naive import Compared

from phloem.actors.tree import TokenKey

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


def try_all(kinds: tuple[str, ...], length: int) -> int:
    """Every sequence of exactly `length` operations; shorter ones are their beginnings."""
    count = 0
    operations = alphabet(kinds)
    for names in product(operations, repeat=length):
        both = Compared(1, 1, kinds)
        try:
            for name in names:
                operations[name](both)
            both.end()
        except BaseException as error:
            error.add_note(f"in the sequence {', '.join(names)}")
            raise
        count += 1
    return count


@pytest.mark.parametrize(
    ("kinds", "length"), [("kv", 3), ("kv+state", 4), ("kv+window", 3), ("kv+state+window", 3)]
)
def test_all_short_sequences(kinds: str, length: int) -> None:
    assert try_all(KINDS[kinds], length) == len(alphabet(KINDS[kinds])) ** length


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FUZZ, reason="a long run: PHLOEM_FUZZ=1")
@pytest.mark.parametrize("kinds", KINDS)
def test_fuzz_all_sequences_of_six(kinds: str) -> None:
    assert try_all(KINDS[kinds], 6) == len(alphabet(KINDS[kinds])) ** 6
