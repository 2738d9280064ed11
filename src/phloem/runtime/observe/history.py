"""The state of a cache, rebuilt from its events alone.

`History` takes events in order and knows after each of them what the tree, the leases and the
pools looked like. It needs every event of a runtime from its start on (a log of level `debug`), and
says so when something is missing: a state that is nearly right would be worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from phloem.actors.actions import TREE
from phloem.actors.places import FREE, PARKED
from phloem.errors import InvalidRequest
from phloem.events import (
    Change,
    CopyEnded,
    CopySubmitted,
    Event,
    Evicted,
    Freed,
    Granted,
    Inserted,
    Kept,
    KvPut,
    KvTaken,
    LeaseEnded,
    LeaseTaken,
    NodeAdded,
    NodeRemoved,
    NodesMerged,
    NodeSplit,
    Parked,
    Refused,
    RequestEnded,
    RequestForked,
    RequestOpened,
    RequestSuspended,
    ResetDone,
    RootAdded,
    RootRemoved,
    RuntimeStarted,
    SpanPut,
    SpanTaken,
    StatePut,
    StateTaken,
    StepChanged,
    TailCut,
    TreeChanged,
    Waited,
)
from phloem.runtime.observe.figures import pool_of
from phloem.runtime.observe.state import CacheState, LeaseState, NodeState, RootState, runs_of
from phloem.runtime.tracing import Entry, EventsDropped, LogOpened, read_log

__all__ = ["History", "LostState", "Node", "replay"]

_BEFORE_ANY_RUN = (LogOpened, EventsDropped, RuntimeStarted)
_OWNERS = {FREE: "free", PARKED: "parked", TREE: "tree"}
_HOST = "host_"


class LostState:
    """A state that a node had and lost while its KV stayed."""

    __slots__ = ("by", "position", "score", "time", "why")

    def __init__(self, position: int, time: float) -> None:
        self.position = position
        self.time = time
        self.by = ""
        self.why = ""
        self.score: list[int] = []


class Node:
    """A node as far as the events tell: no tokens, but how many."""

    __slots__ = (
        *("end", "host_pages", "host_state", "id", "lost", "pages", "parent", "spans", "state"),
        "used",
    )

    def __init__(self, number: int, parent: Node | None, end: int, time: float) -> None:
        self.id = number
        self.parent = parent
        self.end = end
        self.pages: list[int] = []
        self.state = 0
        self.host_pages: list[int] = []
        self.host_state = 0
        self.spans: dict[str, list[int]] = {}  # pages of each span component, along its last part
        self.used = time  # when a lease was taken here or data were added, at the latest
        self.lost: list[LostState] = []

    @property
    def start(self) -> int:
        """The token position at which its edge begins."""
        return 0 if self.parent is None else self.parent.end


class History:
    """The state after the events so far; begins anew with each `RuntimeStarted`."""

    def __init__(self) -> None:
        self.run = 0  # runtimes that started so far
        self.time = 0.0  # of the latest event
        self.incomplete = ""  # why the state cannot be known, if it cannot
        self.started: RuntimeStarted | None = None
        self._begin()
        self._handlers: dict[type[Event], Callable[..., None]] = {
            RuntimeStarted: self._on_started,
            LogOpened: self._on_log,
            EventsDropped: self._on_dropped,
            TreeChanged: self._on_changed,
            Inserted: self._on_inserted,
            Evicted: self._on_evicted,
            ResetDone: self._on_reset,
            LeaseTaken: self._on_lease_taken,
            LeaseEnded: self._on_lease_ended,
            Granted: self._on_granted,
            Freed: self._on_freed,
            Parked: self._on_parked,
            Kept: self._on_kept,
            Waited: self._on_waited,
            Refused: self._on_refused,
            CopySubmitted: self._on_copy_submitted,
            CopyEnded: self._on_copy_ended,
            StepChanged: self._on_step,
            RequestOpened: self._on_request,
            RequestForked: self._on_request,
            RequestSuspended: self._on_suspended,
            RequestEnded: self._on_request_ended,
        }
        self._changes: dict[type[Change], Callable[..., None]] = {
            RootAdded: self._root_added,
            RootRemoved: self._root_removed,
            NodeAdded: self._node_added,
            NodeSplit: self._node_split,
            NodesMerged: self._nodes_merged,
            NodeRemoved: self._node_removed,
            TailCut: self._tail_cut,
            StatePut: self._state_put,
            StateTaken: self._state_taken,
            KvPut: self._kv_put,
            KvTaken: self._kv_taken,
            SpanPut: self._span_put,
            SpanTaken: self._span_taken,
        }

    def _begin(self) -> None:
        self.generation = 0
        self.roots: dict[int, RootState] = {}
        self.nodes: dict[int, Node] = {}  # with the roots
        self.leases: dict[int, LeaseState] = {}
        self.requests: dict[str, RequestOpened | RequestForked] = {}
        self._suspended: set[str] = set()  # of those, whose lease may end
        self.waiting: dict[int, Waited] = {}  # by the turn in which room was asked for
        self.copies: dict[int, CopySubmitted] = {}
        self.steps: dict[int, StepChanged] = {}
        self.owners: dict[str, list[int]] = {"kv": [], "state": []}  # by pool
        self.accounts: dict[tuple[str, int], str] = {}  # by tier and number
        self._added: tuple[Node, int] | None = None  # so many last pages of the next `Inserted`
        self._filled = False  # a node that was there took pages of the next `Inserted`
        self._taken: dict[int, LostState] = {}  # by node, until an `Evicted` says why

    def add(self, time: float, event: Event) -> None:
        """Take the next event; raises `InvalidRequest` where it contradicts those before."""
        self.time = time
        handler = self._handlers.get(type(event))
        if handler is None or (self.started is None and type(event) not in _BEFORE_ANY_RUN):
            return
        try:
            handler(event)
        except KeyError as error:
            if not self.incomplete:
                raise InvalidRequest(
                    f"the log is not whole: no event before this one tells of {error}: {event}"
                ) from None

    def path(self, node: int) -> list[Node]:
        """The nodes from the top down to `node`, the root left out; empty when it is gone."""
        path: list[Node] = []
        at = self.nodes.get(node)
        while at is not None and at.parent is not None:
            path.append(at)
            at = at.parent
        return path[::-1]

    def owner(self, pool: str, place: int) -> str:
        """The owner of a place: `free`, `parked`, `tree`, or who has the grant."""
        return self._name(pool, self.owners[pool][place])

    def _name(self, pool: str, owner: int) -> str:
        name = _OWNERS.get(owner)
        tier = "host" if pool.startswith(_HOST) else "device"
        return name or f"grant of {self.accounts.get((tier, owner), '?')}"

    def counts(self, pool: str) -> dict[str, int]:
        """Places by `free`, `parked`, `tree` and `granted`."""
        counts = {"free": 0, "parked": 0, "tree": 0, "granted": 0}
        for owner in self.owners[pool][1:]:
            counts[_OWNERS.get(owner, "granted")] += 1
        return counts

    def state(self) -> CacheState:
        """Everything, as a value. Raises `InvalidRequest` when it cannot be known."""
        if self.started is None:
            raise InvalidRequest("the log has no RuntimeStarted so far: nothing to begin from")
        if self.incomplete:
            raise InvalidRequest(f"the state cannot be rebuilt: {self.incomplete}")
        nodes = (node for node in self.nodes.values() if node.parent is not None)
        return CacheState(
            generation=self.generation,
            roots=sorted(self.roots.values(), key=lambda root: root.node),
            nodes=sorted((_shown(node) for node in nodes), key=lambda node: node.id),
            leases=sorted(self.leases.values(), key=lambda lease: lease.id),
            pools={
                pool: runs_of(self._name(pool, owner) for owner in owners[1:])
                for pool, owners in self.owners.items()
            },
            copies=sorted(self.copies),
            waiting=len(self.waiting),
            requests=sorted(self.requests),
        )

    # -- the log itself ------------------------------------------------------------------------

    def _on_log(self, event: LogOpened) -> None:
        if event.least != "debug" or event.kinds or event.sample > 1:
            chosen = f"level {event.least}, kinds {event.kinds or 'all'}, sample {event.sample}"
            self.incomplete = f"the log leaves events out ({chosen})"
        else:
            self.incomplete = ""

    def _on_dropped(self, event: EventsDropped) -> None:
        self.incomplete = f"{event.count} events were dropped before {self.time:.3f}"

    def _on_started(self, event: RuntimeStarted) -> None:
        self.run += 1
        self.started = event
        self._begin()
        sizes = {"kv": event.pages, "state": event.states}
        if event.host_pages:
            sizes |= {"host_kv": event.host_pages, "host_state": event.host_states}
        sizes |= event.spans
        self.owners = {pool: [FREE] * (size + 1) for pool, size in sizes.items()}

    # -- the tree ------------------------------------------------------------------------------

    def _on_changed(self, event: TreeChanged) -> None:
        for change in event.changes:
            self._changes[type(change)](change)

    def _root_added(self, change: RootAdded) -> None:
        self.roots[change.node] = RootState(change.node, change.namespace, change.marks)
        self.nodes[change.node] = Node(change.node, None, 0, self.time)

    def _root_removed(self, change: RootRemoved) -> None:
        del self.roots[change.node], self.nodes[change.node]

    def _node_added(self, change: NodeAdded) -> None:
        assert self.started is not None
        parent = self.nodes[change.parent]
        node = Node(change.node, parent, parent.end + change.tokens, self.time)
        self.nodes[node.id] = node
        self._added = node, change.tokens // self.started.page_size

    def _node_split(self, change: NodeSplit) -> None:
        assert self.started is not None
        node = self.nodes[change.node]
        upper = Node(change.upper, node.parent, node.start + change.tokens, node.used)
        pages = change.tokens // self.started.page_size
        upper.pages, node.pages = node.pages[:pages], node.pages[pages:]
        upper.host_pages, node.host_pages = node.host_pages[:pages], node.host_pages[pages:]
        below = (node.end - upper.end) // self.started.page_size
        upper.spans = {name: held[:-below] for name, held in node.spans.items()}
        node.spans = {name: held[-below:] for name, held in node.spans.items()}
        upper.lost = [lost for lost in node.lost if lost.position <= upper.end]
        node.lost = [lost for lost in node.lost if lost.position > upper.end]
        node.parent = upper
        self.nodes[upper.id] = upper

    def _nodes_merged(self, change: NodesMerged) -> None:
        node, into = self.nodes.pop(change.node), self.nodes[change.into]
        into.pages = node.pages + into.pages
        into.host_pages = node.host_pages + into.host_pages
        for name, held in node.spans.items():
            into.spans[name] = held + into.spans.get(name, [])
        into.lost = node.lost + into.lost
        into.parent = node.parent
        into.used = max(into.used, node.used)

    def _node_removed(self, change: NodeRemoved) -> None:
        del self.nodes[change.node]

    def _tail_cut(self, change: TailCut) -> None:
        assert self.started is not None
        node = self.nodes[change.node]
        del node.pages[-change.pages :]
        for held in node.spans.values():
            del held[-change.pages :]
        node.end -= change.pages * self.started.page_size

    def _state_put(self, change: StatePut) -> None:
        node = self.nodes[change.node]
        if change.tier == "host":
            node.host_state = change.slot
        else:
            node.state = change.slot
        node.lost = [lost for lost in node.lost if lost.position != node.end]

    def _state_taken(self, change: StateTaken) -> None:
        node = self.nodes[change.node]
        if change.tier == "host":
            node.host_state = 0
        else:
            node.state = 0
        if not node.state and not node.host_state:
            lost = self._taken[node.id] = LostState(node.end, self.time)
            node.lost.append(lost)

    def _kv_put(self, change: KvPut) -> None:
        self._set_pages(change.node, change.tier, list(change.pages))
        self._filled = True

    def _kv_taken(self, change: KvTaken) -> None:
        self._set_pages(change.node, change.tier, [])

    def _span_put(self, change: SpanPut) -> None:
        spans = self.nodes[change.node].spans
        spans[change.component] = [*change.pages, *spans.get(change.component, ())]

    def _span_taken(self, change: SpanTaken) -> None:
        del self.nodes[change.node].spans[change.component][: change.pages]

    def _set_pages(self, name: int, tier: str, pages: list[int]) -> None:
        node = self.nodes[name]
        if tier == "host":
            node.host_pages = pages
        else:
            node.pages = pages

    def _on_inserted(self, event: Inserted) -> None:
        if event.adopted:
            if self._added is not None:
                added, count = self._added
                added.pages.extend(event.adopted[-count:])
                self._added = None
            elif not self._filled and not self.incomplete:
                self.incomplete = (
                    f"no node was there for what turn {event.turn} inserted: "
                    "the log is of schema 1, or leaves events out"
                )
        self._filled = False
        self._move("kv", event.adopted, event.account, TREE, event)
        if event.adopted_state:
            self._move("state", (event.adopted_state,), event.account, TREE, event)
        for component, ids in event.spans.items():
            self._move(component, ids, event.account, TREE, event)
        if event.lease:
            former = self.leases[event.lease]
            node = self.nodes.get(event.node)
            if node is not None:
                node.used = self.time
                self.leases[event.lease] = LeaseState(
                    former.id, former.owner, node.id, node.end, former.state
                )

    def _on_evicted(self, event: Evicted) -> None:
        for victim in event.victims:
            lost = self._taken.pop(victim.node, None)
            if lost is not None:
                lost.by, lost.why, lost.score = event.request, event.why, victim.score
        self._taken.clear()

    def _on_reset(self, event: ResetDone) -> None:
        self.generation = event.generation
        self.roots, self.nodes, self._added = {}, {}, None

    # -- leases and requests -------------------------------------------------------------------

    def _on_lease_taken(self, event: LeaseTaken) -> None:
        self.leases[event.lease] = LeaseState(
            event.lease, event.request, event.node, event.boundary, event.state
        )
        node = self.nodes.get(event.node)
        if node is not None:
            node.used = self.time

    def _on_lease_ended(self, event: LeaseEnded) -> None:
        lease = self.leases.pop(event.lease)
        if event.state_only:
            self.leases[event.lease] = LeaseState(
                lease.id, lease.owner, lease.node, lease.boundary, False
            )
            return
        opened = self.requests.get(lease.owner)
        suspended = lease.owner in self._suspended
        if opened is not None and opened.lease == lease.id and not suspended:
            del self.requests[lease.owner]  # its caller left before it had it

    def _on_request(self, event: RequestOpened | RequestForked) -> None:
        self.requests[event.request] = event
        self._suspended.discard(event.request)

    def _on_suspended(self, event: RequestSuspended) -> None:
        self._suspended.add(event.request)

    def _on_request_ended(self, event: RequestEnded) -> None:
        self.requests.pop(event.request, None)
        self._suspended.discard(event.request)

    def _on_step(self, event: StepChanged) -> None:
        if event.state == "over":
            self.steps.pop(event.step, None)
        else:
            self.steps[event.step] = event

    # -- the pools -----------------------------------------------------------------------------

    def _on_granted(self, event: Granted) -> None:
        self.waiting.pop(event.asked, None)
        self.accounts[event.tier, event.account] = event.request
        kv, state = pool_of("kv", event.tier), pool_of("state", event.tier)
        self._move(kv, event.pages, FREE, event.account, event)
        self._move(state, event.states, FREE, event.account, event)
        for component, ids in event.spans.items():
            self._move(component, ids, FREE, event.account, event)

    def _on_freed(self, event: Freed) -> None:
        self._move(pool_of(event.component, event.tier), event.ids, event.owner, FREE, event)

    def _on_kept(self, event: Kept) -> None:
        self._move(pool_of(event.component, event.tier), event.ids, event.account, TREE, event)

    def _on_parked(self, event: Parked) -> None:
        self._move("kv", event.pages, event.owner, PARKED, event)
        self._move("state", event.states, event.owner, PARKED, event)
        for component, ids in event.spans.items():
            self._move(component, ids, event.owner, PARKED, event)

    def _move(self, pool: str, ids: Iterable[int], owner: int, to: int, event: Event) -> None:
        owners, said = self.owners[pool], self._name(pool, owner)
        for place in ids:
            if not 0 < place < len(owners):
                raise KeyError(f"{pool} place {place}")
            if self._name(pool, owners[place]) != said and not self.incomplete:
                raise InvalidRequest(
                    f"the log is not whole: {pool} place {place} is "
                    f"{self._name(pool, owners[place])}, not {said}, before {event}"
                )
            owners[place] = to

    def _on_waited(self, event: Waited) -> None:
        self.waiting[event.turn] = event

    def _on_refused(self, event: Refused) -> None:
        self.waiting.pop(event.asked, None)

    def _on_copy_submitted(self, event: CopySubmitted) -> None:
        self.copies[event.op] = event

    def _on_copy_ended(self, event: CopyEnded) -> None:
        del self.copies[event.op]


def _shown(node: Node) -> NodeState:
    assert node.parent is not None
    return NodeState(
        node.id,
        node.parent.id,
        node.start,
        node.end,
        list(node.pages),
        node.state,
        list(node.host_pages),
        node.host_state,
        {name: list(held) for name, held in sorted(node.spans.items()) if held},
    )


def replay(path: str | Path, *, until: float | None = None, run: int | None = None) -> History:
    """The state at the end of a log, or after its last event at or before the time `until`.

    A log may hold the events of several runtimes, one after the other: `run` names one (from 1 on),
    by default the last that had started. Raises `InvalidRequest` for a log that is not whole.
    """
    history = History()
    for entry in entries_until(path, until):
        if run is not None and isinstance(entry.event, RuntimeStarted) and history.run >= run:
            break
        history.add(entry.time, entry.event)
    if run is not None and history.run < run:
        raise InvalidRequest(f"{path} has {history.run} runs, no run {run}")
    return history


def entries_until(path: str | Path, until: float | None) -> Iterator[Entry]:
    """The entries of a log up to a time."""
    for entry in read_log(path):
        if until is not None and entry.time > until:
            return
        yield entry
