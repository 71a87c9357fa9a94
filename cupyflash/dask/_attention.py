"""attention and merge_attention_states of Dask arrays."""

import functools
import itertools
import math
from typing import Any, Literal, overload

import dask.array as da
import numpy as np
from dask.base import tokenize

import cupyflash
from cupyflash._attention import problem as attention_problem
from cupyflash._core import arrays as _arrays
from cupyflash._core import foreign_names
from cupyflash._core.typing import Layout, Method, Never, Precision, Window
from cupyflash.dask import _chunks, _tree

_LENGTHS = ("query_lengths", "key_lengths")


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: Any = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: Literal[False] = False,
    method: Method = "auto",
    split_every: int | None = None,
) -> da.Array: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: Any = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: Literal[True],
    method: Method = "auto",
    split_every: int | None = None,
) -> tuple[da.Array, da.Array]: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: Any = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: bool = False,
    method: Method = "auto",
    split_every: int | None = None,
) -> da.Array | tuple[da.Array, da.Array]: ...
@foreign_names.documented("q", "k", "v")
def attention(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    causal: bool = False,
    query_offset: Any = None,
    window: Window = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    layout: Layout = "bhsd",
    precision: Precision = "float32",
    return_lse: bool = False,
    method: Method = "auto",
    split_every: int | None = None,
    **unknown: Never,
) -> da.Array | tuple[da.Array, da.Array]:
    """Scaled dot-product attention of Dask arrays, chunked along any axes.

    Parameters
    ----------
    q, k, v : dask.array.Array
        Shapes and dtypes as in `cupyflash.attention`, with NumPy or CuPy chunks. Along
        the batch and the heads, chunks are cut wherever those of q, k or v are. The
        last axis becomes one chunk.
    bias, mask, sinks, alibi_slopes, query_offset, query_lengths, key_lengths : optional
        As in `cupyflash.attention`; Dask arrays, or arrays of the kind of the chunks.
    scale, causal, window, softcap, layout, precision, return_lse, method : optional
        As in `cupyflash.attention`.
    split_every : int, optional
        How many results over chunks of keys are joined at once; by default Dask's
        setting.

    Returns
    -------
    out : dask.array.Array
        With the chunks of q; nothing has been computed.
    lse : dask.array.Array
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        As in `cupyflash.attention`, raised at once; lengths in Dask arrays are checked
        when they are computed. ValueError also for axes of unknown length.

    Notes
    -----
    Each pair of a chunk of queries and a chunk of keys is one call of
    `cupyflash.attention`, and `merge_attention_states` joins the results in a tree.
    Pairs that a causal mask or a window hides are left out of the graph, if
    `query_offset` and lengths are known on the host. In 16 bits each part is rounded to
    the dtype before it is joined.

    Examples
    --------
    >>> import dask.array as da
    >>> import cupyflash.dask
    >>> q = k = da.eye(4, chunks=2)
    >>> cupyflash.dask.attention(q, k, k, scale=0.0).compute()[0]
    array([0.25, 0.25, 0.25, 0.25])
    """
    if unknown:
        foreign_names.refuse("attention", unknown)
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "query_offset": query_offset,
        "query_lengths": query_lengths, "key_lengths": key_lengths,
    }  # fmt: skip
    if callable(mask):
        raise TypeError(
            "mask must be an array here, not a function: pass causal=, window= or "
            "lengths, or what the function returns for all queries and keys"
        )
    split_every = _chunks.split_every(split_every)
    # What the plain function says of a number is said of it as it is.
    is_number = _arrays.is_scalar(query_offset)
    plain = {"query_offset": given.pop("query_offset")} if is_number else {}
    arrays = _chunks.adopted(3, **given)
    # Values of lengths are checked here if they are known here.
    known = {
        n: given[n]
        for n in _LENGTHS
        if not (isinstance(given[n], da.Array) or _arrays.lives_on_gpu(given[n]))
    }
    stand_ins = {n: _chunks.stand_in(x) for n, x in arrays.items()} | known
    options = {
        "scale": scale, "causal": causal, "window": window, "softcap": softcap,
        "layout": layout, "precision": precision, "return_lse": return_lse,
        "out": None, "method": method,
    }  # fmt: skip
    problem, _ = attention_problem.attention(
        **{**dict.fromkeys(given), **stand_ins, **plain}, **options
    )
    moves = causal or window is not None or alibi_slopes is not None
    call = functools.partial(
        _part,
        rule=_rule(problem, query_offset) if moves else 0,
        lengths={"query_lengths": problem.seqlen_q, "key_lengths": problem.seqlen_k},
        options={n: x for n, x in options.items() if n not in ("layout", "out")},
    )
    out, lse = _call_by_chunks(problem, arrays, call, split_every)
    if not problem.heads_axis:
        out, lse = out[0], lse[0]
    elif layout == "bshd":
        out = out.swapaxes(-3, -2)
    return (out, lse) if return_lse else out


