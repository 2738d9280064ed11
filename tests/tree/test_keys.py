"""Keys: what is accepted, what is refused and where, namespaces, content marks, comparing."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree.support import World, run

from phloem.actors.tree import ContentMark, Namespace, TokenKey
from phloem.actors.tree.keys import TOKEN_BYTES, Tokens, common_bytes
from phloem.errors import InvalidRequest

IDS = [0, 1, 7, 65_536, 2**31 - 1]
LARGEST = 2**31 - 1

ACCEPTED: dict[str, Tokens] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "array_i": array("i", IDS),
    "array_q": array("q", IDS),
    "array_I": array("I", IDS),
    "memoryview": memoryview(array("i", IDS)),
    "int32": np.array(IDS, np.int32),
    "int64": np.array(IDS, np.int64),
    "uint32": np.array(IDS, np.uint32),
    "big_endian": np.array(IDS, ">i8"),
    "strided": np.array([one for token in IDS for one in (token, 9)], np.int64)[::2],
    "numpy_scalars": [np.int64(token) for token in IDS],
    "torch_int64": torch.tensor(IDS),
    "torch_int32": torch.tensor(IDS, dtype=torch.int32),
    "key": TokenKey.of(IDS),
}


@pytest.mark.parametrize("form", ACCEPTED)
def test_every_form_gives_the_same_key(form: str) -> None:
    key = TokenKey.of(ACCEPTED[form])
    assert key.data == b"".join(token.to_bytes(4, "little") for token in IDS)
    assert (key.length, len(key)) == (5, 5)


@pytest.mark.parametrize(
    "empty", [[], (), array("i"), np.array([], np.int64), np.array([]), torch.tensor([])]
)
def test_no_tokens_are_a_key(empty: Tokens) -> None:
    assert TokenKey.of(empty).data == b""


REFUSED: dict[str, tuple[object, str]] = {
    "negative": ([1, 2, -3], "position 2"),
    "too_large": ([1, 2**31], "position 1"),
    "huge": ([1, 2, 3, 2**70], "position 3"),
    "float": ([1, 2.0, 3], "position 1"),
    "text": (["1", 2], "position 0"),
    "none_inside": ([1, None], "position 1"),
    "nested": ([1, [2]], "position 1"),
    "string": ("abc", "position 0"),
    "none": (None, "NoneType"),
    "number": (7, "int"),
    "array_negative": (array("i", [5, -1]), "position 1"),
    "array_float": (array("d", [5.0]), "position 0"),
    "numpy_negative": (np.array([1, 2, -1]), "position 2"),
    "numpy_large": (np.array([1, 2**31]), "position 1"),
    "numpy_uint64": (np.array([2**64 - 1], np.uint64), "position 0"),
    "numpy_float": (np.array([1.0]), "float64"),
    "numpy_bool": (np.array([True]), "bool"),
    "numpy_object": (np.array([1, None]), "object"),
    "numpy_2d": (np.array([[1, 2]]), "shape"),
    "numpy_0d": (np.array(3), "shape"),
    "memoryview_float": (memoryview(array("f", [1.0])), "float32"),
    "torch_float": (torch.tensor([1.0]), "float32"),
    "torch_negative": (torch.tensor([3, -1]), "position 1"),
    "torch_2d": (torch.zeros(2, 2, dtype=torch.int64), "shape"),
    "torch_elsewhere": (torch.zeros(2, dtype=torch.int64, device="meta"), "tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_tokens_are_refused_with_their_position(case: str) -> None:
    tokens, says = REFUSED[case]
    with pytest.raises(InvalidRequest, match=says):
        TokenKey.of(tokens)  # type: ignore[arg-type]  # wrong on purpose


def test_a_refused_key_changes_nothing() -> None:
    world = World()
    world.publish([1, 2])
    before = world.tree.figures()
    for call in (world.tree.match, lambda key: world.tree.acquire(key, owner="bad")):
        with pytest.raises(InvalidRequest):
            call([1, 2, -1])
    with pytest.raises(InvalidRequest):
        world.tree.insert([1, 2, -1], [7, 8, 9])
    assert world.tree.figures() == before


def test_a_key_does_not_follow_its_buffer() -> None:
    for buffer in (np.array([1, 2, 3], np.int32), array("i", [1, 2, 3])):
        key = TokenKey.of(buffer)
        buffer[0] = 9
        assert key.data == TokenKey.of([1, 2, 3]).data


def test_a_key_can_be_extended() -> None:
    key = TokenKey.of([1, 2], Namespace("a", "b"), [ContentMark(0, 1, b"x")])
    longer = key.extended([3])
    assert longer.data[:8] == key.data
    assert (longer.length, longer.root, longer.namespace) == (3, key.root, key.namespace)


# -- namespaces ------------------------------------------------------------------------------------


def test_f095_parts_of_a_namespace_do_not_run_together() -> None:
    parts = ["", "a", "b", "ab", "a\0b", "a|b", "('a', 'b')"]
    roots = {TokenKey.of([1], Namespace(adapter, salt)).root for adapter in parts for salt in parts}
    assert len(roots) == len(parts) ** 2


def test_a_key_keeps_its_namespace() -> None:
    key = TokenKey.of([1], Namespace("a"))
    assert TokenKey.of(key) is key
    assert TokenKey.of(key, Namespace("a")) is key
    with pytest.raises(InvalidRequest, match="namespace"):
        TokenKey.of(key, Namespace("b"))
    with pytest.raises(InvalidRequest, match="marks"):
        TokenKey.of(key, marks=[ContentMark(0, 1, b"x")])


# -- content marks ---------------------------------------------------------------------------------


def marked(digest: bytes, *, length: int = 12, position: int = 2, tokens: int = 20) -> TokenKey:
    return TokenKey.of([5] * tokens, marks=[ContentMark(position, length, digest)])


def same(left: TokenKey, right: TokenKey) -> bool:
    return (left.root, left.data) == (right.root, right.data)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 12])
def test_every_bit_of_a_digest_counts(length: int) -> None:
    digest = random.Random(1).randbytes(32)
    original = marked(digest, length=length)
    assert same(original, marked(digest, length=length))
    for bit in range(256):
        other = bytearray(digest)
        other[bit // 8] ^= 1 << bit % 8
        assert not same(original, marked(bytes(other), length=length))


@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40), st.integers(1, 15))
def test_different_digests_are_different_keys(left: bytes, right: bytes, length: int) -> None:
    assert same(marked(left, length=length), marked(right, length=length)) == (left == right)


def test_marked_words_are_no_tokens() -> None:
    words = np.frombuffer(marked(b"digest" * 4).data, "<u4")
    assert (words[2:14] >= 2**31).all()
    assert (words[:2] == 5).all() and (words[14:] == 5).all()


def test_what_placeholders_say_does_not_matter() -> None:
    marks = [ContentMark(0, 8, b"picture")]
    assert same(TokenKey.of([1] * 8, marks=marks), TokenKey.of([2] * 8, marks=marks))


def test_one_long_content_is_not_two_short_ones() -> None:
    one = TokenKey.of([5] * 8, marks=[ContentMark(0, 8, b"x")])
    two = TokenKey.of([5] * 8, marks=[ContentMark(0, 4, b"x"), ContentMark(4, 4, b"x")])
    assert not same(one, two)


def test_short_spans_name_the_root() -> None:
    short, other = marked(b"d" * 32, length=2), marked(b"e" * 32, length=2)
    assert short.data == other.data == TokenKey.of([5] * 20).data
    assert len({short.root, other.root, TokenKey.of([5] * 20).root}) == 3
    moved = marked(b"d" * 32, length=2, position=3)
    assert moved.root != short.root


def test_marked_keys_share_what_comes_before() -> None:
    world = World()
    first = TokenKey.of(run(1, 20), marks=[ContentMark(4, 12, b"cat")])
    second = TokenKey.of(run(1, 20), marks=[ContentMark(4, 12, b"dog")])
    world.publish(first)
    assert world.find(second)[:2] == (0, 4)
    assert world.find(first).dev == 20
    assert world.find(run(1, 20))[:2] == (0, 4)


@pytest.mark.parametrize(
    ("marks", "position"),
    [
        ([ContentMark(-1, 2, b"x")], -1),
        ([ContentMark(2, 0, b"x")], 2),
        ([ContentMark(2, -3, b"x")], 2),
        ([ContentMark(8, 3, b"x")], 8),
        ([ContentMark(0, 4, b"x"), ContentMark(3, 2, b"y")], 3),
        ([ContentMark(1, 2, b"")], 1),
    ],
)
def test_wrong_marks_are_refused_with_their_position(
    marks: list[ContentMark], position: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"position {position} "):
        TokenKey.of([5] * 10, marks=marks)


# -- comparing -------------------------------------------------------------------------------------


@given(
    common=st.lists(st.integers(0, 3), max_size=70),
    left=st.lists(st.integers(0, 3), max_size=20),
    right=st.lists(st.integers(0, 3), max_size=20),
    page=st.sampled_from([1, 2, 4, 16]),
    shift=st.integers(0, 5),
)
def test_common_bytes_agrees_with_counting(
    common: list[int], left: list[int], right: list[int], page: int, shift: int
) -> None:
    mine, theirs = common + left, common + right
    pages = 0
    while (end := (pages + 1) * page) <= min(len(mine), len(theirs)) and (
        mine[end - page : end] == theirs[end - page : end]
    ):
        pages += 1
    data = TokenKey.of([9] * shift + mine).data
    unit = page * TOKEN_BYTES
    found = common_bytes(data, shift * TOKEN_BYTES, len(data), TokenKey.of(theirs).data, unit)
    assert found == pages * unit
