"""Kinds of array, dtypes, and the refusals that both operations share."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest
from accuracy import FLOATS, dtype_of
from placing import place

from cupyflash._core import arrays as _arrays


class FakeCuda:
    """An object that offers CUDA memory, through one protocol or the other."""

    def __init__(self, code=None):
        if code is None:
            self.__cuda_array_interface__ = {}
        else:
            self.__dlpack_device__ = lambda: (code, 0)


def test_what_lives_on_the_gpu(xp):
    assert _arrays.is_cupy(xp.ones(3)) == (xp is not np)
    assert _arrays.lives_on_gpu(xp.ones(3)) == (xp is not np)


@pytest.mark.parametrize("x", [1, 2.0, True, np.float32(1), [1], (1, 2), None, "x"])
def test_host_objects_do_not_live_on_the_gpu(x):
    assert not _arrays.lives_on_gpu(x)


@pytest.mark.parametrize("code", [2, 13, None])
def test_foreign_cuda_objects_live_on_the_gpu(code):
    assert _arrays.lives_on_gpu(FakeCuda(code))


def test_foreign_host_objects_do_not_live_on_the_gpu():
    assert not _arrays.lives_on_gpu(FakeCuda(1))


def test_an_interface_that_raises_is_none():
    class Awkward:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("cannot describe this tensor")

    assert not _arrays.lives_on_gpu(Awkward())


def test_no_array_is_a_cupy_array_before_cupy_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert not _arrays.is_cupy(np.ones(1))


def test_adopt_does_not_copy(xp):
    x = xp.arange(6.0).reshape(2, 3)[:, ::2]
    adopted = _arrays.adopt(x)
    assert isinstance(adopted, xp.ndarray)
    assert _arrays.same_view(adopted, x)


def test_adopt_takes_lists_and_drops_subclasses():
    assert type(_arrays.adopt([[1, 2], [3, 4]])) is np.ndarray
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    assert type(_arrays.adopt(masked)) is np.ndarray


@pytest.mark.parametrize("module", ["numpy.ma", "cupy"])
def test_a_module_that_another_thread_is_importing(monkeypatch, module):
    """Until its import ends it is in sys.modules without its classes."""
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(_arrays, "CUPY_CLASSES", set())
    xp, arrays = _arrays.adopt_all(x=[1.0, 2.0])
    assert xp is np
    assert type(arrays["x"]) is np.ndarray


def test_cuda_memory_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"needs CuPy, .*cupyflash\[cuda13x\]"):
        _arrays.adopt(FakeCuda())


def test_what_another_library_does_not_hand_over():
    """As PyTorch says of bfloat16 on the host, and of tensors with a gradient."""

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("Got unsupported ScalarType BFloat16")

    with pytest.raises(TypeError, match="k cannot be made an array: Got unsupported"):
        _arrays.adopt_all(q=np.ones(1), k=Tensor())


def test_adopt_all_names_the_namespace(xp):
    module, arrays = _arrays.adopt_all(a=xp.ones(2), b=None, c=3.0)
    assert module is xp
    assert arrays["b"] is None
    assert isinstance(arrays["c"], xp.ndarray)
    assert arrays["c"].shape == ()


def test_a_scalar_alone_is_a_numpy_array():
    module, arrays = _arrays.adopt_all(x=2)
    assert module is np
    assert arrays["x"].dtype.kind == "i"


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["numpy", "cupy"])
def test_kinds_are_never_mixed(cupy, first):
    pair = np.ones(2), cupy.ones(2)
    q, k = pair if first == "numpy" else pair[::-1]
    with pytest.raises(TypeError, match=r"q is a .* but k is a") as caught:
        _arrays.adopt_all(q=q, k=k)
    gpu, cpu = ("k", "q") if first == "numpy" else ("q", "k")
    assert f"cupy.asarray({cpu})" in str(caught.value)
    assert f"cupy.asnumpy({gpu})" in str(caught.value)


@pytest.mark.gpu
def test_a_list_does_not_join_a_gpu_array(cupy):
    with pytest.raises(TypeError, match="pass both as CuPy arrays"):
        _arrays.adopt_all(x=cupy.ones(2), where=[True, False])


@pytest.mark.gpu
def test_a_scalar_does_not_lead_a_gpu_array(cupy):
    with pytest.raises(TypeError, match="cupy"):
        _arrays.adopt_all(x=1.0, where=cupy.ones((), bool))


@pytest.mark.parametrize("name", FLOATS)
def test_to_dtype_and_back(name):
    assert _arrays.to_dtype(name) == dtype_of(name)
    assert _arrays.dtype_name(np.zeros(1, dtype_of(name))) == name
    assert _arrays.float_dtype("dtype", name) == dtype_of(name)
    assert _arrays.float_dtype("dtype", dtype_of(name)) == dtype_of(name)


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r'pip install "cupyflash\[bf16\]"'):
        _arrays.to_dtype("bfloat16")


@pytest.mark.parametrize("bad", [np.int32, "int8", "complex64", np.bool_])
def test_a_dtype_that_is_no_float(bad):
    with pytest.raises(TypeError, match=r"dtype must be one of float16.*got"):
        _arrays.float_dtype("dtype", bad)


def test_a_dtype_that_is_none():
    with pytest.raises(TypeError, match=r"dtype must be one of .*got 'nonsense'"):
        _arrays.float_dtype("dtype", "nonsense")


@pytest.mark.parametrize("value", [1, 2.5, np.float32(0.5), np.int8(3), -1, np.inf])
def test_real_numbers(value):
    assert _arrays.real_number("scale", value) == float(value)


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1.0], np.ones(1), np.True_])
def test_what_is_no_real_number(value):
    with pytest.raises(TypeError, match="scale must be a real number, got"):
        _arrays.real_number("scale", value)


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_numbers_beyond_float64(value):
    with pytest.raises(ValueError, match=r"scale is too large for float64"):
        _arrays.real_number("scale", value)


def test_methods():
    for method in ("auto", "naive", "safe", "online", "tiled"):
        assert _arrays.check_method(method) == method
    with pytest.raises(ValueError, match=r"method must be one of .*got 'fast'"):
        _arrays.check_method("fast")
    with pytest.raises(ValueError, match=r"method must be one of .*got array"):
        _arrays.check_method(np.array(["safe", "naive"]))


def test_out_is_checked(xp):
    good = xp.empty((2, 3), np.float32)
    _arrays.check_out(good, (2, 3), ("float32",), {"x": xp.ones((2, 3))})
    with pytest.raises(ValueError, match=r"out must have shape \(3, 2\), got \(2, 3\)"):
        _arrays.check_out(good, (3, 2), ("float32",), {})
    with pytest.raises(TypeError, match="out must be float64, got float32"):
        _arrays.check_out(good, (2, 3), ("float64",), {})
    with pytest.raises(TypeError, match="out must be float16 or float64, got"):
        _arrays.check_out(good, (2, 3), ("float16", "float64"), {})
    one_row = xp.lib.stride_tricks.as_strided(good, (2, 3), (0, 4))
    with pytest.raises(ValueError, match="elements share memory"):
        _arrays.check_out(one_row, (2, 3), ("float32",), {})
    with pytest.raises(ValueError, match="out shares memory with x"):
        _arrays.check_out(good, (2, 3), ("float32",), {"w": None, "x": good.T})


@pytest.mark.parametrize(
    ("shape", "steps", "is_good"),
    [
        ((3, 5), (5, 1), True),
        ((3, 5), (1, 3), True),
        ((3, 5), (-10, -2), True),
        ((2, 3), (3, 2), True),  # neither axis within the other, and none twice
        ((1, 5), (0, 1), True),
        ((3, 5), (1, 1), False),  # windows that slide
        ((3, 5), (4, 1), False),
        ((3, 5), (-1, 1), False),
        ((2, 3, 5), (6, 2, 1), False),
        ((3, 5), (0, 1), False),
    ],
)
def test_an_out_that_has_elements_twice(xp, shape, steps, is_good):
    low = sum((n - 1) * s for n, s in zip(shape, steps, strict=True) if s < 0)
    strides = tuple(4 * s for s in steps)
    out = xp.lib.stride_tricks.as_strided(
        xp.zeros(60, np.float32)[-low:], shape, strides
    )
    where = {
        sum(i * s for i, s in zip(index, steps, strict=True))
        for index in np.ndindex(shape)
    }
    assert (len(where) == out.size) == is_good
    if is_good:
        _arrays.check_out(out, shape, ("float32",), {})
        return
    with pytest.raises(ValueError, match="elements share memory"):
        _arrays.check_out(out, shape, ("float32",), {})


@pytest.mark.parametrize("out", [[0.0], (0.0,), 0.0, np.float64(0), "x", {}])
def test_an_out_that_nobody_would_see(out):
    with pytest.raises(TypeError, match="out must be a NumPy or CuPy array, got a"):
        _arrays.check_out_is_array(out)


def test_out_is_read_only():
    out = np.empty(3, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        _arrays.check_out(out, (3,), ("float32",), {})


def test_sharing_memory_is_exact(xp):
    x = xp.arange(10.0)
    assert _arrays.share_memory(x, x[3:])
    assert _arrays.share_memory(x[::-1], x[:1])
    assert not _arrays.share_memory(x[::2], x[1::2])
    assert not _arrays.share_memory(x[:5], x[5:])
    assert not _arrays.share_memory(x[:0], x)
    assert not _arrays.share_memory(x, xp.arange(10.0))


@pytest.mark.parametrize("name", FLOATS)
def test_sharing_memory_of_every_dtype(xp, name):
    x = place(xp, np.ones((4, 4), dtype_of(name)))
    assert _arrays.share_memory(x, x.T)
    assert not _arrays.share_memory(x[:2], x[2:])


def test_views_are_the_same_or_not(xp):
    x = xp.arange(6.0).reshape(2, 3)
    assert _arrays.same_view(x, x[:])
    assert _arrays.same_view(x[:1], xp.broadcast_to(x[:1], (1, 3)))
    assert not _arrays.same_view(x, x.T)
    assert not _arrays.same_view(x, x[:1])
    assert not _arrays.same_view(x, x.view(np.int64))
    assert not _arrays.same_view(x, x.copy())


def test_bfloat16_is_told_by_its_dtype():
    assert _arrays.dtype_name(np.zeros(1, ml_dtypes.bfloat16)) == "bfloat16"


# --- where elements lie --------------------------------------------------------------


def made_up(shape, dtype, address=1 << 20, strides=None):
    """A CuPy array that stands nowhere: it is only looked at."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(address, 1 << 30, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, dtype, pointer, strides)


