"""The row of float64 gradients of few queries: what it takes, and its results."""

import dataclasses
import math

import fp64_vjp_laws
import numpy as np
import pytest
import scipy.special
import small_entries
from accuracy import max_error
from placing import ROW_FORMS, place
from test_attention_vjp import agree, gradients, inputs
from test_fp64_backward import ARCHS, HOPPER, OPTIONS, launches, shapes

from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.fp64.few_backward import FEW_F64_VJP as ROW
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel
from cupyflash._reference import backward as reference_vjp


def problem(head_dim=64, queries=8, keys=2048, more=None, **options):
    forward = samples.made_up("float64", head_dim)
    shape = {"seqlen_q": queries, "seqlen_k": keys, "num_kv_heads": forward.num_heads}
    forward = dataclasses.replace(forward, **{**shape, **options})
    return AttentionVjpProblem(forward, (), (), (), **(more or {}))


def few_heads(heads):
    return problem(64, 4, 512, num_heads=heads, num_kv_heads=heads, batch=())


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [2, 32, 64, 90, 128, 160, 256])
@pytest.mark.parametrize("queries", [5, 8, 9, 16])
@pytest.mark.parametrize("options", [{}, {"bias": "float64"}, {"softcap": 3.0}])
def test_takes_few_queries(arch, head_dim, queries, options):
    device = _device.device_of_arch(arch)
    asked = problem(head_dim, queries, **options)
    has_room = queries <= 8 or head_dim <= (90 if options else 128)
    reason = ROW.unsupported_reason(asked, device)
    if not has_room or (reason and "shared memory" in reason and arch == "sm_80"):
        assert "registers" in reason or "shared memory" in reason
        return
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is ROW
    for config in ROW.configs(asked.forward, 1, device, False):
        blocks = ROW.num_blocks(asked.forward)
        # Static memory takes up to 2 KiB more.
        needed = blocks * (config.variant.smem + 2048 + 1024)
        assert needed <= device.smem_optin + 1024


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(dtype="float32"), "sm_90a", "takes float64, not float32"),
        (problem(257), "sm_90a", "not both up to 256"),
        (problem(queries=17), "sm_90a", "2 to 16 queries, not 17"),
        (problem(queries=1), "sm_90a", "2 to 16 queries, not 1"),
        (problem(keys=16), "sm_90a", "17 to 32768 keys, not 16"),
        (problem(keys=32769), "sm_90a", "17 to 32768 keys, not 32769"),
        (problem(129, queries=9), "sm_90a", "registers for 9 queries of 192 columns"),
        (problem(128, 9, softcap=2.0), "sm_90a", "registers for 9 queries of 128"),
        (problem(num_kv_heads=4), "sm_90a", "one query head per head of k, not 16"),
        (problem(batch=(0,)), "sm_90a", "there are no heads"),
        (problem(more={"need_dbias": True}), "sm_90a", "does not compute dbias"),
        (problem(more={"need_dsinks": True}), "sm_90a", "does not compute dsinks"),
        (problem(keys_of_part=256), "sm_90a", "all keys of a head"),
        (problem(score="s * 2"), "sm_90a", "no score or mask function"),
        (problem(128, 9, 255), "sm_90a", "256 keys or more for 9 queries, not 255"),
        (problem(64, 5, 48), "sm_90a", "vectors are as fast for 5 queries of 48 keys"),
        (problem(96, 4, 64), "sm_90a", "vectors are as fast for 4 queries of 64 keys"),
        (problem(128, 3, 100), "sm_90a", "as fast for 3 queries of 100 keys"),
        (problem(64, 2, 512), "sm_90a", "as fast for 2 queries of 512 keys"),
        (few_heads(131), "sm_90a", "as fast for 4 queries of 512 keys"),
        (problem(32, 9, 60), "sm_90a", "60 keys fit on a multiprocessor"),
        (problem(), "sm_86", "no fast tensor cores"),
        (
            AttentionVjpProblem(problem(batch=(3,)).forward, (16, 8, 64), (), ()),
            "sm_90a",
            "q is shared by entries of the batch",
        ),
    ],
)
def test_leaves_to_the_next_row(asked, arch, reason):
    device = _device.device_of_arch(arch)
    assert reason in ROW.unsupported_reason(asked, device)
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device)[0] is not ROW


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("keys", [17, 100, 512, 4096, 32768])
def test_blocks_share_keys_where_multiprocessors_are_idle(head_dim, keys):
    def splits(heads):
        forward = problem(head_dim, 4, keys, batch=(), num_heads=heads).forward
        forward = dataclasses.replace(forward, num_kv_heads=heads)
        return ROW.num_splits(forward, HOPPER)

    assert splits(100_000) == 1
    for heads in (1, 2, 32, 100, 1000):
        tiles = -(-keys // 16)
        assert 1 <= splits(heads) <= max(1, tiles // 2)
    assert (splits(1) > 1) == (keys >= 512 or (keys == 100 and head_dim == 256))


# --- results -------------------------------------------------------------------------


@pytest.fixture
def cupy(cupy, monkeypatch):
    """CuPy, where the row yields to no other."""
    eager = dataclasses.replace(ROW, yields=False)
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(eager if row is ROW else row for row in rows)
    )
    return cupy


# Keys that no blocks share, and those that they do.
SEQLENS = [(2, 17), (5, 40), (8, 130), (9, 333), (16, 1000), (3, 2049)]


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (34, 100), (128, 128), (96, 6)])
def test_sizes(cupy, rng, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    assert "on cupy: few_f64" in launches(cupy, *arrays)
    agree(cupy, *arrays)
    agree(cupy, *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(4, 100), (8, 700)])
