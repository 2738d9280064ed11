"""Several ranks behind one engine: order, lag, failure, loss, and what is never used too early."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from phloem.cuda_streams.batches import Channel, Clear, Copy, CopyBatch
from phloem.cuda_streams.clocks import VirtualClock
from phloem.cuda_streams.dispatch import Fault
from phloem.cuda_streams.engine import Ticket, TicketState
from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.hazards import HazardChecker
from phloem.cuda_streams.orders import Ended, Finished, Submit
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.ranks import RankedEngine, RankedStream
from phloem.cuda_streams.virtual import VirtualStream
from phloem.errors import CopyCancelled, CopyFailed, EngineDead, InvalidRequest, RuntimeClosed
from phloem.runtime.layout import KVSpec, LayerSpec, ModelLayout
from streams.bench import LAYOUT, Bench, fill
from streams.ranked import Fleet, Ranks, over_ranks, virtual_engines

LAYERS = len(LAYOUT.layers)
RANK_POOLS = ("device states", "device states of rank 1")


class Bed:
    """Two ranks in virtual time, the second four times slower; wires take 300 ns."""

    def __init__(self, *, faults: tuple[Fault | None, Fault | None] = (None, None)) -> None:
        self.clock = VirtualClock()
        self.bench = Bench.make("two ranks")
        self.checkers = (HazardChecker(), HazardChecker())
        engines = virtual_engines(self.clock, self.checkers, faults=faults)
        self.ranks: Ranks = over_ranks(self.post, self.clock, self.bench.shards, engines)
        self.head: RankedEngine = self.ranks.head

    def post(self, fn: Callable[[], None]) -> None:
        self.clock.call_at(self.clock.now_ns(), fn)

    def backup(self, source: int, target: int) -> Copy:
        bench = self.bench
        return Copy(bench.device.kv_rows, bench.host.kv_rows, [source], [target])

    def load(self, source: int, target: int) -> Copy:
        bench = self.bench
        return Copy(bench.host.kv_rows, bench.device.kv_rows, [source], [target])

    def submit(
        self,
        channel: Channel,
        item: Copy,
        *,
        after: tuple[Fence | Ticket, ...] = (),
        requires: tuple[Ticket, ...] = (),
        by_layer: bool = False,
        priority: int = 0,
        label: str = "",
    ) -> Ticket:
        batch = CopyBatch(
            channel, (item,), after, requires, by_layer=by_layer, priority=priority, label=label
        )
        return self.head.submit(batch)

    def on_rank(self, rank: int, copy: Ticket) -> Ticket:
        """The rank's own ticket of a copy."""
        ticket = self.ranks.ranks[rank]._tickets[copy.seq]
        assert ticket is not None
        return ticket

    def run_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self.clock.step(), "it never came to that"


@pytest.fixture
def bed() -> Bed:
    return Bed()


def fails(label: str, error: Exception, layer: int = 0) -> Fault:
    def fault(ticket: Ticket, at: int) -> None:
        if ticket.batch.label == label and at == layer:
            raise error

    return fault


# -- order and lag ---------------------------------------------------------------------------------


def test_s131_a_copy_has_ended_when_the_last_rank_says_so(bed: Bed) -> None:
    copy = bed.submit("d2h", bed.backup(1, 2), by_layer=True)
    bed.run_until(lambda: copy.seq in bed.ranks.ranks[1]._tickets)
    fast, slow = bed.on_rank(0, copy), bed.on_rank(1, copy)
    bed.run_until(lambda: fast.done)
    bed.clock.run(until_ns=bed.clock.now_ns() + 1000)
    assert fast.done and not slow.done and not copy.done
    assert copy.layers_done <= slow.layers_done < LAYERS
    bed.run_until(lambda: copy.done)
    assert slow.done and copy.state is TicketState.DONE and copy.layers_done == LAYERS


def test_f082_every_rank_is_sent_the_same_in_one_order(bed: Bed) -> None:
    gate = Fence()
    bed.submit("d2h", bed.backup(1, 1), after=(gate,), label="late")
    bed.submit("h2d", bed.load(2, 2))
    bed.submit("h2d", bed.load(3, 3), by_layer=True)
    bed.clock.run()
    gate.mark_passed()
    bed.clock.run()
    first, second = (wire.sent for wire in bed.ranks.orders)
    assert first == second
    orders = [pickle.loads(data) for data in first]
    assert [order.number for order in orders] == [1, 2, 3]
    assert [order.copy for order in orders if isinstance(order, Submit)] == [1, 2, 0]


