"""How long things take: prefills by measurement or by a rate, and copies between tiers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from phloem.errors import InvalidRequest
from phloem.runtime.costs.model import Geometry

__all__ = ["Link", "PrefillTimes", "load_pays_from"]


class PrefillTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a prefill of `l` tokens from nothing: `fixed + linear * l + quadratic * l**2`."""

    fixed_s: float = 0.0
    linear_s: float
    quadratic_s: float = 0.0

    @classmethod
    def at_rate(cls, geometry: Geometry, flops_per_s: float) -> PrefillTimes:
        """As long as the model's FLOPs take at a rate."""
        if flops_per_s <= 0:
            raise InvalidRequest(f"a rate of {flops_per_s} FLOP/s")
        return cls(
            linear_s=geometry.flops_linear / flops_per_s,
            quadratic_s=geometry.flops_quadratic / flops_per_s,
        )

    @classmethod
    def measured(cls, times: Sequence[tuple[int, float]]) -> PrefillTimes:
        """The best fit to measured `(tokens, seconds)`, with no part below zero.

        Each measurement weighs by its own size, so that short prefills are fitted as well as long
        ones. Raises `InvalidRequest` for less than three different lengths.
        """
        if len({tokens for tokens, _ in times}) < 3 or min(times)[0] < 1:
            raise InvalidRequest("a fit needs times of three lengths or more, each of a token")
        tokens = np.array([tokens for tokens, _ in times], np.float64)
        seconds = np.array([seconds for _, seconds in times], np.float64)
        if (seconds <= 0).any():
            raise InvalidRequest("a prefill takes some time")
        columns = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1) / seconds[:, None]
        used = [0, 1, 2]
        while True:
            fit = np.linalg.lstsq(columns[:, used], np.ones_like(tokens), rcond=None)[0]
            if (fit >= 0).all() or len(used) == 1:
                break
            del used[int(fit.argmin())]
        parts = dict(zip(used, fit.tolist(), strict=True))
        return cls(
            fixed_s=parts.get(0, 0.0), linear_s=parts.get(1, 0.0), quadratic_s=parts.get(2, 0.0)
        )

    def seconds(self, tokens: int, after: int = 0) -> float:
        """Seconds of a prefill of the tokens from `after`, which are cached, up to `tokens`."""
        if tokens <= after:
            return 0.0
        squares = tokens * tokens - after * after
        return self.fixed_s + self.linear_s * (tokens - after) + self.quadratic_s * squares


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The way from a tier to the device."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Seconds of one copy of so many bytes."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0

    def load_s(self, geometry: Geometry, tokens: int) -> float:
        """Seconds of a load of the KV of so many tokens and the state at their end."""
        return self.seconds(tokens * geometry.kv_bytes + geometry.state_bytes)


def load_pays_from(geometry: Geometry, times: PrefillTimes, link: Link) -> int | None:
    """From how many tokens on a load of a prefix is faster than computing it; None: never.

    The fixed part of a prefill is spent in either case. Both sides grow, the compute at least as
    fast with length, so there is one such point.
    """
    state = link.seconds(geometry.state_bytes) if geometry.state_bytes else link.latency_s
    gained = times.linear_s - geometry.kv_bytes / link.bytes_per_s
    squared = times.quadratic_s
    if squared <= 0:
        return None if gained <= 0 else int(state / gained) + 1
    root = (-gained + (gained * gained + 4 * squared * state) ** 0.5) / (2 * squared)
    return int(root) + 1
