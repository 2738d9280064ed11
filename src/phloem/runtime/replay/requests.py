"""Traces as replays see them: chained ids of whole blocks.

A tree does not care what a page's ids mean, only which are equal. So one block of a trace becomes
one page of one id, equal exactly where whole prefixes are equal; a prompt of a hundred thousand
tokens is then a key of a few hundred words.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice

import msgspec
import numpy as np

from phloem.errors import InvalidRequest
from phloem.runtime.traces import TraceRequest

__all__ = ["ReplayRequest", "Workload", "prepare"]

_WORD = 4


class ReplayRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: `data` are 32-bit block ids of everything whose KV exists after it.

    The first `matchable` of them belong to the prompt and may be found in the cache: never the
    whole prompt, since one token is always computed. `tokens` is the prompt's length.
    """

    at_s: float
    session: str
    data: bytes
    matchable: int
    tokens: int

    @property
    def blocks(self) -> int:
        """How many blocks there are in all."""
        return len(self.data) // _WORD

    def ids(self) -> array[int]:
        """The block ids."""
        return array("i", self.data)


class Workload(msgspec.Struct, frozen=True):
    """A trace, ready to be replayed any number of times. `distinct` counts its blocks."""

    name: str
    block_size: int
    requests: list[ReplayRequest]
    distinct: int

    @property
    def tokens(self) -> int:
        """Of all prompts together."""
        return sum(request.tokens for request in self.requests)

    @property
    def distinct_tokens(self) -> int:
        """What an unbounded cache would hold in the end."""
        return self.distinct * self.block_size


def prepare(
    requests: Iterable[TraceRequest],
    *,
    name: str,
    block: int | None = None,
    limit: int | None = None,
) -> Workload:
    """Chain the blocks of a trace; `block` tokens each (as in the trace, or 32 of single tokens).

    `limit`: the first so many requests. What does not fill a block of the trace at the end is left
    out, as a cache of pages leaves it out. Raises `InvalidRequest` for an empty trace, or blocks of
    which neither the trace's are a whole number nor the other way round.
    """
    if limit is not None and limit < 0:
        raise InvalidRequest(f"the first {limit} requests")
    numbers: dict[tuple[int, bytes], int] = {}
    prepared: list[ReplayRequest] = []
    if block is not None and block < 1:
        raise InvalidRequest(f"blocks of {block} tokens")
    size = block or 0
    for number, request in enumerate(islice(requests, limit), 1):
        own = request.block_size
        if not size:
            size = own if own > 1 else 32
        if size % own and own % size:
            raise InvalidRequest(
                f"blocks of {size} tokens out of a trace's {own}, of request {number}"
            )
        whole = len(request.blocks) if len(request.blocks) * own <= request.length else -1
        known = request.blocks[:whole] if whole < 0 else request.blocks
        ids = np.concatenate([known, request.answer]) if len(request.answer) else known
        if own > size:
            parts = own // size
            ids = (np.asarray(ids, np.int64)[:, None] * parts + np.arange(parts)).reshape(-1)
            words, step = ids.tobytes(), 2 * _WORD
        else:
            words, step = np.ascontiguousarray(ids, np.int32).tobytes(), size // own * _WORD
        chained = array("i")
        before = -1
        for at in range(0, len(words) // step * step, step):
            link = (before, words[at : at + step])
            before = numbers.setdefault(link, len(numbers))
            chained.append(before)
        matchable = max(0, min(len(chained), (request.length - 1) // size))
        prepared.append(
            ReplayRequest(
                request.at_s, request.session, chained.tobytes(), matchable, request.length
            )
        )
    if not prepared:
        raise InvalidRequest(f"{name} has no requests")
    return Workload(name, size, prepared, len(numbers))
