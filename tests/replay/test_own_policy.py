"""The example of a policy of one's own does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_policy.py"


def test_the_example_compares_three_policies(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"]()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["lru", "benefit", "often_and_long"]
    hits = {row[0]: float(row[1].rstrip("%")) for row in rows}
    assert 0 < hits["lru"] < hits["benefit"] < 100
    assert 0 < hits["often_and_long"] < 100
