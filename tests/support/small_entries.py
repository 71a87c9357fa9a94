"""Shared by the tests of rows for many small entries: gemv, tiny and mma_short."""

import fuzz
import numpy as np
import vjp_laws
from accuracy import dtype_of, to_host, wide
from placing import place
from test_attention_vjp import OPTIONS, agree, gradients, inputs

import cupyflash
from cupyflash._attention import vjp_problem
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device

DTYPES = ("float16", "bfloat16", "float32")
# Options without arrays, which fit any size.
SINGLE = tuple(
    name
    for name, options in OPTIONS.items()
    if options and not any(isinstance(x, np.ndarray) for x in options.values())
)
# By which gradients of parts of the keys may differ from those of all, next to the
# largest.
_UNITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}


def gradient(forward, **options):
    return AttentionVjpProblem(forward, (), (), (), **options)


def device(arch="sm_90a"):
    return _device.device_of_arch(arch)


def change_tables(monkeypatch, change):
    """Let each table of attention be `change` of its rows."""
    from cupyflash._attention.gpu import backward, forward
    from cupyflash._cuda import plan_cache

    for module, name in (
        (forward, "ATTENTION_KERNELS"),
        (backward, "ATTENTION_VJP_KERNELS"),
    ):
        monkeypatch.setattr(module, name, change(getattr(module, name)))
        monkeypatch.setattr(module, "_plans", plan_cache.PlanCache())


def check_both(
    row, cupy, rng, dtype, size, heads, batch, makes_forward=True, **options
):
    """The forward and the gradients of a problem that leads to `row` in both tables."""
    queries, keys, dim, dim_v = size
    shapes = ((*batch, heads[0], queries, dim), (*batch, heads[1], keys, dim))
    q, k, v, _ = inputs(rng, dtype, *shapes, dim_v)
    arrays = {"q": q, "k": k, "v": v}
    more = options | {"method": "auto", "layout": "bhsd", "return_lse": True}
    forms = dict.fromkeys(arrays, "plain")
    asked = fuzz.Problem("attention", 0, None, "attention", arrays, forms, more)
    asked.notes |= {"expanded": [], "scores": (*batch, heads[0], queries, keys)}
    placed = {n: place(cupy, x) for n, x in arrays.items()}
    vjp_laws.poison(cupy, q.shape)
    fuzz.CHECKS["attention"](cupy, asked)
    told = cupyflash.explain("attention", **placed, **more)
    assert (told.kernel == row) == makes_forward
    vjp_laws.check(
        row, cupy, rng, dtype, dims=(dim, dim_v), heads=heads, batch=batch,
        seqlens=(queries, keys), **options,
    )  # fmt: skip


def check_parts_of_the_keys(cupy, rng, dtype, q, k, cut, mask=None):
    """Gradients of keys before and after `cut` by the out and lse of all of them.

    q and k are shapes. What flows into lse counts, too. `mask` is of queries and keys.
    """
    q, k, v, dout = inputs(rng, dtype, q, k)
    dlse = rng.normal(size=q.shape[:-1])
    dlse = dlse.astype(np.float64 if dtype == "float64" else np.float32)
    masked = {} if mask is None else {"mask": mask}
    agree(cupy, q, k, v, dout, dlse=dlse, **masked)
    q, k, v, dout = (place(cupy, x) for x in (q, k, v, dout))
    masked = {name: place(cupy, x) for name, x in masked.items()}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **masked)
    whole = cupyflash.attention_vjp(dout, q, k, v, out, lse, **masked)
    dq = 0.0
    for part in (slice(0, cut), slice(cut, None)):
        keys, values = (cupy.ascontiguousarray(x[..., part, :]) for x in (k, v))
        of_part = {n: cupy.ascontiguousarray(x[:, part]) for n, x in masked.items()}
        got = cupyflash.attention_vjp(dout, q, keys, values, out, lse, **of_part)
        dq = dq + wide(got.dq)
        for name in ("dk", "dv"):
            expected = wide(getattr(whole, name))[..., part, :]
            error = np.abs(wide(getattr(got, name)) - expected).max()
            assert error <= _UNITS[dtype] * np.abs(expected).max(), name
    expected = wide(whole.dq)
    assert np.abs(dq - expected).max() <= _UNITS[dtype] * np.abs(expected).max()


def check_entries_alone(cupy, rng, dtype, q, k):
    """The bits of a head do not depend on others, and are the same in every run.

    q and k are shapes.
    """
    q, k, v, dout = inputs(rng, dtype, q, k)
    first = gradients(cupy, q, k, v, dout)
    for x in (q, k, v, dout):
        x[1:], x[0, 1] = x[1:][::-1].copy() * dtype_of(dtype).type(2), 0.5
    again = gradients(cupy, q, k, v, dout)
    for a, b in zip(first[:3], again[:3], strict=True):
        np.testing.assert_array_equal(to_host(a)[0, 0], to_host(b)[0, 0])


def check_strides_of_gradients(
    row, make_steps, struct, layout, batch, heads, size, need_dbias=False
):
    """Those of the last argument of the first launch, against NumPy's.

    Returns the launches.
    """
    from cupyflash._attention.gpu import gradient_layout

    queries, keys, dim, dim_v = size

    def array(heads, rows, columns):
        x = np.zeros((*batch, heads, rows, columns), "float16")
        return x if layout == "bhsd" else np.ascontiguousarray(x.swapaxes(-2, -3))

    arrays = {
        "dq": array(heads[0], queries, dim),
        "dk": array(heads[1], keys, dim),
        "dv": array(heads[1], keys, dim_v),
    }
    out = array(heads[0], queries, dim_v)
    lse = np.zeros((*batch, heads[0], queries), "float32")
    bias = None
    if need_dbias:
        bias = arrays["dbias"] = np.zeros((*lse.shape, keys), "float16")
    q, k, v, *_ = arrays.values()
    asked, operands = vjp_problem.attention_vjp(
        out, q, k, v, out, lse, bias, None, None, False, None, None, 0.0, None, None,
        None, None, layout, "float32", "auto", None, need_dbias, False, False,
    )  # fmt: skip
    assert row.unsupported_reason(asked, device()) is None
    launches = make_steps(row, asked, operands, device()).launches
    dims = gradient_layout.layout(asked, operands).batch_dims
    (fields,) = np.frombuffer(launches[0][1][-1], struct.dtype(kBatchDims=dims))
    for name, x in arrays.items():
        strides = [n // x.itemsize for n in x.strides]
        if layout == "bshd" and name != "dbias":
            strides[-3:-1] = strides[-2], strides[-3]
        found = fields[name]
        assert found["batch"][-1] == strides[-4]
        assert [found["head"], found["row"], found["col"]] == strides[-3:]
    return launches
