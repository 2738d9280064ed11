"""What the tree is made of, and what can be read from it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Literal

import msgspec

from phloem.actors.actions import Action, Ids
from phloem.actors.tree.components import Boundary, Components
from phloem.actors.tree.departures import Departures
from phloem.actors.tree.eviction import CandidateIndex
from phloem.actors.tree.former import Former
from phloem.actors.tree.ghosts import NOTHING, Ghosts, Remembered, mark_after, mark_of
from phloem.actors.tree.host import HostTier
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey, Tokens
from phloem.actors.tree.leases import Lease, Leases
from phloem.actors.tree.node import ID_BYTES, HostPart, Node, Walk
from phloem.actors.tree.operations import Operations
from phloem.actors.tree.placement import Placement
from phloem.actors.tree.policies import Policy, Score, policy_of
from phloem.actors.tree.radix import Radix
from phloem.actors.tree.results import Match, SpanFigures, StateTier, TreeFigures
from phloem.actors.tree.running import Running
from phloem.actors.tree.sessions import Sessions
from phloem.errors import InvalidRequest, StaleHandle

if TYPE_CHECKING:
    from phloem.actors.tree.tree import Tree

__all__ = ["BACKUP_HITS", "Actions", "Look", "TreeCore", "WritePolicy"]

Actions = list[Action]
WritePolicy = Literal["write_through", "selective", "write_back"]
# At which hit a node is copied to the host; under write-back it is when the node leaves the device.
BACKUP_HITS: dict[WritePolicy, int] = {"write_through": 1, "selective": 2, "write_back": 0}


def _index_bits() -> Iterator[int]:
    """The bits of `Node.queued` for the indexes of the device tier; the host's has 4 and 8."""
    yield from (1, 2)
    yield from (16 << number for number in count())


class Look(msgspec.Struct, frozen=True, gc=False):
    """Where a key led at some version of a tree.

    `anchor` is the last node on the way that ends at a boundary, None the root. Without states the
    boundary may lie further, inside the next edge.
    """

    radix: Radix
    version: int
    walk: Walk
    anchor: Node | None
    match: Match


