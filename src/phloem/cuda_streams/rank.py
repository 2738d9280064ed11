"""One rank of several: carries out the head's orders on its own engine, over its own shard.

It decides nothing: it submits what it is told, in the order it is told, and answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from phloem.cuda_streams.batches import Clear, Copy, CopyBatch, CopyItem
from phloem.cuda_streams.engine import CopyEngine, Ticket
from phloem.cuda_streams.fences import Fence, Stream
from phloem.cuda_streams.orders import (
    Answer,
    Cancel,
    Close,
    CopyLanded,
    Ended,
    Finished,
    Hasten,
    Item,
    Mark,
    Order,
    Pass,
    Progress,
    Submit,
)
from phloem.cuda_streams.rows import RowPool
from phloem.errors import CopyCancelled, CopyFailed, EngineDead, InvalidRequest, RuntimeClosed

__all__ = ["Rank"]


class Rank:
    """What one rank runs for the head, on the rank's own loop.

    `pools` are this rank's shards of the pools that the head names: as many rows and model layers,
    and whatever part of each the rank holds (a stage of a pipeline holds nothing of other stages'
    layers). `answer` brings answers to `RankedEngine.acknowledge`; it is called from any thread,
    and answers about one copy or one stream must arrive in the order given.

    A pass runs in three steps: wait for `ready_for`, `enter` it on the stream that will run it,
    launch, and say `launched`. All but the last are for the loop.
    """

    def __init__(
        self,
        number: int,
        engine: CopyEngine,
        pools: Iterable[RowPool],
        answer: Callable[[Answer], None],
    ) -> None:
        self.number = number
        self._engine = engine
        self._pools: dict[tuple[str, int | None], RowPool] = {
            (pool.name, None): pool for pool in pools
        }
        self._answer = answer
        self._received = 0
        self._tickets: dict[int, Ticket | None] = {}  # None: the engine would not have it
        self._oldest_copy = 0
        self._waiting: list[tuple[Pass, Fence]] = []  # passes whose orders have not all come
        self._entered: dict[str, int] = {}  # the last pass, by stream
        self._lock = threading.Lock()
        self._passes: dict[int, Fence] = {}  # under the lock: workers launch, the loop names
        self._oldest_step = 0  # under the lock

    def __repr__(self) -> str:
        return f"Rank({self.number}, {self._received} orders, {len(self._tickets)} copies)"

    @property
    def remembered(self) -> int:
        """Copies and passes of which the head may yet speak."""
        return len(self._tickets) + len(self._passes)

    def receive(self, order: Order) -> None:
        """Carry out an order; never waits."""
        assert order.number == self._received + 1, f"{self!r} was sent {order}"
        match order:
            case Submit():
                self._submit(order)
                self._forget_copies(order.oldest_copy)
                self._forget_passes(order.oldest_step)
            case Cancel():
                ticket = self._tickets.get(order.copy)
                if ticket is not None:
                    ticket.cancel()
            case Hasten():
                ticket = self._tickets.get(order.copy)
                if ticket is not None:
                    self._engine.hasten(ticket)
            case Close():
                self._engine.close()
        self._received = order.number
        due = [one for one in self._waiting if one[0].orders <= self._received]
        self._waiting = [one for one in self._waiting if one[0].orders > self._received]
        for made, ready in due:
            self._when_placed(made, ready)

    # -- passes

    def ready_for(self, made: Pass) -> Fence:
        """Passes when all that the pass waits for is known here, so that it can be entered."""
        ready = Fence(label=f"pass {made.step} on rank {self.number}")
        if made.orders > self._received:
            self._waiting.append((made, ready))
        else:
            self._when_placed(made, ready)
        return ready

    def enter(self, made: Pass, stream: Stream) -> None:
        """Let what comes onto `stream` from now on wait for this rank's part of what it reads.

        Passes of one stream are entered in the order in which the head began them. Raises
        InvalidRequest otherwise, and before `ready_for` has passed.
        """
        if made.step <= self._entered.get(stream.name, 0):
            raise InvalidRequest(f"pass {made.step} on {stream.name!r} behind a later one")
        if made.orders > self._received:
            raise InvalidRequest(
                f"pass {made.step} needs {made.orders} orders; {self._received} have come"
            )
        self._entered[stream.name] = made.step
        for mark in made.waits:
            stream.wait(self._fence_of(mark))
        self._forget_copies(made.oldest_copy)

    def launched(self, made: Pass, stream: Stream) -> None:
        """All that the pass runs here is on `stream`; from the thread that put it there."""
        over = self._pass_fence(made.step)
        recorded = stream.record()

        def ended() -> None:
            over.mark_passed()
            self._answer(Finished(self.number, made.step))

        recorded.add_recorded_hook(partial(_same_event, recorded, over))
        recorded.add_hook(ended)
        self._forget_passes(made.oldest_step)

    def _when_placed(self, made: Pass, ready: Fence) -> None:
        copies = [mark.copy for mark in made.waits if isinstance(mark, CopyLanded)]
        tickets = map(self._ticket, copies)
        _when_all([one.placed for one in tickets if one is not None], ready.mark_passed)

    # -- copies

    def _submit(self, order: Submit) -> None:
        after = tuple(self._fence_of(mark) for mark in order.after)
        needed = [self._tickets[copy] for copy in order.requires]
        requires = tuple(ticket for ticket in needed if ticket is not None)
        try:
            if len(requires) < len(needed):
                raise InvalidRequest("it needs a copy that could not be made here")
            batch = CopyBatch(
                order.channel,
                tuple(map(self._item, order.items)),
                after,
                requires,
                by_layer=order.by_layer,
                priority=order.priority,
                label=order.label,
            )
            ticket = self._engine.submit(batch)
        except (EngineDead, InvalidRequest, RuntimeClosed) as error:
            self._tickets[order.copy] = None
            answer = self._ended(order.copy, error)
            # Done means quiet, for what it names, too.
            waits = [*after, *(ticket.quiesced for ticket in requires)]
            _when_all(waits, partial(self._answer, answer))
            return
        self._tickets[order.copy] = ticket
        if order.by_layer:
            for layer in range(batch.layers - 1):
                tell = partial(self._landed, order.copy, ticket, layer)
                ticket.layer_fence(layer).add_hook(tell)
        ticket.quiesced.add_hook(
            lambda: self._answer(self._ended(order.copy, ticket.error)),
        )

    def _item(self, item: Item) -> CopyItem:
        target = self._pool(item.target, item.layer)
        if item.source is None:
            return Clear(target, item.target_ids)
        source = target if item.source == item.target else self._pool(item.source, item.layer)
        return Copy(source, target, item.source_ids, item.target_ids)

    def _pool(self, name: str, layer: int | None) -> RowPool:
        pool = self._pools.get((name, layer))
        if pool is not None:
            return pool
        whole = self._pools.get((name, None))
        if whole is None or layer is None or not 0 <= layer < whole.layers:
            known = sorted(name for name, layer in self._pools if layer is None)
            raise InvalidRequest(
                f"rank {self.number} has no pool {name!r} (layer {layer}): {known}"
            )
        self._pools[name, layer] = one = whole.only(layer)
        return one

    def _landed(self, copy: int, ticket: Ticket, layer: int) -> None:
        if ticket.layers_done > layer and not ticket.done:
            self._answer(Progress(self.number, copy, layer + 1))

    def _ended(self, copy: int, error: BaseException | None) -> Ended:
        match error:
            case None:
                return Ended(self.number, copy, "done")
            case EngineDead():
                return Ended(self.number, copy, "dead", str(error))
            case CopyCancelled() | RuntimeClosed():
                return Ended(self.number, copy, "cancelled", str(error))
            case _:
                rows_ok = error.rows_ok if isinstance(error, CopyFailed) else 0
                return Ended(self.number, copy, "failed", str(error), rows_ok)

    # -- what the head names

    def _fence_of(self, mark: Mark) -> Fence:
        if not isinstance(mark, CopyLanded):
            return self._pass_fence(mark.step)
        ticket = self._ticket(mark.copy)
        if ticket is None:
            return Fence.settled(f"copy {mark.copy}, which is over")
        last = mark.layer == ticket.batch.layers - 1
        return ticket.quiesced if last else ticket.layer_fence(mark.layer)

    def _ticket(self, copy: int) -> Ticket | None:
        """None for one that could not be made, or that is over everywhere."""
        if copy not in self._tickets:
            assert copy < self._oldest_copy, f"{self!r} never heard of copy {copy}"
            return None
        return self._tickets[copy]

    def _pass_fence(self, step: int) -> Fence:
        with self._lock:
            fence = self._passes.get(step)
            if fence is None:
                label = f"pass {step}"
                if step < self._oldest_step:
                    return Fence.settled(label)
                fence = self._passes[step] = Fence(label=label)
            return fence

    # A pass comes by another way than the orders, so it may name what they have let us forget.
    def _forget_copies(self, oldest: int) -> None:
        """The head has heard the end of all before `oldest`, from all ranks."""
        self._oldest_copy = max(self._oldest_copy, oldest)
        for copy in [copy for copy in self._tickets if copy < oldest]:
            del self._tickets[copy]

    def _forget_passes(self, oldest: int) -> None:
        with self._lock:
            self._oldest_step = max(self._oldest_step, oldest)
            for step in [step for step in self._passes if step < oldest]:
                del self._passes[step]


def _same_event(recorded: Fence, over: Fence) -> None:
    if (event := recorded.event) is not None:
        over.mark_recorded(event)


def _when_all(fences: Sequence[Fence], fn: Callable[[], None]) -> None:
    """Call `fn` once all have passed, in the thread that passes the last."""
    left = list(fences)

    def look() -> None:
        while left and left[-1].passed:
            left.pop()
        if left:
            left[-1].add_hook(look)
        else:
            fn()

    look()
