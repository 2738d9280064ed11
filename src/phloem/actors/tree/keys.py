"""Keys: token ids as immutable bytes, in a namespace.

A key is compared with `bytes.startswith` and never walked token by token, so the conversion from
whatever the caller has happens once, here.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from hashlib import blake2b
from operator import index
from typing import NamedTuple, Protocol, SupportsIndex, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from phloem.errors import InvalidRequest

__all__ = [
    "TOKEN_BYTES",
    "ContentMark",
    "Namespace",
    "TokenKey",
    "Tokens",
    "common_bytes",
    "name_of",
]

TOKEN_BYTES = 4
_TOKEN_MAX = 2**31 - 1
_MARK_BIT = 0x8000_0000  # no token id has it, so a marked word never equals a token
_LITTLE = sys.byteorder == "little"
_WORD = np.dtype("<i4")


class ArrayLike(Protocol):
    """What numpy can read, such as a CPU tensor."""

    def __array__(self) -> npt.NDArray[np.generic]:
        """The numbers."""
        ...


class Namespace(NamedTuple):
    """Adapter (LoRA) name and cache salt, compared as a pair; empty means the default.

    Entries of different namespaces never share a node.
    """

    adapter: str = ""
    salt: str = ""


_DEFAULT = Namespace()


def name_of(what: str, value: object) -> str:
    """`value`, if it is a str that logs can hold; `what` says in the error what it names.

    Raises `InvalidRequest` for what is no str and for halves of characters ("\\ud800"), which no
    encoding has.
    """
    if type(value) is str and value.isascii():
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} is {value!r}, not a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} is {value!r}, in which half a character is missing") from None
    return value


class ContentMark(NamedTuple):
    """What placeholder ids stand for: `length` tokens at `position` are the content `digest`."""

    position: int
    length: int
    digest: bytes


class TokenKey:
    """Token ids as little-endian 32-bit words in immutable bytes, with their namespace.

    `TokenKey.of` converts and checks; a key made once is cheap to look up any number of times.
    """

    __slots__ = ("data", "length", "namespace", "root", "seen")

    def __init__(self, data: bytes, namespace: Namespace = _DEFAULT, extra: bytes = b"") -> None:
        self.data = data
        self.length = len(data) // TOKEN_BYTES
        self.namespace = namespace
        # What names the key's own tree: content too short to be marked in place belongs to it.
        self.root = (namespace.adapter, namespace.salt, extra)
        self.seen: object = None  # a tree's note of where the key led, for as long as it holds

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        namespace: Namespace | None = None,
        marks: Sequence[ContentMark] = (),
    ) -> TokenKey:
        """Convert `tokens` (ids from 0 to 2**31 - 1); equal ids with different marks differ.

        Raises `InvalidRequest` naming the position of the first bad id or mark, and for a namespace
        that is none.
        """
        if type(tokens) is TokenKey and namespace is None and not marks:
            return tokens
        if isinstance(tokens, TokenKey):
            if namespace is not None and namespace != tokens.namespace:
                raise InvalidRequest(
                    f"the key is of namespace {tokens.namespace}, not of {namespace}"
                )
            if marks:
                raise InvalidRequest("content marks belong to the making of a key")
            return tokens
        if namespace is not None:
            _check_namespace(namespace)
        data = _to_bytes(tokens)
        if not marks:
            return cls(data, namespace or _DEFAULT)
        return cls(*_mark(data, namespace or _DEFAULT, marks))

    def extended(self, tokens: Tokens) -> TokenKey:
        """This key followed by more tokens."""
        return TokenKey(self.data + _to_bytes(tokens), self.namespace, self.root[2])

    def cut(self, length: int) -> TokenKey:
        """The first `length` tokens of this key."""
        return TokenKey(self.data[: length * TOKEN_BYTES], self.namespace, self.root[2])

    def digests(self, page_size: int) -> list[int]:
        """A 64-bit digest for each whole page, of the namespace and all tokens up to its end.

        Equal where whole prefixes are equal, on any machine and in any process (but for a chance of
        n**2 / 2**65 among n of them).
        """
        running = blake2b(msgspec.msgpack.encode(self.root), digest_size=8)
        step = page_size * TOKEN_BYTES
        made: list[int] = []
        for end in range(step, len(self.data) + 1, step):
            running.update(self.data[end - step : end])
            made.append(int.from_bytes(running.digest(), "big"))
        return made

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"TokenKey({self.length} tokens, {self.namespace})"


# Anything that holds token ids: a list, an array, a numpy array, a CPU tensor, a key made before.
Tokens: TypeAlias = Sequence[SupportsIndex] | ArrayLike | TokenKey


def _check_namespace(namespace: object) -> None:
    if not isinstance(namespace, Namespace):
        raise InvalidRequest(f"the namespace is {namespace!r}, not a Namespace(adapter, salt)")
    name_of("the adapter of a namespace", namespace.adapter)
    name_of("the salt of a namespace", namespace.salt)


def _to_bytes(tokens: Tokens) -> bytes:
    if isinstance(tokens, TokenKey):
        return tokens.data
    if not isinstance(tokens, (list, tuple)):
        numbers = _as_numpy(tokens)
        if numbers is not None:
            return _numpy_bytes(numbers)
        tokens = _as_list(tokens)
    # Of all ways to read numbers of Python this is the fastest: "i" takes three times as long.
    words, ids = array("I"), cast("list[int]", tokens)
    try:
        words.fromlist(ids if isinstance(tokens, list) else list(ids))
    except (OverflowError, TypeError):
        raise _bad_token(ids) from None
    if words and int(np.frombuffer(words, "u4").max()) > _TOKEN_MAX:
        raise _bad_token(words)
    if not _LITTLE:
        words.byteswap()
    return words.tobytes()


def _as_numpy(tokens: object) -> npt.NDArray[np.generic] | None:
    """The tokens as a numpy array when they offer a buffer of numbers, else None."""
    if isinstance(tokens, np.ndarray):
        return cast("npt.NDArray[np.generic]", tokens)
    if hasattr(tokens, "__array__") or isinstance(tokens, (array, memoryview)):
        try:
            return cast("npt.NDArray[np.generic]", np.asarray(tokens))
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor on another device
            raise InvalidRequest(f"tokens cannot be read: {error}") from error
    return None


def _as_list(tokens: object) -> list[SupportsIndex]:
    if not isinstance(tokens, Iterable):
        raise InvalidRequest(f"tokens must be a run of ids, not {type(tokens).__name__}")
    if isinstance(tokens, Set | Mapping):
        raise InvalidRequest("tokens must be in an order, which sets and mappings do not have")
    return list(cast("Iterable[SupportsIndex]", tokens))


def _numpy_bytes(numbers: npt.NDArray[np.generic]) -> bytes:
    if numbers.ndim != 1:
        raise InvalidRequest(f"tokens must be a flat run of ids, not of shape {numbers.shape}")
    if numbers.size == 0:
        return b""
    if numbers.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be integers, not {numbers.dtype} (position 0)")
    ids = cast("npt.NDArray[np.integer]", numbers)
    # All bits of all ids: a negative id keeps the sign, one that is too large its upper bits.
    if not 0 <= int(np.bitwise_or.reduce(ids)) <= _TOKEN_MAX:
        raise _bad_token(ids.tolist())
    return ids.astype(_WORD, copy=False).tobytes()


def _bad_token(tokens: Sequence[object]) -> InvalidRequest:
    for position, token in enumerate(tokens):
        try:
            number = index(cast("SupportsIndex", token))
        except TypeError:  # also of what has an index for some values only, like a tensor
            return InvalidRequest(f"token at position {position} is no integer: {token!r}")
        if not 0 <= number <= _TOKEN_MAX:
            return InvalidRequest(
                f"token at position {position} is {token!r}; ids go from 0 to {_TOKEN_MAX}"
            )
    raise AssertionError("a bad token was reported but none was found")


def _mark(
    data: bytes, namespace: Namespace, marks: Sequence[ContentMark]
) -> tuple[bytes, Namespace, bytes]:
    """Write each mark's digest over its placeholders, or into the root where it does not fit."""
    words = np.frombuffer(data, "<u4").copy()
    extra: list[bytes] = []
    covered = 0
    for mark in sorted(marks, key=_checked_mark):
        if mark.length < 1 or mark.position < covered or mark.position + mark.length > len(words):
            raise InvalidRequest(
                f"content mark at position {mark.position} of length {mark.length} does not fit "
                f"{len(words)} tokens, or overlaps the one before it"
            )
        if not mark.digest:
            raise InvalidRequest(f"content mark at position {mark.position} has no digest")
        covered = mark.position + mark.length
        digest = _digest_words(mark)
        if len(digest) > mark.length:
            head = f"{mark.position}:{mark.length}:{len(mark.digest)}:".encode()
            extra.append(head + mark.digest)
            continue
        words[mark.position : covered] = np.resize(digest, mark.length)
    return words.tobytes(), namespace, b"".join(extra)