def test_every_rank_hears_for_which_copy_somebody_waits(bed: Bed) -> None:
    bulk = [bed.submit("d2h", bed.backup(n, n), priority=1) for n in range(1, 5)]
    bed.run_until(lambda: all(copy.seq in bed.ranks.ranks[1]._tickets for copy in bulk))
    assert not bed.on_rank(1, bulk[0]).done, "it has the link, and the others wait for it"
    bed.head.hasten(bulk[3])
    ended: list[int] = []
    for copy in bulk:
        bed.on_rank(1, copy).add_done_callback(lambda one: ended.append(one.seq))
    bed.clock.run()
    assert ended == [0, 3, 1, 2]


def test_each_rank_waits_for_its_own_part_only(bed: Bed) -> None:
    down = bed.submit("d2h", bed.backup(1, 2), by_layer=True)
    up = bed.submit("h2d", bed.load(2, 3), requires=(down,))
    bed.run_until(lambda: up.seq in bed.ranks.ranks[0]._tickets)
    bed.run_until(lambda: bed.on_rank(0, up).done)
    assert not bed.on_rank(1, down).done, "the fast rank goes on while the slow one copies"
    bed.clock.run()
    assert up.state is TicketState.DONE


def test_on_each_rank_a_copy_comes_after_what_it_names(bed: Bed) -> None:
    fleet = Fleet(bed.ranks, bed.clock, lambda: 20_000)  # long passes
    wrote: list[int] = []
    over = fleet.run([], wrote.append)
    copy = bed.submit("d2h", bed.backup(1, 2), after=(over,))
    second = bed.submit("h2d", bed.load(2, 3), after=(copy,))
    bed.run_until(lambda: second.placed.passed)
    assert wrote == [], "it is sent long before the pass is over"
    bed.clock.run(until_ns=bed.clock.now_ns() + 15_000)
    for rank in (0, 1):
        assert bed.on_rank(rank, copy).state is TicketState.QUEUED
        assert bed.on_rank(rank, second).state is TicketState.QUEUED
    bed.clock.run()
    assert sorted(wrote) == [0, 1] and second.state is TicketState.DONE


def test_what_a_lagging_rank_has_not_ended_is_not_free(bed: Bed) -> None:
    bed.ranks.orders[1].held = True
    copy = bed.submit("d2h", bed.backup(1, 2))
    bed.clock.run()
    assert bed.on_rank(0, copy).done and not copy.done
    assert bed.head.inflight_bytes() == copy.batch.nbytes
    # Whoever takes the page next waits for the copy, so its step begins nowhere.
    fleet = Fleet(bed.ranks, bed.clock, lambda: 100)
    wrote: list[int] = []
    over = fleet.run([copy.quiesced], wrote.append)
    bed.clock.run()
    assert wrote == [0], "rank 0 is done with its part; rank 1 has not heard of the copy yet"
    assert not over.passed
    bed.ranks.orders[1].release()
    bed.clock.run()
    assert copy.done and over.passed and wrote == [0, 1]
    assert not any(checker.found for checker in bed.checkers)


def test_an_answer_that_is_late_keeps_it_in_flight(bed: Bed) -> None:
    bed.ranks.answers[0].held = True
    copy = bed.submit("d2h", bed.backup(1, 2))
    bed.clock.run()
    assert not copy.done and bed.on_rank(0, copy).done and bed.on_rank(1, copy).done
    bed.ranks.answers[0].release()
    bed.clock.run()
    assert copy.done


def test_a_pass_waits_on_each_rank_for_the_layers_there(bed: Bed) -> None:
    copy = bed.submit("h2d", bed.load(1, 2), by_layer=True)
    bed.run_until(lambda: copy.placed.passed)
    stream = RankedStream("forward", bed.head)
    stream.wait(copy.layer_fence(LAYERS - 1))
    made = stream.begin()
    fence = stream.record()
    own = [VirtualStream("forward", bed.clock) for _ in range(2)]
    ended: dict[int, bool] = {}
    for rank, runs in zip(bed.ranks.ranks, own, strict=True):
        with pytest.raises(InvalidRequest, match="needs 1 orders; 0 have come"):
            rank.enter(made, runs)

        def launch(rank: int = rank.number) -> None:
            it, stream = bed.ranks.ranks[rank], own[rank]
            it.enter(made, stream)

            def note() -> None:
                ended.setdefault(rank, bed.on_rank(1 - rank, copy).done or rank == 1)

            stream.run(10, note)
            it.launched(made, stream)

        rank.ready_for(made).add_hook(launch)
    bed.run_until(lambda: 0 in ended)
    assert ended == {0: False} and not fence.passed, "the fast rank did not wait for the slow one"
    bed.clock.run()
    assert ended == {0: False, 1: True} and fence.passed
    with pytest.raises(InvalidRequest, match="behind a later one"):
        bed.ranks.ranks[0].enter(made, own[0])
    assert stream.record().passed


