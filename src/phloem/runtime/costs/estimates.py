"""Running estimates of what loads and prefills take, from what they took so far."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.errors import InvalidRequest
from phloem.runtime.costs.model import Geometry

__all__ = ["Estimates"]

_ENOUGH = 4  # measurements before an estimate counts
_WEIGHT = 1 / 8  # of the newest
_PREFILL_MIN = 64  # tokens: passes of fewer are decodes, which take a pass's fixed cost each


class _Rate:
    """Units for each second, as a moving average; None until measured often enough."""

    def __init__(self, given: float) -> None:
        self._given = given
        self._seconds_each = 0.0
        self._count = 0

    @property
    def value(self) -> float | None:
        if self._given:
            return self._given
        return 1 / self._seconds_each if self._count >= _ENOUGH and self._seconds_each else None

    def measured(self, units: float, seconds: float) -> None:
        each = seconds / units
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        self._seconds_each += weight * (each - self._seconds_each)


class Estimates:
    """The times of loads and prefills. Rates that are given (above 0) stand; others are measured.

    With the model's `geometry` a token takes longer the more stand before it, as its FLOPs do; the
    rate of prefills is then that of the first tokens. Without, all tokens take the same.
    """

    def __init__(
        self,
        page_bytes: int,
        slot_bytes: int,
        *,
        prefill_tokens_per_s: float = 0.0,
        load_bytes_per_s: float = 0.0,
        geometry: Geometry | None = None,
    ) -> None:
        for rate in (prefill_tokens_per_s, load_bytes_per_s):
            if rate < 0:
                raise InvalidRequest(f"a rate of {rate} for each second; 0: it is measured")
        self._page_bytes = page_bytes
        self._slot_bytes = slot_bytes
        self._prefill = _Rate(prefill_tokens_per_s)
        self._load = _Rate(load_bytes_per_s)
        self._busy_until = 0.0
        self._squared = 0.0  # of the work of a first token
        if geometry is not None:
            self._squared = geometry.flops_quadratic / geometry.flops_linear

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The rate for tokens that have none before them; None while it is not known."""
        return self._prefill.value

    @property
    def load_bytes_per_s(self) -> float | None:
        """The rate of loads from the host; None while it is not known."""
        return self._load.value

    def load_s(self, pages: int, states: int) -> float | None:
        """Seconds of a load from the host."""
        rate = self._load.value
        nbytes = pages * self._page_bytes + states * self._slot_bytes
        return None if rate is None else nbytes / rate

    def prefill_s(self, tokens: int, after: int) -> float | None:
        """Seconds of a prefill of the tokens from `after` up to `tokens`."""
        rate = self._prefill.value
        return None if rate is None else self._work(max(tokens, after), after) / rate

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Count a load of so many bytes that took so long."""
        if nbytes and seconds > 0:
            self._load.measured(nbytes, seconds)

    def computed(self, spans: Sequence[tuple[int, int]], launched: float, over: float) -> None:
        """Count a pass over these spans of tokens, launched and over at these seconds of one clock.

        A span is where a request stood before and where after. Passes run one after another: one
        that waited for the one before began when that was over.
        """
        began = max(launched, self._busy_until)
        self._busy_until = max(self._busy_until, over)
        if sum(end - start for start, end in spans) >= _PREFILL_MIN and over > began:
            work = sum(self._work(end, start) for start, end in spans)
            self._prefill.measured(work, over - began)

    def _work(self, tokens: int, after: int) -> float:
        """The work of the tokens from `after` up to `tokens`; that of a first token is 1."""
        return tokens - after + self._squared * (tokens * tokens - after * after)