def _checked_mark(mark: object) -> tuple[int, int, bytes]:
    """How it is ordered. Raises `InvalidRequest` for what is no mark."""
    if not isinstance(mark, ContentMark) or type(mark.digest) is not bytes:
        raise InvalidRequest(f"{mark!r} is no ContentMark(position, length, digest in bytes)")
    return index(mark.position), index(mark.length), mark.digest


def _digest_words(mark: ContentMark) -> npt.NDArray[np.uint32]:
    """The span's length and digest in words of 31 bits with the top bit set.

    A leading one keeps the digest's own length; with the span's, one long content is never equal to
    several short ones in a row.
    """
    number = int.from_bytes(b"\x01" + mark.length.to_bytes(4, "big") + mark.digest, "big")
    words: list[int] = []
    while number:
        words.append(_MARK_BIT | (number & _TOKEN_MAX))
        number >>= 31
    return np.array(words, "<u4")


def common_bytes(
    data: bytes, start: int, stop: int, other: bytes, unit: int, other_start: int = 0
) -> int:
    """How many bytes `data[start:stop]` and `other[other_start:]` share, in whole units.

    Gallops, then bisects: a difference near the front is found without touching the rest.
    """
    if not other_start and len(other) <= stop - start and data.startswith(other, start):
        return len(other) // unit * unit
    limit = min(len(other) - other_start, stop - start) // unit

    def equal(low: int, high: int) -> bool:
        mine = data[start + low * unit : start + high * unit]
        return mine == other[other_start + low * unit : other_start + high * unit]

    low, step = 0, 1
    while low < limit:
        high = min(low + step, limit)
        if equal(low, high):
            low, step = high, step * 4
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if equal(low, middle):
                low = middle
            else:
                high = middle
        break
    return low * unit
