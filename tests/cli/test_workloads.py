"""What the demo serves: shapes, prefixes and traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from phloem import InvalidRequest
from phloem.runtime.demo import workloads as w
from phloem.runtime.traces import SAMPLES, sample


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


def test_bytes_for_a_trace_keep_the_structure_of_its_prefixes() -> None:
    originals = [request.tokens().tolist() for request in sample("agent_taubench_airline_tokens")]
    assert len(originals) == 48
    fit = w._Fit()
    mapped = [fit(prompt) for prompt in originals]
    assert all(0 <= byte < 256 for prompt in mapped for byte in prompt)
    for a in range(0, 48, 5):
        for b in range(48):
            assert common(mapped[a], mapped[b]) == common(originals[a], originals[b])


def test_a_prefix_has_at_most_256_continuations() -> None:
    fit = w._Fit()
    assert len({fit([7, token])[1] for token in range(1000, 1256)}) == 256
    with pytest.raises(InvalidRequest, match="more than 256"):
        fit([7, 5])


def test_sessions_of_a_trace_are_cut_and_follow_one_another() -> None:
    workload = w.trace_sessions(sessions=3, requests=8, prompt_max=1600)
    assert len(workload.turns) == 8
    assert max(len(turn.prompt) for turn in workload.turns) <= 1600
    assert sum(turn.after is None for turn in workload.turns) == 3
    seen: set[str | None] = {None}
    for turn in workload.turns:
        assert turn.after in seen
        seen.add(turn.id)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_trace_that_ships_can_be_served(name: str) -> None:
    workload = w.trace_sessions(SAMPLES[name], requests=5)
    assert 1 <= len(workload.turns) <= 5
    assert all(0 < len(turn.prompt) <= 1900 and turn.max_new >= 1 for turn in workload.turns)


def test_long_prompts_shrink_and_requests_without_session_are_on_their_own() -> None:
    workload = w.trace_sessions(SAMPLES["mooncake_conversation"], requests=5)
    assert "8 times shorter" in workload.about
    assert {turn.after for turn in workload.turns} == {None}


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
    write(tmp_path, "README.md", "{}")
    assert w.trace_files(tmp_path) == [second, first]
    turns = w.trace_sessions(first).turns
    assert [(len(turn.prompt), turn.max_new, turn.after) for turn in turns] == [
        (2, 1, None),
        (4, 2, "b_tokens-0"),
    ]
    assert turns[1].prompt[:2] == turns[0].prompt


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["{"], "no trace of a known format"),
        (['{"s":0,"t":0,"ref":3,"reuse":0,"new":[1],"out":[]}'], "line 1 refers to request 3"),
        ([json.dumps({"s": 0, "t": 0, "ref": -1, "reuse": 0, "new": [1] * 2000, "out": []})],
         "no prompt of at most"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused(tmp_path: Path, lines: list[str], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        w.trace_sessions(write(tmp_path, "x_tokens.jsonl", *lines))


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no \.jsonl"):
        w.trace_files(tmp_path)
