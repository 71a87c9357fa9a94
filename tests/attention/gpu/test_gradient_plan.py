"""Plans of the gradient kernels, without a GPU: each term is added once, in its place.

The entries and axes that a plan hands to its kernels are gone through on the host, and
each kernel is handed as many axes as it is compiled for.
"""

import itertools
import math

import numpy as np
import planned
import pytest

from cupyflash._attention import vjp_problem
from cupyflash._attention.gpu import backward_registry, gradient_layout
from cupyflash._attention.gpu.simt import backward as simt_backward
from cupyflash._cuda import device as _device

CASES = {
    "plain": ((2, 4, 9, 8), (2, 4, 11, 8), None, None),
    "groups": ((2, 6, 9, 8), (2, 2, 11, 8), None, None),
    "matrices": ((9, 8), (11, 8), None, (9, 11)),
    "shared keys": ((5, 4, 300, 8), (1, 2, 11, 8), None, (11,)),
    "shared values": ((5, 4, 9, 8), (5, 2, 11, 8), (2, 11, 6), (4, 1, 1)),
    "shared queries": ((4, 9, 8), (3, 5, 2, 11, 8), None, (5, 1, 9, 1)),
    "crossed": ((1, 3, 4, 9, 8), (2, 1, 2, 11, 8), (2, 3, 2, 11, 6), (3, 4, 9, 11)),
    "middle axis": ((2, 3, 2, 4, 9, 8), (2, 1, 2, 1, 11, 8), None, (1, 1, 1, 4, 9, 1)),
    "few blocks": ((40, 8, 300, 8), (1, 1, 11, 8), None, (1, 1)),
    "few blocks of a bias": ((6, 8, 2000, 8), (6, 8, 2000, 8), None, (2000,)),
    "one row": ((3, 4, 1, 8), (3, 4, 50, 8), None, (50,)),
    "one key": ((3, 4, 50, 8), (3, 4, 1, 8), None, ()),
}


def offsets(axes):
    """Of all indices along `axes`: an array (indices, arrays)."""
    ranges = [range(n) for n in axes["size"]]
    places = np.array(list(itertools.product(*ranges)), np.int64)
    return places @ axes["stride"].T


def make_plan(q, k, v, bias):
    """(problem, steps) on a made-up device."""
    from cupyflash._attention.gpu.simt.backward_plan import portable_steps

    q, k, v = (np.zeros(s, np.float16) for s in (q, k, v or k))
    bias = None if bias is None else np.zeros(bias, np.float32)
    sinks = np.zeros(q.shape[-3] if q.ndim > 2 else 1)
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    out = np.zeros((*batch, *q.shape[-3:-1], v.shape[-1]), np.float16)
    lse = np.zeros(out.shape[:-1], np.float32)
    problem, operands = vjp_problem.attention_vjp(
        out, q, k, v, out, lse, bias, None, None, False, None, None, 0.0, sinks, None,
        None, None, "bhsd", "float32", "auto", None, bias is not None, True, False,
    )  # fmt: skip
    device = _device.device_of_arch("sm_90a")
    row = simt_backward.FALLBACK
    return problem, portable_steps(row, problem, operands, device)


def of_gradients(steps):
    """(arguments, grads_t) of the kernels that make dq, dk and dv, and dbias."""
    for config, arguments in steps.launches:
        if config.variant.entry.endswith(("_queries", "_keys", "_bias")):
            axes = int(dict(config.variant.defines)["BATCH_DIMS"])
            (grads,) = np.frombuffer(arguments[-1], gradient_layout.grads_dtype(axes))
            yield arguments, grads


def of_sums(steps):
    """sum_t of the kernels that add up terms."""
    for config, arguments in steps.launches:
        if config.variant.entry == "attention_vjp_sum":
            axes = int(dict(config.variant.defines)["AXES"])
            (fields,) = np.frombuffer(
                arguments[-1], gradient_layout.SUM.dtype(kAxes=axes)
            )
            yield fields


