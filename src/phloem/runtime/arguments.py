"""Types of arguments on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError

__all__ = ["from_one"]


def from_one(text: str) -> int:
    """A whole number from 1 on; what else is given ends the command with its usage."""
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise ArgumentTypeError(f"{number} is below 1")
    return number
