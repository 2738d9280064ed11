"""Known policies and bounds on three whole traces, against figures of an independent simulator."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from replay.reference import Reference

from phloem.runtime.costs.published import geometry_named
from phloem.runtime.replay.bounds import ceiling
from phloem.runtime.replay.named import cache_named
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.replay.runs import Settings, capacity_of, replay
from phloem.runtime.traces import read_trace

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "benchmarks" / "data" / "known_policies.csv"
POLICIES = ["kv-lru", "kv-s3fifo", "grid", "two-pools", "judicious", "judicious-4096", "marconi"]
POLICIES.append("gdsf")
TIES = {
    ("agent_taubench_airline_tokens", "qwen3-next-80b-a3b-bf16state", 5, "marconi"): 0.6,
    ("agent_taubench_airline_tokens", "qwen3-next-80b-a3b-bf16state", 5, "two-pools"): 0.4,
}
"""Which of two that were used by one request goes first is not defined; by how much it decides."""
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


@pytest.mark.parametrize(
    ("geometry", "share", "policies"),
    [
        ("marconi7b", 5, POLICIES),
        ("qwen3-next-80b-a3b-bf16state", 5, ["two-pools", "marconi", "gdsf"]),
        ("marconi7b", 2, ["two-pools"]),
    ],
)
def test_known_policies_land_where_they_should(
    work: Workload, geometry: str, share: int, policies: list[str]
) -> None:
    """Within a tenth of a point, but where a tie decides."""
    settings = Settings(geometry=geometry_named(geometry), bounds=False)
    report = replay([work], settings, policies, [f"{share}%"])
    expected = theirs(work.name, geometry, share)
    for run in report.runs:
        apart = TIES.get((work.name, geometry, share, run.policy), 0.1)
        assert abs(round(100 * run.hit_rate, 1) - expected[run.policy]) < apart + 0.01, run.policy


@pytest.mark.parametrize("policy", ["judicious", "marconi-0.5", "gdsf"])
@pytest.mark.parametrize("geometry", ["marconi7b", "qwen3-next-80b-a3b-bf16state"])
def test_every_hit_is_the_definition_s(work: Workload, geometry: str, policy: str) -> None:
    """Against the definition written down in the plainest way."""
    model = geometry_named(geometry)
    capacity = capacity_of("5%", work, model)
    cache = cache_named(policy, work, model, capacity)
    kind, _, alpha = policy.partition("-")
    plain = Reference(model, work.block_size, capacity, kind, float(alpha or 0))  # type: ignore[arg-type]  # one of the three
    for request in work.requests:
        expected = plain.serve(request.ids(), request.matchable) * work.block_size
        assert cache.serve(request).hit == expected
    assert cache.totals.evictions > 10


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
