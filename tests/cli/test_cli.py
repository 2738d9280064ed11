"""The command line: exit status, JSON, messages; and that the demo can fail."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import torch

from phloem import events
from phloem.cuda_streams.pools import DevicePools
from phloem.runtime import cli
from phloem.runtime.demo import main as demo
from phloem.runtime.demo.measure import Comparison, compare, loop_lag
from phloem.runtime.demo.report import Report
from phloem.runtime.demo.workloads import simultaneous
from phloem.runtime.integrations.models import build_model
from phloem.runtime.integrations.transformers import ModelCache, Row, TransformersModel
from phloem.runtime.observe.numbers import percentile
from phloem.runtime.tracing import read_log


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return TransformersModel(build_model("llama"))


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for line in (f"torch: {torch.__version__}", "phloem: 0.1", "memory_bytes: ", "loops: asyncio"):
        assert line in out
    assert cli.main(["env", "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["cpus"] >= found["cpus_usable"] >= 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"phloem {metadata.version('phloem')}\n"


def test_python_m_phloem(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    ran = subprocess.run(
        [sys.executable, "-m", "phloem", "env", "--json", str(path)],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "python: CPython" in ran.stdout
    assert "platform" in msgspec.json.decode(path.read_bytes())


def test_the_quick_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHLOEM_TRACES", raising=False)
    json, log = tmp_path / "demo.json", tmp_path / "demo.log"
    command = ["demo", "--quick", "--model", "qwen3-next", "--json", str(json), "--log", str(log)]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "every page and slot accounted for" in out
    assert "conversations" in out

    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert report.failures == []
    assert [c.workload for c in report.comparisons] == [
        "conversations", "taubench_airline", "together",
    ]  # fmt: skip
    for comparison in report.comparisons:
        assert comparison.outputs_equal == comparison.requests
        assert comparison.cached.computed + comparison.cached.reused == comparison.prompt_tokens
        assert 0 < comparison.cached.computed < comparison.bare.computed
        assert comparison.bare.computed == comparison.prompt_tokens
        assert comparison.pools["state"].tree > 0
    assert report.recall.cold == report.recall.restored > report.recall.wrong_state

    entries = list(read_log(log))
    started = [e for e in entries if isinstance(e.event, events.RuntimeStarted)]
    opened = [e for e in entries if isinstance(e.event, events.RequestOpened)]
    assert len(started) == 3
    assert len(opened) == sum(c.requests for c in report.comparisons)
    assert b'"workload":"together"' in log.read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--model", "nothing"],
        ["demo", "--traces", "/nonexistent"],
        ["demo", "--quick", "--traces", "/nonexistent"],
        ["demo", "--quick", "--pages", "2", "--states", "1"],
        ["env", "--json", "/nonexistent/file"],
    ],
)
def test_a_call_that_is_wrong_ends_with_2_and_a_reason(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    assert "phloem: " in capsys.readouterr().err


def test_commands_with_a_command_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    for name in cli._COMMANDS:
        assert f"\n    {name} " in listed
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: phloem {name}" in capsys.readouterr().out


def test_unknown_options_end_with_2() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--fast"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--seeds", "1", "--jobs", "0"],
        ["simulate", "--trace", "x", "--workers", "-1"],
        ["trace", "log", "--run", "0"],
        ["explain", "log", "--request", "a", "--run", "-1"],
        ["report", "log", "--run", "one"],
    ],
)
def test_what_is_counted_is_counted_from_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 2
    assert re.search(r"is below 1|is not a whole number", capsys.readouterr().err)


def test_prompts_that_no_seed_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--seeds", "1", "--prompts", "999"]) == 2
    assert "seed 1 has prompts 0 to" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_fault() -> None:
    """As of `phloem report LOG --text | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "phloem", "env"],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["demo"]) == 2
    assert "pip install 'phloem[cli,transformers]'" in capsys.readouterr().err


def test_a_fault_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: TransformersModel
) -> None:
    good = asyncio.run(compare(model, simultaneous(requests=2, shared=64, own=32, max_new=2)))

    async def faulty(*_: object, **__: object) -> Comparison:
        return msgspec.structs.replace(good, outputs_equal=1, unaccounted=3, audit="link broken")

    monkeypatch.setattr(demo, "compare", faulty)
    assert cli.main(["demo", "--quick", "--model", "llama"]) == 1
    out = capsys.readouterr().out
    for what in ("1 of 2 outputs differ", "3 pages or slots are unaccounted", "link broken"):
        assert what in " ".join(out.split())


def test_a_wrong_state_makes_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees it when what is restored is wrong."""
    hybrid = TransformersModel(build_model("qwen3-next"))
    gather = hybrid.gather

    def spoilt(
        pools: DevicePools, pages: Sequence[int], n_tokens: int, slot: int | None
    ) -> ModelCache:
        for states in pools.states.values():
            for state in states.values():
                if n_tokens and slot is not None:
                    state[slot].mul_(-3)
        return gather(pools, pages, n_tokens, slot)

    def spoilt_late(pools: DevicePools, row: Row, wait: Callable[[int], None]) -> ModelCache:
        for layer in (*pools.kv, *pools.states):
            wait(layer)  # else the copy of the state would land on what is spoilt here
        return spoilt(pools, row.pages, row.length, row.slot)

    # Whether a restored prefix is read at once or layer by layer hangs on who waits for what.
    monkeypatch.setattr(hybrid, "gather", spoilt)
    monkeypatch.setattr(hybrid, "gather_late", spoilt_late)
    together = simultaneous(requests=3, shared=128, own=64, max_new=3)
    first, second, third = together.turns  # one after another: the second saves, the third reuses
    turns = (first, replace(second, after=first.id), replace(third, after=second.id))
    comparison = asyncio.run(compare(hybrid, replace(together, turns=turns)))
    assert comparison.cached.reused > 0
    assert comparison.logit_difference_max > 0.1
    assert comparison.outputs_equal < 3
    assert comparison.failures


def test_leaking_places_are_counted(
    monkeypatch: pytest.MonkeyPatch, model: TransformersModel
) -> None:
    """A grant that nobody gives back is unaccounted for."""
    from phloem.runtime.demo import measure

    async def leaky(cache) -> str:  # type: ignore[no-untyped-def]
        await cache.allocate(pages=5, owner="leak")
        return ""

    monkeypatch.setattr(measure, "_settled_audit", leaky)
    workload = simultaneous(requests=2, shared=32, own=32, max_new=1)
    comparison = asyncio.run(compare(model, workload))
    assert comparison.unaccounted == 5
    assert comparison.failures == ("together: 5 pages or slots are unaccounted for",)


def test_requests_that_arrive_together_compute_what_is_distinct() -> None:
    """The 16 requests of the demo, a quarter of the size, in tokens."""
    hybrid = TransformersModel(build_model("qwen3-next"))
    workload = simultaneous(requests=16, shared=256, own=64, max_new=2)
    comparison = asyncio.run(compare(hybrid, workload))
    assert comparison.cached.computed <= 1.1 * (256 + 16 * 64)
    assert comparison.outputs_equal == 16
    assert not comparison.failures


@pytest.mark.not_sim("of the wall clock")
async def test_the_lag_of_a_blocked_loop_is_seen() -> None:
    import time

    async with loop_lag(time.perf_counter) as lags:
        await asyncio.sleep(0.02)
        time.sleep(0.05)  # noqa: ASYNC251  what is to be seen
        await asyncio.sleep(0.02)
    assert max(lags) > 0.03


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 95, 100)] == [1.0, 50.0, 95.0, 100.0]
    assert percentile([7.0], 99) == 7.0


def test_an_unreadable_disk_is_no_crash(tmp_path: Path) -> None:
    assert cli.main(["demo", "--quick", "--log", str(tmp_path / "no" / "log")]) == 2
