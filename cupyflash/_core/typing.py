"""Types of the public signatures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never, SupportsIndex, TypeAlias

__all__ = [
    "Array",
    "Axis",
    "Layout",
    "Mask",
    "Method",
    "NamedArrays",
    "Never",
    "Precision",
    "Score",
    "Window",
]

# A NumPy or CuPy ndarray, or what converts to one; CuPy is optional and has no types.
Array: TypeAlias = Any

Method: TypeAlias = Literal["auto", "naive", "safe", "online", "tiled"]
Layout: TypeAlias = Literal["bhsd", "bshd"]
Precision: TypeAlias = Literal["float32", "tf32"]
# Integers of Python and NumPy; sequences are tuples and lists.
Axis: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | None
Window: TypeAlias = SupportsIndex | Sequence[SupportsIndex | None] | None
# Functions of the score and the positions, and their arrays.
Score: TypeAlias = Callable[..., Any]
Mask: TypeAlias = Callable[..., Any]
NamedArrays: TypeAlias = Mapping[str, Array]
