"""Arguments of attention -> a problem of plain numbers, and views in one layout.

All errors of the caller are raised here, before anything is allocated or launched.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention import functions as _functions
from cupyflash._core import arrays as _arrays

LAYOUTS = ("bhsd", "bshd")
PRECISIONS = ("float32", "tf32")
# The most axes that NumPy's iterators support.
MOST_AXES = 32

# Smallest and largest normal number of each compute dtype.
_NORMAL_NUMBERS = {
    dtype: (float(np.finfo(dtype).tiny), float(np.finfo(dtype).max))
    for dtype in ("float32", "float64")
}


@dataclass(frozen=True)
class AttentionProblem:
    """A call of attention, without the arrays.

    `left` and `right` bound the keys that a query sees around its diagonal ``i +
    query_offset``, both inclusive; None is unbounded. They combine causal and window.
    """

    backend: str  # "numpy" or "cupy"
    batch: tuple[int, ...]  # leading axes, broadcast
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    left: int | None = None
    right: int | None = None
    # An int is known to the host; "lengths" is key length - query length of each batch
    # entry; "array" is known to the device only.
    query_offset: int | str = 0
    softcap: float = 0.0
    # dtype names of the optional arrays; None is absent.
    bias: str | None = None
    mask: str | None = None
    sinks: str | None = None
    alibi_slopes: str | None = None
    query_offsets: str | None = None
    query_lengths: str | None = None
    key_lengths: str | None = None
    layout: str = "bhsd"
    heads_axis: bool = True  # False: all of q, k and v are plain matrices
    precision: str = "float32"
    return_lse: bool = False
    method: str = "auto"
    # Why TMA cannot read q, k and v; None if it can.
    no_tensor_map: str | None = None
    # Why rows of q, k and v (for gradients also dout and out) do not all start at whole
    # 16-byte vectors; None if they do.
    no_vectors: str | None = None
    # Bytes, a power of two up to 16, of which starts and strides of these rows are
    # multiples.
    row_alignment: int = 16
    # Whether a tensor map can treat the query heads of a group and the queries as two
    # axes.
    heads_can_be_packed: bool = True
    # Memory layout of bias and mask: "keys" if they are the same for all queries, "bias
    # of keys" if the bias is and the mask is packed, "tiles" if TMA can read the bias
    # (for gradients, both), "unit" if keys are contiguous, else "any".
    terms: str = "any"
    # With split keys, which form the first batch axis: keys per split.
    keys_of_part: int | None = None
    # Keys of the expressions of a score and a mask function.
    score: str | None = None
    mask_function: str | None = None
    # Their CUDA text, for arrays on a GPU.
    generated: str = field(default="", repr=False)
    # Which of b and h the mask function depends on.
    mask_varies_by: str = ""
    # Of a score function that reads a table of diagonals in place of the caller's: a
    # DiagonalTable.
    table: Any = field(default=None, repr=False)

    @property
    def has_functions(self) -> bool:
        """Whether there is a score or a mask function."""
        return self.score is not None or self.mask_function is not None

    @property
    def compute_dtype(self) -> str:
        """dtype of scores, maxima, sums and lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def group_size(self) -> int:
        """Query heads that share a head of k and v."""
        return self.num_heads // max(self.num_kv_heads, 1)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of `out`, in the layout of the call."""
        matrix = (self.seqlen_q, self.head_dim_v)
        if not self.heads_axis:
            return matrix
        if self.layout == "bhsd":
            return (*self.batch, self.num_heads, *matrix)
        return (*self.batch, self.seqlen_q, self.num_heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of `lse`, the same in both layouts."""
        if not self.heads_axis:
            return (self.seqlen_q,)
        return (*self.batch, self.num_heads, self.seqlen_q)


class AttentionOperands(NamedTuple):
    """Views without copies, independent of the layout of the call.

    q, k, v, out : batch + (heads, seqlen, dim), heads-first
    bias, mask : batch + (num_heads, seqlen_q, seqlen_k)
    sinks : (num_heads,)
    alibi_slopes : batch + (num_heads,)
    query_offsets, query_lengths, key_lengths : batch
    given_out : `out` as the caller gave it, to be returned
    functions : score and mask function with their arrays
    taken : functions in whose place there are options
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    query_offsets: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    out: Any = None
    given_out: Any = None
    functions: _functions.Functions | None = None
    taken: tuple[_functions.Taken, ...] = ()


def heads_first(x, layout):
    """A view of `x` as (..., heads, seqlen, dim); matrices get one head."""
    if x.ndim == 2:
        return x[None]
    return x if layout == "bhsd" else x.swapaxes(-3, -2)


def _check_floats(xp, arrays):
    """Check that q, k and v have one floating dtype."""
    names = {name: _arrays.dtype_name(arrays[name]) for name in ("q", "k", "v")}
    for name, dtype in names.items():
        if dtype not in _arrays.FLOATS:
            raise TypeError(
                f"{name} must be one of {', '.join(_arrays.FLOATS)}, got {dtype}; "
                f"convert it, as by {xp}.asarray({name}, dtype='float32')"
            )
    if len(set(names.values())) > 1:
        got = ", ".join(f"{n} {d}" for n, d in names.items())
        raise TypeError(f"q, k and v must have the same dtype, got {got}")
    return names["q"]


def _check_shapes(q, k, v, layout):
    """Check the shapes of q, k and v against each other; return the broadcast batch."""
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 axes (seqlen, head_dim), got {x.shape}"
            )
        if x.ndim > MOST_AXES:
            raise ValueError(
                f"{name} may have at most {MOST_AXES} axes, got {x.ndim}; reshape it, "
                "so that batch axes become one"
            )
        if x.shape[-1] < 1:
            raise ValueError(
                f"{name} has shape {x.shape}; its last axis (head_dim) must be >= 1"
            )
    q, k, v = (heads_first(x, layout) for x in (q, k, v))
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q and k must have the same head_dim, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k and v must have the same seqlen, got {k.shape[-2]} and {v.shape[-2]}"
        )
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(
            f"k and v must have the same number of heads, got {k.shape[-3]} and "
            f"{v.shape[-3]}"
        )
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        if len({len(shape) for shape in shapes.values()}) > 1:
            _refuse_axes(shapes, layout)
        raise ValueError(
            f"the heads of k and v must divide those of q, got {kv_heads} and {heads} "
            f"(layout {layout!r})"
        )
    try:
        batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            "the batch axes of q, k and v do not broadcast: "
            f"{q.shape[:-3]}, {k.shape[:-3]}, {v.shape[:-3]}"
        ) from None
    return q, k, v, batch


