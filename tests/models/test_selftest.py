"""Which models are taken, and that the self-test catches those that forget."""

from __future__ import annotations

import pytest
import torch
import transformers
from models.zoo import ZOO, build

from phloem.errors import InvalidRequest
from phloem.runtime.integrations.selftest import SelfTestReport, adopt, self_test
from phloem.runtime.integrations.transformers import TransformersModel, UncheckedModel


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_allowed_model_passes(name: str) -> None:
    report = self_test(TransformersModel(build(name)))
    assert report.failures == ()
    assert report.passed


def test_an_unchecked_type_is_refused_and_the_error_names_the_self_test() -> None:
    with pytest.raises(UncheckedModel, match="self-test"):
        TransformersModel(build("lfm2_moe"))


def test_an_unchecked_type_that_passes_is_adopted() -> None:
    assert adopt(build("lfm2_moe")).model_type == "lfm2_moe"


def test_a_scan_that_starts_from_zero_fails() -> None:
    """Jamba's second chunk forgets the first, with no error; restored equals cold all the same."""
    report = self_test(TransformersModel(build("jamba"), unchecked=True))
    assert report.restored_equal
    assert report.chunked_agreement < 0.9
    with pytest.raises(UncheckedModel, match="forgets the first"):
        adopt(build("jamba"))


def test_a_model_that_ignores_its_positions_fails() -> None:
    """Bamba without explicit positions counts from zero in every chunk."""

    class Forgetful(TransformersModel):
        def _call(self, cache, ids, positions, keep, **extra):  # type: ignore[no-untyped-def]
            return super()._call(cache, ids, positions - positions[:, :1], keep, **extra)

    report = self_test(Forgetful(build("bamba")))
    assert not report.passed


def test_windows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="sliding window"):
        TransformersModel(build("lfm3"), unchecked=True)


def test_each_finding_is_named() -> None:
    report = SelfTestReport(
        model_type="x",
        tolerance=1e-3,
        chunked_agreement=0.5,
        restored_equal=False,
        wrong_difference=0.0,
    )
    assert len(report.failures) == 3
    assert not report.passed


def test_bfloat16_with_float32_states_passes() -> None:
    model = TransformersModel(build("qwen3_next").to(torch.bfloat16))
    dtypes = {state.name: state.dtype for layer in model.layout.layers for state in layer.states}
    assert dtypes == {"conv": "bfloat16", "recurrent": "float32"}
    assert self_test(model).failures == ()


def test_a_config_without_its_type_on_the_list_names_what_is() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16)
    with pytest.raises(UncheckedModel, match="qwen3_next"):
        TransformersModel(transformers.AutoModelForCausalLM.from_config(config))
