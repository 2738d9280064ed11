"""Who asks for what, and when: synthetic generators, each for one way in which caches are hard.

A workload is a list of `Prompt`s in the order of their arrival. The same generator, size and seed
give the same list.

chat         several users under one system prompt; each turn holds the conversation so far
documents    long documents that are asked about again and again, in a skewed order
agents       loops that append a little to a long context, and now and then branch off in its middle
collisions   keys made to share a page or a few tokens and then part, also across namespaces
bursts       groups of almost equal prompts that arrive at one instant

The samples of real traces (`phloem.runtime.traces`) are workloads too, by their names: a stretch of
one, with blocks, times and answers made smaller. What prefixes are equal stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import msgspec

from phloem.actors.tree.keys import Namespace
from phloem.errors import InvalidRequest
from phloem.runtime.simulation.tags import TokenIds
from phloem.runtime.traces import SAMPLES, TraceRequest, sample

__all__ = ["WORKLOADS", "Prompt", "Scale", "of_trace", "workload"]

_VOCABULARY = 1000


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload: `output` tokens are generated after `tokens`.

    `at_s` is the virtual second of its arrival. Less `priority` is more urgent. `session` names
    the conversation it belongs to, if any, of which one `ends_session`.
    """

    name: str
    at_s: float
    tokens: TokenIds
    output: int
    namespace: Namespace = Namespace()
    priority: int = 0
    session: str = ""
    ends_session: bool = False


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a workload: requests, tokens of a usual piece of text, seconds between groups."""

    requests: int = 24
    piece: int = 12
    gap_s: float = 0.05


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(max(1, length))]


def _some(rng: random.Random, mean: int) -> int:
    return rng.randrange(1, 2 * mean + 1)


def chat(rng: random.Random, scale: Scale) -> list[Prompt]:
    """Turns of conversations; what the model said stands in later turns as drawn text."""
    system = _text(rng, 2 * scale.piece)
    users = max(1, scale.requests // 5)
    talks = [list(system) for _ in range(users)]
    out: list[Prompt] = []
    now = 0.0
    for number in range(scale.requests):
        now += rng.expovariate(1 / scale.gap_s)
        user = rng.randrange(users)
        talks[user] += _text(rng, _some(rng, scale.piece))
        output = _some(rng, max(1, scale.piece // 2))
        out.append(
            Prompt(
                name=f"chat-{user}-{number}",
                at_s=now,
                tokens=list(talks[user]),
                output=output,
                session=f"chat-{user}",
            )
        )
        talks[user] += _text(rng, output)
    return out


def documents(rng: random.Random, scale: Scale) -> list[Prompt]:
    """Questions about documents; half of all questions are about the first one."""
    texts = [_text(rng, 4 * scale.piece + _some(rng, 4 * scale.piece)) for _ in range(4)]
    out: list[Prompt] = []
    now = 0.0
    for number in range(scale.requests):
        now += rng.expovariate(1 / scale.gap_s)
        which = min(int(rng.expovariate(0.7)), len(texts) - 1)
        tokens = texts[which] + _text(rng, _some(rng, max(1, scale.piece // 2)))
        out.append(
            Prompt(
                name=f"document-{which}-{number}",
                at_s=now,
                tokens=tokens,
                output=_some(rng, max(1, scale.piece // 3)),
                priority=which,
            )
        )
    return out


def agents(rng: random.Random, scale: Scale) -> list[Prompt]:
    """Contexts that grow step by step; one in six steps goes back and takes another way."""
    tools = _text(rng, 3 * scale.piece)
    contexts: list[list[int]] = [list(tools) for _ in range(max(1, scale.requests // 8))]
    out: list[Prompt] = []
    now = 0.0
    for number in range(scale.requests):
        now += rng.expovariate(2 / scale.gap_s)
        agent = number % len(contexts)
        if rng.random() < 1 / 6:
            contexts[agent] = contexts[agent][: rng.randrange(1, len(contexts[agent]) + 1)]
        contexts[agent] = contexts[agent] + _text(rng, _some(rng, max(1, scale.piece // 2)))
        output = _some(rng, max(1, scale.piece // 3))
        out.append(
            Prompt(
                name=f"agent-{agent}-{number}",
                at_s=now,
                tokens=contexts[agent],
                output=output,
                namespace=Namespace(adapter=f"lora-{agent % 2}"),
                priority=agent % 3,
                session=f"agent-{agent}",
            )
        )
    return out


def collisions(rng: random.Random, scale: Scale) -> list[Prompt]:
    """Keys over two tokens, so that they share pages and part anywhere; two namespaces, one key."""
    spaces = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"))
    pool: list[list[int]] = [[1] * (3 * scale.piece)]
    out: list[Prompt] = []
    now = 0.0
    for number in range(scale.requests):
        now += rng.expovariate(1 / scale.gap_s)
        base = rng.choice(pool)
        tokens = base[: rng.randrange(1, len(base) + 1)]
        tokens = tokens + [rng.randrange(2) for _ in range(rng.randrange(scale.piece))]
        pool.append(tokens)
        out.append(
            Prompt(
                name=f"collision-{number}",
                at_s=now,
                tokens=tokens,
                output=rng.randrange(1, 4),
                namespace=rng.choice(spaces),
                priority=rng.randrange(3),
            )
        )
    return out


def bursts(rng: random.Random, scale: Scale) -> list[Prompt]:
    """Groups that arrive at once: one common prefix, short tails, some prompts twice."""
    out: list[Prompt] = []
    now = 0.0
    while len(out) < scale.requests:
        now += 4 * scale.gap_s
        common = _text(rng, 3 * scale.piece)
        tails = [_text(rng, _some(rng, max(1, scale.piece // 2))) for _ in range(4)]
        for _ in range(min(8, scale.requests - len(out))):
            out.append(
                Prompt(
                    name=f"burst-{len(out)}",
                    at_s=now,
                    tokens=common + rng.choice(tails),
                    output=_some(rng, max(1, scale.piece // 4)),
                    priority=rng.randrange(3),
                )
            )
    return out


def of_trace(
    requests: Iterable[TraceRequest], *, shrink: int = 1, faster: float = 1.0, answer_max: int = 64
) -> Iterator[Prompt]:
    """The requests of a trace as prompts, one at a time.

    `shrink` makes blocks of tokens shorter, `faster` the time between arrivals.
    """
    start: float | None = None
    for number, request in enumerate(requests):
        start = request.at_s if start is None else start
        yield Prompt(
            name=f"trace-{request.session}-{number}" if request.session else f"trace-{number}",
            at_s=(request.at_s - start) / faster,
            tokens=request.tokens(shrink=shrink),
            output=max(1, min(request.output, answer_max)),
            session=request.session,
        )


def _stretch(name: str, rng: random.Random, scale: Scale) -> list[Prompt]:
    """A stretch of a sample; prompts of lengths only, or of tokens, are cut."""
    requests = list(sample(name))
    start = rng.randrange(max(1, len(requests) - scale.requests))
    part = requests[start : start + scale.requests]
    shrink = max(1, part[0].block_size // 4)
    most = 8 * scale.piece
    span = max(0.001, part[-1].at_s - part[0].at_s)
    prompts = of_trace(
        part, shrink=shrink, faster=span / (scale.gap_s * len(part)), answer_max=scale.piece
    )
    return [msgspec.structs.replace(prompt, tokens=prompt.tokens[:most]) for prompt in prompts]


WORKLOADS: Mapping[str, Callable[[random.Random, Scale], list[Prompt]]] = {
    "chat": chat,
    "documents": documents,
    "agents": agents,
    "collisions": collisions,
    "bursts": bursts,
    **{name: partial(_stretch, name) for name in SAMPLES},
}


def workload(name: str, seed: int, scale: Scale | None = None) -> list[Prompt]:
    """The prompts of the generator called `name`; raises `InvalidRequest` for an unknown one."""
    generator = WORKLOADS.get(name)
    if generator is None:
        raise InvalidRequest(f"no workload is called {name!r}; there are {tuple(WORKLOADS)}")
    prompts = generator(random.Random(seed), scale or Scale())
    last = {prompt.session: number for number, prompt in enumerate(prompts) if prompt.session}
    for number in last.values():
        prompts[number] = msgspec.structs.replace(prompts[number], ends_session=True)
    return prompts
