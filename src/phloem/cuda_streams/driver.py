"""What the device engine needs of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.cuda_streams.host import PinnedMemory
from phloem.cuda_streams.numa import Nearby

__all__ = ["Addresses", "BatchCopy", "Driver"]

Addresses = npt.NDArray[np.uint64]
BatchCopy = Callable[[object, Addresses, Addresses, Addresses], None]
"""Many copies in one call: (stream, targets, sources, sizes), addresses and bytes."""


class Driver(Protocol):
    """What the engine needs of a device. Streams and events are the driver's own objects."""

    device: torch.device
    batch_copy: BatchCopy | None
    """None where the device cannot."""
    near: Nearby

    def enter_thread(self) -> None:
        """Called once by each engine thread before it uses the device."""
        ...

    def settle(self) -> None:
        """Block until all that is on the device now, on whichever stream, has ended."""
        ...

    def pinned_memory(self) -> PinnedMemory:
        """Memory for `HostPools.allocate` that the device copies from and to without the CPU."""
        ...

    def new_stream(self, name: str) -> object: ...

    def check_stream(self, stream: object) -> None:
        """Raise InvalidRequest unless it is a stream of this device that runs what it is given.

        (A stream whose work is being captured into a graph runs nothing.) Raises EngineDead when
        the device is lost.
        """
        ...

    def close_stream(self, stream: object) -> None:
        """Give back a stream of `new_stream`, when nothing runs on it any more."""
        ...

    def empty(self, stream: object, nbytes: int) -> Tensor:
        """Device memory, uint8, for work on that stream alone."""
        ...

    def current(self, stream: object) -> AbstractContextManager[None]:
        """Within it, the torch operations of the calling thread go onto the stream."""
        ...

    def enqueue(self, stream: object, fn: Callable[[], None]) -> None:
        """Put the torch operations of `fn` onto the stream; does not wait for them."""
        ...

    def record(self, stream: object) -> object:
        """An event that happens when all that is on the stream has ended."""
        ...

    def wait_event(self, stream: object, event: object) -> None:
        """Let what comes onto the stream from now on wait for the event, on the device."""
        ...

    def synchronize(self, event: object) -> None:
        """Block the calling thread, without the GIL, until the event has happened."""
        ...

    def alive(self) -> bool:
        """False when the device answers every call with an error until the process ends."""
        ...
