"""Writes events down: structlog behind the sink that a runtime is given.

    with open_log("events.jsonl") as log:
        async with CacheRuntime(config, events=log) as cache:
            ...

The sink only puts the event and its time into a bounded queue; a thread of the log's own runs
structlog and writes. So a slow disk never holds up a turn: what does not fit is dropped, counted,
and told in the log itself. Without a sink (`events=None`) the runtime builds no event at all.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from gzip import BadGzipFile, GzipFile
from os import SEEK_END
from pathlib import Path
from types import TracebackType
from typing import Generic, Literal, Protocol, Self, TypeAlias, TypeVar, get_args

import msgspec
import structlog

from phloem import events as ev
from phloem.errors import InvalidRequest
from phloem.runtime.rendering import Lines, Style, bound_logger

__all__ = [
    "Entry",
    "EntryDecoder",
    "EventLog",
    "EventsDropped",
    "Head",
    "Level",
    "LineReader",
    "LogOpened",
    "RecentEvents",
    "Style",
    "caller_context",
    "ends_torn",
    "level_of",
    "open_log",
    "read_heads",
    "read_log",
    "several",
]

T = TypeVar("T")
Level: TypeAlias = Literal["debug", "info", "warning", "error"]

_GATHER_S = 0.05  # the writer lets so much time pass to write many lines at once
_LINES_A_WRITE = 256
_CAPACITY = 65_536
_FIRST_LINE = b'{"event":"LogOpened"'
_PACKED = b"\x1f\x8b"  # what a gzipped file begins with


class LogOpened(ev.Event, frozen=True, gc=False, kw_only=True):
    """The first line of a log: the schema of what follows, and what is left out of it.

    `least` is the lowest level that is written. `kinds` is empty when all are; of requests, one in
    `sample` is.
    """

    schema: int
    least: str
    kinds: list[str]
    sample: int


class EventsDropped(ev.Event, frozen=True, gc=False, kw_only=True):
    """`count` events before this line are missing: the queue was full, or they cannot be encoded.

    Those that came when the log was closed count among them.
    """

    count: int


_LEVELS: dict[type[ev.Event], int] = {
    LogOpened: logging.INFO,
    ev.RuntimeStarted: logging.INFO,
    ev.RequestOpened: logging.INFO,
    ev.Acquired: logging.INFO,
    ev.RequestForked: logging.INFO,
    ev.RequestSuspended: logging.INFO,
    ev.RequestEnded: logging.INFO,
    ev.Inserted: logging.INFO,
    ev.Evicted: logging.INFO,
    ev.FellBack: logging.INFO,
    ev.Refused: logging.INFO,
    ev.Waited: logging.INFO,
    ev.ResetDone: logging.INFO,
    ev.LeaseLeaked: logging.WARNING,
    ev.TierChanged: logging.WARNING,
    EventsDropped: logging.WARNING,
    # for who follows single places and copies:
    ev.LeaseTaken: logging.DEBUG,
    ev.LeaseEnded: logging.DEBUG,
    ev.Freed: logging.DEBUG,
    ev.Parked: logging.DEBUG,
    ev.Granted: logging.DEBUG,
    ev.TreeChanged: logging.DEBUG,
    ev.Kept: logging.DEBUG,
    ev.CopyPlanned: logging.DEBUG,
    ev.CopyDropped: logging.DEBUG,
    ev.CopySubmitted: logging.DEBUG,
    ev.StepChanged: logging.DEBUG,
}


def caller_context() -> ev.Context:
    """What the running task has bound with `structlog.contextvars.bind_contextvars`, as text."""
    bound = structlog.contextvars.get_contextvars()
    return {name: str(value) for name, value in bound.items()}


def level_of(event: ev.Event) -> int:
    """How much an event concerns a reader, as a number of the standard library's `logging`."""
    level = _LEVELS.get(type(event))
    if level is not None:
        return level
    if isinstance(event, ev.CopyEnded):
        return logging.ERROR if event.error else logging.DEBUG
    if isinstance(event, ev.RuntimeStopped):
        return logging.INFO if event.why == "closed" else logging.ERROR
    return logging.INFO


