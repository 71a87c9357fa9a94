"""Axes, and strides that collapse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash._core import strides as _strides


@pytest.mark.parametrize(
    ("axis", "ndim", "axes"),
    [
        (None, 3, (0, 1, 2)),
        (None, 0, ()),
        (1, 3, (1,)),
        (-1, 3, (2,)),
        (np.int64(0), 2, (0,)),
        ((2, 0), 3, (0, 2)),
        ((-1, 0), 3, (0, 2)),
        ((), 2, ()),
        ([0, 1], 2, (0, 1)),
        ((np.int64(1), 0), 2, (0, 1)),
        (np.array(1), 2, (1,)),
    ],
)
def test_axes(axis, ndim, axes):
    assert _strides.normalize_axes(axis, ndim) == axes


@pytest.mark.parametrize(
    ("axis", "ndim"), [(2, 2), (-3, 2), ((0, 5), 2), (1, 0), (-2, 0)]
)
def test_axes_out_of_range(axis, ndim):
    with pytest.raises(np.exceptions.AxisError, match="out of bounds"):
        _strides.normalize_axes(axis, ndim)


def test_an_axis_named_twice():
    with pytest.raises(ValueError, match=r"repeated axis in `axis` argument, got \("):
        _strides.normalize_axes((0, -2), 2)


@pytest.mark.parametrize(
    "axis", [1.0, "0", True, {0}, (0, 1.0), (True,), (None,), np.arange(2)]
)
def test_axes_of_another_type(axis):
    with pytest.raises(TypeError, match="axis must be None, an int or a tuple of ints"):
        _strides.normalize_axes(axis, 2)


def test_element_strides():
    x = np.zeros((4, 6), np.float32)
    assert _strides.element_strides(x) == (6, 1)
    assert _strides.element_strides(x[::-1, ::2]) == (-6, 2)


def test_strides_between_elements():
    """Rounded to elements they would lead to other numbers."""
    records = np.zeros((3, 1), [("a", np.float64), ("b", np.float32)])
    with pytest.raises(ValueError, match=r"float64 has strides of \(12, 12\) bytes"):
        _strides.element_strides(records["a"])
    assert _strides.element_strides(records["b"]) == (3, 3)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3, 4), [(12, 4, 1)], ((24,), [(1,)])),
        ((2, 3, 4), [(12, 4, 1), (0, 4, 1)], ((2, 12), [(12, 1), (0, 1)])),
        ((2, 1, 4), [(4, 99, 1)], ((8,), [(1,)])),
        ((), [()], ((), [()])),
        ((1, 1), [(5, 7)], ((), [()])),
        ((3, 4), [(1, 3)], ((3, 4), [(1, 3)])),
        ((2, 3), [(0, 0)], ((6,), [(0,)])),
        ((2, 3), [(-3, -1)], ((6,), [(-1,)])),
    ],
)
def test_collapse(shape, strides, expected):
    assert _strides.collapse(shape, strides) == expected


@st.composite
def views(draw):
    """A shape with the strides of two operands."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    strides = [
        tuple(draw(st.integers(-12, 12)) for _ in shape)
        if draw(st.booleans())
        else _contiguous(shape)
        for _ in range(2)
    ]
    return shape, strides


def _contiguous(shape):
    return tuple(int(np.prod(shape[a + 1 :])) for a in range(len(shape)))


def _addresses(shape, strides):
    """The offset of every element, in C order."""
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in np.ndindex(shape)
    ]


@given(views())
def test_collapse_keeps_every_address_in_order(view):
    shape, strides = view
    new_shape, new_strides = _strides.collapse(shape, strides)
    assert 1 not in new_shape
    assert len(new_shape) <= len(shape)
    for old, new in zip(strides, new_strides, strict=True):
        assert _addresses(shape, old) == _addresses(new_shape, new)
