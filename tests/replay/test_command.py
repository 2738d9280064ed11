"""`phloem replay`: what it prints and writes, that it repeats, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest

from phloem.errors import InvalidRequest
from phloem.runtime.cli import main
from phloem.runtime.costs.published import geometry_named
from phloem.runtime.replay.bounds import ceiling
from phloem.runtime.replay.requests import prepare
from phloem.runtime.replay.runs import Settings, replay
from phloem.runtime.traces import sample

TRACE = "agent_taubench_airline_tokens"


def written(folder: Path, seed: str, jobs: str) -> tuple[bytes, list[dict[str, object]]]:
    """The decisions and the results of a process of its own, without what a clock measured."""
    command = [sys.executable, "-m", "phloem", "replay", TRACE, "agentic_coding_sessions"]
    command += ["--geometry", "marconi7b", "--seed", "7", "--jobs", jobs, "--limit", "40"]
    command += [f"--policy={name}" for name in ("lru", "benefit", "gdsf", "marconi", "kv-s3fifo")]
    command += ["--capacity", "60%", "--capacity", "1GiB", "--no-bounds"]
    command += ["--decisions", str(folder / "d"), "--json", str(folder / "j")]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    runs = json.loads((folder / "j").read_bytes())["runs"]
    timed = {"us_per_eviction", "us_per_victim", "us_per_lookup", "seconds"}
    kept = [{key: value for key, value in run.items() if key not in timed} for run in runs]
    return (folder / "d").read_bytes(), kept


def test_the_same_seed_decides_the_same_byte_for_byte(tmp_path: Path) -> None:
    """Whatever the hashes of strings, and in one process or in two."""
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    once, again = written(first, "1", "1"), written(second, "2", "2")
    assert once == again
    lines = [json.loads(line) for line in once[0].splitlines()]
    assert sum("policy" in line for line in lines) == 2 * 5 * 2
    assert sum("hit" in line for line in lines) == 20 * 40


def test_it_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    capacity = ["--capacity", "50%", "--capacity", "200%"]
    asked = ["replay", TRACE, "--geometry", "marconi7b", "--policy", "judicious", *capacity]
    assert main([*asked, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    for word in ("judicious", "upper bound", "clairvoyant", "an unbounded cache hits 91.4 %"):
        assert " ".join(word.split()) in " ".join(shown.split())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--geometry", "mine"], "no geometry 'mine'"),
        (["--policy", "best"], "no eviction policy 'best'"),
        (["--policy", "gdsf", "--placement", "branch"], "of its own"),
        (["--placement", "everywhere"], "everywhere"),
        (["--placement", "periodic=x"], "'periodic=x' is no placement"),
        (["--capacity", "0%"], "no share"),
        (["--capacity", "much"], "much"),
        (["--states-share", "2"], "share of 2.0"),
        (["--jobs", "0"], "0 processes"),
        (["--block", "0"], "blocks of 0"),
        (["--one-memory", "--states-share", "0.5"], "no pool of states"),
        (["--one-memory", "--policy", "gdsf"], "of its own"),
        (["--write-policy", "write_back"], "is for a host tier"),
        (["--one-memory", "--capacity", "1MiB"], "1048576 bytes, and 0 on the host, are too few"),
        (["--capacity", "1GiB", "--host-capacity", "9"], "9 on the host, are too few"),
        (["--host-capacity", "1%", "--states-share", "0.001"], "are too few"),
    ],
)
def test_a_wrong_call_is_refused(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", TRACE, "--no-bounds", *wrong]) == 2
    assert message in capsys.readouterr().err


def test_a_host_tier_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["replay", TRACE, "--geometry", "marconi7b", "--capacity", "100%", "--policy", "lru"]
    tiers = ["--host-capacity", "100%", "--write-policy", "write_back"]
    assert main([*asked, *tiers]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("host", "loaded")) and "look" not in shown
    runs = {}
    for name, options in {"none": [], "one": ["--one-memory"], "host": tiers}.items():
        assert main([*asked, "--no-bounds", "--json", *options]) == 0
        (runs[name],) = json.loads(capsys.readouterr().out)["runs"]
    assert not runs["none"]["host_rate"] and not runs["one"]["bytes_to_host"]
    assert runs["one"]["pages_moved"] > 0
    assert 0 < runs["host"]["host_rate"] < runs["host"]["hit_rate"]
    assert runs["host"]["bytes_to_host"] > runs["host"]["bytes_to_device"] > 0
    assert runs["host"]["hit_rate"] > runs["one"]["hit_rate"] > 0.5


def test_blocks_of_a_trace_can_be_divided() -> None:
    """An unbounded cache hits the same, but for what does not fill a block."""
    whole, parts = (
        prepare(sample("mooncake_conversation"), name="c", block=block) for block in (512, 32)
    )
    assert parts.distinct == 16 * whole.distinct
    for one, other in zip(whole.requests, parts.requests, strict=True):
        assert other.blocks == 16 * one.blocks
        assert 16 * one.matchable <= other.matchable < 16 * (one.matchable + 1)
    assert (whole.block_size, parts.block_size) == (512, 32)
    assert 0 <= ceiling(parts) - ceiling(whole) < 0.01
    with pytest.raises(InvalidRequest, match="blocks of 48 tokens out of a trace's 512"):
        prepare(sample("mooncake_conversation"), name="c", block=48)


def test_fewer_than_no_requests_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", TRACE, "--limit", "-1"]) == 2
    assert "the first -1 requests" in capsys.readouterr().err


def test_an_interrupt_ends_the_other_processes() -> None:
    work = prepare(sample(TRACE), name=TRACE, limit=20)
    settings = Settings(geometry=geometry_named("marconi7b"), bounds=False)
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background

    def told(ended: int, total: int, which: str) -> None:
        del ended, total, which
        assert active_children()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay([work], settings, ["lru", "lfu"], ["50%", "20%", "10%"], jobs=2, told=told)
    assert not active_children()
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_traces_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logs of two servers often have the same name; what is asked for twice is shown once."""
    paths: list[str] = []
    for folder, second in (("one", [1, 2]), ("two", [3, 4])):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "log.jsonl"
        lines = [
            {"timestamp": 1000 * number, "input_length": 1024, "hash_ids": ids}
            for number, ids in enumerate(([1, 2], second))
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths.append(str(path))
    command = ["replay", *paths, paths[0], "--policy", "lru", "--policy", "lru"]
    command += ["--capacity", "1GiB", "--capacity", "1024MiB", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(run["trace"], run["hit_rate"]) for run in report["runs"]] == [
        (paths[0], 0.25),
        (paths[1], 0.0),
    ]
    assert [one["trace"] for one in report["bounds"]] == paths
    work = prepare(sample(TRACE), name="one", limit=2)
    with pytest.raises(InvalidRequest, match="same name"):
        replay([work, work], Settings(geometry=geometry_named("marconi7b")), ["lru"], ["5%"])


def test_results_are_written_though_they_cannot_be_drawn(tmp_path: Path) -> None:
    command = ["replay", TRACE, "--limit", "5", "--no-bounds", "--json", str(tmp_path / "j")]
    assert main([*command, "--plot", str(tmp_path / "picture.unknown")]) == 2
    assert json.loads((tmp_path / "j").read_bytes())["runs"]


def test_a_placement_counts_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    def states(*options: str) -> float:
        asked = ["replay", TRACE, "--capacity", "9000%", "--no-bounds", "--json", *options]
        assert main(asked) == 0
        return float(json.loads(capsys.readouterr().out)["runs"][0]["states_per_request"])

    assert states("--placement", "end_of_response") <= 1 < states()
    assert states("--placement", "periodic=64,budget=99") > 2
    assert states("--states-share", "0.5") == states()
