"""The Hopper row of the gradient table: what it takes, and its numbers."""

import dataclasses
import functools
import math

import mask_views
import numpy as np
import pytest
import small_entries
import vjp_laws
from accuracy import to_host
from placing import FORMS, place
from test_attention_vjp import agree, gradients, inputs
from vjp_laws import poison

import cupyflash
from cupyflash._attention.gpu import gradient_layout, gradient_limits, samples
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.sm90.backward import HopperVjpKernel
from cupyflash._attention.vjp_problem import AttentionVjpProblem
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel

HOPPER = _device.device_of_arch("sm_90a")
(ROW,) = (row for row in ATTENTION_VJP_KERNELS if isinstance(row, HopperVjpKernel))
HALVES = ("float16", "bfloat16")
SEQLENS = (
    (1, 1),
    (1, 300),
    (63, 113),
    (113, 63),
    (65, 2049),
    (2049, 65),
    (128, 128),
    (1000, 1000),
    (300, 200),
)
BOUNDS = {
    "full": {},
    "causal": {"causal": True},
    "causal from the top": {"causal": True, "query_offset": 0},
    "ahead": {"causal": True, "query_offset": -40},
    "window": {"window": (70, 20)},
    "left window": {"window": (100, None), "causal": True},
}


def problem(dtype="bfloat16", head_dim=64, more=None, **options):
    forward = samples.made_up(dtype, head_dim)
    forward = dataclasses.replace(forward, **options)
    shape = (*forward.batch, forward.num_kv_heads, forward.seqlen_k, head_dim)
    return AttentionVjpProblem(forward, (), shape, shape, **more or {})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [2, 8, 33, 64, 65, 72, 96, 127, 128])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 5, "right": 3}])
def test_takes(dtype, head_dim, bounds):
    asked = problem(dtype, head_dim, **bounds)
    assert ROW.unsupported_reason(asked, HOPPER) is None
    row, refused = kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)
    assert row is ROW
    before = ["few_f64", "mma_few", "gemv", "tiny", "mma_short"]
    assert [name for name, _ in refused] == before


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (problem("float32"), HOPPER, "takes float16 and bfloat16, not float32"),
        (problem(head_dim=1), HOPPER, "head_dim 1 is not from 2"),
        (problem(head_dim=136), HOPPER, "head_dim 136 is not from 2 to 128"),
        (problem(no_tensor_map="q starts"), HOPPER, "q starts"),
        (problem(softcap=3.0), HOPPER, "has no softcap"),
        (problem(bias="float32", mask="bool"), HOPPER, "has no bias, mask"),
        (problem(scale=0.0), HOPPER, "takes scales from 1e-20"),
        (problem(), _device.device_of_arch("sm_80"), "needs sm_90a"),
        (problem(), _device.device_of_arch("sm_100"), "needs sm_90a"),
        (problem(), dataclasses.replace(HOPPER, nvrtc=(12, 8)), "NVRTC 12.9"),
        (problem(), dataclasses.replace(HOPPER, smem_optin=49152), "shared memory"),
        (problem(seqlen_k=0), HOPPER, "no keys"),
        (problem("float16", seqlen_q=(1 << 18) + 1), HOPPER, "262144 queries"),
        (problem(num_heads=1024, num_kv_heads=1), HOPPER, "at most 128 heads"),
        (problem(seqlen_k=1 << 30), HOPPER, "32 bits"),
        (problem(batch=(1 << 30,)), HOPPER, "32 bits"),
        (
            dataclasses.replace(problem(batch=(3,)), k_shape=(1, 8, 9, 64)),
            HOPPER,
            "shared by different entries",
        ),
    ],
)
def test_leaves_to_the_next_row(asked, device, reason):
    assert reason in ROW.unsupported_reason(asked, device)
    row, refused = kernel.select(ATTENTION_VJP_KERNELS, asked, device)
    assert row is not ROW
    assert "hopper" in dict(refused)


ALIBI = {"alibi_slopes": "float32"}


