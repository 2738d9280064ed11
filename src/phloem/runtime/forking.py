"""A second request that continues where another one stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phloem.actors import messages as m
from phloem.actors.tree.leases import Lease as TreeLease
from phloem.events import RequestForked

if TYPE_CHECKING:
    from phloem.cuda_streams.engine import Fence
    from phloem.runtime.core import Core
    from phloem.runtime.holding import Holding

__all__ = ["copy_private_data", "lease_twin", "tell_forked"]


def lease_twin(core: Core, lease: TreeLease, name: str) -> TreeLease:
    """A second lease at the same boundary, without its state."""
    twin = core.run(m.Fork(lease, name))
    assert isinstance(twin, TreeLease)
    return twin


async def copy_private_data(
    core: Core,
    source: Holding,
    target: Holding,
    owner: str,
    after: tuple[Fence, ...],
    check_alive: Callable[[], None],
) -> None:
    """Copy what the tree does not hold: the last, partial page and the working state.

    Both copies come after the steps in `after`, and are waited for. A cancelled caller leaves them
    to run to their ends. `check_alive` raises when the source was given back meanwhile, which
    somebody else may do at any time.
    """
    sources, targets = source.own_pages, target.own_pages
    count = min(len(sources), len(targets))
    if count:
        await core.call(m.CopyOwnPages(sources[:count], targets[:count], owner, after))
        check_alive()
    if core.has_states:
        assert source.working is not None and target.working is not None
        await core.call(m.CopyWorkingState(source.working, target.working, owner, after))


def tell_forked(core: Core, parent: str, lease: TreeLease, tokens: int) -> None:
    """Tell that a request was forked, if anybody listens."""
    if core.emit is not None:
        core.emit(
            RequestForked(
                context=core.domain.caller_context(),
                request=lease.owner,
                parent=parent,
                lease=lease.id,
                tokens=tokens,
            )
        )
