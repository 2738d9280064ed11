"""`phloem top`: a cache at work, in the terminal, from its log or from itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phloem.errors import InvalidRequest
from phloem.runtime.observe.figures import Figures
from phloem.runtime.observe.live import EVERY_MAX_S, KEPT, LiveView
from phloem.runtime.observe.snapshot import Snapshot, snapshot
from phloem.runtime.tracing import Entry, EntryDecoder, LineReader

__all__ = ["LogTail", "picture", "watch"]

_READ_BYTES = 1 << 20


class LogTail:
    """Reads what has been appended to a log since it was looked at last.

    A log that was renamed, with a new one in its place, or that was cut to nothing is read on from
    the beginning of what is there now.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("rb")  # closed by `close`
        self._reader = LineReader(self._path, EntryDecoder().decode)
        self._rest = b""

    def read(self) -> list[Entry]:
        """The whole lines that are new, of at most a megabyte; a torn one waits for its end.

        Raises `InvalidRequest` for a line that is no event.
        """
        new = self._file.read(_READ_BYTES)
        if not new and self._replaced():
            self._file.close()
            self._open()
            new = self._file.read(_READ_BYTES)
        *lines, self._rest = (self._rest + new).split(b"\n")
        entries = [entry for line in lines if (entry := self._reader.take(line)) is not None]
        if len(new) < _READ_BYTES and not self._rest:
            self._reader.end(b"\n")
        return entries

    def _replaced(self) -> bool:
        """There is another file at the path, or a shorter one."""
        try:
            there = self._path.stat()
        except OSError:
            return False  # not yet: the old one may still be written
        here = os.fstat(self._file.fileno())
        return not os.path.samestat(there, here) or here.st_size < self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def watch(
    path: str | Path,
    *,
    every_s: float = 1.0,
    once: bool = False,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show a log, or the cache that serves at a socket, until interrupted or it ends, or once.

    Raises `InvalidRequest` for a bad interval.
    """
    if not 0 < every_s <= EVERY_MAX_S:
        raise InvalidRequest(
            f"every {every_s} seconds; the interval is above 0, at most {EVERY_MAX_S:g}"
        )
    console = console or Console()
    source = LiveView(path) if Path(path).is_socket() else _FollowedLog(path)
    try:
        now = source.look(every_s)
        if once:
            console.print(picture(now))
            return
        with Live(picture(now), console=console, auto_refresh=False) as live:
            while True:
                sleep(every_s)
                live.update(picture(source.look(every_s)), refresh=True)
    finally:
        source.close()


class _FollowedLog:
    """A log as something to look at."""

    def __init__(self, path: str | Path) -> None:
        self._tail, self._figures = LogTail(path), Figures(kept=KEPT)

    def look(self, every_s: float) -> Snapshot:
        while entries := self._tail.read():
            for entry in entries:
                self._figures.add(entry.time, entry.event)
        return snapshot(self._figures, every_s)

    def close(self) -> None:
        self._tail.close()


def picture(now: Snapshot) -> RenderableType:
    """A snapshot for the terminal."""
    if not now.started:
        return Panel(Text("no runtime has started yet"))
    missed = f"; {now.missed} events are missing" if now.missed else ""
    parts = {
        "pools": _pools(now),
        f"rates, over {now.window_s:g} s{missed}": _rates(now),
        "copies": _queues(now),
        "requests: the oldest that run, then the latest that ended": _requests(now),
    }
    return Group(*(Panel(part, title=title, title_align="left") for title, part in parts.items()))


def _pools(now: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, pool in now.pools.items():
        held, used = pool.held, pool.size - pool.held["free"]
        table.add_row(
            name.replace("_", " "),
            ProgressBar(total=max(pool.size, 1), completed=used, width=18),
            f"{used} of {pool.size}",
            f"tree {held['tree']}, granted {held['granted']}, parked {held['parked']}",
        )
    return table


def _rates(now: Snapshot) -> RenderableType:
    reused = now.device_tokens + now.host_tokens
    asked = reused + sum(now.lost.values())
    share = f"{100 * reused / asked:.1f} %" if asked else "none"
    host = f", {100 * now.host_tokens / asked:.1f} % from the host" if now.host_tokens else ""
    reasons = sorted(now.lost.items(), key=lambda item: -item[1])[:3]
    gone = ", ".join(
        f"{pages / now.window_s:.1f} pages a second from the {tier}"
        for tier, pages in now.evicted.items()
    )
    table = Table.grid(padding=(0, 3))
    table.add_row("lookups", f"{now.lookups / now.window_s:.1f} a second")
    table.add_row("reused", f"{share} of {asked} tokens{host}")
    table.add_row("lost", ", ".join(f"{tokens} {why}" for why, tokens in reasons) or "nothing")
    table.add_row("evicted", gone or "nothing")
    table.add_row("waiting", f"{now.waiting} for room, {now.passes} passes are open")
    return table


def _queues(now: Snapshot) -> RenderableType:
    if not now.queues:
        return Text("none so far", style="dim")
    table = Table(box=None, padding=(0, 2))
    table.add_column("queue")
    for name in ("a second", "MB a second", "busy", "in flight"):
        table.add_column(name, justify="right")
    for name, queue in now.queues.items():
        table.add_row(
            name,
            f"{queue.copies / now.window_s:.1f}",
            f"{queue.bytes / now.window_s / 1e6:.3f}",
            f"{100 * queue.busy_s / now.window_s:.1f} %",
            str(queue.in_flight),
        )
    return table


def _requests(now: Snapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2))
    for name in ("request", "tokens", "reused", "of it loaded", "for", "state"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right")
    for request in now.requests:
        table.add_row(
            Text(request.name),
            str(request.tokens),
            str(request.reused),
            str(request.loaded),
            f"{request.seconds:.3f} s",
            Text(request.state, style="dim" if request.over else ""),
        )
    return table
