"""What the launches of points share: numbers of a call, structs, kernels' defines."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._cuda.structs import Struct

LOG2E = math.log2(math.e)
# With what that is rounded by.
_LOG2E = Fraction(LOG2E) + Fraction(2.0355273740931033e-17)

# Batch entries of one plan: the longest second axis of a grid, with room.
MOST_ENTRIES = 1 << 15

# As in cuda_src/points/params.cuh.
GROUP = 64
TILE_KEYS = 256
MAX_BOX_DIM = 8

# Rows are padded to a multiple of what a kernel takes at a time, those for clouds that
# are sorted more than others.
_SORTED_PADDING, _PADDING = 512, 128
_THREADS = 256
_BOUNDS_BLOCKS = 256

PARAMS = Struct(
    "points_params_t",
    "points/params.cuh",
    (
        ("double", "scale", "scale_low"),
        ("int", "batch", "num_rows", "num_keys"),
        ("int", "padded_rows", "padded_keys"),
        ("int", "num_tiles", "tiles_per_split"),
        ("int", "first_part", "num_parts"),
        ("int", "num_columns"),
        ("int", "repair"),
        ("float", "drop"),
        ("float", "slack"),
        ("float", "limit"),
    ),
)
# What kernels read of clouds in order.
ARRAYS = ("rows", "keys", "key_weights", "key_values", "row_boxes", "key_boxes")

FACTS_BYTES = 20
TALLY_BYTES = 20


class GpuKernel(NamedTuple):
    """How a kernel K(d2) is computed: a struct of kernels.cuh, and q over d2.

    That is `multiple` times log2(e) to the power of `power`.
    """

    struct: str
    multiple: float
    power: int = 0
    has_exponent: bool = True  # far pairs vanish

    @property
    def factor(self) -> Fraction:
        """q over d2, to twice the digits of float64."""
        return Fraction(self.multiple) * _LOG2E**self.power


# By the names of cupyflash._points.kernels.
KERNELS = {
    "gaussian": GpuKernel("gaussian", 0.5, 1),
    "laplacian": GpuKernel("exponential", 1.0, 2),
    "matern32": GpuKernel("matern32", 3.0, 2),
    "matern52": GpuKernel("matern52", 5.0, 2),
    "cauchy": GpuKernel("cauchy", 1.0, has_exponent=False),
    "inverse_multiquadric": GpuKernel("inverse_multiquadric", 1.0, has_exponent=False),
    "energy": GpuKernel("energy", 1.0, has_exponent=False),
    "laplacian_slope": GpuKernel("laplacian_slope", 1.0, 2),
    "cauchy_slope": GpuKernel("cauchy_slope", 1.0, has_exponent=False),
    "matern12_root3": GpuKernel("exponential", 3.0, 2),
    "matern32_root5": GpuKernel("matern32", 5.0, 2),
    "inverse_multiquadric_slope": GpuKernel(
        "inverse_multiquadric_slope", 1.0, has_exponent=False
    ),
    "energy_slope": GpuKernel("energy_slope", 1.0, has_exponent=False),
}
# What a caller wrote.
FUNCTION = GpuKernel("function", 1.0, has_exponent=False)
_NO_NUMBERS = bytes(8)


@dataclass(frozen=True)
class Pairs:
    """A call as numbers: all that its launches depend on, but for pointers."""

    reduction: str  # "logsumexp", "kernel_sum" or "mean"
    batch: int
    num_rows: int
    num_keys: int
    dim: int
    num_columns: int  # of values
    dtype: str
    kernel: str  # of KERNELS, or the name of a function
    scale: float  # 1 / bandwidth; 1 where axes have scales of their own
    coord_dtype: str  # of the coordinates: float64 where they have been scaled
    return_lse: bool = False
    is_sorted: bool = False  # both clouds, along a curve
    method: str = "auto"
    precision: str = "float32"
    function: str = ""  # CUDA of a caller's kernel
    numbers: bytes = _NO_NUMBERS  # that it closes over
    bandwidth: float = 0.0  # that `scale` was rounded from; 0: it was not
    has_axis_scales: bool = False  # not in the coordinates yet
    weights_dtype: str = ""  # of log weights, if not `dtype`
    lse_dtype: str = ""  # of log-sums, if not `dtype`

    @property
    def has_sums_of_weights(self) -> bool:
        return self.reduction != "kernel_sum"

    @property
    def gpu_kernel(self) -> GpuKernel:
        return FUNCTION if self.function else KERNELS[self.kernel]

    @property
    def q_scale(self) -> float:
        """q of kernels.cuh over the squared distance of the coordinates."""
        return float(self._exact_q_scale)

    @property
    def _exact_q_scale(self) -> Fraction:
        width = Fraction(self.bandwidth)
        scale = 1 / width if width else Fraction(self.scale)
        return self.gpu_kernel.factor * scale * scale

    @property
    def weight_type(self) -> str:
        """That of log weights, in CUDA."""
        return CUDA_TYPES[self.weights_dtype or self.dtype]

    @property
    def columns_of_chunk(self) -> int:
        """Columns of values that one launch sums at a time."""
        return min(self.num_columns, 4)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_columns // self.columns_of_chunk) if self.num_columns else 1

    @property
    def num_sums(self) -> int:
        """Sums of a row in one chunk."""
        return self.columns_of_chunk + self.has_sums_of_weights

    @property
    def padded_rows(self) -> int:
        block = _SORTED_PADDING if self.is_sorted else _PADDING
        return -(-self.num_rows // block) * block

    @property
    def padded_keys(self) -> int:
        return -(-self.num_keys // TILE_KEYS) * TILE_KEYS

    @property
    def num_tiles(self) -> int:
        return self.padded_keys // TILE_KEYS

    @property
    def num_groups(self) -> int:
        return self.padded_rows // GROUP

    @property
    def box_floats(self) -> int:
        """Numbers of a box."""
        return 2 * (self.dim if self.dim <= MAX_BOX_DIM else 0) + 3

    @property
    def drop(self) -> float:
        """Bits below a row's result from which on all keys together do not count.

        Sums are measured by the largest value, which they may be 2^-16 of.
        """
        digits = {"float32": 26, "float64": 56}[self.dtype]
        if not self.has_sums_of_weights:
            digits += 16
        return digits + math.log2(self.num_keys)


def defines(pairs: Pairs, **more: Any) -> tuple[tuple[str, str], ...]:
    """Switches that all kernels have, and those of one."""
    found = {
        "COORD_T": CUDA_TYPES[pairs.coord_dtype],
        "ACCUM_T": CUDA_TYPES[pairs.dtype],
        "DIM": pairs.dim,
        "COLUMNS": pairs.columns_of_chunk,
        "WEIGHTS": int(pairs.has_sums_of_weights),
        **more,
    }
    return tuple((name, str(value)) for name, value in found.items())


def pack(pairs: Pairs, **fields: Any) -> bytes:
    """points_params_t of a launch."""
    known = {
        "scale": pairs.q_scale,
        "scale_low": float(pairs._exact_q_scale - Fraction(pairs.q_scale)),
        "batch": pairs.batch,
        "num_rows": pairs.num_rows,
        "num_keys": pairs.num_keys,
        "padded_rows": pairs.padded_rows,
        "padded_keys": pairs.padded_keys,
        "num_tiles": pairs.num_tiles,
        "num_columns": pairs.num_columns,
        "drop": pairs.drop,
        "slack": 0.0,
        "limit": -1.0,
    }
    return PARAMS.pack({**known, **fields})


def launch(
    pairs: Pairs, source: str, entry: str, grid: tuple[int, ...], num_threads: int,
    *, smem: int = 0, generated: str = "", **switches: Any,
) -> LaunchConfig:  # fmt: skip
    """The launch of a kernel with the defines of a call."""
    known = defines(pairs, **switches)
    variant = Variant(source, entry, known, smem=smem, generated=generated)
    return LaunchConfig(variant, grid, (num_threads,))


def curve_configs(
    dtype: str, dim: int, num_points: int, batch: int
) -> tuple[LaunchConfig, LaunchConfig]:
    """The launches that find a cloud's bounds, and its points' places on a curve."""
    switches = (("COORD_T", CUDA_TYPES[dtype]), ("DIM", str(dim)))
    bounds, curve = (
        Variant("points/curve.cu", entry, switches)
        for entry in ("points_curve_bounds", "points_curve")
    )
    blocks = -(-num_points // _THREADS)
    few = min(blocks, _BOUNDS_BLOCKS), batch
    return (
        LaunchConfig(bounds, few, (_THREADS,)),
        LaunchConfig(curve, (blocks, batch), (_THREADS,)),
    )


def arrange_config(pairs: Pairs, padded: int) -> LaunchConfig:
    """The launch that brings a cloud into its order."""
    grid, source = (-(-padded // _THREADS), pairs.batch), "points/arrange.cu"
    switches: Any = {"COLUMNS": 0, "WEIGHTS": 1, "BOX_POINTS": GROUP}
    weight = pairs.weight_type
    return launch(
        pairs, source, "points_arrange", grid, _THREADS, WEIGHT_T=weight, **switches
    )


def boxes_config(pairs: Pairs, padded: int, box_points: int) -> LaunchConfig:
    """The launch that finds the boxes of a cloud's tiles."""
    weights = pairs.has_sums_of_weights or box_points == GROUP
    grid, source = (padded // box_points, pairs.batch), "points/arrange.cu"
    switches: Any = {"COLUMNS": 0, "WEIGHTS": int(weights), "BOX_POINTS": box_points}
    weight = CUDA_TYPES[pairs.dtype]  # not read
    return launch(
        pairs, source, "points_arrange_boxes", grid, 32, WEIGHT_T=weight, **switches
    )


def combine_config(pairs: Pairs) -> LaunchConfig:
    """The launch that makes results of parts."""
    grid = -(-pairs.batch * pairs.padded_rows // _THREADS), pairs.num_chunks
    source, entry = "points/combine.cu", "points_combine"
    # Whatever the coordinates are.
    lse = CUDA_TYPES[pairs.lse_dtype or pairs.dtype]
    switches: Any = {"COORD_T": CUDA_TYPES[pairs.dtype], "DIM": 1, "LSE_T": lse}
    return launch(pairs, source, entry, grid, _THREADS, **switches)


def splits(pairs: Pairs, num_blocks: int, wanted: int, least: int = 4):
    """(number of splits of the keys, tiles of each), of `least` tiles where it can."""
    num = max(1, min(-(-pairs.num_tiles // least), -(-wanted // max(num_blocks, 1))))
    tiles = -(-pairs.num_tiles // num)
    return -(-pairs.num_tiles // tiles), tiles
