"""The memory layout of a softmax problem, which a choice of kernel depends on."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cupyflash._core import strides as _strides


@dataclass(frozen=True)
class Layout:
    """Axes over the rows and along a row, merged where possible, at least one of each.

    The largest stride comes first. Strides count elements, by the name of the operand:
    "x" (the y of a vjp), "dy", "b", "where", "out" and "sign". They are 0 if an operand
    is absent or broadcast, and for a result with one number per row.
    """

    outer_size: tuple[int, ...]
    outer_strides: Mapping[str, tuple[int, ...]]
    reduced_size: tuple[int, ...]
    reduced_strides: Mapping[str, tuple[int, ...]]
    full: tuple[str, ...]  # the operands with one number per element, except masks
    # Whether x and out are aligned to 16-byte vectors, for softmax and log_softmax.
    is_aligned: bool = True

    def spread(self, outer_axes: int, reduced_axes: int) -> "Layout":
        """The same with this many axes, the further ones of length 1."""

        def padded(axes, count, fill):
            return (fill,) * (count - len(axes)) + axes

        def all_padded(strides, count):
            return {name: padded(axes, count, 0) for name, axes in strides.items()}

        return Layout(
            padded(self.outer_size, outer_axes, 1),
            all_padded(self.outer_strides, outer_axes),
            padded(self.reduced_size, reduced_axes, 1),
            all_padded(self.reduced_strides, reduced_axes),
            self.full,
            self.is_aligned,
        )

    @functools.cached_property
    def num_rows(self) -> int:
        return prod(self.outer_size)

    @functools.cached_property
    def row_length(self) -> int:
        return prod(self.reduced_size)

    @functools.cached_property
    def is_rows(self) -> bool:
        """Whether rows are contiguous in memory."""
        strides = [self.reduced_strides[name] for name in self.full]
        return all(stride == (1,) for stride in strides)

    def is_in_vectors(self, vector: int) -> bool:
        """Whether rows consist of whole, aligned vectors of this many elements."""
        if not self.is_aligned or self.reduced_size[-1] % vector:
            return False
        last = [self.reduced_strides[name][-1] for name in self.full]
        steps = [
            step
            for name in self.full
            for step in (*self.outer_strides[name], *self.reduced_strides[name][:-1])
        ]
        return set(last) == {1} and not any(step % vector for step in steps)

    @functools.cached_property
    def inner(self) -> int:
        """How many adjacent columns there are; 1 if there are none."""
        if len(self.reduced_size) > 1 or self.is_rows:
            return 1
        names = {*self.full, "out"}
        side_by_side = all(self.outer_strides[name][-1] == 1 for name in names)
        return self.outer_size[-1] if side_by_side else 1

    @property
    def is_columns(self) -> bool:
        """Whether rows are adjacent columns, as in a matrix."""
        return self.inner > 1


def of(
    shape: Sequence[int],
    reduced: Sequence[int],
    strides: Mapping[str, Sequence[int]],
    full: Sequence[str],
    is_aligned: bool = True,
) -> Layout:
    """The layout of operands of one shape, whose axes `reduced` are summed."""
    outer = [axis for axis in range(len(shape)) if axis not in reduced]
    outer_size, outer_strides = _collapsed(shape, outer, strides)
    size, reduced_strides = _collapsed(shape, reduced, strides)
    return Layout(
        outer_size, outer_strides, size, reduced_strides, tuple(full), is_aligned
    )


def _collapsed(shape, axes, strides):
    """The given axes, merged where possible: sizes, and strides by operand.

    No result depends on the order of axes among themselves, so they are sorted by the
    strides of the first operand, which brings axes together that can merge.
    """
    axes = sorted(axes, key=lambda axis: [-abs(s[axis]) for s in strides.values()])
    size, collapsed = _strides.collapse(
        [shape[axis] for axis in axes],
        [[s[axis] for axis in axes] for s in strides.values()],
    )
    if not size:  # one element: as good as contiguous
        size, collapsed = (1,), [(1,)] * len(strides)
    return size, dict(zip(strides, collapsed, strict=True))


def rows(num_rows: int, length: int, names: Sequence[str]) -> Layout:
    """A made-up layout: adjacent contiguous rows."""
    return _made_up((num_rows, length), (1,), names)


def columns(slabs: int, length: int, inner: int, names: Sequence[str]) -> Layout:
    """A made-up layout: the columns of `slabs` matrices of `length` by `inner`."""
    return _made_up((slabs, length, inner), (1,), names)


def _made_up(shape, reduced, names):
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    full = [name for name in names if name in ("x", "dy", "out")]
    return of(shape, reduced, dict.fromkeys(names, steps), full)
