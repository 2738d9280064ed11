"""What the host has is loaded where that is the cheapest way, and what was weighed is told."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec import structs
from serving import PAGE, House, compute, house, run, serve

from phloem import InvalidRequest
from phloem.events import RequestOpened
from phloem.runtime.costs.estimates import Estimates
from phloem.runtime.costs.model import Geometry

PROMPT = run(1, 4 * PAGE + 1)
SQUARES = Geometry(name="s", kv_bytes=1, state_bytes=1, flops_linear=10.0, flops_quadratic=0.1)
HOST: dict[str, Any] = {"pages": 24, "states": 12, "host_bytes": "1MiB"}


async def only_on_the_host(here: House, *ends: int) -> None:
    """`PROMPT` is on the host and nowhere else, with states at its end and at `ends`."""
    for end in (*ends, len(PROMPT)):
        await serve(here, PROMPT[:end])
        await here.settled()
    await here.cache.evict(pages=99, states=99)
    match = await here.cache.match(PROMPT)
    assert (match.device, match.host) == (0, 4 * PAGE)


@pytest.mark.parametrize(
    ("prefill", "load", "usable"), [(1e9, 1e3, 0), (1e3, 1e12, 4 * PAGE), (0.0, 0.0, 4 * PAGE)]
)
async def test_what_takes_longer_to_load_than_to_compute_is_computed(
    prefill: float, load: float, usable: int, inline: bool
) -> None:
    async with house(
        inline=inline,
        loads="cheapest",
        prefill_tokens_per_s=prefill,
        load_bytes_per_s=load,
        **HOST,
    ) as here:
        await only_on_the_host(here)
        request = await here.cache.open_request(PROMPT)
        ways = {one.way: one for one in request.match.alternatives}
        assert request.usable == usable
        assert set(ways) == ({"load", "recompute"} if prefill else set())
        dearer = {} if usable else {"dearer": 4 * PAGE}
        assert request.match.lost == {"last_token": 1, **dearer}, "not for want of a state"
        (told,) = here.of_type(RequestOpened)[-1:]
        assert [way for way, _, _ in told.alternatives] == list(ways)
        if ways:
            assert ways["recompute"].seconds == pytest.approx(4 * PAGE / prefill)
            loaded = 4 * here.cache.pools.page_bytes + here.cache.pools.slot_bytes
            assert ways["load"].seconds == pytest.approx(loaded / load)
        await request.allocate(len(PROMPT) - request.computed)
        await request.ready()
        assert request.computed == usable
        assert (here.cache.stats().tokens_loaded > 0) == (usable > 0)
        await compute(here, request, PROMPT, len(PROMPT))
        await request.finish()
        await here.cache.audit()


async def test_a_shallower_boundary_may_be_the_best(inline: bool) -> None:
    """The last page costs more to load than to compute; the first three, on the device, nothing."""
    async with house(
        inline=inline, loads="cheapest", prefill_tokens_per_s=1e6, load_bytes_per_s=1e6, **HOST
    ) as here:
        await only_on_the_host(here, 2 * PAGE + 1)
        request = await here.cache.open_request(PROMPT[: 2 * PAGE + 1])
        assert request.usable == 0, "32 bytes for a token: nothing pays"
        found = request.match.alternatives
        assert [(one.way, one.boundary) for one in found] == [("load", 2 * PAGE), ("recompute", 0)]
        request.abort()
        request = await here.cache.open_request(PROMPT)
        assert [one.boundary for one in request.match.alternatives] == [4 * PAGE, 2 * PAGE, 0]
        request.abort()


LONGER = [*PROMPT[: 4 * PAGE], *run(200, 4 * PAGE), 1]


@pytest.mark.parametrize("join", [True, False])
async def test_who_may_wait_for_another_request_does_where_that_is_faster(
    join: bool, inline: bool
) -> None:
    """Over a slow link both compute from the start, and who may wait lets the other do it."""
    async with house(
        inline=inline, loads="cheapest", prefill_tokens_per_s=1e3, load_bytes_per_s=2e3, **HOST
    ) as here:
        await only_on_the_host(here)
        first = await here.cache.open_request(LONGER)
        assert first.usable == 0
        async with here.cache.request(LONGER, join=join, join_timeout=0.01) as second:
            (told,) = here.of_type(RequestOpened)[-1:]
            ways = {way: (boundary, seconds) for way, boundary, seconds in told.alternatives}
            assert ways.keys() == {"load", "wait", "recompute"}
            assert ways["wait"] == (8 * PAGE, ways["recompute"][1])
            assert ways["load"][1] > ways["wait"][1]
            assert second.usable == 0
            assert told.lost == {
                "last_token": 1,
                "never_seen": 4 * PAGE,
                "arriving" if join else "dearer": 4 * PAGE,
            }
        first.abort()


async def test_a_load_that_is_on_its_way_is_joined_without_a_choice(inline: bool) -> None:
    async with house(
        inline=inline, loads="cheapest", prefill_tokens_per_s=1e3, load_bytes_per_s=1e12, **HOST
    ) as here:
        await only_on_the_host(here)
        here.gate.shut()
        first = await here.cache.open_request(PROMPT)
        second = await here.cache.open_request(PROMPT)
        assert first.match.alternatives and not second.match.alternatives
        assert (first.usable, second.usable) == (4 * PAGE, 4 * PAGE)
        here.gate.open()
        first.abort()
        second.abort()


async def test_rates_are_measured_where_none_are_given(inline: bool) -> None:
    async with house(inline=inline, loads="cheapest", **HOST) as here:
        estimates = here.cache.core.estimates
        assert estimates is not None
        for _ in range(4):
            await only_on_the_host(here)
            await serve(here, PROMPT)
        assert estimates.load_bytes_per_s is not None and estimates.load_bytes_per_s > 0
        assert estimates.prefill_tokens_per_s is None, "passes of a few tokens tell nothing"


async def test_a_pass_that_was_given_up_tells_nothing(inline: bool) -> None:
    prompt = run(1, 20 * PAGE)
    async with house(inline=inline, loads="cheapest", **HOST) as here:
        estimates = here.cache.core.estimates
        assert estimates is not None
        for kept in (False, True):
            for _ in range(8):
                async with here.cache.request(prompt) as request:
                    await request.allocate(len(prompt))
                    await request.ready()
                    step = here.cache.step([request], stream=here.stream)
                    here.stream.run(time.sleep, 0.001)
                    step.launched({request: len(prompt)})
                    if kept:
                        step.end()
                    else:
                        step.abandon()
                    await step.over()
            assert (estimates.prefill_tokens_per_s is not None) == kept


@pytest.mark.parametrize(
    "wrong",
    [
        {"loads": "never"},
        {"prefill_tokens_per_s": -1.0},
        {"load_bytes_per_s": float("nan")},
        {"geometry": "mine"},
        {"geometry": structs.replace(SQUARES, flops_linear=0.0)},
    ],
)
async def test_wrong_settings_are_refused(wrong: dict[str, Any], inline: bool) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        async with house(inline=inline, **HOST, **wrong):
            pass


# -- estimates -------------------------------------------------------------------------------------


def test_an_estimate_needs_more_than_one_measurement_and_follows_the_newest() -> None:
    costs = Estimates(100, 1000)
    for _ in range(3):
        costs.loaded(2000, 1.0)
        assert costs.load_s(1, 1) is None
    costs.loaded(2000, 1.0)
    assert costs.load_s(5, 1) == pytest.approx(1500 / 2000)
    for _ in range(60):
        costs.loaded(4000, 1.0)
    assert costs.load_bytes_per_s == pytest.approx(4000, rel=0.01)


def test_passes_that_queue_are_timed_one_after_another() -> None:
    costs = Estimates(100, 1000)
    for number in range(4):
        costs.computed([(0, 100)], 0.0, number + 1.0)  # all launched at once, each a second long
    assert costs.prefill_s(250, 50) == pytest.approx(2.0)
    costs.computed([(400, 401)], 4.0, 9.0)  # a decode
    assert costs.prefill_tokens_per_s == pytest.approx(100)


def test_a_token_costs_more_the_more_stand_before_it() -> None:
    """100 tokens are 200 first tokens' work here: each adds a fiftieth of one to the next."""
    costs = Estimates(100, 1000, geometry=SQUARES)
    for number in range(4):
        costs.computed([(0, 100)], number, number + 1.0)
    assert costs.prefill_tokens_per_s == pytest.approx(200)
    assert costs.prefill_s(100, 0) == pytest.approx(1.0)
    assert costs.prefill_s(200, 100) == pytest.approx(2.0)
    assert costs.prefill_s(100, 100) == costs.prefill_s(100, 200) == 0
    costs.computed([(100, 150), (300, 350)], 9.0, 9.0 + 5.0)  # 175 and 375, in two requests
    assert costs.prefill_tokens_per_s is not None
    assert 1 / costs.prefill_tokens_per_s == pytest.approx(1 / 200 + (5 / 550 - 1 / 200) / 5)


