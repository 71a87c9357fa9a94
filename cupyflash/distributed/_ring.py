"""attention and its gradients over a ring of ranks."""

import functools
from typing import Any, Literal, overload

import numpy as np

import cupyflash
from cupyflash._attention import problem as attention_problem
from cupyflash._attention import row_sums as attention_row_sums
from cupyflash._attention import vjp_problem
from cupyflash._attention.problem import heads_first
from cupyflash._attention.row_sums import RowSums
from cupyflash._attention.vjp_problem import AttentionGrads
from cupyflash._core import arrays, foreign_names
from cupyflash._core.typing import Array, Layout, Method, Never, Precision, Window
from cupyflash.distributed import _agreement, _bits, _environment, _plan
from cupyflash.distributed._comm import Comm, checked, ending_all, shifted

# Results over parts of the keys that are held before they are joined.
_JOINED_AT_ONCE = 8


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    comm: Comm | None = None,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: Literal[False] = False,
    method: Method = "auto",
    zigzag: bool | None = None,
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    comm: Comm | None = None,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: Literal[True],
    method: Method = "auto",
    zigzag: bool | None = None,
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    comm: Comm | None = None,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: bool = False,
    method: Method = "auto",
    zigzag: bool | None = None,
) -> Array | tuple[Array, Array]: ...
@foreign_names.documented("q", "k", "v")
def attention(
    q: Array = None,
    k: Array = None,
    v: Array = None,
    comm: Comm | None = None,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: bool = False,
    method: Method = "auto",
    zigzag: bool | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """Attention over a sequence that is split over several ranks.

    Every rank calls it with its part of `q`, `k` and `v`, and with the same options.

    Parameters
    ----------
    q, k, v : array_like
        This rank's part of the queries, keys and values, as `shard` returns it;
        otherwise as in `cupyflash.attention`. NumPy, or CuPy with one GPU per rank.
    comm : Comm, optional
        The ranks, from `connect`; by default a connection that the process shares.
    bias, mask : array_like, optional
        As in `cupyflash.attention`, for the queries of this rank and all keys, in the
        order of the whole sequence.
    scale, causal, window, softcap, sinks, alibi_slopes, layout, precision, method
        As in `cupyflash.attention`.
    query_offset, query_lengths, key_lengths : int or array_like of int, optional
        As in `cupyflash.attention`, for the whole sequence; the same on all ranks.
    return_lse : bool, default False
        Also return the logarithm of the softmax denominator.
    zigzag : bool, optional
        How the sequence was split: ``shard(..., causal=zigzag)``. By default the
        same as `causal`. Without a zigzag the parts may have any lengths.

    Returns
    -------
    out : ndarray
        The result for this rank's queries, as in `cupyflash.attention`.
    lse : ndarray
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in `cupyflash.attention`. If one rank's arguments are invalid or differ from
        the others', every rank raises a ValueError.
    ConnectionError, TimeoutError
        If another rank has died, or does not answer; this comm cannot be used any more.

    See Also
    --------
    cupyflash.attention : The function on one device.
    attention_vjp : Gradients.

    Notes
    -----
    At step t a rank computes with the keys of the t-th rank before it, while those of
    the next step are on their way [1]_; results are joined by
    `cupyflash.merge_attention_states` in float32 (float64 for float64), up to eight at
    a time. Each part is rounded to the dtype, and so is the result of joining eight. In
    a zigzag the ranks have equal work under a causal mask [2]_. Keys that no query of a
    rank sees are not sent to it. A rank holds its own keys, those of two others, and up
    to eight results. Results are the same in every run.

    Each call begins with a short message from every rank to every other, which shows
    that they all make the same call. On GPUs a call returns when the keys have arrived,
    while their last part is still being computed.

    References
    ----------
    .. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers
       for near-infinite context", arXiv:2310.01889, 2023.
    .. [2] W. Brandon et al., "Striped attention: faster ring attention for causal
       transformers", arXiv:2311.09431, 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyflash
    >>> from cupyflash import distributed
    >>> q = np.random.default_rng(0).normal(size=(1, 16, 4))
    >>> with distributed.connect() as comm:
    ...     part = distributed.shard(q, comm, causal=True)
    ...     part = distributed.attention(part, part, part, comm, causal=True)
    ...     out = distributed.unshard(part, comm, causal=True)
    >>> bool(np.allclose(out, cupyflash.attention(q, q, q, causal=True)))
    True
    """
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "query_offset": query_offset,
        "query_lengths": query_lengths, "key_lengths": key_lengths,
    }  # fmt: skip
    options = {
        "scale": scale, "causal": causal, "window": window, "softcap": softcap,
        "layout": layout, "precision": precision, "method": method,
    }  # fmt: skip
    out, lse = _run(
        _forward, "attention", comm, given, options, zigzag, unknown, return_lse
    )
    return (out, lse) if return_lse else out


