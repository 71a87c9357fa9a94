"""Arguments of attention: what is refused, in which words, and what is kept."""

import numpy as np
import pytest
from accuracy import FLOATS, dtype_of
from placing import place

import cupyflash
from cupyflash._attention import problem as attention_problem


def arrays(xp, **shapes):
    """Small q, k and v, of other shapes where named."""
    default = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6)}
    return {n: xp.ones(s, np.float32) for n, s in {**default, **shapes}.items()}


def value(make, xp):
    return make(xp) if callable(make) else make


# (changes to the arguments, error, message)
REFUSALS = {
    "layout": (
        {"layout": "sbhd"},
        ValueError,
        "layout must be one of 'bhsd', 'bshd', got 'sbhd'",
    ),
    "precision": (
        {"precision": "half"},
        ValueError,
        "precision must be one of 'float32', 'tf32', got 'half'",
    ),
    "method": (
        {"method": "fused"},
        ValueError,
        "method must be one of 'auto', .*, got 'fused'",
    ),
    "causal": ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    "window of three": (
        {"window": (1, 2, 3)},
        ValueError,
        r"window must be an int or \(left, right\), got \(1, 2, 3\)",
    ),
    "window of a float": (
        {"window": 1.5},
        TypeError,
        r"window must be an int or \(left, right\).*, got float",
    ),
    "window of a bool": (
        {"window": (True, 0)},
        TypeError,
        r"window must be an int or \(left, right\).*, got bool",
    ),
    "window below zero": (
        {"window": (-1, 0)},
        ValueError,
        "window counts keys on each side and must be >= 0, got -1; None is unbounded",
    ),
    "softcap below zero": (
        {"softcap": -1.0},
        ValueError,
        r"softcap must be finite and >= 0 \(0 is off\), got -1.0",
    ),
    "softcap infinite": (
        {"softcap": np.inf},
        ValueError,
        r"softcap must be finite and >= 0 \(0 is off\), got inf",
    ),
    "softcap nan": (
        {"softcap": np.nan},
        ValueError,
        "softcap must be finite and >= 0",
    ),
    "softcap that float32 does not have": (
        {"softcap": 1e-46},
        ValueError,
        r"softcap must be 0 \(off\) or from 1.18e-38 to 3.4e\+38 for float32, got 1e-",
    ),
    "softcap beyond float32": (
        {"softcap": 1e39},
        ValueError,
        r"softcap must be 0 \(off\) or from .* for float32, got 1e\+39",
    ),
    "softcap of a string": (
        {"softcap": "1"},
        TypeError,
        "softcap must be a real number, got a str",
    ),
    "scale of a string": (
        {"scale": "1"},
        TypeError,
        "scale must be a real number, got a str",
    ),
    "scale nan": ({"scale": np.nan}, ValueError, "scale must be finite, got nan"),
    "return_lse of a string": (
        {"return_lse": "no"},
        TypeError,
        "return_lse must be a bool, got str",
    ),
    "scale beyond float64": (
        {"scale": 10**400},
        ValueError,
        "scale is too large for float64",
    ),
    "layout of several": (
        {"layout": np.array(["bhsd", "bshd"])},
        ValueError,
        "layout must be one of 'bhsd', 'bshd', got array",
    ),
    "no q": (
        {"q": None},
        TypeError,
        "q must be an array, got None; it is not optional",
    ),
    "no v": ({"v": None}, TypeError, "v must be an array, got None"),
    "q of uneven rows": (
        {"q": [[1.0, 2.0], [3.0]]},
        ValueError,
        "q cannot be made an array: .*inhomogeneous shape",
    ),
    "a masked q": (
        {"q": np.ma.masked_array([[1.0, 2.0]], mask=[[True, False]])},
        TypeError,
        r"q is a masked array, whose mask would be lost; pass q.filled\(\) with",
    ),
    "query_offset of a float": (
        {"query_offset": 1.0},
        TypeError,
        "query_offset must be None, an int or an integer array, got float",
    ),
    "query_offset of a bool": (
        {"query_offset": True},
        TypeError,
        "query_offset must be None, an int or an integer array, got bool",
    ),
    "query_offset of a float array": (
        {"query_offset": lambda xp: xp.zeros(2)},
        TypeError,
        "query_offset must hold integers, got float64",
    ),
    "query_offset of another batch": (
        {"query_offset": lambda xp: xp.zeros(3, np.int32)},
        ValueError,
        r"query_offset has shape \(3,\), .* the batch axes = \(2,\)",
    ),
    "q of integers": (
        {"q": lambda xp: xp.ones((2, 4, 3, 8), np.int32)},
        TypeError,
        r"q must be one of float16, .*, got int32; .* (numpy|cupy).asarray\(q, ",
    ),
    "v of complex": (
        {"v": lambda xp: xp.ones((2, 2, 5, 6), np.complex64)},
        TypeError,
        r"v must be one of float16, .*, got complex64",
    ),
    "dtypes mixed": (
        {"k": lambda xp: xp.ones((2, 2, 5, 8), np.float16)},
        TypeError,
        "q, k and v must have the same dtype, got q float32, k float16, v float32",
    ),
    "tf32 of float64": (
        {n: (lambda xp: xp.ones((2, 2))) for n in "qkv"} | {"precision": "tf32"},
        ValueError,
        "precision='tf32' is for float32 inputs, got float64",
    ),
    "q of one axis": (
        {"q": lambda xp: xp.ones(8, np.float32)},
        ValueError,
        r"q must have at least 2 axes \(seqlen, head_dim\), got \(8,\)",
    ),
    "head_dim zero": (
        {"v": lambda xp: xp.ones((2, 2, 5, 0), np.float32)},
        ValueError,
        r"v has shape \(2, 2, 5, 0\); its last axis \(head_dim\) must be >= 1",
    ),
    "head_dim of q and k": (
        {"q": lambda xp: xp.ones((2, 4, 3, 7), np.float32)},
        ValueError,
        "q and k must have the same head_dim, got 7 and 8",
    ),
    "seqlen of k and v": (
        {"v": lambda xp: xp.ones((2, 2, 4, 6), np.float32)},
        ValueError,
        "k and v must have the same seqlen, got 5 and 4",
    ),
    "heads of k and v": (
        {"v": lambda xp: xp.ones((2, 1, 5, 6), np.float32)},
        ValueError,
        "k and v must have the same number of heads, got 2 and 1",
    ),
    "heads do not divide": (
        {"q": lambda xp: xp.ones((2, 3, 3, 8), np.float32)},
        ValueError,
        r"the heads of k and v must divide those of q, got 2 and 3 \(layout 'bhsd'\)",
    ),
    "no heads of k": (
        {
            "k": lambda xp: xp.ones((2, 0, 5, 8), np.float32),
            "v": lambda xp: xp.ones((2, 0, 5, 6), np.float32),
        },
        ValueError,
        "the heads of k and v must divide those of q, got 0 and 4",
    ),
    "batch": (
        {"q": lambda xp: xp.ones((3, 4, 3, 8), np.float32)},
        ValueError,
        r"the batch axes of q, k and v do not broadcast: \(3,\), \(2,\), \(2,\)",
    ),
    "bias of integers": (
        {"bias": lambda xp: xp.ones((3, 5), np.int64)},
        TypeError,
        "bias must be one of float16, .*, got int64",
    ),
    "bias of another shape": (
        {"bias": lambda xp: xp.ones((4, 3), np.float32)},
        ValueError,
        r"bias has shape \(4, 3\), which does not broadcast to .* = \(2, 4, 3, 5\)",
    ),
    "bias of too many axes": (
        {"bias": lambda xp: xp.ones((1, 1, 1, 1, 5), np.float32)},
        ValueError,
        "bias has shape .* which does not broadcast",
    ),
    "mask of floats": (
        {"mask": lambda xp: xp.ones((3, 5))},
        TypeError,
        r"mask must be bool \(True = attend\), got float64; an additive mask goes",
    ),
    "mask of integers": (
        {"mask": lambda xp: xp.ones((3, 5), xp.int64)},
        TypeError,
        r"mask must be bool .*, got int64; write mask != 0 if 1 means attend",
    ),
    "mask of another shape": (
        {"mask": lambda xp: xp.ones((2, 5), bool)},
        ValueError,
        r"mask has shape \(2, 5\), which does not broadcast",
    ),
    "sinks of integers": (
        {"sinks": lambda xp: xp.ones(4, int)},
        TypeError,
        "sinks must be one of float16, .*, got int64",
    ),
    "sinks of another shape": (
        {"sinks": lambda xp: xp.ones(2, np.float32)},
        ValueError,
        r"sinks has shape \(2,\), which does not broadcast to \(num_heads,\) = \(4,\)",
    ),
    "alibi_slopes of bool": (
        {"alibi_slopes": lambda xp: xp.ones(4, bool)},
        TypeError,
        "alibi_slopes must be one of float16, .*, got bool",
    ),
    "alibi_slopes of another shape": (
        {"alibi_slopes": lambda xp: xp.ones((3, 4), np.float32)},
        ValueError,
        r"alibi_slopes has shape \(3, 4\), .* \(..., num_heads\) = \(2, 4\)",
    ),
    "query_lengths of floats": (
        {"query_lengths": lambda xp: xp.ones(2)},
        TypeError,
        "query_lengths must hold integers, got float64",
    ),
    "key_lengths of another batch": (
        {"key_lengths": lambda xp: xp.ones((2, 2), np.int32)},
        ValueError,
        r"key_lengths has shape \(2, 2\), .* the batch axes = \(2,\)",
    ),
    "out of another shape": (
        {"out": lambda xp: xp.zeros((2, 4, 3, 8), np.float32)},
        ValueError,
        r"out must have shape \(2, 4, 3, 6\), got \(2, 4, 3, 8\)",
    ),
    "out of another dtype": (
        {"out": lambda xp: xp.zeros((2, 4, 3, 6), np.float64)},
        TypeError,
        "out must be float32, got float64",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(xp, case):
    changes, error, message = REFUSALS[case]
    kwargs = {**arrays(xp), **{n: value(v, xp) for n, v in changes.items()}}
    if case == "tf32 of float64":
        kwargs = {n: value(v, xp) for n, v in changes.items()}
    q, k, v = (kwargs.pop(n) for n in "qkv")
    out = kwargs.setdefault("out", xp.zeros((2, 4, 3, 6), np.float32))
    with pytest.raises(error, match=message):
        cupyflash.attention(q, k, v, **kwargs)
    assert not out.any()  # a refused call changes nothing


def test_layouts_of_heads_are_in_the_message(xp):
    """A (batch, heads, seq, dim) call with layout="bshd" says which layout it read."""
    a = arrays(xp, q=(2, 4, 3, 8), k=(2, 2, 5, 8), v=(2, 2, 5, 8))
    with pytest.raises(ValueError, match=r"got 5 and 3 \(layout 'bshd'\)"):
        cupyflash.attention(*a.values(), layout="bshd")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_out_shares_no_memory_with_an_input(xp, name):
    a = {n: xp.ones((2, 4, 4), np.float32) for n in ("q", "k", "v", "bias")}
    before = a[name].copy()
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        cupyflash.attention(a["q"], a["k"], a["v"], bias=a["bias"], out=a[name])
    assert bool((a[name] == before).all())


def test_out_is_read_only():
    a = arrays(np)
    out = np.empty((2, 4, 3, 6), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        cupyflash.attention(*a.values(), out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "bias", "key_lengths", "out"])
def test_kinds_of_array_are_not_mixed(cupy, name):
    for xp, other in ((np, cupy), (cupy, np)):
        kwargs = arrays(xp)
        kwargs |= {"bias": xp.ones((3, 5)), "key_lengths": xp.ones(2, int)}
        kwargs["out"] = xp.zeros((2, 4, 3, 6), np.float32)
        kwargs[name] = other.asarray(
            kwargs[name] if other is cupy else kwargs[name].get()
        )
        q, k, v = (kwargs.pop(n) for n in "qkv")
        with pytest.raises(TypeError, match=rf"q is a .* but {name} is a "):
            cupyflash.attention(q, k, v, **kwargs)


def check(q, k, v, **options):
    """(problem, operands) of a call."""
    defaults = dict(
        bias=None, mask=None, scale=None, causal=False, query_offset=None, window=None,
        softcap=0.0, sinks=None, alibi_slopes=None, query_lengths=None,
        key_lengths=None, layout="bhsd", precision="float32", return_lse=False,
        out=None, method="auto",
    )  # fmt: skip
    return attention_problem.attention(q, k, v, **{**defaults, **options})


@pytest.mark.parametrize(
    ("causal", "window", "bounds"),
    [
        (False, None, (None, None)),
        (True, None, (None, 0)),
        (False, 3, (3, 3)),
        (True, 3, (3, 0)),
        (False, (2, None), (2, None)),
        (True, (None, 5), (None, 0)),
        (False, [0, 1], (0, 1)),
        (False, (np.int64(4), 0), (4, 0)),
        (np.True_, None, (None, 0)),
    ],
)
def test_causal_and_window_become_bounds(causal, window, bounds):
    problem, _ = check(**arrays(np), causal=causal, window=window, query_offset=2)
    assert (problem.left, problem.right) == bounds


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "given", "bounds"),
    [
        (1, 5, (None, 0), (None, None)),
        (2, 5, (None, 0), (None, 0)),
        (2, 5, (None, 1), (None, None)),
        (3, 5, (3, 0), (3, 0)),
        (3, 5, (4, 0), (None, 0)),
        (7, 5, (4, 6), (None, None)),
    ],
)
@pytest.mark.parametrize("lengths", [{}, {"key_lengths": np.ones(2, np.int32)}])
def test_bounds_that_hide_nothing_are_none(seqlen_q, seqlen_k, given, bounds, lengths):
    q, k = np.ones((2, 1, seqlen_q, 4)), np.ones((2, 1, seqlen_k, 4))
    problem, _ = check(q=q, k=k, v=k, window=given, **lengths)
    assert (problem.left, problem.right) == bounds
    # An offset may differ from call to call.
    problem, _ = check(q=q, k=k, v=k, window=given, query_offset=seqlen_k - seqlen_q)
    assert (problem.left, problem.right) == given


