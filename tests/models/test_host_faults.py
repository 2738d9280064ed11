"""The demo's workload with a device pool too small for it, and loads that go wrong on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.harness import Harness

from phloem import InvalidRequest
from phloem.actors.transfer import TransferActor
from phloem.actors.tree.core import WritePolicy
from phloem.runtime.demo.faults import LoadFaults, parse_faults
from phloem.runtime.demo.measure import Settings, compare
from phloem.runtime.demo.workloads import Workload, conversation_tree
from phloem.runtime.integrations.transformers import TransformersModel


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return Harness("qwen3_next").model


def one_after_another(workload: Workload) -> Workload:
    """The sessions in turn, one request at a time, so that each finds the others' data there.

    Each request comes twice in a row, which is when the second use is noticed, and all come again.
    """
    depth: dict[str | None, int] = {None: 0}
    for turn in workload.turns:
        depth[turn.id] = depth[turn.after] + 1
    once = sorted(workload.turns, key=lambda turn: depth[turn.id])
    again = [replace(turn, id=f"{turn.id} again") for turn in once]
    later = [replace(turn, id=f"{turn.id} later") for turn in once]
    turns = [turn for both in zip(once, again, strict=True) for turn in both] + later
    before = [None, *(turn.id for turn in turns)]
    chained = tuple(replace(turn, after=last) for turn, last in zip(turns, before, strict=False))
    return replace(workload, turns=chained)


@pytest.fixture
def only_loads_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And these soon: no copy within the device does, however busy the machine is."""
    watch = TransferActor._watch

    def watch_loads(actor: TransferActor, op: int) -> None:
        if any(ticket.batch.channel == "h2d" for _, ticket in actor.tickets_of(op)):
            watch(actor, op)

    monkeypatch.setattr(TransferActor, "_watch", watch_loads)
    monkeypatch.setattr("phloem.runtime.demo.faults.HANG_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("only_loads_take_too_long")
@pytest.mark.not_sim("these faults block threads")
@pytest.mark.parametrize("write_policy", ["write_through", "selective", "write_back"])
@pytest.mark.parametrize("faults", ["", "fail:3", "hang:3", "late:3"])
async def test_outputs_are_the_same_whatever_becomes_of_loads(
    model: TransformersModel, write_policy: WritePolicy, faults: str
) -> None:
    workload = one_after_another(
        conversation_tree(sessions=3, turns=2, system=128, spoken=70, max_new=2)
    )
    settings = Settings(
        pages=36,
        states=4,
        host_bytes="64MiB",
        write_policy=write_policy,
        faults=parse_faults(faults) if faults else None,
    )
    compared = await compare(model, workload, settings)
    assert not compared.failures
    assert compared.outputs_equal == compared.requests
    assert compared.tokens_loaded > 0
    assert compared.actions["LoadToDevice"] >= 3, "at least one load went wrong"


def test_faults_are_named() -> None:
    assert parse_faults("late:7") == LoadFaults("late", 7)
    for bad in ("", "fail", "fail:0", "fail:-1", "burn:3", "fail:x"):
        with pytest.raises(InvalidRequest, match="is no fault"):
            parse_faults(bad)
