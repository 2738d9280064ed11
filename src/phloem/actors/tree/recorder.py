"""A log of a tree's messages is a recording: played again, it gives every result bit for bit.

Line by line JSON. The first line names the format and how the tree was made; then one line for each
operation with its arguments and its result, and one before it for each key that is new. Keys are
named by a place in a ring, so that the log can be read with bounded memory.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import cast

import msgspec

from phloem.actors.actions import EvictExcessPathStates
from phloem.actors.tree.core import WritePolicy
from phloem.actors.tree.keys import Namespace, TokenKey, Tokens
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.placement import Placement
from phloem.actors.tree.tree import Tree
from phloem.errors import InvalidRequest, PhloemError

__all__ = ["RECORDED", "ReplayDiffers", "TreeRecorder", "replay"]

FORMAT = "phloem-tree-1"
KEYS_REMEMBERED = 1024

# The operations that decide, and those whose answers decide something elsewhere.
RECORDED = (
    "match",
    "acquire",
    "open",
    "fork",
    "protect_spans",
    "advance",
    "release",
    "release_state",
    "take_state",
    "stand_on",
    "close_session",
    "insert",
    "insert_checked",
    "evict",
    "evict_bytes",
    "evict_excess",
    "evict_host",
    "plan",
    "reserved",
    "not_reserved",
    "copied",
    "give_up",
    "close_host",
    "use_policy",
    "tick",
    "begin_move",
    "end_move",
    "reset",
    "sweep",
)


class ReplayDiffers(AssertionError):
    """A replayed operation gave something else than what was recorded."""


class _Header(msgspec.Struct, kw_only=True):
    format: str
    page_size: int
    state_chunk: int
    components: tuple[str, ...]
    policy: str
    placement: Placement
    enabled: bool
    host: bool = False
    write_policy: WritePolicy = "write_through"
    pages_tracked: int = 0


class _Key(msgspec.Struct, tag="key", kw_only=True):
    place: int
    data: bytes
    adapter: str
    salt: str
    extra: bytes


class _Call(msgspec.Struct, tag="call", kw_only=True):
    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    result: object


class TreeRecorder:
    """Writes what a tree is asked and what it answers, from now on; the tree must be new.

    `write` is given one line at a time, without its end. The policy must be one with a name.
    """

    def __init__(self, tree: Tree, write: Callable[[bytes], object]) -> None:
        if tree.now or tree.leases.live or tree.generation:
            raise InvalidRequest("a recording begins with a tree that has done nothing yet")
        self._write = write
        self._busy = False
        self._places: OrderedDict[tuple[object, bytes], int] = OrderedDict()
        self._next = 0
        self._put(
            _Header(
                format=FORMAT,
                page_size=tree.page_size,
                state_chunk=tree.grid,
                components=tree.components.texts,
                policy=tree.policy.name,
                placement=tree.placement,
                enabled=tree.enabled,
                host=tree.host is not None,
                write_policy=tree.write_policy,
                pages_tracked=len(tree.radix.holders or ()),
            )
        )
        for name in RECORDED:
            setattr(tree, name, self._recorded(name, getattr(tree, name)))

    def _recorded(self, name: str, operation: Callable[..., object]) -> Callable[..., object]:
        @wraps(operation)
        def recorded(*args: object, **kwargs: object) -> object:
            if self._busy:  # called by another operation: part of that one
                return operation(*args, **kwargs)
            given = tuple(map(self._encode, args))
            named = {key: self._encode(value) for key, value in kwargs.items()}
            self._busy = True
            try:
                result = operation(*args, **kwargs)
            finally:  # one that raises has changed nothing and is not recorded
                self._busy = False
            self._put(_Call(name=name, args=given, kwargs=named, result=_plain(result)))
            return result

        return recorded

    def _put(self, line: msgspec.Struct) -> None:
        self._write(msgspec.json.encode(line))

    def _encode(self, value: object) -> object:
        if isinstance(value, TokenKey):
            return {"key": self._place(value)}
        if isinstance(value, Lease):
            return {"lease": value.id}
        if isinstance(value, EvictExcessPathStates):
            return {"excess": [value.node, value.generation]}
        if isinstance(value, (array, range)):
            return {"ids": list(cast("Iterable[int]", value))}
        if isinstance(value, (tuple, list)):
            return [self._encode(one) for one in cast("Iterable[object]", value)]
        if isinstance(value, memoryview) or hasattr(value, "__array__"):
            return {"key": self._place(TokenKey.of(cast("Tokens", value)))}
        return msgspec.to_builtins(value)

    def _place(self, key: TokenKey) -> int:
        """Where the key stands in the ring; it is written first when it is not there."""
        place = self._places.get((key.root, key.data))
        if place is None:
            place = self._next % KEYS_REMEMBERED
            self._next += 1
            if len(self._places) >= KEYS_REMEMBERED:
                self._places.popitem(last=False)
            self._places[key.root, key.data] = place
            adapter, salt, extra = key.root
            self._put(_Key(place=place, data=key.data, adapter=adapter, salt=salt, extra=extra))
        return place


def replay(lines: Iterable[bytes], make: Callable[..., Tree] = Tree) -> Tree:
    """Do again what was recorded, comparing every result; the tree as it is at the end.

    Raises `ReplayDiffers` at the first operation with another result, and `InvalidRequest` for a
    log that is not one.
    """
    lines = iter(lines)
    try:
        header = msgspec.json.decode(next(lines, b"{}"), type=_Header)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not a recording: {error}") from error
    if header.format != FORMAT:
        raise InvalidRequest(f"a recording of format {header.format!r}; this reads {FORMAT!r}")
    tree = make(
        page_size=header.page_size,
        state_chunk=header.state_chunk,
        components=header.components,
        policy=header.policy,
        placement=header.placement,
        enabled=header.enabled,
        host=header.host,
        write_policy=header.write_policy,
    )
    if header.pages_tracked:
        tree.track_pages(header.pages_tracked)
    keys: dict[int, TokenKey] = {}
    decode = msgspec.json.Decoder(_Key | _Call).decode
    for number, line in enumerate(lines, 2):
        try:
            entry = decode(line)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"line {number} of the recording: {error}") from error
        if isinstance(entry, _Key):
            space = Namespace(entry.adapter, entry.salt)
            keys[entry.place] = TokenKey(entry.data, space, entry.extra)
        else:
            _again(tree, entry, keys, number)
    return tree


def _again(tree: Tree, call: _Call, keys: Mapping[int, TokenKey], number: int) -> None:
    if call.name not in RECORDED:
        raise InvalidRequest(f"line {number} of the recording: no operation {call.name!r}")
    value = partial(_decode, tree, keys)
    args = [value(one) for one in call.args]
    kwargs = {key: value(one) for key, one in call.kwargs.items()}
    operation = cast("Callable[..., object]", getattr(tree, call.name))
    try:
        result = msgspec.json.decode(msgspec.json.encode(_plain(operation(*args, **kwargs))))
    except PhloemError as error:
        result = repr(error)
    if result != call.result:
        raise ReplayDiffers(
            f"line {number}, {call.name}: recorded {call.result!r}, replayed {result!r}"
        )


def _decode(tree: Tree, keys: Mapping[int, TokenKey], value: object) -> object:
    if isinstance(value, list):
        return [_decode(tree, keys, one) for one in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = cast("dict[str, object]", value).items()
    if kind == "key":
        return keys[cast("int", content)]
    if kind == "lease":
        return tree.leases.live[cast("int", content)]
    if kind == "ids":
        return array("i", cast("list[int]", content))
    assert kind == "excess"
    return EvictExcessPathStates(*cast("list[int]", content))


def _plain(result: object) -> object:
    """A result as plain data; a lease by what it says."""
    if isinstance(result, (tuple, list)):
        return [_plain(one) for one in cast("Iterable[object]", result)]
    if isinstance(result, Lease):
        return {
            "lease": result.id,
            "boundary": result.boundary,
            "state": result.anchor.state,
            "load": result.load,
            "wanted": [list(wanted) for wanted in result.wanted],
            "refused": [list(refused) for refused in result.refused],
        }
    return msgspec.to_builtins(result, enc_hook=_ids)


def _ids(value: object) -> list[int]:
    assert isinstance(value, array), f"no plain form of {type(value).__name__}"
    return list(cast("Iterable[int]", value))