def test_where_query_0_stands(xp):
    a, lengths = arrays(xp), xp.ones(2, np.int32)
    assert check(**a)[0].query_offset == 2
    assert check(**a, query_offset=0)[0].query_offset == 0
    assert check(**a, query_offset=np.int8(-7))[0].query_offset == -7
    assert check(**a, key_lengths=lengths)[0].query_offset == "lengths"
    assert check(**a, query_lengths=lengths)[0].query_offset == "lengths"
    assert check(**a, key_lengths=lengths, query_offset=4)[0].query_offset == 4
    problem, operands = check(**a, query_offset=lengths)
    assert problem.query_offset == "array"
    assert problem.query_offsets == "int32"
    assert operands.query_offsets.shape == (2,)


def test_defaults(xp):
    problem, operands = check(**arrays(xp))
    assert problem.backend == xp.__name__
    assert problem.scale == 8**-0.5
    assert problem.group_size == 2
    assert problem.out_shape == (2, 4, 3, 6)
    assert problem.lse_shape == (2, 4, 3)
    assert operands.bias is None
    assert operands.given_out is None


@pytest.mark.parametrize(
    ("q", "k", "v", "layout", "out", "lse"),
    [
        ((3, 8), (5, 8), (5, 6), "bhsd", (3, 6), (3,)),
        ((3, 8), (5, 8), (5, 6), "bshd", (3, 6), (3,)),
        ((4, 3, 8), (2, 5, 8), (2, 5, 6), "bhsd", (4, 3, 6), (4, 3)),
        ((3, 4, 8), (5, 2, 8), (5, 2, 6), "bshd", (3, 4, 6), (4, 3)),
        ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6), "bshd", (2, 3, 4, 6), (2, 4, 3)),
        (
            (2, 1, 2, 3, 8),
            (7, 1, 5, 8),
            (1, 5, 6),
            "bhsd",
            (2, 7, 2, 3, 6),
            (2, 7, 2, 3),
        ),
        ((4, 3, 8), (5, 8), (5, 6), "bhsd", (4, 3, 6), (4, 3)),
        ((3, 8), (1, 5, 8), (9, 1, 5, 6), "bhsd", (9, 1, 3, 6), (9, 1, 3)),
    ],
)
def test_shapes(q, k, v, layout, out, lse):
    a = arrays(np, q=q, k=k, v=v)
    problem, operands = check(**a, layout=layout)
    assert problem.out_shape == out
    assert problem.lse_shape == lse
    heads = problem.num_heads, problem.num_kv_heads
    assert operands.q.shape == (*problem.batch, heads[0], 3, 8)
    assert operands.k.shape == (*problem.batch, heads[1], 5, 8)
    assert operands.v.shape == (*problem.batch, heads[1], 5, 6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(xp, dtype):
    a = {n: place(xp, np.ones((2, 2)).astype(dtype_of(dtype))) for n in "qkv"}
    problem, _ = check(**a)
    assert problem.dtype == dtype
    assert problem.compute_dtype == ("float64" if dtype == "float64" else "float32")


def test_options_are_never_expanded(xp):
    bias, mask = xp.ones((2, 1, 1, 5), np.float16), xp.ones((3, 1), bool)
    problem, operands = check(**arrays(xp), bias=bias, mask=mask)
    assert (problem.bias, problem.mask) == ("float16", "bool")
    assert operands.bias.shape == operands.mask.shape == (2, 4, 3, 5)
    assert operands.bias.strides == (10, 0, 0, 2)
    assert operands.mask.strides == (0, 0, 1, 0)


def test_out_that_nobody_would_see(xp):
    q = xp.ones((1, 1))
    with pytest.raises(TypeError, match="out must be a NumPy or CuPy array, got a"):
        cupyflash.attention(q, q, q, out=[[0.0]])
    with pytest.raises(TypeError, match="out must be a NumPy or CuPy array, got a"):
        cupyflash.merge_attention_states(q, xp.ones(1), out=[0.0])


def test_out_is_seen_heads_first(xp):
    out = xp.empty((2, 3, 4, 6), np.float32)
    a = arrays(xp, q=(2, 3, 4, 8), k=(2, 5, 2, 8), v=(2, 5, 2, 6))
    _, operands = check(**a, layout="bshd", out=out)
    assert operands.given_out is out
    assert operands.out.shape == (2, 4, 3, 6)
    assert operands.out.strides == out.swapaxes(1, 2).strides


MERGES = {
    "no outs": (
        lambda xp: (None, xp.ones((2, 3)), {}),
        TypeError,
        "outs must be an array, got None",
    ),
    "outs of integers": (
        lambda xp: (xp.ones((2, 3, 4), int), xp.ones((2, 3)), {}),
        TypeError,
        "outs must be one of float16, .*, got int64",
    ),
    "lses of float16": (
        lambda xp: (xp.ones((2, 3, 4)), xp.ones((2, 3), np.float16), {}),
        TypeError,
        "lses must be float32 or float64, got float16",
    ),
    "shapes apart": (
        lambda xp: (xp.ones((2, 3, 4)), xp.ones((2, 4)), {}),
        ValueError,
        r"lses must have the shape of outs without its last axis, got outs "
        r"\(2, 3, 4\) and lses \(2, 4\)",
    ),
    "axis": (
        lambda xp: (xp.ones((2, 3, 4)), xp.ones((2, 3)), {"axis": 2}),
        np.exceptions.AxisError,
        "axis 2 is out of bounds for array of dimension 2",
    ),
    "parts of several shapes": (
        lambda xp: ([xp.ones((3, 4)), xp.ones((2, 4))], xp.ones((2, 3)), {}),
        ValueError,
        "the parts of outs must have the same shape, got",
    ),
    "axis far below": (
        lambda xp: ([xp.ones((3, 4))] * 2, [xp.ones(3)] * 2, {"axis": -9}),
        np.exceptions.AxisError,
        "axis: axis -9 is out of bounds for array of dimension 2",
    ),
    "axis of another type": (
        lambda xp: (xp.ones((2, 3, 4)), xp.ones((2, 3)), {"axis": True}),
        TypeError,
        "axis must be an int, got bool",
    ),
    "no part": (
        lambda xp: ([], [], {}),
        ValueError,
        "outs is an empty list; pass at least one part",
    ),
    "a part that is not there": (
        lambda xp: ([xp.ones((3, 4)), None], [xp.ones(3)] * 2, {}),
        TypeError,
        r"outs\[1\] must be an array, got None",
    ),
    "parts of several dtypes": (
        lambda xp: (
            [xp.ones((3, 4)), xp.ones((3, 4), np.float32)],
            xp.ones((2, 3)),
            {},
        ),
        TypeError,
        "the parts of outs must have the same dtype, got float32 and float64",
    ),
    "numbers for arrays": (
        lambda xp: (xp.ones(()), xp.ones(()), {}),
        ValueError,
        r"got outs \(\) and lses \(\)",
    ),
    "out of another shape": (
        lambda xp: (xp.ones((2, 3, 4)), xp.ones((2, 3)), {"out": xp.zeros((2, 4))}),
        ValueError,
        r"out must have shape \(3, 4\), got \(2, 4\)",
    ),
    "out of another dtype": (
        lambda xp: (
            xp.ones((2, 3, 4)),
            xp.ones((2, 3)),
            {"out": xp.zeros((3, 4), np.float32)},
        ),
        TypeError,
        "out must be float64, got float32",
    ),
}


@pytest.mark.parametrize("case", MERGES)
def test_refusals_of_merge(xp, case):
    make, error, message = MERGES[case]
    outs, lses, options = make(xp)
    with pytest.raises(error, match=message):
        cupyflash.merge_attention_states(outs, lses, **options)
    assert "out" not in options or not options["out"].any()


def test_out_of_merge_is_no_part(xp):
    outs, lses = xp.ones((2, 3, 4)), xp.ones((2, 3))
    with pytest.raises(ValueError, match="out shares memory with outs"):
        cupyflash.merge_attention_states(outs, lses, out=outs[0])


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_parts_as_a_list_or_stacked(xp, axis):
    outs = [xp.full((3, 5, 4), float(i)) for i in range(2)]
    lses = [xp.full((3, 5), float(i)) for i in range(2)]
    listed, _ = attention_problem.merge(outs, lses, axis, None)
    assert listed.num_parts == 2
    assert listed.shape == (3, 5)
    assert listed.head_dim_v == 4
    mixed, _ = attention_problem.merge(outs, xp.stack(lses, axis), axis, None)
    assert mixed == listed
    positive = axis % 3
    stacked, operands = attention_problem.merge(
        xp.stack(outs, positive), xp.stack(lses, positive), axis, None
    )
    assert stacked == listed
    assert operands.outs.shape == (2, 3, 5, 4)


# --- what only the host can see ------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("as_array", [False, True])
def test_numbers_beyond_the_dtype_of_the_scores(name, dtype, as_array):
    q = np.ones((3, 4), dtype)
    value = np.full((3, 3) if name == "bias" else 1, 1e300) if as_array else 1e300
    for _ in range(2):  # a call like one before is checked as well
        with pytest.raises(ValueError, match=rf"{name} must be finite in float32"):
            cupyflash.attention(q, q, q, **{name: value})
    wide = q.astype(np.float64)
    assert np.isfinite(cupyflash.attention(wide, wide, wide, **{name: value})).all()


@pytest.mark.parametrize("place", [(0, 0), (299, 399), (150, 7)])
@pytest.mark.parametrize("turned", [False, True])
def test_one_number_of_many_beyond_the_dtype_of_the_scores(place, turned):
    q, k = np.ones((300, 4), np.float32), np.ones((400, 4), np.float32)
    bias = np.zeros((300, 400), order="F" if turned else "C")
    bias[place] = 1e39
    bias[149, ::3], bias[10] = np.nan, np.inf  # which scores have, too
    bias[0, 1:], bias[298] = -np.inf, -1e300
    for x in (bias, np.broadcast_to(bias, (1, 300, 400))[0], bias.astype(">f8")):
        with pytest.raises(ValueError, match=r"bias must be finite .* got 1e\+39"):
            cupyflash.attention(q, k, k, bias=x)
    bias[place] = np.inf
    cupyflash.attention(q, k, k, bias=bias)


def test_numbers_far_below_float32_hide():
    q = np.ones((3, 4), np.float32)
    plain, lse = cupyflash.attention(q, q, q, return_lse=True)
    got = cupyflash.attention(q, q, q, sinks=-1e300, return_lse=True)
    np.testing.assert_array_equal(got[0], plain)
    np.testing.assert_array_equal(got[1], lse)
    bias = np.array([0, 0, -1e300])
    got = cupyflash.attention(q, q, q, bias=bias)
    np.testing.assert_array_equal(got, cupyflash.attention(q, q[:2], q[:2]))


@pytest.mark.parametrize("ndim", [33, 34, 40, 64])
def test_too_many_axes(ndim):
    x = np.ones((1,) * (ndim - 2) + (3, 4), np.float32)
    with pytest.raises(ValueError, match=f"at most 32 axes, got {ndim}; reshape"):
        cupyflash.attention(x, x, x)
    least = np.ones((1,) * 30 + (3, 4), np.float32)
    assert cupyflash.attention(least, least, least).shape == least.shape


def test_lists_of_integers():
    with pytest.raises(TypeError, match=r"numpy.asarray\(q, dtype='float32'\)"):
        cupyflash.attention([[1, 2]], [[1, 2]], [[1, 2]])


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths", "query_offset"])
def test_integers_of_lists(name):
    x = np.ones((1, 1, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"shape \(0,\), which does not broadcast"):
        cupyflash.attention(x[0], x[0], x[0], **{name: []})
    with pytest.raises(ValueError, match="integers of 64 bits, got 1000000"):
        cupyflash.attention(x, x, x, **{name: [10**30]})
    none = x[:0]  # a batch without entries has as many lengths
    assert cupyflash.attention(none, none, none, **{name: []}).shape == none.shape
    for given in (["a"], [1.5], [None]):
        with pytest.raises(TypeError, match=f"{name} must hold integers"):
            cupyflash.attention(x, x, x, **{name: given})


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize("kind", ["memmap", "subclass"])
def test_out_is_returned_as_it_was_given(kind, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    lse = np.ones((2, 3))
    path = tmp_path / "out"
    calls = {
        "softmax": (x,), "log_softmax": (x,), "softmax_vjp": (x, x),
        "log_softmax_vjp": (x, x), "attention": (x, x, x),
        "merge_attention_states": (x[None], lse[None]), "logsumexp": (x[..., None], -1),
    }  # fmt: skip
    for name, arguments in calls.items():
        function = getattr(cupyflash, name)
        out = np.zeros(x.shape).view(Subclass)
        if kind == "memmap":
            out = np.memmap(path, dtype=np.float64, mode="w+", shape=x.shape)
        result = function(*arguments, out=out)
        result = result[0] if name.startswith("merge") else result
        assert result is out, name
        expected = function(*arguments)
        expected = expected[0] if name.startswith("merge") else expected
        np.testing.assert_array_equal(np.asarray(out), expected)
    found, sign = cupyflash.logsumexp(x[..., None], -1, return_sign=True, out=out)
    assert found is out
    assert (sign == 1).all()


def test_lengths_in_an_array_of_objects():
    q = np.ones((2, 1, 4, 3))
    lengths = np.array([[1], [2]], object)
    with pytest.raises(TypeError, match="key_lengths must hold integers, got object"):
        cupyflash.attention(q, q, q, key_lengths=lengths)
    with pytest.raises(ValueError, match=f"integers of 64 bits, got {2**70}"):
        cupyflash.attention(q, q, q, key_lengths=[[1], [2**70]])