@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 5, "right": 3}])
def test_takes_alibi_alone(bounds):
    def refusal(head_dim, more=None, **options):
        asked = problem(head_dim=head_dim, more=more, **ALIBI, **bounds, **options)
        return ROW.unsupported_reason(asked, HOPPER)

    for head_dim in (2, 8, 33, 64, 65, 72, 96, 128):
        assert refusal(head_dim) is None
        assert "alibi_slopes" in refusal(head_dim, {"deterministic": True})
        assert "softcap" in refusal(head_dim, softcap=3.0)
        assert "sinks" in refusal(head_dim, sinks="float32")
    assert "alibi_slopes" in refusal(136)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_changes_one_kernel(head_dim):
    alibi, plain = (problem(head_dim=head_dim, **more).forward for more in (ALIBI, {}))
    for part in ("_rows", "_dq"):
        assert ROW.config(part, alibi, 1, 1) == ROW.config(part, plain, 1, 1)
    variant = ROW.config("", alibi, 1, 1).variant
    assert variant.entry == "attention_vjp_hopper"
    assert dict(variant.defines)["ALIBI_SLOPES_T"] == "float"


@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 5, "right": 3}])
def test_takes_a_mask_alone(bounds):
    def refusal(head_dim, more=None, **options):
        asked = problem(head_dim=head_dim, more=more, mask="bool", **bounds, **options)
        return ROW.unsupported_reason(asked, HOPPER)

    for head_dim in (2, 8, 33, 64, 65, 72, 96, 128):
        assert refusal(head_dim) is None
        assert "mask" in refusal(head_dim, {"deterministic": True})
        assert "mask" in refusal(head_dim, softcap=3.0)
        assert "mask" in refusal(head_dim, **ALIBI)
        assert "sinks" in refusal(head_dim, sinks="float32")
    assert "mask" in refusal(136)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_changes_one_kernel(head_dim):
    """Scores know nothing of it: it comes as bits."""
    masked, plain = (
        problem(head_dim=head_dim, **more).forward for more in ({"mask": "bool"}, {})
    )
    for part in ("_rows", "_dq"):
        assert ROW.config(part, masked, 1, 1) == ROW.config(part, plain, 1, 1)
    defines = dict(ROW.config("", masked, 1, 1).variant.defines)
    assert defines.pop("MASK_WORDS") == "1"
    assert defines == dict(ROW.config("", plain, 1, 1).variant.defines)


def test_the_order_of_shared_queries_is_left_to_the_next_row():
    asked = problem(batch=(3,), more={"deterministic": True})
    assert (
        ROW.unsupported_reason(
            dataclasses.replace(asked, q_shape=(3, 8, 9, 64)), HOPPER
        )
        is None
    )
    shared = dataclasses.replace(asked, q_shape=(1, 8, 9, 64))
    assert "in an order that varies" in ROW.unsupported_reason(shared, HOPPER)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("ordered", [False, True])
