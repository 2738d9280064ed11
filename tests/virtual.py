"""A runtime in virtual time, for tests of when things happen: no faults, no noise, no waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from phloem import CacheConfig, CacheRuntime
from phloem.cuda_streams.batches import Channel
from phloem.cuda_streams.dispatch import Fault
from phloem.cuda_streams.engine import Post
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.virtual import PCIE5, Delay, Link, VirtualEngine, VirtualStream
from phloem.runtime.simulation import SimLoop
from phloem.runtime.simulation.world import sim_run

__all__ = ["Time", "in_virtual_time"]


@dataclass
class Time:
    """The clock, and what runs by it."""

    loop: SimLoop

    @property
    def now_ns(self) -> int:
        return self.loop.clock.now_ns()

    def stream(self, name: str = "model") -> VirtualStream:
        return VirtualStream(name, self.loop.clock)

    @asynccontextmanager
    async def runtime(
        self,
        config: CacheConfig,
        *,
        links: Mapping[Channel, Link] = PCIE5,
        fault: Fault | None = None,
        delay: Delay | None = None,
    ) -> AsyncIterator[CacheRuntime]:
        """A runtime whose copies take the time that `links` say; misused memory is an error."""
        hazards = HazardChecker()

        def engine(post: Post) -> VirtualEngine:
            return VirtualEngine(
                self.loop.clock, links=links, post=post, fault=fault, delay=delay, hazards=hazards
            )

        async with CacheRuntime(config, engine=engine) as cache:
            yield cache
            await cache.audit()
        assert not hazards.found, hazards.found[0]


def in_virtual_time(scenario: Callable[[Time], Coroutine[object, object, None]]) -> None:
    """Run a scenario to its end; what hangs is an error at once."""
    loop = SimLoop(0)
    sim_run(lambda: scenario(Time(loop)), loop)
