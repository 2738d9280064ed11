"""For pytest with pytest-asyncio: tests that run on the simulated loop, one seed after the other.

Switch it on with `-p phloem.runtime.simulation.pytest_plugin`, or in `conftest.py` with
`pytest_plugins = ["phloem.runtime.simulation.pytest_plugin"]`, then

    @pytest.mark.sim                        # on asyncio's loop, and on the simulated one by seeds
    @pytest.mark.sim(seeds=50, only=True)   # on the simulated one only
    @pytest.mark.sim(seeds=1, policy="fifo")   # a test that relies on asyncio's own order of tasks

`--sim-seeds N` sets the number of seeds where the mark does not, `--sim-seed S` runs the one seed
`S`, `--sim-policy P` one policy instead of all in turn. The seed and policy are part of the test's
id, so the id of a failure says how to repeat it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

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


def sim_loops(config: pytest.Config, item: pytest.Item) -> tuple[dict[str, LoopFactory], bool]:
    """The simulated loops that a test runs on, by id, and whether it runs only there.

    For projects with a `pytest_asyncio_loop_factories` hook of their own, which then counts instead
    of this plugin's.
    """
    mark = item.get_closest_marker("sim")
    if mark is None:
        return {}, False
    known = {"seeds", "policy", "only"}
    if unknown := sorted(set(mark.kwargs) - known) or mark.args:
        raise InvalidRequest(f"the mark `sim` takes {sorted(known)}, not {unknown}")
    asked: int | None = config.getoption("--sim-seeds")
    one: int | None = config.getoption("--sim-seed")
    policy: Policy | None = config.getoption("--sim-policy") or mark.kwargs.get("policy")
    count: int = mark.kwargs.get("seeds", _SEEDS) if asked is None else asked
    loops: dict[str, LoopFactory] = {}
    for seed in range(count) if one is None else (one,):
        chosen = policy or POLICY_TURNS[seed % len(POLICY_TURNS)]
        loops[f"sim-{chosen}-{seed}"] = partial(SimLoop, seed, policy=chosen)
    return loops, bool(mark.kwargs.get("only", False))


@pytest.hookimpl(trylast=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """For pytest-asyncio: asyncio's own loop, and the simulated ones of a marked test."""
    loops, only = sim_loops(config, item)
    return loops if only else {"asyncio": asyncio.new_event_loop, **loops}
