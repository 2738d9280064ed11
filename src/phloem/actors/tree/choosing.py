"""Load, wait or compute again: whichever gets a request furthest soonest.

Three ways lead from a match to the end of what was looked up: computing from what the device has;
loading a boundary from the host and computing from there; waiting until another request has
computed the common part. Each costs what its copy and its computation take. Without an estimate of
everything that a way needs it is not weighed, and with less than two ways there is no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

__all__ = ["Ahead", "Alternative", "Costs", "Load", "Way", "alternatives", "cheapest"]

Way = Literal["load", "recompute", "wait"]


class Costs(Protocol):
    """How long loads and prefills take, in seconds; None while that is not known."""

    def load_s(self, pages: int, states: int) -> float | None:
        """The time to load so many pages and states from the host."""
        ...

    def prefill_s(self, tokens: int, after: int) -> float | None:
        """The time to compute the tokens from `after` up to `tokens`."""
        ...


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """One way, and the seconds until the end of what was looked up is computed.

    `boundary`: the tokens that the request itself need not compute.
    """

    way: Way
    boundary: int
    seconds: float


class Load(NamedTuple):
    """A boundary that the host can give, and what has to be copied for it."""

    boundary: int
    pages: int
    states: int


class Ahead(NamedTuple):
    """A request that has computed up to `position` and will compute the common part, to `until`."""

    position: int
    until: int


def alternatives(
    device: int, end: int, loads: Iterable[Load], ahead: Ahead | None, costs: Costs
) -> tuple[Alternative, ...]:
    """The ways to `end` whose costs are known, those with the least to compute first.

    `device`: the deepest boundary that needs nothing. Raises nothing: what is not known is left
    out, and it is all left out when even computing has no estimate.
    """
    again = costs.prefill_s(end, device)
    if again is None:
        return ()
    found: list[Alternative] = []
    for load in loads:
        copy, rest = costs.load_s(load.pages, load.states), costs.prefill_s(end, load.boundary)
        if copy is not None and rest is not None:
            found.append(Alternative("load", load.boundary, copy + rest))
    if ahead is not None:
        until = min(ahead.until, end)
        others, rest = costs.prefill_s(until, ahead.position), costs.prefill_s(end, until)
        if others is not None and rest is not None:
            found.append(Alternative("wait", until, others + rest))
    found.append(Alternative("recompute", device, again))
    return tuple(found)


def cheapest(found: Sequence[Alternative], *, may_wait: bool) -> Alternative | None:
    """The one that takes least, the first of equals; None when there is nothing to choose from."""
    open_to = [one for one in found if may_wait or one.way != "wait"]
    if len(open_to) < 2:
        return None
    return min(open_to, key=lambda one: one.seconds)
