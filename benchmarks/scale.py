"""What grows with size: 1e4 to 1e6 nodes, many leaves against few, and long chains."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator

from benchmarks.forms import PAGE, Paths
from benchmarks.measure import GcWatch, resident_bytes, summary, wall_clock
from phloem.actors.tree import Tree
from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.dump import dump_tree, picture
from phloem.actors.tree.keys import TokenKey

__all__ = ["deep", "evict_by_leaves", "growth"]

Tell = Callable[[str], None]
_SAMPLES = 2000
_SWEPT = 1024  # nodes that are taken apart at once after a reset


class _Ids:
    """Page ids and slots that nobody grants or takes back."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self, count: int) -> array[int]:
        first = self._last + 1
        self._last += count
        return array("i", range(first, first + count))


def growth(nodes: int, tell: Tell) -> dict[str, float]:
    """A tree of one-page edges and depth 4: µs by operation, bytes a node, pauses."""
    paths = Paths(nodes, edge=PAGE)
    gc.collect()
    before = resident_bytes()
    tree, ids = Tree(page_size=PAGE), _Ids()
    with GcWatch() as watch:
        count = 0
        for key in paths:
            _insert(tree, ids, key)
            count += 1
            if count % 100_000 == 0:
                tell(f"  {count:,} nodes")
    leaf_bytes = sum(len(leaf) + 41 for leaf in paths.leaves)  # the benchmark's own copies
    grown = resident_bytes() - before - leaf_bytes
    out = {"nodes": float(count), "bytes_per_node": grown / count}
    out["longest_pause_ms"] = watch.longest_ns / 1e6
    out["pauses_ms"] = watch.total_ns / 1e6
    keys = paths.some(_SAMPLES, more=PAGE)
    out["match_us"] = _median(tree.match, keys)
    keys = paths.some(_SAMPLES, more=PAGE)  # others: the tree has noted where the first ones led
    out["lease_us"] = _median(lambda key: tree.release(tree.acquire(key, owner="b")[0]), keys)
    keys = paths.some(_SAMPLES, more=PAGE)
    out["insert_us"] = _median(lambda key: _insert(tree, ids, key), keys)
    out["evict_us"] = _median(lambda _: tree.evict(1), keys)
    begun = wall_clock()
    gc.collect()
    out["full_collection_ms"] = (wall_clock() - begun) / 1e6
    return out


def _insert(tree: Tree, ids: _Ids, key: TokenKey) -> None:
    """A whole request: lease, insert with a state, release."""
    lease, match = tree.acquire(key, owner="b")
    pages = ids((key.length - match.usable) // PAGE)
    tree.insert(key, pages, pages[-1] if pages else 0, lease)
    tree.release(lease)


def _median(call: Callable[[TokenKey], object], keys: list[TokenKey]) -> float:
    return summary(_each(len(keys), lambda number: call(keys[number])))["p50_us"]


def evict_by_leaves(leaves: int) -> float:
    """µs to evict one page from a tree of so many single-page leaves."""
    tree, ids, paths = Tree(page_size=PAGE), _Ids(), Paths(2)

    def keys(count: int) -> Iterator[TokenKey]:
        return (TokenKey(paths.tokens(PAGE)) for _ in range(count))

    for key in keys(leaves):
        _insert(tree, ids, key)
    samples: list[int] = []
    for key in keys(1000):  # one comes, one goes: the number of leaves stays
        _insert(tree, ids, key)
        begun = wall_clock()
        gone, _ = tree.evict(1)
        samples.append(wall_clock() - begun)
        if gone.pages != 1:
            raise AssertionError(f"asked for one page, {gone.pages} went")
    return summary(samples)["p50_us"]


def deep(nodes: int) -> dict[str, float]:
    """A chain with a state at each of so many tokens, built through one growing lease.

    µs a call, the least of a few where it walks the chain, the median of many where it does not.
    """
    tree, tokens = Tree(page_size=1), array("i", range(1, nodes + 1))
    key = TokenKey.of(tokens)
    lease, _ = tree.acquire(key, owner="b")
    inserts = _each(
        nodes, lambda at: tree.insert(key, array("i", (at,)), at, lease, length=at), first=1
    )
    tree.release(lease)
    out = {
        "insert the next": summary(inserts[-_SAMPLES:])["p50_us"],
        "match all": _least(lambda: tree.match(TokenKey.of(tokens))),
    }

    def again() -> None:
        tree.release(tree.acquire(TokenKey.of(tokens), owner="b")[0])

    out["match, lease and release, the only one"] = _least(again)
    other, _ = tree.acquire(key, owner="b")
    out["match, lease and release, beside another"] = _least(again)
    tree.release(other)
    out["dump 1,000 nodes"] = _least(lambda: picture(dump_tree(tree)))
    out["audit all"] = _least(lambda: audit_tree(tree))
    out["evict one"] = summary(_each(_SAMPLES // 2, lambda _: tree.evict(1)))["p50_us"]
    out["reset"] = _least(tree.reset, times=1)
    swept = _each(-(-nodes // _SWEPT), lambda _: tree.sweep(_SWEPT))
    out["of the sweep after it, a slice of 1,024"] = summary(swept)["p50_us"]
    return out


def _each(count: int, call: Callable[[int], object], first: int = 0) -> list[int]:
    """Nanoseconds of each call, with consecutive numbers."""
    samples: list[int] = []
    for number in range(first, first + count):
        begun = wall_clock()
        call(number)
        samples.append(wall_clock() - begun)
    return samples


def _least(call: Callable[[], object], times: int = 5) -> float:
    return min(_each(times, lambda _: call())) / 1e3
