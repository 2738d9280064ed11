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


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The suite shares its cores, and more threads do not help tiny tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