@foreign_names.documented("dout", "q", "k", "v", "out", "lse")
def attention_vjp(
    dout: Array = None,
    q: Array = None,
    k: Array = None,
    v: Array = None,
    out: Array = None,
    lse: Array = None,
    comm: Comm | None = None,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: int | Array | None = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    method: Method = "auto",
    dlse: Array | None = None,
    deterministic: bool = False,
    zigzag: bool | None = None,
    **unknown: Never,
) -> AttentionGrads:
    """Gradients of `attention` over a sequence that is split over several ranks.

    Parameters
    ----------
    dout : array_like, of the shape and dtype of `out`
        Gradient of a loss with respect to this rank's part of the result.
    q, k, v, out, lse : array_like
        This rank's parts of the inputs and results of `attention`.
    comm : Comm, optional
        The ranks, from `connect`; by default a connection that the process shares.
    bias, mask, scale, causal, query_offset, window, softcap, sinks, alibi_slopes, \
query_lengths, key_lengths, layout, precision, zigzag
        As in the call of `attention`.
    method : {"auto", "tiled"}, default "auto"
        There is only one method for gradients.
    dlse : array_like, of the shape and dtype of `lse`, optional
        Gradient of the same loss with respect to `lse`.
    deterministic : bool, default False
        Make gradients bit-identical in every run. In float32 and float64 they always
        are.

    Returns
    -------
    AttentionGrads
        ``(dq, dk, dv, None, None, None)`` for this rank's queries, keys and values.
        Gradients of bias and sinks are not available over ranks.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in `cupyflash.attention_vjp`. If one rank's arguments are invalid or differ
        from the others', every rank raises a ValueError.
    ConnectionError, TimeoutError
        If another rank has died, or does not answer; this comm cannot be used any more.

    See Also
    --------
    attention : The forward call.

    Notes
    -----
    Keys and values travel as in `attention`. Contributions to dk and dv of another rank
    are sent home in the dtype of `k` while the next step is computed, and summed there
    in float32 (float64 for float64), in the order of the steps.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed
    >>> q, k, v, dout = np.random.default_rng(0).normal(size=(4, 1, 16, 4))
    >>> with distributed.connect() as comm:
    ...     q, k, v, dout = (distributed.shard(x, comm) for x in (q, k, v, dout))
    ...     out, lse = distributed.attention(q, k, v, comm, return_lse=True)
    ...     grads = distributed.attention_vjp(dout, q, k, v, out, lse, comm)
    >>> grads.dk.shape
    (1, 16, 4)
    """
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "query_offset": query_offset,
        "query_lengths": query_lengths, "key_lengths": key_lengths,
        "dout": dout, "out": out, "lse": lse, "dlse": dlse,
    }  # fmt: skip
    options = {
        "scale": scale, "causal": causal, "window": window, "softcap": softcap,
        "layout": layout, "precision": precision, "method": method,
        "deterministic": deterministic,
    }  # fmt: skip
    return _run(_backward, "attention_vjp", comm, given, options, zigzag, unknown)


def _run(function, name, comm, *arguments):
    """One of the functions, once all ranks have agreed on its call."""
    comm = _environment.default() if comm is None else checked(comm)
    with comm.lock:
        return _Call(name, comm, *arguments).run(function)


