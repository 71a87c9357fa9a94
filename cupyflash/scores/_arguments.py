"""Checks of the numbers that make a function; these modules import no others."""

import math
import numbers
import operator
from typing import Any


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
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value}")
    return float(value)
