"""The table of attention kernels, and how each cuts a problem."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash import (
    _attention_f64,
    _attention_problem,
    _kernels,
    _layout,
    _tensormap,
)
from cupyflash._attention_mma import MMA
from cupyflash._attention_problem import AttentionProblem, MergeProblem
from cupyflash._attention_rows import (
    MOST_KEYS,
    OPTIONS,
    Config,
)
from cupyflash._attention_rows import defines as _defines
from cupyflash._attention_rows import has_terms as _has_terms
from cupyflash._attention_rows import is_plain as _is_plain
from cupyflash._attention_rows import most_seen as _most_seen
from cupyflash._attention_rows import num_rows as _num_rows
from cupyflash._attention_rows import num_tiles as _num_tiles
from cupyflash._attention_rows import scale_is_plain as _scale_is_plain
from cupyflash._kernels import CUDA_TYPES, ITEMSIZE, Device, Variant

# "No bound" among positions; kFar in cuda_src/attention/params.cuh.
FAR = 1 << 61

# --- parameters ----------------------------------------------------------------------


def params_dtype(batch_dims: int) -> np.dtype:
    """params_t of cuda_src/attention/params.cuh."""
    operand = [
        ("batch", "i8", (batch_dims,)),
        ("head", "i8"),
        ("row", "i8"),
        ("col", "i8"),
    ]
    return np.dtype(
        [
            ("batch_size", "i8"),
            ("num_heads", "i8"),
            ("group_size", "i8"),
            ("seqlen_q", "i8"),
            ("seqlen_k", "i8"),
            ("head_dim", "i8"),
            ("head_dim_v", "i8"),
            ("left", "i8"),
            ("right", "i8"),
            ("offset_from_lengths", "i8"),
            ("scale", "f8"),
            ("softcap", "f8"),
            ("batch_shape", "i8", (batch_dims,)),
            *((name, operand) for name in ("q", "k", "v", "out", *OPTIONS)),
        ]
    )


# Which axes follow the batch axes of an operand.
_AXES = {
    **dict.fromkeys(("q", "k", "v", "out", "bias", "mask"), ("head", "row", "col")),
    **dict.fromkeys(("sinks", "alibi_slopes"), ("head",)),
    **dict.fromkeys(("query_offsets", "query_lengths", "key_lengths"), ()),
}


def params_fields(problem: AttentionProblem, operands) -> dict:
    """The values of params_t for a call; batch axes are merged where possible."""
    strides, batch_strides = {}, {}
    for name, axes in _AXES.items():
        x = getattr(operands, name)
        if x is not None:
            steps = _layout.element_strides(x)
        elif name == "out":
            steps = new_out_strides(problem)
        else:
            strides[name] = dict.fromkeys(("head", "row", "col"), 0)
            continue
        num_batch = len(steps) - len(axes)
        # sinks have no batch axes; they are the same to each entry.
        batch_strides[name] = steps[:num_batch] or (0,) * len(problem.batch)
        strides[name] = {
            **dict.fromkeys(("head", "row", "col"), 0),
            **dict(zip(axes, steps[num_batch:], strict=True)),
        }
    shape, merged = _layout.collapse(problem.batch, list(batch_strides.values()))
    # A kernel has one batch axis at least.
    shape = shape or (1,)
    merged = [steps or (0,) for steps in merged]
    batch_strides = dict(zip(batch_strides, merged, strict=True))
    return {
        "batch_size": math.prod(problem.batch),
        "num_heads": problem.num_heads,
        "group_size": problem.group_size,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "left": FAR if problem.left is None else min(problem.left, FAR),
        "right": FAR if problem.right is None else min(problem.right, FAR),
        "offset_from_lengths": problem.query_offset == "lengths",
        "scale": problem.scale,
        "softcap": problem.softcap,
        "batch_shape": shape,
        **{
            name: (batch_strides.get(name, (0,) * len(shape)), *strides[name].values())
            for name in _AXES
        },
    }


def new_out_strides(problem: AttentionProblem) -> tuple[int, ...]:
    """Strides, heads first, of a contiguous result in the layout of the call."""
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    steps = contiguous_strides(shape)
    if problem.layout == "bshd" and problem.heads_axis:
        row = problem.num_heads * problem.head_dim_v
        steps = (*steps[:-3], problem.head_dim_v, row, 1)
    return steps


def contiguous_strides(shape) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def launch_offset(problem: AttentionProblem) -> int:
    """The query offset as a launch argument; 0 where the device knows it."""
    offset = problem.query_offset
    return 0 if isinstance(offset, str) else max(-FAR, min(offset, FAR))


# --- rows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Rows of q and of k that a thread block holds at a time, and columns of v."""

    block_m: int
    block_n: int
    num_threads: int
    block_dv: int | None = None  # None: all of them
    min_blocks: int = 1  # of a multiprocessor at once; caps the registers of a thread
    only_plain: bool = False  # options would need more registers than there are


def padded_dim(head_dim: int) -> int:
    """`head_dim` as the tiled kernel is compiled for it; zeros fill the rest."""
    step = 16 if head_dim <= 16 else 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step


