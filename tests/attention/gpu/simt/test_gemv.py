"""The row of few queries in both tables: what it takes, and its numbers."""

import dataclasses
import itertools
import math

import numpy as np
import oracle
import pytest
import small_entries
import vjp_laws
from accuracy import BOUNDS, dtype_of, max_error, to_host
from placing import FORMS, place
from small_entries import DTYPES, SINGLE, device, gradient
from test_attention_vjp import OPTIONS, agree, inputs

import cupyflash
from cupyflash._attention.gpu import gradient_config, samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.simt.gemv_backward import GEMV_VJP
from cupyflash._attention.gpu.simt.gemv_forward import GEMV
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import kernel

ALL = (*DTYPES, "float64")
ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_120")
# (queries, keys, head_dim, head_dim_v)
SIZES = (
    (1, 100, 64, 64),
    (1, 1, 8, 8),
    (1, 33, 32, 32),
    (2, 129, 64, 32),
    (3, 40, 16, 64),
    (5, 20, 40, 24),
    (8, 65, 64, 64),
    (1, 70, 256, 256),
    (2, 50, 128, 96),
    (4, 9, 136, 256),
)
# float64 has no registers for 4 queries of 256 columns, and 1 x 1 x 8 is for `tiny`.
SIZES_OF_FLOAT64 = (
    *(x for x in SIZES if x[0] * max(x[2:]) <= 512 and x != (1, 1, 8, 8)),
    (1, 1, 16, 8),
)
# The same, of rows that are not whole vectors.
ODD_SIZES = (
    (1, 100, 103, 103),
    (1, 33, 7, 1),
    (1, 70, 1, 255),
    (1, 40, 60, 36),
    (2, 129, 50, 30),
    (3, 40, 13, 64),
    (4, 65, 66, 103),
    (2, 37, 255, 130),
)
SIZES_OF_DTYPES = [
    (dtype, *size)
    for dtype in ALL
    for size in (SIZES_OF_FLOAT64 if dtype == "float64" else SIZES)
]


def problem(dtype="float16", head_dim=64, queries=1, keys=100, **options):
    made = samples.made_up(dtype, head_dim)
    few = {"num_heads": 2048, "num_kv_heads": 2048, "seqlen_q": queries}
    return dataclasses.replace(made, **{**few, "seqlen_k": keys, **options})


def alignment(dtype, dim):
    """Bytes that rows of a contiguous array share."""
    return math.gcd(16, dim * np.dtype(dtype_of(dtype)).itemsize)


# --- the row -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 100, 32), (1, 40, 128)])
def test_takes(arch, dtype, queries, keys, dim):
    if (arch, dtype) == ("sm_75", "bfloat16"):
        pytest.skip("bfloat16 needs sm_80")
    asked = problem(dtype, dim, queries, keys)
    row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
    assert (row, refused) == (GEMV, ())
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, gradient(asked), device(arch))
    assert row is GEMV_VJP


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("queries", [1, 2, 8, 40, 900])
@pytest.mark.parametrize("keys", [1, 9, 40, 700])
def test_another_row_takes_calls_without_heads(dtype, queries, keys):
    empty = {"num_heads": 0, "num_kv_heads": 0, "batch": (3,)}
    for asked in (
        problem(dtype, 64, queries, keys, batch=(0,)),
        problem(dtype, 64, queries, keys, **empty),
    ):
        row, _ = kernel.select(ATTENTION_KERNELS, asked, device())
        assert row is not GEMV
        row, _ = kernel.select(ATTENTION_VJP_KERNELS, gradient(asked), device())
        assert row is not GEMV_VJP


REFUSED = [
    (problem("bfloat16"), "sm_75", "needs sm_80"),
    (problem(batch=(0,)), "sm_90a", "there are no heads"),
    (problem(queries=9), "sm_90a", "queries, not 9"),
    (problem(queries=0), "sm_90a", "queries, not 0"),
    (problem(keys=4097), "sm_90a", "1 to 4096 keys, not 4097"),
    (problem(keys=0), "sm_90a", "keys, not 0"),
    (problem(head_dim=257), "sm_90a", "head_dim 257 is above 256"),
    (problem(num_kv_heads=512), "sm_90a", "one query head per head of k, not 4"),
    (problem(keys_of_part=256), "sm_90a", "all keys of a head"),
    (problem(score="s * 2"), "sm_90a", "no score or mask function"),
    (problem(row_alignment=1), "sm_90a", "whole elements, not at every 1 bytes"),
    (problem("float64", row_alignment=4), "sm_90a", "not at every 4 bytes"),
]


@pytest.mark.parametrize(("asked", "arch", "reason"), REFUSED)
def test_leaves_to_the_next_row(asked, arch, reason):
    for row, x in ((GEMV, asked), (GEMV_VJP, gradient(asked))):
        assert reason in row.unsupported_reason(x, device(arch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5])
def test_takes_few_heads_of_many_keys_where_they_pay(dtype, queries):
    """Up to 4 float32 queries do. Gradients of more in 16 bits need as many as before.

    3 and 4 queries of one head are as fast in tiles.
    """
    for heads, keys in ((65, 513), (66, 513), (2, 512), (1, 512), (1, 4096)):
        asked = problem(dtype, 32, queries, keys, num_heads=heads, num_kv_heads=heads)
        reason = GEMV.unsupported_reason(asked, device())
        if dtype == "float32" and (queries <= 2 or (queries <= 4 and heads > 1)):
            assert reason is None
        elif dtype == "float32" and queries <= 4:
            assert f"takes 2 heads or more for {keys} keys, not 1" in reason
        elif dtype == "float32" or queries == 1:
            assert f"264 heads or more for {keys} keys, not {heads}" in reason
        else:
            assert reason is not None
        reason = GEMV_VJP.unsupported_reason(gradient(asked), device())
        if queries > 1 and dtype != "float32" and keys > 512 and heads < 66:
            assert f"66 heads or more for {keys} keys, not {heads}" in reason
        else:
            assert reason is None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("keys", [1, 9, 100, 512, 4096])
