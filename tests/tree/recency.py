"""When each prefix was used, by the definitions alone, and what a policy has go first by that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import Fifo, Lfu, Lru, PriorityFirst, SessionFirst, Slru
from phloem.actors.tree.scoring import Policy

Prefix = tuple[tuple[str, str, bytes], bytes]


class Uses:
    """For each prefix that is cached: its latest use, how often it was used, since when it is so.

    A use of a prefix is one of any key that begins with it: an insert, or a lease, when that ends.
    Of states only the one at the end of what is used. Inserts and acquires count.
    """

    def __init__(self) -> None:
        self._now = 0
        self._used: dict[Prefix, int] = {}
        self._hits: dict[Prefix, int] = {}
        self._born: dict[Prefix, int] = {}
        self._state_used: dict[Prefix, int] = {}

    def acquired(self, path: Iterable[Prefix]) -> None:
        for prefix in path:
            self._hits[prefix] += 1

    def inserted(self, path: Sequence[Prefix], beyond: int) -> None:
        """A key, of which an insert's own lease covers the prefixes before number `beyond`."""
        self._now += 1
        for number, prefix in enumerate(path):
            self._used[prefix] = self._now
            self._born.setdefault(prefix, self._now)
            self._hits[prefix] = self._hits.get(prefix, 0) + (number >= beyond)

    def released(self, path: Iterable[Prefix]) -> None:
        self._now += 1
        for prefix in path:
            self._used[prefix] = self._now

    def state_used(self, prefix: Prefix) -> None:
        self._now += 1
        self._state_used[prefix] = self._now

    def as_one(self, pages: Sequence[Prefix]) -> None:
        """These are one node, which goes as one; perhaps two that were joined.

        A use of a part is one of all of it, and it is as new as its end.
        """
        used, hits = (max(map(each.__getitem__, pages)) for each in (self._used, self._hits))
        for prefix in pages:
            self._used[prefix], self._hits[prefix] = used, hits
            self._born[prefix] = self._born[pages[-1]]

    def gone(self, prefix: Prefix) -> None:
        for each in (self._used, self._hits, self._born):
            del each[prefix]

    def clear(self) -> None:
        for each in (self._used, self._hits, self._born, self._state_used):
            each.clear()

    def score(
        self, policy: Policy, node: Node, pages: Sequence[Prefix], *, state: bool
    ) -> tuple[int, ...] | None:
        """The order in which it goes, the smallest first; None where this knows no definition."""
        end, kind = pages[-1], type(policy)
        used = self._state_used[end] if state else self._used[end]
        if isinstance(policy, PriorityFirst | SessionFirst) and type(policy.within) is Lru:
            return policy.class_of(node), used
        if kind is Lru:
            return (used,)
        if kind is Fifo:
            return (self._born[end],)
        if kind is Lfu:
            return self._hits[end], used
        if isinstance(policy, Slru):
            return self._hits[end] >= policy.twice, used
        return None
