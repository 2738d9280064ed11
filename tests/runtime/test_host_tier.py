"""The host tier end to end: backups, demotion, loads, and what happens when they fail."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

import pytest
from serving import PAGE, House, compute, house, run

from phloem import CopyFailed, InvalidRequest, Request
from phloem.errors import HostMemoryShort
from phloem.events import CopyEnded
from phloem.runtime.config import parse_bytes

PROMPTS = [run(n, 4 * PAGE + 1) for n in range(1, 7)]


async def finish(here: House, request: Request, prompt: list[int]) -> None:
    """The rest of a request's life; its model checks every byte that it builds on."""
    await request.allocate(len(prompt) - request.computed)
    await request.ready()
    await request.allocate(len(prompt) - request.computed)  # if less came than was promised
    await request.ready()
    while request.computed < len(prompt):
        _, end = request.next_stop(PAGE)
        await compute(here, request, prompt, end)
        await request.checkpoint(state=end % PAGE == 0 or None)
    await request.finish()


async def serve(here: House, prompt: list[int]) -> int:
    """One request from door to door; returns what it was promised."""
    request = await here.cache.open_request(prompt)
    promised = request.usable
    await finish(here, request, prompt)
    return promised


async def only_on_the_host(here: House, prompt: list[int]) -> None:
    """Serve `prompt` once, so that its data is on the host and nowhere else."""
    await serve(here, prompt)
    await here.settled()
    await here.cache.evict(pages=99, states=99)
    match = await here.cache.match(prompt)
    assert (match.device, match.host) == (0, 4 * PAGE)


@pytest.mark.parametrize("write_policy", ["write_through", "selective", "write_back"])
async def test_what_left_the_device_comes_back_from_the_host(
    write_policy: str, inline: bool
) -> None:
    async with house(
        inline=inline, pages=12, states=6, host_bytes="1MiB", write_policy=write_policy
    ) as here:
        reused = 0
        for _ in range(3):
            for prompt in [*PROMPTS, *PROMPTS[:2], *PROMPTS[:2]]:
                reused += await serve(here, prompt)
                await here.settled()
                await here.cache.audit()
        stats = here.cache.stats()
        assert stats.tokens_loaded > 0
        assert reused > 0
        assert stats.host_kv is not None and stats.host_kv.tree > 0


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_bytes("8GiB") == 8 << 30
    assert parse_bytes("1.5MiB") == 3 << 19
    assert parse_bytes(4096) == 4096
    for bad in ("8GB", "", "GiB", "-1KiB", -1, "1e99999GiB"):
        with pytest.raises(InvalidRequest):
            parse_bytes(bad)


def roomy(inline: bool) -> AbstractAsyncContextManager[House]:
    return house(inline=inline, pages=24, states=12, host_bytes="1MiB")


async def test_f100_requests_that_want_the_same_join_one_load(inline: bool) -> None:
    async with roomy(inline) as here:
        await only_on_the_host(here, PROMPTS[0])
        here.gate.shut()
        first = await here.cache.open_request(PROMPTS[0], id="first")
        second = await here.cache.open_request(PROMPTS[0], id="second")
        assert (first.usable, second.usable) == (4 * PAGE, 4 * PAGE)
        for request in (first, second):
            await request.allocate(1)
        both = asyncio.gather(first.ready(), second.ready())
        await asyncio.sleep(0.01)
        assert not both.done()
        here.gate.open()
        await both
        assert here.cache.stats().actions["LoadToDevice"] == 1
        assert first.page_table()[:4] == second.page_table()[:4]
        for request in (first, second):
            await finish(here, request, PROMPTS[0])


async def test_f028_f052_a_load_that_fails_is_computed_again(inline: bool) -> None:
    async with roomy(inline) as here:
        await only_on_the_host(here, PROMPTS[0])
        here.gate.error = RuntimeError("the link is down")
        request = await here.cache.open_request(PROMPTS[0])
        assert request.match.looked_up == 4 * PAGE
        await request.allocate(1)
        waiting = asyncio.ensure_future(request.ready())
        await here.until(lambda: any(ended.error for ended in here.of_type(CopyEnded)))
        here.gate.error = None
        with contextlib.suppress(CopyFailed):
            await waiting  # the clearing of its own state may have failed, too
        assert (request.usable, request.computed) == (0, 0)
        await finish(here, request, PROMPTS[0])
        match = await here.cache.match(PROMPTS[0])
        assert match.device == 4 * PAGE
        await here.cache.audit()


async def test_f059_a_request_that_leaves_during_its_load_leaves_nothing(inline: bool) -> None:
    async with roomy(inline) as here:
        await only_on_the_host(here, PROMPTS[0])
        here.gate.shut()
        request = await here.cache.open_request(PROMPTS[0])
        await request.allocate(1)
        waiting = asyncio.ensure_future(request.ready())
        await asyncio.sleep(0)
        waiting.cancel()
        request.abort()
        await here.cache.audit()
        here.gate.open()
        await here.settled()
        await here.cache.audit()
        assert (await here.cache.match(PROMPTS[0])).device == 4 * PAGE, "kept as cache"
        await serve(here, PROMPTS[0])


async def test_s116_without_room_for_the_load_the_promise_is_smaller(inline: bool) -> None:
    async with roomy(inline) as here:
        await only_on_the_host(here, PROMPTS[0])
        held = await here.cache.allocate(pages=22, owner="other")
        request = await here.cache.open_request(PROMPTS[0])
        assert (request.usable, request.boundary) == (0, 0)
        assert not here.cache.stats().copies_in_flight
        here.cache.release(held)
        await finish(here, request, PROMPTS[0])
        await here.cache.audit()


async def test_a_reset_during_a_load(inline: bool) -> None:
    async with roomy(inline) as here:
        await only_on_the_host(here, PROMPTS[0])
        here.gate.shut()
        request = await here.cache.open_request(PROMPTS[0])
        await request.allocate(1)
        waiting = asyncio.ensure_future(request.ready())
        await asyncio.sleep(0)
        await here.cache.reset()
        here.gate.open()
        await asyncio.wait([waiting], timeout=60)
        assert waiting.done()
        request.abort()
        if not waiting.cancelled():
            waiting.exception()
        await here.settled()
        await here.cache.audit()
        stats = here.cache.stats()
        assert stats.host_kv is not None and stats.host_kv.tree == 0


async def test_host_memory_that_is_not_there_is_said(inline: bool) -> None:
    with pytest.raises(HostMemoryShort):
        async with house(inline=inline, host_bytes="4096TiB"):
            raise AssertionError("opened")
