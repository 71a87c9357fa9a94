"""The kernel spec of attention with few queries per entry."""

import math
from dataclasses import dataclass, field

from cupyflash._attention.gpu import spec
from cupyflash._attention.gpu.config import (
    FAST_FLOAT64,
    LONG_SUM,
    SplitKV,
    holds_blocks,
    if_on,
    is_plain,
    launch_config,
    num_heads,
)
from cupyflash._attention.gpu.simt.tiny_forward import TINY
from cupyflash._attention.problem import AttentionProblem
from cupyflash._core.dtypes import ITEMSIZE
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, by_threshold

_WARP, _VECTOR_BYTES = 32, 16
_WIDEST = 256  # columns
# Registers of q that a lane holds, for all queries together.
_MOST_COLUMNS = 32
# Vectors of a row of float64 numbers that a lane has without more registers; with
# several queries it never has more.
_MOST_PARTS = 4
# Bytes that a lane loads before it uses the first of them; fewer than a register has
# take a whole one.
_MOST_LOADED, _REGISTER_BYTES = 128, 4
# Keys up to which narrow vectors are left to tiles and threads, if there are more
# queries or at most so many columns.
_SHORT_KEYS, _FEW_COLUMNS = 32, 16
# Warps per multiprocessor that hide the latency of memory.
_ENOUGH_WARPS = 24
# Keys from which on `_is_wide`.
_WIDE_KEYS = 256
# Registers per multiprocessor.
_REGISTERS = 1 << 16
# From here on the compiler needs an eighth more of them for the same code.
_NEEDS_MORE = (10, 0)


