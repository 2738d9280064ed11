"""Virtual time: costs to the nanosecond, the closed form, hazards, poison, repeatability."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from phloem.cuda_streams.batches import Channel, Clear, Copy, CopyBatch
from phloem.cuda_streams.clocks import LoopClock, VirtualClock
from phloem.cuda_streams.engine import CopyCancelled, Ticket, TicketState
from phloem.cuda_streams.fences import Fence, StepTicket
from phloem.cuda_streams.hazards import Hazard, HazardChecker
from phloem.cuda_streams.host import HostMemory
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.virtual import (
    PCIE5,
    Link,
    VirtualEngine,
    VirtualStream,
    landings_ns,
    overlapped_end_ns,
)
from phloem.errors import InvalidRequest
from phloem.runtime.layout import ModelLayout
from streams.bench import Bench

GIB = 1_000_000_000
ATTENTION = ModelLayout.attention_only(layers=4, kv_heads=1, head_dim=256, kv_dtype="float32")


def attention_pools(*, meta: bool = True, layers: int = 4) -> tuple[DevicePools, HostPools]:
    """Pools of 2 KiB a page and layer."""
    layout = ModelLayout.from_layers(ATTENTION.layers[:1] * layers)
    place = "meta" if meta else "cpu"
    device = DevicePools.allocate(layout, pages=8, states=0, page_size=1, device=place)

    def memory(count: int, row_bytes: int) -> HostMemory:
        rows = torch.zeros((count, row_bytes), dtype=torch.uint8, device=place)
        return HostMemory(rows, count)

    return device, HostPools.allocate(device, pages=8, states=0, memory=memory)


def ended_at(clock: VirtualClock, ticket: Ticket) -> list[int]:
    out: list[int] = []
    ticket.quiesced.add_hook(lambda: out.append(clock.now_ns()))
    return out


class TestClocks:
    def test_equal_instants_in_the_order_of_asking(self) -> None:
        clock, order = VirtualClock(), list[tuple[str, int]]()

        def note(name: str) -> Callable[[], None]:
            return lambda: order.append((name, clock.now_ns()))

        clock.call_at(5, note("b"))
        clock.call_at(3, lambda: clock.call_at(3, note("a2")))
        clock.call_at(3, note("a1"))
        clock.call_at(5, note("c"))
        clock.call_at(9, note("d"))
        clock.run(until_ns=7)
        assert order == [("a1", 3), ("a2", 3), ("b", 5), ("c", 5)] and clock.now_ns() == 7
        clock.call_at(1, note("past"))
        clock.run()
        assert order[4:] == [("past", 7), ("d", 9)] and not clock.step()

    async def test_on_a_loop(self) -> None:
        clock, order = LoopClock(asyncio.get_running_loop()), list[int]()
        start = clock.now_ns()
        delays = [3_000_000, 1_000_000, 1_000_000, 0, 2_000_000]
        for number, delay in enumerate(delays):
            clock.call_at(start + delay, partial(order.append, number))
        assert order == []
        async with asyncio.timeout(60):
            while len(order) < len(delays):  # noqa: ASYNC110  what is called tells nobody else
                await asyncio.sleep(0.001)
        assert order == [3, 1, 2, 4, 0]
        assert clock.now_ns() >= start + 3_000_000

    async def test_one_that_raises_does_not_stop_the_rest(self) -> None:
        loop, errors, heard = asyncio.get_running_loop(), list[object](), list[int]()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        clock = LoopClock(loop)
        clock.call_at(0, lambda: heard.append(1 // 0))
        clock.call_at(0, lambda: heard.append(2))
        async with asyncio.timeout(60):
            while not heard:  # noqa: ASYNC110  what is called tells nobody else
                await asyncio.sleep(0.001)
        assert heard == [2] and len(errors) == 1


class TestCosts:
    def test_by_hand(self) -> None:
        clock = VirtualClock()
        device, host = attention_pools()
        link = Link(GIB, latency_ns=1000, step_ns=100, run_ns=10, shared_percent=50)
        engine = VirtualEngine(clock, links={**PCIE5, "d2h": link, "h2d": link})
        down = Copy(device.kv_rows, host.kv_rows, [1, 2, 5], [3, 4, 0])  # two runs
        whole = engine.submit(CopyBatch("d2h", (down,)))
        times = ended_at(clock, whole)
        clock.run()
        # latency + step + 4 layers x 2 runs x 10 + 3 pages x 4 layers x 2048 bytes at 1 byte/ns
        assert times == [1000 + 100 + 80 + 24576]
        assert (whole.submitted_ns, whole.started_ns, whole.ended_ns) == (0, 0, times[0])
        start = clock.now_ns()
        layered = engine.submit(CopyBatch("d2h", (down,), by_layer=True))
        times = ended_at(clock, layered)
        clock.run()
        assert times == [start + 1000 + 4 * (100 + 20 + 6144)]

    def test_directions_share(self) -> None:
        clock = VirtualClock()
        device, host = attention_pools()
        link = Link(GIB, shared_percent=50)
        engine = VirtualEngine(clock, links={**PCIE5, "d2h": link, "h2d": link})
        down = engine.submit(CopyBatch("d2h", (Copy(device.kv_rows, host.kv_rows, [1], [1]),)))
        up = engine.submit(CopyBatch("h2d", (Copy(host.kv_rows, device.kv_rows, [2], [2]),)))
        downs, ups = ended_at(clock, down), ended_at(clock, up)
        clock.run()
        assert (downs, ups) == ([8192], [16384]), "who starts second finds the link busy"

    def test_clear_and_nothing(self) -> None:
        clock = VirtualClock()
        bench = Bench.make("none")
        engine = VirtualEngine(clock, links={**PCIE5, "d2d": Link(GIB, latency_ns=7)})
        rows = bench.device.state_rows
        for ids, cost in (([], 0), ([1, 2], 2 * rows.row_bytes)):
            start = clock.now_ns()
            times = ended_at(clock, engine.submit(CopyBatch("d2d", (Clear(rows, ids),))))
            clock.run()
            assert times == [start + 7 + cost]

    def test_bad_links(self) -> None:
        for bad in ({"bytes_per_s": 0}, {"shared_percent": 0}, {"latency_ns": -1}):
            with pytest.raises(InvalidRequest, match="rates must be"):
                Link(**({"bytes_per_s": 1} | bad))


class TestOverlap:
    @pytest.mark.parametrize("seed", range(30))
    def test_equals_the_closed_form(self, seed: int) -> None:
        rng, clock = random.Random(seed), VirtualClock()
        layers = rng.randrange(1, 12)
        device, host = attention_pools(layers=layers)
        link = Link(
            rng.randrange(1, 40) * GIB // 10, rng.randrange(20_000), rng.randrange(2_000), 5
        )
        engine = VirtualEngine(clock, links={**PCIE5, "h2d": link})
        ids = rng.sample(range(8), rng.randrange(1, 8))
        batch = CopyBatch("h2d", (Copy(host.kv_rows, device.kv_rows, ids, ids),), by_layer=True)
        compute = [rng.randrange(1, 20_000) for _ in range(layers)]
        ticket = engine.submit(batch)
        stream, step = VirtualStream("forward", clock), StepTicket()
        landings, layer_ends = list[int](), list[int]()
        for layer, cost in enumerate(compute):
            fence = ticket.layer_fence(layer)
            fence.add_hook(lambda: landings.append(clock.now_ns()))
            stream.wait(fence)
            stream.run(cost, lambda: layer_ends.append(clock.now_ns()))
        step.launched(stream)
        step.end()
        ends: list[int] = []
        step.fence.add_hook(lambda: ends.append(clock.now_ns()))
        clock.run()
        landed = landings_ns(batch, link)
        assert landings == landed
        upto = range(1, layers + 1)
        assert layer_ends == [overlapped_end_ns(landed[:n], compute[:n]) for n in upto]
        assert ends == [overlapped_end_ns(landed, compute)]
        assert max(landed[-1], sum(compute)) <= ends[0] <= landed[-1] + sum(compute)

    def test_unlayered_does_not_overlap(self) -> None:
        device, host = attention_pools()
        copy = Copy(host.kv_rows, device.kv_rows, [1], [1])
        landed = landings_ns(CopyBatch("h2d", (copy,)), Link(GIB), start_ns=5)
        assert landed == [5 + 8192] * 4


class TestHazards:
    @pytest.fixture
    def bench(self) -> Bench:
        return Bench.make("none")

    def engine(self, bench: Bench, clock: VirtualClock) -> VirtualEngine:
        return VirtualEngine(clock, hazards=bench.hazards)

    def test_a_write_into_a_page_under_backup(self, bench: Bench) -> None:
        clock = VirtualClock()
        engine = self.engine(bench, clock)
        copy = Copy(bench.device.kv_rows, bench.host.kv_rows, [1, 2], [3, 4])
        engine.submit(CopyBatch("d2h", (copy,), label="backup"))
        clock.run(until_ns=100)
        bench.device.kv[3].v[2] += 1
        clock.run()
        found = [Hazard("source changed", 0, "backup", 3, "device kv", 2)]
        assert bench.hazards.found == found

    def test_a_write_where_a_load_will_land(self, bench: Bench) -> None:
        clock = VirtualClock()
        engine = self.engine(bench, clock)
        copy = Copy(bench.host.state_rows, bench.device.state_rows, [1], [3])
        engine.submit(CopyBatch("h2d", (copy,), label="load"))
        clock.run(until_ns=100)
        bench.device.states[2]["conv"][3] = 1
        clock.run()
        found = [Hazard("target touched", 0, "load", 2, "device states", 3)]
        assert bench.hazards.found == found

    def test_two_copies_of_different_channels(self, bench: Bench) -> None:
        clock = VirtualClock()
        engine = self.engine(bench, clock)
        kv, host = bench.device.kv_rows, bench.host.kv_rows
        engine.submit(CopyBatch("d2h", (Copy(kv, host, [1], [1]),)))
        engine.submit(CopyBatch("h2d", (Copy(host, kv, [2], [1]),)))  # forgot `after`
        clock.run()
        assert {hazard.kind for hazard in bench.hazards.found} == {"source changed"}

    def test_an_early_read_is_loud(self, bench: Bench) -> None:
        clock = VirtualClock()
        engine = self.engine(bench, clock)
        copy = Copy(bench.host.kv_rows, bench.device.kv_rows, [1], [3])
        for part in bench.host.kv_rows.parts(2) + bench.host.kv_rows.parts(3):
            part.zero_()
        ticket = engine.submit(CopyBatch("h2d", (copy,), by_layer=True))
        clock.run(until_ns=100)
        assert bench.device.kv[2].k[3].isnan().all() and bench.device.kv[3].v[3].isnan().all()
        while ticket.layers_done < 3:
            clock.step()
        assert not bench.device.kv[2].k[3].any(), "landed"
        assert bench.device.kv[3].k[3].isnan().all(), "not yet"
        clock.run()
        assert not bench.device.kv[3].k[3].any() and not bench.hazards.found


class TestRepeatability:
    @staticmethod
    def trace(order_seed: int | None) -> list[tuple[int, str, int, int]]:
        clock, rng, out = VirtualClock(), random.Random(1), list[tuple[int, str, int, int]]()
        device, host = attention_pools()
        engine = VirtualEngine(
            clock,
            order_seed=order_seed,
            on_event=lambda ns, event, ticket, done: out.append((ns, event, ticket.seq, done)),
        )
        for _ in range(30):
            row = rng.randrange(8)
            down = Copy(device.kv_rows, host.kv_rows, [row], [row])
            up = Copy(host.kv_rows, device.kv_rows, [row], [row])
            channel: Channel = rng.choice(["d2h", "h2d"])
            item = down if channel == "d2h" else up
            engine.submit(CopyBatch(channel, (item,), by_layer=rng.random() < 0.5))
        clock.run()
        return out

    def test_same_seed_same_trace(self) -> None:
        for seed in (None, 3, 4):
            assert self.trace(seed) == self.trace(seed)
        assert self.trace(3) != self.trace(4) != self.trace(None)

    def test_order_is_fuzzed_within_what_was_asked(self) -> None:
        orders = {
            tuple(seq for _, event, seq, _ in self.trace(seed) if event == "done")
            for seed in range(5)
        }
        assert len(orders) == 5


class TestEnds:
    def test_close_ends_running_copies_there_and_then(self) -> None:
        clock, bench, told = VirtualClock(), Bench.make("none"), list[tuple[str, int]]()
        engine = VirtualEngine(
            clock, on_event=lambda _ns, event, ticket, _done: told.append((event, ticket.seq))
        )
        images = bench.images()
        copy = Copy(bench.device.kv_rows, bench.host.kv_rows, [1], [2])
        running = engine.submit(CopyBatch("d2h", (copy,)))
        queued = engine.submit(CopyBatch("d2h", (copy,), after=(Fence(),)))
        clock.run(until_ns=100)
        assert running.state is TicketState.RUNNING
        engine.close()
        for ticket in (running, queued):
            assert ticket.done and isinstance(ticket.error, CopyCancelled)
            assert told.count(("cancelled", ticket.seq)) == 1, "whether it had begun or not"
        clock.run()
        assert bench.same(images), "what was under way never lands"

    def test_a_slow_or_hanging_link(self) -> None:
        clock = VirtualClock()
        device, host = attention_pools()
        engine = VirtualEngine(clock, links={**PCIE5, "h2d": Link(GIB)}, delay=lambda *_: 10**9)
        copy = Copy(host.kv_rows, device.kv_rows, [1], [1])
        ticket = engine.submit(CopyBatch("h2d", (copy,), by_layer=True))
        clock.run(until_ns=10**9)
        assert ticket.layers_done == 0
        clock.run()
        assert clock.now_ns() == 4 * (10**9 + 2048) and ticket.layers_done == 4


class TestVirtualStream:
    def test_in_order_with_fences(self) -> None:
        clock, order = VirtualClock(), list[tuple[str, int]]()
        stream = VirtualStream("s", clock)
        assert stream.record().passed

        def note(name: str) -> Callable[[], None]:
            return lambda: order.append((name, clock.now_ns()))

        gate = Fence()
        stream.run(10, note("first"))
        first = stream.record()
        stream.wait(gate)
        stream.run(5, note("second"))
        stream.record().add_callback(note("recorded"))
        clock.run(until_ns=100)
        assert order == [("first", 10)] and first.passed
        gate.mark_passed()
        clock.run()
        assert order == [("first", 10), ("second", 105), ("recorded", 105)]
        assert stream.record().passed


def test_the_checker_forgets_ended_tickets() -> None:
    clock, bench, checker = VirtualClock(), Bench.make("none"), HazardChecker()
    engine = VirtualEngine(clock, hazards=checker)
    copy = Copy(bench.device.kv_rows, bench.host.kv_rows, [1], [2])
    engine.submit(CopyBatch("d2h", (copy,)))
    clock.run()
    assert not checker._sources
