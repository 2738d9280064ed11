"""Deterministic workloads: streams of requests, each matched, completed and inserted whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.peers.protocol import Tokens

__all__ = ["SIZES", "Request", "Sizes", "agents", "chat", "documents", "grown_tree"]

VOCABULARY = 150_000


class Request(NamedTuple):
    """Prompt and answer; at `breakpoints` the caller expects other continuations."""

    tokens: Tokens
    breakpoints: tuple[int, ...] = ()


class Sizes(NamedTuple):
    """What a workload needs of a cache: room for tokens and states, and its longest request."""

    tokens: int
    states: int
    longest: int


_CHAT = 512 + 200 * 8 * 150
_DOCUMENTS = 20 * (32_768 + 8 * 64)
_AGENTS = 50 * 364 * 1024
SIZES: dict[str, Sizes] = {
    "W1": Sizes(int(_CHAT * 1.35), 4000, 2048),
    "W2": Sizes(int(_DOCUMENTS * 1.35), 4000, 33_000),
    "W3": Sizes(int(_AGENTS * 1.05) + 100_000, int(50 * 364 * 2.2), 6200),
    "W4": Sizes(_CHAT // 4, 400, 2048),  # chat that does not fit
}


def random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    """`count` token ids."""
    return rng.integers(1, VOCABULARY, count, dtype=np.int64)


def chat(
    sessions: int = 200, turns: int = 8, system: int = 512, turn: int = 150
) -> Iterator[Request]:
    """W1 and W4: one system prompt for all, sessions interleaved turn by turn."""
    rng = np.random.default_rng(1)
    shared = random_tokens(rng, system)
    histories = [
        np.concatenate([shared, random_tokens(rng, turns * turn)]) for _ in range(sessions)
    ]
    for number in range(1, turns + 1):
        for session in rng.permutation(sessions):
            yield Request(histories[session][: system + number * turn])


def documents(
    count: int = 20, length: int = 32_768, questions: int = 8, question: int = 64
) -> Iterator[Request]:
    """W2: short questions about long documents, interleaved; a document ends at a breakpoint."""
    rng = np.random.default_rng(2)
    texts = [random_tokens(rng, length) for _ in range(count)]
    for _ in range(questions):
        order: list[int] = rng.permutation(count).tolist()
        for number in order:
            tokens = np.concatenate([texts[number], random_tokens(rng, question)])
            yield Request(tokens, (length,))


def agents(roots: int = 50, depth: int = 6, fanout: int = 3, edge: int = 1024) -> Iterator[Request]:
    """W3: a search tree of an agent, level by level, one request for each node."""
    rng = np.random.default_rng(3)
    level = [random_tokens(rng, edge) for _ in range(roots)]
    for tokens in level:
        yield Request(tokens)
    for _ in range(depth - 1):
        deeper: list[Tokens] = []
        order: list[int] = rng.permutation(len(level)).tolist()
        for number in order:
            for _ in range(fanout):
                tokens = np.concatenate([level[number], random_tokens(rng, edge)])
                deeper.append(tokens)
                yield Request(tokens)
        level = deeper


def grown_tree(nodes: int, edge: int, depth: int = 4) -> Iterator[tuple[Tokens, bool]]:
    """W5: the largest uniform tree of at most `nodes`, depth first: (path, is a leaf).

    The fan-out grows with the size and the depth does not, so what changes is size alone.
    """
    rng = np.random.default_rng(5)
    fanout = 2
    while sum((fanout + 1) ** level for level in range(1, depth + 1)) <= nodes:
        fanout += 1

    def below(prefix: Tokens, level: int) -> Iterator[tuple[Tokens, bool]]:
        for _ in range(fanout):
            path = np.concatenate([prefix, random_tokens(rng, edge)])
            yield path, level == depth
            if level < depth:
                yield from below(path, level + 1)

    yield from below(np.empty(0, np.int64), 1)
