"""What the host tells kernels of attention fits where it goes, however large a call is.

No card is asked: arrays take no memory, launches are noted and not made (made_up.py).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from accuracy import FLOATS, dtype_of
from made_up import Card, odd_shapes

from cupyflash._attention import problem as attention_problem
from cupyflash._attention import vjp_problem
from cupyflash._attention.gpu import config as attention_config
from cupyflash._attention.gpu.backward_registry import ATTENTION_VJP_KERNELS
from cupyflash._attention.gpu.forward_registry import ATTENTION_KERNELS
from cupyflash._attention.gpu.sm90.forward import HOPPER
from cupyflash._cuda import device as _device

ARCHS = ("sm_75", "sm_80", "sm_90a")
INT = 2**31 - 1

# Arguments of the checks, in their order.
_OPTIONS = {
    "bias": None, "mask": None, "scale": None, "causal": False, "query_offset": None,
    "window": None, "softcap": 0.0, "sinks": None, "alibi_slopes": None,
    "query_lengths": None, "key_lengths": None, "layout": "bhsd",
    "precision": "float32",
}  # fmt: skip


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(params=ARCHS)
def card(request, monkeypatch, cupy):
    return Card(monkeypatch, request.param, cupy)


def forward(card, q, k, v, method="auto", **options):
    """The problem and the operands of a call of attention, launched."""
    from cupyflash._attention.gpu import forward as attention_gpu

    call = {**_OPTIONS, **options}
    with card.allocates():
        problem, operands = attention_problem.attention(
            q, k, v, *call.values(), True, None, method
        )
        plan = attention_gpu.make_plan(problem, operands)
        attention_gpu.run(plan, problem, operands)
    return problem, operands


def backward(card, q, k, v, deterministic=False, **options):
    """The same of a call of attention_vjp; dout, out and lse are made up."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu

    call = {**_OPTIONS, **options}
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    rows = (*batch, *q.shape[-3:-1])
    out = card.array((*rows, v.shape[-1]), q.dtype)
    lse = card.array(rows, "float64" if q.dtype == np.float64 else "float32")
    needs = call["bias"] is not None, call["sinks"] is not None
    with card.allocates():
        problem, operands = vjp_problem.attention_vjp(
            out, q, k, v, out, lse, *call.values(), "auto", None, *needs, deterministic
        )
        plan = attention_vjp_gpu.make_plan(problem, operands)
        attention_vjp_gpu.run(plan, problem, operands)


# --- sections of memory between kernels ----------------------------------------------


def test_sections_begin_at_multiples_of_what_kernels_read(cupy):
    from cupyflash._cuda import launch_sequence

    for sizes in itertools.product((0, 1, 8, 24, 255, 256, 257, 4 * 12345), repeat=3):
        starts, size = launch_sequence.sections(*sizes)
        assert all(start % 128 == 0 for start in starts)
        ends = [start + n for start, n in zip(starts, sizes, strict=True)]
        # One behind the other, and none beyond the end.
        assert list(starts) == sorted(starts)
        assert all(a <= b for a, b in zip(ends, (*starts[1:], size), strict=True))


SPLIT_KEYS = (777, 800, 4096, 33_791)


@pytest.mark.parametrize("dtype", FLOATS)
def test_parts_of_the_keys_begin_at_vectors(card, dtype):
    """Kernels read results of parts, and tiles of split keys, 16 bytes at a time."""
    if dtype == "bfloat16" and card.device.cc < (8, 0):
        pytest.skip("no bfloat16")
    kind, split = dtype_of(dtype), 0
    for (batch, (heads, of_k), queries), keys in itertools.product(
        odd_shapes(), SPLIT_KEYS
    ):
        for dim in (64, 256):
            q = card.array((batch, heads, queries, dim), kind)
            k = card.array((batch, of_k, keys, dim), kind)
            card.launched.clear()
            card.given.clear()
            forward(card, q, k, k)
            found = list(card.scratch())
            for launch, pointer in found:
                assert pointer % 16 == 0, (launch.variant.source, batch, heads, queries)
            split += len(found) > 2  # beside out and lse
    # 16-bit results of parts would be rounded, but for those of row hopper.
    has_parts = dtype in ("float32", "float64") or card.device.arch == "sm_90"
    assert (split > 100) == has_parts


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_between_gradient_kernels_begins_at_vectors(card, dtype, deterministic):
    if dtype == "bfloat16" and card.device.cc < (8, 0):
        pytest.skip("no bfloat16")
    kind = dtype_of(dtype)
    for (batch, (heads, of_k), queries), dim in itertools.product(
        odd_shapes(), (40, 64, 128, 256)
    ):
        q = card.array((batch, heads, queries, dim), kind)
        k = card.array((batch, of_k, 137, dim), kind)
        card.launched.clear()
        card.given.clear()
        backward(card, q, k, k, deterministic)
        for launch, pointer in card.scratch():
            # Of found_t, some kernels are told of a number inside.
            assert pointer % 16 == 0 or (pointer % 256) in (8, 128, 132), (
                launch.variant.source
            )


