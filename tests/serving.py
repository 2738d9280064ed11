"""A cache with a model whose bytes can be checked, for tests of the actors and the runtime.

The model keeps, for each token, a digest of everything up to it: in the page as its KV, and as the
state. A pass reads all it builds upon and fails where a byte is not what its prompt says, so a page
or state that was reused too early, copied too late or taken from another prompt does not go unseen.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
from phloem.cuda_streams.dispatch import Fault
from phloem.cuda_streams.engine import CopyEngine, Post, Ticket
from phloem.cuda_streams.threads import ThreadEngine, WorkerStream
from phloem.events import Event

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
        self._shut = False
        self._passes = 0  # so many copies may pass though it is shut
        self._passed: set[int] = set()
        self._loaded: int | None = None  # so many layers of each load may land

    def loads_up_to(self, layers: int | None) -> None:
        """Only so many leading layers of each load may land; None: all."""
        with self._changed:
            self._loaded = layers
            self._changed.notify_all()

    def shut(self) -> None:
        self._shut = True

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._loaded = None
            self._changed.notify_all()

    def let_one_pass(self) -> None:
        with self._changed:
            self._passes += 1
            self._changed.notify_all()

    def __call__(self, ticket: Ticket, layer: int) -> None:
        """Called by the engine's worker before each layer."""
        with self._changed:
            if ticket.batch.channel == "h2d":
                went_on = self._changed.wait_for(
                    lambda: self._loaded is None or layer < self._loaded, 30
                )
                assert went_on, "nobody let the load go on"
            if ticket.seq not in self._passed:
                opened = self._changed.wait_for(lambda: self._passes or not self._shut, 30)
                assert opened, "nobody opened the gate"
                if self._shut:
                    self._passes -= 1
                self._passed.add(ticket.seq)
        if self.error is not None:
            raise self.error


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
        """Wait for what threads still have to tell; what does not come within seconds never does.

        The test then says what is wrong, by its own assertion.
        """
        deadline = asyncio.get_running_loop().time() + 5
        while not holds() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  any test's condition
            await asyncio.sleep(0.0005)

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
            )

        await self.until(quiet)
        assert quiet(), self.cache.stats()

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


def _threads(post: Post, fault: Fault) -> ThreadEngine:
    return ThreadEngine(post, fault=fault)


@asynccontextmanager
async def house(
    *,
    inline: bool = True,
    layout: ModelLayout = HYBRID,
    pages: int = 32,
    states: int = 8,
    check_empty: bool = True,
    engine: Callable[[Post, Fault], CopyEngine] = _threads,
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
