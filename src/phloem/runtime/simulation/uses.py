"""What of the API a simulated run makes use of beyond the basics, each described in prose.

Which, is drawn anew for each seed, like faults: many are off, since they hide each other. They are
drawn by themselves, so that a run with none of them is what it was before any was added.

Servers
    *suspend*: who gives way to the more urgent is suspended and resumed, with its lease or without.
    *sessions*: the requests of a conversation are tied together and have priorities that end.
    *join*: who opens a prompt that another request computes waits for that before it asks for room.
    *drafts*: tokens are guessed behind an answer, computed, and rolled back.
    *early*: the first pass of a request is launched behind the copies that it needs, and is
    provisional until they have ended.
    *rotate*: each request holds up to two snapshots by the kernel.
    *prefetch*: what the host has of a prompt is brought before its request is admitted.
Runtimes
    *impatient*: copies between the tiers are given up after a time shorter than hangs are.
    *cheapest*: what is on the host is loaded only where that is the quickest way.
    *one_memory*: pages and states share one memory.
    *adaptive*: eviction by the policy that follows others by what their shadow trees tell.
    *policies*: the policy of eviction is changed again and again.
    *windows*: the model has sliding-window layers, too, and so no lower tier and no *one_memory*.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from phloem.cuda_streams.specs import FrameShape
from phloem.runtime.config import CacheConfig
from phloem.runtime.simulation.jobs import Limits
from phloem.runtime.simulation.model import sim_layout

__all__ = ["USES", "draw_uses", "with_uses"]

USES: tuple[str, ...] = (
    *("suspend", "sessions", "join", "drafts", "early", "rotate"),
    *("impatient", "cheapest", "one_memory", "windows"),
    # Last those that came last: so seeds mean for the others what they meant before.
    *("prefetch", "adaptive", "policies"),
)


def draw_uses(seed: int) -> tuple[str, ...]:
    """The uses of one seed: each with probability 0.3, and none at all in every fourth seed."""
    rng = random.Random(f"uses {seed}")
    plain = rng.random() < 0.25
    drawn = [name for name in USES if rng.random() < 0.3]
    return () if plain else tuple(drawn)


def with_uses(
    seed: int, uses: tuple[str, ...], limits: Limits, config: CacheConfig
) -> tuple[Limits, CacheConfig]:
    """The limits of a server and the configuration of its runtime that make use of these.

    What each needs is drawn from the seed whatever the others are.
    """
    rng = random.Random(f"how {seed}")
    keeps_lease, drafts = rng.random() < 0.3, rng.randrange(1, 6)
    ttl_s = rng.choice((None, 0.05, 1.0))
    patience_s = rng.choice((0.001, 0.1, 2.0))
    window, share = config.page_size * rng.randrange(1, 5) - rng.randrange(2), rng.choice((1, 0.7))
    rates = rng.choice(((0.0, 0.0), (1e4, 1e7), (1e5, 1e5)))
    if "suspend" in uses:
        limits = replace(limits, suspends=True, keeps_lease=keeps_lease)
    if "sessions" in uses:
        limits = replace(limits, sessions=True, session_ttl_s=ttl_s)
    if "join" in uses:
        limits = replace(limits, joins_at_open=True)
    if "drafts" in uses:
        limits = replace(limits, drafts=drafts)
    if "early" in uses:
        limits = replace(limits, early=True)
    if "rotate" in uses:
        limits, config = replace(limits, snapshots=True), replace(config, snapshot_slots=2)
    if "prefetch" in uses:
        limits = replace(limits, prefetches=True)
    if "impatient" in uses:
        config = replace(config, copy_timeout_s=patience_s)
    if "cheapest" in uses:
        config = replace(
            config, loads="cheapest", prefill_tokens_per_s=rates[0], load_bytes_per_s=rates[1]
        )
    if "adaptive" in uses:
        config = replace(config, eviction="adaptive")
    if "windows" in uses and not config.host_bytes:
        layout = sim_layout(layers=2, states=config.layout.has_states, window=max(1, window))
        pages = max(1, round(share * config.device_pages))
        config = replace(config, layout=layout, device_spans={"window": pages})
    elif "one_memory" in uses and config.layout.has_states:
        config = replace(config, device_bytes=_bytes_of(config))
    return limits, config


def _bytes_of(config: CacheConfig) -> int:
    """One memory of as many bytes as the pools, and two frames more, which it keeps for itself."""
    page_bytes, slot_bytes = config.layout.page_bytes(config.page_size), config.layout.slot_bytes
    frame = FrameShape.of(page_bytes, slot_bytes).nbytes
    both = config.device_pages * page_bytes + config.device_states * slot_bytes
    return max(both, frame) + 2 * frame
