"""Each scenario and each known fault is a test, or a table says what will cover it."""

from __future__ import annotations

from pathlib import Path

import failure_modes
import scenarios
from pytest import MonkeyPatch


def test_every_failure_mode_is_tried_or_assigned() -> None:
    tried = failure_modes.tried()
    known = set(failure_modes.FAILURE_MODES)
    assert known == {f"F-{number:03}" for number in range(1, 118)}
    assert tried.keys() ^ failure_modes.LATER.keys() == known, "each once, and no other"


def test_every_scenario_is_a_test_or_assigned() -> None:
    covered = scenarios.covered()
    known = set(scenarios.SCENARIOS)
    assert covered.keys() ^ scenarios.LATER.keys() == known, "each once, and no other"


def test_what_is_left_waits_for_a_capability_that_is_not_there() -> None:
    assert set(failure_modes.LATER.values()) <= failure_modes.CAPABILITIES
    for number, why in scenarios.LATER.items():
        assert why in scenarios.CAPABILITIES or why.startswith("not offered: "), number


def test_tests_that_cannot_fail_are_not_counted(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(
        "@pytest.mark.skip\ndef test_f001_a(): ...\n"
        "@pytest.mark.xfail(reason='')\ndef test_f002_b(): ...\n"
        "class TestIt:\n    @pytest.mark.skipif(no)\n    async def test_f003_f004_c(self): ...\n"
        "def helper_f005_d(): ...\n"
    )
    monkeypatch.setattr(failure_modes, "TESTS", tmp_path)
    where = ["test_some.py::test_f003_f004_c"]
    assert failure_modes.tried() == {"F-003": where, "F-004": where}