@pytest.mark.parametrize("case", CASES)
def test_every_entry_is_summed_once(case):
    pytest.importorskip("cupy")
    q, k, v, bias = CASES[case]
    problem, made = make_plan(q, k, v, bias)
    forward = problem.forward
    num_entries = math.prod(forward.batch) * forward.num_heads
    sums = of_sums(made)
    views = gradient_layout._gradient_views(problem)
    for arguments, grads in of_gradients(made):
        kept, summed = offsets(grads["kept"]), offsets(grads["summed"])[:, 0]
        assert len(kept) == grads["num_kept"]
        assert len(summed) == grads["num_summed"]
        entries = kept[:, :1] + summed
        assert sorted(entries.ravel()) == list(range(num_entries))
        for number, target in enumerate(arguments[6:-10]):
            name, is_terms = target.removesuffix("_terms"), target.endswith("_terms")
            places = [kept[:, 1 + number]]
            if is_terms:
                add = next(sums)
                moved = offsets(add["sums"]), offsets(add["terms"])[:, 0]
                terms = (moved[0][:, :1] + moved[1]).ravel()
                num_terms = made.scratch[target] // 4
                assert sorted(terms) == list(range(num_terms))
                to_out = np.empty(num_terms, np.int64)
                to_out[terms] = np.repeat(moved[0][:, 1], len(moved[1]))
                places = [to_out[places[0]]]
            # Where each entry's gradient begins, against NumPy's own broadcasting.
            view = views[name]
            flat = np.arange(math.prod(view.shape)).reshape(view.shape)
            heads = (
                np.repeat(flat, forward.num_heads // flat.shape[len(forward.batch)], -3)
                if flat.shape[-3]
                else flat
            )
            first = np.broadcast_to(
                heads[..., 0, 0], (*forward.batch, forward.num_heads)
            ).ravel()
            np.testing.assert_array_equal(
                first[entries], np.broadcast_to(places[0][:, None], entries.shape)
            )
    assert next(sums)["num_sums"] == math.prod(problem.sinks_shape)
    assert next(sums, None) is None


def steps_by(row, problem, operands):
    """What a kernel spec launches on a made-up device."""
    from cupyflash._attention.gpu import backward as attention_vjp_gpu

    device = _device.device_of_arch("sm_90a")
    assert row.unsupported_reason(problem, device) is None
    return attention_vjp_gpu._STEPS[type(row)](row, problem, operands, device)


def row_of(name):
    return next(
        row for row in backward_registry.ATTENTION_VJP_KERNELS if row.name == name
    )


@pytest.mark.parametrize("strided", ["lse", "q", "none"])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float16", "mma"),
        ("float32", "mma_split"),
        ("float32", "tiled"),
        ("float64", "tiled_f64"),
        ("float64", "tiled"),
    ],
)
def test_a_kernel_gets_the_axes_that_it_is_compiled_for(
    monkeypatch, dtype, name, strided
):
    """Two axes of the batch, which merge unless one array stands in the way."""
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu.gradient_layout import grads_dtype
    from cupyflash._attention.gpu.params import PARAMS

    def array(own, shape, dtype=dtype):
        wide = np.zeros((2, 4, *shape), dtype)
        return wide[:, :3] if own == strided else wide[:, :3].copy()

    q, k = array("q", (2, 96, 64)), array("k", (1, 70, 64))
    out, bias = array("out", (2, 96, 64)), np.zeros(70, "f4")
    lse = array("lse", (2, 96), "f8" if dtype == "float64" else "f4")
    problem, operands = vjp_problem.attention_vjp(
        out, q, k, k, out, lse, bias, None, None, False, None, None, 0.0, None, None,
        None, None, "bhsd", "float32", "auto", None, True, False, False,
    )  # fmt: skip
    axes = []
    for config, arguments in steps_by(row_of(name), problem, operands).launches:
        defines = dict(config.variant.defines)
        if "BATCH_DIMS" in defines:  # not a sum of terms
            axes.append(int(defines["BATCH_DIMS"]))
            types = [PARAMS.dtype(kBatchDims=axes[-1])]
            if "GRAD_T" in defines and not config.variant.entry.endswith("_dq"):
                types.append(grads_dtype(axes[-1]))
            packed = [len(x) for x in arguments if isinstance(x, bytes)]
            assert packed[-len(types) :] == [x.itemsize for x in types]
    assert len(axes) >= 4
    expected = {"lse": {1, 2}, "q": {2}, "none": {1}}[strided]
    # float16 takes the lse of the call throughout.
    assert set(axes) == ({2} if name == "mma" and strided == "lse" else expected)


@pytest.mark.parametrize("shared", ["k", "v", "both", "none"])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float16", "mma"), ("float32", "mma_split"), ("float64", "tiled_f64")],
)
def test_fallbacks_write_each_gradient_once(monkeypatch, dtype, name, shared):
    """No two entries that a block keeps write one place: there are no terms here."""
    pytest.importorskip("cupy")
    from cupyflash._attention.gpu.gradient_layout import grads_dtype

    def array(operand, *shape):
        batch = 1 if operand in {"both": "kv", "none": ""}.get(shared, shared) else 3
        return np.zeros((batch, *shape, 64), dtype)

    q, k, v = array("q", 4, 96), array("k", 2, 70), array("v", 2, 70)
    lse = np.zeros(q.shape[:-1], "f8" if dtype == "float64" else "f4")
    problem, operands = vjp_problem.attention_vjp(
        q, q, k, v, q, lse, None, None, None, False, None, None, 0.0, None, None,
        None, None, "bhsd", "float32", "auto", None, False, False, False,
    )  # fmt: skip
    made = [
        (config, arguments)
        for config, arguments in steps_by(row_of(name), problem, operands).launches
        if "REPAIRS" in dict(config.variant.defines)
    ]
    apart = [("dk", 0), (0, "dv")] if shared in "kv" else [("dk", "dv")]
    targets = [
        tuple(x for x in arguments[6:8] if x in ("dq", "dk", "dv", 0))
        for _, arguments in made
    ]
    assert targets == [("dq",), *apart]
    for config, arguments in made:
        axes = int(dict(config.variant.defines)["BATCH_DIMS"])
        (grads,) = np.frombuffer(arguments[-1], grads_dtype(axes))
        entries, *targets = offsets(grads["kept"]).T
        summed = offsets(grads["summed"])[:, 0]
        all_entries = (entries[:, None] + summed).ravel()
        assert sorted(all_entries) == list(range(3 * 4))
        for places in targets:
            assert len(set(places)) == len(places)


