"""A model that computes nothing but is strict about memory, and what its steps cost.

It writes the tag of every token into the pages it was given and the tag of its position into the
state slot, and before that checks everything a real kernel would read. Its steps run on a virtual
stream and take as long as a cost model says.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from phloem.actors.actions import Component, Ids
from phloem.cuda_streams.hazards import POISON
from phloem.cuda_streams.pools import DevicePools
from phloem.cuda_streams.virtual import VirtualStream
from phloem.runtime.layout import KVSpec, LayerSpec, ModelLayout, StateSpec
from phloem.runtime.request import Request
from phloem.runtime.simulation.tags import STATE_WORDS, TaggedTokens

__all__ = [
    "QWEN3_NEXT_80B", "Chunk", "CostModel", "Memory", "SimModel", "Violation", "Words",
    "layer_salt", "sim_layout",
]  # fmt: skip

Words = npt.NDArray[np.int64]

_POISONED = int(np.frombuffer(bytes(POISON) * 4, np.int64)[0])
_GOOD, _RUBBISH = np.int64(0), np.int64(0x2545_F491_4F6C_DD1D)
_LAYER = 0x5851_F42D_4C95_7F2D  # tags of different layers differ by multiples of this


class Violation(AssertionError):
    """A rule of the cache was broken. Always a bug: of the cache, or of the scheduler under it."""


def sim_layout(*, layers: int = 1, states: bool = True, window: int = 0) -> ModelLayout:
    """The layout that `SimModel` reads and writes: 16 bytes of KV a token, 32 of state, a layer.

    With a `window` there are as many layers more whose attention looks back so many tokens.
    """
    if window:
        sliding = LayerSpec(kv=KVSpec((1, 1), (1, 1), "int64", kept=f"window:{window}"))
        full = sim_layout(layers=layers, states=states).layers
        return ModelLayout.from_layers((*full, *(sliding,) * layers))
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
    `doubts`, of a pass that runs before it is known whether what it reads has arrived: what was
    wrong, if it was launched too early.
    """

    request: Request
    tokens: TaggedTokens
    start: int
    end: int
    snapshot: tuple[int, int] | None = None
    doubts: list[Violation] | None = None


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

    def step_begins(
        self, pages: Ids, states: Sequence[int], spans: Mapping[Component, Sequence[int]]
    ) -> Callable[[], None]:
        """A step touches these places until the returned function is called."""
        ...

    def check_write(self, component: Component, place: int, owner: str) -> None:
        """Raise `Violation` unless a step of `owner` may write there."""
        ...


class _Job(NamedTuple):
    """A chunk with the places that its kernel was given."""

    chunk: Chunk
    table: Ids
    window: Ids  # the table of the sliding layers, empty when there are none
    slot: int | None


class _KvLayer(NamedTuple):
    keys: Words
    values: Words


