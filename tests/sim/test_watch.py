"""The checkers: each one sees what it is there for, and says so in words a reader can act on."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from phloem import CacheConfig, CacheRuntime, Namespace, NoRoom, Request
from phloem.actors import messages as m
from phloem.actors.actions import TREE, FreeDeviceSlots
from phloem.events import CopyEnded, CopySubmitted, Freed, Granted, Parked, RuntimeStarted
from phloem.runtime.simulation import (
    QWEN3_NEXT_80B,
    Chunk,
    Faults,
    Outcome,
    SimDeadlock,
    SimModel,
    Simulation,
    SimulationFailed,
    TaggedTokens,
    Violation,
    sim_layout,
    simulate,
)
from phloem.runtime.simulation.places import Places

CONFIG = CacheConfig(
    layout=sim_layout(layers=2), page_size=4, state_chunk=4, device_pages=24, device_states=5
)
TOKENS = list(range(100, 121))


class Stage:
    """A runtime with a model, for scenarios of a few lines."""

    def __init__(self, sim: Simulation, cache: CacheRuntime) -> None:
        self.sim = sim
        self.cache = cache
        self.model: SimModel = sim.model(cache, QWEN3_NEXT_80B)
        self.stream = sim.stream("compute")

    async def compute(self, request: Request, tokens: TaggedTokens, end: int) -> None:
        """One pass over one request, waited for."""
        over = asyncio.Event()
        with self.cache.step([request], stream=self.stream) as step:
            self.model.enqueue([Chunk(request, tokens, request.computed, end)], self.stream)
            step.launched({request: end})
        step.fence.add_callback(over.set)
        await over.wait()

    async def serve(self, ids: list[int], name: str, namespace: Namespace | None = None) -> int:
        """Compute and publish a prompt; the tokens that were reused."""
        tokens = TaggedTokens(ids, namespace or Namespace(), 4)
        async with self.cache.request(ids, id=name, namespace=namespace) as request:
            await request.allocate(len(ids) - request.computed)
            await request.ready()
            reused = request.computed
            while request.computed < len(ids):
                await self.compute(request, tokens, request.next_stop(8)[1])
                await request.checkpoint()
            await request.finish()
            return reused


def _ignored(message: object) -> None:
    del message


def play(scene: Callable[[Stage], object], **how: object) -> Outcome[None]:
    async def scenario(sim: Simulation) -> None:
        async with sim.runtime(CONFIG) as cache:
            await scene(Stage(sim, cache))  # type: ignore[misc]

    return simulate(scenario, **how)  # type: ignore[arg-type]


def violation(scene: Callable[[Stage], object], **how: object) -> str:
    with pytest.raises(SimulationFailed) as caught:
        play(scene, **how)
    assert isinstance(caught.value.error, AssertionError), caught.value
    return str(caught.value.error)


def test_what_is_right_passes_and_is_verified() -> None:
    async def scene(stage: Stage) -> None:
        assert await stage.serve(TOKENS, "first") == 0
        assert await stage.serve(TOKENS, "second") == 20
        assert await stage.serve(TOKENS, "third", Namespace(salt="other")) == 0

    outcome = play(scene)
    assert outcome.bytes_checked > 1000
    assert outcome.audits > 10
    assert outcome.events["RequestEnded"] == 3


def test_wrong_bytes_in_a_page_are_seen_where_they_are_read() -> None:
    async def scene(stage: Stage) -> None:
        await stage.serve(TOKENS, "first")
        next(iter(stage.cache.pools.kv.values())).k[1, 2] += 1
        await stage.serve(TOKENS, "second")

    text = violation(scene)
    assert "reads token 2 from page 1, layer 0" in text
    assert "KV written for position 2" in text


def test_a_state_of_another_position_is_seen() -> None:
    async def scene(stage: Stage) -> None:
        await stage.serve(TOKENS, "first")
        states = next(iter(stage.cache.pools.states.values()))["tag"]
        lease = await stage.cache.acquire(TOKENS)
        shallow = TaggedTokens(TOKENS, Namespace(), 4).state(8)
        states[lease.state] = torch_of(shallow)
        lease.release()
        await stage.serve(TOKENS, "second")

    assert "it holds a state of position 8" in violation(scene)


def torch_of(words: Any) -> torch.Tensor:
    return torch.tensor(words.tolist())


def test_a_place_freed_while_a_step_uses_it_is_seen() -> None:
    async def scene(stage: Stage) -> None:
        tokens = TaggedTokens(TOKENS, Namespace(), 4)
        async with stage.cache.request(TOKENS, id="r") as request:
            await request.allocate(len(TOKENS))
            await request.ready()
            with stage.cache.step([request], stream=stage.stream) as step:
                stage.model.enqueue([Chunk(request, tokens, 0, 8)], stage.stream)
                step.launched({request: 8})
            page = request.page_table()[-1:]
            account = stage.cache.core.ledger.kv.owner_of(page[0])
            stage.cache.core.run(m.GiveBack(account, page))  # behind the runtime's back
            await asyncio.sleep(1)

    assert "is free while a step or copy uses it" in violation(scene)


def test_a_lost_request_is_seen_at_the_end() -> None:
    kept: list[object] = []

    async def scene(stage: Stage) -> None:
        request = await stage.cache.open_request(TOKENS, id="lost")
        await request.allocate(4)
        kept.append(request)

    text = violation(scene)
    assert "granted (to ['lost'])" in text


def test_a_lease_that_is_dropped_is_seen_unless_it_was_asked_for() -> None:
    async def scene(stage: Stage) -> None:
        await stage.serve(TOKENS, "first")
        lease = await stage.cache.acquire(TOKENS, owner="forgetful")
        del lease
        await asyncio.sleep(0.1)

    assert "a lease of 'forgetful' was lost" in violation(scene)
    play(scene, faults=Faults(forget=0.1))


def test_an_action_that_is_not_carried_out_is_seen() -> None:
    async def scene(stage: Stage) -> None:
        core = stage.cache.core
        handlers = dict(core.allocator.handlers)
        handlers[FreeDeviceSlots] = _ignored
        await stage.serve(TOKENS, "first")
        core.allocator.handlers = handlers
        await stage.cache.evict(pages=2)
        await asyncio.sleep(0.1)

    text = violation(scene)
    assert "FreeDeviceSlots were emitted" in text or "pages of the tree" in text


def test_an_allocation_that_could_be_served_is_not_left_waiting() -> None:
    async def scene(stage: Stage) -> None:
        cache = stage.cache
        grant = await cache.allocate(pages=20, owner="holder")
        waits = asyncio.create_task(cache.allocate(pages=10, owner="waits"))
        await asyncio.sleep(0.01)
        cache.core.allocator.handlers = {
            **cache.core.allocator.handlers,
            m.Retry: _ignored,
        }
        cache.core.ledger.kv.give(grant.pages, grant.account)  # nobody is told
        await asyncio.sleep(0.01)
        await waits

    assert "'waits' waits for 10 pages" in violation(scene)


def test_a_deadlock_names_the_allocation_that_waits() -> None:
    async def scene(stage: Stage) -> None:
        cache = stage.cache
        await cache.allocate(pages=20, owner="holder")
        await cache.allocate(pages=10, owner="waits")

    with pytest.raises(SimulationFailed) as caught:
        play(scene)
    assert isinstance(caught.value.error, SimDeadlock)
    assert "allocation of 'waits': 10 of 4 free pages" in str(caught.value)


def test_a_broken_invariant_of_the_runtime_ends_the_run() -> None:
    async def scene(stage: Stage) -> None:
        stage.cache.core.tree.radix.pages += 1
        await stage.cache.match(TOKENS)
        await asyncio.sleep(1)

    assert "pages" in violation(scene)


def test_the_figures_of_a_refusal_and_the_end_of_a_run_are_told() -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(NoRoom):
            await stage.cache.allocate(pages=99)
        raise ZeroDivisionError("of the scheduler itself")

    with pytest.raises(SimulationFailed, match="of the scheduler itself") as caught:
        play(scene, seed=5, repeat="do it again")
    assert "seed 5, policy task" in str(caught.value)
    assert '"event":"Refused"' in str(caught.value)
    assert "repeat it with: do it again" in str(caught.value)


# -- the host tier ---------------------------------------------------------------------------------

HOST = msgspec.structs.replace(CONFIG, host_bytes="1MiB")


def test_wrong_bytes_on_the_host_are_seen_at_the_end() -> None:
    async def scenario(sim: Simulation) -> None:
        async with sim.runtime(HOST) as cache:
            await Stage(sim, cache).serve(TOKENS, "first")
            await asyncio.sleep(1)
            assert cache.host_pools is not None
            rows = cache.host_pools.kv_rows
            parts = next(rows.parts(layer) for layer in range(rows.layers) if rows.parts(layer))
            parts[0][1:3] += 1

    with pytest.raises(SimulationFailed, match=r"host page [12], layer 0, is of node"):
        simulate(scenario)


def test_a_server_goes_on_when_the_memory_of_the_host_tier_is_refused() -> None:
    async def scenario(sim: Simulation) -> bool:
        async with sim.runtime(HOST) as cache:
            await Stage(sim, cache).serve(TOKENS, "first")
            return cache.host_pools is None

    outcome = simulate(scenario, faults=Faults(pin_refused=1.0))
    assert outcome.result
    assert outcome.injected == {"pin_refused": 1}


def test_a_tier_that_goes_away_and_comes_back() -> None:
    async def scenario(sim: Simulation) -> tuple[int, int]:
        async with sim.runtime(HOST) as cache:
            stage = Stage(sim, cache)
            for number in range(6):
                await stage.serve([*TOKENS[:8], *range(number, number + 8)], f"r{number}")
                await asyncio.sleep(sim.rng.random())
            return sim.injected["tier_away"], cache.stats().tree.host_pages

    outcomes = [simulate(scenario, seed=n, faults=Faults(tier_away=2.0)) for n in range(8)]
    assert any(away for (away, _) in (outcome.result for outcome in outcomes))
    assert any(pages for (_, pages) in (outcome.result for outcome in outcomes))


# -- the ledger that is rebuilt from events --------------------------------------------------------


def places() -> Places:
    made = Places()
    made(RuntimeStarted(page_size=4, grid=4, pages=6, states=3, layout=""))
    made(Granted(request="a", account=1, pages=[1, 2], states=[1]))
    return made


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Granted(request="b", account=2, pages=[2], states=[]), "kv place 2 is of 'a'"),
        (Granted(request="b", account=1, pages=[3], states=[]), "account 1 is of 'a'"),
        (Freed(component="kv", ids=[3], owner=1), "kv place 3 is free"),
        (Freed(component="kv", ids=[1], owner=TREE), "kv place 1 is of 'a'"),
        (Freed(component="kv", ids=[0], owner=1), "kv has no place 0"),
        (Freed(component="state", ids=[9], owner=1), "state has no place 9"),
        (Parked(pages=[], states=[2], owner=1), "state place 2 is free"),
        (CopySubmitted(op=1, kind="copy", pages=[4], states=[]), "touches kv place 4"),
        (CopyEnded(op=7, error=""), "copy 7 ended, but was not in flight"),
    ],
)
def test_events_that_cannot_be_are_refused(event: object, text: str) -> None:
    with pytest.raises(Violation, match=text):
        places()(event)  # type: ignore[arg-type]


def test_a_copy_and_a_step_hold_their_places() -> None:
    here = places()
    here(CopySubmitted(op=1, kind="copy", pages=[1], states=[1]))
    with pytest.raises(Violation, match="kv place 1 is free while"):
        here(Freed(component="kv", ids=[1], owner=1))
    here = places()
    ended = here.step_begins(array("i", (1, 2)), [1], {})
    here(Parked(pages=[1], states=[], owner=1))
    ended()
    here(Freed(component="kv", ids=[1], owner=-2))
    with pytest.raises(Violation, match="a step touches kv place 1, which is free"):
        here.step_begins(array("i", (1,)), [], {})
    with pytest.raises(Violation, match="b writes, but kv place 2 is of 'a'"):
        here.check_write("kv", 2, "b")
    here.check_write("kv", 2, "a")