def hopper_steps(seqlens, batch_q=(2,), heads=(4, 2), **options):
    """The launches of sm_90a by entry, and all that they were planned with."""
    q = np.zeros((*batch_q, heads[0], seqlens[0], 64), "f2")
    k = np.zeros((2, heads[1], seqlens[1], 64), "f2")
    out = np.zeros((2, *q.shape[1:]), "f2")
    lse = np.zeros(out.shape[:-1], "f4")
    given = {"causal": False, "window": None, "deterministic": False, **options}
    problem, operands = vjp_problem.attention_vjp(
        out, q, k, k, out, lse, None, None, None, given["causal"], None,
        given["window"], 0.0, None, None, None, None, "bhsd", "float32", "auto", None,
        False, False, given["deterministic"],
    )  # fmt: skip
    with planned.device():
        steps = steps_by(row_of("hopper"), problem, operands)
    return {config.variant.entry: (config, x) for config, x in steps.launches}, steps


@pytest.mark.parametrize("seqlens", [(128, 128), (4096, 77), (1, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_tile_of_keys_needs_no_sums_of_dq(seqlens, deterministic):
    pytest.importorskip("cupy")
    for causal in (False, True):
        options = {"deterministic": deterministic, "causal": causal}
        launches, steps = hopper_steps(seqlens, **options)
        assert "attention_vjp_hopper_dq" not in launches
        config, arguments = launches["attention_vjp_hopper"]
        assert "dq" in arguments
        assert dict(config.variant.defines)["ORDERED"] == "0"
        # At most the numbers of parts that have finished.
        assert steps.scratch["sums"] <= 4 * 8 * 132


@pytest.mark.parametrize("more", [{"seqlens": (128, 129)}, {"batch_q": (1,)}])
def test_several_tiles_of_keys_or_entries_add_to_dq(more):
    pytest.importorskip("cupy")
    launches, steps = hopper_steps(**{"seqlens": (128, 128), **more})
    assert "dq" in launches["attention_vjp_hopper_dq"][1]
    assert "dq" not in launches["attention_vjp_hopper"][1]
    assert steps.scratch["sums"] >= 4 * 4 * 128 * 64


@pytest.mark.parametrize(
    ("seqlens", "options", "clears"),
    [
        ((4096, 77), {}, False),
        ((128, 128), {"causal": True}, False),
        ((300, 77), {"causal": True}, True),  # the first queries see no keys
        ((300, 77), {"causal": True, "window": 70}, True),
        ((128, 77), {"causal": True}, False),  # one block of queries
    ],
)
def test_dq_is_cleared_where_no_tile_stores_it(seqlens, options, clears):
    pytest.importorskip("cupy")
    launches, _ = hopper_steps(seqlens, **options)
    _, arguments = launches["attention_vjp_hopper_rows"]
    name, vectors = arguments[6:8]
    assert name == ("dq" if clears else "sums")
    if clears:
        assert vectors * 16 == 2 * 4 * seqlens[0] * 64 * 2


# --- what a card cannot round to -----------------------------------------------------


def old_card(operation, dtypes, **options):
    """Plan a call on sm_75, with arrays of these dtypes."""
    import fuzz

    shapes = {name: (1, 2, 20, 8) for name in ("q", "k", "v", "dout")}
    shapes |= {"sinks": (2,), "bias": (20, 20), "outs": (2, 1, 2, 20, 8)}
    shapes |= {"lses": (2, 1, 2, 20)}
    arrays = {name: np.zeros(shapes[name], dtype) for name, dtype in dtypes.items()}
    problem = fuzz.Problem(operation, 0, None, operation, arrays, {}, options)
    problem.notes["scores"] = (1, 2, 20, 20)
    with planned.device(_device.device_of_arch("sm_75")):
        return planned.plan(problem)


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_gradients_in_bfloat16_need_a_card_that_rounds_to_it(name):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    given = dict.fromkeys(("dout", "q", "k", "v"), np.float32) | {name: bfloat16}
    needs = {"need_dbias": False, "need_dsinks": False}
    assert old_card("attention_vjp", given, layout="bhsd", **needs).variants
    needs |= {f"need_d{name}": True}
    with pytest.raises(NotImplementedError, match=f"d{name} has the dtype of its in"):
        old_card("attention_vjp", given, layout="bhsd", **needs)
    given[name] = np.float16
    assert old_card("attention_vjp", given, layout="bhsd", **needs).variants


def test_merged_states_in_bfloat16_need_a_card_that_rounds_to_it():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    given = {"outs": bfloat16, "lses": np.float32}
    with pytest.raises(NotImplementedError, match="bfloat16 needs sm_80 or newer"):
        old_card("merge", given, axis=0)
    assert old_card("merge", given | {"outs": np.float16}, axis=0).variants