def test_a_pass_that_arrives_late_takes_nothing_along(bed: Bed) -> None:
    """Begun before a copy was sent, heard of after it: the copy is still spoken of."""
    stream = RankedStream("forward", bed.head)
    down = bed.submit("d2h", bed.backup(1, 2))  # sent at the next round
    made = stream.begin()
    bed.run_until(lambda: down.seq in bed.ranks.ranks[1]._tickets)
    bed.ranks.ranks[1].enter(made, VirtualStream("forward", bed.clock))
    up = bed.submit("h2d", bed.load(2, 3), requires=(down,))
    bed.clock.run()
    assert up.state is TicketState.DONE


def test_an_event_that_the_ranks_do_not_know_is_waited_for_at_the_head(bed: Bed) -> None:
    fence = Fence()
    copy = bed.submit("d2h", bed.backup(1, 2), after=(fence,))
    fence.mark_recorded("an event of some device")
    bed.clock.run()
    assert not copy.placed.passed and not bed.ranks.orders[0].sent
    fence.mark_passed()
    bed.clock.run()
    assert copy.state is TicketState.DONE


def test_a_stream_waits_only_for_what_the_ranks_know(bed: Bed) -> None:
    stream = RankedStream("forward", bed.head)
    assert stream.record().passed, "nothing has begun"
    with pytest.raises(InvalidRequest, match="of no copy that was sent"):
        stream.wait(Fence(label="a step without a stream"))
    stream.wait(Fence.settled())
    assert stream.begin().waits == ()


# -- failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_fails_the_copy_on_all(rank: int) -> None:
    fault = fails("bad", OSError("the link is down"), layer=1)
    bed = Bed(faults=(fault, None) if rank == 0 else (None, fault))
    bad = bed.submit("h2d", bed.load(1, 2), by_layer=True, label="bad")
    needs = bed.submit("d2h", bed.backup(2, 5), requires=(bad,))
    follows = bed.submit("h2d", bed.load(3, 2), after=(bad, needs))
    bed.clock.run()
    assert isinstance(bad.error, CopyFailed) and not isinstance(bad.error, CopyCancelled)
    assert f"rank {rank}" in str(bad.error) and "the link is down" in str(bad.error)
    assert isinstance(needs.error, CopyFailed)
    assert follows.state is TicketState.DONE
    images = bed.bench.images()
    for end in ("", " of rank 1"):
        host, device = images["host kv" + end], images["device kv" + end]
        assert all(torch.equal(a[3], b[2]) for a, b in zip(host, device, strict=True))
    assert bed.head.inflight_bytes() == 0


def test_a_failure_is_known_when_all_have_left_the_memory_alone() -> None:
    bed = Bed(faults=(fails("bad", OSError("down")), None))
    bad = bed.submit("h2d", bed.load(1, 2), by_layer=True, label="bad")
    bed.run_until(lambda: bad.seq in bed.ranks.ranks[1]._tickets)
    fast, slow = bed.on_rank(0, bad), bed.on_rank(1, bad)
    bed.run_until(lambda: fast.done)
    assert fast.error is not None and not slow.done and not bad.done
    bed.run_until(lambda: bad.done)
    assert slow.state is TicketState.CANCELLED, "it was told that the copy is not wanted any more"


@pytest.mark.parametrize(
    ("spared", "good", "last"),
    [((3, 1), 1, "failed"), ((2, None), 2, "done"), ((None, 3), 3, "failed"), ((0, 2), 0, "")],
)
def test_rows_are_good_that_are_good_on_all_ranks(
    spared: tuple[int | None, int | None], good: int, last: str
) -> None:
    """A rank that has all it was told to copy, or a part, is not told to stop: it is of use."""
    faults = [
        None if rows is None else fails("bad", CopyFailed("a page", rows_ok=rows), layer=2)
        for rows in spared
    ]
    bed = Bed(faults=(faults[0], faults[1]))
    pools = bed.bench.host.kv_rows, bed.bench.device.kv_rows
    copy = Copy(*pools, [5, 9, 3, 7], [2, 8, 4, 11])
    bad = bed.submit("h2d", copy, by_layer=True, label="bad")
    bed.run_until(lambda: bad.seq in bed.ranks.ranks[1]._tickets)
    slow = bed.on_rank(1, bad)
    bed.clock.run()
    assert isinstance(bad.error, CopyFailed) and bad.error.rows_ok == good
    assert slow.state.value == (last or "cancelled")
    images = bed.bench.images()
    for end in ("", " of rank 1"):
        host, device = images["host kv" + end], images["device kv" + end]
        for source, target in list(zip(copy.source_ids, copy.target_ids, strict=True))[:good]:
            assert all(torch.equal(a[source], b[target]) for a, b in zip(host, device, strict=True))


