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
from importlib.resources import as_file, files
from random import Random
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from phloem.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CITIES", "FACTS", "NAMES", "Facts", "build_recall_model", "load_recall_model", "words"]

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
    """The untrained model: Qwen3-Next with layers linear, linear, full attention, linear.

    The time steps of the recurrent layers are drawn for a memory of hundreds of tokens.
    """
    shape = cast("dict[str, object]", json.loads((_DATA / "recall.json").read_text("utf-8")))
    config = Qwen3NextConfig(**shape)
    vocabulary = _CITY_AT + len(CITIES)
    if config.vocab_size != vocabulary:
        raise InvalidRequest(f"recall.json has {config.vocab_size} words, expected {vocabulary}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cast("torch.nn.Module", AutoModelForCausalLM.from_config(config))
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                step = torch.exp(torch.empty(weight.shape).uniform_(-6.9, -2.3))
                weight.data.copy_(step + torch.log(-torch.expm1(-step)))
            elif name.endswith("A_log"):
                weight.data.uniform_(-2.0, 0.5)
    return model


def load_recall_model() -> torch.nn.Module:
    """The trained model, in evaluation mode."""
    model = build_recall_model(seed=0)
    with as_file(_DATA / "recall.safetensors") as path:
        model.load_state_dict(load_file(path))
    return model.eval()
