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
    subprocess.run(check, check=True, timeout=60)


def test_the_commands_of_the_page_on_the_demos_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHLOEM_TRACES", raising=False)
    block = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    commands = [shlex.split(line) for line in block[1].splitlines()]
    assert {command[1] for command in commands} == {"demo", "report", "explain", "trace", "top"}
    for program, *arguments in commands:
        assert program == "phloem"
        assert cli.main(arguments) == 0, arguments
        assert capsys.readouterr().out or set(arguments) & {"-o", "--json", "--perfetto"}
    assert "Cache report" in (tmp_path / "report.html").read_text()
    state = msgspec.json.decode((tmp_path / "state.json").read_bytes())
    assert state["nodes"] and sum(count for _, count in state["pools"]["kv"]) > 1000
    timeline = msgspec.json.decode((tmp_path / "timeline.json").read_bytes())
    assert len(timeline["traceEvents"]) > 200