class ByteStream(Protocol):
    """Where lines go: a file opened for bytes, `sys.stderr.buffer`, a pipe."""

    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


class EventLog:
    """A sink that writes events in a thread of its own; made by `open_log`.

    Calling it never blocks and never raises.
    """

    def __init__(
        self,
        out: ByteStream,
        *,
        clock: Callable[[], float],
        level: Level,
        kinds: Collection[type[ev.Event]] | None,
        sample: int,
        style: Style,
        fields: Mapping[str, str],
        capacity: int,
        close_out: Callable[[], None] | None,
    ) -> None:
        self._clock = clock
        self._least = _number_of(level)
        self._kinds = None if kinds is None else frozenset(kinds)
        self._sample = sample
        self._capacity = capacity
        self._out = out
        self._close_out = close_out
        self._queue: deque[tuple[float, ev.Event]] = deque()
        self._lines = Lines()
        self._logger = bound_logger(self._lines, self._least, style, fields)
        self._refused = 0  # by the caller's thread: the queue was full
        self._unencoded = 0  # by the writer's thread: no line can hold them
        self._missing_told = 0
        self._lost = 0  # by the writer's thread: it could not write
        self._broken = False  # and will not try again
        self._failed: Exception | None = None  # the first of what went wrong
        names = sorted(kind.__name__ for kind in self._kinds or ())
        opened = LogOpened(schema=ev.SCHEMA, least=level, kinds=names, sample=sample)
        self._queue.append((clock(), opened))
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="phloem-event-log", daemon=True)
        self._thread.start()

    def __call__(self, event: ev.Event) -> None:
        """Take one event. To be called from one thread at a time, as a runtime does."""
        self.add(self._clock(), event)

    def add(self, time_s: float, event: ev.Event) -> None:
        """Take an event that happened at a time of its own."""
        if level_of(event) < self._least:
            return
        if self._kinds is not None and type(event) not in self._kinds:
            return
        if (
            self._sample > 1
            and event.request
            and zlib.crc32(_bytes_of(event.request)) % self._sample
        ):
            return
        if len(self._queue) >= self._capacity or self._closing.is_set():
            self._refused += 1
            return
        self._queue.append((time_s, event))
        if not self._wake.is_set():
            self._wake.set()

    @property
    def dropped(self) -> int:
        """Events that were not written, beyond those that the level or the kinds leave out."""
        return self._refused + self._unencoded + self._lost

    def close(self) -> None:
        """Write what is queued, end the thread, close the file if the log opened it. Idempotent.

        Blocks until it is written. Raises the error that kept events from being written.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._thread.join()
        try:
            if self._close_out is not None:
                self._close_out()
        finally:
            if self._failed is not None:
                raise self._failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the writer's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        while not (self._closing.is_set() and not self._queue):
            self._wake.wait()
            self._closing.wait(_GATHER_S)
            self._wake.clear()  # before the queue is read: who appends after this wakes us again
            while self._queue:
                self._write_some()
        self._write_some()  # at least what was dropped

    def _write_some(self) -> None:
        count = min(len(self._queue), _LINES_A_WRITE)
        for _ in range(count):
            time_s, event = self._queue.popleft()
            try:
                self._render(time_s, event)
            except Exception as error:  # noqa: BLE001  told by `close`; the others are written
                self._failed = self._failed or error
                self._unencoded += 1
        rendered = len(self._lines.lines)
        if missing := self._refused + self._unencoded - self._missing_told:
            self._missing_told += missing
            self._render(self._clock(), EventsDropped(count=missing))
        text = self._lines.take()
        if text and not self._broken:
            try:
                self._out.write(text)
                self._out.flush()
            except Exception as error:  # noqa: BLE001  told by `close`
                self._failed = self._failed or error
                self._broken = True
        if self._broken:
            self._lost += rendered

    def _render(self, time_s: float, event: ev.Event) -> None:
        """Gather its line. Raises what structlog or its renderer does."""
        self._logger.log(
            max(level_of(event), self._least),  # a log always says that it was opened
            type(event).__name__,
            time=time_s,
            **msgspec.structs.asdict(event),
        )


def open_log(
    target: str | Path | ByteStream,
    *,
    clock: Callable[[], float] = time.time,
    level: Level = "debug",
    kinds: Collection[type[ev.Event]] | None = None,
    sample: int = 1,
    style: Style = "json",
    fields: Mapping[str, str] | None = None,
    capacity: int = _CAPACITY,
) -> EventLog:
    """A sink that writes events to a file (appended to) or a stream of bytes (left open).

    `json`: one object a line, which `read_log` reads back; `logfmt`: `name=value` pairs;
    `console`: for people. `level` and `kinds` choose what is written; with `sample=n` it is one
    request in n, chosen by its name, and what belongs to no request. `fields` are added to every
    line. `clock` gives the time in seconds since the epoch. At most `capacity` events wait for the
    writer.

    Raises `InvalidRequest` for an unknown level or style and for a capacity or a sample below 1,
    `OSError` when the file cannot be opened.
    """
    if style not in get_args(Style):
        raise InvalidRequest(f"style is {style!r}; there are {', '.join(get_args(Style))}")
    if capacity < 1:
        raise InvalidRequest(f"capacity is {capacity}; it starts at 1")
    if sample < 1:
        raise InvalidRequest(f"sample is {sample}; it starts at 1, for all requests")
    _number_of(level)
    out, close_out = _opened(target)
    return EventLog(
        out,
        clock=clock,
        level=level,
        kinds=kinds,
        sample=sample,
        style=style,
        fields=fields or {},
        capacity=capacity,
        close_out=close_out,
    )


def _bytes_of(name: str) -> bytes:
    return name.encode(errors="backslashreplace")


def _opened(target: str | Path | ByteStream) -> tuple[ByteStream, Callable[[], None] | None]:
    if not isinstance(target, str | Path):
        return target, None
    file = Path(target).open("ab")  # noqa: SIM115  the log closes it
    if ends_torn(target):
        file.write(b"\n")  # so that what its last writer did not end spoils no line of ours
    return file, file.close


def _number_of(level: Level) -> int:
    if level not in get_args(Level):
        raise InvalidRequest(f"level is {level!r}; there are {', '.join(get_args(Level))}")
    return logging.getLevelNamesMapping()[level.upper()]


# -- reading back -------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True):
    """One line of a log: the event, and what the log added to it."""

    time: float
    level: str
    event: ev.Event


class Head(msgspec.Struct, frozen=True):
    """What a line of a log begins with."""

    time: float
    level: str
    event: str


class EntryDecoder:
    """Turns lines in `json` style into entries."""

    def __init__(self) -> None:
        self._head = msgspec.json.Decoder(Head)
        self._events = {kind.__name__: msgspec.json.Decoder(kind) for kind in _LEVELS}
        for kind in (ev.CopyEnded, ev.RuntimeStopped):
            self._events[kind.__name__] = msgspec.json.Decoder(kind)

    def decode(self, line: bytes) -> Entry:
        """One line. Raises `InvalidRequest` for one that is no event of a schema known here."""
        try:
            head = self._head.decode(line)
            event = self._events[head.event].decode(line)
        except KeyError as error:
            raise InvalidRequest(f"there is no event {error}") from error
        except msgspec.DecodeError as error:
            raise InvalidRequest(str(error)) from error
        if isinstance(event, LogOpened) and event.schema > ev.SCHEMA:
            raise InvalidRequest(
                f"the log is of schema {event.schema}, written by a later version; this one reads "
                f"up to {ev.SCHEMA}"
            )
        return Entry(head.time, head.level, event)


def read_log(path: str | Path) -> Iterator[Entry]:
    """The events of a log in `json` style, plain or gzipped, in order.

    A log without a `LogOpened` is of schema 1, whose events have fewer fields. Passed over are
    blank lines and a line that its writer did not end: the last one, if nothing ends it (it is
    still being written, or its process was killed, or the disk was full), and one before a
    `LogOpened`, where another process went on. Raises `InvalidRequest` naming any other line that
    cannot be read, as those of a later schema.
    """
    yield from _each_line(path, EntryDecoder().decode)


def read_heads(path: str | Path) -> Iterator[Head]:
    """How each line of a log begins: several times as fast as `read_log`. Raises as that does."""
    decode = msgspec.json.Decoder(Head).decode

    def head(line: bytes) -> Head:
        try:
            return decode(line)
        except msgspec.DecodeError as error:
            raise InvalidRequest(str(error)) from error

    yield from _each_line(path, head)


def ends_torn(path: str | Path) -> bool:
    """The last line of a plain file lacks its end. False where that cannot be seen."""
    if not Path(path).is_file():
        return False
    try:
        with Path(path).open("rb") as file:
            if file.peek(2)[:2] == _PACKED or not file.seek(0, SEEK_END):
                return False
            file.seek(-1, SEEK_END)
            return file.read() != b"\n"
    except OSError:
        return False


class LineReader(Generic[T]):
    """Decodes the lines of a log one by one, and knows which it may pass over (see `read_log`)."""

    def __init__(self, path: str | Path, decode: Callable[[bytes], T]) -> None:
        self._path, self._decode = path, decode
        self._number = 0
        self._bad: InvalidRequest | None = None

    def take(self, line: bytes) -> T | None:
        """The next line decoded, or None. Raises for the line before, if it had to be readable."""
        self._number += 1
        if self._bad is not None and not line.startswith(_FIRST_LINE):
            raise self._bad
        self._bad = None
        try:
            return self._decode(line)
        except InvalidRequest as error:
            if line and not line.isspace():
                where = f"{self._path}, line {self._number}"
                self._bad = InvalidRequest(f"{where} is no event: {error}")
            return None

    def end(self, last: bytes) -> None:
        """There is no more. Raises if the last line had an end and could not be read."""
        if self._bad is not None and last.endswith(b"\n"):
            raise self._bad


def _each_line(path: str | Path, decode: Callable[[bytes], T]) -> Iterator[T]:
    reader, line = LineReader(path, decode), b""
    take = reader.take
    with Path(path).open("rb") as file:
        packed = file.peek(2)[:2] == _PACKED
        try:
            for line in GzipFile(fileobj=file) if packed else file:
                if (decoded := take(line)) is not None:
                    yield decoded
        except (EOFError, BadGzipFile, zlib.error) as error:
            raise InvalidRequest(f"{path} cannot be unpacked: {error}") from error
    reader.end(line)


# -- other sinks --------------------------------------------------------------------------------


class RecentEvents:
    """A sink that keeps the latest `capacity` events in memory, to be looked at after the fact."""

    def __init__(self, capacity: int = 10_000, *, clock: Callable[[], float] = time.time) -> None:
        if capacity < 1:
            raise InvalidRequest(f"capacity is {capacity}; it starts at 1")
        self._kept: deque[tuple[float, ev.Event]] = deque(maxlen=capacity)
        self._clock = clock
        self.forgotten = 0

    def __call__(self, event: ev.Event) -> None:
        """Take one event."""
        self.forgotten += len(self._kept) == self._kept.maxlen
        self._kept.append((self._clock(), event))

    def entries(self) -> list[Entry]:
        """What is kept, the oldest first."""
        return [
            Entry(time_s, logging.getLevelName(level_of(event)).lower(), event)
            for time_s, event in self._kept
        ]

    def write(self, path: str | Path) -> None:
        """Write what is kept as a log in `json` style."""
        with open_log(path, clock=lambda: 0.0, capacity=len(self._kept) + 1) as log:
            for time_s, event in self._kept:
                log.add(time_s, event)


def several(*sinks: ev.Sink | None) -> ev.Sink | None:
    """One sink for all that are given; None when none is."""
    given = [sink for sink in sinks if sink is not None]
    if len(given) < 2:
        return given[0] if given else None

    def tell_all(event: ev.Event) -> None:
        for sink in given:
            sink(event)

    return tell_all
