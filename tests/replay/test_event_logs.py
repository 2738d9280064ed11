"""A runtime's own log as a trace: the replay sees the prefixes that the served prompts shared."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from phloem import CacheConfig, CacheRuntime, InvalidRequest, ModelLayout, Namespace, Request
from phloem.actors.tree.keys import ContentMark, TokenKey
from phloem.actors.tree.policies import policy_named
from phloem.events import RequestEnded
from phloem.runtime.cli import main
from phloem.runtime.costs.model import Geometry
from phloem.runtime.replay.admission import AsPlaced
from phloem.runtime.replay.cache import ReplayCache
from phloem.runtime.replay.requests import Workload, prepare
from phloem.runtime.traces import TraceRequest, read_event_log, read_trace
from phloem.runtime.tracing import open_log, read_log

PAGE = 4
FEW = Geometry(name="few", kv_bytes=100, state_bytes=400, flops_linear=1e9, flops_quadratic=1e4)
# Prompts and answers. Two go on from the first, one parts from it inside a page, one is shorter
# than a page, one is that of another adapter.
FIRST = (list(range(10, 23)), [1, 2, 3, 4, 5, 6])
SERVED: list[tuple[list[int], list[int], str]] = [
    (*FIRST, ""),
    ([*FIRST[0], *FIRST[1], 7, 8, 9], [1, 2], ""),
    ([*FIRST[0], *FIRST[1], 7, 8, 9], [3], "lora"),
    ([*FIRST[0][:10], 99, 98, 97, 96, 95], [1] * 8, ""),
    ([10, 11], [12, 13, 14], ""),
    (FIRST[0], [1, 2, 3, 9, 9, 9], ""),
    ([*FIRST[0], *FIRST[1], 7, 8, 9], [4, 4, 4, 4, 4], "lora"),
]


def config(*, tell_prompts: bool) -> CacheConfig:
    return CacheConfig(
        layout=ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4),
        page_size=PAGE,
        device_pages=64,
        device_states=0,
        tell_prompts=tell_prompts,
    )


async def serve(log: Path, *, tell_prompts: bool = True) -> None:
    """All of `SERVED` in order, which end in the opposite one, and one that is aborted."""
    ticks = chain.from_iterable([n, n] for n in range(10_000))
    with open_log(log, level="info", clock=lambda: float(next(ticks))) as events:
        async with CacheRuntime(config(tell_prompts=tell_prompts), events=events) as cache:
            opened = [
                await cache.open_request(prompt, id=f"r{n}", namespace=Namespace(adapter=adapter))
                for n, (prompt, _, adapter) in enumerate(SERVED)
            ]
            (await cache.open_request(FIRST[0], id="dropped")).abort()
            for request, (_, answer, _) in zip(opened[::-1], SERVED[::-1], strict=True):
                request.extend(answer)
                await _compute(cache, request)
                await request.finish()


async def _compute(cache: CacheRuntime, request: Request) -> None:
    await request.ready()
    await request.allocate(request.length - request.computed)
    with cache.step([request]) as step:
        step.launched({request: request.length})


def as_served() -> list[TraceRequest]:
    """The same, as token ids; those of another adapter differ from the first token on."""
    made: list[TraceRequest] = []
    for prompt, answer, adapter in SERVED:
        shift = 1000 * bool(adapter)
        made.append(
            TraceRequest(
                at_s=0.0,
                session="",
                blocks=np.array(prompt, np.int32) + shift,
                block_size=1,
                length=len(prompt),
                output=len(answer),
                answer=np.array(answer, np.int32) + shift,
            )
        )
    return made


def hits(work: Workload) -> tuple[list[int], int]:
    """Of each request, and how much was evicted, in a cache too small for all of them."""
    cache = ReplayCache(
        FEW,
        work.block_size,
        capacity=8 * PAGE * FEW.kv_bytes + 4 * FEW.state_bytes,
        policy=policy_named("lru"),
        admission=AsPlaced(),
    )
    return [cache.serve(request).hit for request in work.requests], cache.totals.evictions


async def test_a_log_replays_as_the_prompts_themselves(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    await serve(log)
    told = prepare(read_trace(log, empty=True), name="log")
    direct = prepare(as_served(), name="direct", block=PAGE)
    assert told.block_size == PAGE and told.distinct == direct.distinct
    for ours, theirs in zip(told.requests, direct.requests, strict=True):
        assert ours.data == theirs.data
        assert (ours.matchable, ours.tokens) == (theirs.matchable, theirs.tokens)
    found, evictions = hits(told)
    assert (found, evictions) == hits(direct)
    assert any(found) and evictions


async def test_requests_come_as_they_were_opened(tmp_path: Path) -> None:
    """Though they ended in another order; a second run of the runtime follows in the same log."""
    log = tmp_path / "events.jsonl"
    await serve(log)
    await serve(log)
    read = list(read_event_log(log, empty=True))
    expected = [(len(prompt), len(answer)) for prompt, answer, _ in SERVED]
    assert [(one.length, one.output) for one in read] == 2 * expected
    run = read[: len(SERVED)]
    assert [one.at_s for one in run] == sorted(one.at_s for one in run)
    for one, other in zip(run, read[len(SERVED) :], strict=True):
        assert one.blocks.tolist() == other.blocks.tolist()
    filled = [one.length for one in read_trace(log)]
    assert filled == 2 * [length for length, _ in expected if length >= PAGE]


async def test_the_suspended_and_the_forked_count_once(tmp_path: Path) -> None:
    """A resumed one since it was opened first; a fork with its parent's prompt."""
    log, (prompt, answer) = tmp_path / "events.jsonl", FIRST
    with open_log(log) as events:
        async with CacheRuntime(config(tell_prompts=True), events=events) as cache:
            parent = await cache.open_request(prompt, id="parent")
            await _compute(cache, parent)
            await parent.suspend()
            later = await cache.open_request(SERVED[3][0], id="later")
            await _compute(cache, later)
            await later.finish()
            await parent.resume()
            parent.extend(answer)
            await _compute(cache, parent)
            fork = await parent.fork("fork")
            fork.extend([5] * PAGE)
            await _compute(cache, fork)
            await parent.finish()
            await fork.finish()
    parent_read, later_read, fork_read = read_trace(log)
    assert later_read.length == len(SERVED[3][0])
    for one, said in ((parent_read, len(answer)), (fork_read, len(answer) + PAGE)):
        assert (one.length, one.output) == (len(prompt), said)
        assert one.blocks.tolist() == parent_read.blocks.tolist()
    shared = len(parent_read.answer)
    assert fork_read.answer[:shared].tolist() == parent_read.answer.tolist()
    assert len(fork_read.answer) == shared + 1