class TreeCore:
    """The parts of a tree, its construction and its reads; `Tree` adds what changes it.

    `host`: there is a host tier, to which data are copied as `write_policy` says: at their first
    hit, at the second, or when they leave the device. `components` are texts as
    `phloem.actors.tree.components` explains them. One state weighs as much as the KV of
    `state_weight` tokens.
    """

    def __init__(
        self,
        *,
        page_size: int = 16,
        state_chunk: int = 1,
        components: Sequence[str] = ("kv", "state"),
        policy: str | Policy = "lru",
        placement: Placement | None = None,
        sessions_max: int = 4096,
        ghosts_max: int = 4096,
        enabled: bool = True,
        host: bool = False,
        write_policy: WritePolicy = "write_through",
        state_weight: int = 1024,
    ) -> None:
        if page_size < 1 or state_chunk < 1:
            raise InvalidRequest(f"page_size {page_size} and state_chunk {state_chunk} start at 1")
        if state_weight < 1:
            raise InvalidRequest(f"a state weighs {state_weight} tokens of KV; it starts at 1")
        self.components = Components(components, page_size, state_chunk)
        self.spans = self.components.spans
        if host and self.spans:
            raise InvalidRequest(
                f"no host tier for trees with {self.spans[0].text}: only kv and states are copied"
            )
        if write_policy not in BACKUP_HITS:
            raise InvalidRequest(f"no write policy {write_policy!r}; there are {[*BACKUP_HITS]}")
        self.page_size = page_size
        self.has_states = self.components.has_states
        self.grid = self.components.grid
        self.placement = placement or Placement()
        self.enabled = enabled
        self.state_weight = state_weight if self.has_states else 0
        self.policy = policy_of(policy)
        self.policy.serve(page_size * TOKEN_BYTES, self.state_weight, 0)
        self.departures = Departures()
        self.radix = self.new_radix(page_size, len(self.spans))
        self.indexes = tuple(
            self.new_index(bit, component.score_by(self.policy), component.may_go)
            for bit, component in zip(_index_bits(), self.components.all, strict=False)
        )
        self.kv_index, self.state_index = self.indexes[:2]
        self.host = self.new_host() if host else None
        self.host_closed = False  # it fails, and is left alone
        self.write_policy: WritePolicy = write_policy
        self.operations = self.new_operations()
        self.radix.on_split = self.operations.divide
        self.radix.on_spans = self._spans_moved
        self.leases = Leases(
            *(self.kv_index, self.state_index, self.host),
            tuple(zip(self.spans, self.span_indexes, strict=True)),
        )
        self.running = Running(self.radix.page_bytes, self.grid)
        self.sessions = Sessions(sessions_max, self.has_states, self._score_fell)
        self.ghosts = Ghosts(self.radix.page_bytes, ghosts_max)
        self.generation: int = 0
        self.now: int = 0  # counts uses; the only clock of the tree
        self.time: int = 0  # of the latest message that said its time
        self._named: dict[int, Node] = {}  # nodes that an action on its way to the tree names
        self.former = Former(self.radix.page_bytes, self.spans)
        self.shared = False  # pages and states come from one memory, as the latest eviction said
        self.policy.attach(self)

    def new_radix(self, page_size: int, spans: int) -> Radix:
        """The structure that this tree works on; others may watch theirs."""
        return Radix(page_size, spans)

    def new_host(self) -> HostTier:
        """Its host tier; others may watch theirs."""
        return HostTier(self.new_index, self.kv_index, self.state_index)

    def new_index(
        self, bit: int, score: Callable[[Node], Score], eligible: Callable[[Node], bool]
    ) -> CandidateIndex:
        """One of its candidate indexes."""
        return CandidateIndex(bit, score, eligible)

    def new_operations(self) -> Operations:
        """Its record of operations."""
        return Operations()

    def held(self) -> tuple[int, int]:
        """Pages and states on the device."""
        return self.radix.pages, self.radix.states

    def twin(self, policy: Policy) -> Tree:
        """An empty tree like this one, without spans or a host tier, under another policy."""
        raise NotImplementedError

    @property
    def span_indexes(self) -> tuple[CandidateIndex, ...]:
        """Those of the span components, in order."""
        return self.indexes[2:]

    def rescore(self) -> None:
        """Score all candidates anew, little by little; what is cached stays."""
        for component, index in zip(self.components.all, self.indexes, strict=True):
            index.rescore(component.score_by(self.policy))

    def match(self, tokens: Tokens, limit: int | None = None) -> Match:
        """How far the first `limit` tokens (all by default) are cached. Changes nothing."""
        key = tokens if type(tokens) is TokenKey else TokenKey.of(tokens)
        return self._look(key, limit).match

    def pages_of(self, lease: Lease) -> Ids:
        """The device page ids from the start to the lease's boundary.

        What is on its way counts where it will be, and as the reserved page as long as that is not
        known.
        """
        runs: list[bytes] = []
        node: Node | None = lease.anchor
        while node is not None:
            run = node.page_ids
            runs.append(run if run or node.host is None else self._arriving_pages(node, node.host))
            node = node.parent
        ids: Ids = array("i")
        for run in reversed(runs):
            ids.frombytes(run)
        return ids

    def _arriving_pages(self, node: Node, part: HostPart) -> bytes:
        """Where the node's pages will be, zeros as long as that is not known; none if they do not.

        Nothing is on its way for a node whose pages have gone for good.
        """
        loading = self.operations.live.get(part.kv_load)
        if loading is None or node.id not in loading.pieces:
            return b""
        ids = loading.ids_of(loading.pieces[node.id])
        return ids or bytes(len(node.edge) // self.radix.page_bytes * ID_BYTES)

    def state_of(self, lease: Lease) -> int:
        """The device slot of the state at the lease's boundary, or `NO_SLOT`."""
        return lease.anchor.state

    def span_of(self, lease: Lease, number: int) -> Ids:
        """The pages of a span component that the lease's boundary needs, in order.

        0 stands where there is none, which is only after an insert of less than that.
        """
        anchor, span = lease.anchor, self.spans[number]
        runs: list[bytes] = []
        node = anchor
        start = span.needs_from(anchor.end)
        while node.parent is not None and node.end > start:
            pages = len(node.edge) // self.radix.page_bytes
            runs.append(node.spans[number].page_ids.rjust(pages * ID_BYTES, b"\0"))
            node = node.parent
        data = b"".join(reversed(runs))
        wanted = (anchor.end - start) // self.page_size * ID_BYTES
        return array("i", data[len(data) - wanted :])

    def figures(self) -> TreeFigures:
        """The tree in numbers; costs the same at any size."""
        self.leases.settle()
        return self._figures(self.leases.pages_protected)

    def figures_unsettled(self) -> TreeFigures:
        """The same numbers for a thread that may not change anything, `settle` neither.

        What the tree does at that moment may be counted in one number and not yet in another.
        """
        return self._figures(self.leases.pages_protected + self.leases.pages_not_counted())

    def _figures(self, pages_protected: int) -> TreeFigures:
        host = self.host
        if host is None:
            return self._device_figures(pages_protected)
        return msgspec.structs.replace(
            self._device_figures(pages_protected),
            pages_leaving=host.pages_leaving,
            states_leaving=host.states_leaving,
            host_pages=host.pages + self.former.host_pages,
            host_pages_pinned=host.pages_pinned + self.former.host_pages,
            host_states=host.states + self.former.host_states,
            host_states_pinned=host.states_pinned + self.former.host_states,
            operations=len(self.operations),
        )

    def _device_figures(self, pages_protected: int) -> TreeFigures:
        return TreeFigures(
            generation=self.generation,
            namespaces=len(self.radix.roots),
            nodes=self.radix.nodes + self.former.nodes,
            leaves=self.radix.leaves,
            leases=len(self.leases.live),
            pages=self.radix.pages + self.former.pages,
            pages_protected=pages_protected + self.former.pages,
            states=self.radix.states + self.former.states,
            states_protected=self.leases.states_protected + self.former.states,
            spans=self._span_figures() if self.spans else (),
        )

    def _span_figures(self) -> tuple[SpanFigures, ...]:
        former = self.former.span_pages
        return tuple(
            SpanFigures(
                span.name,
                self.radix.span_pages[number] + former[number],
                self.leases.spans_protected[number] + former[number],
            )
            for number, span in enumerate(self.spans)
        )

    def can_evict(self, pages: int, states: int, spans: Sequence[int] = ()) -> bool:
        """Whether so much is cached that nothing protects; under write-back it may take a copy."""
        leases, radix = self.leases, self.radix
        unsettled = leases.unsettled_tokens // self.page_size
        if unsettled and pages > radix.pages - leases.pages_protected - unsettled:
            leases.settle()
        kept_pages, kept_states = leases.pages_protected, leases.states_protected
        if self.host is not None:
            kept_pages += self.host.pages_leaving
            kept_states += self.host.states_leaving
        return (
            pages <= radix.pages - kept_pages
            and states <= radix.states - kept_states
            and not (
                spans
                and any(
                    asked > radix.span_pages[number] - leases.spans_protected[number]
                    for number, asked in enumerate(spans)
                )
            )
        )

    def beyond_leaving(self, pages: int, states: int) -> tuple[int, int]:
        """How many of so many pages and states what is leaving the device will not give."""
        host = self.host
        if host is None:
            return pages, states
        return max(0, pages - host.pages_leaving), max(0, states - host.states_leaving)

    def can_evict_host(self, pages: int, states: int) -> bool:
        """Whether so much is on the host that nothing needs there."""
        figures = self.figures()
        return pages <= figures.host_pages_evictable and states <= figures.host_states_evictable

    def check_lease(self, lease: Lease) -> None:
        """Raise `StaleHandle` unless the lease is live and of this generation."""
        self._check_live(lease)
        if lease.generation != self.generation:
            raise StaleHandle(
                f"{lease} is of generation {lease.generation}; the cache was reset to "
                f"{self.generation}"
            )

    def _check_live(self, lease: Lease) -> None:
        if self.leases.live.get(lease.id) is not lease:
            raise StaleHandle(f"{lease} " + ("is of another tree" if lease.live else "has ended"))

    def _score_fell(self, node: Node) -> None:
        for index in self.indexes:
            index.lower(node)

    def _spans_moved(self, node: Node) -> None:
        """A split or merge has given a node pages of spans, which may be candidates there."""
        for span, index in zip(self.spans, self.span_indexes, strict=True):
            if span.may_go(node):
                index.push(node)

    def _look(self, key: TokenKey, limit: int | None) -> Look:
        """Where the first `limit` tokens lead; noted in the key until something changes."""
        length = key.length
        looked_up = length if limit is None or limit > length else limit
        seen, radix = key.seen, self.radix
        if (
            type(seen) is Look
            and seen.version == radix.version
            and seen.radix is radix
            and seen.match.looked_up == looked_up
        ):
            return seen
        look = key.seen = self._look_anew(key, looked_up)
        return look

    def _look_anew(self, key: TokenKey, looked_up: int) -> Look:
        whole = looked_up // self.page_size * self.page_size
        walk = self.radix.walk(key, whole * TOKEN_BYTES)
        known = (walk.offset + walk.inside) // TOKEN_BYTES
        branch: int | None = None
        state_tier: StateTier = ""
        short, short_of = 0, ""
        anchor, usable = self.components.reach(walk, known)
        if self.spans and usable:
            reached = usable
            anchor, usable, short_of = self.components.deepest(walk, usable)
            short = reached - usable
        device = found = usable
        if self.host is not None:
            there, device = self._on_device(walk, anchor, usable)
            if self.host_closed:
                anchor, usable = there, device
        if self.has_states:
            if anchor is not None:
                state_tier = "device" if anchor.state else "host"
            position = known // self.grid * self.grid
            if position > usable:
                branch = position
        if self.ghosts.any and known < whole:
            past = self._recall(key, walk, whole * TOKEN_BYTES)
        else:
            past = NOTHING
        evicted = past.evicted // TOKEN_BYTES
        forgotten = whole - known - evicted if past.forgotten else 0
        match = Match(
            key.length,
            looked_up,
            usable,
            device,
            known,
            branch,
            self.page_size,
            state_tier,
            evicted,
            forgotten,
            past.by,
            past.at,
            short,
            short_of,
        )
        if found > usable:
            match = _without_host(match, found)
        return Look(self.radix, self.radix.version, walk, anchor, match)

    def _on_device(self, walk: Walk, anchor: Node | None, usable: int) -> Boundary:
        """The deepest boundary of a walk, at or before one, that needs nothing from the host."""
        partial = walk.partial
        if not self.has_states and partial is not None and partial.page_ids:
            return anchor, usable
        for node in reversed(walk.path):
            if node.state if self.has_states else node.page_ids:
                return node, node.end
        return None, 0

    def _recall(self, key: TokenKey, walk: Walk, stop: int) -> Remembered:
        """What the record of evictions has of the key beyond the end of its walk, up to `stop`."""
        if walk.path:
            mark: int | None = mark_of(walk.path[-1])
        else:
            mark = self.radix.mark_of_root(key.root)
            if mark is None:
                return NOTHING
        assert mark is not None
        if walk.partial is not None:
            mark = mark_after(mark, walk.partial.edge[: walk.inside])
        return self.ghosts.recall(mark, key.data, walk.offset + walk.inside, stop)


def _without_host(match: Match, found: int) -> Match:
    """The match of a closed host tier, which would have made it `found` tokens."""
    not_loaded = found - match.usable
    return msgspec.structs.replace(match, not_loaded=not_loaded, why_not="tier_failed")