def test_grid_and_schedule_are_those_of_the_kernel(head_dim, right, ordered):
    forward = problem(head_dim=head_dim, right=right, seqlen_k=1500).forward
    config = ROW.config("", forward, 1, 1, ordered)
    assert config.block == (384,)
    assert config.variant.entry == "attention_vjp_hopper"
    assert dict(config.variant.defines)["ORDERED"] == str(int(ordered))
    schedule = ROW.schedule(forward, HOPPER, 3, 1, ordered)
    assert schedule["num_tiles"] == -(-1500 // 128)
    num_work_tiles = 3 * schedule["num_tiles"]
    num_work_tiles += schedule["num_split"] * (schedule["num_parts"] - 1)
    assert schedule["num_work_tiles"] == num_work_tiles


@pytest.mark.parametrize(("seqlen", "heads"), [(16384, 1), (8192, 2), (4096, 4)])
def test_long_heads_are_few_in_a_section(seqlen, heads):
    forward = problem(head_dim=128, right=0, seqlen_q=seqlen, seqlen_k=seqlen).forward
    device = dataclasses.replace(HOPPER, l2_bytes=50 << 20)
    assert ROW.schedule(forward, device, 10 * heads, 1, False)["section"] == heads
    most = device.l2_bytes * 4 // 5 // (1024 * seqlen)
    assert ROW.schedule(forward, device, most, 1, True)["section"] == most
    assert ROW.schedule(forward, device, 10 * most, 1, True)["section"] <= most


@pytest.mark.parametrize(("head_dim", "most"), [(64, 128), (128, 64)])
def test_tiles_of_one_block_of_queries_are_in_the_order_of_memory(head_dim, most):
    """Under a bound, too: none is longer. Unless they wait for each other."""
    for queries, ordered, in_order in (
        (1, False, True),
        (most, False, True),
        (most + 1, False, False),
        (most, True, False),
    ):
        forward = problem(head_dim=head_dim, right=0, seqlen_q=queries).forward
        section = ROW.schedule(forward, HOPPER, 64, 1, ordered)["section"]
        assert (section == 1) == in_order


@pytest.mark.parametrize(("seqlen", "right"), [(1024, 0), (4096, None)])
def test_heads_that_wait_for_each_other_are_fewer_in_a_section(seqlen, right):
    forward = problem(
        head_dim=128, right=right, seqlen_q=seqlen, seqlen_k=seqlen
    ).forward
    device = dataclasses.replace(HOPPER, l2_bytes=50 << 20)
    most = gradient_limits.in_cache(device, 1024 * seqlen, gradient_limits.CACHE_SHARE)
    half = -(-most // 2)
    assert ROW.schedule(forward, device, 10 * half, 1, True)["section"] == half


@pytest.mark.parametrize(
    ("num_work_tiles", "num_blocks", "split"),
    [
        (132, 64, (0, 0, 1)),
        (132 + 66, 64, (66, 32, 2)),  # halves, for all multiprocessors
        (
            132 + 68,
            64,
            (68, 43, 2),
        ),  # two of the shorter parts take as long as a longer
        (132 + 44, 64, (44, 22, 3)),
        (131, 64, (0, 0, 1)),
        (2048, 10, (0, 0, 1)),  # too short
        (4096, 64, (4, 8, 8)),  # no more parts than are fast to add up
        (30, 12, (30, 3, 4)),
        (1, 9, (1, 3, 3)),  # no part is empty
    ],
)
def test_work_tiles_that_are_left_over_are_cut(num_work_tiles, num_blocks, split):
    device = dataclasses.replace(HOPPER, num_sms=132)

    def split_of(ordered=False, **options):
        forward = problem(**options).forward
        return ROW.split(forward, device, num_work_tiles, num_blocks, ordered)

    for same in ({"head_dim": 64}, {"head_dim": 128}, ALIBI):
        assert split_of(**same) == split
    for other in ({"ordered": True}, {"right": 0}):
        assert split_of(**other) == (0, 0, 1)


def test_no_part_is_empty():
    device = dataclasses.replace(HOPPER, num_sms=132)
    forward = problem().forward
    for num_work_tiles in range(1, 133):
        for num_blocks in range(1, 99):
            num_split, part, parts = ROW.split(
                forward, device, num_work_tiles, num_blocks, False
            )
            if num_split:
                assert (parts - 1) * part < num_blocks <= parts * part


def test_the_parameters_are_whole_lines():
    assert gradient_limits.INPUTS.dtype().itemsize % 64 == 0


@pytest.mark.parametrize(
    ("dims", "columns"),
    [((64, 64), (64, 64)), ((65, 128), (72, 128)), ((2, 9), (8, 16))],
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rows_of_gradients_are_whole_vectors(dims, columns, layout):
    asked = problem(head_dim=dims[0], head_dim_v=dims[1], batch=(3,), layout=layout)
    shapes = {
        f"{n}_shape": (3, 5, 7, d)
        for n, d in zip("qkv", dims[:1] * 2 + dims[1:], strict=True)
    }
    asked = dataclasses.replace(asked, **shapes)
    wide = dataclasses.replace(asked, whole_vectors=True)
    for name, dim, width in (("q", dims[0], columns[0]), ("v", dims[1], columns[1])):
        assert asked.written_shape(name) == (3, 5, 7, dim)
        assert wide.written_shape(name) == (3, 5, 7, width)
        (view,) = (
            x
            for n, x in gradient_layout._gradient_views(wide).items()
            if n == f"d{name}"
        )
        inside = (7 * width, width) if layout == "bhsd" else (width, 7 * width)
        assert view.shape[-1] == dim
        assert view.strides == (35 * width, *inside, 1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel_of_rows_knows_whether_they_end_inside_a_vector(head_dim):
    for less, inside in ((0, False), (8, False), (1, True), (4, True)):
        asked = problem(head_dim=head_dim, head_dim_v=head_dim - less)
        row, _ = kernel.select(ATTENTION_VJP_KERNELS, asked, HOPPER)
        config = row.config("_rows", asked.forward, 1, 1)
        assert ("ENDS_INSIDE" in dict(config.variant.defines)) == inside


@pytest.mark.parametrize("dims", [(33, 33), (65, 128), (100, 65), (100, 104), (2, 7)])
def test_narrow_rows_come_from_wide_ones(dims, monkeypatch):
    """By the numbers of the plan, as copy/trim_rows.cu walks."""
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu import gradient_copies

    asked = problem(head_dim=dims[0], head_dim_v=dims[1])
    shapes = (2, 3, 37, dims[0]), (2, 1, 11, dims[0]), (2, 1, 11, dims[1])
    asked = dataclasses.replace(asked, whole_vectors=True)
    asked = dataclasses.replace(
        asked, **{f"{n}_shape": s for n, s in zip("qkv", shapes, strict=True)}
    )
    written = [
        (f"d{n}", s, asked.written_shape(n))
        for n, s in zip("qkv", shapes, strict=True)
        if s[-1] % 8
    ]
    numbers, launch = gradient_copies._trim(written, 2)
    pointers = bytes(6 * 8)
    (fields,) = np.frombuffer(pointers + numbers, gradient_copies.TRIM)
    word = {"short": 2, "unsigned": 4, "long": 8}[
        dict(launch.variant.defines)["WORD_T"].split()[-1]
    ]
    per_thread = 16 // word
    threads = np.arange(launch.grid[0] * launch.block[0])
    block, thread = threads // launch.block[0], threads % launch.block[0]
    matrix = sum(block >= fields["first_block"][n] for n in (1, 2))
    for n, (_, shape, wide) in enumerate(written):
        own = matrix == n
        first = (block[own] - fields["first_block"][n]) * launch.block[0] + thread[own]
        at = (first[:, None] * per_thread + np.arange(per_thread)).ravel()
        at = at[at < fields["num_words"][n]]
        assert sorted(at) == list(range(math.prod(shape) * 2 // word))
        given = np.arange(math.prod(wide), dtype=np.uint16).reshape(wide)
        words = given.ravel().view(f"u{word}")
        skipped = fields["pitch"][n] - fields["columns"][n]
        found = words[at + at // fields["columns"][n] * skipped].view(np.uint16)
        expected = given[..., : shape[-1]].ravel()
        np.testing.assert_array_equal(found, expected)


# --- numbers -------------------------------------------------------------------------


check = functools.partial(vjp_laws.check, "hopper")


@pytest.fixture(autouse=True)
def without_gemv(request, monkeypatch):
    """On a GPU, leave one query of each head of a group to this row, too."""
    if request.node.get_closest_marker("gpu"):
        small_entries.change_tables(
            monkeypatch, lambda rows: tuple(row for row in rows if row.name != "gemv")
        )


@pytest.fixture
def copies(monkeypatch):
    """Calls of any length may have copies for TMA."""
    vjp_laws.copy_always(monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_every_length(cupy, rng, dtype, name, seqlens, dims):
    check(cupy, rng, dtype, dims, seqlens=seqlens, batch=(1,), **BOUNDS[name])


def slopes(rng, *shape):
    """Some of them negative: farther keys weigh more."""
    return (rng.random(shape) * 0.3 - 0.1).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_alibi_of_every_length(cupy, rng, dtype, name, seqlens, dims):
    options = {"alibi_slopes": slopes(rng, 4), **BOUNDS[name]}
    check(cupy, rng, dtype, dims, (4, 2), seqlens, batch=(1,), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "dims", [(8, 8), (2, 3), (33, 40), (64, 16), (72, 72), (96, 40), (32, 128)]
)
def test_alibi_of_every_head_dim(cupy, rng, copies, dtype, dims):
    options = {"causal": True, "scale": 0.1, "alibi_slopes": slopes(rng, 4)}
    check(cupy, rng, dtype, dims, (4, 2), (300, 200), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 1, 6)])
@pytest.mark.parametrize("batch_k", [(2, 3), (1, 3), (2, 1)])
def test_alibi_of_entries_that_share_keys(cupy, rng, shape, batch_k):
    """A tile of keys meets heads with different slopes."""
    for causal in (False, True):
        options = {"batch": (2, 3), "batch_k": batch_k, "causal": causal}
        options["alibi_slopes"] = slopes(rng, *shape)
        for dims in ((96, 128), (64, 40)):
            check(cupy, rng, "bfloat16", dims, (6, 2), (150, 140), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [5, -70, 1 << 20])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_alibi_far_away(cupy, rng, offset, dtype, dims):
    options = {"alibi_slopes": slopes(rng, 2).astype(dtype) / 64}
    options |= {"query_offset": offset, "scale": -0.1}
    check(cupy, rng, "float16", dims, (2, 1), (100, 300), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [64, 128])
def test_alibi_of_what_is_not_finite(cupy, rng, dtype, bad, dim):
    given = slopes(rng, 2)
    vjp_laws.what_is_not_seen_never_leaks(
        cupy, rng, dtype, bad, dim, alibi_slopes=given
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_a_mask_of_every_length(cupy, rng, dtype, name, seqlens, dims):
    options = {"mask": rng.random((4, *seqlens)) < 0.7, **BOUNDS[name]}
    check(cupy, rng, dtype, dims, (4, 2), seqlens, batch=(1,), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), (6,), (1, 3, 1), (3, 6), (2, 1, 6), (2, 3, 1)])
@pytest.mark.parametrize("batch_k", [(2, 3), (1, 3), (2, 1)])
def test_a_mask_of_entries_that_share_keys(cupy, rng, shape, batch_k):
    """A tile of keys meets heads with different masks."""
    for causal in (False, True):
        options = {"batch": (2, 3), "batch_k": batch_k, "causal": causal}
        options["mask"] = rng.random((*shape, 150, 140)) < 0.7
        for dims in ((96, 128), (64, 40)):
            check(cupy, rng, "bfloat16", dims, (6, 2), (150, 140), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", mask_views.VIEWS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_of_any_strides(cupy, rng, head_dim, name):
    arrays = {n: (*x, head_dim) for n, x in mask_views.SHAPES.items()}
    mask = mask_views.view(rng, name)
    for bounds in ({}, {"window": (30, 60)}):
        agree(cupy, *inputs(rng, "float16", **arrays), mask=mask, **bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [5, -70, 1 << 20])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_mask_and_bounds_far_away(cupy, rng, offset, dim):
    mask = rng.random((100, 300)) < 0.7
    for bounds in ({}, {"causal": True}):
        options = {"query_offset": offset, "mask": mask, **bounds}
        check(cupy, rng, "float16", (dim, dim), (2, 1), (100, 300), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_mask_of_what_is_not_finite(cupy, rng, dtype, bad, dim):
    mask = np.ones((1, 1), bool)
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, dtype, bad, dim, mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_blocks_take_item_after_item_with_alibi(cupy, rng, dtype, causal, dims):
    options = {"batch": (4,), "causal": causal, "alibi_slopes": slopes(rng, 40)}
    check(cupy, rng, dtype, dims, (40, 40), (300, 260), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "dims", [(8, 8), (40, 64), (64, 16), (72, 72), (96, 40), (32, 128), (128, 64)]
)
def test_every_head_dim(cupy, rng, dtype, dims):
    check(cupy, rng, dtype, dims, seqlens=(150, 200), causal=True, scale=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seqlens", [(8300, 130), (8200, 300), (1030, 300), (1100, 700), (300, 700)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_tiles(cupy, rng, seqlens, causal, dim):
    """They are cut into parts, unless positions hide keys or dq has one order."""
    options = {"causal": causal, "query_offset": 0}
    check(cupy, rng, "bfloat16", (dim, dim), (2, 1), seqlens, batch=(1,), **options)
    shapes = {"q": (1, 2, seqlens[0], dim), "k": (1, 1, seqlens[1], dim)}
    arrays = inputs(rng, "bfloat16", **shapes)
    agree(cupy, *arrays, deterministic=True, **options)
    first, again = (gradients(cupy, *arrays, **options) for _ in range(2))
    for name in ("dk", "dv"):
        a, b = (to_host(getattr(x, name)) for x in (first, again))
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.fixture
def no_short(monkeypatch):
    """Leave few keys to this row, too."""
    small_entries.change_tables(
        monkeypatch, lambda rows: tuple(row for row in rows if row.name != "mma_short")
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("no_short")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40)])
@pytest.mark.parametrize("seqlen_k", [1, 77, 127, 128, 129])
@pytest.mark.parametrize("name", BOUNDS)
def test_one_tile_of_keys(cupy, rng, dims, seqlen_k, name):
    """Each query head has a dq of its own, and queries that see no key have zeros."""
    for layout, dtype in (("bhsd", "float16"), ("bshd", "bfloat16")):
        options = {"layout": layout, **BOUNDS[name]}
        check(cupy, rng, dtype, dims, (6, 2), (300, seqlen_k), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_one_tile_of_keys_is_cut_into_parts(cupy, rng, deterministic, dim):
    """All gradients have the same bits in every run."""
    arrays = inputs(rng, "float16", q=(1, 2, 2100, dim), k=(1, 1, 77, dim))
    first = agree(cupy, *arrays, deterministic=deterministic)
    again = gradients(cupy, *arrays, deterministic=deterministic)
    for a, b in zip(first[:3], again[:3], strict=True):
        a, b = to_host(a), to_host(b)
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_not_seen_of_one_tile(cupy, rng, bad, dim):
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, "float16", bad, dim, first=90)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1), (40, 1)])
def test_query_heads_share_key_heads(cupy, rng, layout, heads):
    for dims in ((64, 64), (128, 128)):
        for causal in (False, True):
            options = {"layout": layout, "causal": causal}
            check(cupy, rng, "bfloat16", dims, heads, (140, 270), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seqlens", [(70, 300), (300, 260), (520, 140)])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_take_item_after_item(cupy, rng, dtype, seqlens, causal):
    """More tiles of keys than a GPU has multiprocessors."""
    for dims in ((64, 64), (128, 128)):
        check(cupy, rng, dtype, dims, (40, 40), seqlens, batch=(4,), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "batch_k"), [pair for pair in vjp_laws.BATCHES if len(pair[0]) < 4]
)
def test_batch_axes(cupy, rng, batch, batch_k):
    shape = np.broadcast_shapes(batch, batch_k)
    q, k, v, dout = inputs(
        rng, "bfloat16", q=(*batch, 4, 150, 64), k=(*batch_k, 2, 140, 64)
    )
    assert dout.shape[:-3] == shape
    agree(cupy, q, k, v, dout, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.3, 1e-3, 2.0])
def test_scales(cupy, rng, scale):
    check(cupy, rng, "bfloat16", seqlens=(200, 100), scale=scale, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", [*FORMS, "heads"])
def test_strides(cupy, rng, dtype, form):
    vjp_laws.strides(cupy, rng, dtype, form, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_seen_never_leaks(cupy, rng, dtype, bad):
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, dtype, bad, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_where_it_is_seen(cupy, rng, dtype):
    vjp_laws.nan_stays_where_it_is_seen(cupy, rng, dtype, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1e-2, 30, 1000])
def test_gradients_of_every_size(cupy, rng, size):
    vjp_laws.gradients_of_every_size(cupy, rng, size, 64)


@pytest.mark.gpu
def test_a_call_can_be_captured(cupy, rng):
    vjp_laws.a_call_can_be_captured(cupy, rng, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72)])
def test_in_one_order(cupy, rng, dtype, name, dims):
    options = {**BOUNDS[name], "deterministic": True}
    for seqlens in ((300, 200), (65, 700), (1, 1), (700, 130)):
        shapes = {"q": (2, 4, seqlens[0], dims[0]), "k": (2, 2, seqlens[1], dims[0])}
        agree(cupy, *inputs(rng, dtype, **shapes, head_dim_v=dims[1]), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2), (1, 1), (48, 8)])
