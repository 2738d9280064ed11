"""Where a command writes its result: into a file, or to standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ["STDOUT", "add_json_option", "write", "write_json"]

STDOUT = Path("-")
"""Stands for standard output."""


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json [FILE]`: `STDOUT` without a file, None where the option is not given."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=Path,
        metavar="FILE",
        help="write the result as JSON to FILE (without FILE or with -: to standard output)",
    )


def write(path: Path, pieces: Iterable[bytes]) -> None:
    """Write text in UTF-8, each piece of whole characters. Raises `OSError`."""
    if path == STDOUT:
        for piece in pieces:
            sys.stdout.write(piece.decode())
        return
    with path.open("wb") as file:
        file.writelines(pieces)


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON. Raises `OSError`."""
    write(path, [msgspec.json.format(msgspec.json.encode(value), indent=2), b"\n"])
