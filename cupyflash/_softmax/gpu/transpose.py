"""Results whose innermost axis is not that of the input.

A kernel that reads along one axis and writes along another would do so element by
element. Its result goes to new memory in the layout of the input instead, and is then
transposed by tiles.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from cupyflash._core import strides as _strides
from cupyflash._core.dtypes import WORDS
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import AXES, Struct

_THREADS, _TILE = 256, 64  # of cuda_src/copy/transpose.cu
# With more elements, an additional launch takes less time than it saves.
_WORTH = 1 << 16
# Contiguous elements, on either side, that fill enough of a tile.
_FEWEST = 16


def variant(itemsize: int, outer_axes: int) -> Variant:
    """The kernel for elements of this many bytes."""
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
    """A copy of one shape between memory with different strides.

    Strides count elements; each side has one contiguous axis.
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
    """Whether a result with strides `given` is transposed from strides `near`."""
    if prod(shape) < _WORTH or itemsize not in WORDS:
        return False
    size, steps = _strides.collapse(shape, [near, given])
    if not all(1 in of for of in steps):
        return False
    axes = {of.index(1) for of in steps}
    return len(axes) == 2 and min(size[axis] for axis in axes) >= _FEWEST


def compile_list() -> list[tuple[str, Variant]]:
    """The kernels that can be compiled."""
    return [("turn", variant(size, axes)) for size in WORDS for axes in (1, 2)]
