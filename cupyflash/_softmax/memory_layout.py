"""Where the elements of a softmax problem lie: what a choice of kernel may look at."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cupyflash._core import strides as _strides


@dataclass(frozen=True)
class Layout:
    """Axes over the rows and along a row, as few of each as can be, at least one.

    The widest stride comes first. Strides count elements, by the name of the operand:
    "x" (the y of a vjp), "dy", "b", "where", "out" and "sign". They are 0 where an
    operand is absent or broadcast, and where a result has one number a row.
    """

    outer_size: tuple[int, ...]
    outer_strides: Mapping[str, tuple[int, ...]]
    reduced_size: tuple[int, ...]
    reduced_strides: Mapping[str, tuple[int, ...]]
    full: tuple[str, ...]  # the operands with a number an element, masks left out
    # Whether x and out begin at a whole vector of 16 bytes: of softmax and log_softmax.
    is_aligned: bool = True

    def spread(self, outer_axes: int, reduced_axes: int) -> "Layout":
        """The same over so many axes, the further ones of length 1."""

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
        """Whether neighbours along a row are neighbours in memory."""
        strides = [self.reduced_strides[name] for name in self.full]
        return all(stride == (1,) for stride in strides)

    def is_in_vectors(self, vector: int) -> bool:
        """Whether rows are whole vectors of so many neighbours, which are aligned."""
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
        """How many rows lie side by side, element by element; 1 if they do not."""
        if len(self.reduced_size) > 1 or self.is_rows:
            return 1
        names = {*self.full, "out"}
        side_by_side = all(self.outer_strides[name][-1] == 1 for name in names)
        return self.outer_size[-1] if side_by_side else 1

    @property
    def is_columns(self) -> bool:
        """Whether rows lie side by side, as the columns of a matrix do."""
        return self.inner > 1


def of(
    shape: Sequence[int],
    reduced: Sequence[int],
    strides: Mapping[str, Sequence[int]],
    full: Sequence[str],
    is_aligned: bool = True,
) -> Layout:
    """The layout of operands of one shape, of which the axes `reduced` are summed."""
    outer = [axis for axis in range(len(shape)) if axis not in reduced]
    outer_size, outer_strides = _collapsed(shape, outer, strides)
    size, reduced_strides = _collapsed(shape, reduced, strides)
    return Layout(
        outer_size, outer_strides, size, reduced_strides, tuple(full), is_aligned
    )


def _collapsed(shape, axes, strides):
    """The given axes as few as can be: sizes, and strides by operand.

    No result depends on the order of axes among themselves, so they go by the strides
    of the first operand: what lies together in memory becomes one axis.
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
    """A made-up layout: rows back to back."""
    return _made_up((num_rows, length), (1,), names)


def columns(slabs: int, length: int, inner: int, names: Sequence[str]) -> Layout:
    """A made-up layout: the columns of `slabs` matrices of `length` by `inner`."""
    return _made_up((slabs, length, inner), (1,), names)


def _made_up(shape, reduced, names):
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    full = [name for name in names if name in ("x", "dy", "out")]
    return of(shape, reduced, dict.fromkeys(names, steps), full)
