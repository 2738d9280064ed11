"""Each scenario and each known fault is a test, or a table says what will cover it."""

from __future__ import annotations

import failure_modes
import scenarios


def test_every_failure_mode_is_tried_or_assigned() -> None:
    tried = failure_modes.tried()
    known = set(failure_modes.FAILURE_MODES)
    assert known == {f"F-{number:03}" for number in range(1, 118)}
    assert tried.keys() ^ failure_modes.LATER.keys() == known, "each once, and no other"


def test_every_scenario_is_a_test_or_assigned() -> None:
    covered = scenarios.covered()
    known = set(scenarios.SCENARIOS)
    assert covered.keys() ^ scenarios.LATER.keys() == known, "each once, and no other"
