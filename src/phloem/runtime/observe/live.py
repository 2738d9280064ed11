"""A running cache for `phloem top`: a sink that answers on a local socket.

    with serve_top("cache.sock") as live:
        async with CacheRuntime(config, events=several(log, live)) as cache: ...

The sink only puts the event and its time into a bounded queue; a thread of its own keeps the
figures and answers. Who connects sends lines and gets one back for each: a `Snapshot` as JSON. The
cache never waits for anybody; what does not fit is missed, counted and shown.
"""

from __future__ import annotations

import selectors
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from errno import EINVAL
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import msgspec

from phloem.errors import InvalidRequest
from phloem.events import Event
from phloem.runtime.observe.figures import Figures
from phloem.runtime.observe.snapshot import Snapshot, snapshot

__all__ = ["EVERY_MAX_S", "LiveEvents", "LiveView", "serve_top"]

KEPT = 2000  # spans of each kind that are remembered
_CLIENTS_MAX = 8
_LINE_MAX = 64
_WAKE_S = 0.1
_BACKLOG = 16
EVERY_MAX_S = 1e6
"""So many seconds may be between two looks."""


class LiveEvents:
    """See `serve_top`, which makes it."""

    def __init__(self, path: Path, capacity: int, clock: Callable[[], float]) -> None:
        self.missed = 0  # events that found the queue full
        self._path = path
        self._capacity = capacity
        self._clock = clock
        self._queue: deque[tuple[float, Event]] = deque()
        self._figures = Figures(kept=KEPT)  # the thread's alone
        self._listener = _listen(path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, bytes] = {}  # with the line that has begun
        self._closed = False
        self._thread = Thread(target=self._serve, name="phloem-top", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if len(self._queue) >= self._capacity:
            self.missed += 1
        else:
            self._queue.append((self._clock(), event))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let everybody go and remove the socket. Idempotent; takes up to a tenth of a second."""
        if self._closed:
            return
        self._closed = True
        self._thread.join()
        for client in tuple(self._clients):
            self._let_go(client)
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    # -- in the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed:
            ready = self._selector.select(_WAKE_S)
            # Before anybody is answered, what he has seen happen; no more, else it may never end.
            for _ in range(len(self._queue)):
                self._figures.add(*self._queue.popleft())
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)

    def _welcome(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone, or there is no descriptor left: then not at once again
            time.sleep(_WAKE_S)
            return
        if len(self._clients) >= _CLIENTS_MAX:
            client.close()
            return
        client.setblocking(False)
        self._clients[client] = b""
        self._selector.register(client, selectors.EVENT_READ)

    def _answer(self, client: socket.socket) -> None:
        """Answer each whole line: the seconds between two looks. Who sends anything else goes."""
        try:
            text = client.recv(_LINE_MAX)
            *lines, rest = (self._clients[client] + text).split(b"\n")
            if not text or len(rest) > _LINE_MAX:
                self._let_go(client)
                return
            self._clients[client] = rest
            for line in lines:
                every_s = float(line)
                if not 0 < every_s <= EVERY_MAX_S:
                    raise ValueError(f"every {every_s} seconds")
                now = snapshot(self._figures, every_s, missed=self.missed)
                answer = msgspec.json.encode(now) + b"\n"
                if client.send(answer) < len(answer):  # it does not read
                    self._let_go(client)
                    return
        except (OSError, ValueError):
            self._let_go(client)

    def _let_go(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        del self._clients[client]
        client.close()


def serve_top(
    path: str | Path, *, capacity: int = 65_536, clock: Callable[[], float] = time.time
) -> LiveEvents:
    """A sink that shows a cache to whoever runs `phloem top PATH`; only this user can.

    At most `capacity` events wait for the thread that keeps the figures. Raises `InvalidRequest`
    for a capacity below 1, and `OSError` when there is something at `path`, unless it is the socket
    of a process that has died.
    """
    if capacity < 1:
        raise InvalidRequest(f"capacity is {capacity}; it starts at 1")
    return LiveEvents(Path(path), capacity, clock)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_dead(path)
        listener.bind(str(path))
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)  # before anybody can connect: it does not listen
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _at(path, error) from error
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _at(path: Path, error: OSError) -> OSError:
    """The same error with the path in it, which sockets leave out."""
    return OSError(error.errno or EINVAL, error.strerror or str(error), str(path))


def _remove_if_dead(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


class LiveView:
    """The other end: looks at a running cache. Raises `OSError` when nobody serves at `path`."""

    def __init__(self, path: str | Path, *, timeout_s: float = 5.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise _at(Path(path), error) from error
        except BaseException:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rb")

    def look(self, every_s: float) -> Snapshot:
        """What the cache does now. Raises `OSError` when it has ended or takes no more viewers."""
        try:
            self._socket.sendall(b"%g\n" % every_s)
            line = self._lines.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line.endswith(b"\n"):
            raise ConnectionError("the cache has ended, or takes no more viewers")
        return msgspec.json.decode(line, type=Snapshot)

    def close(self) -> None:
        """Leave."""
        self._lines.close()
        self._socket.close()