def power_of_two(n: float) -> int:
    """The next one, at least 1."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()


def vector_bytes(problem: AttentionProblem) -> int:
    """Bytes, a power of two up to 16, of which rows and their starts are multiples."""
    itemsize = ITEMSIZE[problem.dtype]
    dims = problem.head_dim * itemsize, problem.head_dim_v * itemsize
    return math.gcd(problem.row_alignment, *dims)


def has_narrow_vectors(problem: AttentionProblem) -> bool:
    """Whether rows are not whole vectors of 16 bytes, or do not start at such."""
    return vector_bytes(problem) < _VECTOR_BYTES


def _starts_anywhere(problem: AttentionProblem) -> bool:
    """Whether other rows load those of k and v a few bytes at a time, which is slow."""
    return problem.row_alignment < _VECTOR_BYTES


def _adds_bias(problem: AttentionProblem) -> bool:
    """Whether a bias is read for each score, with its key."""
    return problem.bias is not None and problem.mask is None


def _is_wide(problem: AttentionProblem, device: Device) -> bool:
    """Whether entries of many float64 keys have two vectors a lane, and no options.

    Then more warps, with a smaller step each, hide more of the latency. With options
    there are no registers for them, and of fewer heads blocks share the keys.
    """
    return (
        problem.dtype == "float64"
        and problem.seqlen_q == 1
        and problem.seqlen_k >= _WIDE_KEYS
        and 64 < max(problem.head_dim, problem.head_dim_v) <= 128
        and num_heads(problem) > 2 * device.num_sms
        and is_plain(problem)
        and not has_narrow_vectors(problem)
    )


@dataclass(frozen=True)
class Layout:
    """How threads share the rows of an entry: defines of attention/simt/gemv.cuh.

    `lanes` of a warp share a key. Each has vectors of `vector` columns: `parts_k` of a
    row of k, `parts_v` of one of v. A step of a warp has `unroll` keys for each lane.
    Where rows are not whole vectors of 16 bytes, vectors are the widest that they are
    whole numbers of, and a lane has as many columns in more of them.
    """

    queries: int
    lanes: int
    vector: int
    parts_k: int
    parts_v: int
    unroll: int
    warps: int  # of an entry
    entries: int  # of a block
    words: int = 1  # registers of a number that is added up

    @property
    def columns(self) -> int:
        """The most columns that a lane has, over all queries, in registers."""
        return self.queries * self.vector * self.parts_widest * self.words

    @property
    def parts_widest(self) -> int:
        return max(self.parts_k, self.parts_v)

    @property
    def num_threads(self) -> int:
        return _WARP * self.warps * self.entries

    @property
    def shared_bytes(self) -> int:
        """of_warps_t of attention/simt/gemv.cuh."""
        columns = self.parts_k * self.vector * self.lanes
        return 4 * self.words * self.warps * self.queries * (columns + 2)

    @property
    def part_bytes(self) -> int:
        """part_t of attention/simt/gemv_forward.cu."""
        columns = self.parts_v * self.vector * self.lanes
        return 4 * self.words * self.queries * (columns + 2)

    @property
    def keys_of_step(self) -> int:
        """kStep of attention/simt/gemv.cuh."""
        return self.warps * _WARP // self.lanes * self.unroll


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured best on an H100: docs/design/lab/0027-few-queries.md.

    By the size of an element: `steps` are (unroll, warps) by the bytes of k of an entry
    with one query, `steps_of_more` those with more; `most_queries` by the keys. By the
    dtype: `most_bytes` of k of an entry by the columns of a head, and if a bias is
    added. `heads_per_sm` are the fewest heads per multiprocessor, by the size of an
    element and the keys, `heads_per_sm_of_more` those with more than one query where
    they differ, by the queries before the keys. `most_keys` are those of an entry, by
    the size of an element.
    """

    steps: dict[int, dict[float, tuple[int, int]]]
    steps_of_more: dict[int, tuple[int, int]]
    most_queries: dict[int, dict[float, int]]
    most_bytes: dict[str, dict[float, float]]
    most_bytes_with_bias: dict[str, float]
    heads_per_sm: dict[int, dict[float, float]]
    # Of a thread, by Layout.columns; the second with options.
    registers: dict[float, tuple[int, int]]
    registers_of_float64: dict[float, tuple[int, int]] = field(default_factory=dict)
    # The same of one query in float64.
    registers_of_one_query: tuple[int, int] | None = None
    # The same without options, where a warp has an entry and a lane one vector of each
    # row: with more, fewer blocks would run at once.
    registers_of_one_warp: int | None = None
    # Whether narrow vectors need more of them where blocks share the keys of an entry,
    # and where a lane has many of a row. In float64 the latter always do, and those of
    # several queries: each load of a few bytes has one of its own.
    more_if_shared: bool = False
    # Vectors of a row that a lane has, if there are lanes for them, by the size of an
    # element and the queries.
    parts: dict[int, dict[float, int]] = field(default_factory=dict)
    heads_per_sm_of_more: dict[int, dict[float, dict[float, float]]] = field(
        default_factory=dict
    )
    # One query of wide rows in float64, if `_is_wide`.
    wide_step: tuple[int, int] | None = None
    wide_registers: int = 0
    most_keys: dict[int, int] = field(
        default_factory=lambda: {2: 4096, 4: 4096, 8: 4096}
    )
    # Queries of rows that start anywhere with more than _SHORT_KEYS keys, where these
    # are more, by the size of an element and `vector_bytes`.
    most_narrow_queries: dict[int, dict[float, int]] = field(default_factory=dict)

    def layout(self, problem: AttentionProblem, device: Device) -> Layout:
        """The layout of a problem that `unsupported_reason` allows."""
        itemsize, queries = ITEMSIZE[problem.dtype], problem.seqlen_q
        vector = _VECTOR_BYTES // itemsize
        if itemsize == 2 and queries > 2:  # more lanes, with less to hold
            vector //= 2
        # Of narrower vectors a lane has so many more.
        narrow = min(vector, vector_bytes(problem) // itemsize)
        dims = problem.head_dim, problem.head_dim_v
        parts = by_threshold(self.parts.get(itemsize, {math.inf: 1}), queries)
        lanes = min(_WARP, power_of_two(max(dims) / (vector * parts)))
        vector = narrow
        parts_k, parts_v = (-(-n // (lanes * vector)) for n in dims)
        unroll, warps = self.steps_of_more[itemsize]
        if queries == 1:
            k_bytes = problem.seqlen_k * problem.head_dim * itemsize
            unroll, warps = by_threshold(self.steps[itemsize], k_bytes)
        if self.wide_step is not None and _is_wide(problem, device):
            unroll, warps = self.wide_step
        of_key = (parts_k + parts_v) * max(_REGISTER_BYTES, vector * itemsize)
        # Several queries, and float64, leave fewer registers for narrow vectors.
        is_tight = has_narrow_vectors(problem) and (queries > 2 or itemsize == 8)
        most_loaded = _MOST_LOADED // (2 if is_tight else 1)
        unroll = min(unroll, max(1, most_loaded // of_key))
        if _adds_bias(problem):
            warps = min(warps, 4)  # it takes registers
        # With few entries more warps, as long as they have keys.
        wanted = _ENOUGH_WARPS * device.num_sms / num_heads(problem)
        useful = problem.seqlen_k * lanes / (_WARP * unroll)
        warps = max(warps, min(8, power_of_two(wanted), power_of_two(useful)))
        entries = 4 if warps == 1 else 1
        words = 2 if itemsize == 8 else 1
        return Layout(
            queries, lanes, vector, parts_k, parts_v, unroll, warps, entries, words
        )

    def unsupported_reason(
        self, problem: AttentionProblem, device: Device
    ) -> str | None:
        """Why no kernel for few queries supports `problem`, or None."""
        reason = (
            kernel.refuse_old_device(problem.dtype, device)
            or spec.refuse_dtype(problem, *self.most_bytes)
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
        if not num_heads(problem):
            return "there are no heads"
        queries, keys = problem.seqlen_q, problem.seqlen_k
        itemsize = ITEMSIZE[problem.dtype]
        anywhere = _starts_anywhere(problem)
        if (shared := vector_bytes(problem)) < itemsize:
            return f"takes rows of whole elements, not at every {shared} bytes"
        most = LONG_SUM if anywhere else self.most_keys[itemsize]
        if not 1 <= keys <= most:
            return f"takes entries with 1 to {most} keys, not {keys}"
        most = by_threshold(self.most_queries[itemsize], keys)
        if anywhere and keys > _SHORT_KEYS and itemsize in self.most_narrow_queries:
            more = by_threshold(self.most_narrow_queries[itemsize], shared)
            most = max(most, more)
        if not 1 <= queries <= most:
            return f"takes entries with 1 to {most} queries, not {queries}"
        widest = max(problem.head_dim, problem.head_dim_v)
        most_bytes = by_threshold(self.most_bytes[problem.dtype], widest)
        if _adds_bias(problem):
            most_bytes = max(most_bytes, self.most_bytes_with_bias[problem.dtype])
        if keys <= _SHORT_KEYS and widest <= _FEW_COLUMNS and shared < _VECTOR_BYTES:
            return f"{keys} keys of {widest} columns are left to tiles or threads"
        if not anywhere and keys * problem.head_dim * itemsize > most_bytes:
            return f"{keys} keys of {widest} columns are faster on tensor cores"
        heads = num_heads(problem)
        heads_per_sm = self.heads_per_sm[itemsize]
        if queries > 1 and itemsize in self.heads_per_sm_of_more:
            heads_per_sm = by_threshold(self.heads_per_sm_of_more[itemsize], queries)
        # Tiles are slow in 16 bits then, however few the heads.
        per_sm = 0 if anywhere and itemsize == 2 else by_threshold(heads_per_sm, keys)
        if heads < (fewest := per_sm * device.num_sms):
            return (
                f"takes {math.ceil(fewest)} heads or more for {keys} keys, not {heads}"
            )
        of = self.layout(problem, device)
        is_tight = queries > 1 and of.words == 2 and shared < _VECTOR_BYTES
        if of.columns > _MOST_COLUMNS or (is_tight and of.parts_widest > _MOST_PARTS):
            return f"has too few registers for {queries} queries of {widest} columns"
        return None

    def min_blocks(
        self,
        problem: AttentionProblem,
        of: Layout,
        device: Device,
        is_shared: bool = False,
    ) -> int:
        """Blocks per multiprocessor, by registers."""
        table = self.registers if of.words == 1 else self.registers_of_float64
        plain, with_options = by_threshold(table, of.columns)
        if self.registers_of_one_query and of.words == 2 and of.queries == 1:
            plain, with_options = self.registers_of_one_query
        registers = plain if is_plain(problem) else with_options
        is_light = of.warps == of.parts_k == of.parts_v == of.words == 1
        if self.registers_of_one_warp and is_light and is_plain(problem):
            registers = self.registers_of_one_warp
        if self.wide_step is not None and _is_wide(problem, device):
            registers = self.wide_registers
        is_narrow = of.parts_widest > _MOST_PARTS
        needs_more = (
            of.queries > 1
            or (is_shared and self.more_if_shared)
            or (is_narrow and (of.words == 2 or self.more_if_shared))
        )
        if needs_more and has_narrow_vectors(problem):
            registers += registers // 2
        if device.cc >= _NEEDS_MORE:
            registers += registers // 8
        return max(1, _REGISTERS // (of.num_threads * registers))

    def config(
        self,
        source: str,
        entry: str,
        problem: AttentionProblem,
        batch_dims: int,
        device: Device,
        splits: int = 1,
        smem: int = 0,
        **more,
    ) -> LaunchConfig:
        """A launch over all heads, or so many splits of each."""
        of = self.layout(problem, device)
        num_blocks = -(-num_heads(problem) // of.entries) * splits
        return launch_config(
            problem, batch_dims, num_blocks, of.num_threads,
            source, entry,
            QUERIES=of.queries, LANES=of.lanes, VECTOR=of.vector, PARTS_K=of.parts_k,
            PARTS_V=of.parts_v, UNROLL=of.unroll, WARPS=of.warps, ENTRIES=of.entries,
            MIN_BLOCKS=self.min_blocks(problem, of, device, splits > 1), smem=smem,
            **more,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GemvKernel(spec.ForwardSpec):
    """Attention of few queries by products of matrices and vectors.

    In 16 bits, heads of 65 to 128 columns must be `wide_heads_per_sm`. In float64, more
    than one query has at most `most_keys_beside_tiles` keys, and `most_beside_tiles`
    queries, where a row of tiles on tensor cores takes the others, or if two queries
    have at most `most_keys_per_sm` keys of all heads for each multiprocessor. In
    float32, more than `most_beside_few` queries of more than `widest_beside_few`
    columns are left to `mma_few`, if they have `least_keys_of_few` and there is shared
    memory for two blocks of `bytes_of_few`. Tiles
    read rows that start anywhere a few bytes at a time: these come here with fewer
    heads and more keys.

    Blocks share the keys of an entry if there are at most `shared_per_sm` entries per
    multiprocessor, and these finish sooner that way: each block has at least
    `least_steps` steps of keys, all of them take at most `most_waves` waves, and to
    combine what they found takes as long as `combining` steps, and `combining_one` for
    each of them.
    """

    tuning: Tuning
    wide_heads_per_sm: int = 8
    most_keys_beside_tiles: int = 64
    most_beside_tiles: int = 2
    most_keys_per_sm: int = 128
    most_beside_few: int = 5
    widest_beside_few: int = 32
    least_keys_of_few: int = 128
    bytes_of_few: int = 80 << 10
    shared_per_sm: int = 2
    least_steps: int = 2
    most_waves: int = 4
    combining: float = 2
    combining_one: float = 0.04

    def unsupported_reason(self, problem, device) -> str | None:
        reason = self.tuning.unsupported_reason(problem, device)
        if reason is not None:
            return reason
        in_16_bits = ITEMSIZE[problem.dtype] == 2 and not _starts_anywhere(problem)
        widest, heads = max(problem.head_dim, problem.head_dim_v), num_heads(problem)
        if (
            in_16_bits
            and 64 < widest <= 128
            and heads < (n := self.wide_heads_per_sm * device.num_sms)
        ):
            return f"takes {n} heads or more of {widest} columns, not {heads}"
        queries = problem.seqlen_q
        if (
            queries > self.most_beside_few
            and widest > self.widest_beside_few
            and problem.seqlen_k >= self.least_keys_of_few
            and holds_blocks(device, 2, self.bytes_of_few)
        ):
            return f"{queries} queries of {widest} columns are faster on tensor cores"
        return self._refuse_float64(problem, device)

    def _refuse_float64(self, problem: AttentionProblem, device: Device) -> str | None:
        """Why other rows are faster in float64, or None."""
        if problem.dtype != "float64":
            return None
        if TINY.unsupported_reason(problem, device) is None:
            return "a thread for each row is faster in float64"
        queries, keys = problem.seqlen_q, problem.seqlen_k
        keys_of_all = num_heads(problem) * keys
        is_few = queries <= self.most_beside_tiles and (
            _starts_anywhere(problem)
            or keys <= self.most_keys_beside_tiles
            or keys_of_all <= self.most_keys_per_sm * device.num_sms
        )
        if queries > 1 and not is_few and device.arch in FAST_FLOAT64:
            return f"{queries} queries of {keys} keys are faster on tensor cores"
        return None

    def split_kv(self, problem, device) -> SplitKV:
        """By whole steps of keys, done by the kernel itself."""
        splits = self.num_splits(problem, device)
        return SplitKV(splits, -(-problem.seqlen_k // splits), in_kernel=True)

    def num_counters(self, device: Device) -> int:
        """The most entries whose keys blocks share."""
        return self.shared_per_sm * device.num_sms

    def num_splits(self, problem: AttentionProblem, device: Device) -> int:
        """Blocks that share the keys of an entry."""
        of = self.tuning.layout(problem, device)
        heads = num_heads(problem)
        if of.warps == 1 or heads > self.num_counters(device):
            return 1
        places = device.num_sms * self.tuning.min_blocks(problem, of, device)
        steps = -(-problem.seqlen_k // of.keys_of_step)
        most = min(self.most_waves * places // heads, steps // self.least_steps)

        def length(splits: int) -> float:
            """Steps of all waves, one after the other, and of what comes last."""
            waves = -(-heads * splits // places)
            combining = self.combining + splits * self.combining_one
            return waves * -(-steps // splits) + combining * (splits > 1)

        return min(range(1, max(1, most) + 1), key=length)

    def configs(self, problem, batch_dims, device) -> tuple[LaunchConfig, ...]:
        source, entry = "attention/simt/gemv_forward.cu", "attention_gemv"
        splits = self.num_splits(problem, device)
        more = if_on(KEY_SPLITS=splits > 1)
        return (
            self.tuning.config(
                source, entry, problem, batch_dims, device, splits, **more
            ),
        )


GEMV = GemvKernel(
    name="gemv",
    tuning=Tuning(
        steps={
            2: {28 << 10: (2, 1), 48 << 10: (4, 4), math.inf: (4, 8)},
            4: {34 << 10: (2, 1), 80 << 10: (4, 4), math.inf: (4, 8)},
            8: {34 << 10: (2, 1), 512 << 10: (4, 4), math.inf: (4, 8)},
        },
        steps_of_more={2: (2, 2), 4: (2, 2), 8: (2, 4)},
        most_queries={2: {math.inf: 1}, 4: {32: 2, math.inf: 5}, 8: {math.inf: 4}},
        most_bytes={
            "float16": {32: math.inf, 128: 40 << 10, 256: 256 << 10},
            "bfloat16": {32: math.inf, 128: 28 << 10, 256: 32 << 10},
            "float32": {256: math.inf},
            "float64": {256: math.inf},
        },
        most_bytes_with_bias={
            "float16": 128 << 10,
            "bfloat16": 40 << 10,
            "float32": math.inf,
            "float64": math.inf,
        },
        heads_per_sm={
            2: {128: 0.5, math.inf: 2},
            4: {math.inf: 0},
            8: {math.inf: 0},
        },
        # Of one head alone, 3 and 4 queries are as fast in tiles.
        heads_per_sm_of_more={
            4: {
                2: {128: 0.5, math.inf: 0},
                4: {128: 0.5, math.inf: 0.01},
                math.inf: {128: 0.5, math.inf: 2},
            }
        },
        registers={8: (96, 128), 16: (112, 168), 32: (168, 255)},
        registers_of_float64={8: (128, 168), 16: (204, 255), 32: (255, 255)},
        registers_of_one_query=(128, 168),
        wide_step=(1, 8),
        wide_registers=80,
        registers_of_one_warp=64,
        most_keys={2: 4096, 4: LONG_SUM, 8: LONG_SUM},
        most_narrow_queries={2: {2: 4, 8: 2}, 4: {4: 8, 8: 5}},
    ),
)
