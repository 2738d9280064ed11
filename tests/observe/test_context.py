"""What a caller has bound is carried to the events its calls cause, and to no others."""

from __future__ import annotations

import asyncio
import random

import pytest
import structlog
from observe.driver import config

from phloem import CacheRuntime, NoRoom
from phloem.actors.tree.core import WritePolicy
from phloem.cuda_streams.engine import Post
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.events import CopyEnded, Event, Freed, Granted, StepChanged
from phloem.runtime.simulation.loop import SimLoop


async def caller(cache: CacheRuntime, name: str, rng: random.Random) -> None:
    """One client after the other, each with a name of its own; some leave half way."""
    for number in range(3):
        who = f"{name}-{number}"
        with structlog.contextvars.bound_contextvars(who=who):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(6, 20))]
            try:
                async with cache.request(tokens, id=who) as request:
                    await request.allocate(len(tokens) - request.computed)
                    await asyncio.sleep(rng.random() / 1000)
                    await request.ready()
                    while request.computed < len(tokens):
                        _, end = request.next_stop(4)
                        with cache.step([request]) as step:
                            step.launched({request: end})
                        await request.checkpoint()
                    if rng.random() < 0.8:
                        await request.finish()
            except NoRoom:
                continue


@pytest.mark.parametrize("host", [None, "write_through"], ids=["device", "host"])
@pytest.mark.sim(seeds=10, only=True)
async def test_contexts_never_mix(inline: bool, host: WritePolicy | None) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    events: list[Event] = []

    def engine(post: Post) -> VirtualEngine:
        return VirtualEngine(loop.clock, post=post)

    settings = config(True, inline=inline, host=host)
    cache = CacheRuntime(settings, events=events.append, engine=engine)
    async with cache:
        rngs = [random.Random(loop.rng.random()) for _ in range(5)]
        await asyncio.gather(*(caller(cache, f"c{n}", rng) for n, rng in enumerate(rngs)))
    owners: dict[int, str] = {}
    told: set[str] = set()
    for event in events:
        who = event.context.get("who", "")
        if isinstance(event, Granted) and event.tier == "device":
            owners[event.account] = event.request
        if isinstance(event, StepChanged):
            assert event.requests == [who]
        elif event.request.startswith("op "):
            assert who, event  # a copy between the tiers, which some caller's call has caused
        elif event.request:
            assert who == event.request, event
            told.add(type(event).__name__)
        elif isinstance(event, Freed) and event.owner > 0 and event.tier == "device":
            assert who == owners[event.owner] or owners[event.owner].startswith("op "), event
        elif isinstance(event, CopyEnded):
            assert who, event
    assert {"RequestOpened", "LeaseEnded", "Granted", "Inserted", "CopyPlanned"} <= told


async def test_who_waits_is_served_under_his_own_name() -> None:
    events: list[Event] = []
    async with CacheRuntime(config(False), events=events.append) as cache:
        with structlog.contextvars.bound_contextvars(who="first"):
            grant = await cache.allocate(pages=40, owner="first")

        async def second() -> None:
            with structlog.contextvars.bound_contextvars(who="second"):
                cache.release(await cache.allocate(pages=3, owner="second"))

        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        with structlog.contextvars.bound_contextvars(who="first"):
            cache.release(grant)
        await waiting
    names = [type(event).__name__ for event in events if event.request == "second"]
    assert names[:2] == ["Waited", "Granted"]
    for event in events:
        if event.request:
            assert event.context == {"who": event.request}, event
