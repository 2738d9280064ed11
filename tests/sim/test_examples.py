"""The examples of simulation do what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def execute(name: str, *arguments: str) -> int:
    sys.argv = [name, *arguments]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)


def test_the_planted_race_is_found_and_the_printed_command_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute("planted_race.py") == 0
    report = capsys.readouterr().out
    assert report.startswith("Violation: ")
    (seed,) = re.findall(r"repeat it with: python examples/planted_race.py --seed (\d+)", report)
    assert execute("planted_race.py", "--seed", seed) == 1
    assert capsys.readouterr().out == report
    assert execute("planted_race.py", "--seed", seed, "--fixed") == 0


def test_a_user_s_scheduler_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("simulated_scheduler.py") == 0
    assert "25 seeds" in capsys.readouterr().out
