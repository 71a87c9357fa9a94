"""What each rank computes and sends, and that all ranks agree on it."""

import itertools
import math
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cupyflash._attention import problem as attention_problem
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core import arrays
from cupyflash.distributed import _shards
from cupyflash.distributed._comm import Comm, bytes_of
from cupyflash.distributed._shards import Chunk

_ALONG_QUERIES = ("bias", "mask")
# Of the whole sequence: the same numbers on all ranks.
_WHOLE = ("sinks", "alibi_slopes", "query_offset", "query_lengths", "key_lengths")


class Call(NamedTuple):
    """One call of attention: queries of this rank over keys of another.

    `shift` is added to the query offset of the whole. A call that is not `masked` sees
    every pair and needs no positions.
    """

    rows: slice
    keys: slice
    shift: int
    masked: bool
    first_row: int = 0  # in the whole sequence
    first_key: int = 0


@dataclass(frozen=True)
class Plan:
    """The calls of all ranks for one problem, which is that of the whole sequence."""

    problem: AttentionProblem
    rank: int
    queries: list[list[Chunk]]  # of each rank
    keys: list[list[Chunk]]
    _found: dict[tuple[int, int], list[Call]] = field(default_factory=dict)

    def calls(self, rank: int, source: int) -> list[Call]:
        """What a rank computes with the keys of another."""
        if (rank, source) not in self._found:
            self._found[rank, source] = calls(
                self.problem, self.queries[rank], self.keys[source]
            )
        return self._found[rank, source]

    def needed(self, rank: int, source: int) -> tuple[int, int]:
        """The first and the end of the keys of `source` that `rank` sees."""
        found = self.calls(rank, source)
        if not found:
            return 0, 0
        return min(c.keys.start for c in found), max(c.keys.stop for c in found)


def calls(
    problem: AttentionProblem, queries: list[Chunk], keys: list[Chunk]
) -> list[Call]:
    """As few calls as there can be for these queries and keys, whole blocks left out.

    Without a left bound and terms of positions, pieces that are apart in the sequence
    may be neighbours in a call: all that counts is how far right each query sees.
    """
    pairs = [
        (q, k)
        for q, k in itertools.product(queries, keys)
        if q.length and k.length and _sees(problem, q, k)
    ]
    if not pairs:
        return []
    depends_on_positions = (
        problem.left is not None
        or not isinstance(problem.query_offset, int)
        or any(
            getattr(problem, name) is not None
            for name in (
                "bias", "mask", "alibi_slopes", "query_lengths", "key_lengths",
            )
        )
    )  # fmt: skip
    joined = None if depends_on_positions else _joined(problem, pairs)
    return joined or [
        Call(
            slice(q.at, q.at + q.length),
            slice(k.at, k.at + k.length),
            q.first - k.first,
            True,
            q.first,
            k.first,
        )
        for q, k in pairs
    ]


def _sees(problem, q, k):
    """Whether some query of a chunk may see some key of another."""
    if not isinstance(problem.query_offset, int):
        return True
    left, right = (math.inf if x is None else x for x in (problem.left, problem.right))
    first = q.first + problem.query_offset
    return (
        k.first <= first + q.length - 1 + right
        and k.first + k.length - 1 >= first - left
    )


def _joined(problem, pairs):
    """All these pairs as one call, if each query then sees what it should; or None."""
    rows, keys = (
        slice(
            min(c.at for c in chunks),
            max(c.at + c.length for c in chunks),
        )
        for chunks in zip(*pairs, strict=True)
    )
    if (rows.stop - rows.start) * (keys.stop - keys.start) != sum(
        q.length * k.length for q, k in _rectangle(pairs)
    ):
        return None  # something lies between these chunks
    right = problem.right

    def reach(q, k, bound):
        """How many keys beyond the first the first query sees, as far as it matters."""
        return max(-q.length, min(bound, k.length - 1))

    def due(q, k):
        offset = math.inf if right is None else problem.query_offset + right
        return reach(q, k, q.first - k.first + offset)

    rectangle = _rectangle(pairs)
    if all(due(q, k) == k.length - 1 for q, k in rectangle):
        return [Call(rows, keys, 0, False)]
    for one, other in rectangle:
        bound = due(one, other) + other.at - one.at  # of row and key 0 of the parts
        if all(reach(q, k, bound + q.at - k.at) == due(q, k) for q, k in rectangle):
            offset = bound + rows.start - keys.start - right
            return [Call(rows, keys, offset - problem.query_offset, True)]
    return None


