"""What other policies would have made of the same requests: small trees, served a sample.

A shadow is a tree like the one it stands for, without tiers, pages or copies, in which one policy
has as much of the room as its share of the requests. Requests are sampled by whole conversations,
since what saves anything is shared by the requests of one: by a checksum of the shortest of their
beginnings (of 1, 2, 4, ... pages) that is not common to very many. Nothing is drawn by chance.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from phloem.actors.tree.ghosts import mark_of
from phloem.actors.tree.keys import TOKEN_BYTES, Namespace, TokenKey
from phloem.actors.tree.node import NO_SLOT
from phloem.actors.tree.scoring import Policy, Visit, Watched

if TYPE_CHECKING:
    from phloem.actors.tree.tree import Tree

__all__ = ["Beginnings", "Shadows"]

_NODES_MAX = 512  # of one shadow, and the bytes of its keys; then half as many requests are taken
_BYTES_MAX = 1 << 24
_MEMORY = 256  # sampled requests over which the tokens are averaged that each has saved
_FADES = 64  # requests that evict, after which a capacity that is not reached any more has faded
_COMMON = 16  # a beginning is common that one in so many requests has
_COUNTED_MAX = 512  # beginnings whose requests are counted, until all counts are halved
_SLOT = 1  # of every state: nobody looks at them


class Beginnings:
    """Which of a request's beginnings tells its conversation from others."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._counts: dict[int, int] = {}
        self._requests = 0

    def of(self, data: bytes) -> int:
        """The checksum of the shortest that is not common; of all of it if there is none."""
        self._requests += 1
        size, mark = self._page_bytes, 0
        while True:
            mark = crc32(data[:size])
            count = self._counts[mark] = self._counts.get(mark, 0) + 1
            if size >= len(data) or count * _COMMON <= self._requests + _COMMON:
                break
            size *= 2
        if len(self._counts) > _COUNTED_MAX:
            self._counts = {each: count // 2 for each, count in self._counts.items() if count > 1}
            self._requests //= 2
        return mark


class _Shadow:
    """One policy, and the tokens that its hits have saved lately."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.saved = 0.0

    def serve(self, key: TokenKey, limit: int, room: tuple[int, int], shared: bool) -> None:
        """A request that finds what it can, makes room and leaves all that it has."""
        tree = self.tree
        lease, match = tree.open(key, owner="", limit=limit)
        self.saved += (match.usable - self.saved) / _MEMORY
        whole = key.length // tree.page_size * tree.page_size
        wanted = {one.position for one in lease.wanted if one.position <= whole}
        at_end = tree.wanted_at_end(lease, whole) if tree.has_states else None
        if at_end is not None and at_end.position:
            wanted.add(at_end.position)
        pages = (whole - match.kv_prefix) // tree.page_size
        self._make_room(max(0, pages), len(wanted), room, shared)
        for at in sorted(wanted | {whole}):
            if at > lease.boundary or at in wanted:
                count = (at - lease.boundary) // tree.page_size
                state = _SLOT if at in wanted else NO_SLOT
                tree.insert(key, array("i", bytes(4 * count)), state, lease, length=at)
        tree.release(lease)

    def _make_room(self, pages: int, states: int, room: tuple[int, int], shared: bool) -> None:
        tree = self.tree
        pages += tree.radix.pages - room[0]
        states += tree.radix.states - room[1]
        if shared:
            size, weight = tree.page_size, tree.state_weight
            missing = pages * size + states * weight
            tree.evict_bytes(max(0, missing), page_bytes=size, state_bytes=weight)
        else:
            tree.evict(max(0, pages), max(0, states))


class Shadows:
    """A shadow for each of some policies, all served the same sample; which one has saved most.

    Each request costs a checksum, each sampled one a request in every shadow. As long as nothing is
    evicted all requests are taken, while the shadows are small.
    """

    def __init__(self, tree: Watched, kinds: Sequence[Callable[[], Policy]]) -> None:
        self._tree = tree
        self._kinds = kinds
        self._beginnings = Beginnings(tree.page_size * TOKEN_BYTES)
        self._shadows = [_Shadow(tree.twin(kind())) for kind in kinds]
        self.one_in = 1  # requests
        self.sampled = 0
        self._full = (0.0, 0.0)  # pages and states that the tree has room for
        self._evicted = False

    def evicted(self) -> None:
        """The tree is full."""
        self._evicted = True

    @property
    def trees(self) -> list[Tree]:
        """The shadows themselves, by policy."""
        return [shadow.tree for shadow in self._shadows]

    @property
    def saved(self) -> list[float]:
        """Mean tokens saved for each sampled request lately, by policy."""
        return [shadow.saved for shadow in self._shadows]

    def visited(self, visit: Visit) -> bool:
        """Serve a request if it is sampled; whether it was."""
        if self._evicted:
            self._evicted = False
            kept = 1 - 1 / _FADES
            pages, states = self._tree.held()
            self._full = max(pages, self._full[0] * kept), max(states, self._full[1] * kept)
        data, base = visit.data, visit.base
        if base is None or not data or self._beginnings.of(data) % self.one_in:
            return False
        space = Namespace(salt=str(mark_of(base) >> 32))
        self.sampled += 1
        limit = visit.stop // TOKEN_BYTES
        room = round(self._full[0] / self.one_in), round(self._full[1] / self.one_in)
        if not any(self._full):
            room = 1 << 60, 1 << 60
        for shadow in self._shadows:
            shadow.serve(TokenKey(data, space), limit, room, self._tree.shared)
        radix = [shadow.tree.radix for shadow in self._shadows]
        size = TOKEN_BYTES * self._tree.page_size
        if any(one.nodes > _NODES_MAX or one.pages * size > _BYTES_MAX for one in radix):
            self._take_fewer()
        return True

    def _take_fewer(self) -> None:
        """Half as many from now on, for shadows that begin anew; what was seen of them counts."""
        self.one_in *= 2
        for shadow, kind in zip(self._shadows, self._kinds, strict=True):
            shadow.tree = self._tree.twin(kind())
