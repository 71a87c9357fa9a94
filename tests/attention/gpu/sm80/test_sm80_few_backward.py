"""The row of gradients of few queries over many keys."""

import dataclasses

import numpy as np
import pytest
import small_entries
import vjp_laws
from accuracy import to_host
from placing import FORMS, place
from small_entries import SINGLE, device, gradient
from test_attention_vjp import agree, gradients, inputs

import cupyflash
from cupyflash._attention.gpu import samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.config import num_heads
from cupyflash._attention.gpu.sm80.few_backward import FEW_GRADS, MMA_FEW_VJP
from cupyflash._attention.gpu.sm80.short_backward_plan import short_vjp_steps
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import kernel

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16")
MANY, FEW = 1024, 100  # heads


def problem(dtype="bfloat16", head_dim=64, queries=8, keys=512, heads=MANY, **options):
    made = samples.made_up(dtype, head_dim)
    few = {"num_heads": heads, "num_kv_heads": heads, "seqlen_q": queries}
    return dataclasses.replace(made, **{**few, "seqlen_k": keys, **options})


# --- selection -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "queries"), [(64, 6), (64, 16), (32, 32), (8, 9)])
@pytest.mark.parametrize("heads", [MANY, FEW])
def test_takes(arch, dtype, head_dim, queries, heads):
    asked = gradient(problem(dtype, head_dim, queries, heads=heads))
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device(arch))
    assert row is MMA_FEW_VJP


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "most"),
    [
        ("float16", 32, MANY, 32), ("float16", 32, FEW, 32), ("bfloat16", 64, MANY, 32),
        ("bfloat16", 64, FEW, 16), ("float16", 96, MANY, 16), ("float16", 96, FEW, 0),
        ("float16", 128, MANY, 0), ("bfloat16", 128, FEW, 0), ("float16", 256, FEW, 32),
        ("float16", 256, MANY, 32), ("bfloat16", 16, FEW, 32),
    ],
)  # fmt: skip
def test_takes_as_many_queries_as_pay(dtype, head_dim, heads, most):
    def takes(queries):
        asked = gradient(problem(dtype, head_dim, queries, heads=heads))
        row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, device())
        return row is MMA_FEW_VJP

    assert [n for n in range(6, 40) if takes(n)] == [*range(6, most + 1)]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem("float32"), "takes float16 and bfloat16, not float32"),
        (problem(head_dim=264), "head_dim 264 is above 256"),
        (problem(queries=33), "2 to 32 queries, not 33"),
        (problem(queries=1), "2 to 32 queries, not 1"),
        (problem("float16", 128), "no faster for heads of 128 columns"),
        (problem(keys=64), "65 keys or more, not 64"),
        (problem(head_dim=136, keys=32), "33 keys or more, not 32"),
        (problem("float16", 192, 17, 255), "256 keys or more, not 255"),
        (problem("float16", row_alignment=8), "rows of whole vectors"),
        (problem("bfloat16", 60), "rows of whole vectors"),
        (problem(num_kv_heads=512), "one query head per head of k, not 2"),
        (problem(batch=(0,)), "there are no heads"),
        (problem(keys_of_part=256), "all keys of a head"),
        (problem(score="s * 2"), "no score or mask function"),
        (problem(queries=4), "vectors are as fast for 4 queries"),
        (problem("float16", 64, 3), "vectors are as fast for 3 queries"),
        (problem(keys=1 << 17), "sums up to 32768 keys of a block, not 131072"),
    ],
)
def test_leaves_to_the_next_row(asked, reason):
    asked = gradient(asked)
    assert reason in MMA_FEW_VJP.unsupported_reason(asked, device())
    assert kernel.select(ATTENTION_VJP_KERNELS, asked, device())[0] is not MMA_FEW_VJP


@pytest.mark.parametrize("need", ["need_dbias", "need_dsinks"])
def test_gradients_of_options_are_left_to_the_next_row(need):
    asked = gradient(problem(bias="float32", sinks="float32"), **{need: True})
    reason = MMA_FEW_VJP.unsupported_reason(asked, device())
    assert f"does not compute {need.removeprefix('need_')}" in reason


def test_shared_keys_are_left_to_the_next_row():
    asked = AttentionVjpProblem(
        problem(batch=(3,)), (3, MANY, 8, 64), (MANY, 512, 64), ()
    )
    reason = MMA_FEW_VJP.unsupported_reason(asked, device())
    assert "k is shared by entries of the batch" in reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("queries", [6, 16])
