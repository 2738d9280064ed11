"""Copies that requests ask for: of states into private ones, of states and pages among their own.

Part of a tree actor: who asks waits for the copy's end, and the state that is read stays leased
until then.
"""

from __future__ import annotations

from collections.abc import Callable

from phloem.actors import messages as m
from phloem.actors.actions import ClearState, CopyPages, CopyState
from phloem.actors.domain import LATER, Actor, Domain, Handlers
from phloem.actors.ledger import Ledger
from phloem.actors.telling import Teller
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.node import NO_SLOT
from phloem.actors.tree.tree import Tree
from phloem.cuda_streams.fences import Fence
from phloem.errors import CopyFailed, InvalidRequest

__all__ = ["Copies"]


class Copies:
    """A tree actor's copies for requests. Everything here runs in turns of the domain.

    `check_ours` raises for a lease that is not live; `release` gives one up, and `release_state` a
    lease's state;
    `taken_again` is told when a state is leased once more; `counts` counts them among the actions.
    """

    def __init__(
        self,
        domain: Domain,
        tree: Tree,
        ledger: Ledger,
        check_ours: Callable[[Lease], None],
        release: Callable[[Lease], None],
        release_state: Callable[[Lease], None],
        taken_again: Callable[[], None],
        counts: dict[str, int],
        tell: Teller | None,
    ) -> None:
        self._domain = domain
        self._tree = tree
        self._ledger = ledger
        self._check_ours = check_ours
        self._release = release
        self._release_state = release_state
        self._taken_again = taken_again
        self._tell = tell
        self._transfer: Actor | None = None
        self.live: dict[int, m.CopyOperation] = {}  # those that have not ended, by number
        self._counts = counts
        self.handlers: Handlers = {
            m.Prepare: self._on_prepare,
            m.AwaitCopy: self._on_await_copy,
            m.ReadBy: self._on_read_by,
            m.CopyWorkingState: self._on_copy_working_state,
            m.CopyOwnPages: self._on_copy_own_pages,
        }

    def connect(self, transfer: Actor) -> None:
        """Say who copies."""
        self._transfer = transfer

    def _on_prepare(self, message: m.Prepare) -> object:
        lease = message.lease
        self._check_ours(lease)
        source, behind = self._tree.state_of(lease), 0
        if source == NO_SLOT and message.at_once:
            source, behind = self._tree.state_arriving(lease)
        if source == NO_SLOT and lease.boundary:
            raise InvalidRequest(f"there is no state at the boundary of {lease} any more")
        copy: CopyState | ClearState
        if source == NO_SLOT:
            if lease.has_state:
                self._release_state(lease)  # nothing there to protect
            operation = self._new_operation("clear_state", lease.owner, None)
            copy = ClearState(operation.number, message.target)
        else:
            if not lease.has_state:
                self._tree.take_state(lease)
                if self._tell is not None:
                    self._tell.taken(lease, moved=True)
                self._taken_again()
            operation = self._new_operation("copy_state", lease.owner, lease)
            copy = CopyState(operation.number, source, message.target)
        self._start(copy, message.after, behind)
        return operation if message.at_once else self._later(operation)

    def _start(
        self,
        copy: CopyState | ClearState | CopyPages,
        after: tuple[Fence, ...],
        behind: int = 0,
    ) -> None:
        assert self._transfer is not None
        plain = not after and not behind
        self._domain.send(self._transfer, copy if plain else m.CopyAfter(copy, after, behind))

    def _later(self, operation: m.CopyOperation, *, hears_errors: bool = True) -> object:
        operation.replies.append((self._domain.later(), hears_errors))
        return LATER

    def _on_await_copy(self, message: m.AwaitCopy) -> object:
        operation = message.operation
        over = operation.ended or operation.error is not None
        return None if over else self._later(operation, hears_errors=False)

    def _on_read_by(self, message: m.ReadBy) -> None:
        for number in self._tree.loads_of(message.lease):
            account = self._tree.operations.live[number].account
            if account in self._ledger.accounts:
                held = self._ledger.accounts[account]
                held.fences = (*(f for f in held.fences if not f.passed), *message.after)

    def _on_copy_working_state(self, message: m.CopyWorkingState) -> object:
        operation = self._new_operation("copy_state", message.owner, None)
        self._start(CopyState(operation.number, message.source, message.target), message.after)
        return self._later(operation)

    def _on_copy_own_pages(self, message: m.CopyOwnPages) -> object:
        assert self._transfer is not None
        operation = self._new_operation("copy_pages", message.owner, None)
        copy = CopyPages(operation.number, message.sources, message.targets)
        self._domain.send(self._transfer, m.CopyAfter(copy, message.after))
        return self._later(operation)

    def _new_operation(self, kind: str, owner: str, lease: Lease | None) -> m.CopyOperation:
        number = self._tree.operations.new_number()
        if self._tell is not None:
            self._tell.planned(number, kind, owner, lease)
        self._counts["copies"] = self._counts.get("copies", 0) + 1
        operation = m.CopyOperation(number, lease)
        self.live[operation.number] = operation
        return operation

    def copied(self, message: m.Copied) -> bool:
        """A copy has ended; False if it was none of these."""
        operation = self.live.pop(message.op, None)
        if operation is None:
            return False
        operation.ended = True
        if operation.error is None:  # nobody has given it up
            operation.error = message.error
            if message.error is None:  # else the state is needed once more
                self._read_state(operation.lease)
            self._answer_copied(operation)
        elif operation.guard is not None:
            self._release(operation.guard)
        return True

    def timed_out(self, message: m.TimedOut) -> bool:
        """A copy takes too long; False if it was none of these."""
        operation = self.live.get(message.op)
        if operation is None:
            return False
        what = f"copy {message.op} takes too long; what it touches is in use until its end"
        operation.error = CopyFailed(what)
        if operation.lease is not None and operation.lease.live:  # its holder may give it up
            operation.guard = self._twin(operation.lease)
        self._answer_copied(operation)
        return True

    def _twin(self, lease: Lease) -> Lease:
        """A second lease on the same state."""
        twin = self._tree.fork(lease, owner=lease.owner)
        self._tree.take_state(twin)
        if self._tell is not None:
            self._tell.taken(twin)
        return twin

    def _answer_copied(self, operation: m.CopyOperation) -> None:
        for reply, hears_errors in operation.replies:
            if reply.done or reply.abandoned:
                continue
            if operation.error is None or not hears_errors:
                self._domain.complete(reply, operation.number)
            else:
                self._domain.fail(reply, operation.error)

    def _read_state(self, lease: Lease | None) -> None:
        """A request has its own copy of the state that it leased."""
        if lease is not None and lease.live and lease.has_state and not self._reads_under(lease):
            self._release_state(lease)

    def _reads_under(self, lease: Lease) -> bool:
        """A caller who left and came back may have a second copy of the same state in flight."""
        return any(operation.lease is lease for operation in self.live.values())
