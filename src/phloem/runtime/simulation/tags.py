"""What the bytes of a page and of a state ought to be, from the tokens alone.

Every token's KV carries a tag of its namespace, of all whole pages before it, of its position and
of itself; every state a tag of its namespace, all tokens before it, and its position. Two requests
with the same prefix expect the same bytes there and nobody else does, so one comparison tells
whether a page or a state that is read holds what it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from phloem.actors.tree.keys import Namespace

__all__ = ["STATE_WORDS", "TaggedTokens", "TokenIds"]

STATE_WORDS = 4  # tag, its complement, position, tag of the namespace

Tags = npt.NDArray[np.int64]
TokenIds = Sequence[int] | npt.NDArray[np.int32]

_MIX = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def _digest(chain: int, data: bytes) -> int:
    return int.from_bytes(blake2b(chain.to_bytes(8, "little") + data, digest_size=8).digest())


class TaggedTokens:
    """A growing run of tokens with the tags of its KV and of its states."""

    def __init__(self, tokens: TokenIds, namespace: Namespace, page_size: int) -> None:
        self._page_size = page_size
        self._namespace = namespace
        self._name = _digest(0, repr(tuple(namespace)).encode())
        self._chain = [self._name]  # for each page: the digest of everything before it
        self._tokens = np.empty(0, np.int32)
        self._tags: Tags = np.empty(0, np.int64)
        self._length = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The tokens so far; a view."""
        return self._tokens[: self._length]

    def copy(self) -> TaggedTokens:
        """The same tokens, to go on with in another way."""
        return TaggedTokens(self.tokens, self._namespace, self._page_size)

    def extend(self, tokens: TokenIds) -> None:
        """Append tokens."""
        start, end = self._length, self._length + len(tokens)
        if end > len(self._tokens):
            room = max(end, 2 * len(self._tokens))
            self._tokens = np.resize(self._tokens, room)
            self._tags = np.resize(self._tags, room)
        self._tokens[start:end] = np.asarray(tokens, np.int32)
        self._length = end
        size = self._page_size
        while len(self._chain) <= end // size:
            page = len(self._chain) - 1
            data = self._tokens[page * size : (page + 1) * size].tobytes()
            self._chain.append(_digest(self._chain[-1], data))
        self._tags[start:end] = self._mix(start, end)

    def kv(self, start: int, end: int) -> Tags:
        """The tags of the KV of tokens `start` to `end`; a view."""
        return self._tags[start:end]

    def state(self, position: int) -> Tags:
        """The words of the state that is true at `position`."""
        page = position // self._page_size
        data = self._tokens[page * self._page_size : position].tobytes()
        tag = np.uint64(_digest(self._chain[page], data))
        words = np.array([tag, ~tag, np.uint64(position), np.uint64(self._name)], np.uint64)
        return words.view(np.int64)

    def next_token(self, position: int, vocabulary: int) -> int:
        """What the model says after `position` tokens: the same after the same tokens."""
        return int(self.state(position)[0]) % vocabulary

    def _mix(self, start: int, end: int) -> Tags:
        positions = np.arange(start, end, dtype=np.uint64)
        first = start // self._page_size
        pages = np.arange(start, end) // self._page_size - first
        chain = np.array(self._chain[first : end // self._page_size + 1], np.uint64)[pages]
        words = chain ^ (positions * _MIX[0])
        words ^= self._tokens[start:end].astype(np.uint64) * _MIX[1]
        words ^= words >> np.uint64(31)
        words *= _MIX[2]
        words ^= words >> np.uint64(29)
        return words.view(np.int64)
