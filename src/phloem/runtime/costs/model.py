"""A model in the numbers that a cache needs."""

from __future__ import annotations

import msgspec

__all__ = ["Geometry"]


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The costs and savings of caching a model's prefixes.

    `kv_bytes` a token and `state_bytes` a checkpoint, over all layers; a prefill of `l` tokens from
    nothing takes `flops_linear * l + flops_quadratic * l**2`.
    """

    name: str
    kv_bytes: int
    state_bytes: int
    flops_linear: float
    flops_quadratic: float

    def flops(self, tokens: int, after: int = 0) -> float:
        """FLOPs of a prefill of the tokens from `after` up to `tokens`."""
        return self.flops_linear * (tokens - after) + self.flops_quadratic * (
            tokens * tokens - after * after
        )
