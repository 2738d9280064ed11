"""Whatever is reused is what its prompt says: random traffic over pools that are too small.

Each pass checks every byte it builds upon (see `serving`). The pools are small enough for
evictions, waits and deadlocks; clients leave at random; the cache is reset now and then.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import msgspec
import pytest
from serving import (
    ATTENTION,
    HYBRID,
    PAGE,
    House,
    compute,
    digests,
    house,
    write_state,
)
from traffic import prompt_of, traffic_until

from phloem import ModelLayout, NoRoom, Placement, Request
from phloem.events import CopyEnded, Event, StepChanged

ROUNDS = 60 if os.environ.get("PHLOEM_FUZZ") else 1


SHAPES = {
    "small": {"pages": 16, "states": 7},
    "few_states": {"pages": 40, "states": 6},
    "coarse": {"pages": 24, "states": 10, "state_chunk": 2 * PAGE},
    "capped": {"pages": 30, "states": 12, "placement": Placement(max_states_per_path=1)},
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_reuse_reads_its_own_bytes(shape: str, inline: bool) -> None:
    for seed in range(ROUNDS):
        async with house(inline=inline, **SHAPES[shape]) as here:  # type: ignore[arg-type]  # options
            actions = here.cache.core.tree_actor.counts

            def enough(tried: Counter[str]) -> bool:
                evicted, used = actions.get("FreeDeviceSlots", 0), tried["reused"] + tried["looks"]  # noqa: B023
                return evicted > 10 and used > 0 and tried["finished"] > 0

            await traffic_until(here, seed, 50, enough)


async def test_every_reuse_reads_its_own_bytes_without_states(inline: bool) -> None:
    async with house(inline=inline, pages=14, layout=ATTENTION) as here:
        await traffic_until(here, 0, 60, lambda tried: tried["reused"] and tried["finished"])


async def test_the_checks_notice_wrong_bytes(inline: bool) -> None:
    """A test that passes with a wrong state or page would be worthless."""
    tokens = list(range(1, 2 * PAGE + 2))
    for spoil in ("state", "page", "older state", "cleared state"):
        async with house(inline=inline) as here:
            pools = here.cache.pools
            async with here.cache.request(tokens) as request:
                await request.allocate(len(tokens))
                await request.ready()
                await compute(here, request, tokens, 2 * PAGE)
                chain = digests(tokens)
                slot = request.state_slot or 0
                if spoil == "state":
                    write_state(pools, slot, 1, 2 * PAGE)
                elif spoil == "older state":
                    write_state(pools, slot, chain[2 * PAGE - 1], 2 * PAGE - 1)
                elif spoil == "cleared state":
                    write_state(pools, slot, 0, 0)
                else:
                    pools.kv[next(iter(pools.kv))].v[request.page_table()[0], 1] += 1
                with pytest.raises(AssertionError, match="prompt"):
                    await compute(here, request, tokens, len(tokens))


# -- the same messages give the same log -----------------------------------------------------------


async def script(here: House, seed: int) -> list[Event]:
    """A random life of one house in which each call is awaited before the next."""
    rng = random.Random(seed)
    cache = here.cache
    open_: list[tuple[Request, list[int]]] = []
    handles: list[object] = []
    for number in range(60):
        act = rng.choice(["open", "open", "pass", "pass", "pass", "end", "low", "evict", "match"])
        if act == "open" and len(open_) < 4:
            tokens = prompt_of(rng)
            request = await cache.open_request(tokens, id=f"r{number}")
            try:
                await request.allocate(len(tokens) - request.computed, wait=False)
            except NoRoom:
                request.abort()
                continue
            await request.ready()
            open_.append((request, tokens))
        elif act == "pass" and open_:
            request, tokens = rng.choice(open_)
            if request.computed < len(tokens):
                await request.advance()
                _, end = request.next_stop(2 * PAGE)
                await compute(here, request, tokens, end)
                await request.checkpoint()
        elif act == "end" and open_:
            request, _ = open_.pop(rng.randrange(len(open_)))
            if rng.random() < 0.6:
                await request.finish()
            else:
                request.abort()
        elif act == "low":
            lease = await cache.acquire(prompt_of(rng), owner="low")
            try:
                grant = await cache.allocate(pages=rng.randint(0, 3), owner="low", wait=False)
            except NoRoom:
                lease.release()
            else:
                handles += [lease, grant]
        elif act == "evict":
            await cache.evict(pages=rng.randint(0, 2), states=rng.randint(0, 1))
            for handle in handles:
                cache.release(handle)  # type: ignore[arg-type]  # leases and grants
            handles.clear()
            if rng.random() < 0.2:
                await cache.reset()
        else:
            await cache.match(prompt_of(rng))
        await here.settled()
    for request, _ in open_:
        request.abort()
    for handle in handles:
        cache.release(handle)  # type: ignore[arg-type]  # leases and grants
    await here.settled()
    return [untimed(event) for event in here.events if not isinstance(event, StepChanged)]


def untimed(event: Event) -> Event:
    """How long a copy took is the machine's matter."""
    if isinstance(event, CopyEnded):
        return msgspec.structs.replace(event, started_ns=0, ended_ns=0)
    return event


@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
@pytest.mark.parametrize("seed", range(3))
async def test_f082_s212_inline_and_queued_runs_of_the_same_calls_give_the_same_log(
    seed: int, layout: ModelLayout
) -> None:
    logs: list[list[Event]] = []
    for inline in (True, False):
        async with house(inline=inline, layout=layout, pages=14, states=6) as here:
            logs.append(await script(here, seed))
    assert len(logs[0]) > 80
    for number, (one, other) in enumerate(zip(*logs, strict=False)):
        assert one == other, f"event {number}"
    assert len(logs[0]) == len(logs[1])
