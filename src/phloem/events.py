"""What happened, as values: one struct for each kind of event, and the sink they are given to.

Every event carries ids that join it to others: `request` (who asked, or whose it is), `op` (a copy
through its life), `lease`, `node` (of the tree), `account` (of the ledger), `turn` (the turn in
which it happened) and `cause` (the turn that sent the message; 0 for a caller). Counts are pages,
slots or tokens as named. Times are added by whoever writes events down.

`SCHEMA` is the version of all this. A field may be added with a default, within a version; what
changes the meaning of a field, or takes one away, makes a new version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, TypedDict

import msgspec

__all__ = [
    "SCHEMA", "Acquired", "Change", "Context", "CopyDropped", "CopyEnded", "CopyPlanned",
    "CopySubmitted", "Event", "Evicted", "FellBack", "Freed", "Granted", "Inserted", "Joins",
    "Kept", "KvPut", "KvTaken", "LeaseEnded", "LeaseLeaked", "LeaseTaken", "NodeAdded",
    "NodeRemoved", "NodeSplit", "NodesMerged", "Parked", "Refused", "RequestEnded",
    "RequestForked", "RequestOpened", "RequestSuspended", "ResetDone", "SpanPut", "SpanTaken",
    "RootAdded", "RootRemoved", "RuntimeStarted", "RuntimeStopped", "Sink", "StatePut",
    "StateTaken", "StepChanged", "TailCut", "TierChanged", "TreeChanged", "Victim", "Waited",
]  # fmt: skip

SCHEMA: Final = 2

Context: TypeAlias = dict[str, str]  # what a caller has bound to its task: names and values


class Joins(TypedDict):
    """What joins the events of a turn to others, for their constructors."""

    turn: int
    cause: int
    context: Context


class Event(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="event", kw_only=True):
    """What every event has. `context`: what the caller whose call this came of had bound."""

    turn: int = 0
    cause: int = 0
    request: str = ""
    context: Context = {}


class RequestOpened(Event, frozen=True, gc=False, kw_only=True):
    """A request was opened: how far it matched, what it lost and which positions are wanted.

    `lost` has the tokens that are not reused by reason, `tokens - usable` in all. `reached` is the
    node in which the KV prefix ends (0: none). What is lost as `evicted` made room for
    `evicted_by` when the tree had counted `evicted_at` uses. The device alone can serve `device` of
    the usable tokens (None: all); the rest is loaded from the host. `state_tier` says where the
    state at the boundary is. `alternatives`: the ways that were weighed, where their costs are
    known: load, recompute or wait; the tokens that each saves; its seconds to the prompt's end.
    """

    tokens: int
    usable: int
    kv_prefix: int
    lost: dict[str, int]
    wanted: list[tuple[int, str]]
    namespace: tuple[str, str]
    session: str = ""
    lease: int = 0
    reached: int = 0
    branch_point: int | None = None
    evicted_by: str = ""
    evicted_at: int = 0
    device: int | None = None
    state_tier: str = ""
    alternatives: list[tuple[str, int, float]] = []


class Acquired(Event, frozen=True, gc=False, kw_only=True):
    """A boundary was leased without opening a request; the figures are those of `RequestOpened`."""

    tokens: int
    usable: int
    kv_prefix: int
    lost: dict[str, int]
    namespace: tuple[str, str]
    lease: int
    reached: int = 0
    branch_point: int | None = None
    evicted_by: str = ""
    evicted_at: int = 0
    device: int | None = None
    state_tier: str = ""


class RequestForked(Event, frozen=True, gc=False, kw_only=True):
    """A request begins where `parent` stands, under a lease of its own."""

    parent: str
    lease: int
    tokens: int


class RequestSuspended(Event, frozen=True, gc=False, kw_only=True):
    """A request has given its room back, and its lease unless `keeps_lease`.

    It had computed or reused `computed` tokens. It goes on with another `RequestOpened`, or ends.
    """

    computed: int
    keeps_lease: bool


class RequestEnded(Event, frozen=True, gc=False, kw_only=True):
    """A request finished or aborted, with what it computed and published, in tokens.

    `reused` also counts what it took over after it was opened; `loaded` of it came from the host.
    With `CacheConfig.tell_prompts`, `blocks` are `TokenKey.digests` of its whole pages of
    `page_size` tokens; it was opened with `prompt_tokens` (a fork: its parent was) and ended with
    `tokens`. Else they are empty and 0.
    """

    how: str
    reused: int
    computed: int
    published: int
    loaded: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    page_size: int = 0
    blocks: list[int] = []


class LeaseTaken(Event, frozen=True, gc=False, kw_only=True):
    """A boundary is protected from now on. `moved`: an existing lease came here from another.

    `node` is the one it is anchored at; `state`: the state there is protected, too.
    """

    lease: int
    boundary: int
    moved: bool = False
    node: int = 0
    state: bool = False


class LeaseEnded(Event, frozen=True, gc=False, kw_only=True):
    """A lease ended, or gave up only its state part."""

    lease: int
    boundary: int
    state_only: bool = False


class LeaseLeaked(Event, frozen=True, gc=False, kw_only=True):
    """A lease was collected by Python without having been released; it was released then."""

    lease: int


class Inserted(Event, frozen=True, gc=False, kw_only=True):
    """Tokens were published; `reused` of them were there before. `state`: what became of it.

    The places `adopted` and `adopted_state` (0: none) went from `account` to the tree; `adopted`
    are the pages of the node added in this turn, after those that nodes were given which had KV
    on the host only (`KvPut`). `lease` (0: none) is at `node` from now on.
    """

    reused: int
    published: int
    pages: int
    state: str
    account: int
    adopted: list[int]
    adopted_state: int
    lease: int = 0
    node: int = 0
    spans: dict[str, list[int]] = {}


class RootAdded(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A tree for a namespace begins. `marks`: content that is part of the namespace, in hex."""

    node: int
    namespace: tuple[str, str]
    marks: str = ""