def test_the_reason_does_not_depend_on_who_answers_first() -> None:
    for held in (0, 1):
        bed = Bed(faults=(fails("bad", OSError("a")), fails("bad", OSError("b"))))
        bad = bed.submit("h2d", bed.load(1, 2), label="bad")
        bed.ranks.answers[held].held = True
        bed.clock.run()
        bed.ranks.answers[held].release()
        bed.clock.run()
        assert "rank 0" in str(bad.error)


def test_a_cancelled_copy_ends_early_on_all(bed: Bed) -> None:
    copy = bed.submit("h2d", bed.load(1, 2), by_layer=True)
    bed.run_until(lambda: copy.seq in bed.ranks.ranks[1]._tickets)
    copy.cancel()
    bed.clock.run()
    assert isinstance(copy.error, CopyCancelled)


def test_a_shard_without_the_pool_fails_the_copy_and_nothing_else(bed: Bed) -> None:
    rank = bed.ranks.ranks[1]
    del rank._pools["host kv", None]
    fills = bed.submit("d2h", bed.backup(1, 2))
    needs = bed.submit("h2d", bed.load(2, 3), requires=(fills,))
    bed.clock.run()
    assert "no pool 'host kv'" in str(fills.error) and isinstance(needs.error, CopyFailed)
    assert bed.head.dead is None and bed.head.inflight_bytes() == 0


# -- death -----------------------------------------------------------------------------------------


def test_a_dead_engine_of_one_rank_ends_all_when_the_others_are_quiet() -> None:
    bed = Bed(faults=(fails("last", EngineDead("device lost")), None))
    long = bed.submit("d2h", bed.backup(1, 2), by_layer=True)
    queued = bed.submit("h2d", bed.load(2, 3), after=(long, Fence()))
    last = bed.submit("h2d", bed.load(4, 5), label="last")
    bed.run_until(lambda: last.seq in bed.ranks.ranks[1]._tickets)
    slow = bed.on_rank(1, long)
    bed.run_until(lambda: bed.head.dead is not None)
    with pytest.raises(EngineDead, match="rank 0: device lost"):
        bed.submit("d2h", bed.backup(6, 7))
    with pytest.raises(EngineDead):
        RankedStream("forward", bed.head).begin()
    bed.clock.run(until_ns=bed.clock.now_ns() + 1)
    assert not slow.done
    assert not long.done and not queued.done, "rank 1 may still read page 1"
    bed.clock.run()
    for ticket in (queued, last):
        assert isinstance(ticket.error, EngineDead)
    assert long.done and bed.head.inflight_bytes() == 0


def test_a_rank_that_is_lost_takes_nobody_along_but_the_engine(bed: Bed) -> None:
    fleet = Fleet(bed.ranks, bed.clock, lambda: 100)
    bed.ranks.answers[1].held = True
    over = fleet.run([], lambda _: None)
    copy = bed.submit("d2h", bed.backup(1, 2))
    bed.clock.run()
    assert not copy.done and not over.passed, "a silent rank may be slow: nothing is given up"
    bed.head.lose(1, "its process has gone")
    bed.head.lose(1, "again")
    assert over.passed and copy.done
    assert isinstance(copy.error, EngineDead) and "its process has gone" in str(copy.error)
    bed.ranks.answers[1].release()
    bed.clock.run()
    with pytest.raises(EngineDead):
        bed.submit("d2h", bed.backup(1, 2))
    with pytest.raises(InvalidRequest, match="rank 2 of 2"):
        bed.head.lose(2, "there is none")


def test_closing_tells_the_ranks(bed: Bed) -> None:
    queued = bed.submit("d2h", bed.backup(1, 2), after=(Fence(),))
    bed.clock.run()
    bed.head.close()
    bed.head.close()
    bed.clock.run()
    assert isinstance(queued.error, CopyCancelled)
    assert all(engine._closed for engine in bed.ranks.engines)
    with pytest.raises(RuntimeClosed):
        bed.submit("d2h", bed.backup(1, 2))


def test_at_least_one_rank() -> None:
    with pytest.raises(InvalidRequest, match="at least one rank"):
        RankedEngine(lambda fn: fn(), [])


