"""The serving loop, without a cache: its outputs, and what is left when clients go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from models.harness import CHUNK, Harness
from models.zoo import random_tokens

from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.lockstep import new_worker
from phloem.cuda_streams.pools import DevicePools
from phloem.errors import InvalidRequest, NoRoom, RuntimeClosed
from phloem.runtime.integrations import server as server_module
from phloem.runtime.integrations.bare import BareCache, BareRequest
from phloem.runtime.integrations.server import HybridServer

PAGE = 16


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness("qwen3_next")


@asynccontextmanager
async def serving(
    harness: Harness, *, pages: int = 100, states: int = 10, batch_max: int = 16
) -> AsyncIterator[HybridServer[BareRequest]]:
    """A server without a cache; at the end every page and slot must be free again."""
    loop = asyncio.get_running_loop()
    stream = new_worker("model", LoopPoster(loop), loop)
    pools = DevicePools.allocate(harness.model.layout, pages=pages, states=states, page_size=PAGE)
    cache = BareCache(pools, stream)
    try:
        async with HybridServer(
            harness.model, cache, stream, chunk=CHUNK, batch_max=batch_max, keep_logits=True
        ) as server:
            yield server
        async with asyncio.timeout(60):  # who is told of the end leaves, and gives back
            while cache.free != (pages - 1, states - 1):
                await stream.call(lambda: None)
    finally:
        stream.close()


def first_logits(harness: Harness, prompt: list[int]) -> torch.Tensor:
    """Those after the prompt, computed in the server's chunks without pools."""
    cache = harness.model.new_cache()
    chunks = [prompt[start : start + CHUNK] for start in range(0, len(prompt), CHUNK)]
    logits = [harness.model.forward(chunk, cache, i * CHUNK) for i, chunk in enumerate(chunks)]
    return logits[-1][-1]


async def test_concurrent_requests_give_what_each_gives_alone(harness: Harness) -> None:
    prompts = [random_tokens(length, seed) for seed, length in enumerate((70, 5, 200, 64, 65))]
    async with serving(harness) as server:
        completions = await asyncio.gather(
            *(server.generate(prompt, 3 + number) for number, prompt in enumerate(prompts))
        )
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert torch.equal(completion.logits[0], first_logits(harness, prompt))
        assert list(completion.tokens[:-1]) == harness.cold(prompt, 2 + number).tokens
        assert (completion.computed, completion.reused) == (len(prompt), 0)
        assert 0 < completion.first_token_s <= completion.total_s