@pytest.mark.parametrize("heads", [1, 7, 132, 10_000])
@pytest.mark.parametrize("keys", [65, 1000, 40_000])
def test_blocks_share_keys_where_multiprocessors_are_idle(
    dtype, head_dim, queries, heads, keys
):
    forward = problem(dtype, head_dim, queries, keys, heads)
    splits = MMA_FEW_VJP.num_splits(forward, device())
    config = MMA_FEW_VJP.config(forward, 1, device(), splits)
    defines = dict(config.variant.defines)
    tiles = -(-keys // int(defines["BLOCK_N"]))
    assert 1 <= splits <= tiles
    assert ("LOOP_SPLITS" in defines) == (splits > 1)
    places = 132 * int(defines["MIN_BLOCKS"])
    if tiles > 4:
        assert (splits > 1) == (heads < places)
    assert splits == 1 or num_heads(forward) * splits <= 4 * places


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 256])
@pytest.mark.parametrize("queries", [8, 32])
@pytest.mark.parametrize("heads", [MANY, FEW])
def test_blocks_fit_a_multiprocessor(arch, dtype, head_dim, queries, heads):
    forward = problem(dtype, head_dim, queries, heads=heads)
    if MMA_FEW_VJP.unsupported_reason(gradient(forward), device(arch)) is not None:
        return
    (config,) = MMA_FEW_VJP.configs(forward, 1, device(arch), False)
    blocks = int(dict(config.variant.defines)["MIN_BLOCKS"])
    room = device(arch).smem_optin + 1024
    assert blocks >= 1
    assert blocks * (config.variant.smem + 1024) <= room


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [(3,), (1000,)])
def test_gradients_go_where_their_arrays_have_them(layout, batch):
    launches = small_entries.check_strides_of_gradients(
        MMA_FEW_VJP,
        short_vjp_steps,
        FEW_GRADS,
        layout,
        batch,
        (2, 2),
        (7, 2000, 32, 24),
    )
    terms = [names for _, names in launches if "dq_terms" in names]
    assert len(terms) == (2 if batch == (3,) else 0)


# --- results -------------------------------------------------------------------------

# (queries, keys, head_dim, head_dim_v) round tiles of 64 or 128 keys, 16 columns.
SIZES = (
    (6, 65, 64, 64),
    (16, 128, 32, 32),
    (17, 129, 32, 16),
    (32, 300, 32, 32),
    (9, 70, 8, 24),
    (13, 1000, 64, 48),
    (7, 67, 256, 256),
    (24, 270, 200, 136),
)


def batch_of(many):
    """Entries of two heads; many for a device of up to 160 multiprocessors."""
    return 160 if many else 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(cupy, rng, dtype, size):
    from cupyflash._cuda import runtime

    queries, keys, *dims = size
    if runtime.device(0).smem_optin < 1 << 17:
        pytest.skip("blocks have too little shared memory")
    vjp_laws.check(
        "mma_few", cupy, rng, dtype, dims=dims, heads=(2, 2), seqlens=(queries, keys)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(16, 128, 64, 64), (30, 90, 64, 32), (9, 70, 96, 72)])
def test_many_heads(cupy, rng, dtype, size):
    queries, keys, *dims = size
    vjp_laws.check(
        "mma_few", cupy, rng, dtype, dims=dims, heads=(2, 2), seqlens=(queries, keys),
        batch=(batch_of(True),),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("seqlens", [(12, 300), (7, 1000)])
def test_options(cupy, rng, dtype, name, seqlens):
    queries, keys = seqlens
    options = small_entries.OPTIONS[name]
    q, k = (2, 2, queries, 64), (2, 2, keys, 64)
    agree(cupy, *inputs(rng, dtype, q, k), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlens", [(7, 90), (20, 700)])
@pytest.mark.parametrize("head_dim", [32, 256])
def test_all_options(cupy, rng, dtype, seqlens, head_dim):
    queries, keys = seqlens
    q, k = (2, 2, queries, head_dim), (2, 2, keys, head_dim)
    mask = rng.random((2, 1, queries, keys)) < 0.8
    mask[0, 0, 2] = False
    agree(
        cupy, *inputs(rng, dtype, q, k), mask=mask, causal=True, softcap=9.0,
        bias=rng.normal(size=(2, queries, keys)).astype(np.float32),
        sinks=rng.normal(size=2).astype(np.float32),
        alibi_slopes=rng.random(2).astype(np.float32) / keys,
        query_lengths=np.array([queries - 3, queries]),
        key_lengths=np.array([keys, keys - 9]),
        dlse=rng.normal(size=q[:-1]).astype(np.float32),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [90, 700])
def test_strides(cupy, rng, dtype, form, keys):
    q, k = (3, 2, 12, 24), (3, 2, keys, 24)
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse"), form)
    agree(cupy, *inputs(rng, dtype, q, k), forms=forms, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [70, 333])
def test_an_lse_of_other_keys_and_what_flows_into_it(cupy, rng, dtype, cut):
    q, k = (2, 2, 12, 64), (2, 2, 520, 64)
    small_entries.check_parts_of_the_keys(cupy, rng, dtype, q, k, cut=cut)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [3, 140])
def test_entries_do_not_know_of_each_other(cupy, rng, dtype, batch):
    q, k = (batch, 2, 12, 64), (batch, 2, 200, 64)
    small_entries.check_entries_alone(cupy, rng, dtype, q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**12])
