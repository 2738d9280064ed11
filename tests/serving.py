"""A cache with a model whose bytes can be checked, for tests of the actors and the runtime.

The model keeps, for each token, a digest of everything up to it: in the page as its KV, and as the
state. A pass reads all it builds upon and fails where a byte is not what its prompt says, so a page
or state that was reused too early, copied too late or taken from another prompt does not go unseen.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from phloem import (
    CacheConfig,
    CacheRuntime,
    DevicePools,
    ModelLayout,
    Request,
    StateSpec,
    Step,
)
from phloem.actors.tree.keys import Namespace
from phloem.actors.tree.tiering import CLOSED_MS
from phloem.cuda_streams.engine import CopyEngine, Post, Ticket
from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.hazards import Hazard, HazardChecker
from phloem.cuda_streams.remains import Remains
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.cuda_streams.workers import WorkerStream
from phloem.events import Event, RequestEnded
from phloem.runtime.simulation import SimLoop

PAGE = 4
HYBRID = ModelLayout.hybrid(
    kv_layers=2,
    kv_heads=1,
    head_dim=1,
    kv_dtype="int64",
    states=[StateSpec("digest", (2,), "int64", layers=2)],
)
ATTENTION = ModelLayout.attention_only(layers=2, kv_heads=1, head_dim=1, kv_dtype="int64")
_DEFAULT = Namespace()


def run(first: int, count: int) -> list[int]:
    """`count` tokens from `first` on."""
    return list(range(first, first + count))


class Gate:
    """Holds copies back while it is shut, and fails them when it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._changed = threading.Condition()
        self._held: list[Callable[[], None]] = []  # copies of a virtual engine
        self._shut = False
        self._passes = 0  # so many copies may pass though it is shut
        self._passed: set[int] = set()
        self._loaded: int | None = None  # so many layers of each load may land
        self._hanging: str | None = None

    def loads_up_to(self, layers: int | None) -> None:
        """Only so many leading layers of each load may land; None: all."""
        with self._changed:
            self._loaded = layers
            self._tell()

    def shut(self) -> None:
        self._shut = True

    def hang(self, kind: str) -> None:
        """Copies with a label that begins so hang until the gate is opened."""
        self._hanging = kind

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._loaded = self._hanging = None
            self._tell()

    def let_one_pass(self) -> None:
        with self._changed:
            self._passes += 1
            self._tell()

    def lets(self, ticket: Ticket, layer: int) -> bool:
        """Whether a layer may be copied now."""
        if self._hanging is not None and ticket.batch.label.startswith(self._hanging):
            return False
        if ticket.batch.channel == "h2d" and self._loaded is not None and layer >= self._loaded:
            return False
        if ticket.seq not in self._passed:
            if self._shut and not self._passes:
                return False
            self._passes -= self._shut
            self._passed.add(ticket.seq)
        return True

    def __call__(self, ticket: Ticket, layer: int) -> None:
        """Called before each layer; a worker's thread waits here."""
        with self._changed:
            assert self._changed.wait_for(partial(self.lets, ticket, layer), 60), "never opened"
        if self.error is not None:
            raise self.error

    def when_changed(self, fn: Callable[[], None]) -> None:
        """For engines that have no thread to wait."""
        self._held.append(fn)

    def _tell(self) -> None:
        self._changed.notify_all()
        held, self._held = self._held, []
        for fn in held:
            fn()


class GatedEngine(VirtualEngine):
    """A virtual engine whose copies wait at a gate, on the seeded loop; misuse ends the run."""

    def __init__(self, loop: SimLoop, post: Post, gate: Gate) -> None:
        def tell(hazard: Hazard) -> None:
            loop.fail(AssertionError(hazard))

        super().__init__(loop.clock, post=post, fault=gate, hazards=HazardChecker(tell))
        self._gate = gate

    def _step(
        self, ticket: Ticket, remains: Remains, steps: list[tuple[int, ...]], number: int
    ) -> None:
        if self._running.get(ticket.batch.channel) is not ticket:
            return  # it was ended while it waited here
        waits = number < len(steps) and not all(
            self._gate.lets(ticket, layer) for layer in steps[number]
        )
        if waits and self.interrupted(ticket) is None:
            again = partial(self._step, ticket, remains, steps, number)
            self._gate.when_changed(lambda: self._clock.call_at(self._clock.now_ns(), again))
        else:
            super()._step(ticket, remains, steps, number)