@foreign_names.documented("outs", "lses")
def merge_attention_states(
    outs: Any = None,
    lses: Any = None,
    *,
    axis: int = 0,
    split_every: int | None = None,
    **unknown: Never,
) -> tuple[da.Array, da.Array]:
    """Combine attention over parts of the keys, in Dask arrays with any chunks.

    Parameters
    ----------
    outs : dask.array.Array, shape (parts, ..., seqlen_q, head_dim_v), or list of arrays
        Results of `attention` over disjoint parts of the keys.
    lses : dask.array.Array, shape (parts, ..., seqlen_q), or list of arrays
        Their lse.
    axis : int, default 0
        Axis of `lses`, and of `outs`, that counts the parts; of lists, the first.
    split_every : int, optional
        How many results are joined at once; by default Dask's setting.

    Returns
    -------
    out, lse : dask.array.Array
        As `cupyflash.merge_attention_states` returns them; nothing has been computed.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `cupyflash.merge_attention_states`, raised at once.
    """
    if unknown:
        foreign_names.refuse("merge_attention_states", unknown)
    split_every = _chunks.split_every(split_every)
    listed = [isinstance(x, (list, tuple)) for x in (outs, lses)]
    given = {n: _stacked(n, x) for n, x in (("outs", outs), ("lses", lses))}
    outs, lses = _chunks.adopted(2, **given).values()
    problem, _ = attention_problem.merge(
        _as_given(_chunks.stand_in(outs), listed[0]),
        _as_given(_chunks.stand_in(lses), listed[1]),
        axis,
        None,
    )
    axis = np.lib.array_utils.normalize_axis_index(axis, lses.ndim)
    outs, lses = (
        x if is_list else da.moveaxis(x, axis, 0)
        for x, is_list in ((outs, listed[0]), (lses, listed[1]))
    )
    axes = tuple(range(lses.ndim))
    outs, lses = _chunks.unified(
        _chunks.rechunk(outs, {-1: -1}), (*axes, lses.ndim), lses, axes
    )
    name = f"merge-attention-states-{tokenize(outs, lses)}"
    parts, *chunks = lses.chunks

    def leaves(place):
        for n in range(len(parts)):
            yield (
                (name, *place, n),
                (
                    cupyflash.merge_attention_states,
                    (outs.name, n, *place, 0),
                    (lses.name, n, *place),
                ),
            )

    return _states(name, chunks, leaves, [outs, lses], problem, split_every)


def _stacked(name, x):
    """A list of arrays as one, the parts in front."""
    if not isinstance(x, (list, tuple)):
        return x
    if not x:
        raise ValueError(f"{name} is an empty list; pass at least one part")
    parts = _chunks.adopted(1, **{f"{name}[{n}]": part for n, part in enumerate(x)})
    return da.stack(list(parts.values()))


def _as_given(x, is_list):
    return list(x) if is_list else x


# --- the graph


def _call_by_chunks(problem, arrays, call, split_every):
    """(out, lse) of a call, heads first."""
    q, k, v = (
        _chunks.rechunk(
            attention_problem.heads_first(arrays[name], problem.layout), {-1: -1}
        )
        for name in ("q", "k", "v")
    )
    axes = tuple(range(len(problem.batch)))
    q, k, v = (da.broadcast_to(x, problem.batch + x.shape[-3:]) for x in (q, k, v))
    q, k, v = _chunks.unified(
        *(q, (*axes, "heads", "i", "d")),
        *(k, (*axes, "kv_heads", "j", "d")),
        *(v, (*axes, "kv_heads", "j", "e")),
    )
    heads, of_keys = _head_chunks(q.chunks[-3], problem.group_size)
    q = _chunks.rechunk(q, {-3: heads})
    k, v = (_heads_of_keys(x, of_keys) for x in (k, v))
    *batch, _, queries, _ = q.chunks
    keys = k.chunks[-2]
    scores = (*batch, heads, queries, keys)
    # The axes of the scores that each option has, where they are not of length 1.
    of = {
        "bias": scores,
        "mask": scores,
        "sinks": (heads,),
        "alibi_slopes": (*batch, heads),
        **dict.fromkeys(("query_offset", *_LENGTHS), tuple(batch)),
    }
    options = {
        name: _chunks.rechunk(arrays[name], _aligned(arrays[name], of[name]))
        for name in of
        if name in arrays
    }
    name = f"attention-{tokenize(q, k, v, options, call)}"
    i0, j0 = (np.cumsum([0, *sizes]).tolist() for sizes in (queries, keys))

    def leaves(place):
        *entry, head, i = place
        for n, j in enumerate(_seen(problem, i0[i : i + 2], j0)):
            # The sink of a row joins it once.
            taken = {m: x for m, x in options.items() if n == 0 or m != "sinks"}
            at = {
                "bias": (*place, j),
                "mask": (*place, j),
                "sinks": (head,),
                "alibi_slopes": (*entry, head),
            }
            yield (
                (name, *place, j),
                (
                    functools.partial(call, i0=i0[i], j0=j0[j], names=tuple(taken)),
                    (q.name, *place, 0),
                    *((x.name, *entry, head, j, 0) for x in (k, v)),
                    *(_key(x, at.get(m, entry)) for m, x in taken.items()),
                ),
            )

    return _states(
        name,
        scores[:-1],
        leaves,
        [q, k, v, *options.values()],
        problem,
        split_every,
    )