@pytest.mark.parametrize(
    ("shape", "dtype", "address", "strides"),
    [
        ((4, 5), np.float16, 2, None),
        ((4, 5), np.float64, 8, (40, -8)),
        ((4, 5), bool, 1, (7, 1)),
        ((1, 5), np.float32, 4, (3, 4)),  # a stride that nobody takes
        ((0, 5), np.float32, 3, None),
        ((4, 5), np.float32, 4, (0, 12)),
    ],
)
def test_elements_that_kernels_can_read(shape, dtype, address, strides):
    x = made_up(shape, dtype, address, strides)
    _, arrays = _arrays.adopt_all(x=x)
    assert arrays["x"] is x


@pytest.mark.parametrize(
    ("dtype", "address", "strides", "message"),
    [
        (np.float16, 1, None, "k starts 1 bytes past a multiple of 2, the size of f"),
        (np.float64, 12, None, "k starts 4 bytes past a multiple of 8"),
        (np.float32, 4, (30, 6), r"k of float32 has strides of \(30, 6\) bytes, which"),
        (np.float32, 4, (-18, 4), "not multiples of 4 .* pass a contiguous copy"),
        (
            np.dtype(">f4"),
            4,
            None,
            "k has the byte order of dtype '>f4'.*convert it to '<f4'",
        ),
    ],
)
def test_elements_that_they_cannot(dtype, address, strides, message):
    q, k = made_up((4, 5), np.float32), made_up((4, 5), dtype, address, strides)
    with pytest.raises(ValueError, match=message):
        _arrays.adopt_all(q=q, k=k)


