"""Seeds without a violation; the same seed is the same run, everywhere; failures are shortened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import msgspec
import pytest

from phloem import CacheRuntime
from phloem.actors.tree import actor as tree_actor
from phloem.actors.tree import border, tiering
from phloem.actors.tree.shadows import Shadows
from phloem.actors.tree.shedding import SheddingTree
from phloem.errors import InvalidRequest
from phloem.runtime.request import Request
from phloem.runtime.simulation import (
    FAULTS,
    ORDERS,
    PRODUCTION_FAULTS,
    USES,
    WORKLOADS,
    Faults,
    Fixed,
    SimulationFailed,
    Violation,
    check_determinism,
    plan_for,
    play,
    production,
    run_plan,
    shorten,
)
from phloem.runtime.simulation.campaign import command
from phloem.runtime.simulation.cli import run
from phloem.runtime.simulation.summary import Summary
from phloem.runtime.traces import SAMPLES, sample

SEEDS = 10 * int(os.environ.get("PHLOEM_SIM_SEEDS", "1"))


@pytest.mark.parametrize("part", range(9))
def test_seeds_run_without_a_violation(part: int) -> None:
    total = Summary()
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        total.add(run_plan(plan_for(seed)))
    assert total.requests["finished"] > 5 * SEEDS
    assert total.reused_tokens > 0
    assert len(total.injected) >= 5
    assert total.evicted["pages"] > 0


def test_every_seed_draws_from_everything_there_is() -> None:
    plans = [plan_for(seed) for seed in range(400)]
    assert {plan.scheduler for plan in plans} == set(ORDERS)
    assert {plan.workload for plan in plans} == set(WORKLOADS)
    on = Counter(fault for plan in plans for fault in plan.faults.on)
    assert set(on) == set(FAULTS)
    off = sum(not plan.faults.on for plan in plans)
    assert off > 20, "some seeds have no faults at all"
    assert plan_for(7) == plan_for(7)


@pytest.mark.parametrize(
    ("use", "owner", "method"),
    [
        ("suspend", Request, "resume"),
        ("sessions", CacheRuntime, "close_session"),
        ("join", tree_actor.TreeActor, "_on_join"),
        ("drafts", Request, "rollback"),
        ("early", Request, "wait_on"),
        ("rotate", Request, "try_snapshot_slot"),
        ("impatient", tiering.Tiering, "timed_out"),
        ("cheapest", tiering, "cheapest"),
        ("one_memory", border.Border, "make_room"),
        ("windows", SheddingTree, "_evict_span"),
        ("prefetch", tiering, "_at_once"),
        ("adaptive", Shadows, "visited"),
        ("policies", CacheRuntime, "use_policy"),
    ],
)
def test_what_is_drawn_is_made_use_of(
    use: str, owner: object, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, honest = 0, getattr(owner, method)

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return honest(*args, **kwargs)

    monkeypatch.setattr(owner, method, counted)
    seeds = (seed for seed in range(1000) if use in plan_for(seed).uses)
    for seed, _ in zip(seeds, range(30), strict=False):
        run_plan(plan_for(seed, Fixed(uses=(use,))))
        if calls:
            return
    raise AssertionError(f"{use} is drawn, and {method} was never called")


def test_uses_are_drawn_beside_all_the_rest() -> None:
    plans = [plan_for(seed) for seed in range(200)]
    assert {use for plan in plans for use in plan.uses} == set(USES)
    assert sum(not plan.uses for plan in plans) > 40
    for plan in plans[:50]:
        plain = plan_for(plan.seed, Fixed(uses=()))
        assert (plain.uses, plain.faults) == ((), plan.faults)
        assert [prompt.at_s for prompt in plain.prompts] == [one.at_s for one in plan.prompts]
        assert not plain.limits.suspends and not plain.config.layout.spans
    with pytest.raises(InvalidRequest, match="no use is called 'x'"):
        Fixed(uses=("x",))


def test_what_is_fixed_changes_only_that() -> None:
    drawn = plan_for(7)
    fixed = plan_for(7, Fixed(scheduler="longest", policy="fifo", faults=(), prompts=(0, 2)))
    assert (fixed.scheduler, fixed.policy, fixed.faults) == ("longest", "fifo", Faults())
    assert fixed.prompts == (drawn.prompts[0], drawn.prompts[2])
    assert (fixed.config, fixed.limits) == (drawn.config, drawn.limits)
    for wrong in (
        {"scheduler": "x"},
        {"workload": "x"},
        {"policy": "x"},
        {"faults": ("x",)},
    ):
        with pytest.raises(InvalidRequest, match="is called 'x'"):
            Fixed(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("inline", ["on", "off", "mixed"])
def test_a_seed_draws_the_same_twice(inline: str) -> None:
    plan = plan_for(11)
    faults = msgspec.structs.replace(plan.faults, inline=inline, cancel=0.001, forget=0.1)
    outcome = check_determinism(
        lambda sim: play(sim, plan, plan.prompts), seed=11, policy=plan.policy, faults=faults
    )
    assert outcome.turns > 50


DIGESTS = """
import json, torch
torch.set_num_threads(1)
from phloem.runtime.simulation import Fixed, plan_for, run_plan
print(json.dumps([run_plan(plan_for(seed)).digest for seed in range(12)]))
"""


def test_a_seed_is_the_same_run_in_other_processes() -> None:
    """Other hash seeds put sets and dictionaries of strings in other orders."""
    here = [run_plan(plan_for(seed)).digest for seed in range(12)]
    told = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        env={**os.environ, "PYTHONHASHSEED": "31337"},
        capture_output=True,
        check=True,
    )
    assert json.loads(told.stdout) == here


# -- failures --------------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request keeps its pages when it has computed something: a leak."""
    honest = Request.abort

    def forgetful(self: Request) -> None:
        if self.computed < 8:
            honest(self)

    monkeypatch.setattr(Request, "abort", forgetful)


