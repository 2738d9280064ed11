"""An eviction policy of one's own, compared with others on a trace.

    python examples/own_policy.py [SAMPLE]

It keeps what was used often in proportion to what it saves: the tokens of its edge. The score is a
whole number, and the smallest goes first. A running cache takes it with
`await cache.use_policy(OftenAndLong())`.
"""

from __future__ import annotations

import sys

from phloem.actors.tree.node import Node
from phloem.actors.tree.policies import Policy, Score
from phloem.runtime.costs.published import geometry_named
from phloem.runtime.replay.cache import ReplayCache
from phloem.runtime.replay.requests import prepare
from phloem.runtime.replay.served import serve_all
from phloem.runtime.traces import sample


class OftenAndLong(Policy):
    """Hits times tokens; among equals the least recently used."""

    name = "often_and_long"

    def kv_score(self, node: Node, /) -> Score:
        """Of a leaf, with its state."""
        above = node.parent.end if node.parent is not None else 0
        return node.hits * (node.end - above) << 64 | node.stamp

    state_score = kv_score


def main(name: str = "agentic_coding_sessions", share: float = 0.3) -> None:
    """Replay a sample in a cache of a share of its distinct tokens, under three policies."""
    workload = prepare(sample(name), name=name)
    geometry = geometry_named("qwen3-next-80b-a3b")
    capacity = int(workload.distinct_tokens * share * geometry.kv_bytes)
    for policy in ("lru", "benefit", OftenAndLong()):
        cache = ReplayCache(geometry, workload.block_size, capacity=capacity, policy=policy)
        totals = serve_all(cache, workload)
        hits = totals.hit_tokens / totals.tokens
        print(f"{cache.policy.name:16}{hits:7.1%} of {totals.tokens:,} tokens were cached")


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else main()
