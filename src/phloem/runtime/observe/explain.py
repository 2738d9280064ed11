"""Why a prompt hit as far as it did and no further: from a log, or of a live cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from phloem.actors import messages as m
from phloem.actors.tree.components import SPANS
from phloem.actors.tree.keys import TOKEN_BYTES, TokenKey
from phloem.actors.tree.node import state_anywhere
from phloem.actors.tree.results import Match
from phloem.errors import InvalidRequest
from phloem.events import (
    Acquired,
    Event,
    Evicted,
    FellBack,
    Granted,
    Inserted,
    Refused,
    RequestEnded,
    RequestOpened,
    RuntimeStarted,
    Waited,
)
from phloem.runtime.core import Core
from phloem.runtime.observe.history import History, LostState
from phloem.runtime.tracing import read_log

__all__ = ["Explanation", "Reason", "Weighed", "explain_live", "explain_request", "readable"]

_NAMESPACES_MAX = 1000  # looked at for what another namespace holds
_MEANING = {
    "last_token": "the last token is always computed, for its logits",
    "partial_page": "they do not fill a page: only whole pages are cached",
    "never_seen": "nobody has published them in this namespace since the cache began",
    "evicted": "they were cached and made room",
    "forgotten": "they were probably cached, too long ago to say when they went",
    "no_state": "their KV is cached, but there is no state at the end of it to go on from",
    **{f"no_{kind}": f"the {kind} that is needed in front of them has gone" for kind in SPANS},
    "no_room": "the host has them, and the device had no room for them",
    "refused": "the host has them, and the device had no room for them",
    "copy_failed": "the host has them, and their copy to the device failed",
    "timed_out": "the host has them, and their copy to the device took too long",
    "tier_failed": "the host has them, and is left alone after copies that failed",
    "dearer": "the host has them, and computing them is estimated to be faster than their copy",
    "arriving": "the host has them, and another request that computes them is sooner",
}
_EVICTIONS_MAX = 16_384  # remembered of a log; the tree itself remembers fewer


class Reason(msgspec.Struct, frozen=True):
    """Tokens that are not reused, why, and what is known of it."""

    why: str
    tokens: int
    text: str
    details: list[str] = []


class Weighed(msgspec.Struct, frozen=True):
    """A way to the end of a prompt, by which `saved` tokens need not be computed.

    `seconds`: what it was estimated to take. `taken`: it was the best of those that were open.
    """

    way: str
    saved: int
    seconds: float
    taken: bool


class Explanation(msgspec.Struct, frozen=True):
    """How far a prompt of `tokens` was cached; the tokens of `reasons` add up to the rest.

    Of the `usable` tokens the device had `device`, the others were to be loaded from the host;
    `state_tier` says where the state at their end was. `remedies` say what would have made more of
    it a hit, `weighed` between what was chosen when it was opened, `later` what became of it.
    """

    request: str
    namespace: tuple[str, str]
    tokens: int
    usable: int
    device: int
    state_tier: str
    kv_prefix: int
    branch_point: int | None
    reasons: list[Reason]
    remedies: list[str]
    later: list[str]
    weighed: list[Weighed] = []


# -- of a live cache ------------------------------------------------------------------------------


def explain_live(core: Core, key: TokenKey, limit: int) -> Explanation:
    """What a lookup of the first `limit` tokens finds now, and why no more. A pure read.

    For the operator: it also says what other namespaces hold of the same tokens.
    """
    match = core.run(m.Match(key, limit))
    assert isinstance(match, Match)
    page_bytes = core.tree.radix.page_bytes
    walk = core.tree.radix.walk(key, limit // core.config.page_size * page_bytes)
    beyond = (node for node in walk.path if node.end > match.usable)
    bare = [node.end for node in beyond if not state_anywhere(node)]
    details: dict[str, list[str]] = {
        "no_state": [f"nodes without a state end at {bare}"] if bare else [],
        "evicted": [_made_room(match.evicted_by, f"use {match.evicted_at} of {core.tree.now}")],
        "never_seen": list(_elsewhere(core, key, limit, match.kv_prefix)),
    }
    lost = {str(why): tokens for why, tokens in match.lost.items()}
    return Explanation(
        request="",
        namespace=key.namespace,
        tokens=match.tokens,
        usable=match.usable,
        device=match.device,
        state_tier=match.state_tier,
        kv_prefix=match.kv_prefix,
        branch_point=match.branch_point,
        reasons=_reasons(lost, details),
        remedies=_remedies(lost, match.usable, match.branch_point, core.config.page_size),
        later=[],
    )


def _elsewhere(core: Core, key: TokenKey, limit: int, known: int) -> Iterator[str]:
    page_size = core.config.page_size
    for adapter, salt, marks in islice(core.tree.radix.roots, _NAMESPACES_MAX):
        if (adapter, salt, marks) == key.root:
            continue
        other = TokenKey(key.data, type(key.namespace)(adapter, salt), marks)
        walk = core.tree.radix.walk(other, limit // page_size * core.tree.radix.page_bytes)
        tokens = (walk.path[-1].end if walk.path else 0) + walk.inside // TOKEN_BYTES
        if tokens > known:
            yield f"namespace {(adapter, salt)} has {tokens} tokens of them and shares none"


# -- from a log -----------------------------------------------------------------------------------


def explain_request(path: str | Path, request: str, run: int | None = None) -> Explanation:
    """Explain what the log says of a request, or of the owner of a lease, by its name.

    The last one of that name, in the run `run` or the last that has it. Needs the events of level
    `info`; with all of them it also says which states were lost, and when. Raises `InvalidRequest`
    when the log has no such request.
    """
    history, story = History(), _Story()
    for entry in read_log(path):
        event = entry.event
        history.add(entry.time, event)
        if isinstance(event, RuntimeStarted):
            story.page_size = event.page_size
            story.evictions.clear()
        elif isinstance(event, Evicted):
            story.remember(entry.time, event)
        if event.request != request or (run is not None and history.run != run):
            continue
        if isinstance(event, RequestOpened | Acquired):
            story.begin(entry.time, event, history)
        elif story.opened is not None:
            story.went_on(entry.time, event)
    if story.opened is None:
        where = "" if run is None else f" in run {run}"
        raise InvalidRequest(f"{path} has no request {request!r}{where}")
    return story.explanation()


class _Story:
    """What is known of one request."""

    def __init__(self) -> None:
        self.page_size = 1
        self.opened: RequestOpened | Acquired | None = None
        self.evictions: dict[tuple[int, str], tuple[float, Evicted]] = {}
        self._time = 0.0
        self._details: dict[str, list[str]] = {}
        self._later: list[str] = []
        self._published = 0
        self._lost: dict[str, int] = {}
        self._fallen = 0

    def remember(self, time: float, event: Evicted) -> None:
        """An eviction, of which somebody may yet ask."""
        self.evictions[event.use, event.request] = time, event
        if len(self.evictions) > _EVICTIONS_MAX:
            del self.evictions[next(iter(self.evictions))]

    def begin(self, time: float, event: RequestOpened | Acquired, history: History) -> None:
        """It was opened here; what is known of the tree at this instant is in `history`."""
        self.opened, self._time, self._later = event, time, []
        self._published = event.usable
        self._details = {}
        self._lost, self._fallen = dict(event.lost), 0
        if "evicted" in event.lost:
            found = self.evictions.get((event.evicted_at, event.evicted_by))
            self._details["evicted"] = [self._eviction(event, found)]
        if "no_state" in event.lost:
            known = not history.incomplete and bool(history.path(event.reached))
            lost = [lost for node in history.path(event.reached) for lost in node.lost]
            self._details["no_state"] = list(self._states(event, lost, known))

    def _eviction(
        self, event: RequestOpened | Acquired, found: tuple[float, Evicted] | None
    ) -> str:
        if found is None:
            return _made_room(event.evicted_by, f"use {event.evicted_at} of the tree")
        time, evicted = found
        chosen = [victim for victim in evicted.victims if victim.what not in ("state", "span")]
        scores = ", ".join(f"{v.score} (tokens up to {v.end})" for v in chosen[:3])
        return (
            f"{_made_room(evicted.request, _ago(self._time - time))}, turn {evicted.turn}; "
            f"{evicted.policy or 'the policy'} gave the victims {scores or 'no score'}"
        )

    def _states(
        self, event: RequestOpened | Acquired, lost: list[LostState], known: bool
    ) -> Iterator[str]:
        between = [one for one in lost if event.usable < one.position <= event.kv_prefix]
        for one in between:
            whom = f" for {one.by}" if one.by else ""
            yield (
                f"there was a state at {one.position}; it went {_ago(self._time - one.time)}"
                f"{whom} ({one.why}, score {one.score})"
            )
        if known and not between:
            yield "nobody has made a state there since the KV was published"
        if not known:
            yield "the log does not tell of nodes (level debug does), so what states were lost"

    def went_on(self, time: float, event: Event) -> None:
        """Something happened to it afterwards."""
        after = f"after {time - self._time:.3f} s"
        if isinstance(event, FellBack):
            for why, tokens in event.lost.items():
                self._lost[why] = self._lost.get(why, 0) + tokens
                self._fallen += tokens
            self._later.append(f"{after}: a load did not come, stood on {event.boundary}")
        elif isinstance(event, Waited):
            self._later.append(f"{after}: waited for {event.pages} pages and {event.states} states")
        elif isinstance(event, Granted) and event.asked != event.turn:
            self._later.append(f"{after}: was given what it had waited for")
        elif isinstance(event, Refused):
            self._later.append(f"{after}: {event.what} refused: {event.why}")
        elif isinstance(event, Inserted) and event.published > self._published:
            self._published = event.published
            state = "with a state" if event.state == "adopted" else "without a new state"
            self._later.append(f"{after}: published up to {event.published}, {state}")
        elif isinstance(event, RequestEnded):
            stood = 0 if self.opened is None else self.opened.usable - self._fallen
            taken = event.reused - stood
            over = f", took {taken} over from others" if taken > 0 else ""
            over += f", loaded {event.loaded} from the host" if event.loaded else ""
            self._later.append(f"{after}: {event.how}, computed {event.computed}{over}")

    def explanation(self) -> Explanation:
        """The whole explanation."""
        event = self.opened
        assert event is not None
        usable = event.usable - self._fallen
        remedies = _remedies(self._lost, usable, event.branch_point, self.page_size)
        if isinstance(event, RequestOpened) and event.wanted:
            wanted = ", ".join(f"{position} ({why})" for position, why in event.wanted)
            remedies.append(f"for the next one, it was asked to leave states at {wanted}")
        return Explanation(
            request=event.request,
            namespace=event.namespace,
            tokens=event.tokens,
            usable=usable,
            device=min(usable, event.usable if event.device is None else event.device),
            state_tier=event.state_tier,
            kv_prefix=event.kv_prefix,
            branch_point=event.branch_point,
            reasons=_reasons(self._lost, self._details),
            remedies=remedies,
            later=self._later,
            weighed=_weighed(event) if isinstance(event, RequestOpened) else [],
        )


# -- in words -------------------------------------------------------------------------------------


def _reasons(lost: dict[str, int], details: dict[str, list[str]]) -> list[Reason]:
    return [
        Reason(why, tokens, _MEANING.get(why, why), details.get(why, []))
        for why, tokens in lost.items()
    ]


def _weighed(event: RequestOpened) -> list[Weighed]:
    """What was weighed; a load is taken as far as it goes, anything else leaves what there is."""
    if "arriving" in event.lost:
        taken = "wait"
    elif event.usable == event.device:
        taken = "recompute"
    else:
        taken = "load"
    return [
        Weighed(way, saved, seconds, way == taken and (way != "load" or saved == event.usable))
        for way, saved, seconds in event.alternatives
    ]


def _remedies(lost: dict[str, int], usable: int, branch: int | None, page_size: int) -> list[str]:
    remedies: list[str] = []
    if branch is not None:
        saved = branch - usable - sum(lost.get(why, 0) for why in ("dearer", "arriving"))
        remedies.append(f"a state at {branch} would have saved {saved} tokens")
    if "evicted" in lost:
        pages = -(-lost["evicted"] // page_size)
        remedies.append(
            f"{pages} more pages for the cache, a host tier with room for them, or a policy that "
            "had kept these"
        )
    if "no_room" in lost:
        remedies.append(f"room on the device for the {lost['no_room']} tokens that the host had")
    return remedies


def _made_room(by: str, when: str) -> str:
    return f"the first of them made room for {by or 'a caller of evict'} ({when})"


def _ago(seconds: float) -> str:
    return f"{seconds:.3f} s before"


def _in_words(one: Weighed) -> str:
    what = {
        "load": f"load what the host has, up to {one.saved}",
        "wait": f"wait for another request that computes up to {one.saved}",
        "recompute": f"compute from {one.saved} on",
    }
    return f"{1e3 * one.seconds:.3g} ms: {what[one.way]}{' (taken)' if one.taken else ''}"


def readable(explanation: Explanation) -> str:
    """The explanation as text, for a terminal."""
    e = explanation
    name = f"request {e.request}: " if e.request else ""
    namespace = f" in namespace {e.namespace}" if any(e.namespace) else ""
    host = e.usable - e.device
    where = f" ({e.device} on the device, {host} from the host)" if host else ""
    state = f"; the state at {e.usable} was on the {e.state_tier}" if e.state_tier else ""
    lines = [
        f"{name}{e.usable} of {e.tokens} tokens reusable{where}, KV of {e.kv_prefix}"
        f"{namespace}{state}",
        f"not reused: {sum(reason.tokens for reason in e.reasons)}",
    ]
    for reason in e.reasons:
        lines.append(f"  {reason.tokens:>8}  {reason.why}: {reason.text}")
        lines.extend(f"            - {detail}" for detail in reason.details)
    weighed = [_in_words(one) for one in e.weighed]
    taken = "ways to the end of the prompt, as estimated when it was opened"
    for title, items in (
        (taken, weighed),
        ("what would have helped", e.remedies),
        ("afterwards", e.later),
    ):
        if items:
            lines.append(f"{title}:")
            lines.extend(f"  - {item}" for item in items)
    return "\n".join(lines)
