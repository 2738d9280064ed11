"""What the demo serves: turns with prompts that share prefixes, each after the one it answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from phloem.errors import InvalidRequest
from phloem.runtime.integrations.models import encode_bytes
from phloem.runtime.traces import SAMPLES, TraceRequest, read_trace

__all__ = [
    "Turn",
    "Workload",
    "conversation_tree",
    "distinct_tokens",
    "simultaneous",
    "trace_files",
    "trace_sessions",
]

_TEXTS = ("LICENSE-Apache-2.0.txt", "LICENSE-MIT-tau-bench.txt")
_LICENSES = files("phloem.runtime.traces") / "data"
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
        text = "\n".join((_LICENSES / name).read_text(encoding="utf-8") for name in _TEXTS)
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


# -- real traces ---------------------------------------------------------------------------------


def trace_files(folder: Path) -> list[Path]:
    """The traces in a folder: `.jsonl` and `.csv` files, plain or gzipped.

    Raises `InvalidRequest` when there is none.
    """
    endings = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
    found = sorted(path for path in folder.glob("*") if path.name.endswith(endings))
    if not found:
        raise InvalidRequest(f"no {', '.join(endings)} in {folder}")
    return found


def trace_sessions(
    path: Path = SAMPLES["agent_taubench_airline_tokens"],
    *,
    sessions: int = 4,
    requests: int = 16,
    prompt_max: int = 1900,
    max_new: int = 8,
) -> Workload:
    """The first sessions of a trace: each session's requests one after another.

    A session is cut before its first prompt above `prompt_max` tokens. A trace of longer prompts
    is shrunk, block by block, until half its first prompt fits. Token ids become bytes in such a
    way that two prompts share exactly as many tokens as they did. Raises `InvalidRequest` for a
    trace that cannot be read or in which nothing fits.
    """
    fit = _Fit()
    turns: list[Turn] = []
    last: dict[str, str | None] = {}
    ended: set[str] = set()
    shrink = 0
    for number, request in enumerate(read_trace(path)):
        shrink = shrink or _shrink_for(request, prompt_max // 2)
        session = request.session or f"request {number}"  # no sessions: all are on their own
        if session not in last and len(last) == sessions and request.session:
            continue
        prompt = request.tokens(shrink=shrink)
        if len(prompt) > prompt_max:
            ended.add(session)
        if session in ended:
            continue
        name = f"{path.name.partition('.')[0]}-{number}"
        new = max(1, min(request.output, max_new))
        turns.append(Turn(name, fit(prompt.tolist()), new, last.get(session)))
        last[session] = name
        if len(turns) == requests:
            break
    stem = path.name.partition(".")[0].removeprefix("agent_").removesuffix("_tokens")
    if not turns:
        raise InvalidRequest(f"{path.name}: no prompt of at most {prompt_max} tokens")
    shorter = f", {shrink} times shorter" if shrink > 1 else ""
    return Workload(stem, f"the first sessions of a real trace{shorter}", tuple(turns))


def _shrink_for(request: TraceRequest, length: int) -> int:
    """The smallest power of two by which the prompt must shrink, as far as blocks allow."""
    shrink = 1
    while len(request.tokens(shrink=shrink)) > length and 2 * shrink <= request.block_size:
        shrink *= 2
    return shrink


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
