"""Random programs come to the bytes of a plain replay on every engine.

The same programs without their fences must be found out: a test that cannot fail proves nothing.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.programs import OPS, Op, run_ranked, run_real, run_virtual, some_ops

pytestmark = pytest.mark.not_sim("real engines and their threads")

KINDS = ["threads", "device, batched", "device, staged"]
if torch.cuda.is_available():
    KINDS.append("cuda")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 30), st.integers(0, 30)), max_size=40),
    st.integers(0, 2**16),
)
def test_fenced_programs_are_right_in_any_order(ops: list[Op], seed: int) -> None:
    assert run_virtual(ops, seed) == ("", 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
async def test_real_engines_agree_with_the_replay(kind: str, seed: int) -> None:
    assert await run_real(kind, some_ops(seed), seed) == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 30), st.integers(0, 30)), max_size=40),
    st.integers(0, 2**16),
)
def test_two_ranks_agree_with_the_replay(ops: list[Op], seed: int) -> None:
    assert run_ranked(ops, seed) == ("", 0)


def test_without_fences_the_checker_finds_out() -> None:
    found = [run_virtual(some_ops(seed), seed, fenced=False) for seed in range(20)]
    assert sum(hazards > 0 for _, hazards in found) >= 18, found
    assert sum(verdict != "" for verdict, _ in found) >= 12, found


def test_without_fences_the_checkers_of_two_ranks_find_out() -> None:
    found = [run_ranked(some_ops(seed), seed, fenced=False) for seed in range(12)]
    assert sum(hazards > 0 for _, hazards in found) >= 9, found
