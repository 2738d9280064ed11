"""For pytest with pytest-asyncio: tests that run on the simulated loop, one seed after the other.

Switch it on with `-p phloem.runtime.simulation.pytest_plugin`, or in `conftest.py` with
`pytest_plugins = ["phloem.runtime.simulation.pytest_plugin"]`, then

    @pytest.mark.sim                        # on asyncio's loop, and on the simulated one by seeds
    @pytest.mark.sim(seeds=50, only=True)   # on the simulated one only
    @pytest.mark.sim(seeds=1, policy="fifo")   # a test that relies on asyncio's own order of tasks
    @pytest.mark.not_sim("why")             # never; for a module that is marked, or a parameter

`--sim-seeds N` sets the number of seeds where the mark does not, `--sim-seed S` runs the one seed
`S`, `--sim-policy P` one policy instead of all in turn. The seed and policy are part of the test's
id; a failure tells the last steps and how to repeat it. An exception that no task was there to hear
fails the test, too.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

from phloem.errors import InvalidRequest
from phloem.runtime.simulation.loop import POLICIES, Policy, SimLoop
from phloem.runtime.simulation.world import POLICY_TURNS

__all__ = ["sim_loops"]

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

_SEEDS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    """See pytest."""
    group = parser.getgroup("phloem simulation")
    group.addoption("--sim-seeds", type=int, default=None, metavar="N", help="seeds of a test")
    group.addoption("--sim-seed", type=int, default=None, metavar="S", help="this seed only")
    group.addoption("--sim-policy", choices=POLICIES, default=None, help="this policy only")


def pytest_configure(config: pytest.Config) -> None:
    """See pytest."""
    config.addinivalue_line(
        "markers",
        "sim(seeds=N, policy=P, only=False): also run on the simulated loop, or only there",
    )
    config.addinivalue_line("markers", "not_sim(why): never run on the simulated loop")


class _Simulated:
    """Makes the loop of one seed, and remembers the last."""

    def __init__(self, seed: int, policy: Policy, only: bool) -> None:
        self.seed = seed
        self.only = only
        self.policy: Policy = policy
        self.loop: SimLoop | None = None

    def __call__(self) -> SimLoop:
        self.loop = SimLoop(self.seed, policy=self.policy)
        return self.loop


def sim_loops(
    config: pytest.Config, item: pytest.Item, *, unmarked: int = 0
) -> tuple[dict[str, LoopFactory], bool]:
    """The simulated loops that a test runs on, by id, and whether it runs only there.

    `unmarked`: so many seeds for tests without a mark. For projects with a
    `pytest_asyncio_loop_factories` hook of their own, which then counts instead of this plugin's.
    """
    mark = item.get_closest_marker("sim")
    if _must_not(item) or (mark is None and not unmarked):
        return {}, False
    told: Mapping[str, Any] = {"seeds": unmarked} if mark is None else mark.kwargs
    known = {"seeds", "policy", "only"}
    if unknown := sorted(set(told) - known) or (() if mark is None else mark.args):
        raise InvalidRequest(
            f"{item.nodeid}: the mark `sim` takes {sorted(known)}, not {list(unknown)}"
        )
    asked: int | None = config.getoption("--sim-seeds")
    one: int | None = config.getoption("--sim-seed")
    policy: Policy | None = config.getoption("--sim-policy") or told.get("policy")
    count: int = told.get("seeds", _SEEDS) if asked is None else asked
    only = bool(told.get("only", False))
    loops: dict[str, LoopFactory] = {}
    for seed in range(count) if one is None else (one,):
        chosen = policy or POLICY_TURNS[seed % len(POLICY_TURNS)]
        loops[f"sim-{chosen}-{seed}"] = _Simulated(seed, chosen, only)
    return loops, only


@pytest.hookimpl(trylast=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """For pytest-asyncio: asyncio's own loop, and the simulated ones of a marked test."""
    loops, only = sim_loops(config, item)
    return loops if only else {"asyncio": asyncio.new_event_loop, **loops}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """See pytest: a mark `not_sim` of a parameter is not known before.

    Raises for a test that is marked `sim` itself and runs on no loop.
    """
    for item in items:
        marked = any(mark.name == "sim" for mark in item.own_markers)
        if marked and item.get_closest_marker("asyncio") is None:
            raise pytest.UsageError(
                f"{item.nodeid} is marked `sim`, and pytest-asyncio does not run it: it must be "
                "`async def`, and marked `asyncio` unless asyncio_mode is auto"
            )
    left_out = [item for item in items if _simulated(item) is not None and _must_not(item)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """See pytest."""
    result = yield
    made = _simulated(item)
    if made is not None and made.loop is not None:
        made.loop.raise_unheard()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See pytest."""
    report = yield
    made = _simulated(item)
    if report.failed and made is not None and made.loop is not None:
        report.sections.append(("simulation", _told(item, made.loop, made)))
    return report


def _must_not(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("not_sim")
    if mark is not None and (len(mark.args) != 1 or mark.kwargs):
        raise InvalidRequest(f"{item.nodeid}: the mark `not_sim` takes one argument: why")
    return mark is not None


def _simulated(item: pytest.Item) -> _Simulated | None:
    """What makes the loop of a test, if that is simulated."""
    callspec = getattr(item, "callspec", None)
    values: list[object] = [] if callspec is None else list(callspec.params.values())
    return next((value for value in values if isinstance(value, _Simulated)), None)


def _told(item: pytest.Item, loop: SimLoop, made: _Simulated) -> str:
    options = ["--sim-seed", str(made.seed), "--sim-policy", made.policy]
    node = item.nodeid
    if made.only:  # a loop without others is not in the id
        node = re.sub(rf"\[sim-{made.policy}-{made.seed}(-|\]$)", "[", node).removesuffix("[")
    lines = [
        f"seed {made.seed}, policy {made.policy}, step {loop.steps}, {loop.time():.6f} virtual s; "
        "the last steps:",
        *(f"  {now_ns / 1e9:.6f} {what}" for now_ns, what in list(loop.history)[-12:]),
        f"repeat it with: pytest {shlex.join([*options, node])}",
    ]
    return "\n".join(lines)
