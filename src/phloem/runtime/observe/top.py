"""`phloem top`: a cache at work, in the terminal, from the log that it writes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phloem.errors import InvalidRequest
from phloem.runtime.observe.figures import Figures, PoolCounts
from phloem.runtime.tracing import Entry, EntryDecoder

__all__ = ["LogTail", "picture", "watch"]

_KEPT = 2000  # spans of each kind that are remembered
_SLOWEST = 8
_READ_BYTES = 1 << 20


class LogTail:
    """Reads what has been appended to a log since it was looked at last."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115  closed by `close`
        self._decoder = EntryDecoder()
        self._rest = b""

    def read(self) -> list[Entry]:
        """The whole lines that are new, of at most a megabyte; a torn one waits for its end.

        Raises `InvalidRequest` for a line that is no event.
        """
        text = self._rest + self._file.read(_READ_BYTES)
        *lines, self._rest = text.split(b"\n")
        return [self._decoder.decode(line) for line in lines if line]

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
    """Show the log until interrupted, or once. Raises `InvalidRequest` for a bad interval."""
    if every_s <= 0:
        raise InvalidRequest(f"every {every_s} seconds; the interval is above 0")
    console = console or Console()
    tail, figures = LogTail(path), Figures(kept=_KEPT)
    try:
        _catch_up(tail, figures)
        if once:
            console.print(picture(figures, every_s))
            return
        with Live(picture(figures, every_s), console=console, auto_refresh=False) as live:
            while True:
                sleep(every_s)
                _catch_up(tail, figures)
                live.update(picture(figures, every_s), refresh=True)
    finally:
        tail.close()


def _catch_up(tail: LogTail, figures: Figures) -> None:
    while entries := tail.read():
        for entry in entries:
            figures.add(entry.time, entry.event)


def picture(figures: Figures, window_s: float) -> RenderableType:
    """What `figures` say now; rates are those of the last ten windows."""
    if figures.started is None:
        return Panel(Text("no runtime has started in this log"))
    seconds = max(10 * window_s, 1e-9)
    parts = {
        "pools": _pools(figures.pools),
        f"rates, over {seconds:g} s": _rates(figures, figures.last - seconds, seconds),
        "requests: the oldest that run, then the latest that ended": _requests(figures),
    }
    return Group(*(Panel(part, title=title, title_align="left") for title, part in parts.items()))


def _pools(pools: dict[str, PoolCounts]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, pool in pools.items():
        held = pool.held
        table.add_row(
            name,
            ProgressBar(total=max(pool.size, 1), completed=pool.size - held["free"], width=30),
            f"{pool.size - held['free']} of {pool.size}",
            f"tree {held['tree']}, granted {held['granted']}, parked {held['parked']}",
        )
    return table


def _rates(figures: Figures, since: float, seconds: float) -> RenderableType:
    lookups = [lookup for lookup in figures.lookups if lookup.time > since]
    reused = sum(lookup.device + lookup.host for lookup in lookups)
    lost: dict[str, int] = {}
    for lookup in lookups:
        for why, tokens in lookup.lost.items():
            lost[why] = lost.get(why, 0) + tokens
    asked = reused + sum(lost.values())
    gone = [eviction for eviction in figures.evictions if eviction.time > since]
    copied = [copy for copy in figures.copies if copy.end is not None and copy.end > since]
    reasons = sorted(lost.items(), key=lambda item: -item[1])[:3]
    table = Table.grid(padding=(0, 3))
    table.add_row("lookups", f"{len(lookups) / seconds:.1f} a second")
    share = f"{100 * reused / asked:.1f} %" if asked else "none"
    table.add_row("reused", f"{share} of {asked} tokens")
    table.add_row("lost", ", ".join(f"{tokens} {why}" for why, tokens in reasons) or "nothing")
    table.add_row("evicted", f"{sum(one.pages for one in gone) / seconds:.1f} pages a second")
    table.add_row("copied", f"{sum(copy.bytes for copy in copied) / seconds / 1e6:.3f} MB a second")
    table.add_row(
        "waiting",
        f"{len(figures.waiting)} for room, {len(figures.in_flight)} copies, "
        f"{len(figures.open_steps)} passes",
    )
    return table


def _requests(figures: Figures) -> RenderableType:
    running = sorted(figures.running.values(), key=lambda request: request.start)
    ended = deque((r for r in figures.requests if r.end is not None), maxlen=_SLOWEST)
    table = Table(box=None, padding=(0, 2))
    for name in ("request", "tokens", "reused", "for", "state"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right")
    for request in running[:_SLOWEST]:
        state = "computes" if request.first_step is not None else "begins"
        if any(wait.end is None for wait in request.waits):
            state = "waits for room"
        age = figures.last - request.start
        table.add_row(
            Text(request.name), str(request.tokens), str(request.reused), f"{age:.3f} s", state
        )
    for request in reversed(ended):
        age = (request.end or request.start) - request.start
        table.add_row(
            Text(request.name), str(request.tokens), str(request.reused), f"{age:.3f} s",
            Text(request.how, style="dim"),
        )  # fmt: skip
    return table
