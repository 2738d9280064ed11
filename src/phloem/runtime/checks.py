"""Checks of a caller's arguments, before anything is asked of the actors."""

from __future__ import annotations

import operator
from math import isnan, nan
from typing import SupportsIndex

from phloem.errors import InvalidRequest

__all__ = ["integer", "seconds"]


def integer(what: str, value: SupportsIndex, least: int = 0) -> int:
    """`value` as an int. Raises `InvalidRequest` unless it is a whole number, `least` or more."""
    if type(value) is int and value >= least:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{what} is {value!r}, not a whole number") from None
    if number < least:
        raise InvalidRequest(f"{what} is {number}; at least {least}")
    return number


def seconds(what: str, value: float) -> float:
    """`value` as a float. Raises `InvalidRequest` unless it is a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = nan
    if isnan(number):
        raise InvalidRequest(f"{what} is {value!r}, not a number of seconds")
    return number
