"""A tiny trained hybrid model that recalls facts, so that a wrong state is seen by anyone.

A prompt is eight facts, each a name and a city ("Ada Rome Ben Oslo ..."), then a name; the model
answers with the city. One word is one token. The facts are the prefix that a cache keeps; what the
model knows of them sits in its recurrent state, so the right KV with the state of other facts
answers no better than guessing.

The weights (`data/recall.safetensors`) come from `tools/train_recall.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from random import Random
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load

from phloem.cuda_streams.pools import DevicePools
from phloem.runtime.integrations.seeded import seeded_model
from phloem.runtime.integrations.transformers import (
    CausalModel,
    ModelCache,
    Row,
    TransformersModel,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CITIES",
    "FACTS",
    "NAMES",
    "Facts",
    "RecallScore",
    "build_recall_model",
    "load_recall_model",
    "score_recall",
    "words",
]

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"),
    *("Ivo", "Jade", "Kim", "Lea", "Max", "Nora", "Otto", "Pia"),
)
CITIES = (
    *("Athens", "Bern", "Cairo", "Delhi", "Essen", "Faro", "Genoa", "Hanoi"),
    *("Izmir", "Jaffa", "Kyoto", "Lima", "Minsk", "Nice", "Oslo", "Paris"),
)
FACTS = 8
"""Facts in a prompt; the prefix is twice as many tokens."""

_SPECIALS = ("<pad>", "<start>", "<end>", "<unused>")
_NAME_AT = len(_SPECIALS)
_CITY_AT = _NAME_AT + len(NAMES)
_DATA = files("phloem.runtime.integrations") / "data"


def words(tokens: Sequence[int]) -> str:
    """The tokens as text."""
    vocabulary = (*_SPECIALS, *NAMES, *CITIES)
    return " ".join(vocabulary[token] for token in tokens)


@dataclass(frozen=True)
class Facts:
    """Who lives where: indices into `NAMES` and `CITIES`, names all different."""

    names: tuple[int, ...]
    cities: tuple[int, ...]

    @classmethod
    def draw(cls, rng: Random) -> Facts:
        """Draws `FACTS` different names, each with any city."""
        names = rng.sample(range(len(NAMES)), FACTS)
        return cls(tuple(names), tuple(rng.choices(range(len(CITIES)), k=FACTS)))

    def prefix(self) -> list[int]:
        """The tokens that state the facts: 2 * `FACTS` of them."""
        pairs = zip(self.names, self.cities, strict=True)
        return [token for name, city in pairs for token in (name + _NAME_AT, city + _CITY_AT)]

    def question(self, fact: int) -> int:
        """The token that asks for fact number `fact`."""
        return self.names[fact] + _NAME_AT

    def answer(self, fact: int) -> int:
        """The token that answers it."""
        return self.cities[fact] + _CITY_AT


def build_recall_model(seed: int) -> torch.nn.Module:
    """The untrained model: Qwen3-Next with layers linear, linear, full attention, linear."""
    shape = cast("dict[str, object]", json.loads((_DATA / "recall.json").read_text("utf-8")))
    model = seeded_model("Qwen3NextConfig", shape, seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # slow decays, spread over the heads
            weight.data.copy_(torch.linspace(-2.0, 0.5, weight.numel()))
    return model


def load_recall_model() -> torch.nn.Module:
    """The trained model, in evaluation mode."""
    model = build_recall_model(seed=0)
    model.load_state_dict(load((_DATA / "recall.safetensors").read_bytes()))
    return model


@dataclass(frozen=True)
class RecallScore:
    """Shares of questions answered right, by what the model had of the facts."""

    asked: int
    cold: float
    """Facts and question computed."""
    restored: float
    """The facts' KV and state from the pools."""
    wrong_state: float
    """Their KV, with the state of other facts."""
    chance: float
    largest_difference: float
    """Of a logit, between restored and cold; 0.0 means the same bits."""


def score_recall(*, seed: int, prompts: int = 40, questions: int = 4) -> RecallScore:
    """Asks about drawn facts cold, from restored data and from a wrong state; a few seconds."""
    model = TransformersModel(cast("CausalModel", load_recall_model()))
    rng = Random(seed)
    length = 2 * FACTS
    pools = DevicePools.allocate(model.layout, pages=3, states=3, page_size=length)
    right = {"cold": 0, "restored": 0, "wrong state": 0}
    largest = 0.0
    model.store_state(_read(model, Facts.draw(rng).prefix()), pools, 2)
    for number in range(prompts):
        facts = Facts.draw(rng)
        stored, other = Row([1], length, 1 + number % 2), 2 - number % 2
        cold = _read(model, facts.prefix())
        model.scatter_kv(cold, pools, stored.pages, 0, length)
        model.store_state(cold, pools, stored.slot)
        for fact in rng.sample(range(FACTS), questions):
            asked = {
                "cold": _read(model, facts.prefix()),
                "restored": model.gather(pools, *stored),
                "wrong state": model.gather(pools, stored.pages, length, other),
            }
            logits = {
                how: model.forward([facts.question(fact)], cache, length)
                for how, cache in asked.items()
            }
            for how, row in logits.items():
                right[how] += int(row.argmax()) == facts.answer(fact)
            largest = max(largest, float((logits["restored"] - logits["cold"]).abs().max()))
    total = prompts * questions
    return RecallScore(
        asked=total,
        cold=right["cold"] / total,
        restored=right["restored"] / total,
        wrong_state=right["wrong state"] / total,
        chance=1 / len(CITIES),
        largest_difference=largest,
    )


def _read(model: TransformersModel, facts: list[int]) -> ModelCache:
    cache = model.new_cache()
    model.forward(facts, cache, 0)
    return cache
