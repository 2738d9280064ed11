"""The ledger: every place has one owner, and a mistake changes nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from phloem.actors.actions import TREE, Ids
from phloem.actors.ledger import Ledger
from phloem.actors.places import FREE, PARKED, Pool
from phloem.errors import InvalidRequest, OwnershipError

# Few enough for a loop, enough for numpy, enough for numpy to look for repetitions too.
COUNTS = pytest.mark.parametrize("count", [2, 3, 20, 47, 130, 300])


def whole(pool: Pool) -> tuple[bytes, bytes, int, int, int]:
    return (
        pool._cells.tobytes(),
        pool.free_places.tobytes(),
        pool.parked,
        pool.tree,
        pool.granted,
    )


def changed(ids: Ids, at: int, to: int) -> Ids:
    other = ids[:]
    other[at] = to
    return other


WRONG: dict[str, Callable[[Ids, Pool], Ids]] = {
    "repeated": lambda ids, _: changed(ids, -1, ids[0]),
    "repeated_beside": lambda ids, _: changed(ids, 1, ids[0]),
    "reserved": lambda ids, _: changed(ids, 0, 0),
    "negative": lambda ids, _: changed(ids, -1, -1),
    "very_negative": lambda ids, _: changed(ids, 0, -(2**31)),
    "beyond": lambda ids, pool: changed(ids, -1, pool.size + 1),
    "far_beyond": lambda ids, _: changed(ids, 0, 2**31 - 1),
    "free": lambda ids, pool: changed(ids, -1, pool.free_places[0]),
    "anothers": lambda ids, pool: changed(ids, 0, pool.owned_by(2)[0]),
    "the_trees": lambda ids, pool: changed(ids, -1, pool.owned_by(TREE)[0]),
    "parked": lambda ids, pool: changed(ids, 0, pool.owned_by(PARKED)[0]),
}


def pool_with(count: int) -> tuple[Pool, Ids]:
    """Places of account 1, and some of everybody else."""
    pool = Pool("kv", count + 20)
    ids = pool.take(count, 1)[0]
    pool.take(3, 2)
    pool.move(pool.take(3, 3)[0], 3, TREE)
    pool.park(pool.take(3, 3)[0], 3)
    pool.audit()
    return pool, ids


@COUNTS
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", ["check", "give", "park"])
def test_f002_f040_places_that_are_not_the_owners_change_nothing(
    count: int, wrong: str, call: str
) -> None:
    pool, ids = pool_with(count)
    bad = WRONG[wrong](ids, pool)
    before = whole(pool)
    with pytest.raises(OwnershipError, match="kv"):
        getattr(pool, call)(bad, 1)
    assert whole(pool) == before
    pool.audit()
    getattr(pool, call)(ids, 1)  # what is right still goes
    pool.audit()


@COUNTS
def test_f001_nothing_is_given_back_twice(count: int) -> None:
    pool, ids = pool_with(count)
    pool.give(ids, 1)
    before = whole(pool)
    for owner in (1, 2, TREE, PARKED):
        with pytest.raises(OwnershipError):
            pool.give(ids, owner)
    assert whole(pool) == before
    assert sorted(pool.take(count, 4)[0]) == sorted(ids)
    with pytest.raises(OwnershipError):
        pool.give(ids, 1)  # they are another's by now
    pool.audit()


@COUNTS
def test_parked_places_are_nobodys_until_they_are_free(count: int) -> None:
    pool, ids = pool_with(count)
    free = pool.free
    pool.park(ids, 1)
    assert pool.free == free and pool.parked == count + 3
    with pytest.raises(OwnershipError):
        pool.give(ids, 1)
    pool.unpark(ids)
    with pytest.raises(OwnershipError):
        pool.unpark(ids)
    assert pool.free == free + count
    pool.audit()


@COUNTS
def test_among_keeps_what_is_the_owners(count: int) -> None:
    pool, ids = pool_with(count)
    pool.give(ids[::2], 1)
    assert pool.among(ids, 1) == ids[1::2]
    assert pool.among(ids, 2) == array("i")


def test_the_reserved_place_is_never_granted() -> None:
    pool = Pool("state", 5)
    assert sorted(pool.take(4, 1)[0]) == [1, 2, 3, 4] and pool.free == 0
    with pytest.raises(OwnershipError):
        pool.check(array("i", (0,)), FREE)
    with pytest.raises(InvalidRequest):
        Pool("kv", 0)


def test_the_audit_finds_what_is_wrong() -> None:
    def broken(spoil: Callable[[Pool], object]) -> None:
        pool, _ = pool_with(20)
        spoil(pool)
        with pytest.raises(AssertionError):
            pool.audit()

    broken(lambda pool: pool._stack.__setitem__(-1, pool._stack[-2]))
    broken(lambda pool: setattr(pool, "free", pool.free - 1))
    broken(lambda pool: pool._cells.__setitem__(5, TREE))
    broken(lambda pool: setattr(pool, "parked", pool.parked + 1))
    broken(lambda pool: pool._stack.__setitem__(-1, pool.owned_by(1)[0]))

    ledger = Ledger(10, 4)
    ledger.grant(3, 1, "r")
    ledger.audit()
    ledger.accounts[1].pages += 1
    with pytest.raises(AssertionError):
        ledger.audit()


# -- accounts --------------------------------------------------------------------------------------


@COUNTS
def test_an_offer_from_several_accounts_of_one_owner_is_gathered(count: int) -> None:
    ledger = Ledger(count + 30, 6)
    first, some, _ = ledger.grant(2, 0, "r")
    second, rest, slots = ledger.grant(count, 1, "r")
    third, apart, _ = ledger.grant(2, 0, "r")
    offered = some + rest + apart[:1]
    assert ledger.account_of(offered, slots[0], "r") == first
    assert ledger.accounts[first].pages == len(offered) and ledger.accounts[first].states == 1
    assert second not in ledger.accounts and ledger.accounts[third].pages == 1
    ledger.audit()
    ledger.adopt(first, offered, slots[0])
    assert first not in ledger.accounts
    ledger.audit()


@COUNTS
@pytest.mark.parametrize(
    "wrong", ["repeated", "anothers", "the_trees", "free", "beyond", "state", "owner"]
)
def test_an_offer_with_something_wrong_gathers_nothing(count: int, wrong: str) -> None:
    ledger = Ledger(count + 30, 6)
    _, some, _ = ledger.grant(2, 0, "r")
    _, rest, slots = ledger.grant(count, 1, "r")
    _, other, other_slots = ledger.grant(2, 1, "other")
    tree_account, trees, _ = ledger.grant(1, 0, "gone")
    ledger.adopt(tree_account, trees, 0)
    offered, state, owner = some + rest, slots[0], "r"
    if wrong == "repeated":
        offered = changed(offered, -1, offered[0])
    elif wrong == "anothers":
        offered = changed(offered, -1, other[0])
    elif wrong == "the_trees":
        offered = changed(offered, -1, trees[0])
    elif wrong == "free":
        offered = changed(offered, -1, ledger.kv.free_places[-1])
    elif wrong == "beyond":
        offered = changed(offered, -1, ledger.kv.size + 1)
    elif wrong == "state":
        state = other_slots[0]
    else:
        owner = "somebody"
    before = (whole(ledger.kv), whole(ledger.state), sorted(ledger.accounts))
    with pytest.raises(OwnershipError):
        ledger.account_of(offered, state, owner)
    assert (whole(ledger.kv), whole(ledger.state), sorted(ledger.accounts)) == before
    ledger.audit()


def test_what_was_gathered_and_not_taken_goes_home() -> None:
    ledger = Ledger(20, 3)
    first, some, _ = ledger.grant(2, 0, "r")
    second, rest, _ = ledger.grant(3, 0, "r")
    offered = some + rest
    homes = ledger.kv.owners_of(offered)
    account = ledger.account_of(offered, 0, "r")
    ledger.put_back(offered, homes, account)
    ledger.audit()
    assert ledger.kv.owned_by(first).tolist() == sorted(some)
    assert ledger.kv.owned_by(second).tolist() == sorted(rest)


def test_a_grant_that_its_caller_writes_to_deceives_nobody() -> None:
    ledger = Ledger(20, 3)
    number, pages, _ = ledger.grant(3, 0, "r")
    good = pages[:]
    _, others, _ = ledger.grant(3, 0, "other")
    pages[0] = others[0]
    with pytest.raises(OwnershipError):
        ledger.account_of(pages, 0, "r")
    assert ledger.account_of(good, 0, "r") == number


@pytest.mark.parametrize("seed", range(4))
def test_any_run_of_changes_agrees_with_a_plain_table(seed: int) -> None:
    """Random grants, returns, parkings and adoptions beside a dictionary."""
    random_ = random.Random(seed)
    ledger = Ledger(400, 5)
    owner: dict[int, int] = {}
    parked: list[Ids] = []
    for _ in range(400):
        act = random_.choice(["grant", "more", "give", "park", "unpark", "adopt", "evict", "wrong"])
        number = random_.choice([0, *ledger.accounts])
        mine = [place for place, who in owner.items() if who == number]
        ids = array("i", random_.sample(mine, random_.randint(0, len(mine))))
        if act in ("grant", "more"):
            count = random_.choice([0, 1, 3, 17, 140])
            if not 0 < count <= ledger.kv.free:
                continue
            account = number if act == "more" else 0
            got, pages, _ = ledger.grant(count, 0, f"owner {account}", account)
            assert not owner.keys() & set(pages), "granted twice"
            owner.update(dict.fromkeys(pages, got))
        elif act == "wrong" and owner:
            bad = array("i", [*random_.sample(sorted(owner), min(20, len(owner)))])
            if len({owner[place] for place in bad}) > 1:
                before = whole(ledger.kv)
                with pytest.raises(OwnershipError):
                    ledger.kv.give(bad, owner[bad[0]])
                assert whole(ledger.kv) == before
        elif act == "unpark" and parked:
            back = parked.pop(random_.randrange(len(parked)))
            ledger.kv.unpark(back)
            for place in back:
                del owner[place]
        elif act == "evict":
            trees = array("i", [place for place, who in owner.items() if who == TREE][:50])
            ledger.kv.give(trees, TREE)
            for place in trees:
                del owner[place]
        elif number and ids and act in ("give", "park", "adopt"):
            if act == "adopt":
                ledger.adopt(number, ids, 0)
                owner.update(dict.fromkeys(ids, TREE))
                continue
            if act == "give":
                ledger.kv.give(ids, number)
                for place in ids:
                    del owner[place]
            else:
                ledger.kv.park(ids, number)
                parked.append(ids)
                owner.update(dict.fromkeys(ids, PARKED))
            ledger.left(number, len(ids), 0)
        ledger.audit()
        assert {place: ledger.kv.owner_of(place) for place in owner} == owner
        assert ledger.kv.free == ledger.kv.size - len(owner)