def rows_in_shared(tile: Tile, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes for a tile of q, one of k or v, and one of p, each row padded."""

    def row(n):
        return (n * itemsize // 16 | 1) * 16

    kv = max(row(head_dim), row(head_dim_v))
    tile_q, tile_p = tile.block_m * row(head_dim), tile.block_m * row(tile.block_n)
    return tile_q + tile.block_n * kv + tile_p


def nothing_shared(tile: Tile, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """No shared memory."""
    return 0


# For the size of an accumulator: (largest head dimension, tiles from large to small).
TileLadder = dict[int, tuple[tuple[float, tuple[Tile, ...]], ...]]


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that holds no scores in memory.

    The name is also the stem of ``cuda_src/attention/<name>.cu`` and, after
    ``attention_``, its entry point. `tiles` holds for each size of an accumulator the
    tiles for head dimensions up to a bound, from large to small.
    """

    name: str
    rungs: tuple[str, ...]
    tiles: TileLadder
    smem: Callable[[Tile, int, int, int], int] = nothing_shared
    dims_compiled: bool = False  # head_dim and head_dim_v are constants of the kernel
    fast: bool = False  # must not spill

    def _dims(self, problem: AttentionProblem) -> tuple[int, int]:
        return padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)

    def _tiles(self, problem, device):
        """The tiles that fit on `device`, all with the block_n of the first."""
        dims = self._dims(problem)
        itemsize = ITEMSIZE[problem.compute_dtype]
        ladder = self.tiles[itemsize]
        if max(dims) > ladder[-1][0]:
            return ()
        tiles = [
            tile
            for tile in _kernels.by_threshold(ladder, max(dims))
            if self.smem(tile, *dims, itemsize) <= device.smem_optin
            and (not tile.only_plain or _is_plain(problem))
        ]
        return tuple(tile for tile in tiles if tile.block_n == tiles[0].block_n)

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        reason = _kernels.refuse_old_device(problem.dtype, device)
        if reason is None and not self._tiles(problem, device):
            reason = (
                f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} in "
                f"{problem.compute_dtype} need more shared memory than the "
                f"{device.smem_optin} bytes that a block may have"
            )
        return reason

    def tile(self, problem: AttentionProblem, device: Device) -> Tile:
        """The largest tile that still gives every multiprocessor work.

        Tiles of one block_n sum a row in the same order, so that its bits do not depend
        on the choice. On an H200 (132 multiprocessors), the larger of two tiles is
        faster with 256 blocks, the smaller with 128.
        """
        tiles = self._tiles(problem, device)
        return next(
            (
                tile
                for tile in tiles
                if _num_tiles(problem, tile.block_m) >= 1.5 * device.num_sms
                and tile.block_m < 2 * problem.seqlen_q
            ),
            tiles[-1],
        )

    def configs(
        self, problem: AttentionProblem, batch_dims: int, device: Device
    ) -> tuple[Config, ...]:
        """The launch, in a tuple of one."""
        return (self.config(self.tile(problem, device), problem, batch_dims),)

    def config(self, tile: Tile, problem: AttentionProblem, batch_dims: int) -> Config:
        """The launch with a given tile."""
        shape = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        num_blocks = _num_tiles(problem, tile.block_m)
        dims = self._dims(problem)
        if self.dims_compiled:
            # Options take registers: under the cap a kernel would spill.
            shape["MIN_BLOCKS"] = tile.min_blocks if _is_plain(problem) else 1
            shape |= {"HEAD_DIM": dims[0], "HEAD_DIM_V": dims[1]}
        if tile.block_dv is not None:
            shape["BLOCK_DV"] = tile.block_dv
            num_blocks *= -(-problem.head_dim_v // tile.block_dv)
        variant = Variant(
            source=f"attention/{self.name}.cu",
            entry=f"attention_{self.name}",
            defines=_defines(problem, batch_dims, tile.num_threads, **shape),
            smem=self.smem(tile, *dims, ITEMSIZE[problem.compute_dtype]),
        )
        return Config(variant, num_blocks, tile.num_threads)


@dataclass(frozen=True)
class HopperTile:
    """Warpgroups of 64 queries each, keys of a tile, and whether they take turns."""

    num_groups: int
    block_n: int
    take_turns: bool = True
    num_stages: int = 2  # tiles of k, and of v, that are in shared memory at a time
    # Whether keys that nobody else reads are the first to leave the L2 cache.
    evict_first: bool = False
    stage_out: bool = True  # whether out goes through shared memory that has room

    @property
    def block_m(self) -> int:
        return HOPPER_GROUP_ROWS * self.num_groups

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_groups + 1)


# Queries of a warpgroup: rows of a box of q.
HOPPER_GROUP_ROWS = 64

# Keys that a part has at least.
_KEYS_OF_SPLIT = 256
_SPLIT_MERGE_THREADS = 128
# Bytes of parts that the block which ends the last of them merges; of more, another
# kernel with a block a row is faster.
_MERGED_BY_A_BLOCK = 1 << 17

# Shared memory beside which there is room for up to 10 KB of terms and barriers.
_MOST_STAGED = 217 << 10

# Bytes of keys and values that the L2 cache holds.
_CACHED = 50 << 20

# Upper bounds of seqlen_q, and the tile up to there.
_Ladder = tuple[tuple[float, HopperTile], ...]