@pytest.mark.parametrize(("geometry", "usable"), [("", 0), (SQUARES, 4 * PAGE)])
async def test_with_a_geometry_what_is_long_is_loaded_sooner(
    geometry: str | Geometry, usable: int, inline: bool
) -> None:
    """Computing takes 1.6 ms by the tokens, 1.86 by their FLOPs, and the load 1.7."""
    rates: dict[str, Any] = {"prefill_tokens_per_s": 1e4, "load_bytes_per_s": 544 / 1.7e-3}
    async with house(inline=inline, loads="cheapest", geometry=geometry, **rates, **HOST) as here:
        assert 4 * here.cache.pools.page_bytes + here.cache.pools.slot_bytes == 544
        await only_on_the_host(here)
        request = await here.cache.open_request(PROMPT)
        ways = {one.way: one.seconds for one in request.match.alternatives}
        assert ways["load"] == pytest.approx(1.7e-3)
        assert ways["recompute"] == pytest.approx(1.856e-3 if usable else 1.6e-3)
        assert request.usable == usable
        request.abort()


def test_what_is_given_is_not_measured() -> None:
    costs = Estimates(100, 1000, prefill_tokens_per_s=10, load_bytes_per_s=50)
    for _ in range(9):
        costs.loaded(2000, 1.0)
        costs.computed([(0, 100)], 0, 1)
    assert (costs.prefill_s(20, 0), costs.load_s(0, 1)) == (2, 20)
    with pytest.raises(InvalidRequest, match="rate"):
        Estimates(1, 1, load_bytes_per_s=-1)