def test_overlaps_of_random_views(rng):
    """Against the bytes of all elements, one by one."""
    memory = np.zeros(4000, np.uint8)
    found = set()
    for _ in range(2000):
        itemsize = int(rng.choice([1, 2, 4]))
        shape = tuple(rng.integers(1, 6, rng.integers(1, 5)).tolist())
        steps = rng.integers(-40, 40, len(shape)) * (
            itemsize if rng.random() < 0.7 else 1
        )
        strides = tuple(steps.tolist())
        start = memory[2000 : 2000 + itemsize].view(f"V{itemsize}")
        x = np.lib.stride_tricks.as_strided(start, shape, strides)
        places = sum(
            i * s for i, s in zip(np.indices(shape), strides, strict=True)
        ).ravel()
        taken = places[:, None] + np.arange(itemsize)
        overlaps = np.unique(taken).size < taken.size
        assert _arrays.overlaps_itself(x) == overlaps
        at = made_up(shape, {1: "u1", 2: "u2", 4: "u4"}[itemsize], 1 << 20, strides)
        assert _arrays.overlaps_itself(at) == overlaps
        found.add(overlaps)
    assert found == {False, True}


def test_steps_of_two_axes_that_meet_later():
    """2 * 24 = 3 * 16: neither step is a multiple of the other."""
    z = np.lib.stride_tricks.as_strided(np.zeros(40), (3, 4), (24, 16))
    with pytest.raises(ValueError, match="elements share memory"):
        _arrays.check_out(z, (3, 4), ("float64",), {})
    z = np.lib.stride_tricks.as_strided(np.zeros(40), (2, 3), (24, 16))
    _arrays.check_out(z, (2, 3), ("float64",), {})


@pytest.mark.parametrize("readonly", [False, True])
def test_a_foreign_out_that_is_read_only(readonly):
    out = FakeCuda()
    out.__cuda_array_interface__ = {"data": (256, readonly)}
    if not readonly:
        _arrays.check_out_is_array(out)
        return
    with pytest.raises(ValueError, match="out is read-only; pass a writable array"):
        _arrays.check_out_is_array(out)