@pytest.mark.parametrize("dims", [(256, 256), (130, 192), (192, 20)])
def test_wide_heads(cupy, rng, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    assert "on cupy: few_f64" in launches(cupy, *arrays)
    agree(cupy, *arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seqlens", [(4, 60), (12, 700)])
@pytest.mark.parametrize("dims", [(64, 64), (100, 128)])
def test_options(cupy, rng, name, seqlens, dims):
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims, heads=(2, 2)))
    agree(cupy, *arrays, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(7, 40), (12, 700)])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_all_options(cupy, rng, seqlens, head_dim):
    queries, keys = seqlens
    q, k = (2, 2, queries, head_dim), (2, 2, keys, head_dim)
    fp64_vjp_laws.all_options(cupy, rng, q, k, [queries - 3, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ROW_FORMS)
def test_strides(cupy, rng, form):
    arrays = inputs(rng, "float64", q=(3, 2, 7, 50), k=(3, 2, 90, 50))
    placed = [place(cupy, x, form) for x in arrays[:3]]
    is_unaligned = "UNALIGNED=1" in launches(cupy, *placed, arrays[3])
    assert is_unaligned == (form in ("rows", "shifted"))
    agree(cupy, *arrays, forms=dict.fromkeys(("q", "k", "v", "dout", "out"), form))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(2, 17), (8, 130), (9, 333), (3, 2049)])
@pytest.mark.parametrize("dims", [(7, 7), (63, 64), (103, 5), (1, 95)])
def test_rows_of_any_width(cupy, rng, seqlens, dims):
    """Rows that are no whole vectors are copied and stored number by number."""
    arrays = inputs(rng, "float64", **shapes(*seqlens, *dims))
    told = launches(cupy, *arrays)
    assert "on cupy: few_f64" in told
    assert "UNALIGNED=1" in told
    agree(cupy, *arrays)
    agree(cupy, *arrays, causal=True)
    agree(cupy, *arrays, bias=rng.normal(size=seqlens), softcap=3.0)


def product_in_order(a, b):
    """A @ b with each sum in the order of its terms, and every step rounded.

    BLAS has several sums for each number, as many as fit a machine: of large scores
    the formula is then more exact on some machines than on others, up to four times.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]))
    for term in range(a.shape[-1]):
        total += a[..., term, None] * b[..., None, term, :]
    return total


def plain_gradients(dout, q, k, v):
    """dq, dk and dv by the formula with P in memory, by `product_in_order`."""
    scale = q.shape[-1] ** -0.5
    p = scipy.special.softmax(scale * product_in_order(q, k.swapaxes(1, 2)), axis=-1)
    dp = product_in_order(dout, v.swapaxes(1, 2))
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    dq, dk = product_in_order(ds, k), product_in_order(ds.swapaxes(1, 2), q)
    return scale * dq, scale * dk, product_in_order(p.swapaxes(1, 2), dout)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(4, 60), (16, 1500)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_as_accurate_as_the_plain_computation(cupy, rng, seqlens, head_dim):
    """In the mean of ten draws: in one, either can be lucky."""
    errors = []
    for _ in range(10):
        q, k, v, dout = inputs(rng, "float64", **shapes(*seqlens, head_dim))
        q[:, ::5] *= 2
        grads = gradients(cupy, q, k, v, dout)
        exact = reference_vjp.attention_vjp(dout, q, k, v)
        plain = plain_gradients(dout, q, k, v)
        for got, standard, best in zip(grads[:3], plain, exact[:3], strict=True):
            size = np.abs(best).max()
            pair = max_error(got, best), max_error(standard, best)
            errors.append([float(x / size) for x in pair])
    errors = np.reshape(errors, (10, 3, 2))
    assert errors[..., 0].max() <= 1e-13
    got, standard = errors.mean(axis=0).T
    assert (got <= 2 * standard + np.finfo(np.float64).eps).all(), (got, standard)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("seqlens", [(4, 60), (12, 600)])
def test_what_nobody_sees_leaves_the_bits_as_they_are(cupy, rng, bad, seqlens):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 64))
    fp64_vjp_laws.what_nobody_sees_leaves_the_bits_as_they_are(
        cupy, arrays, bad, slice(1, 2)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(4, 60), (12, 600)])
def test_values_that_are_not_finite(cupy, rng, seqlens):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 64))
    fp64_vjp_laws.values_that_are_not_finite(cupy, arrays, row=2)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(4, 60), (12, 600)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_lse_of_other_roundings(cupy, rng, seqlens, has_sinks):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 64))
    sinks = rng.normal(size=2) if has_sinks else None
    fp64_vjp_laws.lse_of_other_roundings(cupy, arrays, sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(4, 60), (16, 2049)])
def test_the_same_bits_in_every_run(cupy, rng, seqlens):
    arrays = inputs(rng, "float64", **shapes(*seqlens, 64))
    is_shared = "few_backward_totals.cu" in launches(cupy, *arrays)
    assert is_shared == (math.prod(seqlens) > 1000)
    fp64_vjp_laws.the_same_bits_again(cupy, arrays)
