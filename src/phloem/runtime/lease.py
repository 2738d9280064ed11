"""The lease as a caller holds it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from phloem.actors import messages as m
from phloem.actors.actions import Ids
from phloem.actors.domain import nothing_to_undo
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.actors.tree.tiering import standing_on
from phloem.actors.tree.tree import Match
from phloem.cuda_streams.fences import Fence
from phloem.errors import StaleHandle

if TYPE_CHECKING:
    from phloem.runtime.core import Core

__all__ = ["Lease"]


class Lease:
    """The right to read one boundary, until `release`; `async with` releases at the end.

    A lease that is collected unreleased is released then, counted, and reported with its owner.
    """

    __slots__ = ("__weakref__", "_core", "inner", "match", "released")

    def __init__(self, core: Core, inner: TreeLease, match: Match) -> None:
        self._core = core
        self.inner = inner
        self.match = match
        self.released = False  # given up, though a step may still read under it

    @property
    def boundary(self) -> int:
        """Tokens that may be read: `pages` holds their KV and `state` is true at exactly there."""
        return self.inner.boundary

    @property
    def owner(self) -> str:
        """The name that its taker gave."""
        return self.inner.owner

    @property
    def pages(self) -> Ids:
        """The device pages of the boundary, in order; a copy. Complete once it is `ready`."""
        return self._core.tree.pages_of(self.inner)

    @property
    def state(self) -> int:
        """The device slot of the state at the boundary; 0 when there is none."""
        return self._core.tree.state_of(self.inner)

    async def ready(self) -> Match:
        """Wait until what is only on the host has been loaded: the match the lease ended with.

        Less than was found if the load failed or found no room. Returns at once when everything
        is on the device. A cancelled caller leaves the lease as it is.
        """
        if self.released:
            raise StaleHandle(f"{self} was released before")
        if self.inner.load:
            await self._core.call(m.AwaitLoad(self.inner), nothing_to_undo)
        self.match = standing_on(self.inner, self.match)
        return self.match

    def release(self) -> None:
        """Give the lease up. Raises `StaleHandle` when it was released before."""
        self.release_after(self._core)

    def release_after(self, core: Core, fences: tuple[Fence, ...] = ()) -> None:
        """For `CacheRuntime.release`: give the lease up once all `fences` have passed.

        Raises `StaleHandle` when it was released before, or is of another runtime.
        """
        if core is not self._core:
            raise StaleHandle(f"{self} is of another runtime")
        if self.released:
            raise StaleHandle(f"{self} was released before")
        self.released = True
        if not fences:
            core.release_lease(self.inner)
        elif not core.stopped:  # after the runtime's end there is nothing left to release
            core.release_lease_after(self.inner, fences)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.released:
            self.release()

    def __del__(self) -> None:
        if not self.released and self.inner.live:
            self._core.lease_leaked(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)
