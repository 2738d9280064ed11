"""Wrong calls get the documented error and change nothing."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from serving import ATTENTION, HYBRID, PAGE, House, compute, dump, house, rounds, run, seed

from phloem import (
    Admission,
    CacheConfig,
    CacheRuntime,
    ContentMark,
    DevicePools,
    InvalidRequest,
    Namespace,
    NoRoom,
    OwnershipError,
    Placement,
    Request,
    RuntimeClosed,
    StaleHandle,
    TokenKey,
)
from phloem.actors.tree.policies import Lru
from phloem.cuda_streams.engine import Post
from phloem.cuda_streams.threads import ThreadEngine
from phloem.events import Event, LeaseLeaked

PROMPT = run(1, 3 * PAGE)


async def refused(
    here: House,
    error: type[Exception] | tuple[type[Exception], ...],
    call: Callable[[], object],
    *,
    match: str | None = None,
) -> None:
    """`call` raises `error` and leaves everything as it was."""
    here.cache.core.domain.drain()
    before = dump(here.cache)
    with pytest.raises(error, match=match):
        answer = call()
        if isinstance(answer, Awaitable):
            await asyncio.wait_for(answer, 60)
    here.cache.core.domain.drain()
    assert dump(here.cache) == before
    await here.cache.audit()


BAD_TOKENS: dict[str, Any] = {
    "negative": [1, 2, -3],
    "too_large": [1, 2**31],
    "huge": [2**70],
    "float": [1, 2.0, 3],
    "none": [1, None],
    "tensor_of_floats": [1, torch.tensor(2.5)],
    "text": "abc",
    "array_of_floats": np.array([1.0, 2.0]),
    "array_of_large": np.array([1, 2**40]),
    "array_of_negative": np.array([1, -1], dtype=np.int32),
    "nested": [[1, 2], [3, 4]],
    "nothing": None,
    "number": 7,
    "set": {1, 2, 3},
    "dict": {1: 2},
}


@pytest.mark.parametrize("bad", BAD_TOKENS)
async def test_bad_tokens(bad: str, inline: bool) -> None:
    tokens = BAD_TOKENS[bad]
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT)
        grant = await cache.allocate(pages=2, owner="low")
        request = await cache.open_request(PROMPT)
        calls: list[Callable[[], object]] = [
            lambda: cache.match(tokens),
            lambda: cache.acquire(tokens, owner="low"),
            lambda: cache.open_request(tokens),
            lambda: cache.insert(tokens, pages=grant.pages),
            lambda: cache.nowait.match(tokens),
            lambda: cache.nowait.acquire(tokens),
            lambda: cache.nowait.insert(tokens, pages=grant.pages),
            lambda: cache.nowait.match_many([PROMPT, tokens]),
            lambda: cache.nowait.admit_many([Admission(PROMPT, 1), Admission(tokens, 1)]),
            lambda: request.extend(tokens),
        ]
        for call in calls:
            await refused(here, InvalidRequest, call)
        request.abort()
        cache.release(grant)


async def test_bad_openings(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        request = await cache.open_request(PROMPT, id="r")
        calls: list[Callable[[], object]] = [
            lambda: cache.open_request([]),
            lambda: cache.open_request(PROMPT, id="r"),
            lambda: cache.open_request(PROMPT, breakpoints=[-1]),
            lambda: cache.open_request(PROMPT, breakpoints=[len(PROMPT) + 1]),
            lambda: cache.open_request(PROMPT, breakpoints=[1.5]),  # type: ignore[list-item]  # on purpose
            lambda: cache.open_request(PROMPT, session="s", session_ttl=inf),
            lambda: cache.open_request(PROMPT, priority=1, keep_for=nan),
            lambda: cache.open_request(PROMPT, marks=[ContentMark(10, 9, b"x" * 8)]),
            lambda: cache.open_request(PROMPT, marks=[ContentMark(-1, 2, b"x" * 8)]),
            lambda: cache.open_request(PROMPT, marks=[(0, 9, b"x" * 8)]),  # type: ignore[list-item]  # on purpose
            lambda: cache.open_request(PROMPT, marks=[ContentMark(0, 9, "x" * 8)]),  # type: ignore[arg-type]  # on purpose
            lambda: cache.open_request(PROMPT, priority=101),
            lambda: cache.open_request(PROMPT, session="s", session_ttl="long"),  # type: ignore[arg-type]  # on purpose
            lambda: cache.request(PROMPT, join=True, join_timeout=nan).__aenter__(),
            lambda: request.join(timeout="long"),  # type: ignore[arg-type]  # on purpose
            lambda: request.allocate(1, timeout=nan),
            lambda: cache.allocate(pages=1, timeout="long"),  # type: ignore[arg-type]  # on purpose
            lambda: cache.step(request),  # type: ignore[arg-type]  # on purpose
            lambda: cache.step(["r"]),  # type: ignore[list-item]  # on purpose
            lambda: cache.release(None),  # type: ignore[arg-type]  # on purpose
            lambda: cache.nowait.admit_many([Admission(PROMPT, 1), PROMPT]),  # type: ignore[list-item]  # on purpose
            lambda: cache.use_policy(Lru),  # type: ignore[arg-type]  # the class, on purpose
            lambda: cache.use_policy(None),  # type: ignore[arg-type]  # on purpose
            lambda: cache.nowait.match(TokenKey.of(PROMPT), namespace=Namespace("other")),
            lambda: cache.nowait.admit_many([Admission(PROMPT, 1), Admission(PROMPT, -1)]),
            lambda: cache.nowait.admit_many([Admission(PROMPT, 1), Admission(PROMPT, 1, 0.5)]),  # type: ignore[arg-type]  # on purpose
        ]
        for call in calls:
            await refused(here, InvalidRequest, call)
        request.abort()


BAD_NAMES: dict[str, Any] = {"number": 3, "bytes": b"a", "half_a_character": "a\ud800"}


@pytest.mark.parametrize("bad", BAD_NAMES)
async def test_names_are_text_that_a_log_can_hold(bad: str, inline: bool) -> None:
    name = BAD_NAMES[bad]
    async with house(inline=inline) as here:
        cache = here.cache
        request = await cache.open_request(PROMPT)
        calls: list[Callable[[], object]] = [
            lambda: cache.open_request(PROMPT, id=name),
            lambda: cache.open_request(PROMPT, session=name),
            lambda: request.fork(name),
            lambda: cache.close_session(name),
            lambda: cache.acquire(PROMPT, owner=name),
            lambda: cache.allocate(pages=1, owner=name),
            lambda: cache.nowait.acquire(PROMPT, owner=name),
            lambda: cache.nowait.allocate(pages=1, owner=name),
            lambda: cache.nowait.admit_many([Admission(PROMPT, 1), Admission(PROMPT, 1, 0, name)]),
            lambda: cache.match(PROMPT, namespace=name),
            lambda: cache.match(PROMPT, namespace=Namespace(name)),
            lambda: cache.match(PROMPT, namespace=Namespace("", name)),
            lambda: cache.match(PROMPT, namespace=("a", "b")),  # type: ignore[arg-type]  # on purpose
            lambda: cache.prefetch(PROMPT, namespace=name),
            lambda: cache.explain(PROMPT, namespace=name),
        ]
        for call in calls:
            await refused(here, InvalidRequest, call)
        request.abort()


async def test_two_requests_of_one_name_are_never_open_together(inline: bool) -> None:
    async with house(inline=inline) as here:
        opened = await asyncio.gather(
            *(here.cache.open_request(PROMPT, id="r") for _ in range(3)), return_exceptions=True
        )
        (only,) = [one for one in opened if isinstance(one, Request)]
        assert all(isinstance(one, InvalidRequest) for one in opened if one is not only)
        assert here.cache.stats().tree.leases == 1
        named = await here.cache.open_request(PROMPT, id="request-1")
        unnamed = await here.cache.open_request(PROMPT)
        for request in (only, named, unnamed):
            request.abort()


# -- the order of calls ----------------------------------------------------------------------------


async def ready_request(here: House, *, pages: int = 4, **options: Any) -> Request:
    request = await here.cache.open_request(PROMPT, **options)
    await request.allocate(pages * PAGE - request.computed)
    await request.ready()
    return request


async def test_calls_out_of_order(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        request = await cache.open_request(PROMPT)

        def launch(end: Any) -> Callable[[], object]:
            def call() -> None:
                step = cache.step([request])
                try:
                    step.launched({request: end})
                finally:
                    step.abandon()

            return call

        await refused(here, InvalidRequest, request.ready, match="allocate comes before")
        await refused(here, InvalidRequest, lambda: request.allocate(-1))
        await refused(here, InvalidRequest, lambda: request.allocate(1.5))  # type: ignore[arg-type]  # on purpose
        await refused(here, InvalidRequest, lambda: request.allocate_nowait(-1))
        await refused(here, InvalidRequest, request.fork)
        await refused(here, InvalidRequest, launch(PAGE), match="not ready")
        await request.allocate(2 * PAGE)
        await refused(here, InvalidRequest, launch(PAGE), match="not ready")
        await request.ready()
        for end in (-1, 2 * PAGE + 1, len(PROMPT) + 1, 10**12):
            await refused(here, InvalidRequest, launch(end), match="computed up to|at least")
            await request.ready()  # an abandoned pass may have overwritten the state
        unfit: Any
        for unfit in (2.0, "4", None):
            await refused(here, InvalidRequest, launch(unfit), match="whole number")
            await request.ready()
        for unfit in (0, -1, 2.5):
            await refused(here, InvalidRequest, partial(request.next_stop, unfit))
        for unfit in (-1, len(PROMPT) + 1, 1.5):
            await refused(here, InvalidRequest, partial(request.rollback, unfit))
        await refused(here, InvalidRequest, lambda: request.try_snapshot_slot(4.0))  # type: ignore[arg-type]  # on purpose
        await refused(here, InvalidRequest, lambda: request.finish(publish="some"))  # type: ignore[arg-type]  # on purpose
        await compute(here, request, PROMPT, 2 * PAGE)
        await refused(here, InvalidRequest, lambda: request.rollback(PAGE), match="no snapshot")
        step = cache.step([request])
        calls: list[Callable[[], object]] = [
            request.advance,
            request.checkpoint,
            request.fork,
            request.finish,
            lambda: request.rollback(2 * PAGE),
        ]
        for call in calls:
            await refused(here, InvalidRequest, call, match="step")
        request.extend([7])
        await request.allocate(1)
        step.launched({request: 2 * PAGE})
        await refused(here, InvalidRequest, request.advance, match="not over")
        await refused(here, InvalidRequest, lambda: request.rollback(PAGE), match="not over")
        await refused(here, InvalidRequest, lambda: step.launched({request: 2 * PAGE}))
        step.end()
        for again in (step.end, step.abandon, lambda: step.launched({})):
            await refused(here, InvalidRequest, again)
        request.abort()


async def test_steps_take_only_live_requests_of_this_runtime(inline: bool) -> None:
    async with house(inline=inline) as here, house(inline=inline) as there:
        cache = here.cache
        mine, other = await ready_request(here), await ready_request(here)
        foreign = await ready_request(there)
        over = await ready_request(here)
        over.abort()
        await here.settled()
        await refused(here, StaleHandle, lambda: cache.step([mine, foreign]))
        await refused(here, StaleHandle, lambda: cache.step([over]))
        await refused(here, InvalidRequest, lambda: cache.step([mine, mine]))
        suspended = await ready_request(here)
        await suspended.suspend()
        await refused(here, InvalidRequest, lambda: cache.step([mine, suspended]))
        assert not mine.fences(), "it would wait for ever for a step that nobody has"
        suspended.abort()
        step = cache.step([mine])
        await refused(here, InvalidRequest, lambda: step.launched({other: 4}), match="not of step")
        await refused(here, InvalidRequest, lambda: step.launched({foreign: 4}))
        assert step.state == "opened"
        # One bad end leaves the others where they were.
        both = cache.step([other])
        await refused(here, InvalidRequest, lambda: both.launched({other: 10**6}))
        both.abandon()
        step.abandon()
        for request in (mine, other, foreign):
            request.abort()


@pytest.mark.parametrize("how", ["finished", "aborted"])
async def test_a_request_that_is_over_is_over(how: str, inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        request = await ready_request(here)
        await compute(here, request, PROMPT, 2 * PAGE)
        if how == "finished":
            await request.finish()
        else:
            request.abort()
        await here.settled()
        await here.until(lambda: not request.resources())
        calls: list[Callable[[], object]] = [
            lambda: request.allocate(1),
            lambda: request.allocate_nowait(1),
            request.ready,
            request.advance,
            lambda: request.extend([1]),
            lambda: request.rollback(PAGE),
            lambda: request.next_stop(4),
            lambda: request.try_snapshot_slot(8),
            request.checkpoint,
            request.fork,
            request.finish,
            request.join,
            lambda: cache.step([request]),
        ]
        for call in calls:
            await refused(here, StaleHandle, call)
        before = dump(cache)
        request.abort()  # idempotent, also after finish
        assert dump(cache) == before and request.status == how
        assert request.resources() == {}


# -- handles ---------------------------------------------------------------------------------------


async def test_leases_and_grants_are_given_back_once(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT)
        lease = await cache.acquire(PROMPT, owner="low")
        grant = await cache.allocate(pages=3, states=1, owner="low")
        cache.release(lease)
        cache.release(grant)
        for call in (
            lambda: cache.release(lease),
            lease.release,
            lambda: cache.nowait.release(lease),
            lambda: cache.release(grant),
            lambda: cache.nowait.release(grant),
            lambda: cache.insert(PROMPT, pages=[], lease=lease),
        ):
            await refused(here, StaleHandle, call)
        again = await cache.allocate(pages=3, states=1, owner="low")
        await refused(here, StaleHandle, lambda: cache.release(grant))  # places are another's now
        cache.release(again)


@pytest.mark.parametrize("second", ["release", "with_block", "collected", "after_again"])
async def test_a_lease_released_after_a_step_is_spent_at_once(second: str, inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT)
        request = await ready_request(here)
        step = cache.step([request])
        lease = await cache.acquire(PROMPT, owner="low")
        if second == "with_block":
            async with lease:
                cache.release(lease, after=step)
        else:
            cache.release(lease, after=step)
        if second == "release":
            await refused(here, StaleHandle, lease.release)
        elif second == "after_again":
            await refused(here, StaleHandle, lambda: cache.release(lease, after=step))
        elif second == "collected":
            del lease
            gc.collect()
        await rounds(5)
        assert cache.stats().tree.leases == 2, "it protects until the step is over"
        step.abandon()
        await here.until(lambda: cache.stats().tree.leases == 1)
        assert cache.stats().tree.leases == 1 and not here.of_type(LeaseLeaked)
        request.abort()


async def test_a_lease_that_was_lost_is_released_and_its_owner_named(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, PROMPT)
        lease = await cache.acquire(PROMPT, owner="careless", whole=True)
        assert cache.stats().tree.pages_protected == 3
        del lease
        gc.collect()
        await here.until(lambda: cache.stats().tree.leases == 0)
        assert cache.stats().tree.leases == 0 and cache.stats().leases_leaked == 1
        (told,) = here.of_type(LeaseLeaked)
        assert told.request == "careless"


async def test_handles_of_another_runtime(inline: bool) -> None:
    async with house(inline=inline) as here, house(inline=inline) as there:
        for each in (here, there):
            await seed(each, PROMPT)
        lease = await there.cache.acquire(PROMPT, owner="low")
        grant = await there.cache.allocate(pages=2, owner="low")
        mine = await here.cache.acquire(PROMPT, owner="low")
        request = await ready_request(here)
        step = here.cache.step([request])
        cache = here.cache
        for call in (
            lambda: cache.release(lease),
            lambda: cache.release(lease, after=step),
            lambda: cache.release(grant),
            lambda: cache.nowait.release(lease),
            lambda: cache.insert(PROMPT, pages=[], lease=lease),
        ):
            await refused(here, StaleHandle, call)
        await refused(here, OwnershipError, lambda: cache.insert(PROMPT, pages=[9, 10, 11]))
        assert lease.inner.live and not lease.released and not grant.released
        step.abandon()
        request.abort()
        mine.release()
        there.cache.release(lease)
        there.cache.release(grant)


# -- inserts ---------------------------------------------------------------------------------------


async def test_a_grant_is_no_lease(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        grant: Any = await cache.allocate(pages=1, owner="low")
        for call in (cache.insert, cache.nowait.insert):
            await refused(
                *(here, InvalidRequest, lambda f=call: f(PROMPT[:PAGE], pages=[1], lease=grant)),
                match="not what acquire",
            )
        cache.release(grant)


async def test_f040_pages_and_states_that_are_not_the_callers(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        await seed(here, run(500, PAGE))
        async with await cache.acquire(run(500, PAGE), owner="x", whole=True) as held_lease:
            tree_page = held_lease.pages[0]
        grant = await cache.allocate(pages=4, states=1, owner="low")
        other = await cache.allocate(pages=2, states=1, owner="other")
        lease = await cache.acquire(PROMPT, owner="low")
        own = grant.pages.tolist()
        wrong: list[tuple[type[Exception], Any, Any]] = [
            (OwnershipError, [own[0], own[0], own[1]], 0),
            (OwnershipError, [*own[:2], other.pages[0]], 0),
            (OwnershipError, [*own[:2], tree_page], 0),
            (OwnershipError, [*own[:2], cache.core.ledger.kv.free_places[0]], 0),
            (OwnershipError, [0, *own[:2]], 0),
            (OwnershipError, [*own[:2], -1], 0),
            (OwnershipError, [*own[:2], 33], 0),
            (OwnershipError, [*own[:2], 2**31 - 1], 0),
            (OwnershipError, own[:3], other.states[0]),
            (OwnershipError, own[:3], 9),
            (OwnershipError, own[:3], 2**31 - 1),
            (InvalidRequest, own[:3], -1),
            (InvalidRequest, own[:3], 1.5),
            (InvalidRequest, [*own[:2], 2**31], 0),
            (InvalidRequest, [*own[:2], 1.5], 0),
            (InvalidRequest, [*own[:2], None], 0),
            (InvalidRequest, None, 0),
            (InvalidRequest, own[:2], 0),  # too few
            (InvalidRequest, own, 0),  # too many
            (InvalidRequest, [], 0),
        ]
        for error, pages, state in wrong:
            for held in (None, lease):
                for swap in (True, False):
                    await refused(
                        here,
                        error,
                        lambda p=pages, s=state, h=held, w=swap: cache.insert(  # type: ignore[misc]  # on purpose
                            PROMPT, pages=p, state=s, lease=h, swap=w
                        ),
                    )
        await refused(
            here,
            InvalidRequest,
            lambda: cache.insert(PROMPT[:6], pages=own[:1], state=grant.states[0]),
            match="grid",
        )
        taken = await cache.insert(PROMPT, pages=own[:3], state=grant.states[0], lease=lease)
        assert taken.published == len(PROMPT) and taken.state == "adopted"
        await refused(here, OwnershipError, lambda: cache.insert(PROMPT, pages=own[:3]))
        for handle in (grant, other, lease):
            cache.release(handle)


async def test_a_caller_may_write_to_its_own_ids_afterwards(inline: bool) -> None:
    async with house(inline=inline) as here:
        cache = here.cache
        grant = await cache.allocate(pages=3, owner="low")
        offered = array("i", grant.pages)
        await cache.insert(PROMPT, pages=offered)
        offered[0] = grant.pages[0] = 99
        await cache.audit()
        cache.release(grant)


# -- use before, after and elsewhere ---------------------------------------------------------------


def calls_of(cache: CacheRuntime) -> list[Callable[[], object]]:
    return [
        lambda: cache.match(PROMPT),
        lambda: cache.acquire(PROMPT),
        lambda: cache.open_request(PROMPT),
        lambda: cache.allocate(pages=1),
        lambda: cache.insert(PROMPT, pages=[1, 2, 3]),
        lambda: cache.evict(pages=1),
        cache.audit,
        cache.reset,
        cache.stats,
        lambda: cache.step([]),
        lambda: cache.nowait.match(PROMPT),
        lambda: cache.nowait.allocate(pages=1),
        lambda: cache.nowait.admit_many([Admission(PROMPT, 1)]),
        lambda: cache.grid,
    ]


async def test_use_before_opening_and_after_closing(inline: bool) -> None:
    config = CacheConfig(layout=HYBRID, page_size=PAGE, state_chunk=PAGE, inline=inline)
    cache = CacheRuntime(config)

    async def all_refused() -> None:
        for call in calls_of(cache):
            with pytest.raises(RuntimeClosed):
                answer = call()
                if isinstance(answer, Awaitable):
                    await answer

    await all_refused()
    await cache.open()
    with pytest.raises(InvalidRequest):
        await cache.open()
    request = await cache.open_request(PROMPT)
    await request.allocate(8)
    await request.ready()
    step = cache.step([request])
    lease = await cache.acquire(PROMPT, owner="low")
    grant = await cache.allocate(pages=1)
    await cache.close()
    await cache.close()
    await all_refused()
    requests: list[Callable[[], object]] = [
        request.ready,
        request.advance,
        lambda: request.allocate(1),
        request.finish,
        lambda: step.launched({request: 4}),
    ]
    for call in requests:
        with pytest.raises((RuntimeClosed, StaleHandle)):
            answer = call()
            if isinstance(answer, Awaitable):
                await answer
    request.abort()
    step.abandon()
    lease.release()  # there is nothing left to release
    cache.release(grant)
    with pytest.raises(InvalidRequest):
        await cache.open()


async def test_a_runtime_belongs_to_its_loop(inline: bool) -> None:
    async with house(inline=inline) as here:

        def elsewhere() -> None:
            async def use() -> None:
                with pytest.raises(InvalidRequest, match="event loop"):
                    await here.cache.match(PROMPT)

            asyncio.run(use())

        await asyncio.to_thread(elsewhere)
        with pytest.raises(InvalidRequest, match="event loop"):
            await asyncio.to_thread(here.cache.stats)  # a thread without a loop


WRONG_CONFIGS: dict[str, dict[str, Any]] = {
    "page_size_0": {"page_size": 0},
    "page_size_float": {"page_size": 1.5},
    "page_size_text": {"page_size": "16"},
    "state_chunk": {"state_chunk": -1},
    "no_pages": {"device_pages": 0},
    "no_states": {"device_states": 0},
    "fewer_than_no_states": {"device_states": -1},
    "float_states": {"device_states": 2.0},
    "queue": {"queue_max": 0},
    "close": {"close_timeout_s": 0},
    "policy": {"eviction": "lucky"},
}


@pytest.mark.parametrize("wrong", WRONG_CONFIGS)
def test_wrong_configurations(wrong: str) -> None:
    with pytest.raises(InvalidRequest):
        CacheConfig(layout=HYBRID, **WRONG_CONFIGS[wrong])


def test_wrong_placements() -> None:
    with pytest.raises(InvalidRequest):
        Placement(budget=-1)
    with pytest.raises(InvalidRequest):
        Placement(max_states_per_path=0)
    with pytest.raises(TypeError):
        CacheConfig(layout=HYBRID, page_sise=16)  # type: ignore[call-arg]  # on purpose


def test_a_model_without_states_needs_no_slots() -> None:
    assert CacheConfig(layout=ATTENTION, device_states=0).components == ("kv",)


async def test_a_runtime_that_does_not_open_leaves_no_thread(
    inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class Engine(ThreadEngine):
        def close(self) -> None:
            closed.append(True)
            super().close()

    def engine(post: Post) -> ThreadEngine:
        return Engine(post)

    def unmade(*parts: object) -> None:
        raise MemoryError(f"no room to wire {len(parts)} parts")

    config = CacheConfig(layout=HYBRID, page_size=PAGE, state_chunk=PAGE, inline=inline)
    cache = CacheRuntime(config, engine=engine)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("phloem.runtime.lifetime.Core", unmade)
        await cache.open()
    assert closed == [True]
    for device in ("nonsense", 5.0):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            CacheRuntime(config, device=device)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequest, match="not a sink"):
        CacheRuntime(config, events="events.jsonl")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequest, match="other layers"):
        CacheRuntime(
            config, pools=DevicePools.allocate(ATTENTION, pages=4, states=2, page_size=PAGE)
        )
    with pytest.raises(InvalidRequest, match="pages of"):
        CacheRuntime(
            config, pools=DevicePools.allocate(HYBRID, pages=4, states=2, page_size=PAGE + 1)
        )


# -- many at once ----------------------------------------------------------------------------------


async def test_a_batch_is_admitted_item_by_item(inline: bool) -> None:
    async with house(inline=inline, pages=8, states=3) as here:
        cache = here.cache
        await seed(here, run(1, 2 * PAGE))
        keys = [run(1, 3 * PAGE), run(1, 2 * PAGE), run(70, 2 * PAGE)]
        found = cache.nowait.match_many(keys)
        assert [match.usable for match in found] == [2 * PAGE, 0, 0]
        assert found == [await cache.match(key) for key in keys]
        assert cache.nowait.match_many(keys[1:2], whole=True)[0].usable == 2 * PAGE
        answers = cache.nowait.admit_many(
            [
                Admission(keys[0], 1, 1, "a"),
                Admission(keys[2], 9, 1, "never"),
                Admission(keys[2], 5, 1, "b"),
                Admission(keys[2], 1, 1, "too late"),
                Admission(keys[1], 0, 0, "nothing to reserve"),
            ]
        )
        assert [type(answer).__name__ for answer in answers] == [
            "Admitted",
            "NoRoom",
            "Admitted",
            "NoRoom",
            "Admitted",
        ]
        stats = cache.stats()
        assert stats.tree.leases == 3 and stats.kv.granted == 6 and stats.state.granted == 2
        for answer in answers:
            if not isinstance(answer, NoRoom):
                cache.release(answer.lease)
                cache.release(answer.grant)


async def test_a_runtime_whose_sink_raises_at_its_start_leaves_no_threads() -> None:
    def sink(event: Event) -> None:
        raise OSError(f"no space left for {type(event).__name__}")

    config = CacheConfig(layout=HYBRID, page_size=PAGE, device_pages=4, device_states=4)
    made, closed = [], []

    class Closing(ThreadEngine):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def engine(post: Post) -> ThreadEngine:
        made.append(Closing(post))
        return made[-1]

    cache = CacheRuntime(config, events=sink, engine=engine)
    for _ in range(2):  # as often as one tries
        with pytest.raises(OSError, match="RuntimeStarted"):
            await cache.open()
        assert not cache.is_open
    assert len(made) == 2 and closed == made