@pytest.mark.parametrize("bounds", [{}, {"causal": True}, {"window": (900, 100)}])
@pytest.mark.parametrize("dim", [64, 128])
def test_turns_have_the_same_bits_in_every_run(cupy, rng, heads, bounds, dim):
    """Long chains of tiles, and more tiles than multiprocessors, among other work."""
    q, k, v, dout = (
        place(cupy, x)
        for x in inputs(
            rng, "bfloat16", q=(1, heads[0], 2100, dim), k=(1, heads[1], 4000, dim)
        )
    )
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **bounds)

    def dq(deterministic=True):
        grads = cupyflash.attention_vjp(
            dout, q, k, v, out, lse, deterministic=deterministic, **bounds
        )
        return to_host(grads.dq)

    first = dq()
    beside = cupy.cuda.Stream(non_blocking=True)
    for n in range(6):
        poison(cupy, q.shape)
        with beside:
            cupy.ones((n + 1) << 22).sum()
        np.testing.assert_array_equal(dq().view(np.uint16), first.view(np.uint16))
    mixed = dq(deterministic=False).astype(np.float32)
    error = np.abs(first.astype(np.float32) - mixed).max()
    assert error <= 2**-6 * np.abs(mixed).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_turns_that_follow_at_once(cupy, rng, dim):
    """Many tiles of a head at a time, each waiting for the one before it."""
    shape = (1, 6, 8192, dim)
    q, k, v, dout = (place(cupy, x) for x in inputs(rng, "bfloat16", shape, shape))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, causal=True)

    def bits():
        grads = cupyflash.attention_vjp(
            dout, q, k, v, out, lse, causal=True, deterministic=True
        )
        return [x.view(np.uint16) for x in (grads.dq, grads.dk, grads.dv)]

    first = bits()
    differ = cupy.zeros(3, np.int64)
    for _ in range(100):
        for n, (a, b) in enumerate(zip(first, bits(), strict=True)):
            differ[n] += (a != b).sum()
    np.testing.assert_array_equal(differ.get(), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_kernels_follow_one_another(cupy, rng, dtype):
    """Each starts while the one before ends; what they make is as if they did not."""
    arrays = inputs(rng, dtype, q=(1, 4, 300, 64), k=(1, 4, 300, 64))
    q, k, v, dout = (place(cupy, x) for x in arrays)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)

    def chain(between):
        flow = dout
        for _ in range(8):
            grads = cupyflash.attention_vjp(flow, q, k, v, out, lse, deterministic=True)
            between()
            flow = grads.dq + grads.dk + grads.dv
        return to_host(flow).view(np.uint16)

    apart = chain(cupy.cuda.get_current_stream().synchronize)
    for _ in range(5):
        np.testing.assert_array_equal(chain(lambda: None), apart)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bits_in_every_run(cupy, rng, deterministic, causal):
    """On request those of dq too."""
    arrays = inputs(rng, "bfloat16", q=(2, 8, 700, 128), k=(2, 2, 900, 128))
    options = {"causal": causal, "deterministic": deterministic}
    first = gradients(cupy, *arrays, **options)
    for _ in range(3):
        again = gradients(cupy, *arrays, **options)
        for name in ("dq", "dk", "dv") if deterministic else ("dk", "dv"):
            a, b = (to_host(getattr(x, name)) for x in (first, again))
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


