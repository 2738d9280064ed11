"""One tree, several ranks: the head's engine, which has every rank carry out every copy.

With tensor or pipeline parallelism each rank holds its own shard of the pools, and one tree decides
for all. `RankedEngine` is an ordinary `CopyEngine` for whoever decides: it sends each batch to all
ranks, as values and in one order, and a ticket is done when the slowest rank has answered. No rank
decides anything. `phloem.cuda_streams.rank` has the other end of the wires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns

from phloem.cuda_streams.batches import CHANNELS, Channel, Copy, CopyItem
from phloem.cuda_streams.dispatch import Dispatcher, waited_for
from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.fences import Fence, Post
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
    PassOver,
    Progress,
    Submit,
)
from phloem.errors import CopyCancelled, CopyFailed, EngineDead, InvalidRequest

__all__ = ["RankedEngine", "RankedStream", "Wire"]

Wire = Callable[[Order], None]
"""Sends an order to one rank: it must arrive there, once, in the order sent. Must not raise: what
cannot be sent is a rank that is lost."""

_GRAVITY = ("done", "cancelled", "failed", "dead")  # the heaviest outcome of a rank is that of all


@dataclass
class _Joint:
    """A copy that was sent: how far each rank has come, and what those that ended have said."""

    ticket: Ticket
    layers: list[int]
    ended: dict[int, Ended] = field(default_factory=dict[int, Ended])
    cancel_sent: bool = False


class RankedEngine(Dispatcher):
    """`CopyEngine` over ranks. Everything here happens on one loop; answers may come from anywhere.

    A batch is sent once each thing it waits for has passed, or is a copy or a pass that the ranks
    know: then each rank waits for its own part of it, not for the other ranks. A copy that fails on
    one rank fails, and is cancelled on the others unless some of its rows are good there
    (`CopyFailed.rows_ok` is then the least of all ranks); its ticket is done when all have left its
    memory alone. One dead engine, or a rank that is lost, ends this engine. `Ticket.cancel` of a
    copy that was sent is heard at the next layer that a rank tells of, or never.
    """

    placed_at_launch = True

    def __init__(
        self, post: Post, wires: Sequence[Wire], *, now_ns: Callable[[], int] = monotonic_ns
    ) -> None:
        """One wire to each rank. Raises InvalidRequest without any."""
        if not wires:
            raise InvalidRequest("a model runs on at least one rank")
        super().__init__(post, now_ns=now_ns)
        self._wires = tuple(wires)
        self._sent = 0
        self._joints: dict[int, _Joint] = {}
        self._lost: dict[int, str] = {}
        self._steps = 0
        self._running: dict[int, set[int]] = {}  # the ranks that have not ended a pass
        self._pass_fences: dict[int, Fence] = {}

    def close(self) -> None:
        """See `CopyEngine.close`; the ranks are told to end what they have."""
        if self._closed:
            return
        self.stop()
        self._serve()
        self._send(Close(self._sent + 1))

    def acknowledge(self, answer: Answer) -> None:
        """Take the answer of a rank; from any thread."""
        self._post(partial(self._heard, answer))

    def lose(self, rank: int, why: str) -> None:
        """A rank will never answer again, nor touch its memory: its process is gone.

        Ends this engine. Raises InvalidRequest if there is no such rank.
        """
        if not 0 <= rank < len(self._wires):
            raise InvalidRequest(f"rank {rank} of {len(self._wires)}")
        if rank in self._lost:
            return
        self._lost[rank] = why
        self._die(rank, why)
        for copy in tuple(self._joints):
            self._on_ended(Ended(rank, copy, "dead", why))
        for step in tuple(self._running):
            self._on_finished(Finished(rank, step))

    # -- copies

    def _woken(self, channel: Channel) -> None:
        del channel
        self._post(self._serve)

    def _when_met(self, fence: Fence, fn: Callable[[], None]) -> None:
        def look() -> None:
            if fence.passed or _is_known(fence):
                fn()
            else:  # an event that means nothing to the ranks
                fence.add_hook(fn)

        fence.add_recorded_hook(look)

    def _serve(self) -> None:
        for channel in CHANNELS:
            while (ticket := self.take(channel)) is not None:
                self._launch(ticket)

    def _end_unstarted(self, ticket: Ticket, error: BaseException) -> None:
        # Unlike an engine of one device this one may be dead or closed while copies still run.
        ours = {one.quiesced for one in self._open.values()}
        for fence in waited_for(ticket.batch):
            if not fence.passed and (fence in ours or _is_known(fence)):
                fence.add_hook(partial(self._post, partial(self._end_unstarted, ticket, error)))
                return
        super()._end_unstarted(ticket, error)

    def _launch(self, ticket: Ticket) -> None:
        batch = ticket.batch
        waits = [fence for fence in waited_for(batch) if not fence.passed]
        marks = tuple(map(mark_of, waits))
        self._waits_for(ticket, waits)
        oldest_copy, oldest_step = self._oldest()
        self._joints[ticket.seq] = _Joint(ticket, [0] * len(self._wires))
        self._send(
            Submit(
                self._sent + 1,
                ticket.seq,
                batch.channel,
                tuple(map(_item, batch.items)),
                after=marks,
                requires=tuple(needed.seq for needed in batch.requires if not needed.done),
                by_layer=batch.by_layer,
                priority=ticket.priority,
                label=batch.label,
                oldest_copy=oldest_copy,
                oldest_step=oldest_step,
            )
        )
        # Now that it is sent: whoever hears of it may begin a pass that waits for it.
        ticket.launched([CopyLanded(ticket.seq, layer) for layer in range(batch.layers)])

    def _send(self, order: Order) -> None:
        self._sent = order.number
        for rank, wire in enumerate(self._wires):
            if rank not in self._lost:
                wire(order)

    def _oldest(self) -> tuple[int, int]:
        """The first copy and the first pass of which a rank may yet hear; both dicts are in order.

        A copy that is still to be sent counts: what is said of a pass may arrive after it.
        """
        return next(iter(self._open), self._seq), next(iter(self._running), self._steps + 1)

    def _heard(self, answer: Answer) -> None:
        if answer.rank in self._lost:
            return
        match answer:
            case Progress():
                self._on_progress(answer)
            case Ended():
                self._on_ended(answer)
            case Finished():
                self._on_finished(answer)

    def _on_progress(self, answer: Progress) -> None:
        joint = self._joints.get(answer.copy)
        if joint is None:
            return  # overtaken by the end
        joint.layers[answer.rank] = max(answer.layers, joint.layers[answer.rank])
        everywhere = min(joint.layers)
        if everywhere > joint.ticket.layers_done:
            joint.ticket.progress(everywhere)
        if joint.ticket.cancel_asked:
            self._cancel(joint)

    def _on_ended(self, answer: Ended) -> None:
        joint = self._joints[answer.copy]
        if answer.rank in joint.ended:
            assert answer.rank in self._lost, f"{answer} came twice"
            return
        joint.ended[answer.rank] = answer
        if answer.outcome == "done":
            joint.layers[answer.rank] = joint.ticket.batch.layers
        elif answer.outcome == "dead":
            self._die(answer.rank, answer.why)
        elif not answer.rows_ok:
            self._cancel(joint)
        if len(joint.ended) == len(self._wires):
            del self._joints[answer.copy]
            self.finish(joint.ticket, _verdict(joint))

    def hasten(self, ticket: Ticket) -> None:
        """See `CopyEngine.hasten`."""
        super().hasten(ticket)
        if ticket.seq in self._joints and ticket.batch.priority > 0:
            self._send(Hasten(self._sent + 1, ticket.seq))

    def _cancel(self, joint: _Joint) -> None:
        if not joint.cancel_sent and len(joint.ended) < len(self._wires):
            joint.cancel_sent = True
            self._send(Cancel(self._sent + 1, joint.ticket.seq))

    def _die(self, rank: int, why: str) -> None:
        if self._dead is not None:
            return
        with self._lock:
            self._dead = EngineDead(f"rank {rank}: {why}")
        self._flush()
        for joint in tuple(self._joints.values()):
            self._cancel(joint)

    # -- forward passes

    def begin_pass(self, waits: tuple[Mark, ...]) -> Pass:
        """Number a pass that begins on all ranks now, for `RankedStream.begin`.

        Raises `EngineDead` once the engine has failed.
        """
        if self._dead is not None:
            raise EngineDead(str(self._dead)) from self._dead
        oldest_copy, oldest_step = self._oldest()
        self._steps += 1
        self._running[self._steps] = set(range(len(self._wires)))
        return Pass(self._steps, self._sent, waits, oldest_copy, oldest_step)

    def pass_fence(self, step: int, label: str) -> Fence:
        """A fence that passes when a pass is over on all ranks."""
        if step not in self._running:
            return Fence.settled(label)
        fence = self._pass_fences.get(step)
        if fence is None:
            fence = self._pass_fences[step] = Fence(self._post, f"pass {step} on {label}")
            fence.mark_recorded(PassOver(step))
        return fence

    def _on_finished(self, answer: Finished) -> None:
        ranks = self._running.get(answer.step)
        if ranks is None:
            return
        ranks.discard(answer.rank)
        if not ranks:
            del self._running[answer.step]
            fence = self._pass_fences.pop(answer.step, None)
            if fence is not None:
                fence.mark_passed()


class RankedStream:
    """The `Stream` of a model whose passes run on all ranks, as the head sees it.

    The head names each pass with `begin` and sends the value along with the batch; every rank
    enters it by `Rank.enter` on its own stream. `record` covers the passes begun so far.
    """

    def __init__(self, name: str, engine: RankedEngine) -> None:
        self.name = name
        self._engine = engine
        self._last = 0
        self._waits: list[Fence] = []

    def __repr__(self) -> str:
        return f"RankedStream({self.name!r})"

    def begin(self) -> Pass:
        """The next pass. Raises EngineDead when a rank is lost: there is nobody to run it."""
        self._waits = [fence for fence in self._waits if not fence.passed]
        made = self._engine.begin_pass(tuple(map(mark_of, self._waits)))
        self._last = made.step
        return made

    def record(self) -> Fence:
        """See `Stream.record`."""
        return self._engine.pass_fence(self._last, self.name)

    def wait(self, fence: Fence) -> None:
        """See `Stream.wait`: each rank's later passes wait for that rank's part of the fence.

        Raises InvalidRequest for a fence that the ranks do not know (wait for it, or for
        `Ticket.placed`, before).
        """
        if not fence.passed:
            mark_of(fence)
            self._waits.append(fence)


def _is_known(fence: Fence) -> bool:
    return isinstance(fence.event, CopyLanded | PassOver)


def mark_of(fence: Fence) -> Mark:
    """The mark by which ranks know a fence. Raises InvalidRequest for one that they do not know."""
    event = fence.event
    if not isinstance(event, CopyLanded | PassOver):
        raise InvalidRequest(f"{fence!r} is of no copy that was sent to the ranks, nor of a pass")
    return event


def _item(item: CopyItem) -> Item:
    target, ids = item.target, tuple(item.target_ids)
    if isinstance(item, Copy):
        return Item(target.name, ids, item.source.name, tuple(item.source_ids), target.layer)
    return Item(target.name, ids, layer=target.layer)


def _verdict(joint: _Joint) -> Exception | None:
    """The heaviest outcome, of the first rank that has it: the same in whatever order they came."""
    worst = max(joint.ended.values(), key=lambda one: (_GRAVITY.index(one.outcome), -one.rank))
    why = f"rank {worst.rank}: {worst.why}"
    match worst.outcome:
        case "done":
            return None
        case "cancelled":
            return CopyCancelled(f"{joint.ticket!r} was cancelled on {why}")
        case "failed":
            said = [one for one in joint.ended.values() if one.outcome != "done"]
            rows_ok = min(one.rows_ok for one in said)
            return CopyFailed(f"{joint.ticket!r} failed on {why}", rows_ok=rows_ok)
        case "dead":
            return EngineDead(why)
