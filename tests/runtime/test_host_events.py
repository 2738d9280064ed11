"""What is told of data that move between the tiers: enough to know where each node's data are."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from serving import ATTENTION, HYBRID, PAGE, House, compute, house, later, run, seed

from phloem import ModelLayout
from phloem.events import (
    Event,
    Evicted,
    Inserted,
    KvPut,
    KvTaken,
    LeaseTaken,
    NodeAdded,
    NodeRemoved,
    NodesMerged,
    NodeSplit,
    ResetDone,
    StatePut,
    StateTaken,
    TailCut,
    TreeChanged,
)


@dataclass
class Seen:
    """A node as far as the events tell."""

    pages: dict[str, list[int]] = field(default_factory=lambda: {"device": [], "host": []})
    state: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})


class Mirror:
    """Follows the events of a runtime."""

    def __init__(self) -> None:
        self.nodes: dict[int, Seen] = {}
        self.added: Seen | None = None
        self.put: set[int] = set()

    def add(self, event: Event) -> None:
        match event:
            case TreeChanged(changes=changes):
                self.put.clear()
                for change in changes:
                    self.change(change)
            case Inserted(adopted=adopted):
                fresh = [page for page in adopted if page not in self.put]
                if fresh:
                    assert self.added is not None
                    self.added.pages["device"].extend(fresh)
                    self.added = None
            case ResetDone():
                self.nodes.clear()
            case _:
                pass

    def change(self, change: Any) -> None:
        match change:
            case NodeAdded(node=node):
                self.added = self.nodes[node] = Seen()
            case NodeSplit(node=node, upper=upper, tokens=tokens):
                below, above = self.nodes[node], Seen()
                self.nodes[upper] = above
                for tier, pages in below.pages.items():
                    above.pages[tier] = pages[: tokens // PAGE]
                    below.pages[tier] = pages[tokens // PAGE :]
            case NodesMerged(node=node, into=into):
                above, below = self.nodes.pop(node), self.nodes[into]
                for tier, pages in above.pages.items():
                    below.pages[tier] = pages + below.pages[tier]
            case NodeRemoved(node=node):
                del self.nodes[node]
            case TailCut(node=node, pages=count):
                del self.nodes[node].pages["device"][-count:]
            case KvPut(node=node, tier=tier, pages=pages):
                assert not self.nodes[node].pages[tier]
                self.nodes[node].pages[tier] = list(pages)
                self.put.update(pages if tier == "device" else ())
            case KvTaken(node=node, tier=tier):
                assert self.nodes[node].pages[tier]
                self.nodes[node].pages[tier] = []
            case StatePut(node=node, slot=slot, tier=tier):
                assert not self.nodes[node].state[tier]
                self.nodes[node].state[tier] = slot
            case StateTaken(node=node, tier=tier):
                assert self.nodes[node].state[tier]
                self.nodes[node].state[tier] = 0
            case _:
                pass


def check(here: House, mirror: Mirror) -> None:
    for event in here.events:
        mirror.add(event)
    here.events.clear()
    live = list(here.cache.core.tree.radix)
    assert mirror.nodes.keys() == {node.id for node in live}
    for node in live:
        seen, part = mirror.nodes[node.id], node.host
        assert seen.pages["device"] == node.pages.tolist()
        assert seen.state["device"] == node.state
        on_host = memoryview(b"" if part is None else part.page_ids).cast("i").tolist()
        assert seen.pages["host"] == on_host
        assert seen.state["host"] == (0 if part is None else part.state)


async def one(here: House, rng: random.Random) -> None:
    """Something that moves data, or a fault in it."""
    prompt = run(100 * rng.randrange(3), rng.randrange(2, 6) * PAGE + 1)
    if rng.random() < 0.3:
        prompt = prompt[: rng.randrange(PAGE, len(prompt))] + run(900, 2 * PAGE + 1)
    here.gate.error = RuntimeError("down") if rng.random() < 0.15 else None
    what = rng.random()
    if what < 0.15:
        await here.cache.evict(pages=rng.randrange(6), states=rng.randrange(2))
    elif what < 0.17:
        await here.cache.reset()
    else:
        request = await here.cache.open_request(prompt)
        try:
            for _ in range(2):  # less may have come than was promised
                await request.allocate(len(prompt) - request.computed)
                await request.ready()
            while request.computed < len(prompt):
                _, end = request.next_stop(PAGE)
                await compute(here, request, prompt, end)
                await request.checkpoint()
            await request.finish()
        except Exception:  # noqa: BLE001  a copy of its own failed
            request.abort()
    if rng.random() < 0.5:
        here.gate.error = None
        await here.settled()


@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
@pytest.mark.parametrize("write_policy", ["write_through", "selective", "write_back"])
@pytest.mark.parametrize("number", range(2))
async def test_where_each_nodes_data_are_is_told(
    layout: ModelLayout, write_policy: str, number: int
) -> None:
    """Also while the tier is left alone after failures, which it is now and then."""
    rng, mirror = random.Random(number), Mirror()
    async with house(
        layout=layout,
        pages=12,
        states=6,
        host_bytes=1300 if layout is HYBRID else 1200,
        write_policy=write_policy,
    ) as here:
        told = dict.fromkeys(("device", "host"), 0)
        for _ in range(90):
            await one(here, rng)
            if rng.random() < 0.3:
                later(here)
            here.cache.core.domain.drain()
            for event in here.of_type(Evicted):
                told[event.tier] += 1
            check(here, mirror)
        here.gate.error = None
        await here.settled()
        check(here, mirror)
        assert all(told.values()), f"nothing was evicted: {told}"


async def test_what_goes_without_a_copy_and_who_falls_back_is_told(inline: bool) -> None:
    async with house(inline=inline, pages=8, host_bytes="1MiB", write_policy="write_back") as here:
        prompt = run(1, 2 * PAGE)
        await seed(here, prompt)
        here.gate.error = RuntimeError("down")
        await here.cache.evict(pages=2)
        await here.settled()
        asked, gone = here.of_type(Evicted)
        assert [victim.what for victim in asked.victims] == ["leaving"]
        assert (gone.why, gone.pages, gone.states) == ("no_copy", 2, 1)
        here.gate.error = None

        await seed(here, prompt)
        await here.cache.evict(pages=2)
        await here.settled()
        here.gate.error = RuntimeError("down")
        request = await here.cache.open_request(prompt, whole=True)
        await here.until(lambda: not request.boundary)
        assert here.of_type(LeaseTaken)[-1].boundary == 0
        assert here.of_type(LeaseTaken)[-1].moved
        request.abort()
        here.gate.error = None
        await asyncio.sleep(0)


async def test_victims_on_the_host_are_told(inline: bool) -> None:
    """First what is on the device, too, which stays there; then the only copies."""
    async with house(inline=inline, pages=8, host_bytes="1MiB") as here:
        for first in (1, 100):
            await seed(here, run(first, 2 * PAGE))
        await here.cache.evict(pages=2)
        here.events.clear()
        tree, tell = here.cache.core.tree, here.cache.core.tree_actor
        for what, states in (("copy", 0), ("leaf", 1)):
            gone, actions = tree.evict_host(pages=2)
            assert tell._tell is not None
            tell._tell.evicted(gone, "asked", "", "host")
            tell._dispatch(actions)
            (victim,) = here.of_type(Evicted)[-1].victims
            assert (victim.what, victim.host_pages, victim.host_states) == (what, 2, states)
            assert (victim.pages, victim.states) == (0, 0) and victim.score
