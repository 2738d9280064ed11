"""The GPU check on a fake device: its rows, its budget, and every step that needs no CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from gpu_checks import failures, order, overlap, rates, whole
from gpu_checks.bed import Bed
from gpu_checks.table import Outcome, Row, Skip, Step, failed, run_steps, write_json
from streams.fake_device import FakeDriver, FakeStream

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu_check.py"


def fake_bed() -> Bed:
    def delay(stream: object, ms: float) -> None:
        assert isinstance(stream, FakeStream)
        stream.put(lambda: time.sleep(ms / 1e3))

    return Bed(FakeDriver(), delay, scale=0.0002)


async def good(bed: list[str]) -> Outcome:
    bed.append("good")
    return Outcome({"rate": 1.5, "kind": "fast"})


async def bad(bed: list[str]) -> Outcome:
    del bed
    outcome = Outcome({"rate": 0.5})
    outcome.expect(True, "this holds")
    outcome.expect(False, "two bytes are wrong")
    return outcome


async def raising(bed: list[str]) -> Outcome:
    del bed
    raise OSError("no such thing")


async def missing(bed: list[str]) -> Outcome:
    del bed
    raise Skip("needs a friend")


def test_rows_budget_and_json(tmp_path: Path) -> None:
    ticks = iter(range(0, 1000, 10))
    told: list[str] = []
    steps = [
        Step("good", 5, good),
        Step("bad", 5, bad),
        Step("raising", 5, raising),
        Step("missing", 5, missing),
        Step("long", 900, good),
        Step("short", 5, good),
        Step("late", 5, good),
    ]
    ran: list[str] = []
    rows = run_steps(
        steps, ran, budget_s=110, clock=lambda: next(ticks), tell=lambda row: told.append(str(row))
    )
    assert [(row.step, row.status) for row in rows] == [
        ("good", "ok"),
        ("bad", "failed"),
        ("raising", "failed"),
        ("missing", "skipped"),
        ("long", "skipped"),
        ("short", "ok"),
        ("late", "skipped"),
    ]
    assert ran == ["good", "good"] and rows[0].seconds == 10
    assert rows[1].notes == ("two bytes are wrong",) and rows[3].notes == ("needs a friend",)
    assert "OSError: no such thing" in told[2] and "rate 1.5  kind fast" in told[0]
    assert failed(rows) and not failed([row for row in rows if row.status != "failed"])
    write_json(tmp_path / "x.json", rows)
    assert json.loads((tmp_path / "x.json").read_text())["bad"]["figures"] == {"rate": 0.5}


STEPS: list[Callable[[Bed], Awaitable[Outcome]]] = [
    order.order, order.events, order.programs, order.codes,
    overlap.overlap,
    rates.pinning, rates.link, rates.scattered, rates.completion, rates.gil,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_holds_on_the_fake_device(step: Callable[[Bed], Awaitable[Outcome]]) -> None:
    (row,) = run_steps(
        [Step("it", 1, step)], fake_bed(), budget_s=60, clock=lambda: 0, tell=lambda _: None
    )
    assert row.status == "ok", row


def test_an_engine_that_forgets_an_edge_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDriver, "wait_event", lambda *_: None)
    (row,) = run_steps(
        [Step("order", 1, order.order)],
        fake_bed(),
        budget_s=60,
        clock=lambda: 0,
        tell=lambda _: None,
    )
    assert row.status == "failed" and "rounds are wrong" in row.notes[0]


@pytest.mark.parametrize(
    "step", [order.capture, rates.interference, failures.lost, failures.refused_pinning]
)
def test_what_only_cuda_can_do_is_skipped_and_says_so(
    step: Callable[[Bed], Awaitable[Outcome]],
) -> None:
    (row,) = run_steps(
        [Step("it", 1, step)], fake_bed(), budget_s=60, clock=lambda: 0, tell=lambda _: None
    )
    assert (row.status == "skipped" and "a matter of" in row.notes[0]) or "CUDA" in row.notes[0]


def test_the_whole_runtime_over_the_fake_device() -> None:
    pytest.importorskip("transformers")
    (row,) = run_steps(
        [Step("whole", 25, whole.whole)],
        fake_bed(),
        budget_s=300,
        clock=lambda: 0,
        tell=lambda _: None,
    )
    assert row.status == "ok", row
    assert float(row.figures["reused, device"]) >= 128 <= float(row.figures["reused, host"])


def test_rows_are_lines() -> None:
    row = Row("order", "failed", 1.25, {"a": 2.0}, ("first", "second"))
    assert str(row).splitlines() == [
        "failed     1.2 s  order         a 2",
        "          first",
        "          second",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(tmp_path / "x.json")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 3 and "no CUDA device cuda:0" in ran.stderr
    assert not (tmp_path / "x.json").exists()


def test_with_torch_alone_all_but_the_whole_runtime_can_run() -> None:
    code = f"""
import importlib.util, runpy, sys
hidden = {{"anyio", "msgspec", "structlog", "transformers", "safetensors", "uvloop", "rich"}}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(name)
inner = importlib.util.find_spec
importlib.util.find_spec = lambda name, *_: None if name in hidden else inner(name)
sys.meta_path.insert(0, Hide())
script = runpy.run_path({str(SCRIPT)!r})
script["reach"]()
from gpu_checks import failures, order, overlap, rates, whole
import asyncio
try:
    asyncio.run(whole.whole(None))
except Exception as why:
    print(why)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout == "needs anyio, msgspec, structlog, transformers, safetensors\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(330)
def test_on_a_gpu_every_check_holds(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(tmp_path / "x.json")],
        capture_output=True, text=True, timeout=320, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
