"""Waiting, layer by layer, for data that a forward pass builds on and that are being copied."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.workers import WorkerStream
from phloem.errors import CopyFailed

__all__ = ["Landing"]


class Landing:
    """Copies that a pass waits for, each layer of it only for its own part of them.

    That a layer has landed says that nothing writes it any more. Whether its data is good is known
    when all copies have ended.
    """

    def __init__(self, loads: Sequence[Ticket], copies: Sequence[tuple[int, Ticket]]) -> None:
        """`loads` land layer by layer; each of `copies` is needed whole from a layer on."""
        self._loads = tuple(loads)
        self._copies = tuple(copies)
        self._all = (*self._loads, *(ticket for _, ticket in self._copies))
        self._given_up = Fence(label="landing given up")

    def fences(self, layer: int) -> tuple[Fence, ...]:
        """The fences before model layers 0..`layer` can be read; for `Stream.wait`, once placed."""
        named = [ticket.layer_fence(layer) for ticket in self._loads if not ticket.done]
        named += [ticket.quiesced for at, ticket in self._copies if at <= layer]
        return tuple(fence for fence in named if not fence.passed)

    @property
    def loads_ended(self) -> bool:
        """Whether nothing that lands by layer is still under way."""
        return all(ticket.done for ticket in self._loads)

    @property
    def landed(self) -> bool:
        """Whether all is there and good."""
        return all(ticket.done and ticket.error is None for ticket in self._all)

    def placed(self) -> tuple[Fence, ...]:
        """The fences before a device's stream can be told to wait for the copies."""
        return tuple(ticket.placed for ticket in self._all if not ticket.placed.passed)

    def give_up(self) -> None:
        """Have a pass that nobody wants any more end at once, by an error. Idempotent."""
        self._given_up.mark_passed()

    def wait(self, layer: int, stream: WorkerStream) -> None:
        """Within a function that runs on `stream`: go on only when layers 0..`layer` have landed.

        The thread waits on a CPU; on a device it waits for the launches, and the device's stream
        for the rest. Raises CopyFailed once it is known that they do not land: a copy has failed,
        the stream is being closed, or the request that the pass is for has given it up.
        """
        for fence in self.fences(layer):
            stream.hold(fence, unless=self._given_up)
        why = self._why_not()
        if why is not None:
            raise CopyFailed(f"layer {layer} does not land: {why}")
        if stream.closing:
            raise CopyFailed(f"layer {layer} does not land: {stream!r} is being closed")

    def _why_not(self) -> str | None:
        failed = next((ticket.error for ticket in self._all if ticket.error is not None), None)
        if failed is not None:
            return str(failed)
        return "it was given up" if self._given_up.passed else None