class _Call:
    """Arguments of one call, checked with the other ranks, and views of them."""

    def __init__(self, name, comm, given, options, zigzag, unknown, return_lse=False):
        self.comm, self.given, self.options = comm, given, options
        if zigzag is None:
            zigzag = options["causal"]

        def describe():
            if unknown:
                foreign_names.refuse(name, unknown)
            self._separate_offset()
            self._adopt()
            self._check(return_lse)
            arrays.check_bool("zigzag", zigzag)
            return _plan.describe(name, given, options, zigzag)

        make = functools.partial(_plan.make, comm, given, options, zigzag)
        self.plan = _agreement.agree(comm, describe, make)
        self.xp = arrays.import_cupy() if arrays.is_cupy(given["q"]) else np
        self.transport = comm.for_arrays(given["q"]) if comm.size > 1 else comm

    def _separate_offset(self):
        """A number is an option, an array is not."""
        offset = self.given["query_offset"]
        self.options["query_offset"] = None
        if attention_problem.is_index(offset):
            self.options["query_offset"] = int(offset)
            self.given["query_offset"] = None

    def _adopt(self):
        """Lists and foreign arrays as arrays of one kind."""
        needed = [n for n in ("q", "k", "v", "dout", "out", "lse") if n in self.given]
        order = {n: self.given[n] for n in needed} | self.given
        if callable(order["mask"]):
            raise TypeError(
                "mask must be an array here, not a function: pass causal=, window= or "
                "lengths, or what the function returns for the queries of this rank"
            )
        self.given.update(arrays.adopt_all(len(needed), **order)[1])

    def _check(self, return_lse):
        """Refuse what is wrong with the arrays of this rank, whatever others have."""
        a, options = self.given, self.options
        plain = (
            options["scale"], options["causal"],
            a["query_offset"] if options["query_offset"] is None
            else options["query_offset"],
            options["window"], options["softcap"], a["sinks"], a["alibi_slopes"],
            None, None, options["layout"], options["precision"],
        )  # fmt: skip
        if "dout" in a:
            vjp_problem.attention_vjp(
                a["dout"], a["q"], a["k"], a["v"], a["out"], a["lse"], None, None,
                *plain, options["method"], a["dlse"], False, False,
                options["deterministic"],
            )  # fmt: skip
        else:
            attention_problem.attention(
                a["q"], a["k"], a["v"], None, None, *plain, return_lse,
                None, options["method"],
            )  # fmt: skip
        seqlen_q = a["q"].shape[_plan.sequence_axis(a["q"], options["layout"])]
        for name in ("bias", "mask"):
            x = a[name]
            if x is not None and x.ndim > 1 and x.shape[-2] not in (1, seqlen_q):
                raise ValueError(
                    f"{name} must have 1 or {seqlen_q} rows, one for each query of "
                    f"this rank, got shape {x.shape}"
                )

    def run(self, function):
        """Its result; an error ends the call on all ranks."""
        if self.xp is np:
            return self._run(function)
        with self.given["q"].device:
            return self._run(function)

    def _run(self, function):
        with ending_all(self.transport):
            result = function(self)
            self.transport.finish()
            return result

    # --- views

    def view(self, name):
        """An argument with its heads first."""
        x = self.given[name]
        if x is None:
            return None
        if name in ("lse", "dlse"):
            return x if self.plan.problem.heads_axis else x[None]
        return heads_first(x, self.options["layout"])

    def as_given(self, x, ndim, dtype):
        """A result with heads first as the caller has them, contiguous."""
        if ndim == 2:
            x = x[0]
        elif self.options["layout"] == "bshd":
            x = x.swapaxes(-3, -2)
        return _bits.contiguous(self.xp, _bits.cast(self.xp, x, dtype))

    def compute_dtype(self):
        return arrays.to_dtype(self.plan.problem.compute_dtype)

    def options_of(self, call):
        """Options of the plain functions for one call of the plan."""
        given, problem = self.given, self.plan.problem
        found = {n: self.options[n] for n in ("softcap", "precision", "method")}
        found["scale"] = problem.scale
        if not call.masked:
            return found
        for name, *part in (
            ("query_lengths", call.first_row, call.rows),
            ("key_lengths", call.first_key, call.keys),
        ):
            found[name] = self.part_of_lengths(name, *part)
        # As it was given: the bounds of the problem go with an offset within reach.
        rule = self.options["query_offset"]
        rule = problem.query_offset if rule is None else rule
        if rule == "lengths":
            of_keys, of_queries = (
                getattr(problem, axis) if given[name] is None else self._signed(name)
                for name, axis in (
                    ("key_lengths", "seqlen_k"),
                    ("query_lengths", "seqlen_q"),
                )
            )
            rule = of_keys - of_queries
        elif rule == "array":
            rule = self._signed("query_offset")
        for name in ("bias", "mask"):
            if given[name] is not None:
                found[name] = _part_of_scores(given[name], call)
        return found | {
            "causal": self.options["causal"],
            "window": self.options["window"],
            "alibi_slopes": given["alibi_slopes"],
            "query_offset": rule + call.shift,
        }

    def options_of_no_keys(self):
        """(rows, options) of calls over the sinks alone."""
        for chunk in self.plan.queries[self.comm.rank]:
            rows = slice(chunk.at, chunk.at + chunk.length)
            lengths = self.part_of_lengths("query_lengths", chunk.first, rows)
            yield rows, {"sinks": self.given["sinks"], "query_lengths": lengths}

    def part_of_lengths(self, name, first, part):
        """How much of a part of the sequence lengths leave, which counts from first."""
        if self.given[name] is None:
            return None
        return (self._signed(name) - first).clip(0, part.stop - part.start)

    def _signed(self, name):
        return self.given[name].astype(np.int64)


