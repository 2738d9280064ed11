"""Frames of one memory: any order of grants and gifts keeps each byte with one owner."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phloem.actors.actions import TREE
from phloem.actors.frames import SharedLedger
from phloem.errors import InvalidRequest, OwnershipError

PER = 4  # pages of a frame


def byte_ranges(ledger: SharedLedger) -> list[tuple[int, int, str]]:
    """What is owned, as (first, end) in units of a page, and whose it is."""
    kv, state = ledger.kv, ledger.state
    pages = [page for page in range(1, kv.size + 1) if kv.owner_of(page)]
    slots = [slot for slot in range(1, state.size + 1) if state.owner_of(slot)]
    return sorted(
        [
            *((page, page + 1, f"page {page}") for page in pages),
            *(((slot + 1) * PER, (slot + 2) * PER, f"slot {slot}") for slot in slots),
        ]
    )


def check(ledger: SharedLedger) -> None:
    """Audit, and that no two owned places lie over each other, or over the reserved ones."""
    ledger.audit()
    end = 1  # page 0 is reserved
    for first, last, what in byte_ranges(ledger):
        assert first >= end, f"{what} lies over another"
        assert not PER <= first < 2 * PER, f"{what} lies over slot 0"
        end = last


def test_a_new_memory_is_blank_but_for_the_homes() -> None:
    ledger = SharedLedger(6, PER)
    check(ledger)
    assert (ledger.kv.free, ledger.state.free, ledger.frames.blank) == (PER - 1, 0, 4)
    assert (ledger.kv.room, ledger.state.room) == (PER - 1 + 4 * PER, 4)
    assert ledger.ever_fits(PER - 1 + 2 * PER, 2)
    assert not ledger.ever_fits(PER + 2 * PER, 2)
    with pytest.raises(InvalidRequest, match="1 frames"):
        SharedLedger(1, PER)


def test_pages_gather_low_and_states_high_and_the_border_moves_without_a_copy() -> None:
    ledger = SharedLedger(6, PER)
    account, pages, states = ledger.grant(PER, 1, "a")
    assert pages.tolist() == [1, 2, 3, 2 * PER]
    assert states.tolist() == [4]  # of the last frame
    _, many, _ = ledger.grant(3 * PER - 1, 0, "b")
    assert many.tolist() == list(range(2 * PER + 1, 5 * PER))
    assert not ledger.fits(0, 1)
    assert not ledger.fits(1, 0, last=True)
    ledger.state.give(states, account)
    ledger.left(account, 0, 1)
    check(ledger)
    assert ledger.fits(PER, 0, last=True)
    assert not ledger.fits(1, 0)  # the spare is a state's as long as something else can be had
    assert ledger.short_of(PER, 0) == (PER, 0)
    _, again, _ = ledger.grant(PER, 0, "c")
    assert again.tolist() == list(range(5 * PER, 6 * PER))
    check(ledger)


def test_what_is_parked_keeps_its_frame() -> None:
    ledger = SharedLedger(3, PER)
    account, pages, _ = ledger.grant(2 * PER - 1, 0, "a")
    late = array("i", pages[-1:])
    ledger.kv.park(late, account)
    ledger.kv.give(pages[:-1], account)
    ledger.left(account, len(pages), 0)
    check(ledger)
    assert not ledger.fits(0, 1)
    ledger.kv.unpark(late)
    check(ledger)
    assert ledger.fits(0, 1)


def test_shortfalls_say_what_has_to_be_freed() -> None:
    ledger = SharedLedger(6, PER)
    assert ledger.short_of(PER - 1 + 3 * PER, 0) == (0, 0)
    assert ledger.short_of(PER - 1 + 3 * PER, 1) == (PER, 0)  # one for the state, one spare
    assert ledger.short_of(PER, 5) == (1, 1)
    assert ledger.short_of(0, 4) == (0, 0)


def test_a_frame_being_cleared_grants_nothing_and_is_blank_at_the_end() -> None:
    ledger = SharedLedger(5, PER)
    account, pages, _ = ledger.grant(2 * PER - 1, 0, "a")
    ledger.adopt(account, pages, 0)
    ledger.kv.give(pages[-2:-1], TREE)
    first, held = ledger.pages.clearable()[0]
    assert (first, held.tolist()) == (2, [2 * PER, 2 * PER + 1, 2 * PER + 3])
    blank = ledger.frames.blank
    ledger.pages.close(first)
    check(ledger)
    assert ledger.kv.free == 0
    ledger.pages.reopen(first)
    check(ledger)
    assert ledger.kv.free == 1
    ledger.pages.close(first)
    ledger.kv.give(held, TREE)
    check(ledger)
    assert (ledger.frames.blank, ledger.kv.room) == (blank, blank * PER), "copies may still read it"
    ledger.pages.reopen(first)
    check(ledger)
    assert (ledger.frames.blank, ledger.frames.closed, ledger.kv.free) == (blank + 1, -1, 0)


def test_foreign_places_are_refused_with_nothing_changed() -> None:
    ledger = SharedLedger(5, PER)
    account, pages, _ = ledger.grant(3, 0, "a")
    for wrong in ([pages[0], pages[0]], [pages[0], 9], [0], [99]):
        with pytest.raises(OwnershipError):
            ledger.kv.give(array("i", wrong), account)
        check(ledger)


class Memory(RuleBasedStateMachine):
    """Grants, gifts, parking and clearing, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SharedLedger(9, PER)
        self.parked: list[tuple[str, array[int]]] = []

    @rule(pages=st.integers(0, 3 * PER), states=st.integers(0, 3), last=st.booleans())
    def grant(self, pages: int, states: int, last: bool) -> None:
        ledger = self.ledger
        if not ledger.fits(pages, states, last=last):
            short = ledger.short_of(pages, states)
            assert last or short != (0, 0)
            return
        assert last or ledger.short_of(pages, states) == (0, 0)
        if pages or states:
            account, page_ids, slots = ledger.grant(pages, states, "a")
            assert (len(set(page_ids)), len(set(slots))) == (pages, states)
            if pages % 2:
                ledger.kv.move(page_ids, account, TREE)
                ledger.left(account, pages, 0)

    @precondition(lambda self: self.ledger.accounts or self.ledger.kv.tree)
    @rule(chance=st.randoms(use_true_random=False), park=st.booleans())
    def give(self, chance: random.Random, park: bool) -> None:
        ledger = self.ledger
        owner = chance.choice([TREE, *ledger.accounts])
        for name in ("kv", "state"):
            pool = ledger.pool(name)
            ids = pool.owned_by(owner).tolist()
            some = array("i", chance.sample(ids, chance.randint(0, len(ids))))
            if park and owner != TREE:
                pool.park(some, owner)
                self.parked.append((name, some))
            else:
                pool.give(some, owner)
            if owner != TREE and some:
                ledger.left(owner, *((len(some), 0) if name == "kv" else (0, len(some))))
                if owner not in ledger.accounts:
                    return

    @precondition(lambda self: self.parked)
    @rule()
    def unpark(self) -> None:
        name, ids = self.parked.pop(0)
        self.ledger.pool(name).unpark(ids)

    @precondition(lambda self: self.ledger.frames.closed < 0)
    @rule(chance=st.randoms(use_true_random=False))
    def close(self, chance: random.Random) -> None:
        clearable = self.ledger.pages.clearable()
        assert [len(held) for _, held in clearable] == sorted(len(held) for _, held in clearable)
        assert self.ledger.pages.clearable(2) == clearable[:2]
        if clearable:
            self.ledger.pages.close(chance.choice(clearable)[0])

    @precondition(lambda self: self.ledger.frames.closed >= 0)
    @rule()
    def reopen(self) -> None:
        self.ledger.pages.reopen(self.ledger.frames.closed)

    @invariant()
    def each_byte_has_one_owner(self) -> None:
        check(self.ledger)


TestMemory = Memory.TestCase
TestMemory.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
