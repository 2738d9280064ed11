"""What the demo serves: shapes, prefixes and traces."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import pytest

from phloem import InvalidRequest
from phloem.runtime.demo import workloads as w


def common(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_a_conversation_goes_on_from_what_it_answers_and_branches() -> None:
    workload = w.conversation_tree(sessions=2, turns=3, system=300, spoken=40)
    turns = {turn.id: turn for turn in workload.turns}
    assert len(turns) == 2 * 4
    assert len({turn.prompt for turn in turns.values()}) == len(turns)
    for turn in turns.values():
        before = turns.get(turn.after or "")
        if before is not None:
            assert turn.prompt[: len(before.prompt)] == before.prompt
    branches = turns["talk1.3"], turns["talk1.3b"]
    assert branches[0].after == branches[1].after == "talk1.2"
    assert common(branches[0].prompt, branches[1].prompt) > len(turns["talk1.2"].prompt)
    assert 300 <= common(turns["talk1.1"].prompt, turns["talk2.1"].prompt) < 320


def test_simultaneous_requests_have_the_shape_asked_for() -> None:
    workload = w.simultaneous()
    assert [len(turn.prompt) for turn in workload.turns] == [1024 + 128] * 16
    assert {turn.after for turn in workload.turns} == {None}
    distinct = w.distinct_tokens(turn.prompt for turn in workload.turns)
    assert 1024 + 15 * 120 < distinct <= 1024 + 16 * 128


def test_distinct_tokens_counts_each_prefix_once() -> None:
    rng = Random(1)
    prompts = [tuple(rng.choices((1, 2), k=rng.randrange(1, 12))) for _ in range(200)]
    prefixes = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert w.distinct_tokens(prompts) == len(prefixes)
    assert w.distinct_tokens([]) == 0


def test_the_sample_keeps_the_structure_of_its_prefixes() -> None:
    source = w._Source("agent_airline_tokens.jsonl.gz", w.SAMPLE.read_bytes())
    originals = [prompt for _, prompt, _ in source.requests()]
    assert len(originals) == 48
    fit = w._Fit()
    mapped = [fit(prompt) for prompt in originals]
    assert all(0 <= byte < 256 for prompt in mapped for byte in prompt)
    for a in range(0, 48, 5):
        for b in range(48):
            assert common(mapped[a], mapped[b]) == common(originals[a], originals[b])


def test_sessions_of_a_trace_are_cut_and_follow_one_another() -> None:
    workload = w.trace_sessions(sessions=3, requests=8, prompt_max=1600)
    assert len(workload.turns) == 8
    assert max(len(turn.prompt) for turn in workload.turns) <= 1600
    sessions = {turn.id.split(".")[0] for turn in workload.turns}
    assert len(sessions) == 3
    seen = set[str | None]([None])
    for turn in workload.turns:
        assert turn.after in seen
        seen.add(turn.id)


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def test_a_folder_of_traces(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "b_tokens.jsonl",
        '{"s":0,"t":0,"ref":-1,"reuse":0,"new":[70000,5],"out":[9]}',
        '{"s":0,"t":1,"ref":0,"reuse":3,"new":[6],"out":[9,9]}',
    )
    second = write(tmp_path, "a_tokens.jsonl.gz", "{}")
    write(tmp_path, "other.jsonl", "{}")
    assert w.trace_files(tmp_path) == [second, first]
    turns = w.trace_sessions(first).turns
    assert [(len(turn.prompt), turn.max_new, turn.after) for turn in turns] == [
        (2, 1, None),
        (4, 2, "trace0.1"),
    ]
    assert turns[1].prompt[:2] == turns[0].prompt


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1"),
        ('{"s":0,"ref":3,"reuse":0,"new":[1],"out":[]}', "refers to line 3"),
        ('{"s":0,"ref":-1,"reuse":0,"new":[1],"out":[]}', "no prompt of at most"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        w.trace_sessions(write(tmp_path, "x_tokens.jsonl", line))


def test_a_folder_without_traces_and_a_file_that_is_not_gzip_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no \\*_tokens"):
        w.trace_files(tmp_path)
    (tmp_path / "x_tokens.jsonl.gz").write_bytes(b"plain")
    with pytest.raises(InvalidRequest, match="not gzip"):
        w.trace_sessions(tmp_path / "x_tokens.jsonl.gz")