async def until(holds: Callable[[], object]) -> None:
    """Wait until it holds, at most a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 60
    while not holds() and loop.time() < deadline:  # noqa: ASYNC110  any test's condition
        await asyncio.sleep(0.0005)


async def too_long(cache: CacheRuntime, kind: str) -> None:
    """Once copies with a label that begins so may run, they have taken too long; no others have.

    As when `copy_timeout_s` has passed, which on a busy machine might be too short for the others.
    """
    transfer = cache.core.transfer

    def watched() -> set[int]:
        return {
            op
            for _, op in transfer._deadlines
            for _, ticket in transfer.tickets_of(op)
            if ticket.batch.label.startswith(kind)
        }

    await until(watched)
    late = watched()
    assert late, f"there is no {kind}"
    deadlines = ((float("-inf") if op in late else when, op) for when, op in transfer._deadlines)
    transfer._deadlines = deque(sorted(deadlines))
    transfer.look_at_clock()
    cache.core.domain.drain()  # whoever waits for them is told


@dataclass
class House:
    """An open runtime and what a test wants to look at or hold back."""

    cache: CacheRuntime
    stream: WorkerStream
    gate: Gate
    events: list[Event] = field(default_factory=list)

    def of_type(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what threads still have to tell; what does not come within a minute never does.

        The test then says what is wrong, by its own assertion.
        """
        await until(holds)

    async def settled(self) -> None:
        """Wait until no copy or step touches anything and nothing is on its way."""
        core = self.cache.core
        await self.stream.call(lambda: None)

        def quiet() -> bool:
            core.domain.drain()
            stats = self.cache.stats()
            return not (
                stats.kv.parked
                or stats.state.parked
                or stats.copies_in_flight
                or core.tree.sweeping
                or self._leases_given_up()
            )

        await self.until(quiet)
        assert quiet(), self.cache.stats()

    def _leases_given_up(self) -> bool:
        """Leases that end with what reads under them, of requests that have ended or suspend."""
        core = self.cache.core
        ended = {event.request for event in self.of_type(RequestEnded)} - core.requests.keys()
        return any(lease.owner in ended for lease in core.tree.leases.live.values()) or any(
            request._lease_given_up and request._lease.live for request in core.requests.values()
        )

    def nothing_owned(self) -> bool:
        """Nobody but the tree owns anything, and nobody wants to."""
        stats = self.cache.stats()
        return not (
            stats.kv.granted
            or stats.state.granted
            or stats.requests
            or stats.waiting
            or stats.tree.leases
        )

    async def empty(self) -> None:
        """Nobody owns anything but the tree, and the tree gives all of it back."""
        await self.settled()
        await self.until(self.nothing_owned)
        cache = self.cache
        await cache.audit()
        stats = cache.stats()
        assert self.nothing_owned(), stats
        assert not cache.core.ledger.accounts and not cache.core.tree_actor.operations
        for _ in range(8):  # what cannot be copied may let go what is above only then
            await cache.evict(pages=stats.kv.tree, states=stats.state.tree)
            await self.settled()  # under write-back it goes behind its copies
            stats = cache.stats()
            if not stats.kv.tree and not stats.state.tree:
                break
        assert stats.kv.free == stats.kv.size and stats.state.free == stats.state.size, stats
        await cache.audit()


