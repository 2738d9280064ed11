"""The messages of the domain: frozen values, one type for each thing that can be asked."""

from __future__ import annotations

from array import array

import msgspec

from phloem.actors.actions import ClearState, CopyPages, CopyState, Ids
from phloem.actors.domain import Reply
from phloem.actors.tree.keys import TokenKey
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.policies import Policy
from phloem.cuda_streams.fences import Fence

__all__ = [
    "Acquire",
    "Advance",
    "Allocate",
    "Audit",
    "AwaitCopy",
    "AwaitFences",
    "AwaitLoad",
    "CloseSession",
    "Copied",
    "CopyAfter",
    "CopyOperation",
    "CopyOwnPages",
    "CopyWorkingState",
    "Dump",
    "Evict",
    "Fork",
    "GiveBack",
    "Insert",
    "Join",
    "MadeHostRoom",
    "MadeRoom",
    "MakeHostRoom",
    "MakeRoom",
    "Match",
    "Open",
    "Prepare",
    "MoveBorder",
    "NotReserved",
    "ReadBy",
    "Release",
    "ReleaseState",
    "Reserved",
    "Reset",
    "Retry",
    "Ripe",
    "StandOn",
    "StateWritten",
    "Sweep",
    "UsePolicy",
    "Written",
    "Withdraw",
]

_NONE: Ids = array("i")


