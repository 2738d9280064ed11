"""The serving loop while a load is under way: each layer of the model waits for its own part."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest
import torch
from models.harness import CHUNK, Harness
from models.test_server import first_logits
from models.zoo import random_tokens
from serving import too_long

from phloem import CacheConfig, CacheRuntime, Request
from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.threads import ThreadEngine
from phloem.runtime.integrations.server import HybridServer
from phloem.runtime.integrations.transformers import TransformersModel

pytestmark = pytest.mark.not_sim("what hangs here blocks threads")

PAGE, NEW = 16, 3
pytestmark = pytest.mark.not_sim("its link blocks threads")
PROMPT = random_tokens(3 * CHUNK + 9, 1)


class Link:
    """Loads as the test wants them: so many layers land, then they wait or fail."""

    def __init__(self) -> None:
        self.layers: int | None = None
        self.fails = False
        self.failed = 0
        self._changed = threading.Condition()

    def up_to(self, layers: int | None) -> None:
        with self._changed:
            self.layers = layers
            self._changed.notify_all()

    def __call__(self, ticket: Ticket, layer: int) -> None:
        if ticket.batch.channel != "h2d":
            return
        with self._changed:
            assert self._changed.wait_for(lambda: self.fails or self._may_land(layer), 60)
            if not self._may_land(layer):
                self.failed += 1
                raise OSError("the link is down")

    def _may_land(self, layer: int) -> bool:
        return self.layers is None or layer < self.layers

    def fail(self) -> None:
        with self._changed:
            self.fails = True
            self._changed.notify_all()


class House:
    """A server whose cache has the first part of PROMPT on the host only."""

    def __init__(self, harness: Harness, cache: CacheRuntime, link: Link) -> None:
        self.harness, self.cache, self.link = harness, cache, link
        self.entered: list[int] = []  # layers that the model has come to
        self._hooks = [
            layer.register_forward_pre_hook(self._note(number))
            for number, layer in enumerate(_layers(harness.model))
        ]

    def _note(self, number: int) -> Callable[..., None]:
        return lambda *_: self.entered.append(number)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():  # noqa: ASYNC110  there is nothing else to wait on
                await asyncio.sleep(0.002)

    async def forget_on_device(self) -> None:
        await self.until(lambda: not self.cache.stats().copies_in_flight)
        await self.cache.evict(pages=999, states=999)
        await self.until(lambda: not self.cache.stats().copies_in_flight)
        self.entered.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _layers(model: TransformersModel) -> list[torch.nn.Module]:
    inner = cast("torch.nn.Module", model.model).get_submodule("model.layers")
    return list(inner.children())


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness("qwen3_next")


@asynccontextmanager
async def serving(
    harness: Harness, *, by_layer: bool = True
) -> AsyncIterator[tuple[House, HybridServer[Request]]]:
    config = CacheConfig(
        layout=harness.model.layout,
        page_size=PAGE,
        state_chunk=CHUNK,
        device_pages=100,
        device_states=10,
        host_bytes="64MiB",
    )
    link = Link()
    async with CacheRuntime(config, engine=lambda post: ThreadEngine(post, fault=link)) as cache:
        stream = cache.worker_stream("model")
        house = House(harness, cache, link)
        try:
            async with HybridServer(
                harness.model, cache, stream, chunk=CHUNK, keep_logits=True, by_layer=by_layer
            ) as server:
                await server.generate(PROMPT, 1)
                await server.generate(PROMPT, 1)  # a second use, which is when it is backed up
                await house.forget_on_device()
                assert (await cache.match(PROMPT)).device == 0
                yield house, server
            await cache.audit()
        finally:
            link.up_to(None)
            house.close()
            stream.close()


async def test_a_late_layer_delays_only_what_follows_it(harness: Harness) -> None:
    cold = harness.cold(PROMPT, NEW)
    async with serving(harness) as (house, server):
        depth = len(_layers(harness.model))
        house.link.up_to(0)
        answer = asyncio.create_task(server.generate(PROMPT, NEW))
        for landed in range(depth):
            await house.until(partial(house.entered.__contains__, landed))
            await asyncio.sleep(0.01)
            assert house.entered == list(range(landed + 1)), "it is computed, and the next waits"
            house.link.up_to(landed + 1)
        house.link.up_to(None)
        completion = await answer
        assert completion.computed == len(PROMPT) - 3 * CHUNK
        assert torch.equal(completion.logits[0], first_logits(harness, PROMPT))
        assert list(completion.tokens[:-1]) == cold.tokens[: NEW - 1]
        assert house.cache.stats().tokens_loaded == 3 * CHUNK


async def test_without_it_nothing_begins_before_all_is_there(harness: Harness) -> None:
    async with serving(harness, by_layer=False) as (house, server):
        house.link.up_to(len(_layers(harness.model)) - 1)
        answer = asyncio.create_task(server.generate(PROMPT, NEW))
        await asyncio.sleep(0.05)
        assert not house.entered
        house.link.up_to(None)
        assert (await answer).computed == len(PROMPT) - 3 * CHUNK


@pytest.mark.parametrize("at", [0, 2, 3])
async def test_a_layer_that_fails_ends_the_pass_and_it_is_computed_again(
    harness: Harness, at: int
) -> None:
    cold = harness.cold(PROMPT, NEW)
    async with serving(harness) as (house, server):
        house.link.up_to(at)
        answer = asyncio.create_task(server.generate(PROMPT, NEW))
        await house.until(lambda: at in house.entered)
        house.link.fail()
        completion = await answer
        assert house.link.failed == 1
        # The first pass came as far as the layer that failed; those after it computed all.
        assert house.entered[: at + 2] == [*range(at + 1), 0]
        assert completion.computed == len(PROMPT)
        assert list(completion.tokens[:-1]) == cold.tokens[: NEW - 1]
        assert torch.equal(completion.logits[0], first_logits(harness, PROMPT))


async def test_a_load_that_hangs_holds_the_model_no_longer_than_it_may_take(
    harness: Harness,
) -> None:
    cold = harness.cold(PROMPT, NEW)
    async with serving(harness) as (house, server):
        house.link.up_to(1)
        answer = asyncio.create_task(server.generate(PROMPT, NEW))
        await house.until(lambda: 1 in house.entered)
        await too_long(house.cache, "load")
        completion = await asyncio.wait_for(answer, 60)
        assert house.cache.stats().copies_in_flight, "it hangs to this hour"
        assert completion.computed == len(PROMPT)
        assert list(completion.tokens[:-1]) == cold.tokens[: NEW - 1]


async def test_a_client_that_leaves_lets_the_model_go(harness: Harness) -> None:
    other = random_tokens(20, 2)
    async with serving(harness) as (house, server):
        house.link.up_to(1)
        goes = asyncio.create_task(server.generate(PROMPT, NEW))
        await house.until(lambda: 1 in house.entered)
        goes.cancel()
        await asyncio.wait([goes])
        stays = await asyncio.wait_for(server.generate(other, NEW), 60)
        assert house.cache.stats().copies_in_flight, "the load is where it was"
        assert list(stays.tokens[:-1]) == harness.cold(other, NEW).tokens[: NEW - 1]
