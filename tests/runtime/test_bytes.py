"""Whatever is reused is what its prompt says: random traffic over pools that are too small.

Each pass checks every byte it builds upon (see `serving`). The pools are small enough for
evictions, waits and deadlocks; clients leave at random; the cache is reset now and then.
"""

from __future__ import annotations

import asyncio
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
    check_kv,
    check_state,
    compute,
    digests,
    house,
    write_state,
)

from phloem import ModelLayout, Namespace, NoRoom, Placement, Request, StaleHandle
from phloem.events import CopyEnded, Event, StepChanged

NAMESPACES = [Namespace(), Namespace(), Namespace("lora"), Namespace("", "tenant")]
ROUNDS = 60 if os.environ.get("PHLOEM_FUZZ") else 1


def prompt_of(rng: random.Random) -> list[int]:
    """Prompts that share prefixes and part at every depth."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 6)):
        token = rng.choice([1, 1, 1, 2, 3])
        tokens += [token] * PAGE if rng.random() < 0.9 else [token]
    return tokens


class Traffic:
    """Clients that live at random, from one seed; counts what it has tried."""

    def __init__(self, here: House, seed: int) -> None:
        self.here = here
        self.rng = random.Random(seed)
        self.tried: Counter[str] = Counter()

    async def client(self, seed: int) -> None:
        rng = random.Random(seed)
        namespace = rng.choice(NAMESPACES)
        tokens = prompt_of(rng)
        publish = rng.choice(["all", "all", "prompt", "none"])
        try:
            async with self.here.cache.request(tokens, namespace=namespace) as request:
                tokens = await self._lives(request, tokens, namespace, rng)
                self.tried["reused"] += request._tokens_reused
                await request.finish(publish=publish)  # type: ignore[arg-type]  # one of three
                self.tried["finished"] += 1
        except NoRoom as error:
            self.tried["deadlocks" if error.deadlock else "no room"] += 1
        except asyncio.CancelledError:
            self.tried["cancelled"] += 1
            raise

    async def _lives(
        self, request: Request, tokens: list[int], namespace: Namespace, rng: random.Random
    ) -> list[int]:
        prompt = len(tokens)
        await request.allocate(prompt - request.computed if rng.random() < 0.7 else PAGE)
        await request.ready()
        while request.computed < prompt:
            await request.advance()
            _, end = request.next_stop(rng.choice([1, 2, 3]) * PAGE)
            await request.allocate(end - request.computed)
            await self._pass(request, tokens, end, namespace, rng)
            if rng.random() < 0.8:
                await request.checkpoint(state=rng.choice([None, None, True]))
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            tokens = [*tokens, rng.randint(1, 3)]
            request.extend(tokens[-1:])
            await request.allocate(1)
            await self._pass(request, tokens, len(tokens), namespace, rng)
        if rng.random() < 0.3:
            await self._forks(request, tokens, namespace, rng)
        return tokens

    async def _pass(
        self,
        request: Request,
        tokens: list[int],
        end: int,
        namespace: Namespace,
        rng: random.Random,
    ) -> None:
        snapshot = None
        grid = self.here.cache.grid
        position = end // grid * grid
        if rng.random() < 0.3 and position > request.computed:
            slot = request.try_snapshot_slot(position)
            if slot is not None:
                snapshot = (slot, position)
                self.tried["snapshots"] += 1
        await compute(self.here, request, tokens, end, namespace=namespace, snapshot=snapshot)
        self.tried["passes"] += 1

    async def _forks(
        self, request: Request, tokens: list[int], namespace: Namespace, rng: random.Random
    ) -> None:
        try:
            twin = await request.fork()
        except StaleHandle:
            assert here_was_reset(self.here), "a fork is refused only after a reset"
            return
        try:
            ends: list[tuple[Request, list[int]]] = [(twin, tokens), (request, tokens)]
            for _ in range(2):
                for at, (one, before) in enumerate(ends):
                    now = [*before, rng.randint(1, 3)]
                    one.extend(now[-1:])
                    await one.allocate(1)
                    await self._pass(one, now, len(now), namespace, rng)
                    ends[at] = (one, now)
            await twin.finish()
            self.tried["forks"] += 1
            tokens[:] = ends[1][1]
        finally:
            twin.abort()

    async def disturb(self) -> None:
        """What an operator or a leaving client does between two rounds of the loop."""
        cache, rng = self.here.cache, self.rng
        act = rng.random()
        if act < 0.03:
            await cache.evict(pages=rng.randint(0, 4), states=rng.randint(0, 2))
        elif act < 0.035:
            await cache.reset()
            self.tried["resets"] += 1
        elif act < 0.3:
            key = prompt_of(rng)
            async with await cache.acquire(key, owner="reader", namespace=NAMESPACES[0]) as lease:
                chain = digests(key)
                check_kv(cache.pools, lease.pages, chain, lease.boundary)
                if lease.state and not cache.core.transfer._writers:  # nothing still writes it
                    check_state(cache.pools, lease.state, chain, lease.boundary)
                self.tried["looks"] += lease.boundary > 0
        await cache.audit()


def here_was_reset(here: House) -> bool:
    return here.cache.core.tree.generation > 0


async def traffic(here: House, seed: int, clients: int) -> Counter[str]:
    """So many clients, a few at a time, disturbed and audited all along."""
    world = Traffic(here, seed)
    running: set[asyncio.Task[None]] = set()
    left = clients
    try:
        while left or running:
            while left and len(running) < 4:
                left -= 1
                running.add(asyncio.ensure_future(world.client(seed * 1000 + left)))
            await world.disturb()
            await asyncio.sleep(0)
            if world.rng.random() < 0.04 and running:
                world.rng.choice(sorted(running, key=id)).cancel()
            done = {task for task in running if task.done()}
            running -= done
            for task in done:
                if not task.cancelled():
                    task.result()
            if not done and world.rng.random() < 0.5:
                await asyncio.sleep(0.0005)  # the workers need the processor too
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return world.tried


SHAPES = {
    "small": {"pages": 16, "states": 7},
    "few_states": {"pages": 40, "states": 6},
    "coarse": {"pages": 24, "states": 10, "state_chunk": 2 * PAGE},
    "capped": {"pages": 30, "states": 12, "placement": Placement(max_states_per_path=1)},
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_reuse_reads_its_own_bytes(shape: str, inline: bool) -> None:
    tried: Counter[str] = Counter()
    for seed in range(ROUNDS):
        async with house(inline=inline, **SHAPES[shape]) as here:  # type: ignore[arg-type]  # options
            async with asyncio.timeout(60):
                tried += await traffic(here, seed, 50)
            stats = here.cache.stats()
            assert stats.actions.get("FreeDeviceSlots", 0) > 10, "nothing was ever evicted"
    tried["reused"] += tried["looks"]
    # What else is tried depends on how the loop and the threads take turns.
    for what in ("finished", "passes"):
        assert tried[what] > 0, f"{what} was not tried: {tried}"


async def test_every_reuse_reads_its_own_bytes_without_states(inline: bool) -> None:
    async with house(inline=inline, pages=14, layout=ATTENTION) as here:
        async with asyncio.timeout(60):
            tried = await traffic(here, 7, 60)
        assert tried["reused"] > 0 and tried["finished"] > 0


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
