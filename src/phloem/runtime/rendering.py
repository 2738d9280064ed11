"""How an event becomes a line: structlog's processors, in the three styles of a log."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Literal, TypeAlias, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

__all__ = ["Lines", "Style", "bound_logger"]

Style: TypeAlias = Literal["json", "logfmt", "console"]


class Lines:
    """The logger that structlog wraps: gathers rendered lines until they are written together."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def msg(self, line: bytes | str) -> None:
        """Take one line."""
        self.lines.append(line if isinstance(line, bytes) else _readable(line).encode())

    debug = info = warning = error = msg

    def take(self) -> bytes:
        """What was gathered since the last time, each line with its end."""
        text = b"\n".join([*self.lines, b""]) if self.lines else b""
        self.lines.clear()
        return text


def bound_logger(
    lines: Lines, least: int, style: Style, fields: Mapping[str, str]
) -> FilteringBoundLogger:
    """Bound once, since binding costs as much as writing an event."""
    render: list[Processor] = [structlog.processors.JSONRenderer(serializer=_encode)]
    if style == "logfmt":
        render = [_flat, structlog.processors.LogfmtRenderer(bool_as_flag=False)]
    elif style == "console":
        render = [_readable_time, structlog.dev.ConsoleRenderer(colors=False, sort_keys=False)]
    logger: FilteringBoundLogger = structlog.wrap_logger(
        lines,
        processors=[structlog.processors.add_log_level, _in_order, *render],
        wrapper_class=structlog.make_filtering_bound_logger(least),
    ).bind(**fields)
    return logger


def _in_order(logger: WrappedLogger, method: str, entry: EventDict) -> EventDict:
    """What and when first; ids that the event does not have are left out."""
    del logger, method
    for name in ("turn", "cause", "request", "context"):
        if not entry[name]:
            del entry[name]
    first = {name: entry.pop(name) for name in ("event", "time", "level")}
    return {**first, **entry}


def _encode(entry: object, **options: object) -> bytes:
    del options  # the renderer passes the standard library's
    try:
        return msgspec.json.encode(entry)
    except UnicodeEncodeError:
        return msgspec.json.encode(_all_readable(entry))


def _all_readable(value: object) -> object:
    """The same with half characters written out: no encoding has them."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, str):
        return _readable(plain)
    if isinstance(plain, dict):
        pairs = cast("dict[str, object]", plain).items()
        return {_readable(name): _all_readable(each) for name, each in pairs}
    if isinstance(plain, list):
        return [_all_readable(each) for each in cast("list[object]", plain)]
    return plain


def _readable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _flat(logger: WrappedLogger, method: str, entry: EventDict) -> EventDict:
    """What is no word or number is written as JSON, without spaces."""
    del logger, method
    return {
        name: value if isinstance(value, str | int | float | None) else _encode(value).decode()
        for name, value in entry.items()
    }


def _readable_time(logger: WrappedLogger, method: str, entry: EventDict) -> EventDict:
    del logger, method
    moment = datetime.datetime.fromtimestamp(entry.pop("time"), datetime.UTC)
    entry["timestamp"] = moment.isoformat(timespec="milliseconds")
    return entry