# -- shards ----------------------------------------------------------------------------------------


def test_stages_hold_their_own_layers_and_ranks_their_own_heads() -> None:
    """Ids mean the same everywhere; what a row is made of does not have to."""
    kv, half = KVSpec((2, 4), (2, 4)), KVSpec((1, 4), (1, 4))
    nothing = LayerSpec()
    layouts = [
        ModelLayout.from_layers([LayerSpec(kv=kv), nothing]),
        ModelLayout.from_layers([nothing, LayerSpec(kv=half)]),
        ModelLayout.from_layers([nothing, LayerSpec(kv=half)]),
    ]
    devices = [DevicePools.allocate(one, pages=8, states=0, page_size=2) for one in layouts]
    hosts = [HostPools.allocate(one, pages=8, states=0) for one in devices]
    clock = VirtualClock()
    for seed, pools in enumerate(devices):
        fill(pools.kv_rows, seed)
    engines = virtual_engines(clock, [HazardChecker() for _ in layouts])
    shards = [(d.kv_rows, h.kv_rows) for d, h in zip(devices, hosts, strict=True)]
    ranks = over_ranks(lambda fn: clock.call_at(clock.now_ns(), fn), clock, shards, engines)
    before = [[part.clone() for n in range(2) for part in d.kv_rows.parts(n)] for d in devices]
    device, host = shards[0]
    down = ranks.head.submit(CopyBatch("d2h", (Copy(device, host, [1, 3], [0, 2]),)))
    up = ranks.head.submit(
        CopyBatch("h2d", (Copy(host, device, [0, 2], [5, 6]),), requires=(down,), by_layer=True)
    )
    clock.run()
    assert up.state is TicketState.DONE
    for pools, parts in zip(devices, before, strict=True):
        now = [part for n in range(2) for part in pools.kv_rows.parts(n)]
        for part, old in zip(now, parts, strict=True):
            assert torch.equal(part[[5, 6]], old[[1, 3]])


def test_a_copy_of_one_layer_is_of_one_layer_on_every_rank(bed: Bed) -> None:
    pool, images = bed.bench.device.state_rows, bed.bench.images()
    one = pool.only(2)
    for batch in (
        CopyBatch("d2d", (Copy(one, one, [1], [2]),)),
        CopyBatch("d2d", (Clear(one, [3]),)),
    ):
        ticket = bed.head.submit(batch)
        bed.clock.run()
        assert ticket.state is TicketState.DONE
    for number, shard in enumerate(bed.bench.shards):
        want, part = images[RANK_POOLS[number]], 0
        for layer in range(LAYERS):
            for got in shard[1].parts(layer):
                same = torch.equal(got, want[part])
                assert same == (layer != 2), (number, layer)
                if layer == 2:
                    assert torch.equal(got[2], want[part][1]) and not got[3].any()
                part += 1


def test_a_gap_in_the_orders_is_loud(bed: Bed) -> None:
    bed.submit("d2h", bed.backup(1, 2))
    bed.clock.run()
    again = pickle.loads(bed.ranks.orders[0].sent[0])
    with pytest.raises(AssertionError, match="was sent"):
        bed.ranks.ranks[0].receive(again)


def test_copies_of_one_channel_begin_one_after_the_other(bed: Bed) -> None:
    """The head sends them at once; each rank has them wait for each other."""
    first, second = (bed.submit("d2h", bed.backup(n, n)) for n in (1, 2))
    bed.run_until(lambda: first.done and second.done)
    times = [first.started_ns, first.ended_ns, second.started_ns, second.ended_ns]
    known = [time for time in times if time is not None]
    assert len(known) == len(times) and known == sorted(known) and known[1] == known[2]


def test_whether_a_copy_has_begun_is_not_guessed(bed: Bed) -> None:
    """Its end is heard before that of the pass that it waited for."""
    head = RankedEngine(bed.post, [lambda _: None], now_ns=bed.clock.now_ns)
    stream = RankedStream("model", head)
    made = stream.begin()
    copy = head.submit(CopyBatch("d2h", (bed.backup(1, 2),), after=(stream.record(),)))
    bed.clock.run(until_ns=10)
    assert copy.placed.passed and copy.started_ns is None, "it waits"
    head.acknowledge(Ended(0, copy.seq, "done"))
    bed.clock.run(until_ns=20)
    assert copy.done and (copy.started_ns, copy.ended_ns) == (None, 10)
    head.acknowledge(Finished(0, made.step))
    bed.clock.run(until_ns=30)
    assert copy.started_ns is None and stream.record().passed
    head.close()
