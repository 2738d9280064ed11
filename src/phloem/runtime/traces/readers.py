"""Traces as streams of requests: one reader for each format, and a guess by the file's first line.

Public traces hold no text. A prompt is given as ids of blocks of tokens, where an equal id means an
equal whole prefix, or as token ids that were renumbered, or only by its length. Every reader gives
`TraceRequest`s in the order of their times, one at a time, without requests that have no prompt: a
trace of any length can be read in bounded memory where its format allows it.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from phloem.errors import InvalidRequest
from phloem.runtime.traces.event_logs import read_event_log
from phloem.runtime.traces.request import TokenIds, TraceRequest, lines_of

__all__ = [
    "Sessions",
    "is_sessions",
    "read_agent_tokens",
    "read_azure",
    "read_mooncake",
    "read_sessions",
    "read_token_log",
    "read_trace",
]

_ID_MAX = 2**31
_POISSON_MAX = 500.0
_LENGTH_MAX = 2**26  # tokens of a prompt of which only the length is known
S = TypeVar("S", bound=msgspec.Struct)


def _decoded(path: Path, kind: type[S]) -> Iterator[tuple[int, S]]:
    decode = msgspec.json.Decoder(kind).decode
    for number, line in lines_of(path):
        try:
            yield number, decode(line)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{path.name}, line {number}: {error}") from error


# -- blocks of 512 tokens --------------------------------------------------------------------------


class _Mooncake(msgspec.Struct):
    input_length: int
    hash_ids: list[int]
    timestamp: float = 0.0
    output_length: int = 0
    block_size: int = 512
    session_id: str | int | None = None


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """The format of Mooncake's traces: times in milliseconds, chained ids of 512-token blocks.

    The last id stands for what is left and may be a partial block. Others publish in this form
    with a `block_size` and a `session_id`.
    """
    numbers: dict[int, int] = {}  # ids may be hashes of 64 bits
    for number, line in _decoded(path, _Mooncake):
        size = line.block_size
        if size < 1 or not 0 < line.input_length <= size * len(line.hash_ids):
            raise InvalidRequest(
                f"{path.name}, line {number}: input_length is {line.input_length}, with "
                f"{len(line.hash_ids)} hash_ids and a block_size of {size}"
            )
        small = all(0 <= one < _ID_MAX for one in line.hash_ids)
        ids = line.hash_ids if small else [_renumbered(numbers, one) for one in line.hash_ids]
        yield TraceRequest(
            at_s=line.timestamp / 1000,
            session=_named(line.session_id),
            blocks=np.array(ids, np.int32),
            block_size=size,
            length=line.input_length,
            output=line.output_length,
        )


def _named(session: str | int | None) -> str:
    return "" if session is None else str(session)


def _renumbered(numbers: dict[int, int], one: int) -> int:
    """A number for an id that is too large, counted down from the largest."""
    return _ID_MAX - 1 - numbers.setdefault(one, len(numbers)) if not 0 <= one < _ID_MAX else one


# -- sessions of runs of 64-token blocks -----------------------------------------------------------


class _Turn(msgspec.Struct):
    t: float
    model: str = ""
    tokens: int = msgspec.field(name="in", default=0)
    out: int = 0
    runs: list[tuple[int, int]] = []
    type: str = ""
    requests: list[_Turn] = []


class _Session(msgspec.Struct):
    id: str
    block_size: int
    tool_tokens: int
    requests: list[_Turn]


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """How sessions without a common clock are laid out in time.

    They start `every_s` apart, or so on average when a `seed` is given; pauses inside a session are
    cut to `pause_max_s`, or drawn with a mean of `pause_s` whole seconds. Sessions of one model
    whose tool definitions have equal length share those (an assumption: ids are local to a session
    in the file). `first`: so many sessions, None for all. A session with a prompt of more than
    `prompt_max` tokens is left out; it ends before the first of more than `prompt_cut`, or after
    `turns_max` turns, and is left out if it then has less than `turns_min`.
    """

    first: int | None = None
    every_s: float = 30.0
    seed: int | None = None
    pause_max_s: float = 300.0
    pause_s: float | None = None
    share_tools: bool = True
    prompt_max: int | None = None
    prompt_cut: int | None = None
    turns_max: int | None = None
    turns_min: int = 1

    def __post_init__(self) -> None:
        least = 0.0 if self.seed is None else 1e-9  # a mean of 0 cannot be drawn from
        if not least <= self.every_s < math.inf:
            raise InvalidRequest(f"sessions start {self.every_s} seconds apart")
        for name in ("pause_max_s", "pause_s", "first", "turns_max", "prompt_max", "prompt_cut"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InvalidRequest(f"{name} of sessions is {value}; 0 or more")


def read_sessions(path: Path, layout: Sessions | None = None) -> Iterator[TraceRequest]:
    """Recorded agent sessions, one a line; sub-agents' requests are in their session.

    The sessions that overlap are in memory together.
    """
    layout = layout or Sessions()
    rng = random.Random(layout.seed)
    numbers: dict[object, int] = {}
    waiting: list[tuple[float, int, TraceRequest]] = []
    made = used = 0
    start = 0.0
    for number, session in _decoded(path, _Session):
        if session.block_size < 1 or session.tool_tokens < 0:
            raise InvalidRequest(
                f"{path.name}, line {number}: block_size is {session.block_size}, tool_tokens "
                f"{session.tool_tokens}"
            )
        if layout.first is not None and used >= layout.first:
            break
        turns = _kept(session, layout)
        if not turns:
            continue
        if layout.seed is not None:
            start += rng.expovariate(1 / layout.every_s)
        elif used:
            start += layout.every_s
        used += 1
        while waiting and waiting[0][0] < start:
            yield heapq.heappop(waiting)[2]
        for now, turn in _timed(turns, start, layout, rng):
            blocks = _numbered(session, turn, layout, numbers)
            if not len(blocks):
                continue
            request = TraceRequest(
                at_s=now,
                session=session.id,
                blocks=blocks,
                block_size=session.block_size,
                length=max(turn.tokens, len(blocks) * session.block_size),
                output=turn.out,
            )
            heapq.heappush(waiting, (now, made, request))
            made += 1
    while waiting:
        yield heapq.heappop(waiting)[2]


def _kept(session: _Session, layout: Sessions) -> list[tuple[float, _Turn]]:
    """The turns of a session in their order, as far as the layout wants them."""
    turns = sorted(_flat(session.requests, 0.0), key=lambda pair: pair[0])
    if layout.prompt_cut is not None:
        long = (at for at, (_, turn) in enumerate(turns) if turn.tokens > layout.prompt_cut)
        turns = turns[: next(long, len(turns))]
    turns = turns[: layout.turns_max]
    longest = max((turn.tokens for _, turn in turns), default=0)
    too_long = layout.prompt_max is not None and longest > layout.prompt_max
    return [] if too_long or len(turns) < layout.turns_min else turns


def _timed(
    turns: Iterable[tuple[float, _Turn]], start: float, layout: Sessions, rng: random.Random
) -> Iterator[tuple[float, _Turn]]:
    """The turns with the times at which they arrive."""
    now, last = start, None
    for at, turn in turns:
        if last is not None and layout.pause_s is not None:
            now += _poisson(rng, layout.pause_s)
        elif last is not None:
            now += min(at - last, layout.pause_max_s)
        last = at
        yield now, turn


def _poisson(rng: random.Random, mean: float) -> int:
    """A Poisson-distributed number: how many uniform draws keep their product above exp(-mean).

    Of a large mean it is the sum of several, since that limit would be too small for a float.
    """
    count = 0
    while mean > 0:
        part = min(mean, _POISSON_MAX)
        mean -= part
        product, least = rng.random(), math.exp(-part)
        while product > least:
            count += 1
            product *= rng.random()
    return count


def _flat(turns: Iterable[_Turn], offset: float) -> Iterator[tuple[float, _Turn]]:
    for turn in turns:
        if turn.type == "subagent":
            yield from _flat(turn.requests, offset + turn.t)
        else:
            yield offset + turn.t, turn


def _numbered(
    session: _Session, turn: _Turn, layout: Sessions, numbers: dict[object, int]
) -> TokenIds:
    """Block ids that mean the same in all sessions."""
    shared = session.tool_tokens // session.block_size if layout.share_tools else 0
    local = [block for first, count in turn.runs for block in range(first, first + count)]
    names = (
        (turn.model, session.tool_tokens, place) if place < shared else (session.id, block)
        for place, block in enumerate(local)
    )
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int32)


# -- token ids -------------------------------------------------------------------------------------


class _Agent(msgspec.Struct):
    s: int
    t: float
    ref: int
    reuse: int
    new: list[int]
    out: list[int]


def read_agent_tokens(path: Path, *, empty: bool = False) -> Iterator[TraceRequest]:
    """Token ids, each prompt as a prefix of an earlier request (input and output) and the rest.

    `empty`: also those that have no prompt, only an answer.
    """
    before: list[TokenIds] = []
    for number, line in _decoded(path, _Agent):
        if not -1 <= line.ref < len(before):
            raise InvalidRequest(f"{path.name}, line {number} refers to request {line.ref}")
        begin = before[line.ref] if line.ref >= 0 else np.empty(0, np.int32)
        if not 0 <= line.reuse <= len(begin):
            raise InvalidRequest(
                f"{path.name}, line {number} reuses {line.reuse} of {len(begin)} tokens"
            )
        _check_tokens(path, number, (*line.new, *line.out))
        begin = begin[: line.reuse]
        prompt = np.concatenate([begin, np.array(line.new, np.int32)])
        before.append(np.concatenate([prompt, np.array(line.out, np.int32)]))
        if not len(prompt) and not empty:
            continue
        yield TraceRequest(
            at_s=line.t,
            session=str(line.s),
            blocks=prompt,
            block_size=1,
            length=len(prompt),
            output=len(line.out),
            answer=before[-1][len(prompt) :],
        )


def _check_tokens(path: Path, number: int, tokens: Sequence[int]) -> None:
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < _ID_MAX:
            raise InvalidRequest(f"{path.name}, line {number}: {token} is no token id")


class _Logged(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    output_token_ids: list[int] | None = None
    output_ids: list[int] | None = None
    arrival_time: float | None = None
    session_id: str | int | None = None


def read_token_log(path: Path) -> Iterator[TraceRequest]:
    """A server's log of requests with token ids, one JSON object a line, in order of arrival.

    `prompt_token_ids` or `input_ids`; where known `output_token_ids` or `output_ids`,
    `arrival_time` in seconds and `session_id`. Other fields are passed over.
    """
    start: float | None = None
    for number, line in _decoded(path, _Logged):
        prompt = line.prompt_token_ids or line.input_ids
        answer = line.output_token_ids or line.output_ids or []
        if not prompt:
            continue
        _check_tokens(path, number, (*prompt, *answer))
        at = line.arrival_time or 0.0
        start = at if start is None else start
        yield TraceRequest(
            at_s=max(0.0, at - start),
            session=_named(line.session_id),
            blocks=np.array(prompt, np.int32),
            block_size=1,
            length=len(prompt),
            output=len(answer),
            answer=np.array(answer, np.int32),
        )


# -- lengths only ----------------------------------------------------------------------------------


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """Azure's inference traces: arrivals and lengths. No two prompts share anything."""
    rows = csv.DictReader((line for _, line in lines_of(path)), restval="")
    start: datetime | None = None
    made = 0
    for number, row in enumerate(_rows(path, rows), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            length, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            start = start or at
            at_s = max(0.0, (at - start).total_seconds())
        except (KeyError, ValueError, TypeError) as error:  # TypeError: only one has a time zone
            raise InvalidRequest(f"{path.name}, line {number}: {error!r}") from error
        if length > _LENGTH_MAX:
            raise InvalidRequest(
                f"{path.name}, line {number}: a prompt of {length} tokens; {_LENGTH_MAX} at most"
            )
        if length < 1:
            continue
        yield TraceRequest(
            at_s=at_s,
            session="",
            blocks=np.arange(made, made + length, dtype=np.int32),
            block_size=1,
            length=length,
            output=output,
        )
        made = (made + length) % 2**30


def _rows(path: Path, rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise InvalidRequest(f"{path.name}: {error}") from error


_BY_FIELD: tuple[tuple[str, Callable[[Path], Iterator[TraceRequest]]], ...] = (
    ('"hash_ids"', read_mooncake),
    ('"prompt_token_ids"', read_token_log),
    ('"input_ids"', read_token_log),
    ('"block_size"', read_sessions),
    ('"reuse"', read_agent_tokens),
    ("ContextTokens", read_azure),
    ('"event":', read_event_log),
)


def is_sessions(path: Path) -> bool:
    """Whether a trace holds sessions without a common clock, which `read_sessions` lays out."""
    return _reader_of(path) is read_sessions


def read_trace(path: Path, *, empty: bool = False) -> Iterator[TraceRequest]:
    """The requests of a trace, plain or gzipped, whose format its first line tells.

    `empty`: also those without a prompt, whose answers are cached all the same. Raises
    `InvalidRequest` for a file of no known format.
    """
    reader = _reader_of(path)
    if empty and reader is read_agent_tokens:
        return read_agent_tokens(path, empty=True)
    if empty and reader is read_event_log:
        return read_event_log(path, empty=True)
    return reader(path)


def _reader_of(path: Path) -> Callable[[Path], Iterator[TraceRequest]]:
    first = next(lines_of(path), (0, ""))[1]
    for field, reader in _BY_FIELD:
        if field in first:
            return reader
    if not first:
        raise InvalidRequest(f"{path.name} is empty")
    known = ", ".join(field.strip('":') for field, _ in _BY_FIELD)
    raise InvalidRequest(
        f"{path.name} is no trace of a known format: its first line has none of {known}"
    )
