"""Known policies and bounds on three whole traces, against figures of an independent simulator."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from phloem.runtime.costs.published import geometry_named
from phloem.runtime.replay.bounds import ceiling
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.replay.runs import Settings, replay
from phloem.runtime.traces import read_trace

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "benchmarks" / "data" / "known_policies.csv"
TREES = ["kv-lru", "kv-s3fifo", "grid", "judicious", "judicious-4096", "gdsf"]
# All that an unbounded cache can hit, and what two states a request make of it.
CEILINGS = {
    "agent_miniswe_tokens": (94.5, 94.4),
    "agent_magentic_tokens": (83.6, 69.4),
    "agent_taubench_airline_tokens": (94.7, 94.6),
}


@pytest.fixture(scope="module", params=CEILINGS)
def work(request: pytest.FixtureRequest) -> Workload:
    name = str(request.param)
    return prepare(read_trace(HERE / "traces" / f"{name}.jsonl.gz", empty=True), name=name)


def theirs(name: str, geometry: str, share: int) -> dict[str, float]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["workload"], row["geometry"], row["share"]) == (name, geometry, str(share)):
                return {policy: float(rate) for policy, rate in list(row.items())[3:]}
    raise AssertionError("no such point")


def test_known_policies_land_within_a_point(work: Workload) -> None:
    """At 5 % of the KV of all distinct tokens; Marconi and two pools where ties do not decide."""
    policies = [*TREES, "two-pools"]
    if work.name != "agent_magentic_tokens":
        policies.append("marconi")
    settings = Settings(geometry=geometry_named("marconi7b"), bounds=False)
    report = replay([work], settings, policies, ["5%"])
    expected = theirs(work.name, "marconi7b", 5)
    for run in report.runs:
        assert 100 * run.hit_rate == pytest.approx(expected[run.policy], abs=1.0), run.policy


def test_judicious_admission_is_exact(work: Workload) -> None:
    settings = Settings(geometry=geometry_named("marconi7b"), bounds=False)
    report = replay([work], settings, ["judicious"], ["2%", "10%", "20%"])
    for share, run in zip((2, 10, 20), report.runs, strict=True):
        rate = theirs(work.name, "marconi7b", share)["judicious"]
        assert round(100 * run.hit_rate, 1) == rate, share


def test_bounds_land_within_a_point(work: Workload) -> None:
    settings = Settings(geometry=geometry_named("marconi7b"))
    report = replay([work], settings, ["judicious"], ["2%"])
    expected = theirs(work.name, "marconi7b", 2)
    found = report.bounds[0].bounds
    assert 100 * found.kv_optimum == pytest.approx(expected["kv_optimum"], abs=0.2)
    assert 100 * found.clairvoyant == pytest.approx(expected["clairvoyant"], abs=1.0)
    assert 100 * found.upper <= expected["upper"] + 1.0
    assert max(found.clairvoyant, report.runs[0].hit_rate) <= found.upper <= found.kv_optimum


def test_ceilings(work: Workload) -> None:
    every, judicious = CEILINGS[work.name]
    assert round(100 * ceiling(work), 1) == every
    settings = Settings(geometry=geometry_named("marconi7b"), bounds=False)
    report = replay([work], settings, ["judicious"], ["400%"])
    assert round(100 * report.runs[0].hit_rate, 1) == judicious
    assert not report.runs[0].evictions
