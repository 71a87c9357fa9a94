"""Gradients of a mask function alone, by the Hopper row with five products."""

import dataclasses

import numpy as np
import pytest
from accuracy import to_host
from function_problems import asked
from fuzz_vjp import exact_gradients, gradient_bound
from placing import place
from test_attention_vjp import inputs, problem_of
from vjp_laws import copy_always, poison

import cupyflash
from cupyflash import scores
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.sm90.backward import HOPPER_VJP
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import kernel
from cupyflash._cuda.device import device_of_arch

HOPPER = device_of_arch("sm_90a")
DTYPES = ("float16", "bfloat16")
DIMS = ((64, 64), (128, 128))  # a block has 128 queries or 64
SEQLENS = ((1, 1), (1, 300), (63, 113), (113, 63), (65, 1025), (1025, 65), (300, 260))


def of_types(b, h, i, j, *, kinds, table):
    """Arrays of two axes and one, read at places that arrays give."""
    return table[kinds[b, i], kinds[b, j]] & (j % 5 != h)


# By name; none says what an option does, which would be called instead.
MASKS = {
    "window": lambda i, j: (i - j <= 70) & (j - i <= 20) & (j != 7),
    "all": lambda i, j: i + j > -9000,
    "odd": lambda i, j: (i + j) % 3 != 0,
    "dilated": scores.dilated_window(40, 3),
    "heads differ": lambda h, i, j: (i - j) % (h + 2) == 0,
    "entries differ": lambda b, i, j: abs(i - j) < 40 * b + 9,
    "few queries": lambda i, j: (i > 60) & (j < 190),
    "second half": lambda i, j: (i // 64 % 2 == 1) & (j != 70),
    "one part": lambda j: j // 64 == 1,
    "nothing": lambda i, j: i + j < 0,
}


def documents(rng, batch, length, count):
    """Documents of any length, in order."""
    return np.sort(rng.integers(0, count, (batch, length)), axis=1).astype("int32")


def seen(mask, arrays, batch, heads, seqlens, offset):
    """The mask as an array."""
    b, h, i, j = np.ix_(*map(np.arange, (batch, heads, *seqlens)))
    given = dict(zip("bhij", (b, h, i + offset, j), strict=True))
    names = mask.__code__.co_varnames[: mask.__code__.co_argcount]
    found = mask(**{name: given[name] for name in names}, **(arrays or {}))
    return np.broadcast_to(found, (batch, heads, *seqlens))


def on(cupy, arrays):
    return arrays and {name: cupy.asarray(x) for name, x in arrays.items()}


def check(
    cupy, rng, dtype, mask, dims=(128, 128), heads=(2, 1), seqlens=(150, 140),
    batch=(2,), batch_k=None, arrays=None, changed=None, **more,
):  # fmt: skip
    """Compare with the oracle, which is given the mask as an array."""
    q, k, v, dout = inputs(
        rng, dtype, (*batch, heads[0], seqlens[0], dims[0]),
        (*(batch_k or batch), heads[1], seqlens[1], dims[0]), dims[1],
    )  # fmt: skip
    offset = more.get("query_offset", seqlens[1] - seqlens[0])
    entries = int(np.prod(batch))
    shown = seen(mask, arrays, entries, heads[0], seqlens, offset)
    shown = shown.reshape(*batch, *shown.shape[1:])
    if changed is not None:
        changed(q, k, v, dout)
    given = [place(cupy, x) for x in (q, k, v)]
    options = {"mask": mask, "mask_arrays": on(cupy, arrays), **more}
    out, lse = cupyflash.attention(*given, return_lse=True, **options)
    down = place(cupy, dout), *given, out, lse
    told = cupyflash.explain("attention_vjp", *down, **options)
    assert told.kernel == "hopper", told.refused
    poison(cupy, q.shape)
    grads = cupyflash.attention_vjp(*down, **options)
    problem = problem_of(q, k, v, dout, {"mask": shown, **more})
    exact, sizes, size, exact_lse = exact_gradients(problem)
    for name in ("dq", "dk", "dv"):
        got = to_host(getattr(grads, name)).astype(np.float64)
        bound = gradient_bound(
            problem, exact[name], sizes[name], size, exact_lse, dtype
        )
        over = abs(got - exact[name]) - bound
        assert (over <= 0).all(), (name, over.max())
    return grads


def vjp_problem(dtype="float16", head_dim=128, deterministic=False, **options):
    shape = (2, 4, 1000, head_dim)
    forward, _ = asked(dtype=dtype, shape=shape, **options)
    return AttentionVjpProblem(
        forward, shape, shape, shape, deterministic=deterministic
    )


DOCUMENT = {
    "mask": scores.document,
    "mask_arrays": {"documents": documents(np.random.default_rng(0), 2, 1000, 5)},
}


def test_a_mask_function_alone_is_taken_where_a_producer_loads():
    def row(**given):
        found, _ = kernel.select(ATTENTION_VJP_KERNELS, vjp_problem(**given), HOPPER)
        return found.name

    for options in ({}, {"causal": True}, {"window": (9, 5)}, {"query_offset": 7}):
        for head_dim in (2, 8, 40, 64, 72, 96, 128):
            assert row(head_dim=head_dim, **DOCUMENT, **options) == "hopper"
    assert row(**DOCUMENT, head_dim=136) == "hopper_wide"
    assert row(**DOCUMENT, deterministic=True) == "hopper_wide"
    assert row(**DOCUMENT, softcap=3.0) == "hopper_wide"
    assert row(**DOCUMENT, score=scores.softcap(3.0)) == "hopper_wide"
    assert row(**DOCUMENT, key_lengths=np.array([900, 1000])) == "hopper_wide"
    slopes = np.ones(4, "float32")
    assert row(**DOCUMENT, alibi_slopes=slopes) == "hopper_wide"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_function_changes_one_kernel(head_dim):
    functions = vjp_problem(head_dim=head_dim, **DOCUMENT).forward
    plain = dataclasses.replace(functions, mask_function=None, generated="")
    for part in ("_rows", "_dq"):
        own, of_plain = (HOPPER_VJP.config(part, x, 1, 1) for x in (functions, plain))
        assert own == of_plain
    variant = HOPPER_VJP.config("", functions, 1, 1).variant
    assert variant.entry == "attention_vjp_hopper"
    assert variant.generated
    assert dict(variant.defines)["BOUNDS"] == "1"  # tiles differ in length


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dims", DIMS)
def test_every_length(cupy, rng, dtype, seqlens, name, dims):
    check(cupy, rng, dtype, MASKS[name], dims, (4, 2), seqlens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims", [(8, 8), (2, 3), (33, 40), (64, 16), (72, 72), (96, 40), (32, 128)]
)
def test_every_head_dim(cupy, rng, monkeypatch, dtype, dims):
    copy_always(monkeypatch)
    for name in ("window", "few queries"):
        check(cupy, rng, dtype, MASKS[name], dims, seqlens=(150, 300), scale=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        {"causal": True},
        {"window": (70, 20)},
        {"causal": True, "query_offset": -40},
        {"query_offset": 90},
        {"query_offset": -200, "window": (100, None)},
    ],
)
@pytest.mark.parametrize("name", ["odd", "window", "one part"])
@pytest.mark.parametrize("dims", DIMS)
def test_bounds_hide_more(cupy, rng, more, name, dims):
    check(cupy, rng, "bfloat16", MASKS[name], dims, seqlens=(260, 300), **more)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlens", [(90, 90), (700, 700), (513, 700)])