def _suited(post: Post, gate: Gate) -> CopyEngine:
    """Of threads, or of the loop's virtual time."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, SimLoop):
        return GatedEngine(loop, post, gate)
    return ThreadEngine(post, fault=gate)


@asynccontextmanager
async def house(
    *,
    inline: bool = True,
    layout: ModelLayout = HYBRID,
    pages: int = 32,
    states: int = 8,
    check_empty: bool = True,
    engine: Callable[[Post, Gate], CopyEngine] = _suited,
    **options: Any,
) -> AsyncIterator[House]:
    """An open runtime; at the end of a test everything must have come back.

    `engine` makes the one that copies, with a fault that it calls.
    """
    options.setdefault("page_size", PAGE)
    options.setdefault("state_chunk", PAGE)
    config = CacheConfig(
        layout=layout,
        device_pages=pages,
        device_states=states if layout.has_states else 0,
        inline=inline,
        **options,
    )
    gate = Gate()
    events: list[Event] = []

    async with CacheRuntime(
        config, events=events.append, engine=lambda post: engine(post, gate)
    ) as cache:
        stream = cache.worker_stream("model")
        here = House(cache, stream, gate, events)
        try:
            yield here
            gate.open()
            if check_empty:
                await here.empty()
        finally:
            gate.open()
            stream.close()


def dump(cache: CacheRuntime) -> dict[str, object]:
    """Everything that a refused call must leave as it was."""
    core = cache.core
    tree, ledger = core.tree, core.ledger
    return {
        "cells": (ledger.kv._cells.tobytes(), ledger.state._cells.tobytes()),
        "free": (ledger.kv.free_places.tobytes(), ledger.state.free_places.tobytes()),
        "accounts": [(a.number, a.owner, a.pages, a.states) for a in ledger.accounts.values()],
        "figures": tree.figures(),
        "nodes": [
            (node.id, node.edge, list(node.pages), node.state, node.leases, node.stamp)
            for node in tree.radix
        ],
        "roots": sorted(tree.radix.roots),
        "leases": [
            (lease.id, lease.anchor.id, lease.has_state, tuple(lease.wanted))
            for lease in tree.leases.live.values()
        ],
        "waiting": core.allocator.waiting,
        "requests": {
            name: (r.computed, r.boundary, list(r.page_table()), r.state_slot, r.status, r.length)
            for name, r in core.requests.items()
        },
        "copies": core.transfer.in_flight,
    }


# -- the model -------------------------------------------------------------------------------------


def digests(tokens: Sequence[int], namespace: Namespace = _DEFAULT) -> list[int]:
    """What the model keeps for each token, from the empty prefix on: `len(tokens) + 1` values."""
    value = int.from_bytes("\0".join(namespace).encode()[:4].ljust(4, b"\1"), "little")
    chain = [value]
    for token in tokens:
        value = (value * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 62)
        chain.append(value)
    return chain


@dataclass(frozen=True)
class Row:
    """One request in a pass: where it reads and writes, taken when the pass is made."""

    tokens: tuple[int, ...]
    start: int
    end: int
    table: array[int]
    slot: int
    namespace: Namespace = _DEFAULT
    snapshot: tuple[int, int] | None = None  # slot and position
    trusted: int = 0  # the KV up to here was looked at before, and may belong to others by now

    @classmethod
    def of(
        cls,
        request: Request,
        tokens: Sequence[int],
        end: int,
        namespace: Namespace = _DEFAULT,
        snapshot: tuple[int, int] | None = None,
    ) -> Row:
        return cls(
            tuple(tokens),
            request.computed,
            end,
            request.page_table(),
            request.state_slot or 0,
            namespace,
            snapshot,
        )


def _page_parts(pools: DevicePools) -> list[Any]:
    return [tensor for layer in pools.kv.values() for tensor in (layer.k, layer.v)]


def read_kv(pools: DevicePools, table: Sequence[int], count: int) -> list[list[int]]:
    """The values of the first `count` tokens, once for each part of the pool."""
    pages = list(table[: -(-count // pools.page_size)])
    return [part[pages].flatten().tolist()[:count] for part in _page_parts(pools)]


def read_state(pools: DevicePools, slot: int) -> list[list[int]]:
    """Digest and position, once for each layer."""
    return [layer["digest"][slot].tolist() for layer in pools.states.values()]


def write_state(pools: DevicePools, slot: int, digest: int, position: int) -> None:
    for layer in pools.states.values():
        layer["digest"][slot, 0] = digest
        layer["digest"][slot, 1] = position


def forward(pools: DevicePools, rows: Sequence[Row]) -> None:
    """One pass: checks what each row reads, writes what it computes. For a worker's thread."""
    for row in rows:
        chain = digests(row.tokens[: row.end], row.namespace)
        check_kv(pools, row.table, chain, row.start)
        if pools.states:
            check_state(pools, row.slot, chain, row.start)
        for position in range(row.start, row.end):
            page, inside = row.table[position // PAGE], position % PAGE
            for part in _page_parts(pools):
                part[page, inside] = chain[position + 1]
        if pools.states:
            write_state(pools, row.slot, chain[row.end], row.end)
            if row.snapshot is not None and row.start < row.snapshot[1] <= row.end:
                slot, position = row.snapshot
                write_state(pools, slot, chain[position], position)


def check_kv(pools: DevicePools, table: Sequence[int], chain: list[int], count: int) -> None:
    for values in read_kv(pools, table, count):
        assert values == chain[1 : count + 1], f"KV of pages {list(table)} is not its prompt's"


def check_state(pools: DevicePools, slot: int, chain: list[int], position: int) -> None:
    # The empty prefix has a cleared state; any other says what it is of.
    expected = [chain[position], position] if position else [0, 0]
    for state in read_state(pools, slot):
        assert state == expected, f"state {slot} is not that of its prompt at {position}: {state}"


def blocked(stream: WorkerStream) -> Fence:
    """What the worker is given from now on begins only when somebody has passed the fence."""
    fence = Fence(label="blocked")
    stream.wait(fence)
    return fence


async def rounds(count: int = 6) -> None:
    """Let everybody run who can, so many rounds of a loop; a seeded one has none, but time."""
    for _ in range(count):
        await asyncio.sleep(0)
    if isinstance(asyncio.get_running_loop(), SimLoop):
        await asyncio.sleep(0.001)


async def over(step: Step) -> None:
    """Wait until the worker is done with a step; a cancelled caller leaves it alone."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    step.fence.add_callback(lambda: None if ended.done() else ended.set_result(None))
    await ended


async def compute(
    here: House,
    request: Request,
    tokens: Sequence[int],
    end: int,
    *,
    namespace: Namespace = _DEFAULT,
    snapshot: tuple[int, int] | None = None,
) -> None:
    """One pass of one request on the worker, to its end."""
    with here.cache.step([request], stream=here.stream) as step:
        row = Row.of(request, tokens, end, namespace, snapshot)
        work = here.stream.run(forward, here.cache.pools, [row])
        step.launched({request: end})
    await over(step)
    work.result()


async def opened(here: House, tokens: Sequence[int], room: int = 6 * PAGE) -> Request:
    """A request that is ready, with room for `room` tokens in all."""
    request = await here.cache.open_request(tokens)
    await request.allocate(room - request.computed)
    await request.ready()
    return request


async def serve(
    here: House,
    tokens: Sequence[int],
    *,
    name: str | None = None,
    namespace: Namespace = _DEFAULT,
    chunk: int = 2 * PAGE,
    more: int = 0,
) -> int:
    """A request through its life; returns the tokens that it did not have to compute."""
    prompt = list(tokens)
    whole = [*prompt, *range(900, 900 + more)]
    async with here.cache.request(prompt, id=name, namespace=namespace) as request:
        await request.allocate(len(whole) - request.computed)
        await request.ready()
        while request.computed < len(prompt):
            await request.advance()
            _, end = request.next_stop(chunk)
            await compute(here, request, whole, end, namespace=namespace)
            await request.checkpoint()
        for token in whole[len(prompt) :]:
            request.extend([token])
            await compute(here, request, whole, request.length, namespace=namespace)
        reused = request._tokens_reused
        await request.finish()
    await here.until(lambda: not request.resources())
    assert not request.resources(), request.resources()
    return reused


async def seed(here: House, tokens: Sequence[int], *, namespace: Namespace = _DEFAULT) -> None:
    """Have the cache hold `tokens` (whole pages), with a state at their end."""
    async with here.cache.request(tokens, namespace=namespace, whole=True) as request:
        await request.allocate(len(tokens) - request.computed)
        await request.ready()
        if request.computed < len(tokens):
            await compute(here, request, tokens, len(tokens), namespace=namespace)
        await request.finish()
    await here.settled()


def later(here: House) -> None:
    """So much later by the runtime's clock that a closed host tier is tried again."""
    tiers = here.cache.core.tree_actor.tiers
    assert tiers is not None
    at = tiers._clock() + CLOSED_MS
    tiers._clock = lambda: at