# --- rows that are no whole vectors --------------------------------------------------


ODD_DIMS = [(33, 33), (40, 33), (65, 65), (100, 100), (127, 127), (100, 65), (65, 128),
            (72, 127), (2, 3)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dims", ODD_DIMS)
def test_odd_head_dims(cupy, rng, copies, dtype, name, dims):
    for seqlens in ((150, 200), (300, 65), (130, 300)):
        check(cupy, rng, dtype, dims, (4, 2), seqlens, batch=(1,), **BOUNDS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(65, 65), (100, 100), (127, 40)])
@pytest.mark.parametrize("seqlens", [(300, 333), (1025, 700)])
def test_odd_heads_are_copied_where_queries_are_many(cupy, rng, dims, seqlens):
    check(cupy, rng, "bfloat16", dims, (4, 2), seqlens, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (40, 1)])
@pytest.mark.parametrize("dims", [(33, 33), (100, 65)])
def test_odd_heads_in_groups(cupy, rng, copies, layout, heads, dims):
    options = {"layout": layout, "causal": heads[0] == 6}
    check(cupy, rng, "bfloat16", dims, heads, (140, 270), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [((3,), (1,)), ((1,), (3,)), ((2, 3), (1, 3))])
@pytest.mark.parametrize("dim", [33, 100])
def test_odd_heads_that_entries_share(cupy, rng, copies, batch, dim):
    shapes = {"q": (*batch[0], 4, 150, dim), "k": (*batch[1], 2, 140, dim)}
    agree(cupy, *inputs(rng, "bfloat16", **shapes), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [{}, {"causal": True}])
