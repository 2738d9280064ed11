"""Checks that hold or do not: order in both directions, events, graphs, programs, codes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch
from streams.bench import LAYOUT
from streams.programs import run_real, some_ops

from gpu_checks.bed import Bed
from gpu_checks.table import Outcome, Skip
from phloem.cuda_streams.batches import Copy, CopyBatch
from phloem.cuda_streams.codec import Int8Codec
from phloem.cuda_streams.device import DeviceEngine
from phloem.cuda_streams.device_streams import DeviceStream
from phloem.cuda_streams.fences import Fence
from phloem.cuda_streams.pools import DevicePools, HostPools
from phloem.errors import InvalidRequest
from phloem.runtime.layout import LayerSpec, ModelLayout, StateSpec

__all__ = ["capture", "codes", "events", "order", "programs"]

_DELAY_MS = 3.0


@dataclass
class _Scene:
    bed: Bed
    engine: DeviceEngine
    stream: DeviceStream
    device: DevicePools
    host: HostPools
    edges: bool

    def write(self, page: int, value: int) -> None:
        for layer in range(self.device.kv_rows.layers):
            for part in self.device.kv_rows.parts(layer):
                part[page].fill_(value)

    def kept(self) -> torch.Tensor:
        """A page as the device reads it now; on the stream."""
        return torch.cat([part[1] for part in self.device.kv_rows.parts(2)])

    def put(self, fn: Callable[[], None]) -> None:
        self.bed.driver.enqueue(self.stream.stream, fn)

    def after(self, fence: Fence) -> tuple[Fence, ...]:
        return (fence,) if self.edges else ()

    def backup(self, after: tuple[Fence, ...]) -> CopyBatch:
        item = Copy(self.device.kv_rows, self.host.kv_rows, [1], [1])
        return CopyBatch("d2h", (item,), after)

    def host_is(self, value: int) -> bool:
        return all(bool((part[1] == value).all()) for part in self.host.kv_rows.parts(2))

    async def settled(self) -> None:
        await self.engine.drain()
        await self.stream.record().reached()


async def _store_of_a_page_being_written(scene: _Scene, value: int) -> bool:
    scene.bed.delay(scene.stream.stream, _DELAY_MS)
    scene.put(lambda: scene.write(1, value))
    await scene.engine.submit(scene.backup(scene.after(scene.stream.record())))
    await scene.settled()
    return scene.host_is(value)


async def _load_over_a_page_being_read(scene: _Scene, value: int) -> bool:
    scene.put(lambda: scene.write(1, value))
    await scene.settled()
    seen: list[torch.Tensor] = []
    scene.bed.delay(scene.stream.stream, _DELAY_MS)
    scene.put(lambda: seen.append(scene.kept()))
    for part in scene.host.kv_rows.parts(2):
        part[2].fill_(value ^ 255)
    item = Copy(scene.host.kv_rows, scene.device.kv_rows, [2], [1])
    await scene.engine.submit(CopyBatch("h2d", (item,), scene.after(scene.stream.record())))
    await scene.settled()
    return bool((seen[0] == value).all())


async def _page_used_again_while_it_is_stored(scene: _Scene, value: int) -> bool:
    scene.put(lambda: scene.write(1, value))
    await scene.settled()
    other = scene.bed.driver.new_stream("slow")
    slow = DeviceStream("slow", other, scene.bed.driver, lambda _: None)
    scene.bed.delay(other, _DELAY_MS)
    ticket = scene.engine.submit(scene.backup((slow.record(),)))
    await ticket.placed.reached()
    if scene.edges:
        scene.stream.wait(ticket.quiesced)
    scene.put(lambda: scene.write(1, value ^ 255))
    await scene.settled()
    await asyncio.to_thread(slow.close)
    scene.bed.driver.close_stream(other)
    return scene.host_is(value)


async def _load_of_a_page_being_stored(scene: _Scene, value: int) -> bool:
    scene.bed.delay(scene.stream.stream, _DELAY_MS)
    scene.put(lambda: scene.write(1, value))
    store = scene.engine.submit(scene.backup((scene.stream.record(),)))
    item = Copy(scene.host.kv_rows, scene.device.kv_rows, [1], [3])
    requires = (store,) if scene.edges else ()
    await scene.engine.submit(CopyBatch("h2d", (item,), requires=requires))
    await scene.settled()
    return all(bool((part[3] == value).all()) for part in scene.device.kv_rows.parts(2))


_SCENES: dict[str, Callable[[_Scene, int], Awaitable[bool]]] = {
    "store of a page being written": _store_of_a_page_being_written,
    "load over a page being read": _load_over_a_page_being_read,
    "page used again while stored": _page_used_again_while_it_is_stored,
    "load of a page being stored": _load_of_a_page_being_stored,
}


async def order(bed: Bed) -> Outcome:
    """Each edge: with it never a wrong byte; without it some, or the check proves nothing."""
    outcome, rounds = Outcome(), 100 if bed.is_cuda else 4
    device, host = bed.pools(LAYOUT, pages=5, page_size=2)
    async with bed.engine() as engine, bed.stream() as stream:
        for name, play in _SCENES.items():
            bad = {}
            for edges in (True, False):
                scene = _Scene(bed, engine, stream, device, host, edges)
                good = [await play(scene, 1 + number % 200) for number in range(rounds)]
                bad[edges] = good.count(False)
            outcome.figures[name] = f"{bad[True]} | {bad[False]} of {rounds}"
            outcome.expect(bad[True] == 0, f"{name}: {bad[True]} of {rounds} rounds are wrong")
            outcome.expect(bad[False] > 0, f"{name}: without the edge it goes right, too")
    return outcome


async def events(bed: Bed) -> Outcome:
    """An event that was never recorded counts as complete; ours are refused until they are."""
    outcome = Outcome()
    if bed.is_cuda:
        never = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has not typed it
        complete = never.query()  # type: ignore[no-untyped-call]
        outcome.figures["an event never recorded is"] = "complete" if complete else "pending"
    device, host = bed.pools(LAYOUT, pages=4, page_size=2)
    async with bed.engine() as engine, bed.stream() as stream:
        gate = Fence()
        item = Copy(host.kv_rows, device.kv_rows, [1], [1])
        ticket = engine.submit(CopyBatch("h2d", (item,), (gate,)))
        outcome.expect(not ticket.quiesced.passed, "a copy that was not launched counts as done")
        try:
            stream.wait(ticket.layer_fence(0))
            outcome.expect(False, "a stream waits for an event that was not recorded")
        except InvalidRequest:
            gate.mark_passed()
        await ticket.placed.reached()
        stream.wait(ticket.layer_fence(0))
        await ticket
    return outcome


async def capture(bed: Bed) -> Outcome:
    """A graph can be captured while our threads wait for events; a captured stream is refused."""
    if not bed.is_cuda:
        raise Skip("graphs are CUDA's")
    outcome = Outcome()
    device, host = bed.pools(LAYOUT, pages=40, page_size=2)
    data = torch.zeros(1 << 20, device=bed.driver.device)
    native = torch.cuda.Stream(bed.driver.device)  # type: ignore[no-untyped-call]
    bed.driver.settle()
    ids = list(range(1, 40))
    item = Copy(device.kv_rows, host.kv_rows, ids, ids)
    async with bed.engine() as engine, bed.stream() as forward:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=native):  # which begins by waiting for all there is
            data.add_(1)
            for _ in range(10):
                bed.delay(forward.stream, 1.0)
                # Launched and waited for by the engine's threads while this one captures.
                await engine.submit(CopyBatch("d2h", (item,), (forward.record(),)))
            try:
                bed.driver.check_stream(native)
                outcome.expect(False, "a stream that captures is taken for one that runs")
            except InvalidRequest:
                pass
        for _ in range(3):
            graph.replay()
        await engine.drain()
    bed.driver.settle()
    outcome.expect(bool((data == 3).all()), "the captured graph does not do what it should")
    return outcome


async def programs(bed: Bed) -> Outcome:
    """The random programs of the test suite: final bytes equal a plain replay."""
    outcome = Outcome()
    kind, count = ("cuda", 20) if bed.is_cuda else ("device, batched", 1)
    before = torch.cuda.memory_allocated() if bed.is_cuda else 0
    for seed in range(count):
        wrong = await run_real(kind, some_ops(seed, 100), seed)
        outcome.expect(not wrong, f"program {seed}: {wrong}")
    outcome.figures["operations"] = float(count * 100)
    if bed.is_cuda:
        gc.collect()
        left = torch.cuda.memory_allocated() - before
        outcome.expect(left <= 1 << 20, f"{left} bytes of device memory are left allocated")
    return outcome


async def codes(bed: Bed) -> Outcome:
    """8-bit states: coded on the device as on the CPU."""
    outcome, shape = Outcome(), (32, 64, 128)
    layout = ModelLayout.from_layers([LayerSpec(states=(StateSpec("recurrent", shape),))])
    device = DevicePools.allocate(layout, pages=0, states=4, page_size=1, device=bed.driver.device)
    states = device.states[0]["recurrent"]
    states.normal_()
    bed.driver.settle()
    memory = bed.driver.pinned_memory()
    host = HostPools.allocate(device, pages=0, states=4, memory=memory, int8_states=["recurrent"])
    async with bed.engine() as engine:
        item = Copy(device.state_rows, host.state_rows, [1, 3], [0, 2])
        await engine.submit(CopyBatch("d2h", (item,)))
    (rows,) = host.state_rows.parts(0)
    codec = Int8Codec(shape, "float32", states[0].numel() * 4)
    want = codec.encode(states[[1, 3]].cpu().view(2, -1).view(torch.uint8))
    differing = int((rows[[0, 2]] != want).sum())
    outcome.figures["codes that differ"] = float(differing)
    off = codec.decode(rows[[0, 2]].clone()).view(torch.float32).view(2, *shape)
    error = (off - states[[1, 3]].cpu()).abs()
    scale = states[[1, 3]].cpu().abs().amax(-1, keepdim=True) / 127
    outcome.expect(bool((error <= scale * 0.5001).all()), "an element is off by over half a scale")
    return outcome
