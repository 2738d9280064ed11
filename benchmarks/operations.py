"""µs for match, lease, insert and evict, by tree size and by prompt length, through each form."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeVar

from benchmarks.floors import hop_cost, hop_floors
from benchmarks.forms import (
    EDGE,
    PAGE,
    AwaitForm,
    FloorForm,
    Form,
    NowaitForm,
    Paths,
    TreeForm,
    open_runtime,
)
from benchmarks.measure import Summary, involuntary_switches, summary, wall_clock
from phloem.actors.tree.keys import TokenKey
from phloem.runtime.cache import CacheRuntime

__all__ = ["Costs", "by_length", "by_size", "hops"]

Costs = dict[str, dict[str, Summary]]  # by form, then by operation
Tell = Callable[[str], None]
T = TypeVar("T")
_SAMPLES = 1000


def _timed(call: Callable[[T], object], items: Sequence[T]) -> Summary:
    """One sample for each item; those in which the kernel took the core away are dropped."""
    samples: list[int] = []
    for item in items:
        switches = involuntary_switches()
        begun = wall_clock()
        call(item)
        took = wall_clock() - begun
        if involuntary_switches() == switches:
            samples.append(took)
    return summary(samples)


def _anew(keys: list[TokenKey]) -> list[TokenKey]:
    """The same keys, about which the tree has noted nothing yet."""
    return [TokenKey(key.data) for key in keys]


def _costs(form: Form, paths: Paths, fresh: list[TokenKey], pages: int) -> dict[str, Summary]:
    """Match and lease keys that lead to leaves; insert `fresh`; evict `pages` as often."""
    keys = paths.some(_SAMPLES)
    out = {"match": _timed(form.match, keys), "lease": _timed(form.lease, _anew(keys))}
    samples: list[int] = []
    for key in fresh:
        job = form.begin(key)
        begun = wall_clock()
        form.insert(job)
        samples.append(wall_clock() - begun)
        form.end(job)
    out["insert"] = summary(samples)
    out["evict"] = _timed(form.evict, [pages] * len(fresh))
    return out


async def _costs_awaited(
    form: AwaitForm, paths: Paths, fresh: list[TokenKey], pages: int
) -> dict[str, Summary]:
    keys = paths.some(_SAMPLES)
    samples: dict[str, list[int]] = {"match": [], "lease": [], "insert": [], "evict": []}
    for key, same in zip(keys, _anew(keys), strict=True):
        begun = wall_clock()
        await form.match(key)
        matched = wall_clock()
        await form.lease(same)
        samples["lease"].append(wall_clock() - matched)
        samples["match"].append(matched - begun)
    for key in fresh:
        job = await form.begin(key)
        begun = wall_clock()
        await form.insert(job)
        samples["insert"].append(wall_clock() - begun)
        await form.end(job)
    for _ in fresh:
        begun = wall_clock()
        await form.evict(pages)
        samples["evict"].append(wall_clock() - begun)
    return {name: summary(values) for name, values in samples.items()}


def _set_inline(cache: CacheRuntime, inline: bool) -> None:
    cache.core.domain.inline = inline


async def _through_runtime(
    paths: Paths, room: int, make: Callable[[], list[TokenKey]], pages: int, tell: Tell
) -> Costs:
    cache = await open_runtime(room, paths.nodes + 4 * _SAMPLES)
    out: Costs = {}
    form = NowaitForm(cache, paths)
    tell(f"  {form.name}")
    out[form.name] = _costs(form, paths, make(), pages)
    for inline in (True, False):
        _set_inline(cache, inline)
        awaited = AwaitForm(cache, inline=inline)
        tell(f"  {awaited.name}")
        out[awaited.name] = await _costs_awaited(awaited, paths, make(), pages)
    _set_inline(cache, True)
    await cache.audit()
    await cache.close()
    return out


def _all_forms(
    nodes: int, room: int, make: Callable[[Paths], list[TokenKey]], pages: int, tell: Tell
) -> Costs:
    paths = Paths(nodes)
    out: Costs = {}
    for kind in (FloorForm, TreeForm):
        tell(f"  {kind.name}")
        form: Form = kind(paths)
        out[form.name] = _costs(form, paths, make(paths), pages)
    out.update(asyncio.run(_through_runtime(paths, room, lambda: make(paths), pages, tell)))
    return out


def by_size(nodes: int, tell: Tell) -> Costs:
    """Prompts of 1,024 known and 256 new tokens in a tree of at most `nodes`."""
    edge_pages = EDGE // PAGE
    room = (nodes + 4 * _SAMPLES) * edge_pages
    return _all_forms(nodes, room, lambda paths: paths.some(_SAMPLES), edge_pages, tell)


def by_length(tokens: int, tell: Tell) -> Costs:
    """Prompts of `tokens`, of which all but the last 256 are known, in a tree of 1e4 nodes."""
    count = 40
    nodes = 10_000
    room = nodes * EDGE // PAGE + 5 * count * (tokens // PAGE)

    def prompts(paths: Paths) -> list[TokenKey]:
        return [TokenKey(paths.tokens(tokens)) for _ in range(count)]

    paths = Paths(nodes)
    out: Costs = {}
    for kind in (FloorForm, TreeForm):
        form: Form = kind(paths)
        out[form.name] = _long(form, paths, prompts(paths), tokens)
    out.update(asyncio.run(_long_through_runtime(paths, room, prompts, tokens)))
    tell(f"  {count} prompts of {tokens} tokens through every form")
    return out


def _long(form: Form, paths: Paths, prompts: list[TokenKey], tokens: int) -> dict[str, Summary]:
    out = {"insert": summary(_inserts(form, prompts))}
    longer = [TokenKey(prompt.data + paths.tokens(EDGE)) for prompt in prompts]
    for _ in range(3):  # the first time each key is read from memory, later from the core's cache
        out["match"] = _timed(form.match, _anew(longer))
        out["lease"] = _timed(form.lease, _anew(longer))
    out["evict"] = _timed(form.evict, [tokens // PAGE] * len(prompts))
    return out


def _inserts(form: Form, prompts: list[TokenKey]) -> list[int]:
    samples: list[int] = []
    for prompt in prompts:
        job = form.begin(prompt)
        begun = wall_clock()
        form.insert(job)
        samples.append(wall_clock() - begun)
        form.end(job)
    return samples


async def _long_awaited(
    form: AwaitForm, paths: Paths, prompts: list[TokenKey], tokens: int
) -> dict[str, Summary]:
    samples: dict[str, list[int]] = {"insert": [], "match": [], "lease": [], "evict": []}
    for prompt in prompts:
        job = await form.begin(prompt)
        begun = wall_clock()
        await form.insert(job)
        samples["insert"].append(wall_clock() - begun)
        await form.end(job)
    longer = [TokenKey(prompt.data + paths.tokens(EDGE)) for prompt in prompts]
    for _ in range(3):  # as in `_long`
        matched, leased = _anew(longer), _anew(longer)
        samples["match"], samples["lease"] = [], []
        for key, same in zip(matched, leased, strict=True):
            begun = wall_clock()
            await form.match(key)
            samples["match"].append(wall_clock() - begun)
            begun = wall_clock()
            await form.lease(same)
            samples["lease"].append(wall_clock() - begun)
    for _ in prompts:
        begun = wall_clock()
        await form.evict(tokens // PAGE)
        samples["evict"].append(wall_clock() - begun)
    return {name: summary(values) for name, values in samples.items()}


async def _long_through_runtime(
    paths: Paths, room: int, prompts: Callable[[Paths], list[TokenKey]], tokens: int
) -> Costs:
    cache = await open_runtime(room, paths.nodes + 1000)
    form = NowaitForm(cache, paths)
    out: Costs = {form.name: _long(form, paths, prompts(paths), tokens)}
    for inline in (True, False):
        _set_inline(cache, inline)
        awaited = AwaitForm(cache, inline=inline)
        out[awaited.name] = await _long_awaited(awaited, paths, prompts(paths), tokens)
    _set_inline(cache, True)
    await cache.audit()
    await cache.close()
    return out


# -- one turn, inline and queued, one caller and many ----------------------------------------------


def hops(tell: Tell) -> dict[str, dict[str, dict[str, float]]]:
    """CPU microseconds a call by loop: the bare mailboxes, and a match inline and queued."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop] | None] = {"asyncio": None}
    if sys.platform != "win32":
        factories["uvloop"] = import_module("uvloop").new_event_loop
    for name, factory in factories.items():
        tell(f"  {name}")
        with asyncio.Runner(loop_factory=factory) as runner:
            out[name] = runner.run(_hops())
    return out


async def _hops(calls: int = 8000) -> dict[str, dict[str, float]]:
    out = await hop_floors(calls)
    paths = Paths(1000)
    cache = await open_runtime(2 * paths.nodes * EDGE // PAGE, 2 * paths.nodes)
    NowaitForm(cache, paths)
    keys = [key.data for key in paths.some(200)]

    async def caller(count: int) -> None:
        for number in range(count):
            await cache.match(TokenKey(keys[number % len(keys)]), whole=True)

    for inline in (True, False):
        _set_inline(cache, inline)
        out["match, inline" if inline else "match, queued"] = {
            str(callers): await hop_cost(caller, callers, calls) for callers in (1, 16)
        }
    out["queued, more than inline"] = {
        callers: out["match, queued"][callers] - cost
        for callers, cost in out["match, inline"].items()
    }
    _set_inline(cache, True)
    await cache.close()
    return out
