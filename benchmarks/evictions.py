"""What an eviction costs under each policy, in trees of 10,000 and 100,000 nodes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from time import process_time

from phloem.actors.tree import TokenKey, Tree

__all__ = ["POLICIES", "eviction_us"]

POLICIES = ("lru", "slru", "benefit")
_PAGE, _STATE = 16, 400  # bytes, so that a state weighs as much as 25 pages
_EDGE = 4  # pages
_SETTLED = 4500  # victims before it is measured: what policies remember of the evicted is full


def _grown(policy: str, nodes: int, rng: random.Random) -> tuple[Tree, Callable[[], None]]:
    """A tree of conversations with a state at each turn, and what serves one turn more."""
    tree = Tree(page_size=1, policy=policy, state_weight=_STATE // _PAGE)
    talks: list[list[int]] = []
    fresh = iter(range(1, 2**31))

    def serve() -> None:
        if talks and rng.random() < 0.7:
            talk = talks[min(int(rng.expovariate(0.05)), len(talks) - 1)]
        else:
            talk = list[int]()
            talks.insert(0, talk)
            del talks[2 * nodes :]
        talk.extend(next(fresh) for _ in range(_EDGE))
        key = TokenKey.of(talk)
        lease, _ = tree.open(key, owner="", limit=key.length - 1)
        pages = array("i", [next(fresh) for _ in range(key.length - lease.boundary)])
        tree.insert(key, pages, next(fresh), lease)
        tree.release(lease)

    while tree.radix.nodes < nodes:
        serve()
    return tree, serve


def _clock_s() -> float:
    """What reading the clock once takes."""
    spent: list[float] = []
    for _ in range(1000):
        began = process_time()
        spent.append(process_time() - began)
    return min(spent)


def eviction_us(policy: str, nodes: int, victims: int = 4000) -> float:
    """CPU microseconds for each victim, while turns keep coming; every victim counts."""
    rng = random.Random(nodes)
    tree, serve = _grown(policy, nodes, rng)
    gone, spent = 0, 0.0
    inner = tree.policy.evicted

    def counted(score: int, now: int, /) -> None:
        nonlocal gone
        gone += 1
        inner(score, now)

    tree.policy.evicted = counted  # type: ignore[method-assign]  # counts, then does as before

    def evict() -> None:
        tree.evict_bytes(_EDGE * _PAGE + _STATE, page_bytes=_PAGE, state_bytes=_STATE)

    while gone < _SETTLED:
        serve()
        evict()
    gone, clock = 0, _clock_s()
    while gone < victims:
        serve()
        began = process_time()
        evict()
        spent += process_time() - began - clock
    return spent / gone * 1e6
