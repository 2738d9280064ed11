"""8-bit states: the bound on the error, what stays exact, and the same codes on every engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.clocks import LoopClock
from phloem.cuda_streams.codec import Int8Codec
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.dispatch import Dispatcher
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.threads import ThreadEngine
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.errors import InvalidRequest
from phloem.runtime.layout import ModelLayout, StateSpec
from streams.fake_device import FakeDriver


def rows_of(states: torch.Tensor, part_bytes: int) -> torch.Tensor:
    out = torch.zeros((len(states), part_bytes), dtype=torch.uint8)
    plain = states.reshape(len(states), -1).view(torch.uint8)
    out[:, : plain.shape[1]] = plain
    return out


class TestInt8Codec:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_s97_error_is_at_most_half_a_scale(self, dtype: str) -> None:
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        states = (torch.randn(3, 4, 5, 16) * torch.tensor([1e-3, 1, 50, 0.0])[:, None, None]).to(
            kind
        )
        part_bytes = -(-states[0].numel() * states.element_size() // 16) * 16 + 16
        codec = Int8Codec((4, 5, 16), dtype, part_bytes)
        coded = codec.encode(rows_of(states, part_bytes))
        assert coded.shape == (3, codec.coded_bytes) == (3, 4 * 20 + 320)
        back = codec.decode(coded)
        assert back.shape == (3, part_bytes)
        size = states[0].numel() * states.element_size()
        assert not back[:, size:].any()
        got = back[:, :size].contiguous().view(kind).view(states.shape).float()
        scale = states.float().abs().amax(-1, keepdim=True) / 127
        rounding = got.abs() * torch.finfo(kind).eps
        assert bool(((got - states.float()).abs() <= scale / 2 * 1.0001 + rounding).all())
        assert not got[:, 3].any(), "zeros stay zeros"
        assert got[:, :3].any()

    def test_what_was_decoded_is_coded_alike(self) -> None:
        codec = Int8Codec((8, 32), "float32", 8 * 32 * 4)
        coded = codec.encode(rows_of(torch.randn(4, 8, 32), codec.part_bytes))
        assert torch.equal(codec.encode(codec.decode(coded))[:, 32:], coded[:, 32:])

    def test_what_is_not_finite_is_loud(self) -> None:
        states = torch.ones(1, 2, 4)
        states[0, 1, 2] = torch.inf
        codec = Int8Codec((2, 4), "float32", 32)
        back = codec.decode(codec.encode(rows_of(states, 32))).view(torch.float32).view(2, 4)
        assert back[0].tolist() == pytest.approx([1.0] * 4) and back[1].isnan().all()

    def test_integers_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="floating-point"):
            Int8Codec((4,), "int32", 16)


LAYOUT = ModelLayout.hybrid(
    kv_layers=1,
    kv_heads=1,
    head_dim=8,
    states=[
        StateSpec("recurrent", (3, 4, 16), "float32", layers=2),
        StateSpec("conv", (5, 3), "bfloat16", layers=2),
    ],
)


REAL = pytest.mark.not_sim("a real engine")


@pytest.mark.parametrize(
    "kind",
    [pytest.param("threads", marks=REAL), "virtual", pytest.param("device", marks=REAL)],
)
@pytest.mark.parametrize("by_layer", [True, False])
async def test_there_and_back(kind: str, by_layer: bool) -> None:
    torch.manual_seed(1)
    loop = asyncio.get_running_loop()
    device = DevicePools.allocate(LAYOUT, pages=2, states=6, page_size=2)
    host = HostPools.allocate(device, pages=2, states=4, int8_states={"recurrent"})
    exact = HostPools.allocate(device, pages=2, states=4)
    assert host.state_rows.row_bytes < exact.state_rows.row_bytes * 0.4
    assert host.nbytes < exact.nbytes and host.state_rows.is_coded and not host.kv_rows.is_coded
    for named in device.states.values():
        for tensor in named.values():
            tensor.copy_(torch.randn(tensor.shape))
    engines: dict[str, Dispatcher] = {
        "threads": ThreadEngine(LoopPoster(loop)),
        "virtual": VirtualEngine(LoopClock(loop)),
        "device": DeviceEngine(LoopPoster(loop), FakeDriver(), stage_bytes=64),
    }
    engine = engines[kind]
    down = Copy(device.state_rows, host.state_rows, [1, 4], [3, 0])
    up = Copy(host.state_rows, device.state_rows, [3, 0], [2, 5])
    first = engine.submit(CopyBatch("d2h", (down,), by_layer=by_layer))
    await engine.submit(CopyBatch("h2d", (up,), requires=(first,), by_layer=by_layer))
    for layer, named in device.states.items():
        codec = host.state_rows.codecs[layer][0]
        assert codec is not None and host.state_rows.codecs[layer][1] is None
        for source, target in ((1, 2), (4, 5)):
            assert torch.equal(named["conv"][target], named["conv"][source]), "exact"
            plain, got = named["recurrent"][source], named["recurrent"][target]
            scale = plain.abs().amax(-1, keepdim=True) / 127
            assert not torch.equal(plain, got)
            assert bool(((plain - got).abs() <= scale * 0.50001).all())
            row = 3 if source == 1 else 0
            codes = codec.encode(rows_of(plain[None], codec.part_bytes))[0]
            assert torch.equal(host.state_rows.parts(layer)[0][row], codes)
    for one in engines.values():
        one.close()


def test_refused() -> None:
    device = DevicePools.allocate(LAYOUT, pages=2, states=6, page_size=2)
    with pytest.raises(InvalidRequest, match="no state is called 'ssm'"):
        HostPools.allocate(device, pages=2, states=4, int8_states={"ssm"})
