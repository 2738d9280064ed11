"""Every token of every prompt of the traces is reused or has one reason why not."""

from __future__ import annotations

import pytest

from phloem.events import FellBack, RequestEnded, RequestOpened
from phloem.runtime.simulation import watch
from phloem.runtime.simulation.model import Violation
from phloem.runtime.simulation.production import production
from phloem.runtime.simulation.reasons import Reasons
from phloem.runtime.traces import SAMPLES, sample


@pytest.mark.parametrize("name", SAMPLES)
def test_lost_tokens_add_up_for_each_request_of_a_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Reasons] = []

    class Kept(Reasons):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(watch, "Reasons", Kept)
    requests = list(sample(name))[:40]
    production(requests, seed=1, answer_max=32, workers=1, kv_gib=2.0, states_gib=1.0)
    (reasons,) = made
    assert reasons.lookups >= len(requests)
    assert reasons.lost["last_token"] > 0 and len(reasons.lost) > 1


def opened(usable: int = 6, lost: dict[str, int] | None = None) -> RequestOpened:
    return RequestOpened(
        request="r", tokens=10, usable=usable, device=2, kv_prefix=8, wanted=[],
        lost={"last_token": 1, "no_state": 3} if lost is None else lost, namespace=("", ""),
    )  # fmt: skip


def test_what_is_left_over_is_found() -> None:
    reasons = Reasons()
    for wrong in (opened(usable=7), opened(lost={"never_seen": 5}), opened(lost={"a": 0, "b": 4})):
        with pytest.raises(Violation):
            reasons(wrong)
    reasons(opened())
    with pytest.raises(Violation, match="stood on 6"):
        reasons(FellBack(request="r", lease=1, boundary=3, lost={"copy_failed": 4}))
    reasons(FellBack(request="r", lease=1, boundary=2, lost={"copy_failed": 4}))
    with pytest.raises(Violation, match="stood on 2"):
        reasons(RequestEnded(request="r", how="aborted", reused=1, computed=0, published=0))
    reasons(opened())
    with pytest.raises(Violation, match="more was loaded"):
        reasons(
            RequestEnded(request="r", how="finished", reused=6, computed=4, published=0, loaded=7)
        )
