"""A result whose neighbours in memory are those of another axis than the input's.

A kernel that reads along one axis and writes along another would do so element by
element. Its result goes to new memory that lies as the input does, and from there by
tiles to where it belongs.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from cupyflash._core import strides as _strides
from cupyflash._core.dtypes import WORDS
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import AXES, Struct

_THREADS, _TILE = 256, 64  # of cuda_src/copy/transpose.cu
# Elements from which a launch more takes less time than it saves.
_WORTH = 1 << 16
# Neighbours in memory, on either side, that fill enough of a tile: 33 of them 0.34
# instead of 0.08 (16 bits), 7 of them 0.12 instead of 0.19.
_FEWEST = 16


def variant(itemsize: int, outer_axes: int) -> Variant:
    """What is compiled for elements of so many bytes."""
    defines = (("ELEM_T", WORDS[itemsize]), ("OUTER_AXES", str(outer_axes)))
    return Variant("copy/transpose.cu", "softmax_turn", defines)


TURN = Struct(
    "turn_t",
    "copy/transpose.cu",
    (
        ("long long", "size[2]"),
        ("long long", "from_step", "onto_step"),
        ((AXES, "OUTER_AXES", "kNumArrays"), "outer"),
    ),
)


def transpose_launch(
    shape: Sequence[int], strides: Sequence[Sequence[int]], itemsize: int
) -> tuple[LaunchConfig, bytes]:
    """A copy of one shape from memory with some strides to memory with others.

    Strides count elements; along one axis of each neighbours lie side by side.
    """
    size, steps = _strides.collapse(shape, strides)
    near = [steps[i].index(1) for i in range(2)]
    outer = [axis for axis in range(len(size)) if axis not in near]
    outer_size = [size[axis] for axis in outer] or [1]
    fields: dict[str, Any] = {
        "size": [size[axis] for axis in near],
        "from_step": steps[0][near[1]],
        "onto_step": steps[1][near[0]],
        "outer": (outer_size, [[of[axis] for axis in outer] or [0] for of in steps]),
    }
    tiles = [-(-size[axis] // _TILE) for axis in near]
    config = LaunchConfig(
        variant(itemsize, max(1, len(outer))),
        (prod(tiles) * prod(outer_size), 1, 1),
        (_THREADS, 1, 1),
    )
    params = TURN.pack(fields, OUTER_AXES=len(outer_size), kNumArrays=2)
    return config, params


def is_worth(
    shape: Sequence[int], near: Sequence[int], given: Sequence[int], itemsize: int
) -> bool:
    """Whether a result with strides `given` is transposed, from those of `near`."""
    if prod(shape) < _WORTH or itemsize not in WORDS:
        return False
    size, steps = _strides.collapse(shape, [near, given])
    if not all(1 in of for of in steps):
        return False
    axes = {of.index(1) for of in steps}
    return len(axes) == 2 and min(size[axis] for axis in axes) >= _FEWEST


def compile_list() -> list[tuple[str, Variant]]:
    """What there is to compile."""
    return [("turn", variant(size, axes)) for size in WORDS for axes in (1, 2)]
