"""Which CPUs and which memory are near a device, where the platform tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Nearby", "near_pci_device"]


@dataclass(frozen=True, slots=True)
class Nearby:
    """The CPUs near a device, or none where nothing is known or can be bound; `why` says which.

    A thread that is bound to them also gets its memory there: a page belongs to the node of the CPU
    that touches it first.
    """

    cpus: frozenset[int]
    why: str

    def bind_thread(self) -> None:
        """Keep the calling thread on these CPUs.

        Nothing if there are none, or if the system refuses, which may allow others by now: across
        sockets copies are slower, not wrong.
        """
        if self.cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, self.cpus)


def near_pci_device(
    bus_id: str,
    *,
    root: Path = Path("/"),
    bind: Callable[[], frozenset[int]] | None = None,
) -> Nearby:
    """The CPUs near a PCI device (`0000:3b:00.0`), by the system's tables.

    `bind` gives the CPUs that this thread may use, and raises OSError where threads cannot be
    bound. Never raises: across sockets copies are slower, not wrong.
    """
    node = _text(root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node")
    if node is None or not node.isdigit():  # -1: one node, or a virtual machine that hides them
        return Nearby(frozenset(), "the platform does not tell")
    listed = _text(root / f"sys/devices/system/node/node{node}/cpulist")
    if not listed:
        return Nearby(frozenset(), f"node {node} has no CPUs")
    try:
        allowed = (bind or _bind)()
    except (OSError, AttributeError) as error:
        return Nearby(frozenset(), f"threads cannot be bound to node {node}: {error}")
    cpus = _cpus(listed) & allowed
    if not cpus:
        return Nearby(frozenset(), f"this process may not run on node {node}")
    return Nearby(cpus, f"node {node}, {len(cpus)} CPUs")


def _bind() -> frozenset[int]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)  # changes nothing; raises where it is forbidden
    return frozenset(allowed)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cpus(listed: str) -> frozenset[int]:
    """`0-3,8` as numbers."""
    cpus: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