def _rectangle(pairs):
    """All pairs of the queries and the keys that stand in some pair."""
    queries, keys = ({c.at: c for c in chunks} for chunks in zip(*pairs, strict=True))
    return list(itertools.product(queries.values(), keys.values()))


# --- of what all ranks were given


def describe(
    name: str, given: dict[str, Any], options: dict[str, Any], zigzag: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """What must be alike on all ranks, and lengths of the parts of this one.

    `given` are the arrays of the call, None where absent.
    """
    layout = options["layout"]
    lengths = {}
    kind = "CuPy" if arrays.is_cupy(given["q"]) else "NumPy"
    alike = {"function": name, "kind of arrays": kind, "zigzag": zigzag, **options}
    for n, x in given.items():
        if x is None:
            alike.setdefault(n, None)
            continue
        shape = list(x.shape)
        axis = None
        if n in ("q", "k"):
            axis = sequence_axis(x, layout)
            lengths[n] = x.shape[axis]
        elif n in _ALONG_QUERIES and x.ndim > 1:
            axis = -2
            lengths[n] = shape[-2]
        elif n in ("v", "out", "dout"):
            axis = sequence_axis(x, layout)
        elif n in ("lse", "dlse"):
            axis = -1
        if axis is not None:
            shape[axis] = "its part"
        alike[n] = f"{x.dtype.name} ({', '.join(map(str, shape))})"
        if n in _WHOLE and isinstance(x, np.ndarray):
            alike[f"the checksum of {n}"] = zlib.crc32(bytes_of(x.copy()))
    return alike, lengths


def sequence_axis(x: Any, layout: str) -> int:
    """The axis of queries or keys of an array of the caller."""
    return -3 if layout == "bshd" and x.ndim > 2 else -2


def make(
    comm: Comm,
    given: dict[str, Any],
    options: dict[str, Any],
    zigzag: bool,
    parts: list[dict[str, int]],
) -> Plan:
    """The plan of a call, of the lengths that each rank has."""
    lengths = {n: [part[n] for part in parts] for n in parts[0]}
    chunks = {n: _shards.chunks_of(comm, n, lengths[n], zigzag) for n in ("q", "k")}
    totals = {n: sum(of) for n, of in lengths.items()}
    for n in _ALONG_QUERIES:
        if n in lengths and set(lengths[n]) <= {1}:
            totals[n] = 1  # the same for all queries
        elif n in lengths and lengths[n] != lengths["q"]:
            raise ValueError(
                f"{n} must have a row for each query of its rank, or one row on all: "
                f"the ranks have {lengths[n]} rows and {lengths['q']} queries"
            )
    whole = {
        n: _stand_in(n, x, totals, options["layout"])
        for n, x in given.items()
        if n not in ("dout", "out", "lse", "dlse")
    }
    if options["query_offset"] is not None:
        whole["query_offset"] = options["query_offset"]
    names = "scale", "causal", "window", "softcap", "layout", "precision", "method"
    problem, _ = attention_problem.attention(
        **whole, **{n: options[n] for n in names}, return_lse=True, out=None
    )
    return Plan(problem, comm.rank, chunks["q"], chunks["k"])


def _stand_in(name, x, totals, layout):
    """An array of the shape that the whole would have, without its memory."""
    if x is None or (name.endswith("_lengths") and isinstance(x, np.ndarray)):
        return x  # lengths are checked by their values where the host has them
    shape = list(x.shape)
    if name in ("q", "k", "v"):
        shape[sequence_axis(x, layout)] = totals["q" if name == "q" else "k"]
    elif name in _ALONG_QUERIES and x.ndim > 1:
        shape[-2] = totals[name]
    return np.broadcast_to(np.zeros((), x.dtype), shape)