# inputs_t of cuda_src/attention/hopper.cu.
HOPPER_INPUTS = np.dtype(
    [
        *((f"{name}_map", _tensormap.MAP) for name in "qkv"),
        *((name, "i4") for name in ("num_items", "num_blocks", "num_heads", "section")),
        ("num_splits", "i4"),
        ("gap", "V4"),
        *((name, "u8") for name in "qkv"),
        ("from_log2", "f8"),
        ("to_log2", "f4"),
        *((name, "f4") for name in ("cap_inverse", "cap_limit", "cap")),
        ("cap_coefficients", "f4", (4,)),
        ("padding", "V40"),  # to a multiple of 64
    ]
)

# tanh(y) / y by y^2; with the first n coefficients, |y| up to limit n has a relative
# error of 1e-7 at most.
_TANH_LIMITS = (0.0, 5e-4, 0.029, 0.11, 0.4)
_TINY = float(np.finfo(np.float32).tiny)
_TANH_COEFFICIENTS = (
    0.999999901901,
    -0.3333136246,
    0.132709767739,
    -0.0475536041585,
)


@dataclass(frozen=True)
class HopperKernel:
    """Tensor cores fed by the copy engine, of 16-bit inputs on sm_90a.

    `tiles` holds for (head_dim, head_dim_v) as compiled seven ladders: for queries that
    see all keys; for those that see a part by position; for lengths on the device; for
    scores with a term of their own (bias, mask, alibi); with a softcap; with a softcap
    and terms of keys; and with several.
    """

    name: str
    rungs: tuple[str, ...]
    tiles: dict[tuple[int, int], tuple[_Ladder, ...]]
    dims: tuple[int, ...]  # head dimensions that are compiled; zeros fill the rest
    # Where one warpgroup has room for all queries, by head dimension: the tile for keys
    # and values that the L2 cache holds, the one for more, and the one for scores with
    # terms, which take registers.
    few: tuple[tuple[float, tuple[HopperTile, HopperTile, HopperTile]], ...]
    arch: str = "sm_90a"
    fast: bool = True

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        if f"{device.arch}a" != self.arch:
            return f"needs {self.arch}, {device.name} is {device.arch}"
        if device.nvrtc < (12, 9):
            return f"needs NVRTC 12.9 for {self.arch}, this is {device.nvrtc}"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"takes float16 and bfloat16, not {problem.dtype}"
        for name in ("head_dim", "head_dim_v"):
            n = getattr(problem, name)
            if n % 8 or n > self.dims[-1]:
                return f"{name} {n} is not a multiple of 8 up to {self.dims[-1]}"
        if problem.seqlen_k == 0:
            return "there are no keys"
        if _most_seen(problem) > (most := MOST_KEYS[problem.dtype]):
            return f"sums in {problem.dtype} are exact enough up to {most} keys"
        longest = max(problem.seqlen_q, problem.seqlen_k, _num_rows(problem) // 64)
        if longest >= 1 << 30:
            return "counts tiles in 32 bits, which this problem exceeds"
        if problem.no_tensor_map is not None:
            return problem.no_tensor_map
        if not self._ladder(problem):
            return (
                "has too few registers for these options together at head_dim "
                f"{problem.head_dim} and head_dim_v {problem.head_dim_v}"
            )
        if self._smem(problem) > device.smem_optin:
            return (
                f"needs {self._smem(problem)} bytes of shared memory, a block may have "
                f"{device.smem_optin}"
            )
        return None

    def _dims(self, problem):
        """head_dim and head_dim_v as they are compiled."""
        return tuple(
            next(n for n in self.dims if n >= wanted)
            for wanted in (problem.head_dim, problem.head_dim_v)
        )

    def tile(self, problem: AttentionProblem) -> HopperTile:
        """The tile measured best for a length and kind of mask."""
        if problem.seqlen_q * self.pack(problem) <= HOPPER_GROUP_ROWS:
            tiles = _kernels.by_threshold(self.few, max(self._dims(problem)))
            if _adds_terms(problem):
                return tiles[2]
            return tiles[_bytes_of_keys(problem) > _CACHED]
        return _kernels.by_threshold(self._ladder(problem), problem.seqlen_q)

    def pack(self, problem: AttentionProblem) -> int:
        """Query heads of a group that stand side by side in the rows of a tile.

        A power of two, where all their queries fit into the rows of one warpgroup: keys
        and values are then read once for all of them.
        """
        group = problem.group_size
        of_heads = ("bias", "mask", "sinks", "alibi_slopes")
        if not problem.heads_can_be_packed or any(
            getattr(problem, name) is not None for name in of_heads
        ):
            return 1
        pack = 1
        while group % (2 * pack) == 0 and 2 * pack * problem.seqlen_q <= 64:
            pack *= 2
        return pack

    def num_splits(self, problem: AttentionProblem, device: Device) -> int:
        """Parts of the keys, where tiles of queries alone would not fill the device."""
        tile = self.tile(problem)
        items = self._num_tiles(problem, tile)
        most = _most_seen(problem) // _KEYS_OF_SPLIT
        if problem.sinks is not None or most < 2:
            return 1
        return max(1, min(device.num_sms // items, most))

    def merges(self, problem: AttentionProblem, device: Device) -> bool:
        """Whether the kernel itself merges the parts of the keys."""
        num_splits = self.num_splits(problem, device)
        rows = min(self.tile(problem).block_m, problem.seqlen_q * self.pack(problem))
        size = 4 * num_splits * rows * problem.head_dim_v
        return num_splits > 1 and size <= _MERGED_BY_A_BLOCK

    def is_dynamic(self, problem: AttentionProblem) -> bool:
        """Whether blocks take their items from a counter: kDynamic of the kernel."""
        arrays = (
            problem.bias,
            problem.mask,
            problem.query_lengths,
            problem.key_lengths,
        )
        return _bounds(problem) > 0 or any(x is not None for x in arrays)

    def _num_tiles(self, problem, tile):
        """Tiles of queries, over all heads and batch entries."""
        pack = self.pack(problem)
        heads = math.prod(problem.batch) * problem.num_heads // pack
        return heads * -(-problem.seqlen_q * pack // tile.block_m)

    def _ladder(self, problem):
        """Tiles for a problem's head dimensions and kind; may be empty."""
        dims = self._dims(problem)
        ladders = self.tiles.get(dims) or self.tiles[(max(dims),) * 2]
        if _adds_terms(problem):
            return ladders[3 + _weight_of_terms(problem)]
        if _has_lengths(problem):
            return ladders[2]
        # Beside the largest tiles of all keys, shared memory has no room for terms.
        some = _bounds(problem) > 0 or (_has_terms(problem) and max(dims) > 192)
        return ladders[int(some)]

    def _smem(self, problem):
        """Tiles of q, the stages of k and v, what is staged of out."""
        columns = self._staged_columns(problem)
        return self._smem_of_tiles(problem) + self._staged_bytes(problem, columns)

    def _smem_of_tiles(self, problem):
        """Tiles of q, the stages of k and v, and room to align them."""
        tile = self.tile(problem)
        row_qk, row_v = (-(-n // 64) * 128 for n in self._dims(problem))
        kv = tile.num_stages * tile.block_n * (row_qk + row_v)
        return tile.block_m * row_qk + kv + 1024

    def _staged_bytes(self, problem, columns):
        """kStagedBytes of cuda_src/attention/hopper_store.cuh, for all warps."""
        return self.tile(problem).block_m * (2 * columns + 16) if columns else 0

    def _staged_columns(self, problem):
        """Columns of out that go through shared memory at a time, or 0."""
        tile = self.tile(problem)
        if tile.num_groups == 1 or not tile.stage_out:
            return 0  # of few rows, keys take all shared memory
        if _adds_terms(problem) and not _is_cap_only(problem):
            return 0  # terms of scores leave no registers for it
        head_dim_v = self._dims(problem)[1]
        columns = 64 if head_dim_v % 64 == 0 else 32
        size = self._smem_of_tiles(problem) + self._staged_bytes(problem, columns)
        return columns if size <= _MOST_STAGED else 0

    def configs(
        self, problem: AttentionProblem, batch_dims: int, device: Device
    ) -> tuple[Config, ...]:
        """The launch, and where keys are split another that merges the parts."""
        config = self.config(self.tile(problem), problem, batch_dims, device)
        if self.num_splits(problem, device) == 1 or self.merges(problem, device):
            return (config,)
        absent: dict[str, Any] = dict.fromkeys(OPTIONS)
        plain = replace(problem, softcap=0.0, **absent)
        merge = Variant(
            source=f"attention/{self.name}_merge.cu",
            entry=f"attention_{self.name}_merge",
            defines=_defines(plain, batch_dims, _SPLIT_MERGE_THREADS),
        )
        return config, Config(merge, _num_rows(problem), _SPLIT_MERGE_THREADS)

    def config(
        self,
        tile: HopperTile,
        problem: AttentionProblem,
        batch_dims: int,
        device: Device,
    ) -> Config:
        """The launch with a given tile."""
        dims = self._dims(problem)
        switches = {
            "HEAD_DIM": dims[0],
            "HEAD_DIM_V": dims[1],
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "BOUNDS": _bounds(problem),
            "TAKE_TURNS": int(tile.take_turns),
        }
        if not _scale_is_plain(problem.scale):
            switches["SCALE_SCORES"] = 1
        if (pack := self.pack(problem)) > 1:
            switches["PACK"] = pack
        if tile.evict_first and pack == problem.group_size:
            switches["READ_ONCE"] = 1
        num_splits = self.num_splits(problem, device)
        if num_splits > 1:
            switches["SPLIT"] = 1
        elif columns := self._staged_columns(problem):
            switches["STAGED_COLUMNS"] = columns
        if self.merges(problem, device):
            switches["MERGE"] = 1
        if problem.bias is not None or problem.mask is not None:
            if problem.terms == "keys":
                switches["TERMS_OF_KEYS"] = 1
                if _presets_bias(problem):
                    switches["PRESET_BIAS"] = 1
            elif problem.terms == "unit":
                switches["UNIT_COLUMNS"] = 1
        variant = Variant(
            source=f"attention/{self.name}.cu",
            entry=f"attention_{self.name}",
            defines=_defines(problem, batch_dims, tile.num_threads, **switches),
            arch=self.arch,
            smem=self._smem(problem),
        )
        num_items = self._num_tiles(problem, tile) * num_splits
        return Config(variant, min(num_items, device.num_sms), tile.num_threads)

    def schedule(self, problem: AttentionProblem, device: Device) -> dict[str, Any]:
        """How the items are cut, and the units of exponents: fields of inputs_t."""
        tile = self.tile(problem)
        pack, num_splits = self.pack(problem), self.num_splits(problem, device)
        num_heads = math.prod(problem.batch) * problem.num_heads // pack
        bytes_of_head = _bytes_of_keys(problem) // _num_kv_heads(problem)
        # Keys and values of a section take about half of the L2 cache; sections are
        # equal, since a small one at the end would not fill the device.
        in_cache = device.l2_bytes * 11 // 20 // bytes_of_head * problem.group_size
        in_cache //= pack
        num_sections = -(-num_heads // max(1, in_cache))
        return {
            "num_items": self._num_tiles(problem, tile) * num_splits,
            "num_blocks": -(-problem.seqlen_q * pack // tile.block_m),
            "num_heads": num_heads,
            "num_splits": num_splits,
            "section": -(-num_heads // num_sections),
            **_exponents(problem),
            **_cap(problem),
        }


def _num_kv_heads(problem):
    """Key heads over all batch entries."""
    return math.prod(problem.batch) * problem.num_kv_heads


def _bytes_of_keys(problem):
    """Of all keys and values."""
    row = (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return _num_kv_heads(problem) * problem.seqlen_k * row


def _weight_of_terms(problem):
    """0 for a term of the scores or of keys, 1 to 2 for a softcap, 3 for several."""
    arrays = problem.bias, problem.mask
    lie_apart = 0
    if problem.terms != "keys":
        lie_apart = sum(x is not None for x in arrays)
        if lie_apart and problem.terms == "any":
            return 3
    has_alibi = problem.alibi_slopes is not None
    if problem.softcap:
        if lie_apart or has_alibi or _has_lengths(problem):
            return 3
        return 1 if _is_cap_only(problem) else 2
    if lie_apart + has_alibi > 1 or (lie_apart and _has_lengths(problem)):
        return 3
    # The bounds of a window and rows of a mask are more than there are registers for.
    return 3 if lie_apart and problem.mask and problem.left is not None else 0


def _is_cap_only(problem):
    """kCapOnly of cuda_src/attention/hopper_terms.cuh."""
    arrays = (problem.bias, problem.mask, problem.alibi_slopes)
    alone = all(x is None for x in arrays) and _scale_is_plain(problem.scale)
    return problem.softcap > 0 and alone


def _presets_bias(problem):
    """Whether products are added to a bias of keys: kPresetBias of the kernel."""
    has_others = problem.mask is not None or problem.alibi_slopes is not None
    # Where float32 holds the sizes of a bias in units of the products, too.
    is_plain = not problem.softcap and 1e-2 <= problem.scale <= 1e2
    alone = problem.terms == "keys" and not has_others and is_plain
    return problem.bias is not None and alone


def _adds_terms(problem):
    """Whether scores are finished before the softmax: kHasTerms of the kernel."""
    return _has_terms(problem) and not _presets_bias(problem)


def _exponents(problem):
    """What makes scores exponents of 2, as a float32, and the way back to lse."""
    if _is_cap_only(problem):  # they are exponents when they leave the softcap
        return {"to_log2": 1.0, "from_log2": math.log(2)}
    scale = 1.0 if _adds_terms(problem) else problem.scale
    to_log2 = np.float32(scale * math.log2(math.e))
    return {"to_log2": to_log2, "from_log2": scale / float(to_log2)}


def _cap(problem, in_log2=None):
    """cap_t of cuda_src/attention/softcap.cuh: the softcap as a polynomial.

    Scores are exponents of 2 with `in_log2`; None: as the forward kernel has them.
    """
    if not problem.softcap:
        return {}
    inverse = np.float32(problem.scale / problem.softcap)
    if in_log2 is None:
        in_log2 = _is_cap_only(problem)
    unit = problem.softcap * (math.log2(math.e) if in_log2 else 1.0)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        powers = np.float64(inverse) ** np.arange(1, 8, 2)
        coefficients = (unit * powers * _TANH_COEFFICIENTS).astype(np.float32)
        # Those that float32 does not hold are left out, where that changes nothing.
        held = np.isfinite(coefficients) & (np.abs(coefficients) >= _TINY)
        limit = _TANH_LIMITS[int(np.cumprod(held).sum())] if inverse else np.inf
        return {
            "cap_inverse": inverse,
            "cap_limit": np.float32(limit) / np.abs(inverse),
            "cap": np.float32(unit),
            "cap_coefficients": np.where(held, coefficients, 0),
        }


def _bounds(problem):
    """kBounds of cuda_src/attention/hopper_tiles.cuh."""
    if problem.left is not None:
        return 2
    return 0 if problem.right is None else 1


def _has_lengths(problem):
    """Whether the device alone knows which keys queries see: kBandOfItem."""
    arrays = (problem.query_offsets, problem.query_lengths, problem.key_lengths)
    return any(x is not None for x in arrays)


@dataclass(frozen=True)
class UnfusedKernel:
    """Scores in memory: matmul, a kernel over their rows, matmul, a kernel for out.

    `in_input_dtype` keeps scores and P in the dtype of the input, else in that of the
    sums.
    """

    name: str
    rungs: tuple[str, ...]
    in_input_dtype: bool = False
    num_threads: int = 256
    fast: bool = False

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        """Why this kernel cannot take `problem` on `device`, or None."""
        return _kernels.refuse_old_device(problem.dtype, device)

    def scores_dtype(self, problem: AttentionProblem) -> str:
        """dtype of S and P."""
        return problem.dtype if self.in_input_dtype else problem.compute_dtype

    def configs(
        self, problem: AttentionProblem, batch_dims: int, device: Device
    ) -> tuple[Config, ...]:
        """The kernel after the first matmul and the one after the second."""
        elem = self.scores_dtype(problem)
        rounding = {"ROUND_STEPS": 1} if self.in_input_dtype else {}
        absent: dict[str, Any] = dict.fromkeys(OPTIONS)
        plain = replace(problem, softcap=0.0, **absent)
        return (
            Config(
                Variant(
                    source=f"attention/{self.name}.cu",
                    entry=f"attention_{self.name}",
                    defines=_defines(
                        problem, batch_dims, self.num_threads, elem, **rounding
                    ),
                ),
                _num_rows(problem),
                self.num_threads,
            ),
            Config(
                Variant(
                    source="attention/values.cu",
                    entry="attention_values",
                    defines=_defines(
                        plain,
                        batch_dims,
                        self.num_threads,
                        elem,
                        VALUE_T=CUDA_TYPES[problem.dtype],
                    ),
                ),
                -(-_num_rows(problem) * problem.head_dim_v // self.num_threads),
                self.num_threads,
            ),
        )


ATTENTION_KERNELS = (  # best first
    HopperKernel(
        name="hopper",
        rungs=("tiled", "auto"),
        dims=(64, 96, 128, 192, 256),
        few=(
            # us, 32 : 8 heads x 16 x 8192 keys: 78.3; 6 tiles at a time 80.1
            (
                64,
                (
                    HopperTile(1, 128, False, 2, True),
                    HopperTile(1, 128, False, 2, True),
                    HopperTile(1, 128, False, 6),
                ),
            ),
            # 8192 keys 20.1, (1, 64, 6) 22.7; 16 x 8192 keys 137.9, (1, 64, 6) 143.6
            (
                128,
                (
                    HopperTile(1, 128, False, 2, True),
                    HopperTile(1, 128, False, 1),
                    HopperTile(1, 64, False, 6),
                ),
            ),
            (192, (HopperTile(1, 64, False, 4),) * 3),
            (256, (HopperTile(1, 64, False, 3),) * 3),
        ),
        tiles={
            (64, 64): (
                # us at n = 512: 153.8, with 2 stages 166.5; at 16384: 3658, staged 3686
                (
                    (2047, HopperTile(4, 64, num_stages=4)),
                    (math.inf, HopperTile(3, 128, stage_out=False)),
                ),
                # us at n = 512: 120.4, with turns 123.5, and 2 stages 140.6
                (
                    (512, HopperTile(4, 64, False, 4)),
                    (4095, HopperTile(4, 64, num_stages=4)),
                    (math.inf, HopperTile(3, 128)),
                ),
                ((math.inf, HopperTile(3, 112)),),
                ((math.inf, HopperTile(2, 128, False)),),
                # n = 4096: 1429 us, staged 1451
                ((math.inf, HopperTile(3, 112, stage_out=False)),),
                ((math.inf, HopperTile(3, 80)),),
                ((math.inf, HopperTile(2, 64, False)),),
            ),
            (96, 96): (
                ((math.inf, HopperTile(3, 96)),),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(3, 96)),),
                ((math.inf, HopperTile(2, 96, False)),),
                ((math.inf, HopperTile(2, 48, False)),),
            ),
            (128, 128): (
                ((2047, HopperTile(2, 128)), (math.inf, HopperTile(3, 80))),
                # us at n = 512: 102.3, with turns 104.4, (2, 128) 105.6; at n = 1024:
                # 149.0, (2, 128) 151.1
                (
                    (512, HopperTile(3, 64, False, 4)),
                    (1024, HopperTile(3, 64, num_stages=4)),
                    (math.inf, HopperTile(2, 128, False)),
                ),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(3, 80)),),
                ((math.inf, HopperTile(2, 96, False)),),
                ((math.inf, HopperTile(2, 48, False)),),
            ),
            (192, 128): (
                ((2047, HopperTile(2, 128)), (math.inf, HopperTile(3, 80))),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(2, 128, False)),),
                ((math.inf, HopperTile(2, 96, False)),),
                ((math.inf, HopperTile(2, 96, False)),),
                ((math.inf, HopperTile(2, 48, False)),),
            ),
            (192, 192): (
                # us at n = 1024: 185.9, (2, 112) has no room for out and takes 204.8;
                # at n = 4096: 649 and 658
                ((4096, HopperTile(2, 96)), (math.inf, HopperTile(2, 112))),
                ((math.inf, HopperTile(2, 96)),),
                ((math.inf, HopperTile(2, 96)),),
                ((math.inf, HopperTile(2, 80)),),
                ((math.inf, HopperTile(2, 80)),),
                ((math.inf, HopperTile(2, 80)),),
                (),
            ),
            (256, 256): (
                # us at n = 512: 115.7, (2, 80) has no room for out and takes 128.6; at
                # n = 4096: 684 and 695
                ((4096, HopperTile(2, 64)), (math.inf, HopperTile(2, 80))),
                ((math.inf, HopperTile(2, 64)),),
                ((math.inf, HopperTile(2, 48)),),
                ((math.inf, HopperTile(2, 48)),),
                ((math.inf, HopperTile(2, 80)),),
                ((math.inf, HopperTile(2, 64)),),
                (),
            ),
        },
    ),
    MMA,
    _attention_f64.TILED_F64,
    FusedKernel(
        name="tiled",
        rungs=("tiled", "auto"),
        smem=rows_in_shared,
        dims_compiled=True,
        fast=True,
        # TFLOP/s on an H200 at 2 x 16 heads x 2048 beside the next best.
        tiles={
            4: (
                (
                    64,
                    (
                        Tile(64, 64, 128, min_blocks=3),  # 28.1; 2 blocks 24.9
                        Tile(32, 64, 128),
                        Tile(16, 64, 128),
                    ),
                ),
                (
                    128,
                    (
                        Tile(64, 64, 128),  # 29.6; (64, 32, 128) 25.1
                        Tile(32, 64, 128),
                        Tile(16, 64, 128),
                    ),
                ),
                (
                    256,
                    (
                        # 24.6; (32, 32, 128) 20.8. Options spill 92 bytes on sm_80,
                        Tile(64, 64, 256, only_plain=True),
                        # and here 104. 23.9
                        Tile(32, 64, 128, only_plain=True),
                        Tile(32, 32, 128),
                        Tile(16, 32, 128),
                        Tile(16, 64, 128),
                    ),
                ),
                (
                    512,
                    (
                        Tile(16, 32, 128),  # 15.0; (32, 16, 128) 17.0, but spills
                        Tile(8, 16, 64),
                    ),
                ),
            ),
            8: (
                (
                    64,
                    (
                        # 9.8; 4 blocks 10.9, but they spill; (32, 64, 128) 11.5, but
                        # sums of 64 equal keys can miss 5e-15.
                        Tile(32, 32, 128, min_blocks=3),
                        Tile(16, 32, 128),
                    ),
                ),
                (
                    128,
                    (
                        Tile(32, 32, 128),  # 10.0; (16, 32, 64) 8.5
                        Tile(16, 32, 128),
                        Tile(16, 16, 128),
                    ),
                ),
                (
                    256,
                    (
                        Tile(32, 32, 256),  # 7.4; (32, 16, 256) 6.3
                        Tile(16, 32, 128),  # 7.1
                        Tile(16, 16, 128),
                        Tile(8, 16, 128),
                    ),
                ),
                (512, (Tile(8, 16, 128),)),
            ),
        },
    ),
    # Takes what no tile can hold, too.
    FusedKernel(
        name="online",
        rungs=("online", "tiled", "auto"),
        tiles=dict.fromkeys(
            (4, 8),
            (
                (32, (Tile(4, 1, 128, block_dv=32),)),
                (64, (Tile(4, 1, 128, block_dv=64),)),
                (128, (Tile(4, 1, 128, block_dv=128),)),
                (math.inf, (Tile(4, 1, 128, block_dv=256),)),
            ),
        ),
    ),
    UnfusedKernel(name="safe", rungs=("safe",)),
    UnfusedKernel(name="naive", rungs=("naive",), in_input_dtype=True),
)


# --- merge_attention_states ----------------------------------------------------------

_MERGE_THREADS = 128


def merge_params_dtype(row_dims: int) -> np.dtype:
    """merge_params_t of cuda_src/attention/merge.cu."""
    names: tuple[str, ...] = ("num_rows", "num_parts", "head_dim_v")
    names += ("outs_part", "outs_col", "lses_part", "out_col")
    return np.dtype(
        [
            *((name, "i8") for name in names),
            ("size", "i8", (row_dims,)),
            ("stride", "i8", (3, row_dims)),
        ]
    )


def merge_config(problem: MergeProblem, row_dims: int) -> Config:
    """The launch of the merge kernel."""
    wide = "float64" in (problem.dtype, problem.lse_dtype)
    defines = {
        "ELEM_T": CUDA_TYPES[problem.dtype],
        "LSE_T": CUDA_TYPES[problem.lse_dtype],
        "ACCUM_T": "double" if wide else "float",
        "ROW_DIMS": str(row_dims),
        "NUM_THREADS": str(_MERGE_THREADS),
    }
    variant = Variant("attention/merge.cu", "attention_merge", tuple(defines.items()))
    num_rows = math.prod(problem.shape)
    return Config(variant, -(-num_rows * 32 // _MERGE_THREADS), _MERGE_THREADS)


# --- what there is to compile --------------------------------------------------------

_SWITCHES: dict[str, dict] = {
    "plain": {},
    "bias": {"bias": "float32"},
    "mask": {"mask": "bool"},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": "float32"},
    "alibi": {"alibi_slopes": "float32"},
    "lengths": {"query_lengths": "int32", "key_lengths": "int64"},
    "offsets": {"query_offset": "array", "query_offsets": "int32"},
}
_ALL_OPTIONS = {
    name: value for case in _SWITCHES.values() for name, value in case.items()
}


def _problem(dtype="float16", head_dim=64, batch=(1,), **options):
    """A problem large enough for the largest tiles."""
    return AttentionProblem(
        backend="cupy",
        batch=batch,
        num_heads=64,
        num_kv_heads=64,
        seqlen_q=4096,
        seqlen_k=4096,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        scale=1.0,
        **options,
    )


def _representative():
    """(problem, batch axes): each dtype, head dimension and switch at least once."""
    for dtype in ITEMSIZE:
        yield _problem(dtype), 1
    for head_dim, dtype in itertools.product((128, 256, 512), ("float32", "float64")):
        yield _problem(dtype, head_dim), 1
    for name, options in _SWITCHES.items():
        if name != "plain":
            yield _problem("float32", **options), 1
    yield _problem("bfloat16", bias="bfloat16"), 1
    yield _problem("float64", **_ALL_OPTIONS), 3
    yield from _attention_f64.representative(_problem)
    yield from _bounded()


def _bounded():
    """Kernels whose code depends on which keys are seen, at each head size."""
    for head_dim in (64, 96, 128, 192, 256):
        for bounds in ({}, {"right": 0}, {"left": 1024, "right": 0}):
            yield _problem("bfloat16", head_dim, **bounds), 1
            yield _problem("bfloat16", head_dim, key_lengths="int32", **bounds), 1
            both = {"query_lengths": "int32", "key_lengths": "int32"}
            yield _problem("bfloat16", head_dim, **both, **bounds), 2
        for terms in ("keys", "unit", "any"):
            yield (
                _problem("bfloat16", head_dim, right=0, bias="float32", terms=terms),
                1,
            )
            yield _problem("bfloat16", head_dim, mask="bool", terms=terms), 1
        for terms in ({}, {"bias": "float32", "terms": "keys"}):
            capped = {"softcap": 30.0, **terms}
            yield _problem("bfloat16", head_dim, **capped), 1
            yield _problem("bfloat16", head_dim, left=1024, right=0, **capped), 1
        yield _problem("bfloat16", head_dim, bias="float32", terms="keys"), 1
        yield _problem("bfloat16", head_dim, right=0, alibi_slopes="float32"), 1
        yield _problem("bfloat16", head_dim, left=1024, **_ALL_OPTIONS), 2
        few = {"seqlen_q": 1, "num_kv_heads": 16}
        yield replace(_problem("bfloat16", head_dim, (16,)), **few), 1
        yield replace(_problem("bfloat16", head_dim, key_lengths="int32"), **few), 1
        yield replace(_problem("bfloat16", head_dim, right=0), **few), 1
        few = {"num_heads": 2, "num_kv_heads": 2}
        yield replace(_problem("bfloat16", head_dim), **few), 1
        yield replace(_problem("bfloat16", head_dim, right=0), **few), 1
    for bounds in ({}, {"right": 0}):
        yield replace(_problem("bfloat16", 192, **bounds), head_dim_v=128), 1
        for head_dim in (192, 256):
            yield replace(_problem("bfloat16", head_dim, **bounds), seqlen_q=8192), 1
        # Short sequences, and a batch of two axes.
        for head_dim in (64, 128, 256):
            yield replace(_problem("float16", head_dim, **bounds), seqlen_q=1024), 1
            keys = {"bias": "float32", "terms": "keys"}
            for more in ({}, {"left": 1024}, keys):
                asked = _problem("bfloat16", head_dim, **bounds, **more)
                yield replace(asked, seqlen_q=512), 2


def _everything():
    """(problem, batch axes) over all dtypes, head dimensions and sets of switches."""
    head_dims = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
    yield from _representative()
    for dtype, head_dim in itertools.product(ITEMSIZE, head_dims):
        yield _problem(dtype, head_dim), 1
    for count in range(2, len(_SWITCHES)):
        for names in itertools.combinations(list(_SWITCHES)[1:], count):
            options = {k: v for name in names for k, v in _SWITCHES[name].items()}
            yield _problem("float16", **options), 1
            yield _problem("float64", **options), 2


def compile_list(device: Device, everything: bool) -> list[tuple[str, Variant]]:
    """(row, variant) of what `device` would compile: a selection, or all there is."""
    found: dict[tuple[str, Variant], None] = {}
    for problem, batch_dims in _everything() if everything else _representative():
        for row in ATTENTION_KERNELS:
            if row.refusal(problem, device) is not None:
                continue
            if isinstance(row, FusedKernel):
                tiles = row._tiles(problem, device)
                chosen = tiles if everything else tiles[:1]
                configs = tuple(
                    row.config(tile, problem, batch_dims) for tile in chosen
                )
            else:
                configs = row.configs(problem, batch_dims, device)
            for config in configs:
                found[row.name, config.variant] = None
    for dtype, lse_dtype in itertools.product(ITEMSIZE, ("float32", "float64")):
        merge = _attention_problem.MergeProblem("cupy", 2, (64,), 64, dtype, lse_dtype)
        if _kernels.refuse_old_device(dtype, device) is None:
            found["merge", merge_config(merge, 1).variant] = None
    return list(found)