def _part_of_scores(x, call):
    """What an array that broadcasts to the scores has for one call."""
    count = call.keys.stop - call.keys.start
    if x.ndim and x.shape[-1] != 1:
        x = x[..., call.first_key : call.first_key + count]
    if x.ndim > 1 and x.shape[-2] != 1:
        x = x[..., call.rows, :]
    return x


def _travel(call, k, v):
    """(shift, source, first, k, v): the keys of each rank from `first` on, own first.

    Those of the next rank are on their way meanwhile. Empty where this rank sees none.
    """
    plan, comm, xp = call.plan, call.transport, call.xp
    packed: dict[tuple[int, int], Any] = {}

    def post(shift):
        target, source = shifted(comm, shift)
        first, end = plan.needed(target, comm.rank)
        if (first, end) not in packed:
            packed[first, end] = [
                _bits.contiguous(xp, x[..., first:end, :]) for x in (k, v)
            ]
        begin, stop = plan.needed(comm.rank, source)
        received = [
            xp.empty((*x.shape[:-2], stop - begin, x.shape[-1]), x.dtype)
            for x in (k, v)
        ]
        wait = comm.exchange(
            packed[first, end],
            target if end > first else None,
            received,
            source if stop > begin else None,
        )
        return source, begin, received, wait

    coming = post(1) if comm.size > 1 else None
    yield 0, comm.rank, 0, k, v
    for shift in range(1, comm.size):
        source, begin, received, wait = coming
        wait()
        if shift + 1 < comm.size:
            coming = post(shift + 1)
        yield shift, source, begin, *received


def _forward(call):
    q, k, v = (call.view(name) for name in ("q", "k", "v"))
    plan, rank = call.plan, call.comm.rank
    has_sinks = call.given["sinks"] is not None
    count = sum(len(plan.calls(rank, source)) for source in range(call.comm.size))
    parts = _Parts(call, q.shape[-2], count + has_sinks)
    if has_sinks:
        out, lse = parts.room()
        _bits.bits(out)[...] = 0
        lse[...] = _of_no_keys(call, q, k, v)
    for _, source, first, keys, values in _travel(call, k, v):
        for c in plan.calls(rank, source):
            here = slice(c.keys.start - first, c.keys.stop - first)
            out, lse = parts.room()
            _, lse[..., c.rows] = cupyflash.attention(
                q[..., c.rows, :],
                keys[..., here, :],
                values[..., here, :],
                out=out[..., c.rows, :],
                return_lse=True,
                **call.options_of(c),
            )
    out, lse = parts.joined()
    problem = plan.problem
    ndim = 3 if problem.heads_axis else 2
    out = call.as_given(out, ndim, arrays.to_dtype(problem.dtype))
    return out, lse if problem.heads_axis else lse[0]