def first_failure(fixed: Fixed) -> tuple[int, SimulationFailed]:
    for seed in range(60):
        plan = plan_for(seed, fixed)
        try:
            run_plan(plan, repeat=command(plan, fixed))
        except SimulationFailed as error:
            if isinstance(error.error, Violation):
                return seed, error
    raise AssertionError("the planted leak was not found")


def test_a_failure_is_shortened_and_its_command_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(monkeypatch)
    fixed = Fixed(workload="bursts", requests=8)
    seed, failure = first_failure(fixed)
    assert f"phloem simulate --seeds {seed} --workload bursts --requests 8" in str(failure)
    best, last = shorten(seed, fixed, failure)
    assert best.prompts is not None and len(best.prompts) < len(plan_for(seed, fixed).prompts)
    assert len(plan_for(seed, best).faults.on) <= len(plan_for(seed, fixed).faults.on)
    assert isinstance(last.error, Violation)
    words = command(plan_for(seed, best), best).split()
    assert run(words[2:]) == 1
    out = capsys.readouterr().out
    assert type(last.error).__name__ in out
    assert "repeat it with" in out


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["--seeds", "3,5", "--scheduler", "fcfs", "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "2 without a violation" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["seeds"] == 2
    assert result["failures"] == []
    assert result["requests"]["finished"] > 0
    assert run(["--seeds", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == 1


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--seeds", "one"]) == 2
    assert run(["--seeds", "0:1", "--faults", "weather"]) == 2
    assert run(["--trace", "missing.jsonl"]) == 2
    assert run(["--seeds", "4:4"]) == 2
    text = capsys.readouterr().err
    assert "'one' is neither a range" in text
    assert "no fault is called 'weather'" in text
    assert "missing.jsonl cannot be read" in text


def test_a_trace_on_pools_of_real_size(capsys: pytest.CaptureFixture[str]) -> None:
    arrived: list[int] = []
    outcome = production(
        list(sample("mooncake_conversation"))[:60],
        faults=PRODUCTION_FAULTS,
        workers=1,
        kv_gib=2.0,
        states_gib=1.0,
        told=lambda _, number: arrived.append(number),
    )
    total = Summary()
    total.add(outcome)
    assert arrived == list(range(60))
    assert sum(total.requests.values()) == 60
    assert 0.02 < total.hit_rate < 0.5
    assert total.evicted["pages"] > 0
    assert outcome.virtual_s > 15
    path = str(SAMPLES["mooncake_synthetic"])
    assert run(["--trace", path, "--limit", "5", "--faults", "none", "--workers", "1"]) == 0
    assert "5 finished" in capsys.readouterr().out


def test_virtual_time_is_much_faster_than_real(
    record_property: Callable[[str, object], None],
) -> None:
    """Users who read and write between turns: the costs of a model of 80 billion weights."""
    import time

    plan = plan_for(1, Fixed(workload="chat", scheduler="fcfs", faults=(), policy="batch"))
    spread = tuple(
        msgspec.structs.replace(prompt, at_s=2.0 * number, output=24)
        for number, prompt in enumerate(plan.prompts)
    )
    pages = 4096
    plan = msgspec.structs.replace(
        plan,
        prompts=spread,
        config=msgspec.structs.replace(plan.config, device_pages=pages, device_states=64),
        audit_every=1000,
    )
    began = time.process_time()
    outcome = run_plan(plan)
    took = time.process_time() - began
    record_property("times faster than real", outcome.virtual_s / took)
    assert outcome.virtual_s / took > 20, "100 on an idle machine"


def test_an_interrupt_ends_all_processes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(total: Summary, part: Summary) -> None:
        assert active_children() and not total.seeds and part.seeds
        raise KeyboardInterrupt

    monkeypatch.setattr(Summary, "merge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["--seeds", "0:100000", "--jobs", "2"])
    assert not active_children()


def test_a_workload_without_requests_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--seeds", "0:1", "--requests", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_trace_of_no_requests_is_served_at_once() -> None:
    assert production(iter(()), workers=1, kv_gib=1.0, states_gib=1.0, host_gib=0.0).result == []
