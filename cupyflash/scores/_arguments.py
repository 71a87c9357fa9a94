"""Checks of the numbers that make a function; these modules import no others."""

import math
import numbers
import operator
from typing import Any

import numpy as np

FARTHEST = 2**63 - 1  # between two positions: what is beyond means the same


def integer(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int of at least `least`; True and 1.0 are none."""
    accepted = f"{name} must be an int" + ("" if least is None else f" >= {least}")
    if isinstance(value, bool):
        raise TypeError(f"{accepted}, got {value}")
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{accepted}, got {type(value).__name__}") from None
    if least is not None and found < least:
        raise ValueError(f"{accepted}, got {found}")
    return found


def positive(name: str, value: Any) -> float:
    """`value` as a finite float above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for float64 (at most 1.8e308)") from None
    if not 0 < found < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value}")
    return found


def distance(name: str, value: Any, least: int) -> int:
    """`value` as an int of at least `least` that fits in 64 bits."""
    return min(integer(name, value, least), FARTHEST)


def flag(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{name} must be a bool, True or False, got {type(value).__name__}"
        )
    return bool(value)