class Message(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Base of all messages. They are values; who is asked is not part of them."""


# -- to the tree -----------------------------------------------------------------------------------


class Match(Message, frozen=True, gc=False, eq=False):
    """How far are the first `limit` tokens cached?"""

    key: TokenKey
    limit: int


class Acquire(Message, frozen=True, gc=False, eq=False):
    """Lease the deepest boundary within the first `limit` tokens.

    `wait=False`: answered in the same drain, whatever the room for a load. `idle`: a load takes
    room only where nobody needs it, and is copied when nothing else is.
    """

    key: TokenKey
    limit: int
    owner: str
    wait: bool = True
    idle: bool = False


class Open(Message, frozen=True, gc=False, eq=False):
    """Acquire for a request that computes on, and say which positions are wanted.

    `join`: it is going to wait while another request computes what it needs.
    """

    key: TokenKey
    limit: int
    owner: str
    breakpoints: tuple[int, ...] = ()
    session: str | None = None
    session_ends: int = 0
    priority: int = 0
    keep_until: int = 0
    join: bool = False


class StandOn(Message, frozen=True, gc=False, eq=False):
    """The lease's request has finished well: its session stands on its boundary."""

    lease: Lease


class CloseSession(Message, frozen=True, gc=False, eq=False):
    """End a session; what it stood on becomes ordinary cache."""

    name: str


class UsePolicy(Message, frozen=True, gc=False, eq=False):
    """Change the eviction policy; what is cached stays."""

    policy: str | Policy


class Dump(Message, frozen=True, gc=False, eq=False):
    """Look at up to `limit` nodes of the tree."""

    limit: int


class Advance(Message, frozen=True, gc=False, eq=False):
    """Move a request's lease to a boundary deeper than `beyond`, if there is one by now."""

    lease: Lease
    beyond: int
    limit: int


class Insert(Message, frozen=True, gc=False, eq=False):
    """Publish the first `length` tokens. `after`: steps that may still touch what is offered.

    `release`: and end the lease.
    """

    key: TokenKey
    length: int
    pages: Ids
    state: int
    lease: Lease | None
    owner: str | None
    swap: bool = True
    after: tuple[Fence, ...] = ()
    spans: tuple[Ids, ...] = ()
    release: bool = False


class Release(Message, frozen=True, gc=False, eq=False):
    """End a lease."""

    lease: Lease
    leaked: bool = False


class ReleaseState(Message, frozen=True, gc=False, eq=False):
    """Give up the state part of a lease."""

    lease: Lease


class CopyOperation:
    """A copy of a state through its life: who waits for it, and which lease it reads under.

    The tree actor's; others only look whether it has `ended`, and with which `error`: one that
    takes too long has an error before its end, and a `guard` of its own for what it reads.
    """

    __slots__ = ("ended", "error", "guard", "lease", "number", "replies")

    def __init__(self, number: int, lease: Lease | None) -> None:
        self.number = number
        self.lease = lease
        self.ended = False
        self.error: BaseException | None = None
        self.guard: Lease | None = None
        self.replies: list[tuple[Reply, bool]] = []  # whether each hears of an error


class Prepare(Message, frozen=True, gc=False, eq=False):
    """Make `target` the private copy of the lease's state, or clear it; answered when it is so.

    `after`: steps and copies that may still touch it. `at_once`: answered with the operation as
    soon as it is under way, also behind the load of the state; see `AwaitCopy`.
    """

    lease: Lease
    target: int
    after: tuple[Fence, ...] = ()
    at_once: bool = False


class AwaitCopy(Message, frozen=True, gc=False, eq=False):
    """Answered when the copy of a state has ended or takes too long, whatever its outcome."""

    operation: CopyOperation


class ReadBy(Message, frozen=True, gc=False, eq=False):
    """Steps and copies read what is on its way for a lease: if it fails they end first."""

    lease: Lease
    after: tuple[Fence, ...]


class CopyWorkingState(Message, frozen=True, gc=False, eq=False):
    """Copy a request's own state, once the steps in `after` have ended; answered at its end."""

    source: int
    target: int
    owner: str
    after: tuple[Fence, ...] = ()


class CopyOwnPages(Message, frozen=True, gc=False, eq=False):
    """Copy pages between two requests, once the steps in `after` have ended; answered then."""

    sources: Ids
    targets: Ids
    owner: str
    after: tuple[Fence, ...] = ()


class AwaitLoad(Message, frozen=True, gc=False, eq=False):
    """Answered when the load that a lease waits for has ended, whatever its outcome."""

    lease: Lease


class Join(Message, frozen=True, gc=False, eq=False):
    """Is somebody computing what this lease needs next? Answered when they have gone on, or none.

    True: there was somebody, and it is worth looking again; False: nobody is worth waiting for.
    `for_good`: the caller waits as long as it takes.
    """

    lease: Lease
    more_than: int
    for_good: bool = False


class Fork(Message, frozen=True, gc=False, eq=False):
    """A second lease at the boundary of `lease`, without its state."""

    lease: Lease
    owner: str


class Copied(Message, frozen=True, gc=False, eq=False):
    """A copy has ended and will not touch its memory again."""

    op: int
    error: BaseException | None


class TimedOut(Message, frozen=True, gc=False, eq=False):
    """A copy takes too long. Its memory is in use until it has ended."""

    op: int


class MakeHostRoom(Message, frozen=True, gc=False, eq=False):
    """Free exactly what an operation is short of in the host tier, or nothing if it cannot be."""

    pages: int
    states: int
    op: int


class Reserved(Message, frozen=True, gc=False, eq=False):
    """The room that an operation asked for: ids of its tier's pools, owned by `account` there."""

    op: int
    account: int
    pages: Ids
    states: Ids


class NotReserved(Message, frozen=True, gc=False, eq=False):
    """There is no room for an operation: its plan shrinks or it is dropped."""

    op: int


class Evict(Message, frozen=True, gc=False, eq=False):
    """Free so many pages and states, and pages of each span component, at a caller's wish."""

    pages: int
    states: int
    spans: tuple[int, ...] = ()


class MakeRoom(Message, frozen=True, gc=False, eq=False):
    """Free exactly an allocation's shortfall, or nothing when it cannot be met.

    `tell`: the allocator hears of it, since somebody waits there.
    """

    pages: int
    states: int
    owner: str
    tell: bool = True
    spans: tuple[int, ...] = ()


class MoveBorder(Message, frozen=True, gc=False, eq=False):
    """Clear a frame for the next state, in a memory that pages and states share."""


class Reset(Message, frozen=True, gc=False, eq=False):
    """Start a new generation, empty."""


class Sweep(Message, frozen=True, gc=False, eq=False):
    """Take the next part of a former generation apart."""


class Audit(Message, frozen=True, gc=False, eq=False):
    """Check every invariant of tree and ledger."""


# -- to the allocator ------------------------------------------------------------------------------


class Allocate(Message, frozen=True, gc=False, eq=False):
    """Grant so many pages and states, all or nothing; `account` 0 opens a new one.

    `evict=False`: only what is free already; such a request never waits.
    """

    pages: int
    states: int
    owner: str
    account: int = 0
    wait: bool = False
    evict: bool = True
    spans: tuple[int, ...] = ()


class GiveBack(Message, frozen=True, gc=False, eq=False):
    """An account's places return to their pools, once the fences in `after` have passed."""

    account: int
    pages: Ids = _NONE
    states: Ids = _NONE
    after: tuple[Fence, ...] = ()
    spans: tuple[Ids, ...] = ()


class Withdraw(Message, frozen=True, gc=False, eq=False):
    """`owner` has ended: its allocations that wait are refused."""

    owner: str


class MadeRoom(Message, frozen=True, gc=False, eq=False):
    """The tree has done what it could for the allocation that asked last."""

    enough: bool


class MadeHostRoom(Message, frozen=True, gc=False, eq=False):
    """The tree has done what it could for the reservation that the host allocator asked for."""


class Retry(Message, frozen=True, gc=False, eq=False):
    """Try again for allocations that wait: something has changed that may let one go on."""


class Ripe(Message, frozen=True, gc=False, eq=False):
    """Parked places are touched by nothing any more."""

    pages: Ids
    states: Ids
    spans: tuple[Ids, ...] = ()


# -- to the transfer actor -------------------------------------------------------------------------


class CopyAfter(Message, frozen=True, gc=False, eq=False):
    """Carry out `action` once the steps in `after`, which may touch what it does, have ended.

    `behind`: the load that brings the state to be copied, layer by layer; each follows its own.
    """

    action: CopyState | CopyPages | ClearState
    after: tuple[Fence, ...]
    behind: int = 0


class Hasten(Message, frozen=True, gc=False, eq=False):
    """Make the copy of operation `op` urgent: somebody waits for it now, and nobody did before."""

    op: int


class AwaitFences(Message, frozen=True, gc=False, eq=False):
    """Answered when all of these have passed."""

    fences: tuple[Fence, ...]


class StateWritten(Message, frozen=True, gc=False, eq=False):
    """Steps that have not ended may still write `slot`: copies from it come after them."""

    slot: int
    after: tuple[Fence, ...]


class Written(Message, frozen=True, gc=False, eq=False):
    """Steps that have not ended may still write what was just published."""

    after: tuple[Fence, ...]
