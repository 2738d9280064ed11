"""`phloem simulate`: many seeds, or a whole trace, with a summary and failures that repeat.

Exit status: 0 when nothing was found, 1 when something was, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from phloem.errors import InvalidRequest
from phloem.runtime.arguments import from_one
from phloem.runtime.output import STDOUT, add_json_option, write_json
from phloem.runtime.processes import in_processes
from phloem.runtime.simulation.campaign import HOSTS, Fixed, command, plan_for, run_plan, shorten
from phloem.runtime.simulation.faults import FAULTS
from phloem.runtime.simulation.jobs import ORDERS
from phloem.runtime.simulation.loop import POLICIES, Policy
from phloem.runtime.simulation.production import PRODUCTION_FAULTS, demo, production
from phloem.runtime.simulation.summary import Summary
from phloem.runtime.simulation.uses import USES
from phloem.runtime.simulation.workloads import WORKLOADS
from phloem.runtime.simulation.world import SimulationFailed
from phloem.runtime.traces import read_trace

__all__ = ["run"]

_TELL_S = 2.0


class Failure(msgspec.Struct, frozen=True):
    """One seed that failed: the command that repeats it, and what was found."""

    seed: int
    command: str
    report: str


def run(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.trace is not None:
            return _production(options)
        if options.demo:
            return _demo(options)
        return _campaign(options)
    except BrokenPipeError:
        raise
    except (InvalidRequest, OSError) as error:
        print(f"phloem simulate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phloem simulate",
        description="Runs the real actors under simulated schedulers in virtual time, with faults, "
        "and checks them after every turn. What is not said is drawn from each seed.",
    )
    add = parser.add_argument
    add("--seeds", default="0:200", metavar="A:B", help="a range, or numbers with commas")
    add("--scheduler", choices=tuple(ORDERS), help="who is admitted next")
    add("--workload", choices=tuple(WORKLOADS), help="who asks for what")
    add("--policy", choices=POLICIES, help="how tasks are ordered")
    add(
        "--faults",
        metavar="NAMES",
        help=f"with commas: only these may be on; none, all, or of: {', '.join(FAULTS)}",
    )
    add(
        "--uses",
        metavar="NAMES",
        help=f"with commas: only these may be made use of; none, all, or of: {', '.join(USES)}",
    )
    add("--host", choices=HOSTS, help="no host tier, or how it is written")
    add("--requests", type=int, metavar="N", help="requests of a workload")
    add("--prompts", metavar="NUMBERS", help="with commas: only these requests of a workload")
    add("--scramble", type=int, metavar="STEP", help="from this step on, keep asyncio's order")
    add("--minimize", action="store_true", help="shorten the first failure")
    add("--keep-going", action="store_true", help="do not stop at the first failure")
    add("--jobs", type=from_one, default=1, metavar="N", help="processes (default: 1)")
    add("--trace", type=Path, metavar="FILE", help="serve a whole trace on pools of real size")
    add("--demo", action="store_true", help="the demo's conversations, as by users who read")
    add("--limit", type=from_one, metavar="N", help="with --trace: the first N requests")
    add(
        "--workers",
        type=from_one,
        default=4,
        metavar="N",
        help="with --trace: workers' worth of pool",
    )
    add_json_option(parser)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        if ":" in text:
            first, last = text.split(":")
            return tuple(range(int(first or 0), int(last)))
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise InvalidRequest(f"{text!r} is neither a range A:B nor numbers with commas") from None


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None or text == "all":
        return None
    return () if text == "none" else tuple(text.split(","))


def _fixed(options: argparse.Namespace) -> Fixed:
    policy: Policy | None = options.policy
    return Fixed(
        scheduler=options.scheduler,
        workload=options.workload,
        policy=policy,
        faults=_names(options.faults),
        uses=_names(options.uses),
        prompts=_numbers(options.prompts) if options.prompts else None,
        scramble=options.scramble,
        requests=options.requests,
        host=options.host,
    )


# -- many seeds ------------------------------------------------------------------------------------


def _campaign(options: argparse.Namespace) -> int:
    seeds, fixed = _numbers(options.seeds), _fixed(options)
    if not seeds:
        raise InvalidRequest("no seeds")
    began = time.monotonic()
    total, failures = Summary(), list[Failure]()
    told = began
    for part, found in _parts(seeds, fixed, options.jobs, stop=not options.keep_going):
        total.merge(part)
        failures += found
        now = time.monotonic()
        if now - told >= _TELL_S:
            told = now
            _tell(f"{total.seeds + len(failures)} of {len(seeds)} seeds, {len(failures)} failed")
        if failures and not options.keep_going:
            break
    total.wall_s = time.monotonic() - began
    if failures and options.minimize:
        failures[0] = _shortened(failures[0].seed, fixed)
    _report(total, failures, options.json)
    return 1 if failures else 0


def _parts(
    seeds: Sequence[int], fixed: Fixed, jobs: int, *, stop: bool
) -> Iterator[tuple[Summary, list[Failure]]]:
    if jobs <= 1:
        for seed in seeds:
            yield _seeds((seed,), fixed, stop)
        return
    size = max(1, min(50, len(seeds) // (4 * jobs)))
    parts = [tuple(seeds[at : at + size]) for at in range(0, len(seeds), size)]
    work = partial(_seeds, fixed=fixed, stop=stop)
    for _, done in in_processes(min(jobs, len(parts)), work, parts):
        yield done


def _seeds(seeds: Sequence[int], fixed: Fixed, stop: bool) -> tuple[Summary, list[Failure]]:
    torch.set_num_threads(1)
    summary, failures = Summary(), list[Failure]()
    for seed in seeds:
        plan = plan_for(seed, fixed)
        repeat = command(plan, fixed)
        try:
            summary.add(run_plan(plan, repeat=repeat))
        except SimulationFailed as error:
            failures.append(Failure(seed, repeat, str(error)))
            if stop:
                break
    return summary, failures


def _shortened(seed: int, fixed: Fixed) -> Failure:
    _tell(f"shortening seed {seed}")
    try:
        run_plan(plan_for(seed, fixed))
    except SimulationFailed as error:
        best, last = shorten(seed, fixed, error, told=_tell)
    else:
        raise InvalidRequest(f"seed {seed} failed, but not again: something outside it decides")
    repeat = command(plan_for(seed, best), best)
    return Failure(seed, repeat, f"{last}\nrepeat it with: {repeat}")


# -- a whole trace ---------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    faults = PRODUCTION_FAULTS
    names = _names(options.faults)
    if names is not None:
        faults = faults.only(names)
    torch.set_num_threads(1)
    total, failures = Summary(), list[Failure]()
    demo(seed=0, faults=faults)  # the first run of a process pays for what it imports
    for seed in _numbers(options.seeds):
        began = time.monotonic()
        try:
            total.add(demo(seed=seed, faults=faults))
        except SimulationFailed as error:
            failures.append(Failure(seed, f"phloem simulate --demo --seeds {seed}", str(error)))
        total.wall_s += time.monotonic() - began
    _report(total, failures, options.json)
    return 1 if failures else 0


def _production(options: argparse.Namespace) -> int:
    faults = PRODUCTION_FAULTS
    names = _names(options.faults)
    if names is not None:
        faults = faults.only(names)
    began = told = time.monotonic()

    def tell(at_s: float, number: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            _tell(f"request {number}, {at_s:.0f} virtual s in {told - began:.0f} s")

    requests = read_trace(options.trace)
    if options.limit is not None:
        requests = (request for request, _ in zip(requests, range(options.limit), strict=False))
    total, failures = Summary(), list[Failure]()
    seed = _numbers(options.seeds)[0]
    torch.set_num_threads(1)
    try:
        total.add(
            production(
                requests,
                seed=seed,
                scheduler=options.scheduler or "fcfs",
                faults=faults,
                workers=options.workers,
                told=tell,
            )
        )
    except SimulationFailed as error:
        failures.append(Failure(seed, f"phloem simulate --trace {options.trace}", str(error)))
    total.wall_s = time.monotonic() - began
    _report(total, failures, options.json)
    return 1 if failures else 0


# -- telling ---------------------------------------------------------------------------------------


def _tell(line: object) -> None:
    print(f"simulate: {line}", file=sys.stderr, flush=True)


def _report(total: Summary, failures: Sequence[Failure], json: Path | None) -> None:
    figures = total.figures()
    if json is not None:
        result = {**figures, "failures": [msgspec.to_builtins(failure) for failure in failures]}
        write_json(json, result)
        if json == STDOUT:
            return
    for failure in failures:
        print(failure.report)
        print()
    for line in _lines(total, figures):
        print(line)
    if failures:
        print(f"{len(failures)} seeds failed; the first again: {failures[0].command}")


def _lines(total: Summary, figures: dict[str, object]) -> Iterator[str]:
    rate = total.seeds / total.wall_s if total.wall_s else 0.0
    faster = total.virtual_s / total.wall_s if total.wall_s else 0.0
    yield f"seeds        {total.seeds} without a violation, {rate:.1f} a second"
    yield f"turns        {total.turns}, {total.steps} steps of the loop, {total.audits} audits"
    yield f"virtual time {total.virtual_s:.1f} s, {faster:.0f} times faster than real"
    yield f"requests     {_words(total.requests)}; {total.preempted} preemptions"
    yield (
        f"tokens       {total.prompt_tokens} of prompts, {total.hit_rate:.1%} reused, "
        f"{total.output_tokens} of answers"
    )
    yield (
        f"first token  median {figures['first_token_s_p50']} s, 95 % {figures['first_token_s_p95']}"
        f" s, 99 % {figures['first_token_s_p99']} s"
    )
    yield (
        f"answers      median {figures['total_s_p50']} s, 95 % {figures['total_s_p95']} s; "
        f"an allocation waited at most {total.waited_s:.3f} s"
    )
    kept = total.events.get("Kept", 0)
    yield f"host tier    {kept} runs of places kept, {total.tokens_loaded} tokens loaded"
    yield f"evicted      {_words(total.evicted)}"
    yield f"faults       {_words(total.injected)}: survived"
    yield f"verified     {total.bytes_checked / 2**20:.1f} MiB of KV and states read by steps"
    if total.seeds:
        yield "lost         nothing: at the end each place and lease had come back"


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
