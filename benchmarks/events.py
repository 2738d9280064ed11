"""What events cost: a match with events off beside one without their code, and an event written."""

# pyright: reportPrivateUsage=false
# what is measured is a private function, with and without a part of it
from __future__ import annotations

import functools
import inspect
import io
import textwrap
import time
from collections.abc import Callable

from phloem import CacheConfig, CacheRuntime, ModelLayout, TokenKey
from phloem.actors import domain as domain_module
from phloem.actors.domain import Actor, Domain
from phloem.events import Event, Freed, Granted, LeaseTaken
from phloem.runtime.observe.counts import Counts
from phloem.runtime.tracing import Style, open_log

__all__ = ["match_cost", "turn_without_events", "written_cost"]

_ROUNDS, _CALLS = 400, 500
_EVENTS = 20_000


Turn = Callable[[Actor, object], object]

_CODE_OF_EVENTS = """        if self._caller_context is not None:
            self.context = self._caller_context()
"""


def turn_without_events(domain: Domain) -> Turn:
    """The inline turn of a domain, made from its source with the code of events taken out.

    The handler of a match has none.
    """
    source = inspect.getsource(Domain._turn_inline)
    assert source.count(_CODE_OF_EVENTS) == 1, "the turn has changed: adapt the code to take out"
    names = dict(vars(domain_module))
    exec(textwrap.dedent(source.replace(_CODE_OF_EVENTS, "")), names)  # our own source
    turn: Turn = functools.partial(names["_turn_inline"], domain)
    return turn


async def match_cost() -> dict[str, float]:
    """Microseconds of a match through the domain, interleaved, the least of many rounds.

    `off`: as it is, with events off. `without`: with the code of events removed.
    """
    layout = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4, kv_dtype="float32")
    config = CacheConfig(layout=layout, page_size=16, device_pages=256, device_states=0)
    async with CacheRuntime(config) as cache:
        nowait, domain = cache.nowait, cache.core.domain
        prompt = list(range(1024))
        grant = nowait.allocate(pages=64)
        nowait.insert(prompt, pages=grant.pages)
        key = TokenKey.of(prompt)
        turns: dict[str, Turn] = {
            "off": functools.partial(Domain._turn_inline, domain),
            "without": turn_without_events(domain),
        }
        least = dict.fromkeys(turns, float("inf"))
        for _ in range(_ROUNDS):
            for name, turn in turns.items():
                domain._turn_inline = turn  # type: ignore[method-assign, assignment]
                least[name] = min(least[name], _a_call(lambda: nowait.match(key)))
        del domain._turn_inline
    return {**least, "more": least["off"] - least["without"]}


def _a_call(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter_ns() - begun) / _CALLS / 1e3


def written_cost() -> dict[str, float]:
    """CPU microseconds for each event, from its making to the bytes, all threads together."""
    sample: list[Callable[[], Event]] = [
        lambda: Granted(turn=7, request="r1", account=3, pages=[1, 2, 3, 4], states=[9], asked=7),
        lambda: Freed(turn=8, cause=7, component="kv", ids=[4, 5, 6, 7], owner=-1),
        lambda: LeaseTaken(turn=9, request="r1", lease=4, boundary=512, node=17, state=True),
    ]
    costs: dict[str, float] = {}
    styles: tuple[Style, ...] = ("json", "logfmt")
    for style in styles:
        costs[style] = min(_a_written(sample, style) for _ in range(3))
    counts = Counts()
    begun = time.process_time_ns()
    for number in range(_EVENTS):
        counts(sample[number % len(sample)]())
    costs["counted"] = (time.process_time_ns() - begun) / _EVENTS / 1e3
    return costs


def _a_written(sample: list[Callable[[], Event]], style: Style) -> float:
    begun = time.process_time_ns()
    with open_log(io.BytesIO(), style=style, capacity=_EVENTS + 1) as log:
        for number in range(_EVENTS):
            log(sample[number % len(sample)]())
    assert log.dropped == 0
    return (time.process_time_ns() - begun) / _EVENTS / 1e3
