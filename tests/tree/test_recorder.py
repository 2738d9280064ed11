"""A recording played again gives every result; one that was changed is noticed."""

from __future__ import annotations

import random

import msgspec
import pytest

from phloem.actors.actions import EvictExcessPathStates
from phloem.actors.tree import ContentMark, Lease, Namespace, Placement, TokenKey, Tree
from phloem.actors.tree.dump import dump_tree, picture
from phloem.actors.tree.recorder import KEYS_REMEMBERED, ReplayDiffers, TreeRecorder, replay
from phloem.errors import InvalidRequest, StaleHandle


def busy(tree: Tree, seed: int, turns: int) -> None:
    """All operations of a tree, at random."""
    chance = random.Random(seed)
    leases: list[Lease] = []
    page = slot = 1
    for turn in range(turns):
        tree.tick(turn)
        space = Namespace("lora", "salt") if chance.random() < 0.3 else Namespace()
        tokens = [chance.randint(1, 3) for _ in range(chance.randint(1, 6))]
        marks = [ContentMark(0, 1, b"picture")] if chance.random() < 0.1 else []
        key = TokenKey.of(tokens, space, marks)
        step = chance.random()
        if step < 0.3:
            pages = list(range(page, page + len(tokens)))
            page, slot = page + len(tokens), slot + 1
            _, actions = tree.insert(key, pages, slot, owner=3, priority=chance.randint(0, 2))
            for action in actions:
                if isinstance(action, EvictExcessPathStates):
                    tree.evict_excess(action)
        elif step < 0.5:
            lease, match = tree.open(
                key,
                owner=f"r{turn}",
                limit=len(tokens),
                session=f"s{turn % 3}",
                session_ends=turn + 9,
            )
            pages = list(range(page, page + len(tokens) - match.usable))
            page, slot = page + len(pages), slot + 1
            tree.insert(key, pages, slot, lease, owner=3, swap=chance.random() < 0.5)
            tree.stand_on(lease)
            leases.append(lease)
        elif step < 0.6 and leases:
            tree.release(leases.pop(chance.randrange(len(leases))))
        elif step < 0.7 and leases:
            lease = chance.choice(leases)
            if lease.has_state and lease.live:
                tree.release_state(lease)
        elif step < 0.75 and leases and leases[0].generation == tree.generation:
            tree.advance(leases[0], beyond=0, limit=9)
            leases.append(tree.fork(leases[0], owner="fork"))
        elif step < 0.95:
            tree.evict(chance.randint(0, 3), chance.randint(0, 2), by=f"r{turn}")
            tree.match(key)
        elif step < 0.97:
            tree.use_policy(chance.choice(["lru", "lfu", "benefit"]))
            tree.close_session("s1")
        elif step < 0.98:
            tree.reset()
            while tree.sweep(3)[0]:
                pass


def recorded(seed: int, turns: int = 300, **how: object) -> tuple[Tree, list[bytes]]:
    """A tree that was busy, and its recording."""
    tree = Tree(page_size=1, placement=Placement(max_states_per_path=3), **how)  # type: ignore[arg-type]  # cases
    lines: list[bytes] = []
    TreeRecorder(tree, lines.append)
    busy(tree, seed, turns)
    return tree, lines


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["lru", "session"])
def test_a_recording_gives_every_result_again(seed: int, policy: str) -> None:
    tree, lines = recorded(seed, policy=policy)
    again = replay(lines)
    assert picture(dump_tree(again)) == picture(dump_tree(tree))
    assert (again.now, again.time, again.generation) == (tree.now, tree.time, tree.generation)
    names = {msgspec.json.decode(line).get("name") for line in lines}
    assert len(names) >= 13


def test_a_recording_does_not_change_what_is_recorded() -> None:
    tree, _ = recorded(1)
    plain = Tree(page_size=1, placement=Placement(max_states_per_path=3))
    busy(plain, 1, 300)
    assert picture(dump_tree(plain)) == picture(dump_tree(tree))


def test_two_runs_give_the_same_log() -> None:
    assert recorded(7)[1] == recorded(7)[1]


def test_a_changed_result_is_noticed_with_its_line() -> None:
    _, lines = recorded(2)
    at = next(n for n, line in enumerate(lines) if b'"insert"' in line)
    lines[at] = lines[at].replace(b'"reused":', b'"reused":1')
    with pytest.raises(ReplayDiffers, match=f"line {at + 1}, insert"):
        replay(lines)


def test_a_missing_operation_is_noticed() -> None:
    _, lines = recorded(3)
    at = next(n for n, line in enumerate(lines) if b'"name":"insert"' in line)
    with pytest.raises(ReplayDiffers):
        replay(lines[:at] + lines[at + 1 :])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "not a recording"),
        ([b"[]"], "not a recording"),
        ([b"no"], "not a recording"),
        ([b'{"format":"other"}'], "not a recording"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[bytes], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        replay(lines)


def test_other_formats_and_lines_are_refused() -> None:
    _, lines = recorded(1, turns=20)
    other = lines[0].replace(b"phloem-tree-1", b"phloem-tree-9")
    with pytest.raises(InvalidRequest, match="phloem-tree-9"):
        replay([other, *lines[1:]])
    with pytest.raises(InvalidRequest, match="line 2"):
        replay([lines[0], b'{"type":"call"}'])
    bad = b'{"type":"call","name":"_grow","args":[],"kwargs":{},"result":null}'
    with pytest.raises(InvalidRequest, match="no operation '_grow'"):
        replay([lines[0], bad])


def test_a_recording_begins_at_the_beginning() -> None:
    tree = Tree(page_size=1)
    tree.insert([1], [1])
    with pytest.raises(InvalidRequest, match="begins"):
        TreeRecorder(tree, list.append)  # type: ignore[arg-type]  # never called


def test_refused_operations_are_not_recorded() -> None:
    tree = Tree(page_size=1)
    lines: list[bytes] = []
    TreeRecorder(tree, lines.append)
    lease, _ = tree.acquire([1, 2], owner="r")
    tree.release(lease)
    before = len(lines)
    with pytest.raises(StaleHandle):
        tree.release(lease)
    with pytest.raises(InvalidRequest):
        tree.evict(-1)
    assert len(lines) == before
    replay(lines)


def test_more_keys_than_are_remembered() -> None:
    tree = Tree(page_size=1, components=("kv",))
    lines: list[bytes] = []
    TreeRecorder(tree, lines.append)
    for turn in range(2 * KEYS_REMEMBERED + 10):
        tree.insert(TokenKey.of([turn % (KEYS_REMEMBERED + 5), 1]), [2 * turn + 1, 2 * turn + 2])
    assert replay(lines).figures() == tree.figures()
