"""What the demo serves: turns with prompts that share prefixes, each after the one it answers."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

from phloem.errors import InvalidRequest
from phloem.runtime.integrations.models import encode_bytes

__all__ = [
    "SAMPLE",
    "Turn",
    "Workload",
    "conversation_tree",
    "distinct_tokens",
    "simultaneous",
    "trace_files",
    "trace_sessions",
]

_DATA = files("phloem.runtime.demo") / "data"
SAMPLE = _DATA / "agent_airline_tokens.jsonl.gz"
"""The trace that ships with the package; `data/README.md` says what it is and where from."""

_TEXTS = ("LICENSE-Apache-2.0.txt", "LICENSE-MIT-tau-bench.txt")
_BYTES = 256


@dataclass(frozen=True)
class Turn:
    """One request. It arrives when the turn named `after` has been answered; None: at once."""

    id: str
    prompt: tuple[int, ...]
    max_new: int
    after: str | None = None


@dataclass(frozen=True)
class Workload:
    """Turns to serve, and one line that says what they are."""

    name: str
    about: str
    turns: tuple[Turn, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all turns: what is computed without a cache."""
        return sum(len(turn.prompt) for turn in self.turns)


def distinct_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens of the prompts when each common prefix counts once: the least that can be computed."""
    ordered = sorted(map(tuple, prompts))
    shared = sum(_common(a, b) for a, b in itertools.pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


# -- English text --------------------------------------------------------------------------------


class _Text:
    """Real English, handed out from front to back and from the front again; a byte is a token."""

    def __init__(self) -> None:
        text = "\n".join((_DATA / name).read_text(encoding="utf-8") for name in _TEXTS)
        self._words = itertools.cycle(text.split())

    def take(self, length: int) -> str:
        """The next words, cut to exactly `length` characters."""
        taken, size = list[str](), 0
        while size <= length:
            word = next(self._words)
            taken.append(word)
            size += len(word) + 1
        return " ".join(taken)[:length]


def conversation_tree(
    *, sessions: int = 4, turns: int = 3, system: int = 1024, spoken: int = 96, max_new: int = 8
) -> Workload:
    """Sessions under one system prompt that run side by side; the last turn is asked in two ways.

    `system` and `spoken` are characters: of the system prompt, of each question and each answer.
    The answers in the history are text as well, so that a prompt does not depend on the model.
    """
    text = _Text()
    opening = text.take(system)
    made: list[Turn] = []
    for session in range(1, sessions + 1):
        history, before = opening, None
        for number in range(1, turns + 1):
            name = f"talk{session}.{number}"
            asked = f"{history}\n\nUser: {text.take(spoken)}\nAssistant:"
            made.append(Turn(name, tuple(encode_bytes(asked)), max_new, before))
            if number == turns:
                again = f"{history}\n\nUser: {text.take(spoken)}\nAssistant:"
                made.append(Turn(f"{name}b", tuple(encode_bytes(again)), max_new, before))
            history, before = f"{asked} {text.take(spoken)}", name
    return Workload("conversations", "a conversation tree over licence texts", tuple(made))


def simultaneous(
    *, requests: int = 16, shared: int = 1024, own: int = 128, max_new: int = 16
) -> Workload:
    """Requests that arrive together: `shared` tokens in common, `own` of each, `max_new` to say."""
    text = _Text()
    opening = text.take(shared)
    prompts = [f"{number:4d} {text.take(own)}"[:own] for number in range(1, requests + 1)]
    return Workload(
        "together",
        f"{requests} requests at once: {shared} shared, {own} own, {max_new} new tokens",
        tuple(
            Turn(f"together{number}", tuple(encode_bytes(opening + prompt)), max_new)
            for number, prompt in enumerate(prompts, 1)
        ),
    )


# -- traces of agents ----------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    """One request of a trace; see `data/README.md`."""

    s: int
    ref: int
    reuse: int
    new: list[int]
    out: list[int]


class _Source:
    """Where a trace is read from, whether packaged or a file of the user's."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        try:
            text = gzip.decompress(content) if name.endswith(".gz") else content
        except (OSError, EOFError) as error:
            raise InvalidRequest(f"{name} is not gzip: {error}") from error
        self._lines = text.splitlines()

    def requests(self) -> Iterator[tuple[int, list[int], int]]:
        """Session, input and length of the output of each request, in order of arrival."""
        spoken: list[list[int]] = []
        for number, text in enumerate(self._lines):
            try:
                line = msgspec.json.decode(text, type=_Line)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{self.name}, line {number + 1}: {error}") from error
            if not -1 <= line.ref < number:
                raise InvalidRequest(f"{self.name}, line {number + 1} refers to line {line.ref}")
            begin = spoken[line.ref][: line.reuse] if line.ref >= 0 else []
            spoken.append(begin + line.new + line.out)
            yield line.s, begin + line.new, len(line.out)


