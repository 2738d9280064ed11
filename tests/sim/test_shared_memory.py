"""Seeds over one memory for pages and states: who owns what, and which bytes copies use."""

from __future__ import annotations

import os

import msgspec
import pytest

from phloem.cuda_streams.specs import FrameShape
from phloem.runtime.simulation import USES, Fixed, plan_for, run_plan
from phloem.runtime.simulation.campaign import Plan
from phloem.runtime.simulation.summary import Summary

_OTHERS = tuple(use for use in USES if use != "windows")  # there is no such memory for them
SEEDS = 8 * int(os.environ.get("PHLOEM_SIM_SEEDS", "1"))


def shared(plan: Plan) -> Plan | None:
    """The same over one memory of as many bytes; None for a model without states."""
    config = plan.config
    if not config.layout.has_states:
        return None
    page_bytes = config.layout.page_bytes(config.page_size)
    frame = FrameShape.of(page_bytes, config.layout.slot_bytes).nbytes
    both = config.device_pages * page_bytes + config.device_states * config.layout.slot_bytes
    config = msgspec.structs.replace(config, device_bytes=max(both, frame) + 2 * frame)
    return msgspec.structs.replace(plan, config=config)


@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_seeds_run_without_a_violation(first: int) -> None:
    total = Summary()
    for seed in range(first, first + SEEDS):
        plan = shared(plan_for(seed, Fixed(uses=_OTHERS)))
        if plan is not None:
            total.add(run_plan(plan))
    assert total.requests["finished"] > SEEDS
    assert total.evicted["pages"] > 0


@pytest.mark.parametrize("seed", [19, 23])
def test_a_backup_that_is_refused_is_not_planned_for_ever(seed: int) -> None:
    """Children that are leaving kept a node which had no room on the host: it was asked again."""
    plan = shared(plan_for(seed, Fixed(uses=())))
    assert plan is not None
    run_plan(plan)
