"""What the tree actor tells of its turns, as events. It exists only where somebody listens."""

from __future__ import annotations

from phloem.actors import messages as m
from phloem.actors.actions import Ids, Reserve
from phloem.actors.domain import Domain
from phloem.actors.tree.journal import JournaledTree
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.results import Evicted as EvictedFigures
from phloem.actors.tree.results import InsertResult, Match
from phloem.actors.tree.results import Kept as KeptPlaces
from phloem.events import (
    Acquired,
    Context,
    CopyDropped,
    CopyPlanned,
    Evicted,
    FellBack,
    Granted,
    Inserted,
    Kept,
    LeaseEnded,
    LeaseLeaked,
    LeaseTaken,
    RequestOpened,
    ResetDone,
    Sink,
    TierChanged,
    TreeChanged,
)

__all__ = ["Teller"]


class Teller:
    """Makes the events of one tree's turns, each to be called within its turn, after the work."""

    def __init__(self, emit: Sink, domain: Domain, tree: JournaledTree) -> None:
        self._emit = emit
        self._domain = domain
        self._tree = tree
        self._contexts: dict[int, Context] = {}  # by live lease: what its taker had bound

    def changed(self, request: str) -> None:
        """Tell what this turn changed of nodes, if anything, and which copies it dropped."""
        journal = self._tree.journal
        changes = journal.take_changes()
        if changes:
            self._emit(TreeChanged(**self._domain.joins(), request=request, changes=changes))
        for number, kind, why in journal.dropped:
            self._emit(CopyDropped(**self._domain.joins(), op=number, kind=kind, why=why))
        journal.dropped.clear()

    # -- leases --------------------------------------------------------------------------------

    def opened(self, message: m.Open, lease: Lease, match: Match) -> None:
        """A request was opened."""
        self.changed(lease.owner)
        self._emit(
            RequestOpened(
                **self._domain.joins(),
                request=lease.owner,
                tokens=match.tokens,
                usable=match.usable,
                kv_prefix=match.kv_prefix,
                lost={str(reason): count for reason, count in match.lost.items()},
                wanted=[(wanted.position, wanted.why) for wanted in lease.wanted],
                namespace=message.key.namespace,
                session="" if lease.session is None else lease.session.name,
                lease=lease.id,
                reached=self._tree.reached(message.key, message.limit),
                branch_point=match.branch_point,
                evicted_by=match.evicted_by,
                evicted_at=match.evicted_at,
                device=match.device,
                state_tier=match.state_tier,
                alternatives=[(one.way, one.boundary, one.seconds) for one in match.alternatives],
            )
        )
        self.taken(lease)

    def acquired(self, message: m.Acquire, lease: Lease, match: Match) -> None:
        """A boundary was leased without a request."""
        self.changed(lease.owner)
        self._emit(
            Acquired(
                **self._domain.joins(),
                request=lease.owner,
                tokens=match.tokens,
                usable=match.usable,
                kv_prefix=match.kv_prefix,
                lost={str(reason): count for reason, count in match.lost.items()},
                namespace=message.key.namespace,
                lease=lease.id,
                reached=self._tree.reached(message.key, message.limit),
                branch_point=match.branch_point,
                evicted_by=match.evicted_by,
                evicted_at=match.evicted_at,
                device=match.device,
                state_tier=match.state_tier,
            )
        )
        self.taken(lease)

    def taken(self, lease: Lease, *, moved: bool = False) -> None:
        """A lease was taken, came here from another boundary, or took the state again."""
        self.changed(lease.owner)
        joins = self._domain.joins()
        joins["context"] = self._contexts.setdefault(lease.id, joins["context"])
        self._emit(
            LeaseTaken(
                **joins,
                request=lease.owner,
                lease=lease.id,
                boundary=lease.anchor.end,
                moved=moved,
                node=lease.anchor.id,
                state=lease.has_state,
            )
        )

    def ended(self, lease: Lease, *, leaked: bool = False, state_only: bool = False) -> None:
        """A lease ended, or its state part did."""
        joins = self._domain.joins()
        if leaked:
            self._emit(LeaseLeaked(**joins, request=lease.owner, lease=lease.id))
        boundary = lease.anchor.end
        if not state_only:
            self._contexts.pop(lease.id, None)
        self._emit(
            LeaseEnded(
                **joins,
                request=lease.owner,
                lease=lease.id,
                boundary=boundary,
                state_only=state_only,
            )
        )
        self.changed(lease.owner)

    # -- data ----------------------------------------------------------------------------------

    def inserted(self, message: m.Insert, result: InsertResult, account: int, taken: Ids) -> None:
        """Tokens were published; the tree took the pages `taken` from `account`."""
        owner, lease = message.owner or "", message.lease
        self.changed(owner)
        self._emit(
            Inserted(
                **self._domain.joins(),
                request=owner,
                reused=result.reused,
                published=result.published,
                pages=len(message.pages),
                state=result.state,
                account=account,
                adopted=taken.tolist(),
                adopted_state=message.state if result.state == "adopted" else 0,
                lease=0 if lease is None else lease.id,
                node=0 if lease is None else lease.anchor.id,
                spans={
                    span.name: ids.tolist()
                    for span, ids in zip(self._tree.spans, result.spans, strict=False)
                },
            )
        )

    def evicted(self, gone: EvictedFigures, why: str, request: str, tier: str = "device") -> None:
        """Data left a tier, to make room for `request` or for another reason."""
        self.changed(request)
        self._emit(
            Evicted(
                **self._domain.joins(),
                request=request,
                pages=gone.pages,
                states=gone.states,
                why=why,
                use=self._tree.now,
                policy=self._tree.policy.name,
                victims=self._tree.journal.take_victims(),
                spans=gone.spans,
                tier=tier,
                pages_promised=gone.pages_promised,
                states_promised=gone.states_promised,
            )
        )

    # -- copies --------------------------------------------------------------------------------

    def operation_ended(self, why_not: str) -> None:
        """An operation between the tiers has ended; `why_not`: why a load did not come, if so.

        Leases that waited for it in vain stand elsewhere, and what was to go behind it may have
        gone without.
        """
        self.changed("")
        journal = self._tree.journal
        for lease, before in journal.fallen:
            self._fell_back(lease, {why_not: before - lease.anchor.end})
        journal.fallen.clear()
        victims = journal.take_victims()
        if victims:
            self._emit(
                Evicted(
                    **self._domain.joins(),
                    pages=sum(victim.pages for victim in victims),
                    states=sum(victim.states for victim in victims),
                    why="no_copy",
                    use=self._tree.now,
                    victims=victims,
                )
            )

    def _fell_back(self, lease: Lease, lost: dict[str, int]) -> None:
        """In a turn that another caller may have caused, who waited for the same load."""
        self.taken(lease, moved=True)
        joins = self._domain.joins()
        joins["context"] = self._contexts.get(lease.id, joins["context"])
        self._emit(
            FellBack(
                **joins,
                request=lease.owner,
                lease=lease.id,
                boundary=lease.anchor.end,
                lost=lost,
            )
        )

    def reserves(self, action: Reserve) -> None:
        """A copy between the tiers is to be made, and asks for its room."""
        operation = self._tree.operations.live.get(action.op)
        if operation is None:  # dropped in the same turn
            return
        waiter = next(iter(operation.waiters.values()), None)
        self._emit(
            CopyPlanned(
                **self._domain.joins(),
                request="" if waiter is None else waiter.owner,
                op=action.op,
                kind=operation.kind,
                pages=action.pages,
                states=action.states,
            )
        )

    def planned(self, op: int, kind: str, request: str, lease: Lease | None) -> None:
        """A copy is to be made."""
        self._emit(
            CopyPlanned(
                **self._domain.joins(),
                request=request,
                op=op,
                kind=kind,
                lease=0 if lease is None else lease.id,
            )
        )

    def granted(self, owner: str, account: int, pages: Ids) -> None:
        """The tree took free pages for a copy of its own."""
        self._emit(
            Granted(
                **self._domain.joins(),
                request=owner,
                account=account,
                pages=pages.tolist(),
                states=[],
                asked=self._domain.turns,
            )
        )

    def kept(self, kept: KeptPlaces) -> None:
        """Tell that the tree has taken what a copy brought."""
        self._emit(
            Kept(
                **self._domain.joins(),
                account=kept.account,
                component=kept.component,
                ids=kept.ids.tolist(),
                tier=kept.tier,
            )
        )

    def tier_changed(self, tier: str, why: str) -> None:
        """A tier was closed, or is tried again."""
        self._emit(TierChanged(**self._domain.joins(), tier=tier, why=why))

    def reset(self) -> None:
        """A new generation began."""
        self.changed("")
        self._emit(ResetDone(**self._domain.joins(), generation=self._tree.generation))
