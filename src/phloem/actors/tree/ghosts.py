"""What was cached once: a bounded record of evicted edges, so that a miss can be explained.

An edge is found again by what comes before it: its namespace and a checksum of the whole prefix,
which does not depend on how the prefix is cut into nodes. A wrong checksum can only make an
explanation wrong, never an answer, and never across namespaces.
"""

from __future__ import annotations

from collections import deque
from zlib import crc32

import msgspec

from phloem.actors.tree.keys import common_bytes
from phloem.actors.tree.node import NO_MARK, Node

__all__ = ["NOTHING", "Ghosts", "Remembered", "mark_after", "mark_of"]

_CRC = 0xFFFF_FFFF
_MARKED_AT_ONCE = 4096  # bytes of an edge whose mark is computed before anybody asks for it


def mark_after(mark: int, data: bytes) -> int:
    """The mark of a prefix that goes on with `data`."""
    return (mark & ~_CRC) | crc32(data, mark & _CRC)


def mark_of(node: Node) -> int:
    """The mark of the prefix up to the node's end; noted in the nodes: each edge is read once."""
    if node.mark != NO_MARK:
        return node.mark
    unmarked: list[Node] = []
    above: Node | None = node
    while above is not None and above.mark == NO_MARK:
        unmarked.append(above)
        above = above.parent
    assert above is not None, "a root has a mark from the beginning"
    mark = above.mark
    for each in reversed(unmarked):
        mark = each.mark = mark_after(mark, each.edge)
    return mark


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """The past of data that are not in the tree; lengths are in bytes of the key.

    `evicted` were there and went at use `at` to make room for `by`. `forgotten`: what follows was
    probably there too, but its record has gone.
    """

    evicted: int = 0
    by: str = ""
    at: int = 0
    forgotten: bool = False


NOTHING = Remembered()


_Ghost = tuple[bytes, str, int, int]  # edge, who needed its room, at which use, the mark after it
_Place = int  # where an edge begins: the mark after its first page


def _mark_within(mark: int, ghost: _Ghost, length: int) -> int:
    """The mark of a prefix that goes on with the first `length` bytes of a ghost's edge."""
    edge, _, _, end = ghost
    return end if length == len(edge) and end != NO_MARK else mark_after(mark, edge[:length])


class Ghosts:
    """The latest evicted edges: at least half of `limit` and `bytes_max`, at most all of it.

    Records come and go by generations, so that nothing has to be done for each that goes. Of those
    that have gone, the places alone are known for some generations more. A limit of 0 records
    nothing.
    """

    def __init__(self, page_bytes: int, limit: int = 4096, bytes_max: int = 1 << 22) -> None:
        self.any = False  # something was evicted since the beginning
        self._page_bytes = page_bytes
        self._half = limit // 2
        self._half_bytes = bytes_max // 2
        self._bytes = 0  # of the recent ones
        self._recent: dict[_Place, _Ghost] = {}
        self._older: dict[_Place, _Ghost] = {}
        self._gone: deque[dict[_Place, None]] = deque(maxlen=4)

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def note(self, place: _Place, edge: bytes, by: str, at: int, end: int = NO_MARK) -> None:
        """`edge` has left the cache; the mark after its first page is `place`, after all `end`."""
        if not self._half:
            return
        self.any = True
        self._recent[place] = edge, by, at, end
        self._bytes += len(edge)
        if len(self._recent) >= self._half or self._bytes > self._half_bytes:
            if self._older:
                self._gone.appendleft(dict.fromkeys(self._older))
            self._older, self._recent, self._bytes = self._recent, {}, 0

    def revived(self, mark: int, edge: bytes) -> int:
        """`edge` is in the cache again: only what it does not cover remains a ghost.

        Returns the mark after `edge`, or `NO_MARK` where it takes long to compute.
        """
        offset, stop = 0, len(edge)
        while offset < stop:
            place = mark_after(mark, edge[offset : offset + self._page_bytes])
            older, recent = self._older.pop(place, None), self._recent.pop(place, None)
            ghost = recent or older
            if ghost is None:
                break
            was, by, at, end = ghost
            if end != NO_MARK and edge.startswith(was, offset):  # all of it, as mostly
                offset += len(was)
                mark = end
                continue
            common = common_bytes(edge, offset, stop, was, self._page_bytes)
            offset += common
            mark = _mark_within(mark, ghost, common)
            if common < len(was):
                rest = was[common:]
                self.note(mark_after(mark, rest[: self._page_bytes]), rest, by, at, end)
        if stop - offset > _MARKED_AT_ONCE:
            return NO_MARK
        return mark_after(mark, edge[offset:]) if offset < stop else mark

    def recall(self, mark: int, data: bytes, start: int, stop: int) -> Remembered:
        """What is known of `data[start:stop]`, which is not cached after the prefix of `mark`."""
        offset, by, at = start, "", 0
        while offset < stop:
            place = mark_after(mark, data[offset : offset + self._page_bytes])
            ghost = self._recent.get(place) or self._older.get(place)
            if ghost is None:
                for gone in self._gone:
                    if place in gone:
                        return Remembered(offset - start, by, at, forgotten=True)
                break
            edge, noted_by, noted_at, end = ghost
            if offset == start:
                by, at = noted_by, noted_at
            if end != NO_MARK and data.startswith(edge, offset, stop):  # all of it, as mostly
                offset += len(edge)
                mark = end
                continue
            common = common_bytes(data, offset, stop, edge, self._page_bytes)
            offset += common
            if offset < stop:
                mark = _mark_within(mark, ghost, common)
        return NOTHING if offset == start else Remembered(offset - start, by, at)

    def clear(self) -> None:
        """The cache was reset: nothing before counts."""
        self._recent, self._older, self._bytes = {}, {}, 0
        self._gone.clear()
        self.any = False
