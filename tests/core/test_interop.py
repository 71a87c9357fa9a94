"""Arrays of other libraries: nothing becomes a NumPy array silently."""

import array
import sys

import numpy as np
import pytest

import cupyflash

VALUES = np.arange(6.0).reshape(2, 3)


def made_by(library):
    """The values as an array of a library, and what the error tells to do."""
    module = pytest.importorskip(library)
    return {
        "array_api_strict": lambda: (module.asarray(VALUES), r"numpy\.asarray\(x\)"),
        "jax": lambda: (module.numpy.asarray(VALUES), r"numpy\.asarray\(x\)"),
        "dask.array": lambda: (module.from_array(VALUES), r"cupyflash\.dask"),
        "xarray": lambda: (module.DataArray(VALUES), "apply_ufunc"),
        "pandas": lambda: (module.DataFrame(VALUES), r"x\.to_numpy\(\)"),
        "torch": lambda: (module.asarray(VALUES), r"x\.numpy\(force=True\)"),
        "sparse": lambda: (module.COO.from_numpy(VALUES), r"x\.todense\(\)"),
    }[library]()


LIBRARIES = (
    "array_api_strict",
    "jax",
    "dask.array",
    "xarray",
    "pandas",
    "torch",
    "sparse",
)

CALLS = {
    "softmax": lambda x: cupyflash.softmax(x, axis=-1),
    "softmax, where": lambda x: cupyflash.softmax(VALUES, where=x),
    "log_softmax": lambda x: cupyflash.log_softmax(x),
    "logsumexp": lambda x: cupyflash.logsumexp(x),
    "logsumexp, b": lambda x: cupyflash.logsumexp(VALUES, b=x),
    "softmax_vjp": lambda x: cupyflash.softmax_vjp(VALUES, x),
    "attention, q": lambda x: cupyflash.attention(x, VALUES, VALUES),
    "attention, v": lambda x: cupyflash.attention(VALUES, VALUES, x),
    "attention, bias": lambda x: cupyflash.attention(VALUES, VALUES, VALUES, bias=x),
    "a list": lambda x: cupyflash.softmax([x, x]),
    "merge": lambda x: cupyflash.merge_attention_states(x, VALUES[..., 0]),
    "explain": lambda x: cupyflash.explain("softmax", x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_another_library_is_refused_with_the_way_out(library, call):
    x, instead = made_by(library)
    with pytest.raises(TypeError, match=f"would silently become.*{instead}"):
        CALLS[call](x)


class Tensor:
    """What the checks see of a PyTorch tensor, which CI has and few others do."""

    def __init__(self, values, device=(1, 0)):
        self._values, self._device = values, device

    def __array__(self, dtype=None, copy=None):
        return self._values

    def __dlpack__(self, **_):
        return self._values.__dlpack__()

    def __dlpack_device__(self):
        return self._device

    def numpy(self, *, force=False):
        return self._values


Tensor.__module__ = "torch"


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_is_refused_with_the_way_out(call):
    """Also where PyTorch is not installed, by a stand-in."""
    message = r"torch\.Tensor would silently become.*x\.numpy\(force=True\)"
    with pytest.raises(TypeError, match=message):
        CALLS[call](Tensor(VALUES))


def test_a_tensor_has_what_the_stand_in_has():
    """Else the test above would say nothing about PyTorch."""
    torch = pytest.importorskip("torch")
    names = {name for name in vars(Tensor) if callable(getattr(Tensor, name))}
    assert [name for name in names if not hasattr(torch.Tensor, name)] == []
    assert torch.Tensor.__module__ == Tensor.__module__
    assert (
        torch.asarray(VALUES).__dlpack_device__() == Tensor(VALUES).__dlpack_device__()
    )


def test_a_tensor_on_a_gpu_goes_to_the_gpu(monkeypatch):
    """It is not refused: without CuPy, the error says what to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="an array in CUDA memory needs CuPy"):
        cupyflash.softmax(Tensor(VALUES, device=(2, 0)))


def test_the_way_out_of_xarray():
    xarray = pytest.importorskip("xarray")
    x = xarray.DataArray(VALUES, dims=("row", "column"))
    y = xarray.apply_ufunc(
        lambda block: cupyflash.softmax(block, axis=-1),
        x,
        input_core_dims=[["column"]],
        output_core_dims=[["column"]],
    )
    assert isinstance(y, xarray.DataArray)
    assert y.dims == x.dims
    np.testing.assert_allclose(y.values, cupyflash.softmax(VALUES, axis=-1))


def test_the_way_out_of_dask():
    dask_array = pytest.importorskip("dask.array")
    import cupyflash.dask

    x = dask_array.from_array(VALUES, chunks=(1, 3))
    y = cupyflash.dask.softmax(x, axis=-1)
    assert isinstance(y, dask_array.Array)
    np.testing.assert_allclose(y.compute(), cupyflash.softmax(VALUES, axis=-1))


@pytest.mark.parametrize("mask", [False, True, [[True, False, False]] * 2])
def test_masked_arrays_are_refused(mask):
    """Also without a masked element: the same program must not depend on its data."""
    x = np.ma.masked_array(VALUES, mask=mask)
    with pytest.raises(TypeError, match=r"pass x\.filled\(\)"):
        cupyflash.softmax(x)


def test_a_masked_out_says_where_the_result_can_go():
    """Not to a copy, as `filled` makes one."""
    out = np.ma.masked_array(np.zeros(3), mask=False)
    with pytest.raises(TypeError, match=r"pass out\.data, and then set out\.mask"):
        cupyflash.softmax(np.zeros(3), out=out)
    np.testing.assert_allclose(cupyflash.softmax(np.zeros(3), out=out.data), 1 / 3)
    np.testing.assert_allclose(out, 1 / 3)


def test_a_unit_is_not_lost():
    class Quantity(np.ndarray):
        unit = "m"

    with pytest.raises(TypeError, match="whose unit would be lost"):
        cupyflash.softmax(VALUES.view(Quantity))


class OnlyReadable:
    """As a dataset of a file: it has no arithmetic of its own."""

    def __array__(self, dtype=None, copy=None):
        return VALUES.astype(dtype or float)


@pytest.mark.parametrize(
    "x",
    [
        VALUES.tolist(),
        tuple(VALUES.tolist()),
        list(VALUES),
        memoryview(VALUES),
        OnlyReadable(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_has_no_type_of_its_own_to_keep_is_read(x):
    y = cupyflash.softmax(x, axis=-1)
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, cupyflash.softmax(VALUES, axis=-1))


def test_a_memory_map_and_a_buffer_are_read(tmp_path):
    np.save(tmp_path / "x.npy", VALUES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    expected = cupyflash.softmax(VALUES, axis=-1)
    np.testing.assert_array_equal(cupyflash.softmax(mapped, axis=-1), expected)
    flat = cupyflash.softmax(array.array("d", VALUES[0]))
    np.testing.assert_allclose(flat, cupyflash.softmax(VALUES[0]))