def _refuse_axes(shapes, layout):
    """Refuse q, k and v with different numbers of axes whose heads do not match."""
    meaning = "seqlen, dim: one head"
    described = (
        f"{name} has {len(shape)} axes {shape}"
        + (f" ({meaning})" if len(shape) == 2 else "")
        for name, shape in shapes.items()
    )
    axes = "heads, seqlen, dim" if layout == "bhsd" else "seqlen, heads, dim"
    raise ValueError(
        f"q, k and v must all have axes (..., {axes}), or all (seqlen, dim), unless k "
        f"and v have one head: {'; '.join(described)}"
    )


def _bounds(causal, window):
    """(left, right) of causal and window together."""
    causal = _arrays.check_bool("causal", causal)
    if window is None:
        left = right = None
    else:
        pair = window if isinstance(window, (tuple, list)) else (window, window)
        if len(pair) != 2:
            raise ValueError(f"window must be an int or (left, right), got {window!r}")
        left, right = (_window_side(side) for side in pair)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


# Limit of the distance between a query and the keys; kFar of
# cuda_src/attention/score/params.cuh. Sums of such a number and a bound of twice that
# fit into 64 bits.
FAR = 1 << 61


def _within_reach(query_offset, left, right):
    """(query_offset, left, right) clamped to FAR and twice that."""
    if isinstance(query_offset, int):
        near = max(-FAR, min(query_offset, FAR))
        beyond = query_offset - near
        left = None if left is None else left - beyond
        right = None if right is None else right + beyond
        query_offset = near
    left, right = (
        None if x is None else max(-2 * FAR, min(x, 2 * FAR)) for x in (left, right)
    )
    return query_offset, left, right