def test_gradients_of_any_size_in_float16(cupy, rng, size):
    """dS keeps its digits where dO is small, and has room where it is large."""
    q, k = (2, 2, 16, 32), (2, 2, 300, 32)
    q, k, v, dout = (x.astype(np.float64) for x in inputs(rng, "float16", q, k))
    if size > 1:  # dS is beyond float16, dq and dk are within
        q, k, v = q / 2**8, k / 2**4, v * 2**6
    agree(cupy, *(x.astype(np.float16) for x in (q, k, v, dout * size)))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [100, 1000])
def test_what_nobody_sees_reaches_no_gradient(cupy, rng, dtype, bad, keys):
    """Hidden by a mask, by bounds, and behind the length of an entry."""
    q, k, v, dout = inputs(rng, dtype, (2, 2, 12, 64), (2, 2, keys, 64))
    mask = np.ones((12, keys), bool)
    mask[:, 4] = False
    k[0, 1, 4], v[0, 0, 4] = bad, bad
    grads = agree(cupy, q, k, v, dout, mask=mask)
    assert all(np.isfinite(to_host(x).astype(np.float32)).all() for x in grads[:3])
    k[:, :, keys - 30 :], v[:, :, keys - 30 :] = bad, bad
    lengths = {"key_lengths": np.array([keys - 30, keys - 40])}
    grads = agree(cupy, q, k, v, dout, mask=mask, **lengths)
    assert not to_host(grads.dk)[:, :, keys - 30 :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_values_that_are_not_finite(cupy, rng, dtype, name, bad):
    arrays = inputs(rng, dtype, (1, 2, 12, 64), (1, 2, 300, 64))
    arrays["qkv".find(name)][0, 1, 5, 3] = bad
    if name != "v":
        agree(cupy, *arrays)
        agree(cupy, *arrays, causal=True)
    host, device = (gradients(xp, *arrays, causal=True) for xp in (np, cupy))
    for a, b in zip(host[:3], device[:3], strict=True):
        a, b = (np.isfinite(to_host(x).astype(np.float32)) for x in (a, b))
        np.testing.assert_array_equal(a, b)
        assert a[0, 0].all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_that_see_no_key(cupy, rng, dtype):
    q, k, v, dout = inputs(rng, dtype, (2, 2, 12, 64), (2, 2, 300, 64))
    grads = agree(cupy, q, k, v, dout, causal=True, query_offset=-5)
    assert not to_host(grads.dq)[:, :, :5].any()
    assert not to_host(grads.dk)[:, :, 7:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [100, 1000])
def test_a_call_can_be_captured(cupy, rng, dtype, keys):
    arrays = inputs(rng, dtype, (2, 2, 12, 64), (2, 2, keys, 64))
    q, k, v, dout = (place(cupy, x) for x in arrays)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)

    def call():
        return cupyflash.attention_vjp(dout, q, k, v, out, lse)

    expected = [to_host(x) for x in call()[:3]]
    for a, b in zip(
        expected, vjp_laws.from_graph(cupy, call, q.shape)[:3], strict=True
    ):
        np.testing.assert_array_equal(a, to_host(b))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_group_with_one_query_each(cupy, rng, dtype):
    """They are queries of one head of k."""
    q, k = (2, 16, 1, 64), (2, 2, 300, 64)
    agree(cupy, *inputs(rng, dtype, q, k), sinks=rng.normal(size=16))


@pytest.mark.gpu
def test_says_what_it_launches(cupy, rng):
    arrays = inputs(rng, "float16", (2, 2, 12, 64), (2, 2, 1000, 64))
    q, k, v, dout = (place(cupy, x) for x in arrays)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    told = cupyflash.explain("attention_vjp", dout, q, k, v, out, lse)
    assert told.kernel == "mma_few"
    assert "few_backward.cu" in str(told)
    assert "LOOP_SPLITS=1" in str(told)
