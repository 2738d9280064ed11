"""The runtime without `await`: the same turns in one thread, and from other threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from math import inf

import msgspec
import pytest

from phloem import (
    CacheConfig,
    CacheCrashed,
    CacheRuntime,
    DevicePools,
    InvalidRequest,
    ModelLayout,
    NoRoom,
    RuntimeClosed,
    StaleHandle,
    StateSpec,
)
from phloem.actors.messages import CopyWorkingState
from phloem.cuda_streams.engine import Clear, CopyBatch, Fence, Post, Ticket
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.workers import ThreadWorker
from phloem.runtime.sync import BlockingCacheRuntime, SyncCacheRuntime

LAYOUT = ModelLayout.hybrid(
    kv_layers=1,
    kv_heads=1,
    head_dim=4,
    kv_dtype="float32",
    states=[StateSpec("recurrent", (2, 2), "float32", layers=1)],
)
CONFIG = CacheConfig(layout=LAYOUT, page_size=4, state_chunk=4, device_pages=16, device_states=5)
PREFIX = list(range(100, 120))
Facade = SyncCacheRuntime | BlockingCacheRuntime


def serve(cache: Facade, tokens: list[int]) -> int:
    """One request from door to door; returns how much it reused."""
    with cache.request(tokens) as request:
        reused = request.usable
        request.allocate(len(tokens) - request.computed)
        request.ready()
        while request.computed < len(tokens):
            request.advance()
            _, end = request.next_stop(8)
            with cache.step([request]) as step:
                cache.launched(step, {request: end})
            request.checkpoint()
        request.finish()
        return reused


def test_one_thread_serves_a_request_from_door_to_door() -> None:
    with SyncCacheRuntime(CONFIG) as cache:
        assert serve(cache, [*PREFIX, 1, 2]) == 0
        assert serve(cache, [*PREFIX, 3, 4]) == 20
        cache.audit()
        stats = cache.stats()
        assert stats.kv.granted == stats.state.granted == stats.tree.leases == 0


def test_both_facades_leave_what_the_coroutines_leave() -> None:
    prompts = [[*PREFIX, 1], [*PREFIX, 2, 3], [7] * 9, [*PREFIX, 2, 3, 4, 5]]
    with SyncCacheRuntime(CONFIG) as cache:
        for prompt in prompts:
            serve(cache, prompt)
        alone = cache.stats().tree

    async def there() -> object:
        async with CacheRuntime(CONFIG) as inner:
            cache = BlockingCacheRuntime(inner, asyncio.get_running_loop())
            for prompt in prompts:
                await asyncio.to_thread(serve, cache, prompt)
            await inner.audit()
            return inner.stats().tree

    assert asyncio.run(there()) == alone


def test_an_exception_in_the_block_aborts_the_request() -> None:
    with SyncCacheRuntime(CONFIG) as cache:
        with pytest.raises(KeyError), cache.request(PREFIX) as request:
            request.allocate(20)
            request.ready()
            raise KeyError("the model failed")
        assert cache.stats().kv.free == CONFIG.device_pages
        with pytest.raises(StaleHandle):
            request.allocate(1)


def test_in_one_thread_nobody_else_gives_back_so_waiting_for_them_is_no_room() -> None:
    with SyncCacheRuntime(CONFIG) as cache:
        held = cache.allocate(pages=12, owner="a")
        with pytest.raises(NoRoom) as refusal:
            cache.allocate(pages=5, owner="b", wait=True)
        assert refusal.value.figures[0][:4] == ("kv", 5, 16, 4)
        assert cache.stats().waiting == 0
        cache.release(held)
        cache.release(cache.allocate(pages=16, owner="b"))
        cache.audit()


def test_waits_for_pages_that_a_running_step_still_touches() -> None:
    with SyncCacheRuntime(CONFIG) as cache:
        stream = ThreadWorker("model", cache.inner.core.post)
        gate = threading.Event()
        with cache.request(PREFIX) as request:
            request.allocate(20)
            request.ready()
            with cache.step([request], stream=stream) as step:
                stream.run(gate.wait)
                cache.launched(step, {request: 8})
            request.abort()
        assert cache.stats().kv.parked == 5
        threading.Timer(0.05, gate.set).start()
        cache.release(cache.allocate(pages=16, owner="next"))
        assert cache.stats().kv.parked == 0
        stream.close()
        cache.audit()


@pytest.mark.parametrize("other", [False, True])
def test_for_a_step_of_its_own_a_thread_does_not_wait(other: bool) -> None:
    """It would wait for ever. `other`: meanwhile something else ends by itself."""
    with SyncCacheRuntime(CONFIG) as cache:
        stream = ThreadWorker("model", cache.inner.core.post)
        gate = threading.Event()
        if other:
            with cache.request(PREFIX[:4]) as request:
                request.allocate(4)
                request.ready()
                with cache.step([request], stream=stream) as step:
                    stream.run(gate.wait)
                    cache.launched(step, {request: 4})
        with cache.request(PREFIX) as request:
            request.allocate(20)
            request.ready()
            with cache.step([request]) as step:
                cache.launched(step, {request: 20})
                threading.Timer(0.05, gate.set).start()
                with pytest.raises(InvalidRequest, match="this thread has to end"):
                    request.checkpoint(state=True)
                request.abort()
                cache.release(cache.allocate(pages=11))
                assert cache.stats().kv.parked == 5
                with pytest.raises(NoRoom) as refusal:
                    cache.allocate(pages=12, owner="b")
                assert refusal.value.figures[0][:5] == ("kv", 12, 16, 11, 5)
        cache.release(cache.allocate(pages=16))
        stream.close()
        cache.audit()


def test_poll_takes_in_what_has_ended() -> None:
    with SyncCacheRuntime(CONFIG) as cache:
        stream = ThreadWorker("model", cache.inner.core.post)
        with cache.request(PREFIX) as request:
            request.allocate(20)
            request.ready()
            with cache.step([request], stream=stream) as step:
                work = stream.run(lambda: None)
                cache.launched(step, {request: 8})
            request.abort()
        work.result()
        stream.close()
        cache.poll()
        assert cache.stats().kv.free == CONFIG.device_pages


def test_the_thread_that_opened_it_is_the_only_one() -> None:
    errors: list[Exception] = []

    def elsewhere(cache: SyncCacheRuntime) -> None:
        try:
            cache.match(PREFIX)
        except InvalidRequest as error:
            errors.append(error)

    with SyncCacheRuntime(CONFIG) as cache:
        thread = threading.Thread(target=elsewhere, args=(cache,))
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_closed_facades_refuse() -> None:
    cache = SyncCacheRuntime(CONFIG).open()
    cache.close()
    cache.close()
    with pytest.raises(RuntimeClosed):
        cache.match(PREFIX)

    async def there() -> BlockingCacheRuntime:
        async with CacheRuntime(CONFIG) as inner:
            return BlockingCacheRuntime(inner, asyncio.get_running_loop())

    blocking = asyncio.run(there())
    with pytest.raises(RuntimeClosed):
        blocking.match(PREFIX)


async def test_a_closed_runtime_lets_go_of_its_pools() -> None:
    """Also where the loop has a timer for a copy that might have taken too long."""
    cache = await CacheRuntime(CONFIG).open()
    async with cache.request(PREFIX) as request:
        await request.allocate(len(PREFIX))
        await request.ready()
    await cache.close()
    pools = weakref.ref(cache.pools.kv_rows)
    del cache, request
    for _ in range(100):  # until the loop has let go of what it called last
        gc.collect()
        if pools() is None:
            break
        await asyncio.sleep(0.001)
    assert pools() is None


def _must(happened: bool) -> None:
    assert happened


def test_a_crashed_runtime_is_closed_like_any_other() -> None:
    cache = SyncCacheRuntime(CONFIG).open()
    with pytest.raises(CacheCrashed):
        cache.inner.core.run("no message")  # type: ignore[arg-type]  # on purpose
    cache.close()
    assert not [t for t in threading.enumerate() if t.name in ("phloem-d2d", "phloem-h2d")]


@pytest.mark.parametrize("how", ["sync", "cancelled"])
def test_a_copy_that_hangs_holds_up_nobody_who_closes(how: str) -> None:
    """Nothing begins any more; whoever wrote into the pools when they were given up is let end."""
    go_on = threading.Event()
    engines: list[ThreadEngine] = []

    def hanging(post: Post) -> ThreadEngine:
        engines.append(ThreadEngine(post, fault=lambda *_: _must(go_on.wait(60))))
        return engines[-1]

    pools = DevicePools.allocate(LAYOUT, pages=16, states=5, page_size=4)
    config = msgspec.structs.replace(CONFIG, close_timeout_s=0.05 if how == "sync" else 600.0)

    def in_one_thread() -> None:
        cache = SyncCacheRuntime(config, engine=hanging).open()
        core = cache.inner.core
        core.domain.send(core.tree_actor, CopyWorkingState(1, 2, "r"))
        cache.close()

    async def on_a_loop() -> None:
        cache = await CacheRuntime(config, engine=hanging).open()
        core = cache.core
        core.domain.send(core.tree_actor, CopyWorkingState(1, 2, "r"))
        closing = asyncio.ensure_future(cache.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert core.stopped
        await cache.close()

    if how == "sync":
        in_one_thread()
    else:
        asyncio.run(on_a_loop())
    with pytest.raises(RuntimeClosed):
        engines[0].submit(CopyBatch("d2d", (Clear(pools.state_rows, (1,)),)))
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "phloem-close":
            thread.join(60)
            assert not thread.is_alive()


def test_a_time_out_may_be_infinite() -> None:
    config = msgspec.structs.replace(CONFIG, copy_timeout_s=inf, close_timeout_s=inf)
    with SyncCacheRuntime(config) as cache:
        assert serve(cache, PREFIX) == 0


async def test_on_its_own_loop_a_blocking_call_is_refused() -> None:
    async with CacheRuntime(CONFIG) as inner:
        blocking = BlockingCacheRuntime(inner, asyncio.get_running_loop())
        with pytest.raises(InvalidRequest, match="awaited"):
            blocking.match(PREFIX)


async def test_a_blocking_facade_is_of_the_loop_that_the_runtime_was_opened_in() -> None:
    """In any other its calls would never be answered."""
    other = asyncio.new_event_loop()
    try:
        runtime = CacheRuntime(CONFIG)
        early = BlockingCacheRuntime(runtime, other)
        async with runtime:
            for call in (
                lambda: early.match(PREFIX),
                lambda: BlockingCacheRuntime(runtime, other),
            ):
                with pytest.raises(InvalidRequest, match="another event loop"):
                    await asyncio.to_thread(call)
    finally:
        other.close()


def test_a_facade_without_a_loop_before_it_is_opened() -> None:
    cache = SyncCacheRuntime(CONFIG)
    for call in (cache.poll, lambda: cache.match(PREFIX), cache.stats):
        with pytest.raises(RuntimeClosed, match="not open"):
            call()
    cache.close()
    with pytest.raises(InvalidRequest, match="opened before"):
        cache.open()


async def test_one_error_for_all_calls_keeps_no_frames() -> None:
    """A runtime that has stopped raises the same error whoever calls, however often."""
    async with CacheRuntime(CONFIG) as cache:
        core = cache.core
        with pytest.raises(CacheCrashed):
            core.run("no message")  # type: ignore[arg-type]  # on purpose
        for _ in range(20):
            with pytest.raises(CacheCrashed) as caught:
                core.check_open()
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 5


class _SlowEngine(ThreadEngine):
    """Copies start only when the gate opens."""

    gate: Fence

    def submit(self, batch: CopyBatch) -> Ticket:
        gated = CopyBatch(batch.channel, batch.items, after=(*batch.after, self.gate))
        return super().submit(gated)


def test_a_blocked_thread_that_is_interrupted_leaves_nothing_behind() -> None:
    engines: list[_SlowEngine] = []

    def slow(post: Callable[[Callable[[], None]], None]) -> _SlowEngine:
        engine = _SlowEngine(post)
        engine.gate = Fence(post, "gate")
        engines.append(engine)
        return engine

    async def there() -> None:
        async with CacheRuntime(CONFIG, engine=slow) as inner:
            request = await inner.open_request(PREFIX)
            await request.allocate(20)
            waiting = asyncio.ensure_future(request.ready())
            await asyncio.sleep(0)
            waiting.cancel()
            request.abort()
            assert inner.stats().state.parked == 1, "the copy may still write the slot"
            engines[0].gate.mark_passed()
            again = await inner.allocate(states=CONFIG.device_states)
            inner.release(again)
            await inner.audit()
            assert inner.stats().state.free == CONFIG.device_states

    asyncio.run(there())