def _bounds_that_hide(left, right, seqlen_q, seqlen_k):
    """None for a bound that hides no key, if the last query is at the last key.

    The first query is seqlen_q - 1 before it, or less with shorter lengths: a causal
    mask hides nothing from a single query, nor does a window longer than the keys.
    """
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= seqlen_q - 1:
        right = None
    return left, right


def _window_side(side):
    if side is None:
        return None
    side = _arrays.index("window", side, "an int or (left, right) of ints or None")
    if side < 0:
        raise ValueError(
            f"window counts keys on each side and must be >= 0, got {side}; None is "
            "unbounded"
        )
    return side


def _check_softcap(softcap, dtype):
    softcap = _arrays.real_number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and >= 0 (0 is off), got {softcap}")
    # float16 and bfloat16 have float32 scores, in which the cap must not become 0.
    least, most = _normal_numbers(dtype)
    if softcap and not least <= softcap <= most:
        raise ValueError(
            f"softcap must be 0 (off) or from {least:.3g} to {most:.3g} for {dtype}, "
            f"got {softcap}"
        )
    return softcap


def _normal_numbers(dtype):
    return _NORMAL_NUMBERS["float64" if dtype == "float64" else "float32"]


def _check_scale(scale, head_dim, dtype):
    """The scale, or the nearest number in the dtype of the scores: 0 * it is 0."""
    if scale is None:
        return head_dim**-0.5
    _, most = _normal_numbers(dtype)
    return max(-most, min(_arrays.finite_number("scale", scale), most))


def _check_terms(a, given, scores, dtype):
    """bias, mask, sinks and alibi_slopes as views over scores of this shape."""
    *batch, heads, _, _ = scores
    meaning = "(..., num_heads, seqlen_q, seqlen_k)"
    if (bias := a["bias"]) is not None:
        if bias.dtype == np.bool_:
            raise TypeError(
                "bias must be floating, got bool; a boolean mask goes into mask= "
                "(True = attend)"
            )
        _check_float("bias", bias)
        _check_reach("bias", given["bias"], bias, dtype)
        bias = _arrays.broadcast_view("bias", bias, scores, meaning)
    if (mask := a["mask"]) is not None:
        if mask.dtype != np.bool_:
            advice = "an additive mask goes into bias"
            if mask.dtype.kind in "iu":  # zeros and ones, as tokenizers make them
                advice = "write mask != 0 if 1 means attend"
            raise TypeError(
                f"mask must be bool (True = attend), got {_arrays.dtype_name(mask)}; "
                + advice
            )
        mask = _arrays.broadcast_view("mask", mask, scores, meaning)
    if (sinks := a["sinks"]) is not None:
        _check_float("sinks", sinks)
        _check_reach("sinks", given["sinks"], sinks, dtype)
        sinks = _arrays.broadcast_view("sinks", sinks, (heads,), "(num_heads,)")
    if (alibi := a["alibi_slopes"]) is not None:
        _check_float("alibi_slopes", alibi)
        _check_reach("alibi_slopes", given["alibi_slopes"], alibi, dtype)
        alibi = _arrays.broadcast_view(
            "alibi_slopes", alibi, (*batch, heads), "(..., num_heads)"
        )
    return bias, mask, sinks, alibi


def _check_reach(name, given, x, dtype):
    """Refuse float64 numbers that overflow in float32 scores, if they are on the host.

    Large negative ones become -inf, which hides keys, as they are meant to.
    """
    if _arrays.dtype_name(x) != "float64" or dtype == "float64":
        return
    if _arrays.is_scalar(given):
        x = np.asarray(given)
    if not isinstance(x, np.ndarray):
        return
    _, most = _NORMAL_NUMBERS["float32"]
    for block in _arrays.blocks_of(x):
        size = np.abs(block) if name == "alibi_slopes" else block
        if size.max() <= most:
            continue
        beyond = block[np.isfinite(size) & (size > most)]
        if beyond.size:
            raise ValueError(
                f"{name} must be finite in float32, as scores of {dtype} inputs are: "
                f"up to {most:.3g}, got {beyond[0]:.6g}; only float64 inputs take more"
            )