class SimModel:
    """The model of one runtime. `fail` hears of violations; they end the run.

    `sampled(tokens)` is the token that follows. With `recheck` the context is verified when a
    step ends as well, which finds memory that was given away while a step read it.
    `windows`: the layers, by their numbers, that look back only so many tokens.
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
        windows: Mapping[int, int] | None = None,
    ) -> None:
        self.tokens_computed = 0
        self.bytes_checked = 0
        self.steps = 0
        self._memory = memory
        self._cost = cost
        self.fail = fail
        self._recheck = recheck
        self._vocabulary = vocabulary
        self._page_size = pools.page_size
        self._salt = _GOOD  # of what is written now
        self._window = max((windows or {}).values(), default=0)
        self._full: list[_KvLayer] = []
        self._sliding: list[_KvLayer] = []
        for number, layer in pools.kv.items():
            words = _KvLayer(layer.k.numpy()[:, :, 0, 0], layer.v.numpy()[:, :, 0, 0])
            (self._sliding if number in (windows or {}) else self._full).append(words)
        self._states: list[Words] = [named["tag"].numpy() for named in pools.states.values()]

    def enqueue(self, chunks: Sequence[Chunk], stream: VirtualStream) -> Callable[[], None]:
        """Put one forward pass of `chunks` on `stream`.

        The function that is returned has it fail, before it ends: what it writes is rubbish then,
        as is what comes of data that had not arrived.
        """
        none: Ids = array("i")
        jobs = [
            _Job(
                chunk,
                chunk.request.page_table(),
                chunk.request.span_table("window") if self._window else none,
                chunk.request.state_slot,
            )
            for chunk in chunks
        ]
        pages, spans = none[:], list[int]()
        for job in jobs:
            pages.extend(job.table)
            spans.extend(filter(None, job.window))
        try:
            slots = [job.slot for job in jobs if job.slot]
            slots += [chunk.snapshot[0] for chunk in chunks if chunk.snapshot is not None]
            ended = self._memory.step_begins(pages, slots, {"window": spans} if spans else {})
        except Violation as error:
            self.fail(error)
            raise

        failed: list[bool] = []

        def begin() -> None:
            for job in jobs:
                self._guard(self._check, job)

        def end() -> None:
            for job in jobs:
                if self._recheck:
                    self._guard(self._check, job)
                self._salt = _RUBBISH if failed or job.chunk.doubts else _GOOD
                self._guard(self._write, job)
            ended()

        self.steps += 1
        self.tokens_computed += sum(chunk.end - chunk.start for chunk in chunks)
        stream.run(0, begin)
        stream.run(self._cost.step_ns(chunks), end)
        return lambda: failed.append(True)

    def sampled(self, tokens: TaggedTokens) -> int:
        """The token that follows `tokens`."""
        return tokens.next_token(len(tokens), self._vocabulary)

    def _guard(self, act: Callable[[_Job], None], job: _Job) -> None:
        doubts = job.chunk.doubts
        try:
            act(job)
        except Violation as error:
            if doubts is None:
                self.fail(error)
            else:
                doubts.append(error)

    def _check(self, job: _Job) -> None:
        chunk, slot, start = job.chunk, job.slot, job.chunk.start
        if start:
            self._check_kv(chunk, self._full, job.table, 0)
            self._check_kv(chunk, self._sliding, job.window, max(0, start - self._window))
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

    def _check_kv(self, chunk: Chunk, layers: Sequence[_KvLayer], table: Ids, since: int) -> None:
        """The KV of the tokens from `since` to the chunk's start is as their tags say."""
        size, start = self._page_size, chunk.start
        first = since // size
        pages = table[first : -(-start // size)]
        expected = chunk.tokens.kv(since, start)
        for number, layer in enumerate(layers):
            found = layer.keys[pages].reshape(-1)[since - first * size : start - first * size]
            self.bytes_checked += found.nbytes
            wrong = found != expected ^ layer_salt(number)
            if wrong.any():
                at = since + int(wrong.argmax())
                page = table[at // size]
                stored = int(layer.values[page, at % size])
                what = _what(int(found[at - since]), f"KV written for position {stored}")
                kind = "page" if layers is self._full else "window page"
                raise Violation(
                    f"{chunk.request} reads token {at} from {kind} {page}, layer {number}: it "
                    f"holds {what}"
                )

    def _write(self, job: _Job) -> None:
        chunk, slot, end = job.chunk, job.slot, job.chunk.end
        owner = chunk.request.id
        self._write_kv(chunk, "kv", self._full, job.table)
        if self._window:
            self._write_kv(chunk, "window", self._sliding, job.window)
        if slot is not None:
            self._write_state(owner, slot, chunk.tokens.state(end))
        if chunk.snapshot is not None:
            self._write_state(owner, chunk.snapshot[0], chunk.tokens.state(chunk.snapshot[1]))

    def _write_kv(
        self, chunk: Chunk, component: Component, layers: Sequence[_KvLayer], table: Ids
    ) -> None:
        start, end, size = chunk.start, chunk.end, self._page_size
        for number in range(start // size, -(-end // size)):
            page = table[number]
            self._memory.check_write(component, page, chunk.request.id)
            low, high = max(start, number * size), min(end, (number + 1) * size)
            inside = slice(low - number * size, high - number * size)
            for which, layer in enumerate(layers):
                salt = layer_salt(which) ^ self._salt
                layer.keys[page, inside] = chunk.tokens.kv(low, high) ^ salt
                layer.values[page, inside] = np.arange(low, high)

    def _write_state(self, owner: str, slot: int, words: Words) -> None:
        self._memory.check_write("state", slot, owner)
        for layer, states in enumerate(self._states):
            states[slot] = words ^ layer_salt(layer) ^ self._salt


def layer_salt(layer: int) -> np.int64:
    """What the tags of a layer are combined with, so that layers cannot be mistaken."""
    return np.int64((layer * _LAYER) % 2**63)


def _what(word: int, otherwise: str) -> str:
    if word == _POISONED:
        return "the target of a copy that has not landed"
    return otherwise if word else "nothing"
