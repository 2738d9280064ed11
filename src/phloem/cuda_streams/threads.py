"""The CPU engine: real bytes, moved by one worker thread for each channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns

import torch

from phloem.cuda_streams.batches import CHANNELS, Channel, CopyBatch, CopyItem
from phloem.cuda_streams.dispatch import Dispatcher, Fault
from phloem.cuda_streams.engine import Ticket
from phloem.cuda_streams.fences import Post
from phloem.cuda_streams.mover import RowMover
from phloem.cuda_streams.remains import Remains

__all__ = ["ThreadEngine"]


class ThreadEngine(Dispatcher):
    """`CopyEngine` over pools in CPU memory. `close()` waits for the running layer of each worker.

    Each worker copies with one thread, whatever number torch is set to for others.
    `fault` is for tests and simulations; see `Fault`.
    """

    def __init__(
        self,
        post: Post,
        *,
        fault: Fault | None = None,
        mover: Callable[[], RowMover] = RowMover,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        super().__init__(post, fault, now_ns)
        self._wakes = {channel: threading.Event() for channel in CHANNELS}
        alone = threading.Barrier(len(CHANNELS) + 1)
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(channel, mover, alone),
                name=f"phloem-{channel}",
                daemon=True,
            )
            for channel in CHANNELS
        ]
        for thread in self._threads:
            thread.start()
        # A thread's own number of torch threads is also what threads made later begin with: these
        # are to have the caller's, as before.
        threads = torch.get_num_threads()
        alone.wait()
        torch.set_num_threads(threads)

    def close(self) -> None:
        """See `CopyEngine.close`. Blocks until the workers have ended."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _woken(self, channel: Channel) -> None:
        self._wakes[channel].set()

    def _work(
        self, channel: Channel, new_mover: Callable[[], RowMover], alone: threading.Barrier
    ) -> None:
        # A copy is bound by memory: more than one thread would only take others' cores. Asking
        # first makes the number this thread's own; otherwise its first use takes the caller's.
        torch.get_num_threads()
        torch.set_num_threads(1)
        alone.wait()
        mover = new_mover()
        wake = self._wakes[channel]
        # Pools may be used by models that run in inference mode; so must their writers.
        with torch.inference_mode():
            while True:
                wake.wait()
                wake.clear()  # before taking: whatever becomes ready from now on wakes us again
                while self._copy_one(channel, mover):
                    pass
                if self._closed:
                    return

    def _copy_one(self, channel: Channel, mover: RowMover) -> bool:
        """Carry out the next ticket; False when there is none. Nothing of it is held afterwards."""
        ticket = self.take(channel)
        if ticket is None:
            return False
        error = self._run(ticket, mover)
        mover.drop()
        self.finish(ticket, error)
        return True

    def _run(self, ticket: Ticket, mover: RowMover) -> BaseException | None:
        batch, remains = ticket.batch, Remains(ticket.batch)
        for layer in range(batch.layers):
            if (why := self.interrupted(ticket)) is not None:
                return why
            copy = partial(self._copy, batch, mover, layer)
            if error := self.one_layer(ticket, layer, remains, copy):
                return error
            if batch.by_layer and remains.error is None:
                ticket.progress(layer + 1)
        return remains.error

    def _copy(
        self, batch: CopyBatch, mover: RowMover, layer: int, items: Sequence[CopyItem]
    ) -> None:
        for item in items:
            mover.add(item, layer)
        if batch.by_layer or layer == batch.layers - 1:
            mover.flush()
