"""What a prefix cache offers to join the benchmark.

One adapter is one module in `adapters/` with a class `Adapter`. Lengths are in tokens. A slot is
the index of one token's KV in the device pool, a state the index of one recurrent state. `Any`
stands for values that the harness only passes on: each library has its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["GRID", "Adapter", "Match", "Place", "Tokens"]

Tokens = npt.NDArray[np.int64]
GRID = 64  # states at branches are kept at multiples of this, or of a larger page


class Match(NamedTuple):
    """A hit of `hit` reusable tokens; a cache that wants a state further down says where."""

    hit: int
    handle: Any  # what `lock` takes
    branch: int = 0
    extra: Any = None


class Place(NamedTuple):
    """Where a request stands: what it may read, its receipt, and the slots of `match.hit`."""

    match: Match
    receipt: Any
    gathered: Any


class Adapter:
    """The operations of one cache. The harness times those below the line and nothing else."""

    title = "?"
    hybrid = True  # keeps a recurrent state beside full KV
    page_min = 1
    fused = False  # lock, allocate, evict and insert are one call of the library

    def __init__(self, page_size: int, tokens: int, states: int, longest: int) -> None:
        """Pools for `tokens` and `states`; no request is longer than `longest`."""
        del tokens, states, longest
        self.page_size = page_size

    async def open(self) -> None:
        """Start what needs a running loop."""

    async def close(self) -> None:
        """End it."""

    def slots_to_numpy(self, slots: Any) -> Tokens:
        """The slots of single tokens."""
        return np.asarray(slots)

    def check(self) -> None:
        """Raise `AssertionError` when a slot has leaked."""

    def wanted(self, match: Match, breakpoints: tuple[int, ...]) -> tuple[int, ...]:
        """Where the cache wants states before the end, ascending.

        `breakpoints` are positions at which the caller expects other continuations; most libraries
        have no way to be told.
        """
        del breakpoints
        return (match.branch,) if match.branch > match.hit else ()

    def written(self) -> Any:
        """The slots of the last insert's key, where the library itself allocated them."""
        raise NotImplementedError

    def prepare_evict(self) -> None:
        """Make the next `evict` meet cached data."""

    def nodes(self) -> int | None:
        """Nodes in the tree, if the library tells."""
        return None

    # -- timed ---------------------------------------------------------------------------------

    def key(self, tokens: Tokens) -> Any:
        """What an engine of this library holds for a prompt; made once, timed by itself."""
        return tokens

    def cut(self, key: Any, length: int) -> Any:
        """The first `length` tokens of a key, for a state at a branch."""
        return key[:length]

    def match(self, key: Any) -> Match:
        """How far the key is cached."""
        raise NotImplementedError

    def lock(self, handle: Any) -> Any:
        """Protect what was matched; the answer is the receipt for `unlock`."""
        raise NotImplementedError

    def unlock(self, receipt: Any) -> None:
        """End the protection."""
        raise NotImplementedError

    def slots(self, match: Match, receipt: Any) -> Any:
        """The slots of the tokens that were hit, under the protection of `receipt`."""
        raise NotImplementedError

    def allocate(self, tokens: int) -> Any | None:
        """Slots for so many tokens, or None when they do not fit."""
        raise NotImplementedError

    def allocate_state(self) -> Any | None:
        """A state, or None when there is none."""
        raise NotImplementedError

    def insert(self, key: Any, length: int, slots: Any, state: Any, place: Place) -> None:
        """Put `key[:length]` in the tree: `slots` are new and hold what follows the hit.

        The cache owns `state` and `slots` afterwards.
        """
        raise NotImplementedError

    def finish(self, key: Any, length: int, slots: Any, state: Any, place: Place) -> None:
        """The last `insert` of a request, and `unlock`."""
        self.insert(key, length, slots, state, place)
        self.unlock(place.receipt)

    def continue_from(self, key: Any, place: Place) -> Place:
        """Where the request stands after inserting `key` whole, as its next chunk would find it."""
        match = self.match(key)
        if match.hit <= place.match.hit:
            return place
        self.unlock(place.receipt)
        receipt = self.lock(match.handle)
        return Place(match, receipt, self.slots(match, receipt))

    def evict(self, tokens: int, states: int) -> tuple[int, int]:
        """Make room for an allocation of so much; tokens and states freed."""
        raise NotImplementedError