def _of_no_keys(call, q, k, v):
    """The lse of sinks alone, which join each row once."""
    parts = []
    for rows, options in call.options_of_no_keys():
        _, lse = cupyflash.attention(
            q[..., rows, :], k[..., :0, :], v[..., :0, :], return_lse=True, **options
        )
        parts.append(lse)
    return call.xp.concatenate(parts, axis=-1)


class _Parts:
    """Results over parts of the keys, a few of them joined at a time, along a tree.

    Joining sums in float32, and rounds to the dtype of the results: once a level.
    """

    def __init__(self, call, seqlen_q, count):
        problem, xp = call.plan.problem, call.xp
        slots = max(1, min(count, _JOINED_AT_ONCE))
        rows = (slots, *problem.batch, problem.num_heads, seqlen_q)
        dtype = arrays.to_dtype(problem.dtype)
        # Rows that a part has not are as those that saw no key, which add nothing.
        make = xp.zeros if slots == 1 else xp.empty
        self._outs = make((*rows, problem.head_dim_v), dtype)
        self._lses = xp.full(rows, -np.inf, arrays.to_dtype(problem.compute_dtype))
        self._used = 0
        above = -(-count // slots)
        self._above = _Parts(call, seqlen_q, above) if above > 1 else None

    def room(self):
        """Arrays for out and lse of the next part, to be written where it has rows."""
        if self._used == len(self._outs):
            self._move_up()
        self._used += 1
        return self._outs[self._used - 1], self._lses[self._used - 1]

    def joined(self):
        """out and lse over all parts."""
        if self._above is not None:
            self._move_up()
            return self._above.joined()
        if len(self._outs) == 1:
            return self._outs[0], self._lses[0]
        return cupyflash.merge_attention_states(
            self._outs[: self._used], self._lses[: self._used]
        )

    def _move_up(self):
        out, lse = self._above.room()
        _, lse[...] = cupyflash.merge_attention_states(
            self._outs[: self._used], self._lses[: self._used], out=out
        )
        self._lses[...], self._used = -np.inf, 0


def _backward(call):
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    dout, q, k, v, out, lse, dlse = (call.view(name) for name in names)
    dtype, rank = call.compute_dtype(), call.comm.rank
    dq = _Sum(q, dtype, call.xp)
    home = _Home(call, k, v, dtype)
    row_sums = _row_sums(call, q)

    def vjp(rows, keys, values, **options):
        """Gradients of some queries over some keys."""
        given = (
            dout[..., rows, :], q[..., rows, :], keys, values, out[..., rows, :],
            lse[..., rows],
        )  # fmt: skip
        options |= {
            "dlse": None if dlse is None else dlse[..., rows],
            "deterministic": call.options["deterministic"],
        }
        if row_sums is None:
            return cupyflash.attention_vjp(*given, **options)
        grads, sums = attention_row_sums.attention_vjp(*given, **options)
        row_sums.add((slice(None),) * (row_sums.ds.ndim - 1) + (rows,), sums)
        return grads

    for shift, source, first, keys, values in _travel(call, k, v):
        dk, dv = (_Sum(x, dtype, call.xp) for x in (keys, values))
        for c in call.plan.calls(rank, source):
            part = slice(c.keys.start - first, c.keys.stop - first)
            grads = vjp(
                c.rows, keys[..., part, :], values[..., part, :], **call.options_of(c)
            )
            dq.add(c.rows, grads.dq)
            dk.add(part, grads.dk)
            dv.add(part, grads.dv)
        home.send(shift, dk, dv)
    if row_sums is not None:
        if call.given["sinks"] is not None:
            for rows, options in call.options_of_no_keys():
                vjp(rows, k[..., :0, :], v[..., :0, :], **options)
        lack = row_sums.lack(0 if dlse is None else dlse, lse)
        mended = arrays.sum_to(call.plan.problem.scale * lack, q.shape)
        dq.add(slice(0, q.shape[-2]), mended)
    dq = dq.total(call.given["q"].dtype)  # while the last dk and dv are on their way
    dk, dv = home.sums()
    return AttentionGrads(
        *(
            call.as_given(x, call.given[name].ndim, call.given[name].dtype)
            for name, x in (("q", dq), ("k", dk), ("v", dv))
        )
    )


def _row_sums(call, q):
    """Where rows of dS are summed if that mends dq: on NumPy, over several calls."""
    plan, problem, rank = call.plan, call.plan.problem, call.comm.rank
    count = sum(len(plan.calls(rank, source)) for source in range(call.comm.size))
    count += call.given["sinks"] is not None
    if call.xp is not np or count < 2:
        return None  # a call over all keys mends its dq
    shape = (*problem.batch, problem.num_heads, q.shape[-2])
    return RowSums.zeros(shape, problem.head_dim, call.compute_dtype())


class _Sum:
    """A gradient of the shape of `like`, made of those of parts of its rows.

    Sums are in `dtype`. The latest part waits: the last one is added and the sum
    rounded in one pass over memory. The first one is kept as it is, and changed.
    """

    def __init__(self, like, dtype, xp):
        self._shape, self._dtype, self._xp = like.shape, dtype, xp
        self._sum, self._waiting = None, None

    def add(self, rows, part):
        if self._waiting is not None:
            self._sum = self._with_waiting()
        self._waiting = rows, part

    def total(self, dtype=None):
        """The sum in a dtype; by default in that of its only part or of sums."""
        if self._waiting is None:
            return self._xp.zeros(self._shape, dtype or self._dtype)
        if dtype is None:
            return self._with_waiting()
        return _bits.cast(self._xp, self._with_waiting(dtype), dtype)

    def _with_waiting(self, dtype=None):
        """The sum with the part that waits, rounded to a dtype if that saves a pass."""
        rows, part = self._waiting
        if part.shape == self._shape:
            if self._sum is None:
                return part
            return _bits.summed(self._xp, self._sum, part, dtype or self._dtype)
        if self._sum is None:
            total = self._xp.zeros(self._shape, dtype or self._dtype)
        else:
            # What one part alone gave is added to as it is: that rounds once, too.
            sums = self._sum.dtype if dtype else self._dtype
            total = _bits.cast(self._xp, self._sum, sums)
        _bits.add(total[..., rows, :], part)
        return total


class _Home:
    """Gradients of keys and values on the way to the rank whose keys they are."""

    def __init__(self, call, k, v, dtype):
        self._call, self._like, self._dtype = call, (k, v), dtype
        self._sums = [_Sum(x, dtype, call.xp) for x in (k, v)]
        self._coming = None
        self._sent = []

    def send(self, shift, dk, dv):
        """Post what this rank has for the one that is `shift` places before it."""
        call, comm = self._call, self._call.transport
        whole = slice(0, self._like[0].shape[-2])
        if shift == 0:
            for total, part in zip(self._sums, (dk, dv), strict=True):
                total.add(whole, part.total())
            return
        source, target = shifted(comm, shift)
        xp = call.xp
        sent = [
            _bits.contiguous(xp, part.total(x.dtype))
            for part, x in zip((dk, dv), self._like, strict=True)
        ]
        first, end = call.plan.needed(source, comm.rank)
        received = [
            xp.empty((*x.shape[:-2], end - first, x.shape[-1]), x.dtype)
            for x in self._like
        ]
        wait = comm.exchange(
            sent,
            target if sent[0].shape[-2] else None,
            received,
            source if end > first else None,
        )
        self._take()
        self._coming = slice(first, end), received, wait
        self._sent = sent

    def sums(self):
        self._take()
        return [
            total.total(x.dtype)
            for total, x in zip(self._sums, self._like, strict=True)
        ]

    def _take(self):
        """Add what has been posted before."""
        if self._coming is None:
            return
        rows, received, wait = self._coming
        wait()
        if rows.stop > rows.start:
            for total, part in zip(self._sums, received, strict=True):
                total.add(rows, part)
        self._coming = None
