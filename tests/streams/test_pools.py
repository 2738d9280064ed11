"""Pools and layouts: shapes, bytes, views onto one memory, fingerprints."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.fences import LoopPoster
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.cuda_streams.rows import RowPool
from phloem.cuda_streams.specs import FrameShape
from phloem.cuda_streams.threads import ThreadEngine
from phloem.errors import InvalidRequest
from phloem.runtime.layout import KVSpec, LayerSpec, ModelLayout, StateSpec

KV = dict[int, tuple[torch.Tensor, torch.Tensor]]
States = dict[int, dict[str, torch.Tensor]]

RECURRENT = StateSpec("recurrent", (4, 8, 8), "float32", layers=6)
CONV = StateSpec("conv", (5, 3), "bfloat16", layers=6)  # 30 bytes: not a multiple of a word

HYBRID = ModelLayout.hybrid(kv_layers=2, kv_heads=2, head_dim=8, states=[RECURRENT, CONV])
MIXED = ModelLayout.from_layers(
    [
        LayerSpec(),  # nothing at all
        LayerSpec(kv=KVSpec((1, 12), (2, 5), "float32"), states=(CONV,)),  # both; K and V differ
        LayerSpec(states=(RECURRENT, CONV)),
        LayerSpec(kv=KVSpec((3, 1), (3, 1), "float16")),
    ]
)


class TestModelLayout:
    def test_hybrid_as_in_the_readme(self) -> None:
        layout = ModelLayout.hybrid(
            kv_layers=12,
            kv_heads=2,
            head_dim=256,
            kv_dtype="bfloat16",
            states=[
                StateSpec("recurrent", (32, 128, 128), "float32", layers=36),
                StateSpec("conv", (8192, 3), "bfloat16", layers=36),
            ],
        )
        assert layout.kv_layers == tuple(range(3, 48, 4))
        assert layout.has_states and layout.has_kv
        assert layout.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
        assert layout.state_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
        assert layout.page_bytes(16) == 16 * layout.kv_bytes_per_token
        assert layout.slot_bytes == layout.state_bytes

    def test_layer_order(self) -> None:
        layout = ModelLayout.hybrid(
            kv_layers=2,
            kv_heads=1,
            head_dim=4,
            states=[StateSpec("s", (4,), layers=2)],
            layer_order=["none", "both", "state", "kv"],
        )
        assert layout.kv_layers == (1, 3) and layout.state_layers == (1, 2)

    @pytest.mark.parametrize(
        ("kv", "state", "order"),
        [
            (1, 3, "sssk"),
            (2, 5, "ssksssk"),
            (3, 1, "kksk"),
            (0, 2, "ss"),
        ],
    )
    def test_spread(self, kv: int, state: int, order: str) -> None:
        layout = ModelLayout.hybrid(
            kv_layers=kv, kv_heads=1, head_dim=4, states=[StateSpec("s", (4,), layers=state)]
        )
        assert "".join("k" if layer.kv else "s" for layer in layout.layers) == order

    def test_attention_only(self) -> None:
        layout = ModelLayout.attention_only(layers=3, kv_heads=2, head_dim=4, kv_dtype="float16")
        assert not layout.has_states and layout.state_bytes == 0
        assert layout.kv_layers == (0, 1, 2)

    def test_fingerprint_is_of_the_bytes(self) -> None:
        same = ModelLayout.hybrid(kv_layers=2, kv_heads=2, head_dim=8, states=[RECURRENT, CONV])
        assert same.fingerprint == HYBRID.fingerprint
        # Stable between processes and versions: stored data is found by it.
        assert HYBRID.fingerprint.startswith("8096393c598486131f409b60d829b5cd")
        kv, one = KVSpec((1, 2), (1, 2)), LayerSpec(kv=KVSpec((1, 2), (1, 2)))
        layouts = [
            [one],
            [one, one],
            [one, LayerSpec()],
            [LayerSpec(), one],
            [LayerSpec(kv=KVSpec((2, 1), (1, 2)))],
            [LayerSpec(kv=KVSpec((1, 2), (2, 1)))],
            [LayerSpec(kv=KVSpec((1, 2), (1, 2), "float16"))],
            [LayerSpec(kv=kv, states=(StateSpec("s", (1,)),))],
            [LayerSpec(kv=kv, states=(StateSpec("t", (1,)),))],
            [LayerSpec(kv=kv), LayerSpec(states=(StateSpec("t", (1,)),))],
        ]
        prints = {ModelLayout.from_layers(layers).fingerprint for layers in layouts}
        assert len(prints) == len(layouts)

    def test_bad_layouts(self) -> None:
        def hybrid(**changes: object) -> None:
            states = [StateSpec("s", (4,), layers=2)]
            asked = {"kv_layers": 1, "kv_heads": 1, "head_dim": 4, "states": states} | changes
            ModelLayout.hybrid(**asked)  # type: ignore[arg-type]

        with pytest.raises(InvalidRequest, match="equally many"):
            hybrid(states=[StateSpec("s", (4,), layers=2), StateSpec("t", (4,), layers=3)])
        with pytest.raises(InvalidRequest, match="2 state layers, but layer_order has 1"):
            hybrid(layer_order=["kv", "state"])
        with pytest.raises(InvalidRequest, match="'window'"):
            hybrid(layer_order=["kv", "window"])
        with pytest.raises(InvalidRequest, match="no layer keeps"):
            ModelLayout.from_layers([LayerSpec()])
        with pytest.raises(InvalidRequest, match="no torch dtype"):
            KVSpec((1, 2), (1, 2), "bfloat17")
        with pytest.raises(InvalidRequest, match="names are like 'bfloat16'"):
            StateSpec("s", (4,), torch.float32)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidRequest, match="positive"):
            StateSpec("s", 4)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidRequest, match="positive"):
            StateSpec("s", (0, 4))
        with pytest.raises(InvalidRequest, match="at least 1"):
            StateSpec("s", (4,), layers=0)
        with pytest.raises(InvalidRequest, match="same name"):
            LayerSpec(states=(CONV, CONV))
        with pytest.raises(InvalidRequest, match="needs a name"):
            StateSpec("", (1,))


class TestDevicePools:
    @pytest.mark.parametrize("layout", [HYBRID, MIXED], ids=["hybrid", "mixed"])
    @pytest.mark.parametrize("page_size", [1, 4])
    def test_tensors_have_the_layout(self, layout: ModelLayout, page_size: int) -> None:
        pools = DevicePools.allocate(layout, pages=6, states=3, page_size=page_size)
        assert tuple(pools.kv) == layout.kv_layers
        assert tuple(pools.states) == layout.state_layers
        for number, layer in enumerate(layout.layers):
            if layer.kv is not None:
                for tensor, shape in ((pools.kv[number].k, layer.kv.key),
                                      (pools.kv[number].v, layer.kv.value)):  # fmt: skip
                    assert tensor.shape == (6, page_size, *shape)
                    assert str(tensor.dtype) == f"torch.{layer.kv.dtype}"
                    assert not tensor.any()
            for spec in layer.states:
                tensor = pools.states[number][spec.name]
                assert tensor.shape == (3, *spec.shape)
                assert str(tensor.dtype) == f"torch.{spec.dtype}"
        assert pools.page_bytes == layout.page_bytes(page_size)
        assert pools.slot_bytes == layout.slot_bytes
        assert pools.nbytes == 6 * pools.page_bytes + 3 * pools.slot_bytes
        assert (pools.pages, pools.slots) == (6, 3)

    def test_rows_are_the_same_memory_and_only_their_own(self) -> None:
        pools = DevicePools.allocate(MIXED, pages=5, states=4, page_size=3)
        pools.kv[1].k[2].fill_(1.5)
        pools.kv[1].v[2].fill_(2.5)
        (rows,) = pools.kv_rows.parts(1)
        assert rows[2].any() and not rows[[0, 1, 3, 4]].any()
        rows[2].zero_()
        assert not pools.kv[1].k.any() and not pools.kv[1].v.any()
        pools.states[2]["conv"][3].fill_(1)
        recurrent, conv = pools.state_rows.parts(2)
        assert conv[3].any() and not conv[:3].any() and not recurrent.any()
        assert pools.kv_rows.parts(0) == () and pools.state_rows.parts(3) == ()

    def test_k_and_v_of_a_page_are_adjacent(self) -> None:
        pools = DevicePools.allocate(HYBRID, pages=3, states=1, page_size=4)
        layer = pools.kv[3]
        k_bytes = layer.k[0].numel() * layer.k.element_size()
        assert layer.v[1].data_ptr() == layer.k[1].data_ptr() + k_bytes
        assert layer.k[2].data_ptr() == layer.k[1].data_ptr() + 2 * k_bytes

    def test_made_in_inference_mode_and_written_outside(self) -> None:
        with torch.inference_mode():
            pools = DevicePools.allocate(HYBRID, pages=2, states=2, page_size=1)
            host = HostPools.allocate(pools, pages=2, states=2)
        pools.states[0]["recurrent"][1] = 1
        host.kv_rows.parts(3)[0][0] = 1

    def test_pure_attention_takes_no_bytes_for_slots(self) -> None:
        layout = ModelLayout.attention_only(layers=2, kv_heads=1, head_dim=4)
        pools = DevicePools.allocate(layout, pages=2, states=64, page_size=1)
        assert pools.slot_bytes == 0 and not pools.states and pools.slots == 64

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"pages": 0}, "pages is 0"),
            ({"states": 0}, "states is 0"),
            ({"page_size": 0}, "page_size is 0"),
        ],
    )
    def test_bad_sizes(self, sizes: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            DevicePools.allocate(HYBRID, **{"pages": 2, "states": 2, "page_size": 1, **sizes})


class TestAdopted:
    """A framework's tensors: K and V interleaved in one cache, states in a slice of a buffer."""

    def tensors(self) -> tuple[KV, States]:
        cache = torch.zeros((6, 2, 4, 2, 8), dtype=torch.bfloat16)  # [pages, k or v, page, ...]
        k, v = torch.zeros((2, 6, 4, 2, 8), dtype=torch.bfloat16)
        kv = {3: (cache[:, 0], cache[:, 1]), 7: (k, v)}
        states = {
            number: {
                "conv": torch.zeros((5, 5, 3), dtype=torch.bfloat16),  # not the layout's order
                "recurrent": torch.zeros((10, 4, 8, 8))[2:7],
            }
            for number in range(8)
            if HYBRID.layers[number].states
        }
        return kv, states

    def test_views_of_the_same_memory(self) -> None:
        kv, states = self.tensors()
        pools = DevicePools.adopt(HYBRID, page_size=4, kv=kv, states=states)
        assert (pools.pages, pools.slots) == (6, 5)
        assert pools.page_bytes == 4 * HYBRID.kv_bytes_per_token
        assert pools.slot_bytes == HYBRID.state_bytes, "no padding: the tensors are the caller's"
        kv[3][1][2].fill_(1)
        k_rows, v_rows = pools.kv_rows.parts(3)
        assert v_rows[2].any() and not k_rows.any() and not v_rows[3].any()
        recurrent, conv = pools.state_rows.parts(0)
        recurrent[4].fill_(1)
        conv[1].fill_(1)
        assert states[0]["recurrent"][4].any() and not states[0]["recurrent"][:4].any()
        assert states[0]["conv"][1].any() and not states[0]["conv"][2:].any()
        assert pools.kv[3].v is kv[3][1]
        host = HostPools.allocate(pools, pages=3, states=3)
        assert host.kv_rows.part_bytes == pools.kv_rows.part_bytes
        (nbytes,) = {part.untyped_storage().nbytes() for part in host.state_rows.parts(0)}
        assert host.nbytes == nbytes + 3 * pools.page_bytes, "alignment is counted"

    @pytest.mark.not_sim("a real engine")
    async def test_there_and_back(self) -> None:
        kv, states = self.tensors()
        pools = DevicePools.adopt(HYBRID, page_size=4, kv=kv, states=states)
        host = HostPools.allocate(pools, pages=3, states=3)
        for named in states.values():
            for tensor in named.values():
                tensor.copy_(torch.randn(tensor.shape))
        kv[3][1].copy_(torch.randn(kv[3][1].shape))
        want = (kv[3][1][5].clone(), states[1]["conv"][4].clone())
        engine = ThreadEngine(LoopPoster(asyncio.get_running_loop()))
        down = Copy(pools.kv_rows, host.kv_rows, [5], [1])
        state_down = Copy(pools.state_rows, host.state_rows, [4], [2])
        await engine.submit(CopyBatch("d2h", (down, state_down)))
        up = Copy(host.kv_rows, pools.kv_rows, [1], [2])
        state_up = Copy(host.state_rows, pools.state_rows, [2], [1])
        await engine.submit(CopyBatch("h2d", (up, state_up)))
        assert torch.equal(kv[3][1][2], want[0]) and torch.equal(states[1]["conv"][1], want[1])
        engine.close()

    def test_refused(self) -> None:
        def adopt(number: int, name: str, tensor: torch.Tensor | None) -> None:
            kv, states = self.tensors()
            if tensor is None:
                states[number].pop(name)
            elif name in ("k", "v"):
                kv[number] = (tensor, kv[number][1]) if name == "k" else (kv[number][0], tensor)
            else:
                states.setdefault(number, {})[name] = tensor
            DevicePools.adopt(HYBRID, page_size=4, kv=kv, states=states)

        k = torch.zeros((6, 4, 2, 8), dtype=torch.bfloat16)
        for number, name, tensor, message in (
            (3, "k", k.float(), "k of layer 3 must be bfloat16"),
            (3, "v", k[:, :3], "v of layer 3 must be bfloat16"),
            (3, "k", k.transpose(1, 2).contiguous().transpose(1, 2), "k of layer 3 has holes"),
            (7, "v", k[:5], "differ in their first size"),
            (7, "v", k[:0], "v of layer 7 has no rows"),
            (7, "v", k.to("meta"), "one device"),
            (0, "conv", None, "missing .*'conv'"),
            (3, "conv", k, "surplus .*'conv'"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                adopt(number, name, tensor)


class TestHostPools:
    @pytest.mark.parametrize("layout", [HYBRID, MIXED], ids=["hybrid", "mixed"])
    def test_page_first_exact_and_like_the_device(self, layout: ModelLayout) -> None:
        device = DevicePools.allocate(layout, pages=3, states=3, page_size=4)
        host = HostPools.allocate(device, pages=7, states=2)
        assert host.kv_rows.part_bytes == device.kv_rows.part_bytes
        assert host.state_rows.part_bytes == device.state_rows.part_bytes
        assert host.nbytes == 7 * device.page_bytes + 2 * device.slot_bytes
        parts = [part for n in range(len(layout.layers)) for part in host.kv_rows.parts(n)]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert parts[0].untyped_storage().nbytes() == 7 * device.page_bytes
        assert all(part.stride(0) == device.page_bytes for part in parts)

    def test_negative(self) -> None:
        device = DevicePools.allocate(HYBRID, pages=3, states=3, page_size=4)
        with pytest.raises(InvalidRequest, match="pages is -1"):
            HostPools.allocate(device, pages=-1, states=2)


class TestRowPool:
    def test_parts_must_be_bytes_dense_in_a_row(self) -> None:
        good = torch.zeros((4, 32), dtype=torch.uint8)
        RowPool("pool", "device", 4, [[good], []])
        for bad in (good.float(), good[:3], good[:, ::2], good[0]):
            with pytest.raises(InvalidRequest, match="uint8 \\[4, bytes\\]"):
                RowPool("pool", "device", 4, [[bad]])

    @pytest.mark.parametrize(
        ("size", "start", "word"), [(32, 0, 8), (32, 4, 4), (6, 0, 2), (5, 0, 1)]
    )
    def test_the_widest_word_that_fits(self, size: int, start: int, word: int) -> None:
        memory = torch.zeros((4, 64 if size == 32 else size), dtype=torch.uint8)
        odd = RowPool("odd", "device", 4, [[memory[:, start : start + size]]])
        even = RowPool("even", "host", 4, [[torch.zeros((4, size), dtype=torch.uint8)]])
        ((a, b, _),) = odd.pairs(0, even)
        assert a.element_size() == b.element_size() == word
        a.fill_(1)
        assert memory.any()


def test_specs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECURRENT.name = "other"  # type: ignore[misc]


class TestOneMemory:
    def test_each_place_has_its_own_bytes_within_its_frame(self) -> None:
        pools = DevicePools.share(HYBRID, nbytes=20_000, page_size=4)
        shape = pools.frame
        assert shape is not None and pools.nbytes <= 20_000 < pools.nbytes + shape.nbytes
        frames = pools.nbytes // shape.nbytes
        assert (pools.pages, pools.slots) == (frames * shape.pages, frames - 1)
        memory = torch.empty(0, dtype=torch.uint8).set_(
            pools.kv_rows.parts(HYBRID.kv_layers[0])[0].untyped_storage()
        )
        assert len(memory) == pools.nbytes
        owner = torch.zeros(pools.nbytes, dtype=torch.int64)
        for rows, first, each in ((pools.kv_rows, 0, 1), (pools.state_rows, 1, shape.pages)):
            for place in range(rows.count):
                memory.zero_()
                for layer in range(rows.layers):
                    for part in rows.parts(layer):
                        part[place] += 1
                touched = memory.nonzero().flatten()
                assert int(memory.max()) == 1, "parts of a place lie over each other"
                start = first * shape.nbytes + place * each * shape.page_bytes
                assert start <= int(touched.min()) and len(touched) == rows.row_bytes
                assert int(touched.max()) < start + each * shape.page_bytes
                if rows is pools.kv_rows:
                    assert not owner[touched].any(), "pages lie over each other"
                    owner[touched] = place + 1
        assert pools.kv[HYBRID.kv_layers[0]].k.shape == (pools.pages, 4, 2, 8)
        assert pools.states[HYBRID.state_layers[0]]["recurrent"].shape == (pools.slots, 4, 8, 8)

    def test_rows_of_one_memory_copy_like_any_others(self) -> None:
        shared = DevicePools.share(HYBRID, nbytes=60_000, page_size=4)
        apart = DevicePools.allocate(HYBRID, pages=4, states=3, page_size=4)
        assert shared.kv_rows.part_bytes == apart.kv_rows.part_bytes
        assert shared.state_rows.part_bytes == apart.state_rows.part_bytes
        host = HostPools.allocate(shared, pages=3, states=3)
        for layer in apart.states.values():
            layer["recurrent"][1] = torch.rand(4, 8, 8)

        async def copy() -> None:
            engine = ThreadEngine(LoopPoster(asyncio.get_running_loop()))
            try:
                for batch in (
                    CopyBatch("d2h", (Copy(apart.state_rows, host.state_rows, [1], [2]),)),
                    CopyBatch("h2d", (Copy(host.state_rows, shared.state_rows, [2], [3]),)),
                ):
                    await engine.submit(batch)
            finally:
                engine.close()

        asyncio.run(copy())
        for number, layer in apart.states.items():
            assert torch.equal(shared.states[number]["recurrent"][3], layer["recurrent"][1])

    @pytest.mark.parametrize(
        ("page", "slot", "pages", "waste"),
        [
            (393_216, 39_500_000, 100, 0.01),  # gated delta nets beside grouped attention, bfloat16
            (1 << 20, 26_800_000, 26, 0.02),
            (128, 1024, 8, 0),
            (160, 144, 1, 0.1),
            (1600, 1760, 1, 0.1),
            (1600, 3040, 2, 0.06),
        ],
    )
    def test_the_frame_wastes_little(self, page: int, slot: int, pages: int, waste: float) -> None:
        shape = FrameShape.of(page, slot)
        assert shape.pages == pages and shape.page_bytes * pages == shape.nbytes
        assert shape.page_bytes >= page and shape.slot_bytes >= slot
        assert shape.page_bytes % 16 == 0
        assert 1 - min(page * pages, slot) / shape.nbytes <= waste

    def test_what_has_not_both_kinds_cannot_share(self) -> None:
        attention = ModelLayout.attention_only(layers=1, kv_heads=1, head_dim=4)
        with pytest.raises(InvalidRequest, match="one of them is missing"):
            DevicePools.share(attention, nbytes=1 << 20, page_size=4)
        with pytest.raises(InvalidRequest, match="3 are needed"):
            DevicePools.share(HYBRID, nbytes=1000, page_size=4)


def test_the_text_of_pools_is_short() -> None:
    """Whoever logs them by mistake writes no tensors."""
    layout = ModelLayout.attention_only(layers=2, kv_heads=1, head_dim=4)
    pools = DevicePools.allocate(layout, pages=300, states=1, page_size=16)
    assert repr(pools) == (
        f"DevicePools(300 pages of 16 tokens, 1 slots, {pools.nbytes} bytes on cpu)"
    )