@pytest.mark.parametrize("heads", [1, 32, 300, 4096])
def test_takes_float64_of_any_number_of_heads(arch, keys, heads):
    """But several queries of many keys, if there are tensor cores for them.

    The tiniest entries have a thread for each query.
    """
    for queries, dim in ((1, 32), (1, 64), (1, 256), (2, 64), (2, 256), (4, 128)):
        asked = problem(
            "float64", dim, queries, keys, num_heads=heads, num_kv_heads=heads
        )
        row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
        is_little = keys <= 64 or heads * keys <= 128 * device(arch).num_sms
        if queries == 1 or (queries == 2 and is_little) or arch in ("sm_75", "sm_120"):
            assert row is GEMV
        else:
            assert row.name == ("short_f64" if keys <= 64 else "tiled_f64")
            reason = f"{queries} queries of {keys} keys are faster on tensor cores"
            assert dict(refused)["gemv"] == reason
    asked = problem("float64", 8, 1, 1, num_heads=heads, num_kv_heads=heads)
    row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
    assert row.name == "tiny"
    assert "a thread for each row is faster" in dict(refused)["gemv"]


@pytest.mark.parametrize(
    ("queries", "keys", "options", "smem"),
    [
        (1, 100, {}, 2048),
        (1, 4096, {}, 65536),
        (8, 100, {}, 16384),
        (2, 4096, {}, 0),
        (1, 100, {"bias": "float64"}, 2048),
        (1, 100, {"bias": "float64", "softcap": 3.0}, 0),
    ],
)
def test_weights_of_float64_are_kept_where_there_is_room(queries, keys, options, smem):
    """And blocks of others read k twice."""
    asked = problem("float64", 64, queries, keys, **options)
    config = GEMV_VJP.config(asked, 1, device())
    assert config.variant.smem == smem
    assert ("KEEP_WEIGHTS" in dict(config.variant.defines)) == (smem > 0)
    few = GEMV_VJP.config(asked, 1, device(), splits=2)
    assert (
        few.variant.smem
        == GEMV_VJP.config(asked, 1, device(), "_totals", 2).variant.smem
        == 0
    )


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("dims", "row_alignment"),
    [((64, 64), 16), ((64, 64), 8), ((104, 103), 16), ((50, 50), 16), ((256, 1), 16)],
)
def test_vectors_are_the_widest_that_rows_allow(dtype, dims, row_alignment):
    """And a lane has as many columns as of whole vectors."""
    dim, dim_v = dims
    asked = problem(dtype, dim, head_dim_v=dim_v, row_alignment=row_alignment)
    for tuning in (GEMV.tuning, GEMV_VJP.tuning):
        of = tuning.layout(asked, device())
        itemsize = np.dtype(dtype_of(dtype)).itemsize
        shared = math.gcd(row_alignment, dim * itemsize, dim_v * itemsize)
        assert of.vector == shared // itemsize
        wide = problem(dtype, -(-dim // 8) * 8, head_dim_v=-(-dim_v // 8) * 8)
        aligned = tuning.layout(wide, device())
        assert of.lanes == aligned.lanes
        assert of.parts_k * of.vector <= aligned.parts_k * aligned.vector
        assert of.parts_v * of.vector <= aligned.parts_v * aligned.vector
        assert of.lanes * of.vector * of.parts_k >= dim
        assert of.lanes * of.vector * of.parts_v >= dim_v


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("dim", [1, 7, 50, 103, 255])
@pytest.mark.parametrize(("heads", "keys"), [(8, 8192), (512, 1000), (4096, 100)])
def test_takes_one_query_of_odd_rows(arch, dtype, dim, heads, keys):
    """Of few heads and many keys, too."""
    if (arch, dtype) == ("sm_75", "bfloat16"):
        pytest.skip("bfloat16 needs sm_80")
    if (dtype, dim) == ("float64", 50):
        pytest.skip("whole vectors")
    few = {"num_heads": heads, "num_kv_heads": heads}
    asked = problem(dtype, dim, 1, keys, **few, row_alignment=alignment(dtype, dim))
    row, refused = kernel.select(ATTENTION_KERNELS, asked, device(arch))
    assert (row, refused) == (GEMV, ())
    row, _ = kernel.select(ATTENTION_VJP_KERNELS, gradient(asked), device(arch))
    assert row is GEMV_VJP
    longer = dataclasses.replace(asked, seqlen_k=32769)
    for row, x in ((GEMV, longer), (GEMV_VJP, gradient(longer))):
        assert "1 to 32768 keys" in row.unsupported_reason(x, device(arch))


@pytest.mark.parametrize(
    ("dtype", "dim", "keys", "most"),
    [
        ("float16", 103, 100, 4),
        ("float16", 103, 32, 1),
        ("float16", 50, 100, 2),
        ("float16", 100, 100, 2),
        ("float32", 103, 100, 8),
        ("float32", 103, 1000, 5),  # or `mma_few`
        ("float32", 31, 1000, 8),
        ("float32", 103, 32, 2),
        ("float32", 50, 100, 5),
        ("float64", 103, 1000, 2),
    ],
)
def test_takes_as_many_queries_of_odd_rows_as_pay(dtype, dim, keys, most):
    for queries in range(1, 10):
        shared = alignment(dtype, dim)
        asked = problem(dtype, dim, queries, keys, row_alignment=shared)
        taken = GEMV.unsupported_reason(asked, device()) is None
        assert taken == (queries <= most), queries
        # Rows with padding that start at whole vectors have the limits of those.
        padded = problem(dtype, dim, queries, keys)
        wide = problem(dtype, -(-dim // 8) * 8, queries, keys)
        reasons = [GEMV.unsupported_reason(x, device()) for x in (padded, wide)]
        assert (reasons[0] is None) == (reasons[1] is None)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_leaves_float32_queries_to_tensor_cores_where_a_row_takes_them(arch):
    for queries, dim, keys in itertools.product((5, 6, 8), (31, 33, 103), (127, 1000)):
        asked = problem("float32", dim, queries, keys, row_alignment=4)
        row, _ = kernel.select(ATTENTION_KERNELS, asked, device(arch))
        is_left = queries > 5 and dim > 32 and keys > 127
        has_room = arch in ("sm_80", "sm_90a", "sm_100")
        assert row.name == ("mma_few" if is_left and has_room else "gemv")


@pytest.mark.parametrize("dtype", ALL)
def test_leaves_short_entries_of_few_columns_to_the_next_row(dtype):
    for dim, keys in ((1, 1), (7, 9), (15, 32)):
        asked = problem(dtype, dim, 1, keys, row_alignment=alignment(dtype, dim))
        for row, x in ((GEMV, asked), (GEMV_VJP, gradient(asked))):
            reason = row.unsupported_reason(x, device())
            assert f"{keys} keys of {dim} columns are left to tiles" in reason
    for dim, keys in ((17, 32), (7, 33)):
        asked = problem(dtype, dim, 1, keys, row_alignment=alignment(dtype, dim))
        for row, x in ((GEMV, asked), (GEMV_VJP, gradient(asked))):
            assert row.unsupported_reason(x, device()) is None


def test_takes_as_many_keys_as_pay():
    """In 16 bits, tensor cores are as fast from some size of k on."""
    for dim, keys in ((64, 320), (128, 160)):
        assert (
            GEMV.unsupported_reason(problem("float16", dim, 1, keys), device()) is None
        )
        asked = problem("float16", dim, 1, keys + 1)
        assert "faster on tensor cores" in GEMV.unsupported_reason(asked, device())
        assert GEMV_VJP.unsupported_reason(gradient(asked), device()) is None
    asked = problem("bfloat16", 64, 1, 225)
    assert "faster on tensor cores" in GEMV.unsupported_reason(asked, device())
    for dtype, keys in (("float16", 1024), ("bfloat16", 320)):
        asked = problem(dtype, 64, 1, keys, bias=dtype)
        assert GEMV.unsupported_reason(asked, device()) is None
        asked = dataclasses.replace(asked, seqlen_k=keys + 1)
        assert "faster on tensor cores" in GEMV.unsupported_reason(asked, device())
    for dtype, dim in (("float16", 32), ("bfloat16", 32), ("float32", 64)):
        assert GEMV.unsupported_reason(problem(dtype, dim, 1, 4096), device()) is None


def test_takes_longer_axes_of_keys_where_no_sum_is_long():
    for dtype, most in (("float16", 4096), ("float32", 32768), ("float64", 32768)):
        few = {"num_heads": 300, "num_kv_heads": 300}
        assert (
            GEMV.unsupported_reason(problem(dtype, 32, 1, most, **few), device())
            is None
        )
        reason = GEMV.unsupported_reason(
            problem(dtype, 32, 1, most + 1, **few), device()
        )
        assert f"1 to {most} keys, not {most + 1}" in reason
        assert GEMV_VJP.unsupported_reason(
            gradient(problem(dtype, 32, 1, 4097)), device()
        )


def test_takes_many_wide_heads():
    few = {"num_heads": 1055, "num_kv_heads": 1055}
    for dtype, dim, is_taken in (
        ("float16", 64, True),
        ("float16", 128, False),
        ("float16", 256, True),
        ("float32", 128, True),
    ):
        reason = GEMV.unsupported_reason(problem(dtype, dim, 1, 60, **few), device())
        assert (reason is None) == is_taken, reason


@pytest.mark.parametrize(
    ("dtype", "keys", "forward", "gradients"),
    [
        ("float16", 16, 1, 2),
        ("float16", 40, 1, 3),
        ("float16", 64, 1, 4),
        ("float16", 100, 1, 5),
        ("float32", 16, 2, 2),
        ("float32", 40, 5, 3),
        ("float32", 100, 5, 6),
        ("float32", 113, 5, 8),
    ],
)
def test_takes_as_many_queries_as_pay(dtype, keys, forward, gradients):
    for queries in range(1, 10):
        asked = problem(dtype, 64, queries, keys)
        taken = GEMV.unsupported_reason(asked, device()) is None
        assert taken == (queries <= forward)
        taken = GEMV_VJP.unsupported_reason(gradient(asked), device()) is None
        assert taken == (queries <= gradients)


@pytest.mark.parametrize(
    ("keys", "dim", "most"),
    [
        (16, 64, 8),
        (64, 64, 8),
        (64, 128, 4),  # registers
        (65, 64, 4),
        (512, 128, 4),
        (513, 64, 2),
        (1024, 64, 2),
        (4096, 64, 1),  # k twice
        (4096, 256, 2),  # which no tensor cores take
    ],
)
def test_takes_as_many_float64_queries_as_pay(keys, dim, most):
    for queries in range(1, 10):
        asked = gradient(problem("float64", dim, queries, keys))
        taken = GEMV_VJP.unsupported_reason(asked, device()) is None
        assert taken == (queries <= most), queries


def test_float64_gradients_that_other_rows_take():
    for asked, reason, then in (
        (problem("float64", 8, 4, 4), "a thread for each row is faster", "tiny"),
        (problem("float64", 64, 2, 4096), "would read k twice", "few_f64"),
        (
            problem("float64", 64, 2, 60, bias="float64", softcap=3.0),
            "would read k twice",
            "few_f64",
        ),
    ):
        row, _ = kernel.select(ATTENTION_VJP_KERNELS, gradient(asked), device())
        assert reason in GEMV_VJP.unsupported_reason(gradient(asked), device())
        assert row.name == then
    # Blocks that share the keys do, and pay all the same.
    few = {"num_heads": 32, "num_kv_heads": 32}
    asked = problem("float64", 64, 2, 4096, **few)
    assert GEMV_VJP.unsupported_reason(gradient(asked), device()) is None


@pytest.mark.parametrize(
    ("heads", "keys", "splits"),
    [
        (1, 256, 1),
        (1, 512, 8),
        (32, 512, 8),
        (100, 512, 2),
        (200, 512, 1),
        (1024, 512, 1),
        (32, 4096, 8),
        (100, 4096, 5),
        (300, 4096, 3),
        (1024, 4096, 1),
    ],
)
def test_blocks_share_float64_keys_where_entries_are_few(heads, keys, splits):
    """Up to 512 keys only if all blocks run at once."""
    asked = problem("float64", 64, 1, keys, num_heads=heads, num_kv_heads=heads)
    assert GEMV_VJP.num_splits(asked, device()) == splits


def test_float64_entries_of_two_vectors_a_lane_have_more_warps():
    """If they have many keys, no options, and no blocks that share the keys."""
    for asked, warps, unroll, min_blocks in (
        (problem("float64", 128, 1, 512), 8, 1, 3),
        (problem("float64", 96, 1, 4096, head_dim_v=32), 8, 1, 3),
        (problem("float64", 128, 1, 255), 4, 2, 4),
        (problem("float64", 64, 1, 512), 4, 4, 4),
        (problem("float64", 256, 1, 512), 8, 1, 2),
        (problem("float64", 128, 1, 512, softcap=3.0), 4, 2, 3),
        (problem("float64", 128, 1, 4096, num_heads=264, num_kv_heads=264), 8, 2, 2),
    ):
        of = GEMV.tuning.layout(asked, device())
        assert (of.warps, of.unroll) == (warps, unroll)
        assert GEMV.tuning.min_blocks(asked, of, device()) == min_blocks


def test_few_entries_have_more_warps():
    sizes = [
        GEMV.tuning.layout(problem(num_heads=n, num_kv_heads=n), device())
        for n in (4096, 1500, 800, 264)
    ]
    assert [x.warps for x in sizes] == [1, 4, 4, 8]
    assert [x.entries for x in sizes] == [4, 1, 1, 1]
    # But none without keys.
    assert GEMV.tuning.layout(problem(num_heads=264, keys=8), device()).warps == 1


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            gradient(problem("float32", 256, 8, 200)),
            "too few registers for 8 queries of 256 columns",
        ),
        (
            gradient(problem("float64", 256, 3, 40)),
            "too few registers for 3 queries of 256 columns",
        ),
        (
            gradient(problem("float64", 255, 2, 40, row_alignment=8)),
            "too few registers for 2 queries of 255 columns",
        ),
        (gradient(problem(), need_dsinks=True), "does not compute dsinks"),
        (
            gradient(problem(bias="float16"), need_dbias=True, bias_shape=(1, 100)),
            "only if each score has a bias of its own",
        ),
        (
            AttentionVjpProblem(problem(batch=(3,)), (2048, 1, 64), (), ()),
            "q is shared by entries of the batch",
        ),
    ],
)
def test_gradients_are_left_to_the_next_row(asked, reason):
    assert reason in GEMV_VJP.unsupported_reason(asked, device())


@pytest.mark.parametrize(("dtype", "queries", "keys", "dim", "dim_v"), SIZES_OF_DTYPES)
def test_threads_hold_all_columns(dtype, queries, keys, dim, dim_v):
    asked = problem(dtype, dim, queries, keys, head_dim_v=dim_v)
    for config in (
        *GEMV.configs(asked, 1, device()),
        GEMV_VJP.config(asked, 1, device()),
    ):
        n = {n: int(x) for n, x in config.variant.defines if x.isdigit()}
        assert n["QUERIES"] == queries
        assert n["LANES"] * n["VECTOR"] * n["PARTS_K"] >= dim
        assert n["LANES"] * n["VECTOR"] * n["PARTS_V"] >= dim_v
        assert 32 % n["LANES"] == 0
        assert n["NUM_THREADS"] == 32 * n["WARPS"] * n["ENTRIES"]
        assert config.num_blocks * n["ENTRIES"] >= 2048
        assert (n["WARPS"] == 1) or (n["ENTRIES"] == 1)
        # What the warps of an entry share at the end fits without being asked for.
        columns = max(n["PARTS_K"], n["PARTS_V"]) * n["VECTOR"] * n["LANES"]
        of_number = 8 if dtype == "float64" else 4
        assert n["WARPS"] * n["QUERIES"] * of_number * (columns + 2) <= 48 << 10


def test_vectors_that_rows_start_at():
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu import views

    class At:
        def __init__(self, ptr, x):
            self.shape, self.strides = x.shape, x.strides
            self.data = type("data", (), {"ptr": ptr})

    x = np.zeros((3, 2, 8), "float16")
    assert views.no_vectors(q=At(256, x)) is None
    assert views.no_vectors(q=At(258, x)) == "q starts 2 bytes past a multiple of 16"
    assert "k has a stride of 36 bytes" in views.no_vectors(
        k=At(0, np.zeros((3, 2, 9), "float16")[..., :8])
    )
    one = np.zeros((1, 9), "float16")[:, :8]  # no second row to start
    assert views.no_vectors(v=At(0, one)) is None
    assert views.row_alignment(q=At(256, x), v=At(0, one)) == 16
    assert views.row_alignment(q=At(258, x)) == 2
    assert views.row_alignment(q=At(264, x)) == 8
    wide = np.zeros((3, 2, 10), "float16")[..., :8]
    assert views.row_alignment(q=At(0, x), k=At(0, wide)) == 4


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_go_where_their_arrays_have_them(layout):
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu.simt.gemv_backward import GEMV_GRADS
    from cupyflash._attention.gpu.simt.gemv_backward_plan import gemv_vjp_steps

    launches = small_entries.check_strides_of_gradients(
        GEMV_VJP, gemv_vjp_steps, GEMV_GRADS, layout, (70, 20), (4, 4), (3, 70, 64, 48),
        need_dbias=True,
    )  # fmt: skip
    assert len(launches) == 1


# --- blocks that share the keys of an entry ------------------------------------------


@pytest.mark.parametrize(
    ("heads", "keys", "splits"),
    [
        (32, 4096, 8),
        (32, 1000, 8),
        (32, 513, 3),
        (32, 512, 1),
        (1, 4096, 32),
        (100, 4096, 5),
        (132, 4096, 2),
        (264, 4096, 1),
        (300, 4096, 3),
        (4096, 4096, 1),
    ],
)
def test_blocks_share_keys_where_entries_are_few(heads, keys, splits):
    asked = problem("float32", 64, 1, keys, num_heads=heads, num_kv_heads=heads)
    assert GEMV_VJP.unsupported_reason(gradient(asked), device()) is None
    assert GEMV_VJP.num_splits(asked, device()) == splits
    of = GEMV_VJP.tuning.layout(asked, device())
    assert splits == 1 or of.entries == 1
    names = [c.variant.entry for c in GEMV_VJP.configs(asked, 1, device(), False)]
    totals = ["attention_vjp_gemv_totals"] * (splits > 1)
    assert names == [*totals, "attention_vjp_gemv"]


@pytest.mark.parametrize(
    ("dtype", "heads", "keys", "dim", "splits"),
    [
        ("float32", 1, 128, 64, 1),
        ("float32", 1, 512, 64, 4),
        ("float32", 1, 4096, 64, 32),
        ("float32", 1, 32768, 64, 103),
        ("float32", 32, 4096, 128, 8),
        ("float32", 100, 4096, 64, 5),
        ("float32", 265, 4096, 64, 1),
        ("float64", 1, 32, 64, 1),
        ("float64", 1, 512, 256, 32),
        ("float64", 32, 4096, 64, 8),
        ("float64", 32, 4096, 256, 8),
        ("float64", 265, 4096, 64, 1),
    ],
)
def test_blocks_share_keys_forward(dtype, heads, keys, dim, splits):
    """One launch: the last block of an entry combines what all have found."""
    asked = problem(dtype, dim, 1, keys, num_heads=heads, num_kv_heads=heads)
    assert GEMV.unsupported_reason(asked, device()) is None
    assert GEMV.num_splits(asked, device()) == splits
    split = GEMV.split_kv(asked, device())
    assert (split.num_splits, split.in_kernel) == (splits, True)
    (config,) = GEMV.configs(asked, 1, device())
    of = GEMV.tuning.layout(asked, device())
    assert config.num_blocks == math.ceil(heads / of.entries) * splits
    assert ("KEY_SPLITS" in dict(config.variant.defines)) == (splits > 1)
    assert splits == 1 or heads <= GEMV.num_counters(device())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_between_blocks_that_share_keys(dtype):
    """Room for the columns of each query of a part, and for m and l."""
    pytest.importorskip("cupy")
    from cupyflash._attention import problem as attention_problem
    from cupyflash._attention.gpu.simt.gemv_forward_plan import gemv_steps

    q, k = np.zeros((5, 3, 2, 64), dtype), np.zeros((5, 3, 2000, 64), dtype)
    asked, operands = attention_problem.attention(
        q, k, k, None, None, None, False, None, None, 0.0, None, None, None, None,
        "bhsd", "float32", False, None, "auto",
    )  # fmt: skip
    splits = GEMV.num_splits(asked, device())
    assert splits > 1
    ((_, arguments),), scratch, *_ = gemv_steps(GEMV, asked, operands, device())
    assert (arguments[5], arguments[7]) == ("parts", splits)
    assert arguments[6].numbers >= 5 * 3
    assert scratch["parts"] == splits * 5 * 3 * 2 * (64 + 2) * q.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [513, 1000, 4096])
