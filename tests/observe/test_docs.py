"""What `docs/observe.md` says is so: its commands on the demo's log, its table of metrics."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phloem.runtime import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "observe.md").read_text(encoding="utf-8")


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    check = [sys.executable, str(ROOT / "tools" / "metrics_table.py"), "--check"]
    subprocess.run(check, check=True, timeout=240)


def masked(text: str) -> list[str]:
    """Lines without their figures: times are others each time."""
    return [re.sub(r"[\d.]+", "#", line).rstrip() for line in text.strip().splitlines()]


def test_the_commands_of_the_page_on_the_demos_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHLOEM_TRACES", raising=False)
    said: list[list[str]] = []
    seen: set[str] = set()
    for kind, block in re.findall(r"```(sh|text)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "text":  # what one of the commands before has printed
            assert masked(block) in said
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "phloem"
            assert cli.main(arguments) == 0, arguments
            out = capsys.readouterr().out
            assert out or set(arguments) & {"-o", "--json", "--perfetto"}
            said.append(masked(out))
            seen.add(arguments[0])
    assert seen == {"demo", "report", "explain", "trace", "top"}
    assert "Cache report" in (tmp_path / "report.html").read_text()
    state = msgspec.json.decode((tmp_path / "state.json").read_bytes())
    assert state["generation"] == 0 and sum(count for _, count in state["pools"]["kv"]) == 96
    timeline = msgspec.json.decode((tmp_path / "timeline.json").read_bytes())
    assert len(timeline["traceEvents"]) > 200
