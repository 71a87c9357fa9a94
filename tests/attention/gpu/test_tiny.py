"""The row of the tiniest entries in both tables: what it takes, and its numbers."""

import dataclasses

import numpy as np
import pytest
import small_entries
import vjp_laws
from placing import FORMS
from small_entries import device, gradient
from test_attention_vjp import OPTIONS, agree, inputs

from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.simt.tiny_backward import TINY_VJP
from cupyflash._attention.gpu.simt.tiny_forward import TINY
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._core.dtypes import FLOATS
from cupyflash._cuda import kernel

# (queries, keys, head_dim, head_dim_v): the most, whole vectors, single numbers.
SIZES = (
    (4, 4, 8, 8),
    (4, 4, 16, 16),
    (8, 8, 8, 8),
    (1, 1, 1, 1),
    (3, 2, 13, 16),
    (2, 7, 8, 3),
    (8, 1, 5, 8),
)


def problem(dtype="float32", rows=4, head_dim=8, **options):
    made = samples.made_up(dtype, head_dim)
    return dataclasses.replace(made, **{"seqlen_q": rows, "seqlen_k": rows, **options})


# --- the row -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 1), (4, 16), (8, 8)])
def test_takes(arch, dtype, rows, head_dim):
    if dtype == "float64":
        rows, head_dim = min(rows, 4), min(head_dim, 8)
    asked = problem(dtype, rows, head_dim)
    if kernel.refuse_old_device(dtype, device(arch)) is None:
        row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
        assert row is TINY
        assert [name for name, _ in refused] == ["gemv"]
        row, refused = kernel.select(
            ATTENTION_VJP_KERNELS, gradient(asked), device(arch)
        )
        assert row is TINY_VJP
        assert [name for name, _ in refused] == ["few_f64", "mma_few", "gemv"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem(rows=9), "1 to 8 queries, not 9"),
        (problem(seqlen_k=9), "1 to 8 keys, not 9"),
        (problem(seqlen_q=0), "1 to 8 queries, not 0"),
        (problem(seqlen_k=0), "1 to 8 keys, not 0"),
        (problem(head_dim=17), "head_dim 17 is above 16"),
        (problem(rows=8, head_dim_v=9), "head_dim_v 9 is above 8"),
        (problem(seqlen_q=5, head_dim=9), "head_dim 9 is above 8"),
        (problem("float64", rows=5), "1 to 4 queries, not 5"),
        (problem("float64", head_dim=9), "head_dim 9 is above 8"),
        (problem(keys_of_part=256), "all keys at once"),
        (problem(score="s * 2"), "no score or mask function"),
    ],
)
def test_leaves_to_the_next_row(asked, reason):
    for row, x in ((TINY, asked), (TINY_VJP, gradient(asked))):
        assert reason in row.unsupported_reason(x, device())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (gradient(problem(), need_dbias=True), "does not compute dbias"),
        (gradient(problem(), need_dsinks=True), "does not compute dsinks"),
        (gradient(problem(num_kv_heads=32)), "one query head per head of k"),
        (
            AttentionVjpProblem(problem(batch=(3,)), (64, 4, 8), (), ()),
            "q is shared by entries of the batch",
        ),
    ],
)
def test_gradients_are_left_to_the_next_row(asked, reason):
    assert reason in TINY_VJP.unsupported_reason(asked, device())


@pytest.mark.parametrize(("heads", "rows"), [(1, 4), (33, 4), (1000, 8), (17, 3)])
def test_threads_have_all_rows(heads, rows):
    asked = problem(rows=rows, num_heads=heads, num_kv_heads=heads)
    (config,) = TINY.configs(asked, 1, device())
    threads = config.num_blocks * config.num_threads
    assert heads * rows <= threads < heads * rows + 128
    (config,) = TINY_VJP.configs(asked, 1, device(), False)
    of_head = 4 if rows <= 4 else 8
    threads = config.num_blocks * config.num_threads
    assert heads * of_head <= threads < heads * of_head + 128


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_go_where_their_arrays_have_them(layout):
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu.simt.tiny_backward import TINY_GRADS
    from cupyflash._attention.gpu.simt.tiny_backward_plan import tiny_vjp_steps

    launches = small_entries.check_strides_of_gradients(
        TINY_VJP, tiny_vjp_steps, TINY_GRADS, layout, (7, 20), (4, 4), (3, 2, 8, 5)
    )
    assert len(launches) == 1


# --- numbers -------------------------------------------------------------------------


def check_both(cupy, rng, dtype, size, **options):
    queries, keys, dim, dim_v = size
    vjp_laws.check(
        "tiny", cupy, rng, dtype, dims=(dim, dim_v), seqlens=(queries, keys),
        **{"heads": (3, 3), "batch": (23,), **options},
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(cupy, rng, dtype, size):
    if dtype == "float64":
        size = (*(min(n, 4) for n in size[:2]), *(min(n, 8) for n in size[2:]))
    check_both(cupy, rng, dtype, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(cupy, rng, dtype, name):
    options = OPTIONS[name]
    if any(isinstance(x, np.ndarray) for x in options.values()):
        pytest.skip("its arrays are those of other lengths")
    size = (4, 3, 8, 8) if dtype == "float64" else (7, 6, 8, 8)
    check_both(cupy, rng, dtype, size, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_strides(cupy, rng, dtype, form):
    shape = (19, 2, 4, 12)
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse"), form)
    agree(cupy, *inputs(rng, dtype, shape, shape), forms=forms, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_lse_and_what_flows_into_it(cupy, rng, dtype):
    shape = (41, 2, 4, 8)
    small_entries.check_parts_of_the_keys(cupy, rng, dtype, shape, shape, cut=1)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_hidden_key_counts_for_nothing(cupy, rng, bad):
    """And neither does a query that sees no key."""
    shape = (9, 2, 4, 8)
    q, k, v, dout = inputs(rng, "float32", shape, shape)
    k[..., -1, :] = v[..., -1, :] = bad
    q[..., 0, :] = dout[..., 0, :] = bad
    agree(cupy, q, k, v, dout, causal=True, query_offset=-1)