def check_lengths(name, lengths, axis, size):
    """Refuse lengths beyond an axis, if they are on the host."""
    beyond = (lengths < 0) | (lengths > size)
    if beyond.any():
        index = tuple(int(i) for i in np.argwhere(beyond)[0])
        place = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(
            f"{name} must be from 0 to {axis} = {size}, but {place} is {lengths[index]}"
        )


def _check_integers(a, batch, seqlen_q, seqlen_k):
    """query_offset and lengths by name, as views over the batch; None stays None."""
    views = {}
    lengths_of = {
        "query_lengths": ("seqlen_q", seqlen_q),
        "key_lengths": ("seqlen_k", seqlen_k),
    }
    for name in ("query_offset", "query_lengths", "key_lengths"):
        x = a[name]
        if x is not None:
            if isinstance(x, np.ndarray):
                x = _host_integers(name, x)
            if x.dtype.kind not in "iu":
                raise TypeError(
                    f"{name} must hold integers, got {_arrays.dtype_name(x)}"
                )
            given, x = x, _arrays.broadcast_view(name, x, batch, "the batch axes")
            if name in lengths_of and isinstance(x, np.ndarray):
                check_lengths(name, given, *lengths_of[name])
        views[name] = x
    return views


def _host_integers(name, x):
    """The integers meant by a list that NumPy converts to another type."""
    if x.size == 0:
        return x.astype(np.int64)
    if x.dtype == object and all(isinstance(n, int) for n in x.flat):
        largest = max(x.flat, key=abs)
        if -(2**63) <= largest < 2**64:  # an array of objects, not a list
            return x
        raise ValueError(f"{name} must hold integers of 64 bits, got {largest}")
    return x


