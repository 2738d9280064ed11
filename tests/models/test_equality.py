"""Restored equals cold, for every allowed architecture; and the comparison can see a wrong state.

All data go through scattered pages and slots of `DevicePools` that were full of rubbish before.
"""

from __future__ import annotations

import pytest
import torch
from models.harness import CHUNK, Harness, Run
from models.zoo import ZOO, random_tokens
from torch import Tensor

from phloem.runtime.integrations.transformers import ALLOWED, Row

PROMPT, NEW = 4 * CHUNK + 21, 12
HYBRID = sorted(set(ZOO) - {"llama", "qwen3"})

# The largest difference of a logit, in units of their standard deviation, between runs that do the
# same arithmetic in another order. Wrong data differ by more than WRONG.
ROUNDING, DECODED, WRONG = 1e-4, 2e-3, 1e-1


@pytest.fixture(scope="module")
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(request.param)


each_model = pytest.mark.parametrize("harness", sorted(ZOO), indirect=True)
each_hybrid = pytest.mark.parametrize("harness", HYBRID, indirect=True)


def difference(left: Tensor, right: Tensor) -> float:
    """The largest, in units of the standard deviation of the logits."""
    return float((left - right).abs().max() / right.std())


def assert_same(run: Run, cold: Run) -> None:
    """The comparison that every test below relies on, positive or negative: all bits."""
    got = run.stacked
    expected = cold.stacked[-len(got) :]
    assert torch.equal(got, expected), f"differs by {difference(got, expected):.2g}"
    assert run.tokens == cold.tokens


def assert_wrong(run: Run, cold: Run) -> None:
    """A negative control: the comparison must fail, and by far more than rounding."""
    with pytest.raises(AssertionError):
        assert_same(run, cold)
    got = run.stacked
    assert difference(got, cold.stacked[-len(got) :]) > WRONG


def fresh(harness: Harness) -> Harness:
    """Pages and slots of earlier tests are free again, and hold rubbish."""
    harness.reset()
    return harness


def test_the_zoo_has_every_allowed_type() -> None:
    assert {build().model_type for build in ZOO.values()} == ALLOWED


@each_model
def test_s204_restored_equals_cold_bit_for_bit(harness: Harness) -> None:
    prompt, other = random_tokens(PROMPT, 1), random_tokens(PROMPT, 2)
    cold = fresh(harness).cold(prompt, NEW)
    for boundary in range(CHUNK, PROMPT, CHUNK):
        # made by another request that shares the prefix
        maker = harness.cold(prompt[:boundary])
        stored = harness.store(maker)
        harness.prefill(maker, prompt[:boundary] + other)
        assert_same(harness.restored(stored, prompt, NEW), cold)


@each_model
def test_no_prefix_in_a_cleared_slot_equals_cold(harness: Harness) -> None:
    prompt = random_tokens(CHUNK + 5, 3)
    slot = fresh(harness).take_slot()
    harness.clear(slot)
    assert_same(harness.restored(Row([], 0, slot), prompt, NEW), harness.cold(prompt, NEW))


@each_model
def test_chunks_equal_one_piece_within_rounding(harness: Harness) -> None:
    prompt = random_tokens(PROMPT, 4)
    cold = harness.cold(prompt, 0).stacked
    plain = harness.model.plain(prompt)
    each = (cold - plain).abs().amax(-1) / plain.std()
    # In a mixture of experts, rounding may swap two near-tied experts at a position or two.
    tied = 0 if not harness.experts else PROMPT // 50
    assert int((each > ROUNDING).sum()) <= tied
    assert int((cold.argmax(-1) != plain.argmax(-1)).sum()) <= tied


@each_model
def test_s204_s208_data_made_by_decoding_can_be_reused(harness: Harness) -> None:
    """Decoded one by one up to a grid position, then the prefix of a longer prompt."""
    prompt = random_tokens(CHUNK + 30, 5)
    maker = fresh(harness).cold(prompt, CHUNK - 30)
    assert maker.length == 2 * CHUNK
    longer = prompt + maker.tokens + random_tokens(40, 6)
    run = harness.restored(harness.store(maker), longer, NEW)
    cold = harness.cold(longer, NEW)
    assert run.tokens == cold.tokens
    assert difference(run.stacked, cold.stacked[-len(run.stacked) :]) < DECODED


@each_model
def test_data_made_in_a_batch_can_be_reused(harness: Harness) -> None:
    """Four requests of different lengths decode together over the pools, to a grid position."""
    prompts = [random_tokens(2 * CHUNK - missing, 7) for missing in (30, 11, 30, 64)]
    runs = [fresh(harness).cold(prompts[0])]
    runs += [harness.cold(prompt) for prompt in prompts[1:]]
    tokens = [[int(run.logits[-1][-1].argmax())] for run in runs]
    rows = [harness.store(run, room=30) for run in runs]
    for _ in range(30):
        cache = harness.model.gather_batch(harness.pools, rows)
        lengths = [row.length for row in rows]
        logits = harness.model.decode([row[-1] for row in tokens], cache, lengths)
        rows = [row._replace(length=row.length + 1) for row in rows]
        harness.model.scatter_decoded(cache, harness.pools, rows)
        for row, each in zip(tokens, logits, strict=True):
            row.append(int(each.argmax()))
    for run, row in zip(runs, tokens, strict=True):
        assert row[:30] == harness.decode(run, 30).tokens

    full = prompts[0] + tokens[0][:30]
    assert rows[0].length == len(full) == 2 * CHUNK
    longer = full + random_tokens(40, 8)
    run = harness.restored(rows[0], longer, NEW)
    cold = harness.cold(longer, NEW)
    assert run.tokens == cold.tokens
    assert difference(run.stacked, cold.stacked[-len(run.stacked) :]) < DECODED


