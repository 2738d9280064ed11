"""The demo's models: built alike from a seed, taken by the integration, fed with text."""

from __future__ import annotations

import pytest
import torch

from phloem.errors import InvalidRequest
from phloem.runtime.integrations.models import MODELS, build_model, decode_bytes, encode_bytes
from phloem.runtime.integrations.selftest import self_test
from phloem.runtime.integrations.transformers import ALLOWED, TransformersModel


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_taken_and_passes_the_self_test(name: str) -> None:
    model = TransformersModel(build_model(name))
    assert self_test(model).failures == ()


def test_there_is_one_of_every_allowed_type() -> None:
    assert {TransformersModel(build_model(name)).model_type for name in MODELS} == ALLOWED


def test_the_same_seed_gives_the_same_model() -> None:
    tokens = encode_bytes("seeded")
    first, again, other = (
        TransformersModel(build_model("lfm2", seed)).plain(tokens) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    build_model("lfm2", 9)
    assert torch.equal(torch.rand(3), expected)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidRequest, match="qwen3-next"):
        build_model("gpt")


def test_text_round_trips() -> None:
    assert decode_bytes([*encode_bytes("naïve – 木"), 258]) == "naïve – 木"
