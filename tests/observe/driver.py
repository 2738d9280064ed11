"""Random work on a runtime, with everything that leaves traces: for the tests of what is told."""

from __future__ import annotations

import asyncio
import random

from phloem import (
    CacheConfig,
    CacheRuntime,
    KVSpec,
    LayerSpec,
    ModelLayout,
    Namespace,
    NoRoom,
    Placement,
    Request,
    StaleHandle,
    StateSpec,
)
from phloem.actors.tree.core import WritePolicy
from phloem.cuda_streams.clocks import VirtualClock

PAGE = 2
WINDOW = "window:3"
SLIDING = LayerSpec(kv=KVSpec((1, 4), (1, 4), "float32", kept=WINDOW))


def layout(hybrid: bool, window: bool = False) -> ModelLayout:
    if window:
        return ModelLayout.from_layers((*layout(hybrid).layers, SLIDING))
    if not hybrid:
        return ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4, kv_dtype="float32")
    return ModelLayout.hybrid(
        kv_layers=1,
        kv_heads=1,
        head_dim=4,
        kv_dtype="float32",
        states=[StateSpec("h", (4,), "float32", layers=1)],
    )


def config(
    hybrid: bool,
    *,
    inline: bool = True,
    host: WritePolicy | None = None,
    window: bool = False,
) -> CacheConfig:
    """`host`: the write policy of a host tier, half as large as the device; None: without.

    `window`: with a layer of sliding-window attention, whose pages are scarce.
    """
    return CacheConfig(
        layout=layout(hybrid, window),
        page_size=PAGE,
        state_chunk=2 * PAGE,
        device_pages=40,
        device_states=8 if hybrid else 0,
        device_spans={"window": 24} if window else {},
        inline=inline,
        placement=Placement(max_states_per_path=3),
        eviction="lru",  # what the tests wait to see was looked for under it
        host_bytes=0 if host is None else 1280 + 64 * hybrid,
        write_policy=host or "write_through",
    )


class Driver:
    """Draws operations from a seed; at most a few requests live at once.

    With a virtual engine's `clock`, copies end when the seed says so.
    """

    def __init__(self, cache: CacheRuntime, seed: int, clock: VirtualClock | None = None) -> None:
        self.cache = cache
        self.clock = clock
        self.rng = random.Random(seed)
        self.live: list[Request] = []
        self.prompts: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
        self.opened = 0
        self.spans = tuple(cache.stats().spans)

    def prompt(self) -> list[int]:
        rng = self.rng
        base = rng.choice(self.prompts)
        tokens = base[: rng.randint(1, len(base))] + [
            rng.randint(0, 3) for _ in range(rng.randint(1, 14))
        ]
        self.prompts = [*self.prompts[-12:], tokens]
        return tokens[:40]

    async def operate(self) -> None:
        """One operation, whatever comes of it."""
        if self.clock is None:
            await self._operate()
            return
        for _ in range(self.rng.randrange(4)):
            self.clock.step()
        operation = asyncio.ensure_future(self._operate())
        while not operation.done():
            await asyncio.sleep(0)
            if not operation.done():
                self.clock.step()  # it waits for a copy
        await operation

    async def _operate(self) -> None:
        what = self.rng.random()
        try:
            if what < 0.4 or not self.live:
                await self.open()
            elif what < 0.75:
                await self.compute(self.rng.choice(self.live))
            elif what < 0.9:
                await self.leave(self.live.pop(self.rng.randrange(len(self.live))))
            elif what < 0.94:
                await self.cache.evict(
                    pages=self.rng.randint(0, 6),
                    states=self.rng.randint(0, 1),
                    spans={name: self.rng.randint(0, 4) for name in self.spans},
                )
            elif what < 0.97:
                await self.low_level()
            elif what < 0.99:
                await self.fork(self.rng.choice(self.live))
            else:
                for request in [one for one in self.live if one.status == "open"]:
                    self.live.remove(request)  # what it waits to be loaded goes
                    request.abort()
                await self.cache.reset()
        except NoRoom:
            if self.live:
                self.live.pop(0).abort()

    async def open(self) -> None:
        if len(self.live) >= 4:
            self.live.pop(0).abort()
        self.opened += 1
        namespace = Namespace(adapter=self.rng.choice(["", "lora"]))
        request = await self.cache.open_request(
            self.prompt(), id=f"r{self.opened}", namespace=namespace
        )
        self.live.append(request)

    async def compute(self, request: Request) -> None:
        if request.status == "running" and self.rng.random() < 0.3:
            await request.advance()
        await request.allocate(request.length - request.computed, wait=False)
        await request.ready()
        if request.length > request.room:  # less came from the host than was hoped
            await request.allocate(request.length - request.computed, wait=False)
        if request.computed < request.length:
            _, end = request.next_stop(self.rng.choice([4, 8, 64]))
            with self.cache.step([request]) as step:
                step.launched({request: end})
        if self.rng.random() < 0.7:
            await request.checkpoint()

    async def leave(self, request: Request) -> None:
        if request.status == "running" and self.rng.random() < 0.7:
            await request.finish(publish=self.rng.choice(["all", "prompt", "none"]))
        else:
            request.abort()

    async def fork(self, request: Request) -> None:
        if self.spans and request.computed % self.cache.core.grid:
            return  # a window is not copied
        if request.status == "running" and request.computed == request.settled:
            self.opened += 1
            try:
                self.live.append(await request.fork(f"r{self.opened}"))
            except StaleHandle:  # the cache was reset since it opened
                request.abort()
                self.live.remove(request)

    async def low_level(self) -> None:
        cache, nowait = self.cache, self.cache.nowait
        tokens = self.prompt()
        lease = await cache.acquire(tokens, owner="low")
        await lease.ready()
        pages = len(tokens) // PAGE - lease.boundary // PAGE
        try:
            spans = dict.fromkeys(self.spans, pages)
            grant = nowait.allocate(pages=pages, owner="low", spans=spans)
        except NoRoom:
            cache.release(lease)
            raise
        held = dict(zip(self.spans, grant.spans, strict=False))
        at_once = pages % 2 == 0
        nowait.insert(tokens, pages=grant.pages, lease=lease, spans=held, release=at_once)
        if not at_once:
            cache.release(lease)
        if pages:
            cache.release(grant)

    async def close(self) -> None:
        while self.live:
            await self.leave(self.live.pop())
        if self.clock is not None:
            self.clock.run()
