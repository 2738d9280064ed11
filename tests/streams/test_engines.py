"""One suite for all engines: bytes, order, failure, cancelling, closing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from phloem.cuda_streams.batches import CHANNELS, Channel, Clear, Copy, CopyBatch, CopyItem
from phloem.cuda_streams.engine import CopyCancelled, CopyFailed, Ticket, TicketState
from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.mover import RowMover
from phloem.cuda_streams.rows import RowPool
from phloem.errors import EngineDead, InvalidRequest, RuntimeClosed
from streams.bench import LAYOUT, Bench, apply, some_ids

LAYERS = len(LAYOUT.layers)
KINDS = ["threads", "virtual", "device, batched", "device, staged", "two ranks"]
VIRTUAL = ("virtual", "two ranks")
if torch.cuda.is_available():
    KINDS.append("cuda")


REAL = pytest.mark.not_sim("a real engine")


@pytest.fixture(
    params=[pytest.param(kind, marks=() if kind in VIRTUAL else REAL) for kind in KINDS]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench.make(request.param)
    yield bench
    bench.close()
    assert not bench.hazards.found
    assert all(engine.inflight_bytes() == 0 for engine in bench.engines)


def backup(bench: Bench, source: list[int], target: list[int]) -> Copy:
    return Copy(bench.device.kv_rows, bench.host.kv_rows, source, target)


def load(bench: Bench, source: list[int], target: list[int]) -> Copy:
    return Copy(bench.host.kv_rows, bench.device.kv_rows, source, target)


def cow(bench: Bench, source: int, target: int) -> Copy:
    return Copy(bench.device.state_rows, bench.device.state_rows, [source], [target])


def neighbours(rng: random.Random, pool: RowPool, count: int) -> list[int]:
    first = rng.randrange(1, pool.count - count)
    return list(range(first, first + count))


def two_stretches(rng: random.Random, pool: RowPool, count: int) -> list[int]:
    """As `some_ids`, all neighbours but one pair, the later ones first."""
    ids, cut = neighbours(rng, pool, count), rng.randrange(count)
    return ids[cut:] + ids[:cut]


class Gate:
    """A fault that holds tickets labelled `slow` at their first layer, in either engine.

    Threads are held by an event; virtual time goes on, so there a fence must do: see `batch`.
    """

    def __init__(self, bench: Bench) -> None:
        self._threads = bench.kind not in VIRTUAL
        self._event = threading.Event()
        self.began = threading.Event()
        self._fence = Fence()

    def fault(self, ticket: Ticket, layer: int) -> None:
        if ticket.batch.label == "slow" and layer == 0:
            self.began.set()
            self._event.wait(60)

    def batch(self, item: Copy) -> CopyBatch:
        after = () if self._threads else (self._fence,)
        return CopyBatch("d2h", (item,), after=after, label="slow")

    def open(self) -> None:
        self._event.set()
        self._fence.mark_passed()


class TestTimes:
    async def test_a_copy_says_when_it_began_and_ended(self, bench: Bench) -> None:
        """It waits for fences, then for the copies before it on its queue."""
        engine, fence = bench.engine(), Fence()
        first = engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),), after=(fence,)))
        second = engine.submit(CopyBatch("d2h", (backup(bench, [2], [3]),), requires=(first,)))
        never = engine.submit(CopyBatch("d2h", (backup(bench, [2], [3]),), requires=(first,)))
        never.cancel()
        assert first.submitted_ns is not None and first.started_ns is None
        fence.mark_passed()
        await second
        with pytest.raises(CopyCancelled):
            await never
        times = [first.submitted_ns]
        for ticket in (first, second):
            assert ticket.started_ns is not None and ticket.ended_ns is not None
            times += [ticket.started_ns, ticket.ended_ns]
        assert times == sorted(times)
        assert never.started_ns is None and never.ended_ns is not None


class TestBytes:
    @pytest.mark.parametrize("by_layer", [True, False])
    @pytest.mark.parametrize("seed", range(4))
    async def test_all_channels_and_kinds(self, bench: Bench, seed: int, by_layer: bool) -> None:
        # Small buffers: every path of the mover and every remainder is taken.
        sizes = {"stage_bytes": 256, "run_bytes": (96, 32)[seed // 2], "call_bytes": 160}
        mover = partial(RowMover, **sizes, few_runs=2 * (seed % 2))
        engine, rng, images = bench.engine(mover=mover), random.Random(seed), bench.images()
        for _ in range(12):
            count = rng.randrange(1, 10)
            kv, host_kv = bench.device.kv_rows, bench.host.kv_rows
            states, host_states = bench.device.state_rows, bench.host.state_rows
            a, b = (
                rng.choice((some_ids, neighbours, two_stretches))(rng, rows, count)
                for rows in (kv, host_kv)
            )
            s, t, u = rng.sample(range(1, states.count), 3)
            cases: dict[Channel, list[tuple[CopyItem, ...]]] = {
                "d2h": [(Copy(kv, host_kv, a, b), Copy(states, host_states, [s], [t]))],
                "h2d": [(Copy(host_kv, kv, a, b), Copy(host_states, states, [s], [t]))],
                "d2d": [
                    (Copy(states, states, [s, s], [t, u]),),
                    (Copy(states, states, [s], [t]), Clear(states, [u])),
                ],
            }
            channel = rng.choice(CHANNELS)
            batch = CopyBatch(channel, rng.choice(cases[channel]), by_layer=by_layer)
            ticket = engine.submit(batch)
            await ticket
            assert ticket.done and ticket.state is TicketState.DONE
            assert ticket.layers_done == LAYERS and ticket.error is None
            for item in batch.items:
                apply(item, images)
            assert bench.same(images)

    async def test_states_of_mixed_dtypes_arrive_as_tensors(self, bench: Bench) -> None:
        await bench.engine().submit(CopyBatch("d2d", (cow(bench, 3, 5),)))
        for tensors in bench.device.states.values():
            for tensor in tensors.values():
                assert tensor[3].view(-1).tolist() == pytest.approx(
                    tensor[5].view(-1).tolist(), nan_ok=True, abs=0, rel=0
                )

    async def test_empty_and_whole(self, bench: Bench) -> None:
        engine, images = bench.engine(), bench.images()
        await engine.submit(CopyBatch("d2h", (backup(bench, [], []),)))
        assert bench.same(images)
        everything = list(range(bench.device.pages))
        item = backup(bench, everything, everything[::-1])
        await engine.submit(CopyBatch("d2h", (item,), by_layer=True))
        apply(item, images)
        assert bench.same(images)


class TestOrder:
    async def test_after_orders_and_requires_needs(self, bench: Bench) -> None:
        fence, engine, images = Fence(), bench.engine(), bench.images()
        first = engine.submit(CopyBatch("d2h", (backup(bench, [1, 5], [3, 4]),), after=(fence,)))
        second = engine.submit(CopyBatch("h2d", (load(bench, [3, 4], [7, 9]),), requires=(first,)))
        third = engine.submit(CopyBatch("h2d", (load(bench, [8], [1]),), after=(second,)))
        await asyncio.sleep(0.02)
        assert bench.same(images), "nothing moves before the fence"
        assert [t.state for t in (first, second, third)] == [TicketState.QUEUED] * 3
        assert engine.inflight_bytes("h2d") == 3 * bench.device.page_bytes
        assert engine.inflight_bytes() == 5 * bench.device.page_bytes
        fence.mark_passed()
        for ticket in (first, second, third):
            await ticket
            apply(ticket.batch.items[0], images)
        assert bench.same(images) and engine.inflight_bytes() == 0

    async def test_a_failure_spreads_by_requires_only(self, bench: Bench) -> None:
        def fault(ticket: Ticket, layer: int) -> None:
            if ticket.batch.label == "bad" and layer == 2:
                raise OSError("injected")

        engine, images = bench.engine(fault), bench.images()
        bad = engine.submit(
            CopyBatch("d2h", (backup(bench, [1], [2]),), by_layer=True, label="bad")
        )
        needs = engine.submit(CopyBatch("h2d", (load(bench, [2], [3]),), requires=(bad,)))
        needs_too = engine.submit(CopyBatch("d2d", (cow(bench, 1, 2),), requires=(needs,)))
        follows = engine.submit(CopyBatch("h2d", (load(bench, [5], [6]),), after=(bad, needs)))
        with pytest.raises(CopyFailed, match="injected") as caught:
            await bad
        if bench.kind != "two ranks":  # only words come over a wire
            assert isinstance(caught.value.__cause__, OSError)
        assert bad.layers_done == 2 and bad.state is TicketState.FAILED
        for ticket in (needs, needs_too):
            with pytest.raises(CopyFailed, match="ended without its data"):
                await ticket
            assert ticket.layers_done == 0
        await follows
        apply(follows.batch.items[0], images)
        assert bench.untouched(images)

    @pytest.mark.parametrize("hasten", [False, True])
    async def test_priority_then_age_among_the_ready(self, bench: Bench, hasten: bool) -> None:
        order: list[str] = []
        fence, engine = Fence(), bench.engine(lambda ticket, _: order.append(ticket.batch.label))
        tickets = [
            engine.submit(
                CopyBatch("d2h", (backup(bench, [n], [n]),), (fence,), priority=p, label=f"{p}{n}")
            )
            for n, p in enumerate([1, 0, 1, 0, 2, 2], start=1)
        ]
        hold = threading.Event()
        if bench.kind not in VIRTUAL:  # else the worker runs the first before the next is ready
            engine.submit(CopyBatch("d2h", (backup(bench, [9], [9]),), label="hold"))
            engine.fault = lambda ticket, _: (
                order.append(ticket.batch.label)
                if ticket.batch.label != "hold"
                else (hold.wait(60), None)[1]
            )
        await asyncio.sleep(0.02)
        order.clear()
        if hasten:
            engine.hasten(tickets[4])  # which still waits for the fence
        fence.mark_passed()
        if hasten:
            engine.hasten(tickets[5])
            engine.hasten(tickets[1])  # which is urgent as it is
        hold.set()
        await engine.drain()
        assert all(ticket.done for ticket in tickets)
        in_order = ["02", "04", "11", "13", "25", "26"]
        assert order[::LAYERS] == (
            [*in_order[:2], *in_order[4:], *in_order[2:4]] if hasten else in_order
        )
        engine.hasten(tickets[0])  # which is over


class TestWhatAFailureSpares:
    """Rows that can be had all the same are copied in all layers, and the error says how many."""

    @staticmethod
    def rows_equal(bench: Bench, copy: Copy, count: int, before: dict[str, list[Tensor]]) -> bool:
        """The first so many rows are there, on each rank."""
        now = bench.images()
        apply(Copy(copy.source, copy.target, copy.source_ids[:count], copy.target_ids[:count]), now)
        return bench.same(now) and not bench.same(before)

    @pytest.mark.parametrize("by_layer", [True, False])
    @pytest.mark.parametrize("at", range(LAYERS))
    async def test_they_are_copied_to_the_end(self, bench: Bench, by_layer: bool, at: int) -> None:
        def fault(ticket: Ticket, layer: int) -> None:
            if ticket.batch.label == "bad" and layer == at:
                raise CopyFailed("a page cannot be read", rows_ok=2)

        engine, before = bench.engine(fault), bench.images()
        kv = load(bench, [5, 9, 3, 7], [2, 8, 4, 11])
        state = Copy(bench.host.state_rows, bench.device.state_rows, [1], [2])
        bad = engine.submit(CopyBatch("h2d", (kv, state), by_layer=by_layer, label="bad"))
        needs = engine.submit(CopyBatch("d2h", (backup(bench, [2], [1]),), requires=(bad,)))
        with pytest.raises(CopyFailed, match="cannot be read") as caught:
            await bad
        assert caught.value.rows_ok == 2 and bad.state is TicketState.FAILED
        assert bad.layers_done == (at if by_layer else 0), "what is not whole has not landed"
        assert self.rows_equal(bench, kv, 2, before)
        with pytest.raises(CopyFailed, match="ended without its data"):
            await needs

    @pytest.mark.parametrize("spared", [[3, 1], [3, 3, 2], [9], [4, 0], [0]])
    async def test_failures_add_up(self, bench: Bench, spared: list[int]) -> None:
        left = list(spared)

        def fault(_: Ticket, layer: int) -> None:
            if left and layer >= LAYERS - len(spared):
                raise CopyFailed("a page cannot be read", rows_ok=left.pop(0))

        engine, before = bench.engine(fault), bench.images()
        kv = load(bench, [5, 9, 3, 7], [2, 8, 4, 11])
        bad = engine.submit(CopyBatch("h2d", (kv,), by_layer=True))
        with pytest.raises(CopyFailed) as caught:
            await bad
        good = min(4, *spared)
        assert caught.value.rows_ok == good and not left
        if good:
            assert self.rows_equal(bench, kv, good, before)

    async def test_nothing_is_spared_by_cancelling_or_by_clearing(self, bench: Bench) -> None:
        def fault(ticket: Ticket, layer: int) -> None:
            if layer == 1:
                ticket.cancel()
                raise CopyFailed("both at once", rows_ok=2)

        engine = bench.engine(fault)
        gone = engine.submit(CopyBatch("h2d", (load(bench, [5, 9, 3], [2, 8, 4]),), by_layer=True))
        with pytest.raises(CopyFailed) as caught:
            await gone
        assert caught.value.rows_ok == 0
        clear = engine.submit(CopyBatch("d2d", (Clear(bench.device.state_rows, [1, 2, 3]),)))
        with pytest.raises(CopyFailed) as caught:
            await clear
        assert caught.value.rows_ok == 0


class TestWaiting:
    async def test_layer_by_layer(self, bench: Bench) -> None:
        seen: list[tuple[int, bool]] = []
        engine, images = bench.engine(), bench.images()
        item = backup(bench, [1, 4, 2], [9, 8, 11])
        ticket = engine.submit(CopyBatch("d2h", (item,), by_layer=True))
        apply(item, images)
        fences = [ticket.layer_fence(layer) for layer in range(LAYERS)]
        part = 0
        for layer in range(LAYERS):
            await ticket.layer(layer)
            assert ticket.layers_done > layer
            await fences[layer].reached()
            for got in bench.host.kv_rows.parts(layer):
                seen.append((layer, bool((got == images["host kv"][part]).all())))
                part += 1
        assert seen == [(2, True), (3, True)]
        await ticket
        assert ticket.layer_fence(0).passed
        for layer in (-1, LAYERS):
            with pytest.raises(InvalidRequest, match="of a model of"):
                await ticket.layer(layer)

    async def test_without_by_layer_all_land_at_the_end(self, bench: Bench) -> None:
        counts: list[int] = []
        engine = bench.engine(lambda ticket, _: counts.append(ticket.layers_done))
        ticket = engine.submit(CopyBatch("d2h", (backup(bench, [1], [1]),)))
        await ticket.layer(0)
        assert ticket.layers_done == LAYERS and set(counts) == {0}

    async def test_a_cancelled_waiter_leaves_copy_and_others(self, bench: Bench) -> None:
        gate = Gate(bench)
        engine = bench.engine(gate.fault)
        ticket = engine.submit(gate.batch(backup(bench, [1], [2])))

        async def wait() -> None:
            await ticket

        patient, hasty = asyncio.create_task(wait()), asyncio.create_task(wait())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket, 0.02)
        hasty.cancel()
        await asyncio.wait([hasty])
        assert hasty.cancelled() and not ticket.done and not ticket.quiesced.passed
        gate.open()
        await patient
        await ticket  # late
        assert ticket.done and not ticket._waiters

    async def test_callbacks_once_on_the_loop(self, bench: Bench) -> None:
        gate, heard = Gate(bench), list[tuple[Ticket, str]]()
        engine = bench.engine(gate.fault)
        ticket = engine.submit(gate.batch(backup(bench, [1], [2])))

        def hear(ticket: Ticket) -> None:
            asyncio.get_running_loop()  # raises on any other thread
            heard.append((ticket, threading.current_thread().name))

        ticket.add_done_callback(hear)
        gate.open()
        await ticket
        await asyncio.sleep(0.01)
        ticket.add_done_callback(hear)
        assert heard == [(ticket, threading.current_thread().name)] * 2

    async def test_done_means_quiet(self, bench: Bench) -> None:
        def note(ticket: Ticket, seen: list[tuple[bool, TicketState]]) -> None:
            seen.append((ticket.done, ticket.state))

        # State, then fence, then waiters: whoever is woken by any of them finds all three.
        engine = bench.engine()
        for number in range(1, 20):
            seen: list[tuple[bool, TicketState]] = []
            ticket = engine.submit(CopyBatch("d2h", (backup(bench, [number], [number]),)))
            ticket.quiesced.add_hook(partial(note, ticket, seen))
            await ticket
            assert ticket.quiesced.passed and seen == [(True, TicketState.DONE)]
            assert engine.inflight_bytes() == 0

    async def test_the_engine_keeps_a_lost_ticket_alive(self, bench: Bench) -> None:
        gate = Gate(bench)
        engine = bench.engine(gate.fault)
        ticket = engine.submit(gate.batch(backup(bench, [1], [2])))
        quiesced, weak = ticket.quiesced, weakref.ref(ticket)
        del ticket
        gc.collect()
        assert weak() is not None
        heard = asyncio.Event()
        quiesced.add_callback(heard.set)
        gate.open()
        await asyncio.wait_for(heard.wait(), 60)
        await engine.drain()
        for _ in range(200):  # its thread may be about to let go of it
            gc.collect()
            if weak() is None:
                break
            await asyncio.sleep(0.01)
        assert weak() is None, "and lets it go when it is done"

    async def test_no_ambient_stream(self, bench: Bench) -> None:
        with pytest.raises(InvalidRequest, match="ambient"):
            bench.engine().record(None)


class TestCancel:
    async def test_queued(self, bench: Bench) -> None:
        engine, images = bench.engine(), bench.images()
        fence = Fence()
        never = engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),), after=(fence,)))
        assert engine.inflight_bytes() > 0
        never.cancel()
        never.cancel()
        await asyncio.sleep(0.01)
        assert not never.done, "what it waits for may still use the memory"
        fence.mark_passed()
        with pytest.raises(CopyCancelled, match="never started"):
            await never
        assert never.state is TicketState.CANCELLED and never.layers_done == 0
        assert bench.same(images) and engine.inflight_bytes() == 0
        never.cancel()

    async def test_running_ends_at_a_layer_boundary(self, bench: Bench) -> None:
        def fault(ticket: Ticket, layer: int) -> None:
            if layer == 2:
                ticket.cancel()

        engine = bench.engine(fault)
        ticket = engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),), by_layer=True))
        last = ticket.layer_fence(3)
        with pytest.raises(CopyCancelled, match="after 3 layers"):
            await ticket
        assert ticket.layers_done == 3
        await asyncio.wait_for(last.reached(), 60)  # whoever waits for a layer is let go
        with pytest.raises(CopyCancelled):
            await ticket.layer(3)
        await ticket.layer(2)
        assert ticket.layer_fence(3).passed

    async def test_waiting_for_the_last_user_is_enough(self, bench: Bench) -> None:
        # A backup reads page 1, a load into page 1 waits for it and is cancelled, the next load
        # waits only for that one: it must still not overtake the backup.
        gate = Gate(bench)
        engine = bench.engine(gate.fault)
        reads = engine.submit(gate.batch(backup(bench, [1], [2])))
        cancelled = engine.submit(CopyBatch("h2d", (load(bench, [3], [1]),), after=(reads,)))
        engine.submit(CopyBatch("h2d", (load(bench, [4], [1]),), after=(cancelled,)))
        cancelled.cancel()
        images = bench.images()
        await asyncio.sleep(0.02)
        assert not cancelled.done and not reads.done
        assert bench.same(images | {"host kv": bench.images()["host kv"]}), "page 1 is as it was"
        gate.open()
        await engine.drain()
        apply(reads.batch.items[0], images)
        apply(load(bench, [4], [1]), images)
        assert bench.same(images)

    async def test_what_requires_a_cancelled_one_fails(self, bench: Bench) -> None:
        engine, fence = bench.engine(), Fence()
        first = engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),), after=(fence,)))
        second = engine.submit(CopyBatch("h2d", (load(bench, [2], [3]),), requires=(first,)))
        first.cancel()
        fence.mark_passed()
        with pytest.raises(CopyFailed):
            await second
        assert isinstance(second.error, CopyFailed)
        assert isinstance(second.error.__cause__, CopyCancelled)


class TestEnds:
    async def test_a_dead_engine_fails_everything_and_hangs_nothing(self, bench: Bench) -> None:
        def fault(ticket: Ticket, _: int) -> None:
            if ticket.batch.label == "last":
                raise EngineDead("device lost")

        engine, images = bench.engine(fault), bench.images()
        waiting = engine.submit(CopyBatch("h2d", (load(bench, [1], [2]),), after=(Fence(),)))
        last = engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),), label="last"))
        needs = engine.submit(CopyBatch("h2d", (load(bench, [2], [5]),), requires=(last,)))
        for ticket in (last, waiting, needs):
            with pytest.raises(EngineDead, match="device lost"):
                await ticket
        with pytest.raises(EngineDead, match="device lost"):
            engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),)))
        assert engine.inflight_bytes() == 0
        assert bench.untouched(images)
        await engine.drain()

    async def test_close_cancels_what_is_queued(self, bench: Bench) -> None:
        engine, images = bench.engine(), bench.images()
        queued = [
            engine.submit(CopyBatch("d2h", (backup(bench, [n], [n]),), after=(Fence(),)))
            for n in range(1, 5)
        ]
        engine.close()
        for ticket in queued:
            with pytest.raises(CopyCancelled, match="engine closed"):
                await ticket
        with pytest.raises(RuntimeClosed):
            engine.submit(CopyBatch("d2h", (backup(bench, [1], [2]),)))
        engine.close()
        await engine.drain()
        assert bench.same(images)

    async def test_drain_waits_for_all_outcomes(self, bench: Bench) -> None:
        def fault(ticket: Ticket, _: int) -> None:
            if ticket.seq % 3 == 0:
                raise OSError("injected")

        engine = bench.engine(fault)
        tickets = [
            engine.submit(CopyBatch("d2h", (backup(bench, [n], [n]),))) for n in range(1, 10)
        ]
        await engine.drain()
        assert all(ticket.done for ticket in tickets)
        assert [t.state is TicketState.FAILED for t in tickets] == [True, False, False] * 3


def test_the_loop_may_be_gone_before_the_copies() -> None:
    bench = Bench.make("threads")

    async def leave() -> tuple[Gate, Ticket]:
        gate = Gate(bench)
        engine = bench.engine(gate.fault)
        ticket = engine.submit(gate.batch(backup(bench, [1], [2])))
        ticket.add_done_callback(lambda _: None)
        return gate, ticket

    gate, ticket = asyncio.run(leave())
    gate.open()
    assert ticket.quiesced.wait(60)
    bench.close()


def in_a_new_thread(fn: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


@pytest.mark.not_sim("of threads")
async def test_workers_copy_with_one_thread_and_others_keep_theirs() -> None:
    was = torch.get_num_threads()
    seen: list[int] = []
    bench = Bench.make("threads")
    try:
        torch.set_num_threads(3)
        engine = bench.engine(lambda *_: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == 3
        for channel in CHANNELS:
            item = {"d2h": backup(bench, [1], [2]), "h2d": load(bench, [1], [2])}.get(channel)
            await engine.submit(CopyBatch(channel, (item or cow(bench, 1, 2),)))
        assert set(seen) == {1}
    finally:
        torch.set_num_threads(was)
        bench.close()