def is_index(x) -> bool:
    """Whether `x` is a host integer (not an array, not a bool)."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.bool_))


def attention(
    q, k, v, bias, mask, scale, causal, query_offset, window, softcap, sinks,
    alibi_slopes, query_lengths, key_lengths, layout, precision, return_lse, out,
    method, score=None, score_arrays=None, mask_arrays=None, keep_score=False,
) -> tuple[AttentionProblem, AttentionOperands]:  # fmt: skip
    """Check a call of attention.

    With `keep_score` no array becomes an option, since gradients of it are asked for.
    """
    functions, mask = _functions.bind(q, score, score_arrays, mask, mask_arrays)
    as_given = functions or _functions.Functions()
    taken: tuple[_functions.Taken, ...] = ()
    _arrays.check_choice("layout", layout, LAYOUTS)
    _arrays.check_choice("precision", precision, PRECISIONS)
    _arrays.check_method(method)
    left, right = _bounds(causal, window)
    offsets = None if query_offset is None or is_index(query_offset) else query_offset
    if isinstance(offsets, (bool, np.bool_, float)):
        raise TypeError(
            "query_offset must be None, an int or an integer array, got "
            f"{type(offsets).__name__}"
        )

    _arrays.check_out_is_array(out)
    xp, a = _arrays.adopt_all(
        3, q=q, k=k, v=v, bias=bias, mask=mask, sinks=sinks, alibi_slopes=alibi_slopes,
        query_offset=offsets, query_lengths=query_lengths, key_lengths=key_lengths,
        out=out,
    )  # fmt: skip
    dtype = _check_floats(xp.__name__, a)
    softcap = _check_softcap(softcap, dtype)
    if precision == "tf32" and dtype != "float32":
        raise ValueError(f"precision='tf32' is for float32 inputs, got {dtype}")
    if functions and xp.__name__ == "cupy":
        functions, left, right, softcap = _functions.with_options(
            functions, left, right, softcap
        )
        became = {"score": "softcap", "mask": "window"}
        taken = _functions.taken(as_given, functions, became)
    heads_axis = any(a[name].ndim > 2 for name in ("q", "k", "v"))
    q, k, v, batch = _check_shapes(a["q"], a["k"], a["v"], layout)
    heads, seqlen_q, head_dim = q.shape[-3:]
    seqlen_k, head_dim_v = v.shape[-2:]
    scale = _check_scale(scale, head_dim, dtype)
    if query_offset is None:
        left, right = _bounds_that_hide(left, right, seqlen_q, seqlen_k)

    given = {"bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes}
    scores = (*batch, heads, seqlen_q, seqlen_k)
    bias, mask, sinks, alibi = _check_terms(a, given, scores, dtype)
    integers = _check_integers(a, batch, seqlen_q, seqlen_k)
    rule = _offset_rule(query_offset, integers, seqlen_q, seqlen_k)
    rule, left, right = _within_reach(rule, left, right)
    if functions and xp.__name__ == "cupy" and not keep_score:
        accum = "float64" if dtype == "float64" else "float32"
        options = {"bias": bias, "mask": mask, "alibi_slopes": alibi}
        found, of_arrays = _functions.with_arrays(
            functions, options, scores, rule, accum
        )
        if found:
            functions, taken = None, taken + of_arrays
            bias, mask, alibi = (options | found).values()

    problem = AttentionProblem(
        backend=xp.__name__,
        batch=batch,
        num_heads=heads,
        num_kv_heads=k.shape[-3],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        scale=scale,
        left=left,
        right=right,
        query_offset=rule,
        softcap=softcap,
        bias=_name(bias),
        mask=_name(mask),
        sinks=_name(sinks),
        alibi_slopes=_name(alibi),
        query_offsets=_name(integers["query_offset"]),
        query_lengths=_name(integers["query_lengths"]),
        key_lengths=_name(integers["key_lengths"]),
        layout=layout,
        heads_axis=heads_axis,
        precision=precision,
        return_lse=_arrays.check_bool("return_lse", return_lse),
        method=method,
        score=_functions.key_of(functions.score) if functions else None,
        mask_function=_functions.key_of(functions.mask) if functions else None,
    )
    if problem.backend == "cupy":
        problem = with_cuda(problem, functions)
    # NumPy functions return the very object, which may be of a subclass.
    given_out, out = out if isinstance(out, np.ndarray) else a["out"], a["out"]
    if out is not None:
        inputs = {name: x for name, x in a.items() if name != "out"}
        inputs |= _functions.arrays_of(as_given)
        _arrays.check_out(out, problem.out_shape, (dtype,), inputs)
    q, k, v = (xp.broadcast_to(x, batch + x.shape[-3:]) for x in (q, k, v))
    operands = AttentionOperands(
        q, k, v, bias, mask, sinks, alibi, integers["query_offset"],
        integers["query_lengths"], integers["key_lengths"],
        None if out is None else heads_first(out, layout), given_out, functions, taken,
    )  # fmt: skip
    return problem, operands


def _check_float(name, x):
    dtype = _arrays.dtype_name(x)
    if dtype not in _arrays.FLOATS:
        raise TypeError(
            f"{name} must be one of {', '.join(_arrays.FLOATS)}, got {dtype}; "
            "convert it to one of them"
        )


def _name(x):
    return None if x is None else _arrays.dtype_name(x)


def _offset_rule(query_offset, integers, seqlen_q, seqlen_k):
    """What the problem's query_offset is derived from; see AttentionProblem."""
    if query_offset is None:
        known = integers["query_lengths"] is None and integers["key_lengths"] is None
        return seqlen_k - seqlen_q if known else "lengths"
    return int(query_offset) if is_index(query_offset) else "array"