def test_splits_have_enough_keys(dtype, keys):
    """At least some steps each, in few waves of blocks that take fewer steps."""
    places = 2 * device().num_sms
    for heads in (1, 7, 66, 100, 300):
        for queries in (1, 2, 5):
            asked = problem(
                dtype, 64, queries, keys, num_heads=heads, num_kv_heads=heads
            )
            splits = GEMV_VJP.num_splits(asked, device())
            step = GEMV_VJP.tuning.layout(asked, device()).keys_of_step
            steps = math.ceil(keys / step)
            assert splits <= max(1, steps // GEMV_VJP.least_steps)
            waves = math.ceil(splits * heads / places)
            whole = math.ceil(heads / places) * steps
            assert waves <= max(GEMV_VJP.most_waves, math.ceil(heads / places))
            assert splits == 1 or waves * math.ceil(steps / splits) < whole
            (*_, config) = GEMV_VJP.configs(asked, 1, device(), False)
            assert config.num_blocks == heads * splits
            assert ("KEY_SPLITS" in dict(config.variant.defines)) == (splits > 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_terms_of_dq_are_added_up(dtype, layout):
    pytest.importorskip("cupy")
    from cupyflash._attention import vjp_problem
    from cupyflash._attention.gpu import gradient_layout
    from cupyflash._attention.gpu.simt.gemv_backward_plan import gemv_vjp_steps

    shape = {"bhsd": (1, 3, 2, 64), "bshd": (1, 2, 3, 64)}[layout]
    of_keys = {"bhsd": (1, 3, 2000, 64), "bshd": (1, 2000, 3, 64)}[layout]
    q, k = np.zeros(shape, dtype), np.zeros(of_keys, dtype)
    wide = "float64" if dtype == "float64" else "float32"
    lse = np.zeros((1, 3, 2), wide)
    asked, operands = vjp_problem.attention_vjp(
        q, q, k, k, q, lse, None, None, None, False, None, None, 0.0, None, None,
        None, None, layout, "float32", "auto", None, False, False, False,
    )  # fmt: skip
    splits = GEMV_VJP.num_splits(asked.forward, device())
    assert splits > 1
    steps = gemv_vjp_steps(GEMV_VJP, asked, operands, device())
    *totals, (_, arguments), (_, (terms, result, fields)) = steps.launches
    assert len(totals) == (dtype != "float16")
    assert arguments[7:10] == ("totals" if totals else 0, splits, "dq_terms")
    assert (terms, result) == ("dq_terms", "dq")
    itemsize = np.dtype(wide).itemsize
    assert steps.scratch[terms] == splits * 3 * 2 * 64 * itemsize
    assert steps.scratch.get("totals", 0) == itemsize * splits * 3 * 2 * len(totals)
    (found,) = np.frombuffer(fields, gradient_layout.SUM.dtype(kAxes=6))
    assert found["num_terms"] == splits
    assert found["num_sums"] == 3 * 2 * 64


@pytest.mark.parametrize(
    ("sums", "terms", "lanes"),
    [
        (64, 32, 32),
        (2048, 8, 8),
        (2048, 4, 8),
        (2048, 3, 1),
        (1 << 20, 32, 1),
        (64, 65, 256),
    ],
)
def test_threads_share_few_sums(sums, terms, lanes):
    config = gradient_config.sum_config("float32", "float32", 6, sums, terms)
    assert dict(config.variant.defines)["LANES"] == str(lanes)
    assert config.num_blocks == math.ceil(sums * lanes / 256)


# --- numbers -------------------------------------------------------------------------


def without_few(rows):
    """Those rows that do not stand before the one that is tested."""
    first = tuple(row.name for row in rows).index("gemv")
    return rows[first:]


@pytest.fixture
def few_heads(monkeypatch):
    """Let both rows take fewer heads than pay off, so that tests are small."""

    def take_all(rows):
        first, *rest = without_few(rows)
        tuning = dataclasses.replace(
            first.tuning,
            heads_per_sm={n: {4096: 0} for n in (2, 4, 8)},
            heads_per_sm_of_more={},
            most_queries={n: {4096: 8} for n in (2, 4, 8)},
            most_bytes={name: {256: 1 << 30} for name in first.tuning.most_bytes},
        )
        row = dataclasses.replace(first, tuning=tuning)
        if first is GEMV:
            row = dataclasses.replace(
                row, wide_heads_per_sm=0, most_keys_beside_tiles=4096,
                most_beside_tiles=8, most_beside_few=8,
            )  # fmt: skip
        return (row, *rest)

    small_entries.change_tables(monkeypatch, take_all)


@pytest.fixture
def shared_keys(few_heads, monkeypatch):
    """Let blocks share few keys, too, so that tests are small."""

    def share(rows):
        first, *rest = rows
        if isinstance(first, type(GEMV_VJP)):
            first = dataclasses.replace(first, keys_of_block=32, least_steps=1)
        else:
            first = dataclasses.replace(
                first, combining=0, combining_one=0, least_steps=1
            )
        return (first, *rest)

    small_entries.change_tables(monkeypatch, share)


@pytest.fixture(params=[True, False])
def keeps(request, monkeypatch):
    """With and without room for the weights of float64."""

    def change(rows):
        first, *rest = without_few(rows)
        if isinstance(first, type(GEMV_VJP)):
            first = dataclasses.replace(first, keeps_weights=request.param)
        return (first, *rest)

    small_entries.change_tables(monkeypatch, change)


def check_both(cupy, rng, dtype, size, batch=(5,), **options):
    small_entries.check_both(
        "gemv", cupy, rng, dtype, size, (2, 2), batch,
        **options,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_heads(cupy, dtype, shape):
    """Of an empty batch, or of none."""
    q, k = (cupy.ones((*shape, n, 64), dtype_of(dtype)) for n in (1, 40))
    out, lse = cupyflash.attention(q, k, k, return_lse=True)
    assert out.shape == q.shape
    found = cupyflash.attention_vjp(out, q, k, k, out, lse)
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "queries", "keys", "dim", "dim_v"), SIZES_OF_DTYPES)
def test_every_size(cupy, rng, few_heads, dtype, queries, keys, dim, dim_v):
    check_both(cupy, rng, dtype, (queries, keys, dim, dim_v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("size", ODD_SIZES)
def test_rows_that_are_not_whole_vectors(cupy, rng, few_heads, dtype, size):
    if dtype == "float64" and size[0] > 1 and max(size[2:]) > 128:
        pytest.skip("has too few registers")
    check_both(cupy, rng, dtype, size, batch=(3,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("size", [(1, 200, 103, 103), (2, 140, 7, 30), (1, 130, 50, 1)])
def test_blocks_share_keys_of_odd_rows(cupy, rng, shared_keys, dtype, size):
    check_both(cupy, rng, dtype, size, batch=(2,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_odd_rows_of_few_heads_and_many_keys(cupy, rng, dtype):
    """Without a change of the table."""
    check_both(cupy, rng, dtype, (1, 5000, 13, 13), batch=(1,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", SINGLE)
def test_options_of_odd_rows(cupy, rng, few_heads, dtype, name):
    check_both(cupy, rng, dtype, (2, 37, 33, 21), **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("keys", [45, 200])
def test_a_bias_of_odd_rows(cupy, rng, shared_keys, dtype, keys):
    q, k = (4, 2, 2, 27), (4, 2, keys, 27)
    bias = rng.normal(size=(4, 2, 2, keys)).astype(dtype_of(dtype))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    lengths = np.array([keys, 0, 3, 12], np.int32)
    options = {"bias": bias, "key_lengths": lengths, "need_dbias": True}
    vjp_laws.poison(cupy, bias.shape)
    grads = agree(cupy, *inputs(rng, dtype, q, k), **options, softcap=4.0)
    assert not to_host(grads.dbias)[1].astype(np.float32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_calls_of_other_pointers_have_plans_of_their_own(cupy, rng, few_heads, dtype):
    """The same shapes at addresses that share fewer bytes, one after the other."""
    q, k, v, dout = inputs(rng, dtype, (3, 2, 2, 32), (3, 2, 40, 32))
    found = []
    for past in (0, 4, 2, 1, 8, 0):
        placed = []
        for x in (q, k, v, dout):
            room = cupy.zeros(x.size + 8, place(cupy, x).dtype)
            room[past : past + x.size] = place(cupy, x).ravel()
            placed.append(room[past : past + x.size].reshape(x.shape))
        *qkv, dout_here = placed
        assert cupyflash.explain("attention", *qkv).kernel == "gemv"
        out, lse = cupyflash.attention(*qkv, return_lse=True)
        grads = cupyflash.attention_vjp(dout_here, *qkv, out, lse)
        found.append([to_host(x).astype(np.float64) for x in (out, *grads[:3])])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            near = small_entries._UNITS[dtype] * np.abs(a).max()
            assert np.abs(a - b).max() <= near
    for a, b in zip(found[0], found[-1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_keys_of_several_steps(cupy, rng, few_heads, dtype):
    check_both(cupy, rng, dtype, (2, 1100, 32, 32), batch=(2,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", SINGLE)
def test_options(cupy, rng, few_heads, dtype, name):
    check_both(cupy, rng, dtype, (5, 37, 64, 64), **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("queries", [1, 6])
def test_a_bias_for_each_score(cupy, rng, few_heads, dtype, queries):
    """And its gradient; hidden scores, and those of padding, have none."""
    q, k = (7, 2, queries, 32), (7, 2, 45, 32)
    bias = rng.normal(size=(7, 2, queries, 45)).astype(dtype_of(dtype))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    lengths = np.array([45, 0, 3, 44, 45, 12, 30], np.int32)
    arrays = inputs(rng, dtype, q, k)
    options = {"bias": bias, "key_lengths": lengths, "need_dbias": True}
    vjp_laws.poison(cupy, bias.shape)
    grads = agree(cupy, *arrays, **options, softcap=4.0)
    assert not to_host(grads.dbias)[1].astype(np.float32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_an_lse_and_what_flows_into_it(cupy, rng, few_heads, dtype):
    q, k = (9, 2, 3, 64), (9, 2, 24, 64)
    small_entries.check_parts_of_the_keys(cupy, rng, dtype, q, k, cut=11)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("form", FORMS)
def test_strides(cupy, rng, few_heads, dtype, form):
    """Rows may start at any element."""
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse"), form)
    arrays = inputs(rng, dtype, (6, 2, 4, 24), (6, 2, 18, 24))
    agree(cupy, *arrays, forms=forms, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_an_out_of_the_caller_between_vectors(cupy, rng, few_heads, dtype):
    q, k, v, _ = (
        place(cupy, x) for x in inputs(rng, dtype, (9, 1, 3, 32), (9, 1, 20, 32))
    )
    expected = cupyflash.attention(q, k, v)
    room = cupy.zeros((9, 1, 3, 71), q.dtype)
    for out in (room[..., 1:33], room[..., 1:65:2]):
        cupyflash.attention(q, k, v, out=out)
        np.testing.assert_array_equal(to_host(out), to_host(expected))
        assert not to_host(room)[..., 65:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_entries_do_not_know_of_each_other(cupy, rng, few_heads, dtype):
    q, k = (11, 2, 4, 64), (11, 2, 40, 64)
    small_entries.check_entries_alone(cupy, rng, dtype, q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_queries_do_not_know_of_each_other(cupy, rng, few_heads, dtype):
    """A window shows each query other keys: their sums start where they always do."""
    q, k, v, _ = inputs(rng, dtype, (3, 1, 8, 32), (3, 1, 700, 32))
    options = {"window": (150, 0), "causal": True}
    out = to_host(cupyflash.attention(*(place(cupy, x) for x in (q, k, v)), **options))
    q[:, :, :7] = 3
    again = cupyflash.attention(*(place(cupy, x) for x in (q, k, v)), **options)
    np.testing.assert_array_equal(to_host(again)[:, :, 7], out[:, :, 7])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_seen_never_leaks(cupy, rng, few_heads, dtype, bad):
    """Behind lengths, and below the diagonal."""
    q, k, v, dout = inputs(rng, dtype, (4, 2, 6, 32), (4, 2, 50, 32))
    lengths = {
        "query_lengths": np.array([6, 2, 5, 0]), "key_lengths": np.array([50, 50, 7, 9])
    }  # fmt: skip
    for entry, (rows, keys) in enumerate(zip(*lengths.values(), strict=True)):
        q[entry, :, rows:], dout[entry, :, rows:] = bad, bad
        k[entry, :, keys:], v[entry, :, keys:] = bad, bad
    grads = agree(cupy, q, k, v, dout, **lengths)
    assert all(np.isfinite(to_host(x).astype(np.float32)).all() for x in grads[:3])
    assert not to_host(grads.dk)[2, :, 7:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["q", "k", "dout"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinities_stay_where_they_are_seen(
    cupy, rng, few_heads, dtype, name, bad
):
    arrays = inputs(rng, dtype, (4, 2, 3, 32), (4, 2, 20, 32))
    x = dict(zip(("q", "k", "v", "dout"), arrays, strict=True))[name]
    x[0, 0, 1, 3] = bad
    agree(cupy, *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    "size", [(1, 200, 64, 64), (3, 300, 32, 64), (8, 129, 64, 64), (1, 70, 256, 136)]
)
def test_blocks_that_share_keys(cupy, rng, shared_keys, dtype, size):
    check_both(cupy, rng, dtype, size, batch=(2,))


@pytest.mark.gpu
def test_float64_entries_of_more_warps(cupy, rng):
    """So many that no blocks share their keys."""
    heads = 300
    q, k, v, _ = inputs(rng, "float64", (heads, 1, 128), (heads, 257, 128), 128)
    q /= 6  # no large scores
    expected, *_ = oracle.attention(q, k, v)
    out = cupyflash.attention(*(place(cupy, x) for x in (q, k, v)))
    assert max_error(out, expected) <= BOUNDS["attention"]["float64"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_forward_of_shared_keys(cupy, rng, shared_keys, dtype):
    """With every option, the same bits in every run, and of any number of parts."""
    batch, heads, queries, keys = 2, 3, 2, 700
    q, k, v, _ = inputs(
        rng, dtype, (batch, heads, queries, 64), (batch, heads, keys, 64), 32
    )
    bias = rng.normal(size=(heads, queries, keys)).astype(dtype_of(dtype))
    bias[..., 300:420] = -np.inf
    options = {
        "bias": bias, "mask": rng.random((queries, keys)) < 0.7, "softcap": 5.0,
        "sinks": rng.normal(size=heads).astype(np.float32),
        "alibi_slopes": rng.random(heads).astype(np.float32) / 100, "causal": True,
        "key_lengths": np.array([keys, 333]), "query_lengths": np.array([2, 1]),
    }  # fmt: skip
    expected, expected_lse, _ = oracle.attention(q, k, v, **options)
    placed = [place(cupy, x) for x in (q, k, v)]
    on_card = {
        n: cupy.asarray(x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
    }
    told = cupyflash.explain("attention", *placed, **on_card)
    assert told.kernel == "gemv"
    assert told.details["split of the keys"] > 1
    runs = []
    for _ in range(3):
        vjp_laws.poison(cupy, (64, 64))
        runs.append(cupyflash.attention(*placed, return_lse=True, **on_card))
    assert max_error(runs[0][0], expected) <= BOUNDS["attention"][dtype]
    np.testing.assert_allclose(to_host(runs[0][1]), expected_lse, rtol=1e-5, atol=1e-5)
    for out, lse in runs[1:]:
        np.testing.assert_array_equal(to_host(out), to_host(runs[0][0]))
        np.testing.assert_array_equal(to_host(lse), to_host(runs[0][1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("heads", [1, 40])
def test_calls_one_after_the_other_count_from_zero(cupy, rng, dtype, heads):
    """Calls with other numbers of heads and parts share the counters of a stream."""
    for keys in (600, 5000, 600):
        q, k, v, _ = inputs(rng, dtype, (heads, 1, 64), (heads, keys, 64), 64)
        q /= 6  # no large scores
        placed = [place(cupy, x) for x in (q, k, v)]
        assert cupyflash.explain("attention", *placed).kernel == "gemv"
        expected, *_ = oracle.attention(q, k, v)
        for _ in range(2):
            out = cupyflash.attention(*placed)
            assert max_error(out, expected) <= BOUNDS["attention"][dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks_share_keys_as_they_are_chosen(cupy, rng, dtype):
    """Without a change of the table."""
    vjp_laws.check(
        "gemv", cupy, rng, dtype, heads=(2, 2), seqlens=(2, 1100), batch=(1,)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", SINGLE)
def test_options_of_shared_keys(cupy, rng, shared_keys, dtype, name):
    check_both(cupy, rng, dtype, (5, 137, 64, 64), batch=(2,), **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_a_bias_of_shared_keys(cupy, rng, shared_keys, dtype):
    q, k = (4, 2, 3, 64), (4, 2, 145, 64)
    bias = rng.normal(size=(4, 2, 3, 145)).astype(dtype_of(dtype))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    lengths = np.array([145, 0, 3, 70], np.int32)
    options = {"bias": bias, "key_lengths": lengths, "need_dbias": True}
    vjp_laws.poison(cupy, bias.shape)
    grads = agree(cupy, *inputs(rng, dtype, q, k), **options)
    assert not to_host(grads.dbias)[1].astype(np.float32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
def test_an_lse_of_shared_keys(cupy, rng, shared_keys, dtype):
    q, k = (2, 2, 3, 64), (2, 2, 224, 64)
    small_entries.check_parts_of_the_keys(cupy, rng, dtype, q, k, cut=100)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_entries_of_shared_keys_do_not_know_of_each_other(
    cupy, rng, shared_keys, dtype
):
    q, k = (3, 2, 2, 64), (3, 2, 170, 64)
    small_entries.check_entries_alone(cupy, rng, dtype, q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_seen_of_shared_keys_never_leaks(
    cupy, rng, shared_keys, dtype, bad
):
    q, k, v, dout = inputs(rng, dtype, (2, 2, 3, 64), (2, 2, 170, 64))
    lengths = {"query_lengths": np.array([3, 2]), "key_lengths": np.array([60, 170])}
    for entry, (rows, keys) in enumerate(zip(*lengths.values(), strict=True)):
        q[entry, :, rows:], dout[entry, :, rows:] = bad, bad
        k[entry, :, keys:], v[entry, :, keys:] = bad, bad
    grads = agree(cupy, q, k, v, dout, **lengths)
    assert all(np.isfinite(to_host(x).astype(np.float32)).all() for x in grads[:3])
    assert not to_host(grads.dk)[0, :, 60:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["q", "k", "dout"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinities_of_shared_keys(cupy, rng, shared_keys, dtype, name, bad):
    arrays = inputs(rng, dtype, (2, 2, 3, 64), (2, 2, 150, 64))
    x = dict(zip(("q", "k", "v", "dout"), arrays, strict=True))[name]
    x[0, 0, 1, 3] = bad
    agree(cupy, *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", FORMS)
def test_strides_of_shared_keys(cupy, rng, shared_keys, dtype, form):
    forms = dict.fromkeys((*"qkv", "dout", "out", "lse"), form)
    arrays = inputs(rng, dtype, (2, 2, 3, 64), (2, 2, 140, 64))
    agree(cupy, *arrays, forms=forms, causal=True)


# --- float64 -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [*SIZES_OF_FLOAT64, (2, 1100, 32, 32), (1, 1500, 128, 128)]
)
def test_float64_whose_weights_are_kept_or_not(cupy, rng, few_heads, keeps, size):
    check_both(cupy, rng, "float64", size, batch=(3,))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SINGLE, "mask", "bias", "sinks", "alibi", "all"])
def test_options_of_float64_whose_weights_are_kept_or_not(
    cupy, rng, few_heads, keeps, name
):
    arrays = inputs(rng, "float64", (2, 4, 5, 64), (2, 4, 137, 64))
    many = {
        "mask": {"mask": rng.random((2, 4, 5, 137)) < 0.6},
        "bias": {"bias": rng.normal(size=(2, 4, 5, 137)), "need_dbias": True},
        "sinks": {"sinks": rng.normal(size=4)},
        "alibi": {"alibi_slopes": rng.random(4) * 0.1},
    }
    if name == "all":
        options = {n: x for option in many.values() for n, x in option.items()}
        options |= {"softcap": 4.0, "causal": True, "query_offset": 90}
    else:
        options = many.get(name) or OPTIONS[name]
    agree(cupy, *arrays, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "dout"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_of_float64_whose_weights_are_kept_or_not(
    cupy, rng, few_heads, keeps, name, bad
):
    """Where it is seen; and hidden behind a diagonal, a bias and lengths."""
    arrays = inputs(rng, "float64", (4, 2, 3, 32), (4, 2, 40, 32))
    x = dict(zip(("q", "k", "v", "dout"), arrays, strict=True))[name]
    x[0, 0, 1, 3] = bad
    agree(cupy, *arrays)
    agree(cupy, *arrays, causal=True)
    bias = rng.normal(size=(4, 2, 3, 40))
    bias[:, :, 1] = -np.inf
    agree(cupy, *arrays, bias=bias, need_dbias=True)
    lengths = {"query_lengths": [1, 3, 3, 2], "key_lengths": [40, 1, 0, 7]}
    agree(cupy, *arrays, **{n: np.array(x) for n, x in lengths.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 300), (3, 40)])
def test_weights_of_float64_sum_to_1(cupy, rng, few_heads, keeps, size):
    """Whatever lse was rounded to, unless it knows of more keys."""
    check_sums(cupy, rng, size)


@pytest.mark.gpu
def test_weights_of_shared_keys_sum_to_1(cupy, rng, shared_keys):
    check_sums(cupy, rng, (2, 300))


def check_sums(cupy, rng, size):
    queries, keys = size
    q, k = (3, 2, queries, 64), (3, 2, keys, 64)
    q, k, v, dout = (place(cupy, x) for x in inputs(rng, "float64", q, k))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    exact = cupyflash.attention_vjp(dout, q, k, v, out, lse)
    near = cupyflash.attention_vjp(dout, q, k, v, out, lse * (1 + 4e-16))
    half = cupyflash.attention_vjp(dout, q, k, v, out, lse + np.log(2))
    for a, b, c in zip(exact[:3], near[:3], half[:3], strict=True):
        largest = np.abs(to_host(a)).max()
        assert max_error(b, to_host(a)) <= 2e-15 * largest
        assert max_error(c, to_host(a) / 2) <= 1e-13 * largest
