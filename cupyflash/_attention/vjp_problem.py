"""Arguments of attention_vjp -> a problem of plain numbers, and views in one layout.

All errors of the caller are raised here, before anything is allocated or launched.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyflash._attention import functions
from cupyflash._attention import problem as attention_problem
from cupyflash._attention.problem import (
    AttentionOperands,
    AttentionProblem,
    heads_first,
)
from cupyflash._core import arrays, strides
from cupyflash._core.dtypes import ITEMSIZE

METHODS = ("auto", "tiled")


class AttentionGrads(NamedTuple):
    """Gradients of attention, each with the shape and dtype of its array.

    Attributes
    ----------
    dq, dk, dv : ndarray
        Gradients of the queries, keys and values.
    dbias : ndarray or None
        Gradient of the bias, in its own shape; None unless asked for.
    dsinks : ndarray or None
        Gradient of the sinks; None unless asked for.
    dscore : dict of str to ndarray, or None
        Gradients of the score function's arrays, by name; None unless asked for.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None
    dscore: Any = None


@dataclass(frozen=True)
class AttentionVjpProblem:
    """A call of attention_vjp, without the arrays: the forward problem and the results.

    Shapes are those of the call, before batch axes were broadcast.
    """

    forward: AttentionProblem
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    bias_shape: tuple[int, ...] = ()
    sinks_shape: tuple[int, ...] = ()
    has_dlse: bool = False
    need_dbias: bool = False
    need_dsinks: bool = False
    deterministic: bool = False
    need_dscore: tuple[str, ...] = ()
    # Kernels write dq, dk and dv with rows padded to whole 16-byte vectors, which
    # another kernel trims.
    whole_vectors: bool = False
    # The heads of a group are queries of one head; q_shape is then heads-first.
    is_packed: bool = False

    @property
    def backend(self) -> str:
        """ "numpy" or "cupy"."""
        return self.forward.backend

    @property
    def method(self) -> str:
        """The method, or "auto"."""
        return self.forward.method

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Batch axes, heads and queries: one number per row of scores."""
        return (*self.forward.batch, self.forward.num_heads, self.forward.seqlen_q)

    def written_shape(self, name: str) -> tuple[int, ...]:
        """The shape in which kernels write dq, dk or dv: "q", "k" or "v"."""
        *rest, columns = getattr(self, f"{name}_shape")
        if self.whole_vectors:
            columns = strides.whole_vectors(columns, ITEMSIZE[self.forward.dtype])
        return (*rest, columns)


class AttentionVjpOperands(NamedTuple):
    """Views without copies, independent of the layout of the call.

    forward : q, k, v, the options, and out, as in AttentionOperands
    dout : batch + (num_heads, seqlen_q, head_dim_v)
    lse, dlse : batch + (num_heads, seqlen_q)

    """

    forward: AttentionOperands
    dout: Any
    lse: Any
    dlse: Any = None


def aligned(x, problem: AttentionProblem):
    """A view of an array shaped like q, k or v: batch + (heads, seqlen, dim).

    Batch axes that the array lacks, or has once, have length one.
    """
    x = heads_first(x, problem.layout)
    return x[(None,) * (len(problem.batch) + 3 - x.ndim)]


def aligned_bias(dbias, problem: AttentionProblem):
    """A view of an array shaped like the bias, with all axes of the scores."""
    return dbias[(None,) * (len(problem.batch) + 3 - dbias.ndim)]


def attention_vjp(
    dout, q, k, v, out, lse, bias, mask, scale, causal, query_offset, window, softcap,
    sinks, alibi_slopes, query_lengths, key_lengths, layout, precision, method, dlse,
    need_dbias, need_dsinks, deterministic, score=None, score_arrays=None,
    mask_arrays=None, need_dscore=(),
) -> tuple[AttentionVjpProblem, AttentionVjpOperands]:  # fmt: skip
    """Check a call of attention_vjp."""
    _check_flags(
        need_dbias=need_dbias, need_dsinks=need_dsinks, deterministic=deterministic
    )
    for asked, name, given in (
        (need_dbias, "bias", bias),
        (need_dsinks, "sinks", sinks),
    ):
        if asked and given is None:
            raise ValueError(f"need_d{name}=True asks for the gradient of {name}=None")
    has_names = not (isinstance(need_dscore, (tuple, list, str)) and not need_dscore)
    if lse is None and not any(x is None for x in (q, k, v, dout, out)):
        raise TypeError(
            "lse must be an array, got None; attention(..., return_lse=True) returns it"
        )
    _, a = arrays.adopt_all(
        6, q=q, k=k, v=v, dout=dout, out=out, lse=lse, bias=bias, sinks=sinks, dlse=dlse
    )
    forward, operands = attention_problem.attention(
        a["q"], a["k"], a["v"], a["bias"], mask, scale, causal, query_offset, window,
        softcap, a["sinks"], alibi_slopes, query_lengths, key_lengths, layout,
        precision, True, None, method, score, score_arrays, mask_arrays,
        has_names,
    )  # fmt: skip
    if method not in METHODS:
        raise NotImplementedError(
            f"attention_vjp takes method={' or '.join(map(repr, METHODS))}, got "
            f"{method!r}"
        )
    for name in ("out", "dout"):
        _check(name, a[name], forward.out_shape, forward.dtype)
    for name in ("lse", "dlse"):
        if a[name] is not None:
            _check(name, a[name], forward.lse_shape, forward.compute_dtype)

    problem = AttentionVjpProblem(
        forward=forward,
        q_shape=a["q"].shape,
        k_shape=a["k"].shape,
        v_shape=a["v"].shape,
        bias_shape=a["bias"].shape if need_dbias else (),
        sinks_shape=a["sinks"].shape if need_dsinks else (),
        has_dlse=a["dlse"] is not None,
        need_dbias=bool(need_dbias),
        need_dsinks=bool(need_dsinks),
        deterministic=bool(deterministic),
        need_dscore=functions.names_of_gradients(need_dscore, operands.functions),
    )
    outside = a["dout"], a["out"], a["lse"], a["dlse"]
    return problem, views(forward, operands, *outside)


def views(forward, operands, dout, out, lse, dlse) -> AttentionVjpOperands:
    """The operands of a call with those of the forward call."""
    out, dout = (heads_first(x, forward.layout) for x in (out, dout))
    lse, dlse = (x if x is None or forward.heads_axis else x[None] for x in (lse, dlse))
    operands = operands._replace(out=out)
    return AttentionVjpOperands(operands, dout=dout, lse=lse, dlse=dlse)


def _check_flags(**flags):
    for name, value in flags.items():
        arrays.check_bool(name, value)


def _check(name, x, shape, dtype):
    """Refuse an array that the forward call could not have returned."""
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    if arrays.dtype_name(x) != dtype:
        raise TypeError(f"{name} must be {dtype}, got {arrays.dtype_name(x)}")
