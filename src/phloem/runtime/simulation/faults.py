"""What can go wrong in a simulated run, and how.

Each fault is a model of something real, described here in prose. A run's `Faults` says how likely
each is; a swarm draws that anew for every seed and turns many of them fully off, since faults hide
each other. All draws come from the run's one generator.

Copies
    *fail*: before some layer the engine reports an error, which may spare some leading rows; what
    else had landed is undefined, and poison in a simulation. The tree must show nothing of it, the
    waiter gets `CopyFailed`.
    *slow*: a copy takes up to a hundred times as long as the link says.
    *hang*: a copy stands still for seconds, longer than time-outs and most requests. Its memory
    must not be used again until it ends, whoever has given up on it by then.
    *reorder*: a channel runs what is ready in any order instead of the order of submission.
    *late*: what an engine or stream tells the loop arrives late, in the order in which it happened:
    copies and steps have ended long before the runtime hears of it.
    *tier_away*: the host tier cannot be reached for milliseconds to seconds, then it can again.
    Every copy to or from it fails at its next layer meanwhile; the rest goes on.
    *dead*: the engine is lost at some instant; every copy in flight and every later one fails. Once
    for all: what still can be served without copies is served, the rest is refused.
Memory
    *pin_refused*: the host tier's memory is not there, or cannot be pinned, when the runtime is
    made, for the pages or only for the states after them. The server goes on without that tier.
Callers
    *cancel*: a client's task is cancelled between any two callbacks of the loop, so at any of its
    suspension points, also after its answer was given and before it has heard of it.
    *forget*: a client drops a lease without releasing it.
    *reset*: the cache is reset while requests run.
    *evict*: somebody evicts at random, and everything now and then.
    *abort*: somebody else, a watchdog, aborts a request that its own task is busy with.
    *abandon*: a forward pass fails before or after it was launched, and what it has written is
    rubbish; its requests fall back.
Runtime
    *queued*: callers do not take their turn inline. In a mixed run this is switched again and
    again; results must not depend on it.
    *narrow*: the queue of callers has room for a few messages only, and a visit of the loop takes
    few turns, so that back-pressure is the rule.

Points of injection cost nothing in production: the engine's `fault`, `delay`, `order_seed` and
`post`, which are arguments of it; the table of handlers of every actor, which the watch replaces;
the loop itself. There is no call into this file from code that is not a simulation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import torch

from phloem.cuda_streams.engine import CopyBatch, Ticket
from phloem.cuda_streams.fences import Post
from phloem.cuda_streams.host import HostMemory
from phloem.errors import CopyFailed, EngineDead, HostMemoryShort, InvalidRequest
from phloem.runtime.simulation.loop import SimLoop

__all__ = [
    "FAULTS", "FaultyLink", "Faults", "InjectedFault", "Inline", "host_memory", "late_post",
    "refused_memory", "swarm",
]  # fmt: skip

Inline = Literal["on", "off", "mixed"]

_SECOND = 1_000_000_000


class InjectedFault(Exception):
    """What a copy or a step fails with when a simulation says so."""


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How likely each fault is; 0 is off. `inline` says how callers take their turns.

    `copy_fail`, `copy_slow`, `copy_hang`: for each layer of a copy. `reorder`, `late`, `narrow`:
    true or not for the whole run. `dead`, `tier_away`, `reset`, `evict`, `abort`: expected number
    in a virtual second. `pin_refused`: for each runtime. `cancel`: for each step of the loop and
    living client. `forget`, `abandon`: for each request, for each pass.
    """

    copy_fail: float = 0.0
    copy_slow: float = 0.0
    copy_hang: float = 0.0
    reorder: bool = False
    late: bool = False
    tier_away: float = 0.0
    pin_refused: float = 0.0
    dead: float = 0.0
    cancel: float = 0.0
    forget: float = 0.0
    reset: float = 0.0
    evict: float = 0.0
    abort: float = 0.0
    abandon: float = 0.0
    narrow: bool = False
    inline: Inline = "on"

    def only(self, names: Iterable[str]) -> Faults:
        """These faults with all but the named ones off."""
        kept = set(names)
        if unknown := sorted(kept - set(FAULTS)):
            raise InvalidRequest(f"no fault is called {unknown[0]!r}; there are {FAULTS}")
        none = Faults()
        return msgspec.structs.replace(
            self, **{name: getattr(none, name) for name in FAULTS if name not in kept}
        )

    @property
    def on(self) -> tuple[str, ...]:
        """The names of the faults that can happen."""
        none = Faults()
        return tuple(name for name in FAULTS if getattr(self, name) != getattr(none, name))


FAULTS: tuple[str, ...] = tuple(field.name for field in msgspec.structs.fields(Faults))


