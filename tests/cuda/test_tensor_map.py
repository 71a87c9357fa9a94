"""Tensor maps: the arithmetic, which needs no GPU, and one read through a kernel."""

import numpy as np
import pytest

from cupyflash._cuda import tensor_map

ALIGNED = 4096


def strides_of(*shape):
    """Strides in bytes of a contiguous array of 16-bit numbers."""
    return np.empty(shape, np.float16).strides


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 100, 64), strides_of(2, 4, 100, 64)),
        ((1, 1, 1, 8), strides_of(1, 1, 1, 8)),
        # Heads between the rows, as layout="bshd" gives them.
        ((2, 4, 100, 64), (4 * 100 * 128, 128, 4 * 128, 2)),
        # Rows of a wider array.
        ((2, 4, 100, 64), (4 * 100 * 160, 100 * 160, 160, 2)),
        # Broadcast over the batch and the heads.
        ((2, 4, 100, 64), (0, 0, 128, 2)),
        # Axes of length 1 may have any stride.
        ((1, 1, 1, 64), (-6, 3, 7, 2)),
        ((2, 4, 100, 1), (3200, 1600, 16, 7)),
    ],
)
def test_what_a_map_can_hold(shape, strides):
    assert tensor_map.unsupported_reason(ALIGNED, shape, strides) is None


@pytest.mark.parametrize(
    ("ptr", "shape", "strides", "reason"),
    [
        (ALIGNED + 2, (2, 4, 9, 64), strides_of(2, 4, 9, 64), "starts 2 bytes past"),
        (ALIGNED, (2, 4, 9, 64), (4608, 1152, 2, 18), "not contiguous"),
        (ALIGNED, (2, 4, 9, 33), strides_of(2, 4, 9, 33), "stride of 2376 bytes"),
        (ALIGNED, (2, 4, 9, 64), (4608, 1152, -128, 2), "stride of -128 bytes"),
        (ALIGNED, (2, 4, 9, 64), (1 << 40, 1152, 128, 2), "stride of 1099511627776"),
        (ALIGNED, (2, 4, 9, 64), (4608, 1152, 16, 2), "rows that overlap"),
        (ALIGNED, (2, 4, 9, 64), (4608, 1152, 0, 2), "rows that overlap"),
    ],
)
def test_what_it_cannot(ptr, shape, strides, reason):
    assert reason in tensor_map.unsupported_reason(ptr, shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides", "sizes", "steps"),
    [
        (
            (3, 4, 100, 64),
            (51200, 12800, 128, 2),
            (64, 100, 4, 3, 1),
            (128, 12800, 51200),
        ),
        ((4, 100, 64), (12800, 128, 2), (64, 100, 4, 1, 1), (128, 12800, 16)),
        ((3, 4, 100, 64), (0, 12800, 128, 2), (64, 100, 4, 1, 1), (128, 12800, 16)),
        (
            (2, 3, 4, 100, 8),
            (19200, 6400, 1600, 16, 2),
            (8, 100, 4, 3, 2),
            (16, 1600, 6400, 19200),
        ),
        ((1, 1, 1, 8), (-2, 6, 10, 2), (8, 1, 1, 1, 1), (16, 16, 16, 16)),
    ],
)
def test_layout(shape, strides, sizes, steps):
    where = tensor_map.layout(shape, strides)
    assert where.sizes == sizes
    assert where.strides[: len(steps)] == steps
    assert set(where.strides[len(steps) :]) <= {16}


def test_a_row_of_a_box_is_a_row_of_the_swizzle():
    assert tensor_map.BOX_COLUMNS * tensor_map.ITEMSIZE == 128
    assert tensor_map.MAP.itemsize == 128


@pytest.mark.gpu
def test_the_driver_makes_a_map(cupy):
    x = cupy.zeros((2, 3, 40, 24), cupy.float16)
    where = tensor_map.layout(x.shape, x.strides)
    encode = tensor_map.Encoder("float16", where, 64)
    first, again = encode(x.data.ptr), encode(x.data.ptr)
    assert first.shape == (1,)
    assert first.tobytes() == again.tobytes()
    assert encode(x.data.ptr + 1024).tobytes() != first.tobytes()
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled returned"):
        encode(x.data.ptr + 2)