@pytest.mark.parametrize("count", [1, 4, 30])
@pytest.mark.parametrize("dims", DIMS)
def test_documents(cupy, rng, dtype, seqlens, count, dims):
    arrays = {"documents": documents(rng, 2, max(seqlens), count)}
    for more in ({}, {"causal": True}):
        options = {"dims": dims, "heads": (4, 2), "seqlens": seqlens, **more}
        options["arrays"] = arrays
        check(cupy, rng, dtype, scores.document, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_k", [100, 128])
@pytest.mark.parametrize("name", ["window", "few queries", "second half", "nothing"])
@pytest.mark.parametrize("dims", DIMS)
def test_one_tile_of_keys(cupy, rng, seqlen_k, name, dims):
    """dq is 0 in blocks of queries that no list has."""
    check(cupy, rng, "float16", MASKS[name], dims, (4, 2), (300, seqlen_k))


@pytest.mark.gpu
@pytest.mark.parametrize("batch_k", [(2, 3), (1, 3), (2, 1)])
def test_entries_that_share_keys_have_their_own_lists(cupy, rng, batch_k):
    arrays = {
        "kinds": documents(rng, 6, 260, 4),
        "table": rng.random((4, 4)) < 0.4,
    }
    options = {"batch": (2, 3), "batch_k": batch_k, "heads": (6, 2), "arrays": arrays}
    for dims in ((96, 128), (64, 40)):
        check(cupy, rng, "bfloat16", of_types, dims, seqlens=(150, 260), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_entries_that_share_queries(cupy, rng, dim):
    mask = MASKS["entries differ"]
    q, k, v, dout = inputs(rng, "float16", (1, 2, 150, dim), (3, 2, 260, dim))
    given = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*given, return_lse=True, mask=mask)
    grads = cupyflash.attention_vjp(cupy.asarray(dout), *given, out, lse, mask=mask)
    shown = seen(mask, None, 3, 2, (150, 260), 110)
    problem = problem_of(q, k, v, dout, {"mask": shown})
    exact, sizes, size, exact_lse = exact_gradients(problem)
    for name in ("dq", "dk", "dv"):
        error = abs(to_host(getattr(grads, name)).astype("f8") - exact[name])
        of = (problem, exact[name], sizes[name], size, exact_lse, "float16")
        assert (error <= gradient_bound(*of)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_hidden_may_hold_anything(cupy, rng, dtype, bad, dim):
    def mask(i, j):
        return (i >= 70) & (j < 130)

    def changed(q, k, v, dout):
        q[:, :, :70], dout[:, :, :70] = bad, bad
        k[:, :, 130:], v[:, :, 130:] = bad, bad

    def clean(q, k, v, dout):
        q[:, :, :70], dout[:, :, :70] = 0, 0
        k[:, :, 130:], v[:, :, 130:] = 0, 0

    state = rng.bit_generator.state
    options = {"dims": (dim, dim), "seqlens": (200, 150)}
    wanted = check(cupy, rng, dtype, mask, changed=clean, **options)
    rng.bit_generator.state = state
    q, k, v, dout = inputs(rng, dtype, (2, 2, 200, dim), (2, 1, 150, dim))
    changed(q, k, v, dout)
    given = [place(cupy, x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*given, return_lse=True, mask=mask)
    down = place(cupy, dout), *given, out, lse
    got = cupyflash.attention_vjp(*down, mask=mask)
    for a, b in zip(got[:3], wanted[:3], strict=True):
        a, b = to_host(a).astype("f8"), to_host(b).astype("f8")
        np.testing.assert_allclose(a, b, atol=0.02 * abs(b).max())
    assert not to_host(got.dq)[:, :, :70].any()
    assert not to_host(got.dk)[:, :, 130:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS)
def test_blocks_take_item_after_item(cupy, rng, dtype, dims):
    """More work tiles than multiprocessors, of very different lengths."""
    arrays = {"documents": documents(rng, 4, 300, 5)}
    options = {"heads": (40, 20), "seqlens": (300, 300), "arrays": arrays}
    check(cupy, rng, dtype, scores.document, dims, batch=(4,), **options)


@pytest.mark.gpu
def test_arrays_may_change_between_calls(cupy, rng):
    """Lists are made in each call."""
    for count in (3, 20):
        arrays = {"documents": documents(rng, 2, 400, count)}
        check(cupy, rng, "float16", scores.document, seqlens=(400, 400), arrays=arrays)
