"""One model over pools with scattered pages: cold runs, stored prefixes, restored runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from models.zoo import MIXTURES_OF_EXPERTS, build
from torch import Tensor

from phloem.cuda_streams.pools import DevicePools
from phloem.runtime.integrations.transformers import ModelCache, Row, TransformersModel

PAGE, CHUNK = 16, 64
PAGES, SLOTS = 160, 16


@dataclass
class Run:
    """What a run gave: its cache object, logits after each chunk and decoded token, tokens."""

    cache: ModelCache
    length: int
    logits: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def stacked(self) -> Tensor:
        """All logits, [positions, vocabulary]."""
        return torch.cat(self.logits)


class Harness:
    """A zoo model, its pools, and ids handed out in a scattered order."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.model = TransformersModel(build(name, seed))
        self.has_states = self.model.layout.has_states
        self.pools = DevicePools.allocate(
            self.model.layout,
            pages=PAGES,
            states=SLOTS if self.has_states else 0,
            page_size=PAGE,
        )
        self.experts = name in MIXTURES_OF_EXPERTS
        self._random = Random(seed)
        self.reset()

    def reset(self) -> None:
        """All pages and slots are free, in a drawn order, and full of rubbish.

        What is read before it was written must show.
        """
        self._pages = self._random.sample(range(1, PAGES), PAGES - 1)
        self._slots = self._random.sample(range(1, SLOTS), SLOTS - 1)
        for layer in self.pools.kv.values():
            layer.k.fill_(3.0)
            layer.v.fill_(3.0)
        for states in self.pools.states.values():
            for state in states.values():
                state.fill_(3.0)

    def take_pages(self, tokens: int) -> list[int]:
        """Pages with room for `tokens`."""
        count = -(-tokens // PAGE)
        taken, self._pages = self._pages[:count], self._pages[count:]
        assert len(taken) == count
        return taken

    def take_slot(self) -> int | None:
        """A slot; none for a model without states."""
        return self._slots.pop() if self.has_states else None

    def clear(self, slot: int | None) -> None:
        """What the runtime does to a working slot when the boundary is empty."""
        if slot is not None:
            for states in self.pools.states.values():
                for state in states.values():
                    state[slot].zero_()

    def copy(self, source: int | None, target: int | None) -> None:
        """What the runtime does for a private copy."""
        if source is not None and target is not None:
            for states in self.pools.states.values():
                for state in states.values():
                    state[target] = state[source]

    def prefill(self, run: Run, prompt: Sequence[int], end: int | None = None) -> Run:
        """Runs the prompt on from where the run is, cut at multiples of the chunk."""
        end = len(prompt) if end is None else end
        while run.length < end:
            stop = min(end, (run.length // CHUNK + 1) * CHUNK)
            chunk = prompt[run.length : stop]
            run.logits.append(self.model.forward(chunk, run.cache, run.length, every_position=True))
            run.length = stop
        return run

    def decode(self, run: Run, count: int) -> Run:
        """Greedy tokens, one by one."""
        for _ in range(count):
            token = int(run.logits[-1][-1].argmax())
            run.tokens.append(token)
            run.logits.append(self.model.forward([token], run.cache, run.length))
            run.length += 1
        return run

    def cold(self, prompt: Sequence[int], new: int = 0) -> Run:
        """The whole prompt, then `new` greedy tokens."""
        return self.decode(self.prefill(Run(self.model.new_cache(), 0), prompt), new)

    def store(self, run: Run, room: int = 0) -> Row:
        """KV and state of a run in scattered pages and a slot, with room for more tokens."""
        row = Row(self.take_pages(run.length + room), run.length, self.take_slot())
        self.model.scatter_kv(run.cache, self.pools, row.pages, 0, run.length)
        if self.has_states:
            self.model.store_state(run.cache, self.pools, row.slot)
        return row

    def restored(self, row: Row, prompt: Sequence[int], new: int = 0) -> Run:
        """The rest of the prompt from the stored prefix, then `new` greedy tokens."""
        cache = self.model.gather(self.pools, row.pages, row.length, row.slot)
        return self.decode(self.prefill(Run(cache, row.length), prompt), new)
