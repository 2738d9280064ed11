"""Load, wait or compute again: the cheapest way by what is known, and no choice by what is not."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from phloem.actors.tree.choosing import Ahead, Alternative, Load, alternatives, cheapest


class Given(NamedTuple):
    """A load takes so long for each page and state, a prefill for each token."""

    page: float | None = 1.0
    state: float = 10.0
    token: float | None = 1.0

    def load_s(self, pages: int, states: int) -> float | None:
        return None if self.page is None else pages * self.page + states * self.state

    def prefill_s(self, tokens: int, after: int) -> float | None:
        return None if self.token is None else (tokens - after) * self.token


DEEP, SHALLOW = Load(80, 20, 1), Load(40, 10, 1)


@pytest.mark.parametrize(
    ("costs", "loads", "ahead", "join", "expected"),
    [
        # loads take 30 + 20 and 20 + 60, computing takes 100
        (Given(), [DEEP, SHALLOW], None, False, ("load", 80, 50)),
        (Given(page=3), [DEEP, SHALLOW], None, False, ("load", 80, 90)),
        # beyond the shallow boundary the link is slower than the model
        (Given(page=5, state=5), [DEEP, SHALLOW], None, False, ("recompute", 0, 100)),
        (Given(page=4.5, state=-20), [DEEP, SHALLOW], None, False, ("load", 40, 85)),
        # a state alone may take more than it saves
        (Given(page=0, state=99), [Load(90, 0, 1)], None, False, ("recompute", 0, 100)),
        (Given(page=0, state=89), [Load(90, 0, 1)], None, False, ("load", 90, 99)),
        (Given(page=0, state=90), [Load(90, 0, 1)], None, False, ("load", 90, 100)),  # as good
        # somebody has computed 60 of the 90 that are common: 30 + 10
        (Given(), [DEEP], Ahead(60, 90), True, ("wait", 90, 40)),
        (Given(), [DEEP], Ahead(60, 90), False, ("load", 80, 50)),
        (Given(), [DEEP], Ahead(10, 90), True, ("load", 80, 50)),
        (Given(page=9), [DEEP], Ahead(60, 300), True, ("wait", 100, 40)),
        (Given(page=9), [DEEP], Ahead(0, 90), True, ("wait", 90, 100)),  # nobody computes it twice
        # nothing is chosen by what is not known
        (Given(token=None), [DEEP], Ahead(60, 90), True, None),
        (Given(page=None), [DEEP], None, False, None),
        (Given(page=None), [DEEP], Ahead(60, 90), True, ("wait", 90, 40)),
        (Given(), [], None, False, None),
    ],
)
def test_the_cheapest_of_the_known_ways(
    costs: Given,
    loads: list[Load],
    ahead: Ahead | None,
    join: bool,
    expected: tuple[str, int, float] | None,
) -> None:
    found = alternatives(0, 100, loads, ahead, costs)
    chosen = cheapest(found, may_wait=join)
    if expected is None:
        assert chosen is None
    else:
        assert chosen is not None
        assert (chosen.way, chosen.boundary, chosen.seconds) == expected


def test_all_that_was_weighed_is_told() -> None:
    assert alternatives(20, 100, [DEEP], Ahead(60, 90), Given()) == (
        Alternative("load", 80, 50),
        Alternative("wait", 90, 40),
        Alternative("recompute", 20, 80),
    )
