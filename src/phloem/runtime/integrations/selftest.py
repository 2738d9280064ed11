"""The self-test of a model: is a continuation from stored data the same model?

That "restored" equals "cold" is not enough, because both are wrong in the same way in a model
whose second chunk starts from zero. So three things are asked: a prompt in chunks gives what it
gives in one piece; a restored prompt gives bit for bit what the same chunks gave; and a wrong
state or wrong KV is seen at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from phloem.cuda_streams.pools import DevicePools
from phloem.runtime.integrations.transformers import (
    CausalModel,
    TransformersModel,
    UncheckedModel,
)

__all__ = ["SelfTestReport", "adopt", "self_test"]

_CHUNK, _CHUNKS, _PAGE = 64, 4, 16
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# A router of a mixture of experts may pick another of two near-tied experts when rounding differs.
_POSITIONS_AGREEING = 0.97
_WRONG_OVER_TOLERANCE = 10.0


@dataclass(frozen=True)
class SelfTestReport:
    """What the self-test measured; differences are in units of the logits' standard deviation."""

    model_type: str
    tolerance: float
    chunked_agreement: float
    """Share of positions where chunks and one piece agree within the tolerance."""
    restored_equal: bool
    """Whether the restored run gave the same bits as the same chunks without a restore."""
    wrong_difference: float
    """Largest difference when the restored data was replaced by zeros."""

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong; empty if the model passed."""
        found: list[str] = []
        if self.chunked_agreement < _POSITIONS_AGREEING:
            found.append(
                f"in chunks only {self.chunked_agreement:.1%} of the positions are within "
                f"{self.tolerance:g} of one piece: its second chunk forgets the first"
            )
        if not self.restored_equal:
            found.append("a restored prompt differs from the same chunks computed")
        if self.wrong_difference < _WRONG_OVER_TOLERANCE * self.tolerance:
            found.append(
                f"restoring zeros changes the logits by only {self.wrong_difference:.2g}: "
                "the model does not read what is restored, or the test cannot tell"
            )
        return tuple(found)

    @property
    def passed(self) -> bool:
        """Whether the model can be served from stored prefixes."""
        return not self.failures


def self_test(model: TransformersModel, *, seed: int = 0) -> SelfTestReport:
    """Runs a random prompt of 256 tokens in several ways; a few seconds for a small model."""
    length = _CHUNK * _CHUNKS
    prompt = Random(seed).choices(range(model.vocabulary), k=length)
    pools = DevicePools.allocate(
        model.layout,
        pages=length // _PAGE + 1,
        states=2 if model.layout.has_states else 0,
        page_size=_PAGE,
        device=model.device,
    )
    pages = [*range(length // _PAGE, 0, -1)]
    slot = 1 if model.layout.has_states else None
    half = length // 2

    whole = model.plain(prompt)
    cache = model.new_cache()
    chunked: list[Tensor] = []
    for start in range(0, length, _CHUNK):
        chunk = prompt[start : start + _CHUNK]
        chunked.append(model.forward(chunk, cache, start, every_position=True))
        if start + _CHUNK == half:
            model.scatter_kv(cache, pools, pages, 0, half)
            model.store_state(cache, pools, slot)

    def restored() -> Tensor:
        cache = model.gather(pools, pages, half, slot)
        return torch.cat(
            [
                model.forward(prompt[start : start + _CHUNK], cache, start, every_position=True)
                for start in range(half, length, _CHUNK)
            ]
        )

    again = restored()
    expected = torch.cat(chunked[half // _CHUNK :])
    _forget(pools)
    wrong = restored()

    unit = float(whole.float().std())
    tolerance = _TOLERANCES.get(whole.dtype, 1e-3)
    difference = (torch.cat(chunked).float() - whole.float()).abs().amax(-1) / unit
    return SelfTestReport(
        model_type=model.model_type,
        tolerance=tolerance,
        chunked_agreement=float((difference <= tolerance).float().mean()),
        restored_equal=torch.equal(again, expected),
        wrong_difference=float((wrong.float() - expected.float()).abs().max()) / unit,
    )


def _forget(pools: DevicePools) -> None:
    """Zeroes the states; in a model without any, the KV."""
    for states in pools.states.values():
        for state in states.values():
            state.zero_()
    if not pools.states:
        for layer in pools.kv.values():
            layer.k.zero_()
            layer.v.zero_()


def adopt(model: CausalModel, *, seed: int = 0) -> TransformersModel:
    """Takes a model of any type that passes the self-test.

    Raises `UncheckedModel` with the findings if it does not.
    """
    candidate = TransformersModel(model, unchecked=True)
    report = self_test(candidate, seed=seed)
    if not report.passed:
        findings = "; ".join(report.failures)
        raise UncheckedModel(f"model type {report.model_type!r} failed the self-test: {findings}")
    return candidate
