"""Host memory: the budget is checked before asking, pinning is exact, in pieces, and undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.cuda_streams.host import PinnedMemory, available_bytes, ordinary_memory
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.errors import HostMemoryShort
from streams.bench import LAYOUT


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:     64 kB\n"}


def cgroup(limit: str, used: str) -> dict[str, str]:
    return {"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": used}


CGROUP_1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "70",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "20",
}


@pytest.mark.parametrize(
    ("files", "bytes_available"),
    [
        ({}, 2**62),
        (MEMINFO, 64 << 10),
        (MEMINFO | cgroup("max\n", "9\n"), 64 << 10),
        (MEMINFO | cgroup("5000\n", "1000\n"), 4000),
        (MEMINFO | cgroup("5\n", "1000\n"), 0),
        (CGROUP_1, 50),
    ],
    ids=["unknown", "meminfo", "no limit", "cgroup 2", "over the limit", "cgroup 1"],
)
def test_available(tmp_path: Path, files: dict[str, str], bytes_available: int) -> None:
    assert available_bytes(write(tmp_path, files)) == bytes_available


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() < 2**50


def test_both_pools_are_checked_together_before_any_is_taken() -> None:
    device = DevicePools.allocate(LAYOUT, pages=2, states=2, page_size=2)
    asked = 10 * device.page_bytes + 5 * device.slot_bytes
    HostPools.allocate(device, pages=10, states=5, available=lambda: asked)
    with pytest.raises(HostMemoryShort, match=f"{asked} bytes of host memory asked") as caught:
        HostPools.allocate(device, pages=10, states=5, available=lambda: asked - 1)
    assert (caught.value.asked, caught.value.available) == (asked, asked - 1)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(HostMemoryShort):
        ordinary_memory(10, 10, available=lambda: 99)


class Registry:
    """Stands for the device's driver; refuses after `limit` pieces."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.pieces: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        if len(self.pieces) == self.limit:
            raise RuntimeError("no more")
        self.pieces[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pieces[address]


def test_pinned_exactly_in_pieces_of_whole_rows_and_pages() -> None:
    registry = Registry()
    memory = PinnedMemory(registry.register, registry.unregister, piece_bytes=64 << 10)
    rows, piece_rows = memory(1000, 1536)
    assert rows.shape == (1000, 1536) and not rows.any()
    assert rows.untyped_storage().nbytes() == 1000 * 1536 == sum(registry.pieces.values())
    assert piece_rows * 1536 % 4096 == 0 and piece_rows * 1536 <= 64 << 10
    assert len(registry.pieces) == -(-1000 // piece_rows) > 1
    starts = sorted(registry.pieces)
    assert [start - starts[0] for start in starts] == [
        piece * piece_rows * 1536 for piece in range(len(starts))
    ]
    rows[999].fill_(7)
    memory.close()
    memory.close()
    assert not registry.pieces


def test_what_nobody_holds_is_unpinned_before_its_address_is_given_out_again() -> None:
    registry = Registry()
    memory = PinnedMemory(registry.register, registry.unregister)
    part = memory(2, 4096).rows[1, 7:9]
    for _ in range(20):
        memory(2, 4096)
    assert list(registry.pieces) == [part.data_ptr() - 4096 - 7]
    del part
    assert not registry.pieces
    memory.close()


def test_f089_pieces_below_the_limit_of_a_call_and_a_refused_one_undoes_the_others() -> None:
    registry, undone = Registry(limit=2), list[int]()

    def unregister(address: int) -> None:
        undone.append(address)
        registry.unregister(address)

    memory = PinnedMemory(registry.register, unregister, piece_bytes=4096)
    with pytest.raises(HostMemoryShort, match="pinning failed: no more"):
        memory(100, 4096)
    assert not registry.pieces and undone == sorted(undone, reverse=True) and len(undone) == 2
    short = PinnedMemory(registry.register, registry.unregister, available=lambda: 10)
    with pytest.raises(HostMemoryShort, match="10 available"):
        short(100, 4096)
    assert memory(0, 4096).rows.shape == (0, 4096)


def test_memory_that_the_system_refuses_is_short() -> None:
    """A limit of the process alone, which no figure of the machine tells."""
    rows = 1 << 29  # of as many bytes: more than there are addresses

    def enough() -> int:
        return 1 << 62

    def register(address: int, nbytes: int) -> None:
        raise AssertionError(f"{nbytes} bytes at {address} were taken")

    pinned = PinnedMemory(register, lambda _: None, available=enough)
    with pytest.raises(HostMemoryShort, match="refused"):
        pinned(rows, rows)
    with pytest.raises(HostMemoryShort, match="refused"):
        ordinary_memory(rows, rows, available=enough)
