"""Runs the demo: workloads with and without the cache, then the model that recalls facts."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phloem.runtime.demo.measure import Comparison, Settings, compare
from phloem.runtime.demo.report import Report
from phloem.runtime.demo.workloads import (
    Workload,
    conversation_tree,
    simultaneous,
    trace_files,
    trace_sessions,
)
from phloem.runtime.environment import look
from phloem.runtime.integrations.models import build_model
from phloem.runtime.integrations.recall import RecallScore, score_recall
from phloem.runtime.integrations.transformers import TransformersModel
from phloem.runtime.tracing import open_log

__all__ = ["Options", "run", "workloads"]


_WARM_UP = simultaneous(requests=2, shared=64, own=64, max_new=2)


@dataclass(frozen=True)
class Options:
    """What the command line asks for. `traces`: a folder with more traces; `quick`: very small.

    `settings`: the sizes of the pools.
    """

    model: str = "qwen3-next"
    seed: int = 0
    traces: Path | None = None
    log: Path | None = None
    quick: bool = False
    settings: Settings = field(default_factory=Settings)


def workloads(options: Options) -> list[Workload]:
    """What is served. Raises `InvalidRequest` for a folder without traces or with broken ones."""
    more = [] if options.traces is None else trace_files(options.traces)
    if options.quick:
        return [
            conversation_tree(sessions=2, turns=2, system=256, spoken=48, max_new=3),
            trace_sessions(requests=2, prompt_max=1400, max_new=2),
            simultaneous(requests=4, shared=128, own=64, max_new=3),
        ]
    return [
        conversation_tree(),
        trace_sessions(),
        *(trace_sessions(path) for path in more),
        simultaneous(),
    ]


def run(options: Options) -> Report:
    """Serve everything and compare; progress goes to standard error.

    Raises `InvalidRequest` for an unknown model and for traces that cannot be read.
    """
    served = workloads(options)
    torch.set_num_threads(1)  # the model is small: more threads only take the loop's core
    with ExitStack() as stack:
        log = None if options.log is None else stack.enter_context(options.log.open("wb"))
        stack.enter_context(_quiet_transformers())
        total = 2 * sum(len(workload.turns) for workload in served) + 2
        progress = stack.enter_context(_Progress(total))
        progress.begin(f"building {options.model}")
        model = TransformersModel(build_model(options.model, options.seed))
        asyncio.run(compare(model, _WARM_UP))  # the first passes of a process are slower
        progress.step()
        comparisons = [
            _compare(model, workload, options.settings, progress, log) for workload in served
        ]
        progress.begin("asking the model that recalls facts")
        recall = score_recall(seed=options.seed, prompts=4 if options.quick else 40)
        progress.step()
    return Report(
        model=options.model,
        seed=options.seed,
        comparisons=comparisons,
        recall=recall,
        failures=_failures(comparisons, recall),
        environment=look(),
    )


def _compare(
    model: TransformersModel,
    workload: Workload,
    settings: Settings,
    progress: _Progress,
    log: IO[bytes] | None,
) -> Comparison:
    progress.begin(f"{workload.name}: {workload.about}")
    if log is None:
        return asyncio.run(compare(model, workload, settings, tick=progress.step))
    with open_log(log, fields={"workload": workload.name}) as sink:
        return asyncio.run(compare(model, workload, settings, events=sink, tick=progress.step))


def _failures(comparisons: list[Comparison], recall: RecallScore) -> list[str]:
    found = [failure for comparison in comparisons for failure in comparison.failures]
    if recall.restored != recall.cold or recall.largest_difference != 0.0:
        found.append(
            f"recall: {recall.restored:.1%} right when restored, {recall.cold:.1%} when computed, "
            f"logits differ by up to {recall.largest_difference:.3g}"
        )
    return found


class _Progress:
    """A bar where standard error is a terminal, else a line for each part that begins."""

    def __init__(self, total: int) -> None:
        console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._terminal = console.is_terminal

    def begin(self, what: str) -> None:
        """Name the part that begins."""
        self._bar.update(self._task, description=what)
        if not self._terminal:
            print(what, file=sys.stderr, flush=True)

    def step(self) -> None:
        """One of the total is done."""
        self._bar.advance(self._task)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@contextmanager
def _quiet_transformers() -> Generator[None]:
    """Hides that the reference kernels are in use: on a CPU there are no others."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
