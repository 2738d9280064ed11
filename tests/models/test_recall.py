"""The trained model that ships with the package: what it knows is in the state."""

from __future__ import annotations

from importlib.resources import files
from random import Random

import torch

from phloem.runtime.integrations.recall import (
    CITIES,
    FACTS,
    NAMES,
    Facts,
    load_recall_model,
    score_recall,
    words,
)


def test_it_recalls_cold_and_restored_but_not_from_a_wrong_state() -> None:
    score = score_recall(seed=5)
    assert score.asked == 160
    assert score.cold >= 0.97
    assert score.restored == score.cold
    assert score.largest_difference == 0.0
    assert score.wrong_state < 3 * score.chance


def test_the_same_seed_gives_the_same_score() -> None:
    assert score_recall(seed=7, prompts=3) == score_recall(seed=7, prompts=3)


def test_the_weights_are_small_enough_to_ship() -> None:
    weights = files("phloem.runtime.integrations") / "data" / "recall.safetensors"
    assert len(weights.read_bytes()) < 1 << 20


def test_loading_twice_gives_the_same_weights() -> None:
    first, second = load_recall_model().state_dict(), load_recall_model().state_dict()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_facts_read_as_words() -> None:
    facts = Facts.draw(Random(1))
    text = words([*facts.prefix(), facts.question(3), facts.answer(3)]).split()
    assert len(set(facts.names)) == FACTS
    assert text[: 2 * FACTS : 2] == [NAMES[name] for name in facts.names]
    assert text[1 : 2 * FACTS : 2] == [CITIES[city] for city in facts.cities]
    assert text[2 * FACTS :] == text[6:8]