def swarm(rng: random.Random, *, share: float = 0.4) -> Faults:
    """Faults for one seed: each is off, or on with a drawn likelihood, with probability `share`.

    Every eighth seed has none at all: what is then still found needs no fault.
    """
    quiet = rng.random() < 0.125

    def drawn(most: float) -> float:
        on, likelihood = rng.random() < share, rng.random()
        return most * likelihood**2 if on and not quiet else 0.0

    return Faults(
        copy_fail=drawn(0.2),
        copy_slow=drawn(0.5),
        copy_hang=drawn(0.05),
        reorder=drawn(1.0) > 0,
        late=drawn(1.0) > 0,
        tier_away=drawn(4.0),
        pin_refused=drawn(1.0),
        dead=drawn(0.05) if rng.random() < 0.25 else 0.0,
        cancel=drawn(0.01),
        forget=drawn(0.1),
        reset=drawn(3.0),
        evict=drawn(2.0),
        abort=drawn(4.0),
        abandon=drawn(0.05),
        narrow=drawn(1.0) > 0,
        inline="on" if quiet else rng.choice(("on", "off", "mixed")),
    )


class Outages:
    """When something is away: intervals drawn in advance, so that no timer stands for them."""

    def __init__(self, per_second: float, rng: random.Random) -> None:
        self._per_second = per_second
        self._rng = rng
        self._from_ns = self._until_ns = 0
        self._draw()

    def _draw(self) -> None:
        if self._per_second:
            gap = round(self._rng.expovariate(self._per_second) * _SECOND)
            self._from_ns = self._until_ns + gap
            self._until_ns = self._from_ns + round(_SECOND * 10 ** self._rng.uniform(-3, 0.5))

    def now(self, now_ns: int) -> bool:
        """Whether it is away at this instant, which is not before any asked for so far."""
        if not self._per_second:
            return False
        while now_ns >= self._until_ns:
            self._draw()
        return now_ns >= self._from_ns


class FaultyLink:
    """The `fault` and the `delay` of a virtual engine; `injected` hears of each fault.

    `cost_ns` is what a copy takes beyond what the engine's own link says.
    """

    def __init__(
        self,
        faults: Faults,
        rng: random.Random,
        injected: Callable[[str], None],
        now_ns: Callable[[], int],
        cost_ns: Callable[[CopyBatch], int] | None = None,
    ) -> None:
        self.dead = False
        self._faults = faults
        self._rng = rng
        self._injected = injected
        self._now_ns = now_ns
        self._cost_ns = cost_ns
        self._outages = Outages(faults.tier_away, random.Random(rng.getrandbits(64)))

    def fault(self, ticket: Ticket, layer: int) -> None:
        """See `phloem.cuda_streams.dispatch.Fault`."""
        if self.dead:
            raise EngineDead("the simulated device is lost")
        if ticket.batch.channel != "d2d" and self._outages.now(self._now_ns()):
            self._injected("tier_away")
            raise InjectedFault("the host tier cannot be reached")
        if self._faults.copy_fail and self._rng.random() < self._faults.copy_fail:
            self._injected("copy_fail")
            # Not drawn: so seeds mean what they meant before there was such a thing.
            if spared := ticket.seq % (len(ticket.batch.items[0].target_ids) + 1):
                raise CopyFailed(f"{ticket!r} fails at layer {layer} in part", rows_ok=spared)
            raise InjectedFault(f"{ticket!r} fails at layer {layer}")

    def delay(self, ticket: Ticket, layer: int) -> int:
        """See `phloem.cuda_streams.virtual.Delay`."""
        faults, rng = self._faults, self._rng
        extra = 0 if layer or self._cost_ns is None else self._cost_ns(ticket.batch)
        if faults.copy_slow and rng.random() < faults.copy_slow:
            self._injected("copy_slow")
            extra += rng.randrange(1_000_000)
        if faults.copy_hang and rng.random() < faults.copy_hang:
            self._injected("copy_hang")
            extra += rng.randrange(_SECOND, 20 * _SECOND)
        return extra


def refused_memory(after: int) -> Callable[[int, int], HostMemory]:
    """Memory of the host tier that is there `after` times, and then is not."""
    given = 0

    def memory(count: int, row_bytes: int) -> HostMemory:
        nonlocal given
        given += 1
        if given > after:
            raise HostMemoryShort(count * row_bytes, 0, "the simulation says so")
        return host_memory(count, row_bytes)

    return memory


def host_memory(count: int, row_bytes: int) -> HostMemory:
    """Memory of a simulated host tier: whatever the machine has left."""
    return HostMemory(torch.zeros((count, row_bytes), dtype=torch.uint8), max(1, count))


def late_post(loop: SimLoop) -> Post:
    """A post whose functions run late, each after the one before it."""
    last_ns = 0

    def post(fn: Callable[[], None]) -> None:
        nonlocal last_ns
        last_ns = max(last_ns, loop.now_ns + loop.rng.randrange(2_000_000))
        loop.clock.call_at(last_ns, fn)

    return post