def trace_files(folder: Path) -> list[Path]:
    """The traces in a folder: files named `*_tokens.jsonl` or `*_tokens.jsonl.gz`.

    Raises `InvalidRequest` when there is none.
    """
    found = [p for p in folder.glob("*_tokens.jsonl*") if p.suffix in (".gz", ".jsonl")]
    if not found:
        raise InvalidRequest(f"no *_tokens.jsonl or *_tokens.jsonl.gz in {folder}")
    return sorted(found)


def trace_sessions(
    path: Path | None = None,
    *,
    sessions: int = 4,
    requests: int = 16,
    prompt_max: int = 1900,
    max_new: int = 8,
) -> Workload:
    """The first sessions of a trace (None: the sample): each session's requests one after another.

    A session is cut before its first prompt above `prompt_max` tokens. Token ids become bytes in
    such a way that two prompts share exactly as many tokens as they did.
    """
    source = (
        _Source("agent_airline_tokens.jsonl.gz", SAMPLE.read_bytes())
        if path is None
        else _Source(path.name, path.read_bytes())
    )
    fit = _Fit()
    turns: list[Turn] = []
    last: dict[int, str | None] = {}
    ended: set[int] = set()
    for session, prompt, said in source.requests():
        if session not in last:
            if len(last) == sessions:
                continue
            last[session] = None
        if len(prompt) > prompt_max or not said:
            ended.add(session)
        if session in ended or not prompt:
            continue
        name = f"trace{session}.{sum(turn.id.startswith(f'trace{session}.') for turn in turns) + 1}"
        turns.append(Turn(name, fit(prompt), min(said, max_new), last[session]))
        last[session] = name
        if len(turns) == requests:
            break
    if not turns:
        raise InvalidRequest(f"{source.name}: no prompt of at most {prompt_max} tokens")
    stem = source.name.split(".")[0].removesuffix("_tokens")
    return Workload(stem, "the first sessions of a real trace of agents", tuple(turns))


class _Fit:
    """Maps sequences of any token ids to bytes, keeping exactly how many tokens they share.

    After each prefix, different tokens get different bytes, at most 256 of them.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], tuple[int, int]] = {}  # (prefix, token): byte, prefix
        self._taken: dict[int, set[int]] = {}  # by prefix: its bytes

    def __call__(self, tokens: Sequence[int]) -> tuple[int, ...]:
        mapped: list[int] = []
        prefix = 0
        for token in tokens:
            known = self._next.get((prefix, token))
            if known is None:
                known = self._choose(prefix, token), len(self._next) + 1
                self._next[prefix, token] = known
            byte, prefix = known
            mapped.append(byte)
        return tuple(mapped)

    def _choose(self, prefix: int, token: int) -> int:
        taken = self._taken.setdefault(prefix, set())
        if len(taken) == _BYTES:
            raise InvalidRequest(f"more than {_BYTES} different tokens follow one prefix")
        byte = token % _BYTES
        while byte in taken:
            byte = (byte + 1) % _BYTES
        taken.add(byte)
        return byte
