"""The kernel spec of attention with few queries per entry."""

from dataclasses import dataclass

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import launch_config, num_heads
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

_WARP = 32
_WIDEST = 256
# Numbers of a query that a lane holds of q, for all queries together.
_MOST_COLUMNS = 32
MOST_QUERIES = 8
# Bytes that a lane loads before it uses the first of them.
_LOADED = 128
_MOST_WARPS = 8
# Registers per multiprocessor.
_REGISTERS = 1 << 16
_VECTOR_BYTES = 16


def power_of_two(n: float) -> int:
    """The next one, at least 1."""
    return 1 << max(0, int(-(-n // 1)) - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """How threads share the rows of an entry: the defines of attention/simt/gemv.cuh.

    `lanes` of a warp share a key. Each has vectors of `vector` columns: `parts_k` of a
    row of k, `parts_v` of one of v.
    """

    queries: int
    lanes: int
    vector: int
    parts_k: int
    parts_v: int
    unroll: int
    warps: int
    entries: int

    @property
    def columns(self) -> int:
        """The most columns that a lane has, over all queries."""
        return self.queries * self.vector * max(self.parts_k, self.parts_v)

    @property
    def num_threads(self) -> int:
        return _WARP * self.warps * self.entries


def layout(problem: AttentionProblem) -> Layout:
    """The layout of a problem that `unsupported_reason` allows."""
    itemsize = ITEMSIZE[problem.dtype]
    queries = problem.seqlen_q
    vector = _VECTOR_BYTES // itemsize
    if queries > 2 and itemsize == 2:  # more lanes, with less to hold
        vector //= 2
    dims = problem.head_dim, problem.head_dim_v
    lanes = min(_WARP, power_of_two(max(dims) / vector))
    parts_k, parts_v = (-(-n // (lanes * vector)) for n in dims)
    keys = _WARP // lanes
    of_key = (parts_k + parts_v) * vector * itemsize
    unroll = min(max(_LOADED // of_key, 1), 4, power_of_two(problem.seqlen_k / keys))
    # Two steps of each warp, so that loads and products of a block overlap.
    warps = power_of_two(problem.seqlen_k / (2 * keys * unroll))
    warps = min(warps, _MOST_WARPS)
    entries = 1 if warps > 1 else 4
    return Layout(queries, lanes, vector, parts_k, parts_v, unroll, warps, entries)


def unsupported_reason(
    problem: AttentionProblem,
    device: Device,
    most_keys: dict[float, int],
    heads_per_sm: float,
) -> str | None:
    """Why no kernel for few queries supports `problem`, or None.

    `most_keys` are those that pay off, by the number of queries.
    """
    reason = (
        kernel.refuse_old_device(problem.dtype, device)
        or spec.refuse_dtype(problem, *spec.HALVES, "float32")
        or spec.refuse_width(problem, _WIDEST)
    )
    if reason is not None:
        return reason
    if problem.has_functions:
        return "takes no score or mask function"
    if problem.keys_of_part is not None:
        return "takes all keys of a head"
    if problem.group_size > 1:
        return f"takes one query head per head of k, not {problem.group_size}"
    if not 1 <= problem.seqlen_q <= MOST_QUERIES:
        return f"takes entries with 1 to {MOST_QUERIES} queries, not {problem.seqlen_q}"
    most = by_threshold(most_keys, problem.seqlen_q)
    if not 1 <= problem.seqlen_k <= most:
        return (
            f"takes 1 to {most} keys for {problem.seqlen_q} queries, not "
            f"{problem.seqlen_k}"
        )
    if problem.no_vectors is not None:
        return problem.no_vectors
    itemsize = ITEMSIZE[problem.dtype]
    for name in ("head_dim", "head_dim_v"):
        if (n := getattr(problem, name)) * itemsize % _VECTOR_BYTES:
            return f"takes rows of whole vectors, not {name} {n}"
    if layout(problem).columns > _MOST_COLUMNS:
        return (
            f"has too few registers for {problem.seqlen_q} queries of "
            f"{max(problem.head_dim, problem.head_dim_v)} columns"
        )
    if (heads := num_heads(problem)) < heads_per_sm * device.num_sms:
        return (
            f"takes {heads_per_sm} heads for each of {device.num_sms} multiprocessors, "
            f"not {heads}"
        )
    return None


def config(
    source: str,
    entry: str,
    problem: AttentionProblem,
    batch_dims: int,
    registers: int,
    **more,
) -> LaunchConfig:
    """A launch over all heads, with so many registers per thread."""
    of = layout(problem)
    return launch_config(
        problem, batch_dims, -(-num_heads(problem) // of.entries), of.num_threads,
        source, entry,
        QUERIES=of.queries, LANES=of.lanes, VECTOR=of.vector, PARTS_K=of.parts_k,
        PARTS_V=of.parts_v, UNROLL=of.unroll, WARPS=of.warps, ENTRIES=of.entries,
        MIN_BLOCKS=max(1, _REGISTERS // (of.num_threads * registers)), **more,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GemvKernel(spec.ForwardSpec):
    """Attention of few queries by products of matrices and vectors.

    `most_keys` and `heads_per_sm` belong to unsupported_reason(), the former by the
    size of an element; `registers` are those of a thread, by the columns of
    Layout.columns.
    """

    most_keys: dict[int, dict[float, int]]
    heads_per_sm: float
    registers: dict[float, int]

    def unsupported_reason(self, problem, device) -> str | None:
        keys = self.most_keys.get(ITEMSIZE[problem.dtype], {})
        return unsupported_reason(problem, device, keys, self.heads_per_sm)

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        registers = by_threshold(self.registers, layout(problem).columns)
        source, entry = "attention/simt/gemv_forward.cu", "attention_gemv"
        return (config(source, entry, problem, batch_dims, registers),)


GEMV = GemvKernel(
    name="gemv",
    most_keys={2: {MOST_QUERIES: 4096}, 4: {MOST_QUERIES: 4096}},
    heads_per_sm=2,
    registers={8: 96, 16: 128, 32: 168},
)