def _head_chunks(chunks, group):
    """Chunks of query heads, and for each (first, end) of its heads of keys.

    A chunk has whole groups, or heads of one group.
    """
    heads, of_keys, first = [], [], 0
    for size in chunks:
        end = first + size
        while first < end:
            cut = end // group * group
            if first % group or cut == first:  # up to the end of this group
                cut = min(end, (first // group + 1) * group)
            heads.append(cut - first)
            of_keys.append((first // group, -(-cut // group)))
            first = cut
    return (tuple(heads), of_keys) if heads else ((0,), [(0, 0)])


def _heads_of_keys(x, of_keys):
    """Keys or values whose chunks of heads belong to those of the queries."""
    ends = np.cumsum([0, *x.chunks[-3]]).tolist()
    if of_keys == list(itertools.pairwise(ends)):
        return x
    parts = [_chunks.rechunk(x[..., a:b, :, :], {-3: -1}) for a, b in of_keys]
    return da.concatenate(parts, axis=-3)


def _aligned(x, chunks):
    """Chunks of an array that broadcasts to these, by axis."""
    sizes = chunks[len(chunks) - x.ndim :]
    return {a: n for a, n in enumerate(sizes) if x.shape[a] != 1}


def _key(x, place):
    """The chunk of an array that broadcasts, at a place of what it broadcasts to."""
    place = place[len(place) - x.ndim :]
    return (x.name, *(0 if x.numblocks[a] == 1 else n for a, n in enumerate(place)))


def _seen(problem, queries, keys):
    """Chunks of keys that one of these queries may see, by number; one at least."""
    found = range(len(keys) - 1)
    if isinstance(problem.query_offset, int):
        first, end = (i + problem.query_offset for i in queries)
        left, right = (
            math.inf if x is None else x for x in (problem.left, problem.right)
        )
        seen = (
            j for j in found if keys[j] < end + right and keys[j + 1] > first - left
        )
        found = list(seen) or [0]
    return found


def _rule(problem, query_offset):
    """As it was given: the bounds of the problem go with an offset within reach."""
    is_int = attention_problem.is_index(query_offset)
    return int(query_offset) if is_int else problem.query_offset


def _states(name, chunks, leaves, arrays, problem, split_every):
    """Arrays out and lse, of the tree over the leaves of each place of lse."""
    lse = getattr(problem, "lse_dtype", None) or problem.compute_dtype
    results = {
        "out": ((problem.head_dim_v,), _arrays.to_dtype(problem.dtype)),
        "lse": ((), np.dtype(lse)),
    }
    return _tree.joined(
        name, chunks, leaves, cupyflash.merge_attention_states, results, arrays,
        split_every,
    )  # fmt: skip


# --- what is done to chunks


def _part(q, k, v, *given, names, i0, j0, rule, lengths, options):
    """(out, lse) of the queries from i0 on over the keys from j0 on."""
    given = dict(zip(names, given, strict=True))
    for name, axis, first, count in (
        ("query_lengths", "seqlen_q", i0, q.shape[-2]),
        ("key_lengths", "seqlen_k", j0, k.shape[-2]),
    ):
        if name in given:
            if isinstance(given[name], np.ndarray):
                attention_problem.check_lengths(name, given[name], axis, lengths[name])
            lengths = lengths | {name: given[name].astype(np.int64)}
            given[name] = (lengths[name] - first).clip(0, count)
    offset = rule
    of_entries = given.pop("query_offset", None)
    if rule == "lengths":
        offset = lengths["key_lengths"] - lengths["query_lengths"]
    elif rule == "array":
        offset = of_entries.astype(np.int64)
    return cupyflash.attention(
        q,
        k,
        v,
        query_offset=offset + i0 - j0,
        **given,
        **(options | {"return_lse": True}),
    )
