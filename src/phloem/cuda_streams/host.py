"""Memory for the host tier: what there is, and how it is taken."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from phloem.errors import HostMemoryShort

__all__ = ["HostMemory", "PinnedMemory", "available_bytes", "ordinary_memory"]

_PAGE = 4096


def _cut(flat: Tensor, nbytes: int) -> list[Tensor]:
    return [flat[start : start + nbytes] for start in range(0, len(flat), nbytes)]


def _touch(memory: Tensor) -> None:
    # Not a torch operation: those spread over threads of their own.
    ctypes.memset(memory.data_ptr(), 0, memory.numel())


class HostMemory(NamedTuple):
    """uint8 [count, row_bytes]; no single copy may cross a multiple of `piece_rows` rows."""

    rows: Tensor
    piece_rows: int


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or `max`
        return None


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: the machine's, or less where a cgroup limits it.

    A very large number where the platform does not tell.
    """
    found = [2**62]
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    cgroup = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _number(cgroup / limit), _number(cgroup / used)
        if most is not None and now is not None:
            found.append(max(0, most - now))
    return min(found)


def _check(nbytes: int, available: Callable[[], int]) -> None:
    if nbytes > (left := available()):
        raise HostMemoryShort(nbytes, left)


def ordinary_memory(
    count: int, row_bytes: int, *, available: Callable[[], int] = available_bytes
) -> HostMemory:
    """Zeroed memory that is not pinned: for the CPU. Raises HostMemoryShort with nothing taken."""
    _check(count * row_bytes, available)
    try:
        with torch.inference_mode(False):
            rows = torch.zeros((count, row_bytes), dtype=torch.uint8)
    except RuntimeError as error:  # a limit that `available` does not know, of this process
        raise HostMemoryShort(count * row_bytes, available(), f"refused: {error}") from error
    return HostMemory(rows, max(1, count))


class PinnedMemory:
    """Memory registered with a device, exactly as much as asked; for `HostPools.allocate`.

    Taken with `mmap`, touched by several threads (the slow part of pinning), then registered piece
    by piece: one huge registration would hold the driver's lock for seconds. `close` undoes it.
    `enter_thread` is called first by each thread that touches: it decides where the memory is. What
    nobody holds any more is unregistered before it goes.
    """

    def __init__(
        self,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        piece_bytes: int = 4 << 30,
        threads: int = 8,
        available: Callable[[], int] = available_bytes,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`register(address, bytes)` and `unregister(address)` raise RuntimeError on failure."""
        self._register = register
        self._unregister = unregister
        self._piece_bytes = piece_bytes
        self._threads = threads
        self._available = available
        self._enter_thread = enter_thread
        self._undo: list[Callable[[], object]] = []

    def __call__(self, count: int, row_bytes: int) -> HostMemory:
        """Raises HostMemoryShort, with nothing taken, when there is too little or none to pin."""
        nbytes = count * row_bytes
        _check(nbytes, self._available)
        if nbytes == 0:
            return HostMemory(torch.zeros((count, row_bytes), dtype=torch.uint8), max(1, count))
        try:
            block = mmap.mmap(-1, nbytes)
        except OSError as error:  # a limit that `available` does not know, of this process
            raise HostMemoryShort(nbytes, self._available(), f"refused: {error}") from error
        with torch.inference_mode(False):
            flat = torch.frombuffer(block, dtype=torch.uint8)
        # Pieces are whole rows and whole memory pages: neighbours must not share a page.
        unit = _PAGE // math.gcd(_PAGE, row_bytes)
        piece_rows = max(1, self._piece_bytes // (row_bytes * unit)) * unit
        pieces = _cut(flat, piece_rows * row_bytes)
        with ThreadPoolExecutor(self._threads, initializer=self._enter_thread) as pool:
            list(pool.map(_touch, _cut(flat, 64 << 20)))
        done: list[int] = []
        try:
            for piece in pieces:
                self._register(piece.data_ptr(), piece.numel())
                done.append(piece.data_ptr())
        except RuntimeError as error:
            self._give_up(done)
            raise HostMemoryShort(nbytes, self._available(), f"pinning failed: {error}") from error
        # The last tensor gone, the address may be given out again, so it must be free by then.
        undo = weakref.finalize(block, self._give_up, done)
        undo.atexit = False
        self._undo.append(undo)
        return HostMemory(flat.view(count, row_bytes), piece_rows)

    def close(self) -> None:
        """Unregister everything. Only when no copy touches it any more. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _give_up(self, addresses: list[int]) -> None:
        for address in reversed(addresses):
            self._unregister(address)
