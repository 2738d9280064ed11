"""Asynchronous tests run on both event loops, those marked `sim` on the simulated one, too.

`inline`: with and without inline turns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

pytest_plugins = ["phloem.runtime.simulation.pytest_plugin", "pytester"]

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
Tried = dict[str, list[int]]  # by what was tried: how many, in each test
TRIED = pytest.StashKey[Tried]()


def _loops() -> dict[str, LoopFactory]:
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if sys.platform != "win32":
        import uvloop

        loops["uvloop"] = uvloop.new_event_loop
    return loops


LOOPS = _loops()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """For pytest-asyncio: every asynchronous test runs once on each of these."""
    from phloem.runtime.simulation.pytest_plugin import sim_loops  # pytest wants to import it first

    simulated, only = sim_loops(config, item, unmarked=1)
    return simulated if only else {**LOOPS, **simulated}


@pytest.fixture(params=[True, False], ids=["inline", "queued"])
def inline(request: pytest.FixtureRequest) -> bool:
    """Whether callers take their turn at once, or wait for the loop to drain the queue."""
    return bool(request.param)


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Tell how many of something a long run has tried; the sums stand at the end of the report."""
    counts = request.config.stash.setdefault(TRIED, {})

    def tell(what: str, count: int) -> None:
        counts.setdefault(what, []).append(count)

    return tell


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What the long runs have tried."""
    for what, counts in config.stash.get(TRIED, {}).items():
        terminalreporter.write_line(
            f"{sum(counts):,} {what} in {len(counts)} runs, at least {min(counts):,} in each"
        )


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The suite shares its cores, and more threads do not help tiny tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