# --- sizes ---------------------------------------------------------------------------

# (batch, heads, heads of k, queries, keys, head_dim, head_dim_v), and what of it is
# beyond 32 bits.
BIG = 2**31
EXTREME = {
    "batch": (BIG, 1, 1, 1, 128, 8, 8),
    "batch, half": (BIG // 2, 1, 1, 1, 128, 8, 8),
    "batch, nearly half": (BIG // 2 - 100, 1, 1, 1, 128, 8, 8),
    "batch, 2^32": (2 * BIG, 1, 1, 1, 70, 8, 8),
    "batch of 64 queries": (BIG // 64 + 1, 1, 1, 64, 64, 16, 16),
    "batch of 65 queries": (BIG // 64, 1, 1, 65, 65, 16, 16),
    "heads": (1, BIG, BIG, 1, 3, 4, 4),
    "heads of a group": (1, BIG + 64, 64, 1, 128, 8, 8),
    "heads, 64 of a group": (2, BIG, BIG // 64, 1, 128, 8, 8),
    "queries": (1, 1, 1, BIG, 128, 8, 8),
    "queries, 2^32": (1, 2, 1, 2 * BIG + 1, 128, 8, 8),
    "queries, half": (1, 1, 1, BIG // 2 - 1, 128, 64, 64),
    "keys": (1, 1, 1, 64, BIG, 8, 8),
    "keys, 2^32": (1, 1, 1, 64, 2 * BIG + 1, 8, 8),
    "keys, half": (1, 1, 1, 64, BIG // 2 - 1, 64, 64),
    "keys of a decode step": (1, 8, 1, 1, BIG, 64, 64),
    "queries and keys": (1, 1, 1, BIG, BIG, 1, 1),
    "head_dim": (1, 1, 1, 2, 3, BIG, 8),
    "head_dim_v": (1, 1, 1, 2, 3, 8, BIG),
    "head_dims": (1, 1, 1, 2, 3, BIG + 1, 2 * BIG + 1),
    "wide heads": (1, 1, 1, 64, BIG, 320, 320),
    "bytes of a head": (1, 1, 1, 64, 2**25, 128, 128),
    "elements": (3, 5, 1, 2**24 + 1, 2**24 + 1, 256, 256),
}
WAYS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (63, 0)},
    "far": {"query_offset": 2**61, "causal": True},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_sizes_are_launched(card, dtype, name):
    """Some row takes them ("auto" never raises), and all it is told fits."""
    if dtype == "bfloat16" and card.device.cc < (8, 0):
        pytest.skip("no bfloat16")
    batch, heads, of_k, queries, keys, dim, dim_v = EXTREME[name]
    kind = dtype_of(dtype)
    q = card.array((batch, heads, queries, dim), kind)
    for shift, own in itertools.product((0, q.itemsize), (batch, 1)):
        k = card.array((own, of_k, keys, dim), kind, shift)
        v = card.array((own, of_k, keys, dim_v), kind, shift)
        for options in WAYS.values():
            forward(card, q, k, v, **options)
            forward(card, q, k, v, method="online", **options)
        sinks = card.array((heads,), "float32")
        lengths = card.array((batch,), "int64")
        forward(card, q, k, v, sinks=sinks, key_lengths=lengths)
    card.check_launches()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", EXTREME)
def test_gradients_of_extreme_sizes_are_launched(card, dtype, name):
    if dtype == "bfloat16" and card.device.cc < (8, 0):
        pytest.skip("no bfloat16")
    batch, heads, of_k, queries, keys, dim, dim_v = EXTREME[name]
    kind = dtype_of(dtype)
    q = card.array((batch, heads, queries, dim), kind)
    for shift, own, ordered in ((0, batch, False), (0, 1, True), (2, batch, True)):
        k = card.array((own, of_k, keys, dim), kind, shift * q.itemsize)
        v = card.array((own, of_k, keys, dim_v), kind, shift * q.itemsize)
        for options in WAYS.values():
            backward(card, q, k, v, ordered, **options)
        sinks = card.array((heads,), "float32")
        backward(card, q, k, v, ordered, sinks=sinks)
    card.check_launches()


def test_rows_take_what_is_just_below_a_limit_and_no_more(cupy):
    """A limit is neither passed nor far from what a row can count."""
    device = _device.device_of_arch("sm_90a")
    sizes = dict(num_heads=1, num_kv_heads=1, seqlen_q=1, seqlen_k=128, head_dim=8)
    few = attention_problem.AttentionProblem(
        "cupy", (1,), **sizes, head_dim_v=8, dtype="float16", scale=1.0
    )
    assert HOPPER.unsupported_reason(few, device) is None
    for batch in ((1 << 30) - (1 << 16) + 1, (1 << 30) - 100, 1 << 30, 1 << 33):
        reason = HOPPER.unsupported_reason(replace(few, batch=(batch,)), device)
        assert "in 32 bits, up to 1073676288, and there are" in reason
    most = replace(few, batch=((1 << 30) - (1 << 16),))
    assert HOPPER.unsupported_reason(most, device) is None
    fields = HOPPER.schedule(most, device)
    grid = HOPPER.configs(most, 1, device)[0].grid[0]
    # kCareful of sm90/nonfinite_values.cuh; each block asks for two work tiles beyond
    # the last.
    assert fields["num_work_tiles"] + 3 * grid < 1 << 30


# --- products of `int` in kernels ----------------------------------------------------

# For each row what kernels multiply, or add up, in 32 bits: where, the expression, and
# its largest value for a problem that the row takes.
FORWARD_PRODUCTS = {
    "gemv": (
        ("simt/gemv_forward.cu: first + kStep", lambda p, d: p.seqlen_k + 2 * 1024),
        ("score/score.cuh: low <= col - row", lambda p, d: p.seqlen_k + 1024),
    ),
    "tiny": (),  # all is index_t
    "mma_short": (
        ("sm80/short_forward.cu: group * tiles",
         lambda p, d: p.group_size * -(-p.seqlen_q // 16) + 4),
        ("sm80/short.cuh: bounds.high + row", lambda p, d: (1 << 30) + p.seqlen_q + 16),
    ),
    "hopper": (
        ("sm90/tile_scheduler.cuh: number in section * num_blocks",
         lambda p, d: _hopper(p, d)["section"] * _hopper(p, d)["num_blocks"]),
        ("sm90/tile_scheduler.cuh: heads * kPack",
         lambda p, d: attention_config.num_heads(p)),
        ("sm90/tile_scheduler.cuh: at.tile * kBlockM + kBlockM",
         lambda p, d: p.seqlen_q * HOPPER.pack(p) + 2 * 256),
        ("sm90/tile_scheduler.cuh: tile * kBlockN + kBlockN",
         lambda p, d: p.seqlen_k + 256),
        # Positions are clamped to 2^30 (mask_bounds() of score/score.cuh).
        ("sm90/tile_scheduler.cuh: i_last + bounds.high",
         lambda p, d: p.seqlen_q + (1 << 30)),
        ("sm90/forward.cu: work_tile + gridDim.x | kCareful",
         lambda p, d: (_hopper(p, d)["num_work_tiles"] + 3 * d.num_sms) * 2),
        ("sm90/nonfinite_values.cuh: seqlen_q * kPack",
         lambda p, d: p.seqlen_q * HOPPER.pack(p)),
    ),
    "mma_few": (
        ("sm80/few_forward.cu: j0 + piece / kPieces * kBlockN + kDepthV",
         lambda p, d: p.seqlen_k + 4 * 64),
    ),
    "mma": (
        ("sm80/forward.cu: turn * gridDim.x + blockIdx.x", lambda p, d: 2 * p.seqlen_q),
        ("sm80/forward.cu: low + i0 + kBlockM",
         lambda p, d: p.seqlen_q + (1 << 30) + 256),
        ("sm80/forward.cu: j0 + 2 * kBlockN", lambda p, d: p.seqlen_k + 4 * 128),
        # What is subtracted is not negative, and neither is what it is subtracted from.
        ("sm80/forward.cu: block.low + row - j0",
         lambda p, d: (1 << 30) + max(p.seqlen_q, p.seqlen_k) + 256),
    ),
    "hopper_wide": (
        ("sm90/forward_wide.cu: coordinates of keys", lambda p, d: p.seqlen_k + 64),
        ("sm90/forward_wide.cu: coordinates of heads, batch",
         lambda p, d: attention_config.num_heads(p)),
    ),
    "short_f64": (
        ("fp64/short_forward.cu: group_size * tiles",
         lambda p, d: p.group_size * -(-p.seqlen_q // 16) + 64 + 8),
        ("fp64/short_forward.cu: tile * kWarpRows", lambda p, d: p.seqlen_q + 16),
    ),
    "tiled_f64": (
        ("fp64/forward.cu: 2 * tiles of keys", lambda p, d: 2 * -(-p.seqlen_k // 16)),
        ("fp64/forward.cu: seen.last - first", lambda p, d: p.seqlen_k + 128),
        ("fp64/forward.cu: num_cols", lambda p, d: p.head_dim + p.head_dim_v),
    ),
    "tiled": (  # all else is index_t
        ("simt/tiled.cu: column", lambda p, d: max(p.head_dim, p.head_dim_v) + 768),
    ),
    "online": (),
    "safe": (),
    "naive": (),
}  # fmt: skip


def _hopper(problem, device):
    return HOPPER.schedule(problem, device)


VJP_PRODUCTS = {
    "gemv": (
        ("simt/gemv_backward.cu: first + kStep", lambda p: p.seqlen_k + 2 * 1024),
        ("simt/gemv_backward.cu: key * kQueries + i",
         lambda p: (p.seqlen_k + 1) * p.seqlen_q),
    ),
    "tiny": (),
    "mma_short": (
        ("sm80/short.cuh: bounds.high + row", lambda p: (1 << 30) + p.seqlen_q + 16),
    ),
    "hopper": (
        ("sm90/backward_preprocess.cu: block * num_blocks", lambda p: _blocks(p, 64)),
        ("sm90/backward.cu: number + gridDim.x",
         lambda p: _tiles(p, 64) + 8 * 132 * 132),
        ("sm90/backward.cu: tile * kBlockN", lambda p: p.seqlen_k + 256),
        ("sm90/backward.cu: num_blocks * num_summed", lambda p: _blocks(p, 64)),
        ("sm90/backward.cu: diagonal + params_now.right + 1",
         lambda p: p.seqlen_q + (1 << 30)),
    ),
    "hopper_wide": (
        ("sm90/backward_wide.cuh: section * num_tiles", lambda p: _tiles(p, 64)),
        ("sm90/backward_wide.cuh: section * num_tiles of queries",
         lambda p: _blocks(p, 64)),
        ("sm90/backward_wide.cuh: gridDim.x + number",
         lambda p: max(_tiles(p, 64), _blocks(p, 64)) + 3 * 132),
        ("sm90/backward_wide_dkdv.cu: tile.tile * kBlockN", lambda p: p.seqlen_k + 64),
        ("sm90/backward_wide_dkdv.cu: blocks of queries of summed entries",
         lambda p: _blocks(p, 64)),
    ),
    "mma": (
        ("sm80/backward.cu: tile * kBlockN + kBlockN", lambda p: p.seqlen_k + 256),
        ("sm80/backward_preprocess.cu: tile * kRows + row", lambda p: p.seqlen_q + 256),
        ("sm80/backward.cuh: position - position",
         lambda p: (1 << 30) + max(p.seqlen_q, p.seqlen_k)),
    ),
    "mma_split": (
        ("sm80/fp32_backward.cuh: granules_of", lambda p: p.seqlen_q // 32 + 4),
        ("sm80/fp32_backward_dq.cu: granules of keys * kGranules",
         lambda p: -(-p.seqlen_k // 32) * 4),
        ("sm80/fp32_backward_dkdv.cu: view.first + kGranule",
         lambda p: p.seqlen_q + 128),
        ("sm80/fp32_backward_dkdv.cu: position - position",
         lambda p: (1 << 30) + max(p.seqlen_q, p.seqlen_k)),
    ),
    "short_f64": (
        ("fp64/short_backward.cu: units * kBlockM",
         lambda p: attention_config.num_heads(p) * (p.seqlen_q + 64)),
        ("fp64/short_backward.cu: unit + kTeams",
         lambda p: attention_config.num_heads(p) * -(-p.seqlen_q // 16) + 8),
        ("fp64/short_backward_wide.cu: unit * kWarpRows",
         lambda p: attention_config.num_heads(p) * (p.seqlen_q + 16)),
    ),
    "mma_few": (
        ("sm80/few_backward.cu: col - row", lambda p: (1 << 30) + p.seqlen_q + 16),
        ("sm80/few_backward.cu: kBlockN * tiles of a block",
         lambda p: p.seqlen_q * 32),
    ),
    "few_f64": (
        ("fp64/few_backward.cuh: tile * kKeys", lambda p: p.seqlen_k + 9 * 16),
        ("fp64/few_backward.cu: queries * kDim", lambda p: p.seqlen_q * 256),
    ),
    "sections_f64": (
        ("fp64/products.cuh: (step + kStages) * kStep",
         lambda p: max(p.seqlen_q, p.seqlen_k) + 5 * 16),
        ("fp64/sections_scores.cu: steps + steps_v",
         lambda p: p.head_dim + p.head_dim_v + 2 * 16),
    ),
    "tiled_f64": (
        ("fp64/backward.cuh: tile * kBlockN + kBlockN",
         lambda p: max(p.seqlen_q, p.seqlen_k) + 2 * 64),
        ("fp64/backward_dkdv.cu: queries.last - first", lambda p: p.seqlen_q + 64),
    ),
    "tiled": (  # of longer columns column_t is index_t
        ("simt/tile.cuh: c0 + kChunk", lambda p: _columns_of_int(p) + 2 * 128),
    ),
}  # fmt: skip


def _blocks(p, rows):
    return attention_config.num_heads(p) * -(-p.seqlen_q // rows)


def _tiles(p, rows):
    return attention_config.num_heads(p) * -(-p.seqlen_k // rows)


def _columns_of_int(p):
    widest = max(p.head_dim, p.head_dim_v)
    long_axes = dict(attention_config.defines(p, 1, 128)).get("LONG_AXES")
    return 0 if long_axes else widest


# Sizes round the bounds of all rows.
AXES = (1, 65, 2**18, 2**29 - 1, 2**29, 2**30 - 2**16, 2**30, 2**32)


def problems(dtype):
    """Problems with one or two axes of such sizes."""
    for dim in (64, 256, 320, 2**31):
        for batch, heads, queries, keys in itertools.product(
            (1, 2**24), (1, 2**20, 2**31), AXES, AXES
        ):
            for sides in ({}, {"left": 63, "right": 0}):
                yield attention_problem.AttentionProblem(
                    "cupy", (batch,), heads, heads, queries, keys, dim, dim, dtype,
                    1.0, **sides,
                )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_forward_kernels_are_ints(arch, dtype):
    device = _device.device_of_arch(arch)
    assert {row.name for row in ATTENTION_KERNELS} == set(FORWARD_PRODUCTS)
    taken = dict.fromkeys(FORWARD_PRODUCTS, 0)
    for problem in problems(dtype):
        for row in ATTENTION_KERNELS:
            if row.unsupported_reason(problem, device) is not None:
                continue
            taken[row.name] += 1
            for where, product in FORWARD_PRODUCTS[row.name]:
                most = 2 * INT + 1 if "section" in where else INT
                assert product(problem, device) <= most, (row.name, where, problem)
    if not (dtype == "bfloat16" and device.cc < (8, 0)):
        assert min(taken["online"], taken["naive"]) > 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_gradient_kernels_are_ints(arch, dtype):
    device = _device.device_of_arch(arch)
    assert {row.name for row in ATTENTION_VJP_KERNELS} == set(VJP_PRODUCTS)
    for problem in problems(dtype):
        shape = (*problem.batch, problem.num_heads)
        q_shape = (*shape, problem.seqlen_q, problem.head_dim)
        k_shape = (*shape, problem.seqlen_k, problem.head_dim)
        for deterministic in (False, True):
            gradient = vjp_problem.AttentionVjpProblem(
                problem, q_shape, k_shape, k_shape, deterministic=deterministic
            )
            for row in ATTENTION_VJP_KERNELS:
                if row.unsupported_reason(gradient, device) is not None:
                    continue
                for where, product in VJP_PRODUCTS[row.name]:
                    assert product(problem) <= INT, (row.name, where, problem)


def test_merges_of_many_parts_are_launched(card, monkeypatch):
    from cupyflash._attention.gpu import combine
    from cupyflash._cuda import plan_cache

    # A plan that is remembered launches on the card that it was made for.
    monkeypatch.setattr(combine, "_plans", plan_cache.PlanCache())

    for parts, rows, dim in (
        (BIG, 1, 1), (2, BIG, 1), (2, 2 * BIG, 8), (3, 5, BIG), (BIG + 1, 3, 64),
    ):  # fmt: skip
        outs = card.array((parts, rows, dim), "float16")
        lses = card.array((parts, rows), "float32")
        with card.allocates():
            combine._merge(*attention_problem.merge(outs, lses, 0, None))
    assert len(card.launched) == 5
    card.check_launches()
