"""One memory for pages and states: the border moves, and every byte that is reused is its prompt's.

A frame that is blank is poisoned at once, so that whoever reads what it held before, or counts on
it, reads nonsense.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from serving import (
    PAGE,
    House,
    check_kv,
    compute,
    digests,
    house,
    opened,
    run,
    seed,
    serve,
    too_long,
)
from traffic import traffic_until

from phloem import (
    CacheConfig,
    CacheRuntime,
    DevicePools,
    InvalidRequest,
    ModelLayout,
    NoRoom,
    StateSpec,
)
from phloem.actors.allocator import Grant
from phloem.actors.frames import SharedLedger
from phloem.actors.tree.border import Border

LAYOUT = ModelLayout.hybrid(
    kv_layers=2,
    kv_heads=1,
    head_dim=1,
    kv_dtype="int64",
    states=[StateSpec("digest", (2,), "int64", layers=2), StateSpec("more", (62,), "int64", 2)],
)
FRAME = LAYOUT.slot_bytes
PER = FRAME // LAYOUT.page_bytes(PAGE)  # pages of a frame
ROUNDS = 20 if os.environ.get("PHLOEM_FUZZ") else 1


def border_of(here: House) -> Border:
    border = here.cache.core.tree_actor.border
    assert border is not None
    return border


def ledger_of(here: House) -> SharedLedger:
    ledger = here.cache.core.ledger
    assert isinstance(ledger, SharedLedger)
    return ledger


def poison(here: House) -> Counter[int]:
    """Fill each frame with nonsense when it becomes blank; how often each kind gave one up."""
    frames = ledger_of(here).frames
    storage = here.cache.pools.kv_rows.parts(LAYOUT.kv_layers[0])[0].untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    release, given = frames.release, Counter[int]()

    def released(frame: int) -> None:
        given[frames.kinds[frame]] += 1
        memory[frame * FRAME : (frame + 1) * FRAME] = 0xC5
        release(frame)

    frames.release = released  # type: ignore[method-assign]  # watched
    return given


@asynccontextmanager
async def shared(frames: int, **options: Any) -> AsyncIterator[tuple[House, Counter[int]]]:
    async with house(layout=LAYOUT, device_bytes=frames * FRAME, **options) as here:
        yield here, poison(here)


def test_the_frame_is_a_state() -> None:
    assert (PER, FRAME) == (8, 1024)


async def test_the_border_moves_both_ways(inline: bool) -> None:
    """Long prompts take what states had, and many states take what long prompts had."""
    async with shared(10, inline=inline) as (here, given):
        assert here.cache.stats().kv.size == 8 * PER + PER - 1
        long = run(1, 6 * PER * PAGE)
        await seed(here, long)
        assert here.cache.stats().kv.tree == 6 * PER
        for number in range(12):
            await seed(here, run(1000 + 100 * number, 2 * PAGE))
            await here.cache.audit()
        stats = here.cache.stats()
        assert stats.state.tree > 4
        assert given[1] > 0, "no frame of pages was given up"
        before = given[2]
        await seed(here, run(5000, 6 * PER * PAGE))
        assert here.cache.stats().kv.tree >= 6 * PER
        assert given[2] > before, "no frame of states was given up"
        assert await serve(here, [*run(5000, 6 * PER * PAGE), 1]) == 6 * PER * PAGE


async def put(here: House, tokens: list[int], *, states: int = 0) -> None:
    """Have the cache hold `tokens` as a model of theirs would leave them, without a request."""
    grant = await here.cache.allocate(pages=len(tokens) // PAGE, states=states, owner="put")
    chain = digests(tokens)
    for layer in here.cache.pools.kv.values():
        for part in (layer.k, layer.v):
            part[list(grant.pages)] = torch.tensor(chain[1:]).view(-1, PAGE, 1, 1)
    await here.cache.insert(tokens, pages=grant.pages, state=grant.states[0] if states else 0)


OLD, NEW = run(1, 10 * PAGE), run(100, 9 * PAGE)


async def moving(here: House) -> Grant:
    """Leave no frame to the next state: four pages of `NEW` move out of the third frame."""
    await put(here, OLD)  # the 7 pages of the home frame, and 3 of the next
    await put(here, NEW, states=1)  # the other 5, and 4 of the third
    match = await here.cache.match(NEW, whole=True)
    assert (match.usable, ledger_of(here).frames.blank) == (len(NEW), 3)
    here.gate.shut()
    grant = await here.cache.allocate(states=3, owner="states")
    here.cache.core.domain.drain()
    assert border_of(here).busy and here.cache.stats().copies_in_flight == 1
    return grant


async def test_pages_that_move_are_found_where_they_are(inline: bool) -> None:
    async with shared(8, inline=inline) as (here, given):
        grant = await moving(here)
        assert (given[1], ledger_of(here).frames.blank) == (0, 0)
        assert here.cache.stats().tree.pages == 6 + 9, "4 pages go for the 4 that move"
        here.gate.open()
        await here.settled()
        await here.cache.audit()
        border = border_of(here)
        assert (border.frames_cleared, border.pages_moved, given[1]) == (1, 4, 1)
        assert ledger_of(here).frames.blank == 1
        async with await here.cache.acquire(NEW, owner="reader", whole=True) as lease:
            assert lease.boundary == len(NEW)
            check_kv(here.cache.pools, lease.pages, digests(NEW), lease.boundary)
        here.cache.release(grant)


async def test_what_is_leased_while_it_is_copied_stays_where_it_is(inline: bool) -> None:
    async with shared(8, inline=inline) as (here, given):
        grant = await moving(here)
        lease = await here.cache.acquire(NEW, owner="reader", whole=True)
        before = lease.pages
        here.gate.open()
        await here.settled()
        await here.cache.audit()
        assert lease.pages == before
        check_kv(here.cache.pools, before, digests(NEW), lease.boundary)
        border = border_of(here)
        assert (border.frames_cleared, border.pages_moved, given[1]) == (0, 0, 0)
        assert ledger_of(here).frames.closed < 0
        lease.release()
        here.cache.release(grant)


async def test_what_is_copied_does_not_go_meanwhile(inline: bool) -> None:
    async with shared(8, inline=inline) as (here, given):
        grant = await moving(here)
        await here.cache.evict(pages=99, states=99)
        await here.cache.audit()
        assert here.cache.stats().tree.pages == len(NEW) // PAGE
        assert (given[1], ledger_of(here).frames.closed) == (0, 3)
        here.gate.open()
        await here.settled()
        await here.cache.audit()
        assert border_of(here).pages_moved == 4
        here.cache.release(grant)


async def test_a_copy_that_fails_moves_nothing(inline: bool) -> None:
    async with shared(8, inline=inline) as (here, _):
        grant = await moving(here)
        here.gate.error = RuntimeError("the copy fails")
        here.gate.open()
        await here.settled()
        here.gate.error = None
        await here.cache.audit()
        assert ledger_of(here).frames.closed < 0 or border_of(here).busy
        async with await here.cache.acquire(NEW, owner="reader", whole=True) as lease:
            check_kv(here.cache.pools, lease.pages, digests(NEW), lease.boundary)
        here.cache.release(grant)


async def test_a_copy_that_takes_too_long_is_not_waited_for(inline: bool) -> None:
    """Its memory stays as it is until its end; who waited for the frame takes what others give."""
    async with shared(8, inline=inline) as (here, _):
        grant = await moving(here)
        first = await here.cache.allocate(states=1, owner="first")  # the last state goes for it
        waiting = asyncio.ensure_future(here.cache.allocate(states=1, owner="late"))
        border = border_of(here)
        await too_long(here.cache, "copy_pages")
        await here.until(lambda: not border.busy)
        assert not border.busy and ledger_of(here).frames.closed < 0 and not waiting.done()
        here.cache.release(grant)
        late = await waiting  # of what was given back
        await here.cache.audit()
        async with await here.cache.acquire(NEW, owner="reader", whole=True) as lease:
            check_kv(here.cache.pools, lease.pages, digests(NEW), lease.boundary)
        await here.cache.evict(pages=99, states=99)
        assert here.cache.stats().tree.pages == len(NEW) // PAGE, "what is copied does not go"
        here.gate.open()
        await here.settled()
        await here.cache.audit()
        assert (border.pages_moved, border.frames_cleared) == (4, 0)
        async with await here.cache.acquire(NEW, owner="reader", whole=True) as lease:
            check_kv(here.cache.pools, lease.pages, digests(NEW), lease.boundary)
        for one in (first, late):
            here.cache.release(one)


async def test_a_reset_while_pages_move_gives_everything_back(inline: bool) -> None:
    async with shared(8, inline=inline) as (here, _):
        grant = await moving(here)
        await here.cache.reset()
        here.gate.open()
        await here.settled()
        await here.cache.audit()
        assert border_of(here).pages_moved == 0
        here.cache.release(grant)


async def test_who_waits_for_a_state_gets_the_frame_that_is_cleared(inline: bool) -> None:
    async with shared(8, inline=inline) as (here, _):
        grant = await moving(here)
        first = await here.cache.allocate(states=1, owner="first")  # the last state goes for it
        assert here.cache.stats().tree.states == 0
        waiting = asyncio.ensure_future(here.cache.allocate(states=1, owner="late"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(NoRoom):
            here.cache.nowait.allocate(states=1, owner="hasty")
        here.gate.open()
        late = await waiting
        for one in (first, late, grant):
            here.cache.release(one)


@pytest.mark.parametrize("frames", [9, 12])
@pytest.mark.parametrize("chunk", [PAGE, 2 * PAGE])
async def test_every_reuse_reads_its_own_bytes(frames: int, chunk: int, inline: bool) -> None:
    for number in range(ROUNDS):
        async with shared(frames, inline=inline, state_chunk=chunk) as (here, given):

            def enough(tried: Counter[str]) -> bool:
                return given[1] + given[2] > 0 and tried["finished"] > 0

            await traffic_until(here, number, 50, enough)


async def test_with_a_host_tier(inline: bool) -> None:
    for policy in ("write_through", "write_back"):
        async with shared(7, inline=inline, host_bytes="64KiB", write_policy=policy) as (here, _):
            await traffic_until(here, 3, 40, lambda tried: tried["finished"])


# -- refusals --------------------------------------------------------------------------------------


async def test_a_refusal_says_what_both_pools_could_give_and_in_bytes(inline: bool) -> None:
    async with shared(6, inline=inline) as (here, _):
        with pytest.raises(NoRoom, match="1024 bytes each") as refused:
            await here.cache.allocate(pages=4 * PER, states=2, owner="much")
        kv, state = refused.value.figures
        assert (kv.size, kv.free, kv.shared) == (5 * PER - 1, 5 * PER - 1, 4 * PER)
        assert (state.size, state.free, state.shared) == (4, 4, 4)
        assert refused.value.bytes_asked == 4 * FRAME + 2 * FRAME
        grant = await here.cache.allocate(pages=3 * PER - 1, states=2, owner="all")
        with pytest.raises(NoRoom):
            here.cache.nowait.allocate(states=1, owner="more")
        here.cache.release(grant)


async def test_pages_take_the_last_frame_only_when_nothing_else_can_go(inline: bool) -> None:
    async with shared(4, inline=inline) as (here, _):
        await seed(here, run(1, PAGE))
        grant = await here.cache.allocate(pages=3 * PER - 1, owner="pages")
        assert ledger_of(here).frames.blank == 0
        assert here.cache.stats().state.tree == 0
        here.cache.release(grant)


def test_adopted_tensors_are_refused_unless_they_share_one_memory() -> None:
    separate = DevicePools.allocate(LAYOUT, pages=8, states=4, page_size=PAGE)
    config = CacheConfig(layout=LAYOUT, page_size=PAGE, state_chunk=PAGE, device_bytes=6 * FRAME)
    with pytest.raises(InvalidRequest, match="share one memory"):
        CacheRuntime(config, pools=separate)
    one = DevicePools.share(LAYOUT, nbytes=6 * FRAME, page_size=PAGE)
    assert CacheRuntime(config, pools=one).pools is one


@pytest.mark.parametrize("size", [2 * FRAME, "1KiB"])
def test_too_little_memory_is_refused_with_the_figures(size: int | str) -> None:
    config = CacheConfig(layout=LAYOUT, page_size=PAGE, device_bytes=size)
    with pytest.raises(InvalidRequest, match="frames of 1024 bytes"):
        CacheRuntime(config)


async def test_a_model_without_states_has_all_of_it_for_pages(inline: bool) -> None:
    attention = ModelLayout.attention_only(layers=2, kv_heads=1, head_dim=1, kv_dtype="int64")
    size = 9 * attention.page_bytes(PAGE)
    async with house(inline=inline, layout=attention, device_bytes=size) as here:
        assert here.cache.stats().kv.size == 8
        request = await opened(here, run(1, 5), 2 * PAGE)
        await compute(here, request, run(1, 5), 5)
        await request.finish()