class RootRemoved(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """The tree of a namespace holds nothing more and is forgotten."""

    node: int


class NodeAdded(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A leaf of `tokens` more tokens; its pages are in the `Inserted` of the same turn."""

    node: int
    parent: int
    tokens: int


class NodeSplit(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """The first `tokens` of a node are the new node `upper`; the rest stays the node itself."""

    node: int
    upper: int
    tokens: int


class NodesMerged(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node went into the front of its only child."""

    node: int
    into: int


class NodeRemoved(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A leaf went, with all it held."""

    node: int


class TailCut(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A leaf lost its last `pages` pages."""

    node: int
    pages: int


class KvPut(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node that was there has its KV in a tier from now on, in `pages`."""

    node: int
    tier: str
    pages: list[int]


class KvTaken(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node lost its KV in a tier and stays for what it has elsewhere, or goes next."""

    node: int
    tier: str


class StatePut(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node has a state in a tier from now on, in `slot`."""

    node: int
    slot: int
    tier: str = "device"


class StateTaken(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node lost its state in a tier and keeps its KV, or goes next."""

    node: int
    tier: str = "device"


class SpanPut(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node has these pages of a span component, too, right before those that it had."""

    node: int
    component: str
    pages: list[int]


class SpanTaken(msgspec.Struct, frozen=True, gc=False, tag=True, tag_field="change"):
    """A node lost the first `pages` pages that it had of a span component."""

    node: int
    component: str
    pages: int


Change: TypeAlias = (
    RootAdded
    | RootRemoved
    | NodeAdded
    | NodeSplit
    | NodesMerged
    | NodeRemoved
    | TailCut
    | KvPut
    | KvTaken
    | StatePut
    | StateTaken
    | SpanPut
    | SpanTaken
)


class TreeChanged(Event, frozen=True, gc=False, kw_only=True):
    """The shape of the tree changed in this turn, in this order."""

    changes: list[Change]


class Victim(msgspec.Struct, frozen=True, gc=False):
    """What one node lost to an eviction.

    `what`: `leaf` (all it had), `tail` (its last pages), `state`, `span` (the foremost of its pages
    of a span component); with a host tier `demoted` (what it had on the device, since the host has
    it), `leaving` (the same as soon as the host has it) or `copy` (what it had on the host). `end`
    is the token position at the node's end before. `pages` and `states` are those of the device.
    `score` is what the policy gave it, as words of 64 bits, the highest first: the lowest score
    goes first. Empty where no policy was asked.
    """

    node: int
    what: str
    end: int
    pages: int
    states: int
    score: list[int]
    host_pages: int = 0
    host_states: int = 0


class Evicted(Event, frozen=True, gc=False, kw_only=True):
    """Data left the tree. `why`: `room` for an allocation, `asked` by a caller, `path_cap`.

    `no_copy`: it was to leave the device for the host and could not be copied. `use` is the tree's
    count of uses; `policy` says who chose the victims. `pages` and `states` were of `tier`; so
    many more will have left it when what was planned for them has been copied (`_promised`).
    `spans` are pages of each span component, in the order of `RuntimeStarted`.
    """

    pages: int
    states: int
    why: str
    use: int = 0
    policy: str = ""
    victims: list[Victim] = []
    tier: str = "device"
    pages_promised: int = 0
    states_promised: int = 0
    spans: tuple[int, ...] = ()


class Freed(Event, frozen=True, gc=False, kw_only=True):
    """Places went back to their pool."""

    component: str
    ids: list[int]
    owner: int
    tier: str = "device"


class Parked(Event, frozen=True, gc=False, kw_only=True):
    """Places that account `owner` gave up wait for fences before they are free."""

    pages: list[int]
    states: list[int]
    owner: int
    spans: dict[str, list[int]] = {}


class Granted(Event, frozen=True, gc=False, kw_only=True):
    """Places were granted to an account. `asked`: the turn in which they were asked for.

    `spans` has the pages of span components by name; likewise in `Parked` and `Inserted`.
    """

    account: int
    pages: list[int]
    states: list[int]
    asked: int = 0
    tier: str = "device"
    spans: dict[str, list[int]] = {}


class Waited(Event, frozen=True, gc=False, kw_only=True):
    """An allocation waits for room. `holder`: its owner holds something already.

    `spans` are pages of each span component, in the order of `RuntimeStarted`.
    """

    pages: int
    states: int
    holder: bool
    spans: tuple[int, ...] = ()


class Refused(Event, frozen=True, gc=False, kw_only=True):
    """Something optional or impossible was not done. `what`: `room` or `checkpoint`.

    `why` is one of a few words, `detail` has the figures. `asked`: the turn in which room was asked
    for. For room: `no_room`, `deadlock`, `left` (cancelled, or out of time), `ended` (the request).
    """

    what: str
    why: str
    detail: str = ""
    asked: int = 0


class Kept(Event, frozen=True, gc=False, kw_only=True):
    """What a copy between the tiers brought is the tree's from now on; it was `account`'s.

    The account is of the copy's operation (see `Granted`); what it still has goes back.
    """

    account: int
    component: str
    ids: list[int]
    tier: str


class CopyPlanned(Event, frozen=True, gc=False, kw_only=True):
    """A copy was asked for. It reads under `lease` (0: it reads what the request owns itself).

    Between the tiers (`backup`, `load`) it protects what it reads by itself, and says what it
    brings; it has a request where one waits for it.
    """

    op: int
    kind: str
    lease: int = 0
    pages: int = 0
    states: int = 0


class CopyDropped(Event, frozen=True, gc=False, kw_only=True):
    """A copy that was planned is not made. `why`: `no_room`, or it is `not_wanted` any more."""

    op: int
    kind: str
    why: str


class FellBack(Event, frozen=True, gc=False, kw_only=True):
    """What a lease was to stand on did not come from the host: it stands on less now.

    `lost`: the tokens that are not reused for this, by reason, beside those that were lost when the
    prompt was looked up.
    """

    lease: int
    boundary: int
    lost: dict[str, int]


class CopySubmitted(Event, frozen=True, gc=False, kw_only=True):
    """A copy was handed to the engine, for its `queue`, to begin after so many others (`after`).

    A queue carries out one copy at a time, in this order unless one of them has to wait.
    """

    op: int
    kind: str
    pages: list[int]
    states: list[int]
    queue: str = ""
    bytes: int = 0
    after: int = 0


class CopyEnded(Event, frozen=True, gc=False, kw_only=True):
    """A copy ended; `error` is empty when it succeeded.

    By the engine's clock it began `started_ns` after it was submitted (None: it never did, or it is
    not known) and ended `ended_ns` after.
    """

    op: int
    error: str
    started_ns: int | None = None
    ended_ns: int | None = None


class TierChanged(Event, frozen=True, gc=False, kw_only=True):
    """A lower tier is left alone from now on, `why`, or tried again (`why` is empty)."""

    tier: str
    why: str


class StepChanged(Event, frozen=True, gc=False, kw_only=True):
    """A forward pass was opened, launched, ended or abandoned, or is `over`: quiet from now on.

    `ends`: up to which token each of the `requests` is computed by it, or was before it.
    """

    step: int
    state: str
    requests: list[str]
    ends: list[int] = []


class RuntimeStarted(Event, frozen=True, gc=False, kw_only=True):
    """The runtime opened. `grid`: states can be kept at multiples of so many tokens.

    `pages` and `states` can be granted, of `page_bytes` and `state_bytes` each; `host_pages` and
    `host_states` are those of the host tier, `spans` the pages of each span component.
    """

    page_size: int
    grid: int
    pages: int
    states: int
    layout: str
    page_bytes: int = 0
    state_bytes: int = 0
    policy: str = ""
    host_pages: int = 0
    host_states: int = 0
    spans: dict[str, int] = {}


class ResetDone(Event, frozen=True, gc=False, kw_only=True):
    """The cache was reset to a new generation."""

    generation: int


class RuntimeStopped(Event, frozen=True, gc=False, kw_only=True):
    """The runtime closed or crashed, with what was still owned then."""

    why: str
    leases: list[str]
    pages: int
    states: int


Sink: TypeAlias = Callable[[Event], None]