# ---------------------------------------------------------------- a wrong state must be seen


@each_hybrid
def test_a_zeroed_state_is_seen(harness: Harness) -> None:
    prompt = random_tokens(PROMPT, 1)
    stored = fresh(harness).store(harness.cold(prompt[: 2 * CHUNK]))
    harness.clear(stored.slot)
    assert_wrong(harness.restored(stored, prompt), harness.cold(prompt))


@each_hybrid
def test_a_state_one_token_old_is_seen(harness: Harness) -> None:
    prompt = random_tokens(PROMPT, 1)
    stored = fresh(harness).store(harness.cold(prompt[: 2 * CHUNK]))
    older = harness.store(harness.cold(prompt[: 2 * CHUNK - 1]))
    wrong = stored._replace(slot=older.slot)
    assert_wrong(harness.restored(wrong, prompt), harness.cold(prompt))


@each_hybrid
def test_the_state_of_another_prompt_is_seen(harness: Harness) -> None:
    prompt = random_tokens(PROMPT, 1)
    stored = fresh(harness).store(harness.cold(prompt[: 2 * CHUNK]))
    other = harness.store(harness.cold(random_tokens(2 * CHUNK, 2)))
    wrong = stored._replace(slot=other.slot)
    assert_wrong(harness.restored(wrong, prompt), harness.cold(prompt))


@each_model
def test_a_page_of_another_prompt_is_seen(harness: Harness) -> None:
    prompt = random_tokens(PROMPT, 1)
    stored = fresh(harness).store(harness.cold(prompt[: 2 * CHUNK]))
    other = harness.store(harness.cold(random_tokens(2 * CHUNK, 2)))
    wrong = stored._replace(pages=[*stored.pages[:-1], other.pages[-1]])
    assert_wrong(harness.restored(wrong, prompt), harness.cold(prompt))


@each_hybrid
def test_a_working_slot_that_was_not_cleared_is_seen(harness: Harness) -> None:
    prompt = random_tokens(PROMPT, 1)
    used = fresh(harness).store(harness.cold(random_tokens(2 * CHUNK, 2)))
    assert_wrong(harness.restored(Row([], 0, used.slot), prompt), harness.cold(prompt))


@each_hybrid
def test_a_state_used_in_place_is_seen_by_its_next_user(harness: Harness) -> None:
    """The first user writes its steps into the stored slot itself instead of a private copy."""
    prompt = random_tokens(2 * CHUNK + 1, 1)
    cold = fresh(harness).cold(prompt, NEW)
    stored = harness.store(harness.cold(prompt[: 2 * CHUNK]))
    working = stored._replace(slot=harness.take_slot())
    harness.copy(stored.slot, working.slot)
    for row, after in ((working, assert_same), (stored, assert_wrong)):
        first = harness.restored(row, prompt, NEW)
        harness.model.store_state(first.cache, harness.pools, row.slot)
        after(harness.restored(stored, prompt, NEW), cold)


LAYERS = range(40)  # at least as many as any of the models has


def parts_of(harness: Harness, layer: int) -> list[Tensor]:
    """All that the pools keep of a layer."""
    kv, states = harness.pools.kv.get(layer), harness.pools.states.get(layer, {})
    return [*([] if kv is None else [kv.k, kv.v]), *states.values()]


@each_model
def test_layers_filled_as_the_pass_comes_to_them_give_the_same_bits(harness: Harness) -> None:
    """Each layer is asked for once and in the model's order; until then the pools hold rubbish."""
    prompt = random_tokens(PROMPT, 4)
    cold = fresh(harness).cold(prompt, NEW)
    row = harness.store(harness.cold(prompt[: 2 * CHUNK]))
    pools, asked = harness.pools, list[int]()
    data = {layer: [part.clone() for part in parts_of(harness, layer)] for layer in LAYERS}
    for layer in LAYERS:
        for part in parts_of(harness, layer):
            part.fill_(3.0)

    def land(layer: int) -> None:
        asked.append(layer)
        for part, landed in zip(parts_of(harness, layer), data[layer], strict=True):
            part.copy_(landed)

    cache = harness.model.gather_late(pools, row, land)
    assert not asked
    late = harness.decode(harness.prefill(Run(cache, row.length), prompt), NEW)
    assert_same(late, cold)
    assert asked == sorted(asked) and set(asked) == {*pools.kv, *pools.states} < set(LAYERS)


@each_model
def test_a_layer_that_does_not_come_ends_the_pass(harness: Harness) -> None:
    class Lost(Exception):
        pass

    prompt = random_tokens(PROMPT, 5)
    row = fresh(harness).store(harness.cold(prompt[:CHUNK]))
    last = max((*harness.pools.kv, *harness.pools.states))
    asked: list[int] = []

    def land(layer: int) -> None:
        asked.append(layer)
        if layer == last:
            raise Lost

    cache = harness.model.gather_late(harness.pools, row, land)
    with pytest.raises(Lost):
        harness.model.forward(prompt[CHUNK : 2 * CHUNK], cache, CHUNK)
    assert asked[-1] == last
