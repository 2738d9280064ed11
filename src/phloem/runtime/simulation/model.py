"""A model that computes nothing but is strict about memory, and what its steps cost.

It writes the tag of every token into the pages it was given and the tag of its position into the
state slot, and before that checks everything a real kernel would read. Its steps run on a virtual
stream and take as long as a cost model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from phloem.actors.actions import Component, Ids
from phloem.cuda_streams.hazards import POISON
from phloem.cuda_streams.pools import DevicePools
from phloem.cuda_streams.virtual import VirtualStream
from phloem.runtime.layout import ModelLayout, StateSpec
from phloem.runtime.request import Request
from phloem.runtime.simulation.tags import STATE_WORDS, TaggedTokens

__all__ = [
    "QWEN3_NEXT_80B", "Chunk", "CostModel", "Memory", "SimModel", "Violation", "Words",
    "layer_salt", "sim_layout",
]  # fmt: skip

Words = npt.NDArray[np.int64]

_POISONED = int(np.frombuffer(bytes(POISON) * 4, np.int64)[0])
_LAYER = 0x5851_F42D_4C95_7F2D  # tags of different layers differ by multiples of this


class Violation(AssertionError):
    """A rule of the cache was broken. Always a bug: of the cache, or of the scheduler under it."""


def sim_layout(*, layers: int = 1, states: bool = True) -> ModelLayout:
    """The layout that `SimModel` reads and writes: 16 bytes of KV a token, 32 of state, a layer."""
    if not states:
        return ModelLayout.attention_only(layers=layers, kv_heads=1, head_dim=1, kv_dtype="int64")
    return ModelLayout.hybrid(
        kv_layers=layers,
        kv_heads=1,
        head_dim=1,
        kv_dtype="int64",
        states=[StateSpec("tag", (STATE_WORDS,), "int64", layers=layers)],
    )


class Chunk(NamedTuple):
    """One request's part of a step: it computes `tokens[start:end]`.

    `snapshot`: a slot, and the position on the way whose state the kernel writes there as well.
    """

    request: Request
    tokens: TaggedTokens
    start: int
    end: int
    snapshot: tuple[int, int] | None = None


@dataclass(frozen=True)
class CostModel:
    """How long a step takes: the longer of computing and of moving bytes, and a fixed part.

    `flops_per_token` without attention over earlier tokens, whose cost is
    `attention_flops` for each pair of a token and one before it. Weights are read once a step,
    `kv_bytes` for each token of context, `state_bytes` for each request.
    """

    flops_per_token: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float
    state_bytes: float
    flops_per_s: float
    bytes_per_s: float
    fixed_ns: int

    def step_ns(self, chunks: Sequence[Chunk]) -> int:
        """Nanoseconds of one forward pass of `chunks`."""
        flops, moved = 0.0, self.weight_bytes
        for chunk in chunks:
            count = chunk.end - chunk.start
            context = (chunk.start + chunk.end) / 2
            flops += count * (self.flops_per_token + self.attention_flops * context)
            moved += chunk.end * self.kv_bytes + 2 * self.state_bytes
        return self.fixed_ns + round(1e9 * max(flops / self.flops_per_s, moved / self.bytes_per_s))


# 80e9 weights of which 3e9 take part in a token, 12 attention layers of 16 query heads x 256 over
# 2 KV heads in 16 bits, 36 layers of recurrent state; four accelerators at half of 990e12 FLOP/s
# and 70 % of 3.35e12 B/s. A small batch touches about a tenth of the experts.
QWEN3_NEXT_80B = CostModel(
    flops_per_token=6.0e9,
    attention_flops=12 * 4 * 16 * 256,
    weight_bytes=16e9,
    kv_bytes=12 * 2 * 2 * 256 * 2,
    state_bytes=36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    flops_per_s=4 * 990e12 / 2,
    bytes_per_s=4 * 3.35e12 * 0.7,
    fixed_ns=4_000_000,
)


class Memory(Protocol):
    """Who owns what, as far as a step may know; see `phloem.runtime.simulation.watch`."""

    def step_begins(self, pages: Ids, states: Sequence[int]) -> Callable[[], None]:
        """A step touches these places until the returned function is called."""
        ...

    def check_write(self, component: Component, place: int, owner: str) -> None:
        """Raise `Violation` unless a step of `owner` may write there."""
        ...


class SimModel:
    """The model of one runtime. `fail` hears of violations; they end the run.

    `sampled(tokens)` is the token that follows. With `recheck` the context is verified when a
    step ends as well, which finds memory that was given away while a step read it.
    """

    def __init__(
        self,
        pools: DevicePools,
        memory: Memory,
        cost: CostModel,
        fail: Callable[[BaseException], None],
        *,
        recheck: bool = True,
        vocabulary: int = 1000,
    ) -> None:
        self.tokens_computed = 0
        self.bytes_checked = 0
        self.steps = 0
        self._memory = memory
        self._cost = cost
        self._fail = fail
        self._recheck = recheck
        self._vocabulary = vocabulary
        self._page_size = pools.page_size
        self._keys: list[Words] = [layer.k.numpy()[:, :, 0, 0] for layer in pools.kv.values()]
        self._values: list[Words] = [layer.v.numpy()[:, :, 0, 0] for layer in pools.kv.values()]
        self._states: list[Words] = [named["tag"].numpy() for named in pools.states.values()]

    def enqueue(self, chunks: Sequence[Chunk], stream: VirtualStream) -> None:
        """Put one forward pass of `chunks` on `stream`."""
        jobs = [(chunk, chunk.request.page_table(), chunk.request.state_slot) for chunk in chunks]
        pages = jobs[0][1][:0]
        for _, table, _ in jobs:
            pages.extend(table)
        try:
            slots = [slot for _, _, slot in jobs if slot]
            slots += [chunk.snapshot[0] for chunk in chunks if chunk.snapshot is not None]
            ended = self._memory.step_begins(pages, slots)
        except Violation as error:
            self._fail(error)
            raise

        def begin() -> None:
            for chunk, table, slot in jobs:
                self._guard(self._check, chunk, table, slot)

        def end() -> None:
            for chunk, table, slot in jobs:
                if self._recheck:
                    self._guard(self._check, chunk, table, slot)
                self._guard(self._write, chunk, table, slot)
            ended()

        self.steps += 1
        self.tokens_computed += sum(chunk.end - chunk.start for chunk in chunks)
        stream.run(0, begin)
        stream.run(self._cost.step_ns(chunks), end)

    def sampled(self, tokens: TaggedTokens) -> int:
        """The token that follows `tokens`."""
        return tokens.next_token(len(tokens), self._vocabulary)

    def _guard(
        self,
        act: Callable[[Chunk, Ids, int | None], None],
        chunk: Chunk,
        table: Ids,
        slot: int | None,
    ) -> None:
        try:
            act(chunk, table, slot)
        except Violation as error:
            self._fail(error)

    def _check(self, chunk: Chunk, table: Ids, slot: int | None) -> None:
        start = chunk.start
        if start:
            pages = table[: -(-start // self._page_size)]
            expected = chunk.tokens.kv(0, start)
            for layer, keys in enumerate(self._keys):
                found = keys[pages].reshape(-1)[:start]
                self.bytes_checked += found.nbytes
                if not np.array_equal(found, expected ^ layer_salt(layer)):
                    self._report_kv(chunk, table, layer, found, expected ^ layer_salt(layer))
        if slot is None:
            return
        words = chunk.tokens.state(start) if start else np.zeros(STATE_WORDS, np.int64)
        for layer, states in enumerate(self._states):
            salt = layer_salt(layer) if start else np.int64(0)
            self.bytes_checked += words.nbytes
            if not np.array_equal(states[slot], words ^ salt):
                found = (states[slot] ^ salt).tolist()
                what = _what(found[0] ^ int(salt), f"a state of position {found[2]}")
                raise Violation(
                    f"{chunk.request} reads its state at {start} from slot {slot}, layer {layer}: "
                    f"it holds {what}"
                )

    def _report_kv(
        self, chunk: Chunk, table: Ids, layer: int, found: Words, expected: Words
    ) -> None:
        position = int((found != expected).argmax())
        page = table[position // self._page_size]
        stored = int(self._values[layer][page, position % self._page_size])
        what = _what(int(found[position]), f"KV written for position {stored}")
        raise Violation(
            f"{chunk.request} reads token {position} from page {page}, layer {layer}: it holds "
            f"{what}"
        )

    def _write(self, chunk: Chunk, table: Ids, slot: int | None) -> None:
        start, end, size = chunk.start, chunk.end, self._page_size
        owner = chunk.request.id
        for number in range(start // size, -(-end // size)):
            page = table[number]
            self._memory.check_write("kv", page, owner)
            low, high = max(start, number * size), min(end, (number + 1) * size)
            inside = slice(low - number * size, high - number * size)
            for layer, keys in enumerate(self._keys):
                keys[page, inside] = chunk.tokens.kv(low, high) ^ layer_salt(layer)
                self._values[layer][page, inside] = np.arange(low, high)
        if slot is not None:
            self._write_state(owner, slot, chunk.tokens.state(end))
        if chunk.snapshot is not None:
            self._write_state(owner, chunk.snapshot[0], chunk.tokens.state(chunk.snapshot[1]))

    def _write_state(self, owner: str, slot: int, words: Words) -> None:
        self._memory.check_write("state", slot, owner)
        for layer, states in enumerate(self._states):
            states[slot] = words ^ layer_salt(layer)


def layer_salt(layer: int) -> np.int64:
    """What the tags of a layer are combined with, so that layers cannot be mistaken."""
    return np.int64((layer * _LAYER) % 2**63)


def _what(word: int, otherwise: str) -> str:
    if word == _POISONED:
        return "the target of a copy that has not landed"
    return otherwise if word else "nothing"