async def test_a_beginning_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """Logs are rotated while requests are open."""
    log = tmp_path / "events.jsonl"
    await serve(log)
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b'"RequestOpened"' in line and b'"r3"' in line)
    log.write_bytes(b"".join(lines[at:]))
    lengths = [len(prompt) for prompt, _, _ in SERVED]
    assert [one.length for one in read_trace(log, empty=True)] == lengths[3:]


async def test_a_run_that_was_killed_keeps_nothing_open(tmp_path: Path) -> None:
    """Its requests have no end; the same names come again in the next run."""
    log = tmp_path / "events.jsonl"
    await serve(log)
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b'"RequestEnded"' in line and b'"r4"' in line)
    log.write_bytes(b"".join(lines[:at]))
    await serve(log)
    lengths = [len(prompt) for prompt, _, _ in SERVED]
    read = list(read_trace(log, empty=True))
    assert [one.length for one in read] == lengths[5:] + lengths
    assert read[2].at_s == 0.0  # its clock began anew


async def test_without_the_switch_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    await serve(log, tell_prompts=False)
    ends = [one.event for one in read_log(log) if isinstance(one.event, RequestEnded)]
    assert len(ends) == len(SERVED) + 1
    for end in ends:
        assert (end.prompt_tokens, end.tokens, end.page_size, end.blocks) == (0, 0, 0, [])
    with pytest.raises(InvalidRequest, match=r"CacheConfig\(tell_prompts=True\)"):
        list(read_event_log(log))
    assert main(["replay", str(log), "--geometry", "marconi7b", "--no-bounds"]) == 2
    assert "tell_prompts" in capsys.readouterr().err


async def test_the_command_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "night.jsonl"
    await serve(log)
    asked = ["replay", str(log), "--geometry", "marconi7b", "--no-bounds", "--capacity", "100%"]
    assert main(asked) == 0
    assert f"night: {len(SERVED)} requests" in " ".join(capsys.readouterr().out.split())


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    log = tmp_path / "torn.jsonl"
    torn = '{"event":"LogOpened","time":1.0,"level":"info","schema":2,"lea'
    log.write_text(torn)  # it is still being written
    assert list(read_trace(log)) == []
    log.write_text(f"{torn}\n")
    with pytest.raises(InvalidRequest, match=r"torn.jsonl, line 1 is no event"):
        list(read_trace(log))


def test_digests_are_equal_where_whole_prefixes_are() -> None:
    tokens = list(range(11))
    known = TokenKey.of(tokens).digests(PAGE)
    assert len(known) == 2 and len({*known}) == 2
    assert all(0 <= one < 2**64 for one in known)
    assert TokenKey.of(tokens[:8]).digests(PAGE) == known
    assert TokenKey.of([*tokens[:7], 99]).digests(PAGE)[0] == known[0]
    assert TokenKey.of([99, *tokens[1:]]).digests(PAGE)[1] != known[1]
    assert TokenKey.of(tokens[:3]).digests(PAGE) == []
    others = [
        TokenKey.of(tokens, Namespace(adapter="a")),
        TokenKey.of(tokens, Namespace(salt="a")),
        TokenKey.of(tokens, marks=[ContentMark(0, 1, b"a picture")]),
    ]
    first = [key.digests(PAGE)[0] for key in others]
    assert len({known[0], *first}) == 4
    assert known == [18416673036718904533, 2417306406185151691]  # on any machine
