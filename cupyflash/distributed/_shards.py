"""Which part of a sequence each rank has."""

import itertools
from typing import NamedTuple

import numpy as np

from cupyflash._core import arrays
from cupyflash._core.typing import Array
from cupyflash.distributed import _bits
from cupyflash.distributed._agreement import agree
from cupyflash.distributed._comm import Comm, checked, ending_all, shifted


class Chunk(NamedTuple):
    """Neighbours in a sequence: where they are in a rank's part, and in the whole."""

    at: int
    first: int
    length: int


def even_chunks(seqlen: int, size: int, zigzag: bool) -> list[list[Chunk]]:
    """The chunks of each rank.

    Of 2 * size pieces in a zigzag, rank r has the r-th from each end: under a causal
    mask every rank then has equal work.
    """
    if not zigzag:
        edges = [seqlen * i // size for i in range(size + 1)]
        return [_joined([pair]) for pair in itertools.pairwise(edges)]
    edges = [seqlen * i // (2 * size) for i in range(2 * size + 1)]
    pieces = list(itertools.pairwise(edges))
    return [_joined([pieces[r], pieces[-1 - r]]) for r in range(size)]


def given_chunks(lengths: list[int]) -> list[list[Chunk]]:
    """One chunk a rank, one after another, of these lengths."""
    edges = [0, *itertools.accumulate(lengths)]
    return [_joined([pair]) for pair in itertools.pairwise(edges)]


def _joined(pieces):
    """Chunks of (first, end) pairs in order; those that touch are one."""
    found: list[Chunk] = []
    at = 0
    for first, end in pieces:
        if found and found[-1].first + found[-1].length == first:
            last = found.pop()
            found.append(last._replace(length=last.length + end - first))
        else:
            found.append(Chunk(at, first, end - first))
        at += end - first
    return found


def shard(x: Array, comm: Comm, axis: int = -2, *, causal: bool = False) -> Array:
    """The part of a whole array that belongs to this rank.

    Parameters
    ----------
    x : array_like
        The whole, the same on every rank; NumPy or CuPy.
    comm : Comm
        The ranks.
    axis : int, default -2
        The axis of the sequence: -3 for layout "bshd", -1 for lse.
    causal : bool, default False
        Split the sequence in a zigzag: of ``2 * comm.size`` pieces rank r gets the r-th
        from each end, so that all ranks have equal work under a causal mask. Otherwise
        the ranks get one piece each, in order.

    Returns
    -------
    ndarray
        A contiguous copy; lengths differ by 1 (zigzag: 2) at most where they do not
        divide.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    numpy.exceptions.AxisError
        If `axis` is out of bounds.

    See Also
    --------
    unshard : The whole again.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed
    >>> with distributed.connect() as comm:  # of one rank, which has all
    ...     distributed.shard(np.arange(4.0), comm, axis=0)
    array([0., 1., 2., 3.])
    """
    comm = checked(comm)
    zigzag = arrays.check_bool("causal", causal)
    x = arrays.adopt(x)
    xp = arrays.import_cupy() if arrays.is_cupy(x) else np
    axis = _whole_axis(x, axis)
    chunks = even_chunks(x.shape[axis], comm.size, zigzag)[comm.rank]
    return _bits.joined(
        xp, [_rows(x, axis, c.first, c.length) for c in chunks], axis=axis
    )


def unshard(x: Array, comm: Comm, axis: int = -2, *, causal: bool = False) -> Array:
    """Put the parts of all ranks back together, on every rank.

    Parameters
    ----------
    x : array_like
        This rank's part, as returned by `shard` or `attention`; NumPy or CuPy.
    comm : Comm
        The ranks; each calls this.
    axis : int, default -2
        The axis of the sequence.
    causal : bool, default False
        Whether the parts form a zigzag, as `shard` makes with ``causal=True``.

    Returns
    -------
    ndarray
        New and contiguous.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the parts do not belong together, on every rank.
    numpy.exceptions.AxisError
        If `axis` is out of bounds.
    ConnectionError, TimeoutError
        If another rank has died, or does not answer.

    See Also
    --------
    shard : A rank's part.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import distributed
    >>> with distributed.connect() as comm:
    ...     distributed.unshard(np.arange(4.0), comm, axis=0)
    array([0., 1., 2., 3.])
    """
    with checked(comm).lock:
        return _unshard(x, comm, axis, causal)


def _unshard(x, comm, axis, causal):
    def describe():
        nonlocal x, axis
        arrays.check_bool("causal", causal)
        x = arrays.adopt(x)
        if x.dtype.hasobject:
            raise TypeError(f"x must hold numbers, got {x.dtype}")
        axis = _whole_axis(x, axis)
        rest = [*x.shape[:axis], "its part", *x.shape[axis + 1 :]]
        alike = {
            "function": "unshard",
            "kind of arrays": "CuPy" if arrays.is_cupy(x) else "NumPy",
            "x": f"{x.dtype.name} ({', '.join(map(str, rest))})",
            "causal": causal,
        }
        return alike, x.shape[axis]

    chunks = agree(
        comm, describe, lambda lengths: chunks_of(comm, "x", lengths, causal)
    )
    xp = arrays.import_cupy() if arrays.is_cupy(x) else np
    if comm.size > 1:
        comm = comm.for_arrays(x)

    def new(length):
        return xp.empty((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)

    lengths = [sum(c.length for c in part) for part in chunks]
    with ending_all(comm):
        found = new(sum(lengths))
        own = _bits.contiguous(xp, x)
        _deal(found, axis, own, chunks[comm.rank])
        for shift in range(1, comm.size):
            target, source = shifted(comm, shift)
            part = new(lengths[source])
            comm.exchange([own], target, [part], source)()
            _deal(found, axis, part, chunks[source])
        comm.finish()
    return found


def chunks_of(
    comm: Comm, name: str, lengths: list[int], zigzag: bool
) -> list[list[Chunk]]:
    """The chunks of each rank, whose parts have these lengths."""
    if not zigzag:
        return given_chunks(lengths)
    chunks = even_chunks(sum(lengths), comm.size, True)
    for rank, (length, dealt) in enumerate(zip(lengths, chunks, strict=True)):
        expected = sum(chunk.length for chunk in dealt)
        if length != expected:
            raise ValueError(
                f"{name} has {length} positions of the sequence on rank {rank}; a "
                f"zigzag of {sum(lengths)} over {comm.size} ranks has {expected} "
                "there: split it with cupyflash.distributed.shard(..., causal=True), "
                "or pass zigzag=False if ranks have one piece each"
            )
    return chunks


def _whole_axis(x, axis):
    return np.lib.array_utils.normalize_axis_index(
        arrays.index("axis", axis, "an int"), x.ndim, "axis"
    )


def _deal(whole, axis, part, chunks):
    """Write a rank's part where it belongs."""
    whole, part = _bits.bits(whole), _bits.bits(part)
    for c in chunks:
        _rows(whole, axis, c.first, c.length)[...] = _rows(part, axis, c.at, c.length)


def _rows(x, axis, first, count):
    return x[(slice(None),) * axis + (slice(first, first + count),)]
