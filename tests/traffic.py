"""Random traffic over pools that are too small, each pass checking every byte it builds upon.

The pools are small enough for evictions, waits and deadlocks; clients leave at random; the cache is
reset now and then.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from serving import PAGE, House, check_kv, check_state, compute, digests

from phloem import CacheReset, Namespace, NoRoom, Request, StaleHandle

NAMESPACES = [Namespace(), Namespace(), Namespace("lora"), Namespace("", "tenant")]


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
        except CacheReset:  # while its data were being loaded
            assert here_was_reset(self.here)
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
                await lease.ready()
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
    running: list[asyncio.Task[None]] = []
    left = clients
    # Bounded, as loops that turn fast beside slow threads would leave no client time to live.
    disturbances, cancellations, idle, turns = 10 * clients, clients // 3, 0, 0
    try:
        while left or running:
            while left and len(running) < 4:
                left -= 1
                running.append(asyncio.ensure_future(world.client(seed * 1000 + left)))
            if disturbances:
                disturbances -= 1
                await world.disturb()
            await asyncio.sleep(0)
            # Who has forked waits with one of two requests: nobody knows that the other waits, too.
            stuck = idle > 1000
            if running and (stuck or (cancellations and world.rng.random() < 0.04)):
                cancellations -= not stuck
                idle = 0
                world.rng.choice(running).cancel()
            done = [task for task in running if task.done()]
            before, turns = turns, here.cache.stats().turns
            idle = 0 if done or turns != before else idle + 1
            running = [task for task in running if task not in done]
            for task in done:
                if not task.cancelled():
                    task.result()
            if not done and (not disturbances or world.rng.random() < 0.5):
                await asyncio.sleep(0.001)  # the workers need the processor too
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return world.tried


async def traffic_until(
    here: House, seed: int, clients: int, enough: Callable[[Counter[str]], object]
) -> Counter[str]:
    """Traffic by one seed after another until enough has come of it, of at most 20.

    What comes of one depends on how the loop and the threads take turns.
    """
    tried: Counter[str] = Counter()
    for again in range(20):
        async with asyncio.timeout(60):
            tried += await traffic(here, seed + 100 * again, clients)
        if enough(tried):
            return tried
    raise AssertionError(f"this tries too little: {tried}, {here.cache.stats()}")
