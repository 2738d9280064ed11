"""Known policies on the production tree: each obeys its memory, and what is particular to it."""

from __future__ import annotations

import pytest

from phloem.actors.tree.audit import audit_tree
from phloem.errors import InvalidRequest
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.cache import ReplayCache
from phloem.runtime.replay.memory import OneBudget, Pools
from phloem.runtime.replay.named import KNOWN, cache_named
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.replay.served import serve_all
from phloem.runtime.traces import sample

SMALL = Geometry(
    name="small", kv_bytes=100, state_bytes=40_000, flops_linear=1e9, flops_quadratic=1e4
)


@pytest.fixture(scope="module", params=["agent_taubench_airline_tokens", "agentic_coding_sessions"])
def work(request: pytest.FixtureRequest) -> Workload:
    name = str(request.param)
    return prepare(sample(name), name=name)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_policy_keeps_to_its_memory_and_its_tree_whole(work: Workload, name: str) -> None:
    capacity = work.distinct_tokens * SMALL.kv_bytes // 2
    cache = cache_named(name, work, SMALL, capacity)
    if not isinstance(cache, ReplayCache):
        assert name == "kv-s3fifo"
        serve_all(cache, work)
        assert 0 < cache.totals.hit_tokens < cache.totals.tokens
        return
    memory, radix = cache.memory, cache.tree.radix
    for number, request in enumerate(work.requests):
        cache.serve(request)
        if isinstance(memory, OneBudget):
            assert memory.bytes_of(radix.pages, radix.states) <= capacity
        elif isinstance(memory, Pools):
            assert radix.pages <= memory.pages and radix.states <= memory.states
        if number % 8 == 0:
            audit_tree(cache.tree)
    audit_tree(cache.tree)
    assert cache.totals.evictions or name == "grid"
    assert 0 < cache.totals.hit_tokens < cache.totals.tokens


def test_an_admission_of_ones_own_takes_no_placement(work: Workload) -> None:
    from phloem.actors.tree.placement import Placement

    with pytest.raises(InvalidRequest, match="a memory of its own"):
        cache_named("gdsf", work, SMALL, 10**9, Placement())
    with pytest.raises(InvalidRequest, match="no eviction policy 'best'"):
        cache_named("best", work, SMALL, 10**9)
