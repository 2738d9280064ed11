"""Every error that a caller can act on; one class for each thing that the caller can do about it.

| error | what the caller can do |
|---|---|
| `InvalidRequest` | fix the call |
| `NoRoom` | preempt, wait, refuse |
| `StaleHandle` | acquire again |
| `OwnershipError` | fix the call; nothing changed |
| `TransferFailed` | compute again from `tokens_ok` |
| `CopyFailed`, `CopyCancelled` | do without the data |
| `HostMemoryShort` | ask for less, or do without the host tier |
| `CacheReset`, `RuntimeClosed` | retry later, give up |
| `EngineDead` | restart the process |
| `CacheCrashed` | restart the runtime |
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CacheCrashed",
    "CacheReset",
    "CopyCancelled",
    "CopyFailed",
    "EngineDead",
    "HostMemoryShort",
    "InvalidRequest",
    "NoRoom",
    "OwnershipError",
    "PhloemError",
    "PoolFigures",
    "RuntimeClosed",
    "StaleHandle",
    "TransferFailed",
]


class PhloemError(Exception):
    """The base of all errors of this package."""


class InvalidRequest(PhloemError, ValueError):
    """The call itself is wrong: bad tokens, lengths, positions, or a call out of order."""


class StaleHandle(PhloemError):
    """A lease, grant or request that was finished, used twice, or belongs to another runtime."""


class OwnershipError(PhloemError):
    """Ids that are not the caller's to give. Nothing was changed."""


class TransferFailed(PhloemError):
    """A copy failed under steps that already ran on it.

    `tokens_ok` tokens of the request are still good: compute again from there.
    """

    def __init__(self, message: str, *, tokens_ok: int = 0) -> None:
        super().__init__(f"{message} ({tokens_ok} tokens are still good)")
        self.tokens_ok = tokens_ok


class CopyFailed(PhloemError):
    """A copy ended without its data; the cause is chained.

    The first `rows_ok` rows of its first item are good in all layers, the rest is undefined.
    """

    def __init__(self, message: str, *, rows_ok: int = 0) -> None:
        super().__init__(message)
        self.rows_ok = rows_ok


class CopyCancelled(CopyFailed):
    """A copy ended because its owner asked for it, or because the engine closed."""


class HostMemoryShort(PhloemError, MemoryError):
    """The machine, or this process's share of it, has too little memory for the host tier."""

    def __init__(self, asked: int, available: int, why: str = "") -> None:
        tail = f": {why}" if why else ""
        super().__init__(f"{asked} bytes of host memory asked, {available} available{tail}")
        self.asked = asked
        self.available = available


class CacheReset(PhloemError):
    """The cache was reset while the caller waited."""


class RuntimeClosed(PhloemError):
    """The runtime is closed, or was closed while the caller waited."""


class EngineDead(PhloemError):
    """The device behind a copy engine is lost; every copy on it has failed."""


class CacheCrashed(PhloemError):
    """An invariant of the cache broke; the runtime has stopped. The cause is chained."""


class PoolFigures(NamedTuple):
    """One pool at the moment of a refusal, in pages (kv) or slots (state).

    `evictable` counts what no lease protects; `granted` what requests hold outside the tree;
    `in_flight` what is leaving for the host, and so free by itself in a moment, or being loaded.
    Together with `free`, `parked` and `protected` they make the `size`. A place takes `place_bytes`
    bytes. Where pages and states share one memory, `shared` of the free ones are counted by both
    pools: who takes them, takes them from the other.
    """

    component: str
    asked: int
    size: int
    free: int
    parked: int
    evictable: int
    protected: int
    granted: int
    in_flight: int
    place_bytes: int = 0
    shared: int = 0

    def __str__(self) -> str:
        each = f", {self.place_bytes} bytes each" if self.place_bytes else ""
        shared = f" ({self.shared} of them in blank frames)" if self.shared else ""
        return (
            f"{self.component}: asked {self.asked} of {self.size}, free {self.free}{shared}, "
            f"parked {self.parked}, evictable {self.evictable}, protected {self.protected}, "
            f"granted {self.granted}, in flight {self.in_flight}{each}"
        )


class NoRoom(PhloemError):
    """The pools cannot give what was asked; carries the figures.

    `deadlock` is true when every holder waited for another and this one was chosen to give way.
    """

    def __init__(self, figures: tuple[PoolFigures, ...], *, deadlock: bool = False) -> None:
        why = "every holder waits" if deadlock else "no room"
        super().__init__(f"{why}: " + "; ".join(map(str, figures)))
        self.figures = figures
        self.deadlock = deadlock

    @property
    def bytes_asked(self) -> int:
        """The bytes that were asked of all pools together."""
        return sum(pool.asked * pool.place_bytes for pool in self.figures)
