"""Which CPUs are near a device: read from the system's tables, or said why not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from phloem.cuda_streams.host import PinnedMemory
from phloem.cuda_streams.numa import Nearby, near_pci_device

BUS = "0000:3B:00.0"


def machine(root: Path, node: str | None, cpus: str | None) -> Path:
    for text, name in (
        (node, "sys/bus/pci/devices/0000:3b:00.0/numa_node"),
        (cpus, "sys/devices/system/node/node1/cpulist"),
    ):
        if text is not None:
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text(text)
    return root


def found(root: Path, allowed: set[int]) -> Nearby:
    return near_pci_device(BUS, root=root, bind=lambda: frozenset(allowed))


@pytest.mark.parametrize(
    ("node", "cpus", "allowed", "expected", "why"),
    [
        ("1\n", "0-2,8\n", {0, 1, 8, 9}, {0, 1, 8}, "node 1, 3 CPUs"),
        ("-1\n", "0-2\n", {0}, set(), "the platform does not tell"),
        (None, "0-2\n", {0}, set(), "the platform does not tell"),
        ("1\n", None, {0}, set(), "node 1 has no CPUs"),
        ("1\n", "\n", {0}, set(), "node 1 has no CPUs"),
        ("1\n", "4-7\n", {0}, set(), "this process may not run on node 1"),
    ],
)
def test_what_the_tables_say(
    tmp_path: Path,
    node: str | None,
    cpus: str | None,
    allowed: set[int],
    expected: set[int],
    why: str,
) -> None:
    assert found(machine(tmp_path, node, cpus), allowed) == Nearby(frozenset(expected), why)


def test_where_threads_cannot_be_bound_it_says_so(tmp_path: Path) -> None:
    def forbidden() -> frozenset[int]:
        raise PermissionError("not here")

    near = near_pci_device(BUS, root=machine(tmp_path, "1", "0-2"), bind=forbidden)
    assert near == Nearby(frozenset(), "threads cannot be bound to node 1: not here")


def test_a_thread_is_bound_and_so_are_those_that_touch_memory_first() -> None:
    one = min(os.sched_getaffinity(0))
    near, seen = Nearby(frozenset({one}), "node 1, 1 CPUs"), list[set[int]]()

    def enter() -> None:
        near.bind_thread()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    pieces: dict[int, int] = {}
    memory = PinnedMemory(pieces.__setitem__, pieces.__delitem__, threads=2, enter_thread=enter)
    rows = memory(3, 4096).rows
    assert not rows.any() and len(seen) >= 2 and all(cpus == {one} for cpus in seen)
    memory.close()
    before = os.sched_getaffinity(0)
    Nearby(frozenset(), "nothing known").bind_thread()
    assert os.sched_getaffinity(0) == before


def test_threads_go_on_where_the_system_allows_other_cpus_by_now() -> None:
    before = os.sched_getaffinity(0)
    Nearby(frozenset({100_000}), "it was there when it was looked at").bind_thread()
    assert os.sched_getaffinity(0) == before


def test_this_machine_is_looked_at_without_an_error() -> None:
    assert near_pci_device("ffff:ff:1f.7").why == "the platform does not tell"