@pytest.mark.parametrize("dims", [(33, 33), (65, 100)])
def test_odd_heads_in_one_order(cupy, rng, copies, bounds, dims):
    for seqlens in ((300, 200), (65, 700), (1, 1)):
        shapes = {"q": (2, 4, seqlens[0], dims[0]), "k": (2, 2, seqlens[1], dims[0])}
        arrays = inputs(rng, "bfloat16", **shapes, head_dim_v=dims[1])
        agree(cupy, *arrays, **bounds, deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", [*FORMS, "heads"])
@pytest.mark.parametrize("head_dim", [65, 100])
def test_odd_strides(cupy, rng, copies, dtype, form, head_dim):
    vjp_laws.strides(cupy, rng, dtype, form, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [33, 100])
def test_rows_of_vectors_with_nan_behind_them(cupy, rng, dtype, head_dim):
    """Nothing has to be copied, and nobody reads what is behind the last column."""
    columns = -(-head_dim // 8) * 8
    shapes = {"q": (2, 4, 150, columns), "k": (2, 2, 140, columns)}
    arrays = inputs(rng, dtype, **shapes)
    placed = []
    for x in arrays:
        x[..., head_dim:] = np.nan
        placed.append(place(cupy, x)[..., :head_dim])
    out, lse = cupyflash.attention(*placed[:3], return_lse=True, causal=True)
    arguments = (placed[3], *placed[:3], out, lse)
    told = cupyflash.explain("attention_vjp", *arguments, causal=True)
    assert told.kernel == "hopper"
    assert "copied first" not in told.details
    poison(cupy, arrays[0].shape)
    found = cupyflash.attention_vjp(*arguments, causal=True)
    plain = [x[..., :head_dim] for x in arrays]
    expected = agree(cupy, *plain, causal=True)
    for a, b in zip(found[:3], expected[:3], strict=True):
        a, b = to_host(a).astype(np.float64), to_host(b).astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [33, 100])
def test_what_is_not_seen_of_odd_heads(cupy, rng, copies, dtype, bad, head_dim):
    vjp_laws.what_is_not_seen_never_leaks(cupy, rng, dtype, bad, head_dim)
    vjp_laws.nan_stays_where_it_is_seen(cupy, rng, dtype, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-4, 1000])
def test_gradients_of_every_size_of_odd_heads(cupy, rng, copies, size):
    vjp_laws.gradients_of_every_size(cupy, rng, size, 65)


@pytest.mark.gpu
def test_a_call_of_odd_heads_can_be_captured(cupy, rng):
    vjp_laws.a_call_can_be_captured(cupy, rng, 100)