async def test_more_requests_than_a_batch_holds(harness: Harness) -> None:
    prompts = [random_tokens(40, seed) for seed in range(5)]
    async with serving(harness, batch_max=2) as server:
        completions = await asyncio.gather(*(server.generate(prompt, 4) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.tokens[:-1]) == harness.cold(prompt, 3).tokens


async def test_requests_wait_for_room(harness: Harness) -> None:
    """Room for one request at a time."""
    prompts = [random_tokens(100, seed) for seed in range(3)]
    async with serving(harness, pages=1 + 7, states=2) as server:
        completions = await asyncio.gather(*(server.generate(prompt, 5) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.tokens[:-1]) == harness.cold(prompt, 4).tokens


async def test_what_never_fits_is_refused_and_others_go_on(harness: Harness) -> None:
    async with serving(harness, pages=1 + 7) as server:
        large = asyncio.create_task(server.generate(random_tokens(120, 1), 5))
        small = asyncio.create_task(server.generate(random_tokens(60, 2), 5))
        with pytest.raises(NoRoom, match="kv: asked 8 of 7"):
            await large
        assert len((await small).tokens) == 5


async def test_a_client_that_is_cancelled_with_its_last_token_disturbs_nobody(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of its last pass, before its own task can hear of either."""
    prompt, other = random_tokens(30, 1), random_tokens(40, 2)
    async with serving(harness) as server:
        stays = asyncio.create_task(server.generate(other, 6))
        goes = asyncio.create_task(server.generate(prompt, 3))

        async def over(step: Any) -> None:
            await real(step)
            if any(len(one.tokens) == one.max_new - 1 == 2 for one in server._answers):
                goes.cancel()

        real = server_module._over
        monkeypatch.setattr(server_module, "_over", over)
        assert list((await stays).tokens[:-1]) == harness.cold(other, 5).tokens
        with pytest.raises(asyncio.CancelledError):
            await goes


async def test_who_closes_the_server_and_is_cancelled_hears_of_it(harness: Harness) -> None:
    async with serving(harness) as server:

        async def leave() -> None:
            await server.__aexit__(None, None, None)

        waiting = asyncio.create_task(server.generate(random_tokens(40, 2), 50))
        while not server._answers:  # noqa: ASYNC110  until it decodes
            await asyncio.sleep(0)
        leaving = asyncio.create_task(leave())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(RuntimeClosed):
            await waiting


@pytest.mark.parametrize("pauses", range(0, 60, 3))
async def test_a_cancelled_client_gives_everything_back(harness: Harness, pauses: int) -> None:
    """Cancelled after any number of turns of the loop; the neighbour is not disturbed."""
    prompt, other = random_tokens(150, 1), random_tokens(90, 2)
    async with serving(harness) as server:
        stays = asyncio.create_task(server.generate(other, 6))
        goes = asyncio.create_task(server.generate(prompt, 6))
        for _ in range(pauses):
            await asyncio.sleep(0)
        goes.cancel()
        await asyncio.wait([goes])
        tokens = (await stays).tokens
    assert list(tokens[:-1]) == harness.cold(other, 5).tokens


async def test_nobody_decodes_while_a_prompt_is_computed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when a client leaves who waits for the turn of its own prompt."""
    ran: list[str] = []
    prefill_chunk, decode_rows = HybridServer._prefill_chunk, HybridServer._decode_rows

    def prefilled(server: Any, *arguments: Any) -> Any:
        ran.append("prefill")
        return prefill_chunk(server, *arguments)

    def decoded(server: Any, *arguments: Any) -> Any:
        ran.append("decode")
        return decode_rows(server, *arguments)

    monkeypatch.setattr(HybridServer, "_prefill_chunk", prefilled)
    monkeypatch.setattr(HybridServer, "_decode_rows", decoded)
    async with serving(harness) as server:
        answering = asyncio.create_task(server.generate(random_tokens(CHUNK, 0), 30))
        await until(lambda: bool(server._answers))
        long = asyncio.create_task(server.generate(random_tokens(4 * CHUNK, 1), 1))
        await until(lambda: ran.count("prefill") > 1)
        waiting = asyncio.create_task(server.generate(random_tokens(5, 2), 1))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(answering, long, waiting, return_exceptions=True)
    first, last = ran.index("prefill", 1), len(ran) - 1 - ran[::-1].index("prefill")
    assert ran[first : last + 1] == ["prefill"] * 4
    assert ran.count("decode") == 29


async def test_a_failing_model_fails_its_request_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(RuntimeError):
        pass

    forward = harness.model.forward
    poison = random_tokens(50, 3)

    def fail(tokens, *rest, **options):  # type: ignore[no-untyped-def]
        if list(tokens) == poison:
            raise Broken
        return forward(tokens, *rest, **options)

    monkeypatch.setattr(harness.model, "forward", fail)
    async with serving(harness) as server:
        bad = asyncio.create_task(server.generate(poison, 2))
        good = asyncio.create_task(server.generate(random_tokens(50, 4), 2))
        with pytest.raises(Broken):
            await bad
        assert len((await good).tokens) == 2


async def test_a_failing_decode_step_fails_its_requests_and_the_loop_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(RuntimeError):
        pass

    def fail(*_: object) -> None:
        raise Broken

    async with serving(harness) as server:
        with monkeypatch.context() as patch:
            patch.setattr(harness.model, "decode", fail)
            with pytest.raises(Broken):
                await server.generate(random_tokens(50, 5), 3)
        assert len((await server.generate(random_tokens(50, 5), 3)).tokens) == 3


async def test_bad_calls_are_refused(harness: Harness) -> None:
    async with serving(harness) as server:
        with pytest.raises(InvalidRequest):
            await server.generate([], 3)
        with pytest.raises(InvalidRequest):
            await server.generate([5], 0)
    with pytest.raises(RuntimeClosed):
        await server.generate([5], 1)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  any test's condition
            await asyncio.sleep(0)


async def test_closing_ends_those_who_still_wait(harness: Harness) -> None:
    async with serving(harness) as server:
        waiting = asyncio.create_task(server.generate(random_tokens(50, 6), 1000))
        await until(lambda: bool(server._answers))
        assert not waiting.done()
    with pytest.raises(RuntimeClosed):
        await waiting


async def test_closing_ends_those_whose_prompt_is_computed_or_waits_its_turn(
    harness: Harness,
) -> None:
    async with serving(harness) as server:
        waiting = [
            asyncio.create_task(server.generate(random_tokens(5 * CHUNK, seed), new))
            for seed, new in ((7, 5), (8, 5), (9, 1))
        ]
        await until(server._turn.locked)
        assert not server._answers
    for task in waiting:
        with pytest.raises(RuntimeClosed):
            await asyncio.wait_for(task, 60)
