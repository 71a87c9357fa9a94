"""Types of the public signatures."""

from typing import Any, Literal, TypeAlias

# A NumPy or CuPy ndarray, or what converts to one; CuPy is optional and has no types.
Array: TypeAlias = Any

Method: TypeAlias = Literal["auto", "naive", "safe", "online", "tiled"]
Layout: TypeAlias = Literal["bhsd", "bshd"]
Precision: TypeAlias = Literal["float32", "tf32"]
Axis: TypeAlias = int | tuple[int, ...] | None
Window: TypeAlias = int | tuple[int | None, int | None] | None
