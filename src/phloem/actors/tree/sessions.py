"""Sessions: requests that belong together, whose latest boundary is worth keeping for the next.

A session stands on the deepest boundary that one of its requests finished at. That is a preference
for policies that look at it, never a protection: when the boundary goes, the session recedes to the
nearest one above. It ends when it is closed or when its time has come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

from phloem.actors.tree.node import Node, state_anywhere
from phloem.errors import InvalidRequest

__all__ = ["Session", "Sessions"]


class Session:
    """One session; requests hold the object, so that one of a closed session changes nothing."""

    __slots__ = ("anchor", "ends", "name", "number", "open")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ends = 0  # the time when it ends; 0: never
        self.open = True
        self.anchor: Node | None = None

    def __repr__(self) -> str:
        where = "nowhere" if self.anchor is None else f"at {self.anchor.end}"
        return f"Session({self.name!r}, {'open' if self.open else 'closed'}, {where})"


class Sessions:
    """The open sessions, at most `limit`: then the one that was used longest ago is closed."""

    def __init__(self, limit: int, stateful: bool, lowered: Callable[[Node], None]) -> None:
        if limit < 1:
            raise InvalidRequest(f"{limit} sessions at most; the limit starts at 1")
        self._limit = limit
        self._stateful = stateful
        self._lowered = lowered  # told of nodes whose score has fallen
        self.open: OrderedDict[str, Session] = OrderedDict()  # the one used longest ago first
        self._standing: dict[int, list[Session]] = {}  # by node id
        self._ending: list[tuple[int, int, Session]] = []
        self._next = 0

    def join(self, name: str, ends: int) -> Session:
        """The session of that name, opened if need be; it ends at the time `ends` (0: never)."""
        session = self.open.pop(name, None)
        if session is None:
            self._next += 1
            session = Session(name, self._next)
            if len(self.open) >= self._limit:
                self.close(next(iter(self.open)))
        self.open[name] = session
        session.ends = ends
        if ends:
            heappush(self._ending, (ends, session.number, session))
            if len(self._ending) > 4 * self._limit:
                self._ending = sorted(
                    (one.ends, one.number, one) for one in self.open.values() if one.ends
                )
        return session

    def stand(self, session: Session, node: Node) -> None:
        """One of its requests has finished at `node`; nothing for a session that was closed."""
        if session.open:
            self._leave(session)
            self._enter(session, self._boundary(node))

    def close(self, name: str) -> bool:
        """End a session, if it is open; what it stood on becomes ordinary cache."""
        session = self.open.pop(name, None)
        if session is None:
            return False
        session.open = False
        self._leave(session)
        return True

    def expire(self, time: int) -> None:
        """Close the sessions whose time has come."""
        ending = self._ending
        while ending and ending[0][0] <= time:
            session = heappop(ending)[2]
            if session.open and 0 < session.ends <= time:
                self.close(session.name)

    def recede(self, node: Node) -> None:
        """`node` is about to lose its boundary: who stands there goes to the nearest one above."""
        receding = self._standing.pop(node.id, ())
        node.sessions -= len(receding)
        if receding:
            self._lowered(node)
        for session in receding:
            session.anchor = None
            parent = node.parent
            assert parent is not None
            self._enter(session, self._boundary(parent))

    def forget(self) -> None:
        """The cache was reset: the sessions stay open and stand nowhere."""
        for session in self.open.values():
            session.anchor = None
        self._standing.clear()

    def _boundary(self, node: Node) -> Node | None:
        """The nearest boundary at or above `node`; None when that is the root."""
        at = node
        while at.parent is not None:
            if not self._stateful or state_anywhere(at):
                return at
            at = at.parent
        return None

    def _enter(self, session: Session, node: Node | None) -> None:
        session.anchor = node
        if node is not None:
            node.sessions += 1
            self._standing.setdefault(node.id, []).append(session)

    def _leave(self, session: Session) -> None:
        node = session.anchor
        if node is None:
            return
        session.anchor = None
        standing = self._standing[node.id]
        standing.remove(session)
        if not standing:
            del self._standing[node.id]
        node.sessions -= 1
        if not node.sessions:
            self._lowered(node)