def with_cuda(
    problem: AttentionProblem,
    functions: _functions.Functions | None,
    gradients_of: tuple[str, ...] = (),
) -> AttentionProblem:
    """The problem with the CUDA text of its functions.

    With `gradients_of` that includes derivatives by elements of these arrays.
    """
    if functions is None:
        return problem
    num_queries, num_keys = problem.seqlen_q, problem.seqlen_k
    first: Any = problem.query_offset
    places: dict[str, tuple[int, int] | None] = {
        "b": (0, math.prod(problem.batch)),
        "h": (0, problem.num_heads),
        "i": None,  # comes from the device
        "j": (0, num_keys),
    }
    if first == "lengths":
        places["i"] = -num_queries, num_keys + num_queries
    elif first != "array":
        places["i"] = first, first + num_queries
    in_stages = problem.dtype in ("float16", "bfloat16") and not gradients_of
    mask = functions.mask
    free = mask.expression.root.free if mask else ()
    return replace(
        problem,
        generated=_functions.cuda_text(functions, places, in_stages, gradients_of),
        mask_varies_by="".join(name for name in "bh" if name in free),
    )


@dataclass(frozen=True)
class MergeProblem:
    """Partial attention results to be combined along the first axis of the views."""

    backend: str
    num_parts: int
    shape: tuple[int, ...]  # of the merged lse
    head_dim_v: int
    dtype: str
    lse_dtype: str
    in_sums: bool = False  # parts give m and l of lse = m + log l, in float64


class MergeOperands(NamedTuple):
    """outs : (parts, ..., head_dim_v); lses : (parts, ...); out : (..., head_dim_v)."""

    outs: Any
    lses: Any
    out: Any = None


def merge(outs, lses, axis, out) -> tuple[MergeProblem, MergeOperands]:
    """Check a call of merge_attention_states."""
    axis = _arrays.index("axis", axis, "an int")
    _arrays.check_out_is_array(out)
    # For lists the first axis is that of the parts; `axis` applies to arrays.
    listed = [isinstance(x, (list, tuple)) for x in (outs, lses)]
    outs, lses = _stack("outs", outs), _stack("lses", lses)
    xp, a = _arrays.adopt_all(2, outs=outs, lses=lses, out=out)
    outs, lses, out = a["outs"], a["lses"], a["out"]
    _check_float("outs", outs)
    if _arrays.dtype_name(lses) not in ("float32", "float64"):
        raise TypeError(
            f"lses must be float32 or float64, got {_arrays.dtype_name(lses)}"
        )
    given = f"got outs {outs.shape} and lses {lses.shape}"
    belong = outs.ndim == lses.ndim + 1
    if belong:
        axis = np.lib.array_utils.normalize_axis_index(axis, lses.ndim, "axis")
        outs, lses = (
            x if is_list else xp.moveaxis(x, axis, 0)
            for x, is_list in zip((outs, lses), listed, strict=True)
        )
        belong = outs.shape[:-1] == lses.shape
    if not belong:
        raise ValueError(
            f"lses must have the shape of outs without its last axis, {given}"
        )
    problem = MergeProblem(
        backend=xp.__name__,
        num_parts=lses.shape[0],
        shape=lses.shape[1:],
        head_dim_v=outs.shape[-1],
        dtype=_arrays.dtype_name(outs),
        lse_dtype=_arrays.dtype_name(lses),
    )
    if out is not None:
        _arrays.check_out(
            out,
            outs.shape[1:],
            (_arrays.dtype_name(outs),),
            {"outs": outs, "lses": lses},
        )
    return problem, MergeOperands(outs, lses, out)


def _stack(name, parts):
    """A list of arrays as one array; anything else unchanged."""
    if not isinstance(parts, (list, tuple)):
        return parts
    if not parts:
        raise ValueError(f"{name} is an empty list; pass at least one part")
    given = {f"{name}[{i}]": x for i, x in enumerate(parts)}
    xp, arrays = _arrays.adopt_all(len(parts), **given)
    for what, found in (
        ("shape", {str(x.shape) for x in arrays.values()}),
        ("dtype", {_arrays.dtype_name(x) for x in arrays.values()}),
    ):
        if len(found) > 1:
            raise (ValueError if what == "shape" else TypeError)(
                f"the parts of {name} must have the same {what}, got "
                f"{' and '.join(sorted(found))}"
            )
    return xp.stack(list(arrays.values()))
