"""Replays: the figures of known policies, room that is kept, decisions that repeat."""

from __future__ import annotations

import pytest

from phloem.actors.tree.audit import audit_tree
from phloem.actors.tree.policies import Policy, policy_named
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.admission import Admission, AsPlaced
from phloem.runtime.replay.cache import ReplayCache
from phloem.runtime.replay.known.judicious import Judicious, LeafLru
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.replay.served import serve_all
from phloem.runtime.traces import sample

SMALL = Geometry(
    name="small", kv_bytes=100, state_bytes=40_000, flops_linear=1e9, flops_quadratic=1e4
)
SAMPLES = ("agent_taubench_airline_tokens", "agentic_coding_sessions", "mooncake_conversation")


def workload(name: str) -> Workload:
    return prepare(sample(name), name=name)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    ("policy", "admission"),
    [
        (LeafLru(), Judicious()),
        (policy_named("lru"), AsPlaced()),
        (policy_named("benefit"), AsPlaced()),
    ],
    ids=["leaf-lru", "lru", "benefit"],
)
def test_the_tree_keeps_to_its_bytes(name: str, policy: Policy, admission: Admission) -> None:
    work = workload(name)
    capacity = work.distinct_tokens * SMALL.kv_bytes // 2
    cache = ReplayCache(
        SMALL, work.block_size, capacity=capacity, policy=policy, admission=admission
    )
    for request in work.requests:
        decision = cache.serve(request)
        radix = cache.tree.radix
        used = radix.pages * SMALL.kv_bytes * work.block_size + radix.states * SMALL.state_bytes
        assert used <= capacity
        assert decision.hit <= decision.prefix <= request.matchable * work.block_size
    audit_tree(cache.tree)
    held = sum(1 for node in cache.tree.radix if node.state)
    assert cache.places["state"].made == held + len(cache.places["state"].free)
    assert 0 < cache.totals.hit_tokens < cache.totals.tokens
    assert cache.totals.evictions


@pytest.mark.parametrize("name", SAMPLES)
def test_without_a_bound_nothing_goes(name: str) -> None:
    work = workload(name)
    cache = ReplayCache(SMALL, work.block_size, policy=LeafLru(), admission=Judicious())
    totals = serve_all(cache, work)
    assert not totals.evictions and not totals.skipped
    assert cache.tree.radix.pages == work.distinct
