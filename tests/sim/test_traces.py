"""Trace readers: every sample, every format's traps, and prefixes that stay what they were."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path

import pytest

from phloem.errors import InvalidRequest
from phloem.runtime.simulation import Scale, of_trace, workload
from phloem.runtime.traces import (
    SAMPLES,
    Sessions,
    TraceRequest,
    read_agent_tokens,
    read_azure,
    read_mooncake,
    read_sessions,
    read_trace,
    sample,
)


def common(a: list[int], b: list[int]) -> int:
    equal = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(equal) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_sample_reads_in_order_of_time(name: str) -> None:
    requests = list(sample(name))
    assert len(requests) >= 20
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    for request in requests:
        tokens = request.tokens()
        assert request.length - request.block_size < len(tokens) <= request.length
        assert int(tokens.min()) >= 0
        assert request.output >= 0


@pytest.mark.parametrize("name", ["mooncake_conversation", "agentic_coding_sessions"])
def test_shrinking_keeps_which_prefixes_are_equal(name: str) -> None:
    requests = list(sample(name))[:40]
    rng = random.Random(0)
    for _ in range(200):
        a, b = rng.choice(requests), rng.choice(requests)
        blocks = common(a.blocks.tolist(), b.blocks.tolist())
        for shrink in (1, a.block_size // 4, 10 * a.block_size):
            size = max(1, a.block_size // shrink)
            mine, theirs = a.tokens(shrink=shrink).tolist(), b.tokens(shrink=shrink).tolist()
            shared = common(mine, theirs)
            assert shared == min(blocks * size, len(mine), len(theirs)), (a, b, shrink)


def test_a_conversation_shares_as_much_as_is_known_of_its_trace() -> None:
    """Every request of the trace begins with the same block, a system prompt."""
    first = {int(request.blocks[0]) for request in sample("mooncake_conversation")}
    assert first == {0}


def write(path: Path, *lines: object) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_mooncake_s_last_block_may_be_partial(tmp_path: Path) -> None:
    line = {"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [4, 9]}
    (request,) = read_mooncake(write(tmp_path / "t.jsonl", line))
    assert request.at_s == 3
    assert len(request.tokens()) == 700
    assert request.tokens()[512] == 9 * 512
    without = {**line, "session_id": None}
    assert len(list(read_mooncake(write(tmp_path / "t.jsonl", line, "", without, "  ")))) == 2


GOOD = {"timestamp": 0, "input_length": 40, "hash_ids": [4, 9], "block_size": 20}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("hello", "malformed"),
        ('{"timestamp": 1', "truncated"),
        ([GOOD], "Expected `object`, got `array`"),
        ({"timestamp": 1, "hash_ids": [1]}, "missing required field `input_length`"),
        ({**GOOD, "input_length": "40"}, r"got `str` - at `\$.input_length`"),
        ({**GOOD, "hash_ids": [4, "nine"]}, r"got `str` - at `\$.hash_ids\[1\]`"),
        (
            {**GOOD, "input_length": 41},
            "41, with 2 hash_ids and a block_size of 20",
        ),
        ({**GOOD, "input_length": 0}, "input_length is 0"),
        ({**GOOD, "block_size": 0}, "a block_size of 0"),
        ({**GOOD, "timestamp": None}, r"got `null` - at `\$.timestamp`"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, bad: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", bad)
    with pytest.raises(InvalidRequest, match=rf"t\.jsonl, line 3: .*{message}"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_token_ids": [1, -3]}, "-3 is no token id"),
        ({"input_ids": [1], "output_ids": [2**31]}, f"{2**31} is no token id"),
        ({"prompt_token_ids": "abc"}, r"got `str` - at `\$.prompt_token_ids`"),
        ({"prompt_token_ids": [1], "arrival_time": "noon"}, r"got `str` - at `\$.arrival_time`"),
    ],
)
def test_a_bad_line_of_a_token_log_too(tmp_path: Path, bad: object, message: str) -> None:
    nothing = {"prompt_token_ids": None, "input_ids": [5], "output_ids": None, "session_id": None}
    path = write(tmp_path / "t.jsonl", nothing, bad)
    with pytest.raises(InvalidRequest, match=rf"t\.jsonl, line 2: .*{message}"):
        list(read_trace(path))


def test_agents_refer_to_earlier_requests_and_their_answers(tmp_path: Path) -> None:
    lines = [
        {"s": 0, "t": 0.0, "ref": -1, "reuse": 0, "new": [1, 2, 3], "out": [4]},
        {"s": 0, "t": 1.0, "ref": 0, "reuse": 4, "new": [5], "out": [6, 7]},
        {"s": 1, "t": 2.0, "ref": 1, "reuse": 2, "new": [9], "out": []},
    ]
    prompts = [r.tokens().tolist() for r in read_agent_tokens(write(tmp_path / "a.jsonl", *lines))]
    assert prompts == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9]]
    with pytest.raises(InvalidRequest, match="line 1 refers to request 0"):
        list(read_agent_tokens(write(tmp_path / "b.jsonl", {**lines[1]})))


def test_sessions_share_tools_and_are_laid_out_in_time(tmp_path: Path) -> None:
    def turn(at: float, *runs: tuple[int, int]) -> dict[str, object]:
        return {"t": at, "model": "m", "in": 0, "out": 5, "runs": runs}

    def session(name: str, *turns: object) -> dict[str, object]:
        return {"id": name, "block_size": 64, "tool_tokens": 128, "requests": turns}

    path = write(
        tmp_path / "s.jsonl.gz",
        session("a", turn(0, (1, 3)), turn(9000, (1, 3), (7, 1)), turn(9001)),
        session("b", {"type": "subagent", "t": 2, "requests": [turn(1, (1, 4))]}),
    )
    requests = list(read_sessions(path, Sessions(every_s=10, pause_max_s=100)))
    assert [(r.session, r.at_s) for r in requests] == [("a", 0), ("b", 10), ("a", 100)]
    first, other, third = (r.blocks.tolist() for r in requests)
    assert first[:2] == other[:2] and first[2] != other[2]
    assert third[:3] == first
    alone = list(read_sessions(path, Sessions(every_s=10, pause_max_s=100, share_tools=False)))
    assert {*alone[0].blocks.tolist()}.isdisjoint(alone[1].blocks.tolist())
    assert {r.session for r in read_sessions(path, Sessions(first=1))} == {"a"}


def test_azure_s_prompts_share_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "z.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4,10",
        "2023-11-16 18:17:05.9799600,0,10",
        "2023-11-16 18:17:06.4799600,3,8",
    )
    a, b = read_azure(path)
    assert (a.at_s, b.at_s, a.output, b.output) == (0, 2.5, 10, 8)
    assert not {*a.tokens().tolist()} & {*b.tokens().tolist()}
    with pytest.raises(InvalidRequest, match=r"z\.csv, line 2"):
        list(read_azure(write(path, "TIMESTAMP,ContextTokens,GeneratedTokens", "noon,4,10")))


@pytest.mark.parametrize(
    "row",
    [
        "2023-11-16 18:15:47",
        "2023-11-16 18:15:47,5",
        "2023-11-16 18:15:47+00:00,5,4",
        "x" * 200_000 + ",5,4",
    ],
    ids=["no lengths", "one length", "a time zone", "a long field"],
)
def test_what_is_no_row_of_azure_s_is_refused(row: str, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    head = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    with pytest.raises(InvalidRequest, match="azure"):
        list(read_azure(write(path, *head, row)))


def test_rows_of_azure_s_that_are_out_of_order_do_not_come_before_the_start(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.68,374,44", "2023-11-16 18:15:40.00,5,4"]
    path = write(tmp_path / "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *rows)
    assert [request.at_s for request in read_azure(path)] == [0.0, 0.0]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no trace of a known format.*none of hash_ids"):
        read_trace(write(tmp_path / "x.jsonl", {"hello": 1}))
    with pytest.raises(InvalidRequest, match="empty"):
        read_trace(write(tmp_path / "x.jsonl"))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "broken.jsonl.gz")
    with pytest.raises(InvalidRequest, match="line 2"):
        list(read_trace(write(tmp_path / "y.jsonl", {**_mooncake()}, '{"hash_ids": 3}')))
    with pytest.raises(InvalidRequest, match="no sample is called"):
        sample("nothing")


def _mooncake() -> dict[str, object]:
    return {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}


def test_a_trace_as_prompts_is_faster_and_says_less() -> None:
    requests = list(sample("mooncake_conversation"))
    prompts = list(of_trace(requests, shrink=128, faster=10, answer_max=3))
    assert len(prompts) == len(requests)
    assert prompts[-1].at_s == pytest.approx((requests[-1].at_s - requests[0].at_s) / 10)
    assert max(prompt.output for prompt in prompts) == 3
    assert isinstance(requests[0], TraceRequest)


@pytest.mark.parametrize("name", ["chat", "agents", "collisions", "bursts", "azure_llm_2023_conv"])
def test_a_workload_is_the_same_for_the_same_seed(name: str) -> None:
    scale = Scale(requests=12, piece=5)

    def plain(seed: int) -> list[tuple[str, float, list[int], int]]:
        return [(p.name, p.at_s, list(p.tokens), p.output) for p in workload(name, seed, scale)]

    assert plain(3) == plain(3)
    assert plain(3) != plain(4)
    assert len(plain(3)) == 12
    assert len({entry[0] for entry in plain(3)}) == 12
    assert [entry[1] for entry in plain(3)] == sorted(entry[1] for entry in plain(3))
    with pytest.raises(InvalidRequest, match="no workload is called"):
        workload("nothing", 0)


def test_blocks_of_any_size_with_ids_of_any_size(tmp_path: Path) -> None:
    path = write(
        tmp_path / "b.jsonl",
        {"input_length": 40, "hash_ids": [2**40, 7, 2**41], "block_size": 16, "session_id": 5},
        {"input_length": 33, "hash_ids": [2**40, 7, 2**42], "block_size": 16},
    )
    one, two = read_trace(path)
    assert (one.block_size, one.session, one.length, two.session) == (16, "5", 40, "")
    assert one.blocks[:2].tolist() == two.blocks[:2].tolist()
    assert one.blocks[2] != two.blocks[2] and int(min(one.blocks.min(), two.blocks.min())) >= 0


def test_a_servers_log_of_token_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.jsonl.gz",
        {"prompt_token_ids": [1, 2, 3], "output_token_ids": [4], "arrival_time": 1e9, "x": None},
        {"input_ids": [1, 2], "arrival_time": 1e9 + 5},
    )
    one, two = read_trace(path)
    assert one.blocks.tolist() == [1, 2, 3] and one.answer.tolist() == [4]
    assert (one.at_s, two.at_s, two.output) == (0.0, 5.0, 0)
    with pytest.raises(InvalidRequest, match="line 1"):
        list(read_trace(write(tmp_path / "t.jsonl", {"input_ids": [-1]})))


AGENT = {"s": 1, "t": 0.0, "ref": -1, "reuse": 0, "new": [1, 2, 3], "out": []}
SESSION = {"id": "a", "block_size": 4, "tool_tokens": 0, "requests": []}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([AGENT | {"new": [2**40]}], "1099511627776 is no token id"),
        ([AGENT | {"out": [7, -4]}], "-4 is no token id"),
        ([AGENT, AGENT | {"ref": 0, "reuse": -1}], "line 2 reuses -1 of 3"),
        ([AGENT, AGENT | {"ref": 0, "reuse": 4}], "line 2 reuses 4 of 3"),
        ([SESSION | {"block_size": 0}], "block_size is 0"),
        ([SESSION | {"tool_tokens": -9}], "tool_tokens -9"),
    ],
)
def test_numbers_that_cannot_be_are_named(
    tmp_path: Path, lines: list[dict[str, object]], message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InvalidRequest, match=message):
        list(read_trace(path))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"every_s": -1.0}, {"every_s": 0.0, "seed": 1}, {"pause_s": -1.0}),
        *({"pause_max_s": math.nan}, {"first": -1}, {"turns_max": -1}),
    ],
)
def test_wrong_layouts_of_sessions_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="sessions"):
        Sessions(**wrong)  # type: ignore[arg-type]  # as a command line may give them


def test_long_pauses_are_as_long_as_asked_for() -> None:
    """An hour on average: more than the exponential of it fits into a float."""
    laid = read_sessions(SAMPLES["agentic_coding_sessions"], Sessions(seed=1, pause_s=3600.0))
    before: dict[str, float] = {}
    pauses: list[float] = []
    for request in laid:
        if request.session in before:
            pauses.append(request.at_s - before[request.session])
        before[request.session] = request.at_s
    assert len(pauses) > 50 and 3500 < sum(pauses) / len(pauses) < 3700
