"""The command line, also as `python -m phloem`.

Exit status: 0 when all is well, 1 when the demo found a fault, 2 for a call that is wrong or an
extra that is not installed, 130 when interrupted, 141 when nobody reads the output to its end.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from phloem.errors import InvalidRequest, NoRoom
from phloem.runtime.environment import Environment, look, version_of
from phloem.runtime.output import STDOUT, add_json_option, write_json

__all__ = ["main"]

_OK, _FAULT, _MISUSE, _INTERRUPTED, _UNREAD = 0, 1, 2, 130, 141

_COMMANDS: dict[str, tuple[str, str]] = {
    "simulate": (
        "phloem.runtime.simulation.cli:run",
        "run the real actors under simulated schedulers, with faults",
    ),
    "replay": (
        "phloem.runtime.replay.cli:run",
        "traces through the real tree, with any policy at any capacity",
    ),
    "trace": (
        "phloem.runtime.observe.cli:trace",
        "rebuild the state at a time from a log, or write a timeline for Perfetto",
    ),
    "explain": (
        "phloem.runtime.observe.cli:explain",
        "why a request of a log hit as far as it did and no further",
    ),
    "report": (
        "phloem.runtime.observe.cli:report",
        "a log as one page of HTML",
    ),
    "top": (
        "phloem.runtime.observe.cli:top",
        "watch a cache by the log that it writes",
    ),
}
"""Commands with a command line of their own: the function of its arguments, and help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in _COMMANDS:
            module, _, function = _COMMANDS[arguments[0]][0].partition(":")
            run: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
            return _written(run(arguments[1:]))
        options = _parser().parse_args(arguments)
        return _written(_demo(options) if options.command == "demo" else _env(options.json))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return _UNREAD
    except (InvalidRequest, NoRoom, OSError) as error:
        print(f"phloem: {error}", file=sys.stderr)
        return _MISUSE
    except KeyboardInterrupt:
        print("phloem: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phloem", description="A cache of prompt prefixes for hybrid language models."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version_of('phloem')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_option = argparse.ArgumentParser(add_help=False)
    add_json_option(json_option)
    demo = commands.add_parser(
        "demo",
        parents=[json_option],
        help="serve a hybrid model with and without the cache and compare",
        description="Serves a hybrid model (weights from a seed) with and without the cache, "
        "compares outputs and times, and audits the cache. Exit status 1 if an output differs, a "
        "page or slot is unaccounted for, or an audit fails.",
    )
    demo.add_argument(
        "--model",
        default="qwen3-next",
        metavar="NAME",
        help="falcon-h1, nemotron-h, ...; an unknown name lists them all (default: %(default)s)",
    )
    demo.add_argument("--seed", default=0, type=int, metavar="N", help="of the weights")
    demo.add_argument(
        "--traces",
        default=os.environ.get("PHLOEM_TRACES") or None,
        type=Path,
        metavar="DIR",
        help="serve the first sessions of each trace there, too "
        "(default: the environment variable PHLOEM_TRACES)",
    )
    demo.add_argument("--log", type=Path, metavar="FILE", help="write the events as JSON lines")
    demo.add_argument("--quick", action="store_true", help="a few requests only")
    pools = demo.add_argument_group("pools")
    pools.add_argument("--pages", default=2048, type=int, metavar="N", help="on the device")
    pools.add_argument("--states", default=64, type=int, metavar="N", help="on the device")
    pools.add_argument("--host", default="0", metavar="SIZE", help="a host tier, like 256MiB")
    pools.add_argument(
        "--write-policy",
        default="write_through",
        metavar="WHEN",
        help="write_through, selective or write_back (default: %(default)s)",
    )
    pools.add_argument(
        "--faults",
        default="",
        metavar="HOW:N",
        help="every N-th load from the host fails, hangs or comes late: fail:3, hang:3, late:3",
    )
    commands.add_parser(
        "env",
        parents=[json_option],
        help="what a bug report needs: versions and machine",
        description="Prints versions, the build of torch, processor, memory and loops.",
    )
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def _demo(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console

        from phloem.runtime.demo.faults import parse_faults
        from phloem.runtime.demo.main import Options, run
        from phloem.runtime.demo.measure import Settings
        from phloem.runtime.demo.report import show
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "transformers", "safetensors"):
            raise
        print(
            f"phloem demo needs {missing}: pip install 'phloem[cli,transformers]'",
            file=sys.stderr,
        )
        return _MISUSE
    report = run(
        Options(
            model=options.model,
            seed=options.seed,
            traces=options.traces,
            log=options.log,
            quick=options.quick,
            settings=Settings(
                pages=options.pages,
                states=options.states,
                host_bytes=options.host,
                write_policy=options.write_policy,
                faults=parse_faults(options.faults) if options.faults else None,
            ),
        )
    )
    to_stdout = options.json == STDOUT
    show(report, Console(stderr=to_stdout))
    if options.json is not None:
        write_json(options.json, report)
    return _FAULT if report.failures else _OK


def _env(json: Path | None) -> int:
    environment = look()
    if json is not None:
        write_json(json, environment)
    if json != STDOUT:
        print(_readable(environment))
    return _OK


def _written(status: int) -> int:
    """After what was printed has gone out, as far as anybody reads it."""
    sys.stdout.flush()
    return status


def _readable(environment: Environment) -> str:
    fields: dict[str, object] = msgspec.structs.asdict(environment)
    del fields["packages"]
    shown = {**environment.packages, **fields, "loops": ", ".join(environment.loops)}
    shown["gpus"] = ", ".join(environment.gpus)
    return "\n".join(
        f"{name}: {'none' if value in (None, '') else value}" for name, value in shown.items()
    )


if __name__ == "__main__":
    sys.exit(main())
