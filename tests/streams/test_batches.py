"""Descriptors are checked when they are made, before anything is queued."""

from __future__ import annotations

import random

import numpy as np
import pytest

from phloem.cuda_streams.batches import Clear, Copy, CopyBatch
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.errors import InvalidRequest
from phloem.runtime.layout import ModelLayout
from streams.bench import Bench

BENCH = Bench.make("none")
KV, STATES = BENCH.device.kv_rows, BENCH.device.state_rows
HOST_KV, HOST_STATES = BENCH.host.kv_rows, BENCH.host.state_rows


def test_coalescing_rebuilds_the_same_pairs_in_the_fewest_runs() -> None:
    rng = random.Random(7)
    for _ in range(300):
        count = rng.randrange(20)
        source = sorted(rng.sample(range(24), count))
        target = sorted(rng.sample(range(24), count))
        copy = Copy(KV, HOST_KV, source, target)
        pairs = [(run.source + n, run.target + n) for run in copy.runs for n in range(run.length)]
        assert pairs == list(zip(source, target, strict=True))
        for before, after in zip(copy.runs, copy.runs[1:], strict=False):
            joined = before.source + before.length == after.source
            assert not (joined and before.target + before.length == after.target)


@pytest.mark.parametrize("ids", [(3, 1), [3, 1], np.array([3, 1], dtype=np.int32)])
def test_ids_of_any_integer_sequence_are_copied(ids: list[int]) -> None:
    copy = Copy(KV, HOST_KV, ids, [1, 2])
    assert copy.source_ids == (3, 1)
    assert copy == Copy(KV, HOST_KV, (3, 1), (1, 2)) and hash(copy)
    assert copy.nbytes == 2 * BENCH.device.page_bytes
    assert Clear(STATES, []).target_ids == ()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([0], [24], "24 is not a row of host kv"),
        ([-1], [0], "-1 is not a row of device kv"),
        ([1, 2], [1], "2 source_ids, but 1"),
        ([1, 2, 3], [4, 5, 4], "4 is named twice"),
        ([1.0], [2], "integers"),
        ([True], [2], "integers"),
        ([[1]], [2], "flat"),
    ],
)
def test_f057_bad_ids(source: list[int], target: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Copy(KV, HOST_KV, source, target)


def test_f057_bad_pools() -> None:
    with pytest.raises(InvalidRequest, match="differ in layout"):
        Copy(KV, STATES, [1], [1])
    other = DevicePools.allocate(
        ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=1), pages=2, states=0, page_size=1
    )
    with pytest.raises(InvalidRequest, match="different models"):
        CopyBatch("d2d", (Clear(STATES, [1]), Clear(other.kv_rows, [1])))
    other_host = HostPools.allocate(other, pages=1, states=0)
    with pytest.raises(InvalidRequest, match="differ in layout"):
        Copy(KV, other_host.kv_rows, [1], [0])


def test_bad_batches() -> None:
    down, up = Copy(KV, HOST_KV, [1], [1]), Copy(HOST_KV, KV, [1], [1])
    for channel, item in (("d2h", up), ("h2d", down), ("d2d", up), ("h2d", Clear(HOST_KV, [1]))):
        with pytest.raises(InvalidRequest, match="is not"):
            CopyBatch(channel, (item,))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no channel"):
        CopyBatch("p2p", (down,))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="at least one item"):
        CopyBatch("d2h", ())


def test_rows_of_a_batch_are_used_once() -> None:
    with pytest.raises(InvalidRequest, match="row 2 of host kv is a target twice"):
        CopyBatch("d2h", (Copy(KV, HOST_KV, [1], [2]), Copy(KV, HOST_KV, [3], [2])))
    with pytest.raises(InvalidRequest, match="row 3 of device states is source and target"):
        CopyBatch("d2d", (Copy(STATES, STATES, [3], [3]),))
    with pytest.raises(InvalidRequest, match="row 3 of device states is source and target"):
        CopyBatch("d2d", (Copy(STATES, STATES, [3], [4]), Clear(STATES, [3])))
    CopyBatch("d2h", (Copy(KV, HOST_KV, [1], [2]), Copy(STATES, HOST_STATES, [1], [2])))
    CopyBatch("d2d", (Copy(STATES, STATES, [1, 1], [2, 3]),))
