"""Kernel specs of points: which take a call, and their launches. Best first."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._points.gpu import config, series
from cupyflash._points.gpu.config import Pairs

_THREADS = 256

# A launch, and its arguments.
Step = tuple[LaunchConfig, tuple[Any, ...]]


@dataclass(frozen=True)
class _Kernel:
    """What kernel specs have in common."""

    name: str = ""
    methods: tuple[str, ...] = ("auto",)
    fast: bool = True  # must not spill
    slack: float = 0.75  # that of points_params_t

    def memory(self, pairs: Pairs) -> dict[str, int]:
        """Bytes of what its launches pass on."""
        return {}

    def needs_repair(self, pairs: Pairs) -> bool:
        """Whether rows may have to be made once more."""
        return True


def _not_gaussian(pairs):
    """Why a kernel for Gaussian scores of float32 cannot take a call, or None."""
    if pairs.function or pairs.kernel != "gaussian":
        return f"takes the gaussian kernel, not {pairs.kernel}"
    return None if pairs.dtype == "float32" else f"takes float32, not {pairs.dtype}"


@dataclass(frozen=True)
class DirectKernel(_Kernel):
    """Differences of coordinates: any data, any kernel, any number of dimensions."""

    name: str = "direct"

    def unsupported_reason(self, pairs: Pairs, device: Device) -> str | None:
        """Why this kernel cannot take a call, or None."""
        return None

    def is_wide(self, pairs: Pairs) -> bool:
        """Whether scores are made in float64 at once.

        Where nothing is skipped and no block is large, that is as fast as a look at
        which rows need it.
        """
        few = pairs.num_rows * pairs.num_keys < _FEW_PAIRS
        return "float64" in (pairs.dtype, pairs.coord_dtype) or few

    def split_keys(self, pairs: Pairs, device: Device) -> tuple[int, int]:
        """(number of splits of the keys, tiles of each)."""
        rows = 4 * 16 if self.is_wide(pairs) else 8 * 16
        blocks = pairs.batch * pairs.num_chunks * (pairs.padded_rows // rows)
        return config.splits(pairs, blocks, 8 * device.num_sms)

    def config(
        self, pairs: Pairs, num_splits: int, wide: bool, repair: bool = False
    ) -> LaunchConfig:
        """The launch over so many splits of the keys."""
        rows = 4 if wide else 8
        # Two blocks of a multiprocessor at once, where registers are left for that.
        is_small = pairs.num_sums == 1 and pairs.gpu_kernel.struct == "gaussian"
        of_axes = pairs.dim <= 4 or pairs.dim > config.MAX_BOX_DIM
        is_small &= of_axes and not wide
        is_sum = not pairs.has_sums_of_weights
        # Twice the digits are for exponents: a caller's function has none.
        is_careful = pairs.dtype == "float64" and pairs.gpu_kernel.has_exponent
        blocks = pairs.batch * (pairs.padded_rows // (16 * rows))
        return config.launch(
            pairs,
            "points/direct.cu",
            "points_direct",
            (blocks, num_splits, pairs.num_chunks),
            _THREADS,
            generated=pairs.function,
            SUM_T="double" if repair and is_sum else CUDA_TYPES[pairs.dtype],
            WIDE_T="double" if wide else "float",
            CAREFUL=int(repair and is_careful),
            SCALED=int(pairs.has_axis_scales),
            ROWS=rows,
            MIN_BLOCKS=2 if is_small else 1,
            KERNEL=pairs.gpu_kernel.struct,
            FUNCTION=int(bool(pairs.function)),
        )

    def launches(self, pairs: Pairs, device: Device):
        """([(launch, arguments)], parts of each row, of these without a series)."""
        num_splits, tiles = self.split_keys(pairs, device)
        fields = {"tiles_per_split": tiles, "num_parts": num_splits}
        launch = self.config(pairs, num_splits, self.is_wide(pairs))
        return [(launch, self._arguments(pairs, **fields))], num_splits, num_splits

    def repair(self, pairs: Pairs, num_parts: int):
        """The launch that makes rows once more whose digits are not certain."""
        tiles = -(-pairs.num_tiles // num_parts)
        fields = {"tiles_per_split": tiles, "num_parts": num_parts, "repair": 1}
        launch = self.config(pairs, num_parts, wide=True, repair=True)
        return launch, self._arguments(pairs, **fields)

    def _arguments(self, pairs, **fields):
        params = config.pack(pairs, **fields)
        scales = "axis_scales" if pairs.has_axis_scales else 0
        arrays = (*config.ARRAYS, "facts", "redo", scales, "refs", "parts")
        return (*arrays, params, pairs.numbers)

    def needs_repair(self, pairs: Pairs) -> bool:
        """Whether rows may have to be made once more."""
        if not self.is_wide(pairs):
            return True
        if pairs.has_sums_of_weights:
            # What float64 scores lose is the last digit of large ones.
            return pairs.dtype == "float64" and pairs.gpu_kernel.has_exponent
        return pairs.gpu_kernel.has_exponent or bool(pairs.function)


@dataclass(frozen=True)
class MmaKernel(_Kernel):
    """Gaussian scores by products of float16 parts, and smooth tiles as series."""

    name: str = "mma"
    max_dim: int = 7
    # Squared reach of a block's rows, in bits: beyond it float16 parts lose digits.
    limit: float = 24.0
    block_rows: int = 512
    # Of 16 exponentials those by polynomial, by the number of sums. ms of 1e6 x 1e6 on
    # an H200: a log-sum 244 (4: 246), a sum of one column 263 (4: 268), a mean of three
    # 383 (4: 455).
    polynomials: tuple[int, ...] = (3, 2, 2, 2, 2)
    blocks_of_sm: int = 24  # that there are at least, in all splits of the keys

    def unsupported_reason(self, pairs: Pairs, device: Device) -> str | None:
        """Why this kernel cannot take a call, or None."""
        if reason := _not_gaussian(pairs):
            return reason
        if pairs.dim > self.max_dim:
            return f"takes up to {self.max_dim} dimensions, not {pairs.dim}"
        if device.cc < (8, 0):
            return f"needs sm_80 or newer, {device.name} is {device.arch}"
        if not pairs.is_sorted:
            return "the clouds are too small to be sorted"
        return None

    def _blocks(self, pairs):
        return pairs.batch * (pairs.padded_rows // self.block_rows)

    def _launch(self, pairs, source, entry, num_splits, **switches):
        switches = {"KERNEL": pairs.gpu_kernel.struct, **switches}
        grid = self._blocks(pairs), num_splits, pairs.num_chunks
        return config.launch(pairs, source, entry, grid, _THREADS, **switches)

    def config(self, pairs: Pairs, num_splits: int, device: Device) -> LaunchConfig:
        """The launch that takes tiles pair by pair."""
        return self._launch(
            pairs,
            "points/mma.cu",
            "points_mma",
            num_splits,
            POLY=self.polynomials[pairs.num_sums - 1],
            MIN_BLOCKS=self._min_blocks(pairs, device),
        )

    def _min_blocks(self, pairs, device):
        """Blocks of a multiprocessor at once: as many as registers allow."""
        if pairs.dim <= 3:
            # Newer compilers' schedules need more than 80 registers.
            by_sums = (3 if device.cc < (10, 0) else 2, 2, 2, 2, 1)
        elif pairs.dim <= 5:
            by_sums = (2, 2, 1, 1, 1)
        else:
            by_sums = (1, 1, 1, 1, 1)
        if pairs.coord_dtype == "float64":
            by_sums = (2, 1, 1, 1, 1)
        return by_sums[pairs.num_sums - 1]

    def series_config(self, pairs: Pairs, degree: int, num_splits: int):
        """The launch that takes smooth tiles by series of a degree."""
        terms = series.num_terms(degree, pairs.dim)
        return self._launch(
            pairs,
            "points/series.cu",
            "points_series",
            num_splits,
            SERIES=degree,
            TERMS=terms,
            MIN_BLOCKS=2 if terms * pairs.num_sums <= 64 else 1,
        )

    def choose_config(self, pairs: Pairs) -> LaunchConfig:
        """The launch that chooses a degree."""
        grid = min(pairs.padded_rows // self.block_rows, _SAMPLED_BLOCKS), pairs.batch
        source, kernel = "points/choose.cu", pairs.gpu_kernel.struct
        return config.launch(
            pairs, source, "points_choose", grid, _THREADS, KERNEL=kernel
        )

    def degrees(self, pairs: Pairs) -> tuple[int, ...]:
        """The series that are worth a look, none for clouds of few pairs."""
        if pairs.dim > 3 or pairs.num_rows * pairs.num_keys < _SERIES_PAIRS:
            return ()
        return series.DEGREES

    def launches(self, pairs: Pairs, device: Device):
        """([(launch, arguments)], parts of each row, of these without a series)."""
        blocks = self._blocks(pairs) * pairs.num_chunks
        num_splits, tiles = config.splits(
            pairs, blocks, self.blocks_of_sm * device.num_sms
        )
        degrees = self.degrees(pairs)
        more, tiles_of_series = 0, 0
        if degrees:
            more, tiles_of_series = config.splits(
                pairs, blocks, 8 * device.num_sms, least=32
            )
        common = {"num_parts": num_splits + more, "limit": self.limit}
        results = ("refs", "parts")
        found: list[Step] = []
        if degrees:
            boxes = ("row_boxes", "key_boxes", "facts", "tallies")
            cuts = series.pack_degrees(degrees, pairs.dim, pairs.q_scale)
            params = config.pack(pairs, **common)
            found.append((self.choose_config(pairs), (*boxes, params, cuts)))
        params = config.pack(pairs, tiles_per_split=tiles, **common)
        arguments = (*config.ARRAYS, "facts", "redo", *results, params)
        found.append((self.config(pairs, num_splits, device), arguments))
        for degree in degrees:
            params = config.pack(
                pairs,
                tiles_per_split=tiles_of_series,
                first_part=num_splits,
                **common,
            )
            coefficients = series.pack_coefficients(degree, pairs.dim)
            more_arguments = ("facts", *results, params, coefficients)
            launch = self.series_config(pairs, degree, more)
            found.append((launch, (*config.ARRAYS, *more_arguments)))
        return found, num_splits + more, num_splits


@dataclass(frozen=True)
class ProductsKernel(_Kernel):
    """Gaussian scores of many dimensions by products of float16 parts."""

    name: str = "products"
    min_dim: int = config.MAX_BOX_DIM + 1
    # Squared norm of a row from the middle, in bits: beyond it products lose digits.
    limit: float = 24.0
    limit_of_tf32: float = 256.0
    block_rows: int = 128

    def unsupported_reason(self, pairs: Pairs, device: Device) -> str | None:
        """Why this kernel cannot take a call, or None."""
        if reason := _not_gaussian(pairs):
            return reason
        if pairs.dim < self.min_dim:
            return f"takes {self.min_dim} dimensions or more, not {pairs.dim}"
        if device.cc < (8, 0):
            return f"needs sm_80 or newer, {device.name} is {device.arch}"
        if pairs.num_rows * pairs.num_keys < _FEW_PAIRS:
            return "there are too few pairs"
        return None

    def parts(self, pairs: Pairs) -> int:
        """Float16 parts of a coordinate: tf32 has as many digits as one."""
        return 1 if pairs.precision == "tf32" else 2

    def _chunks(self, pairs):
        return -(-pairs.dim * self.parts(pairs) // _CHUNK_PARTS)

    def memory(self, pairs: Pairs) -> dict[str, int]:
        """Bytes of what its launches pass on."""
        of_point = 128 * self._chunks(pairs)
        of_slab = 8 * pairs.batch * pairs.dim
        return {
            "row_parts": of_point * pairs.batch * pairs.padded_rows,
            "key_parts": of_point * pairs.batch * pairs.padded_keys,
            "norms": 8 * pairs.batch * pairs.padded_rows,
            "terms": 8 * pairs.batch * pairs.padded_keys,
            "row_sums": of_slab * _slabs(pairs.num_rows),
            "key_sums": of_slab * _slabs(pairs.num_keys),
            "centre": of_slab,
        }

    def middle_launches(self, pairs: Pairs) -> list[Step]:
        """The launches that find what coordinates are measured from."""
        switches = tuple(
            item for item in config.defines(pairs) if item[0] in ("COORD_T", "DIM")
        )
        sums, join = (
            Variant("points/middle.cu", entry, switches)
            for entry in ("points_middle", "points_middle_join")
        )
        # With one part points are rounded: to the same with x and y exchanged.
        clouds = {"key_sums": ("y", pairs.num_keys)}
        if self.parts(pairs) == 1:
            clouds["row_sums"] = "x", pairs.num_rows
        axes = -(-pairs.dim // 32)
        found: list[Step] = []
        for to, (points, size) in clouds.items():
            grid = _slabs(size), axes, pairs.batch
            found.append((LaunchConfig(sums, grid, (_THREADS,)), (points, to, size)))
        arguments = (
            "row_sums" if "row_sums" in clouds else 0,
            "key_sums",
            "centre",
            *map(_slabs, (pairs.num_rows, pairs.num_keys)),
            *(pairs.num_rows, pairs.num_keys),
        )
        found.append((LaunchConfig(join, (pairs.batch, 1), (_THREADS,)), arguments))
        return found

    def parts_config(self, pairs: Pairs, is_row: bool) -> LaunchConfig:
        """The launch that cuts the coordinates of a cloud in parts."""
        parts = self.parts(pairs)
        more = {"IS_ROW": int(is_row), "PARTS": parts, "WEIGHT_T": pairs.weight_type}
        switches = config.defines(pairs, **more)
        used = ("COORD_T", "DIM", *more)
        variant = Variant(
            "points/parts.cu",
            "points_parts",
            tuple(item for item in switches if item[0] in used),
        )
        padded = pairs.padded_rows if is_row else pairs.padded_keys
        return LaunchConfig(variant, (-(-padded // 128), pairs.batch), (128,))

    def config(self, pairs: Pairs, num_splits: int, device: Device) -> LaunchConfig:
        """The launch over so many splits of the keys."""
        chunks = self._chunks(pairs)
        others = 2 * (16384 + 1024 + 512 * max(pairs.columns_of_chunk, 1))
        is_resident = chunks <= 4 and chunks * 16384 + others <= device.smem_optin
        blocks = pairs.batch * (pairs.padded_rows // self.block_rows)
        return config.launch(
            pairs,
            "points/products.cu",
            "points_products",
            (blocks, num_splits, pairs.num_chunks),
            _THREADS,
            smem=16384 * (chunks if is_resident else 2) + others,
            PARTS=self.parts(pairs),
            RESIDENT=int(is_resident),
            MIN_BLOCKS=2 if pairs.num_sums == 1 else 1,
        )

    def launches(self, pairs: Pairs, device: Device):
        """([(launch, arguments)], parts of each row, of these without a series)."""
        blocks = pairs.batch * pairs.num_chunks * pairs.padded_rows // self.block_rows
        num_splits, tiles = config.splits(pairs, blocks, 8 * device.num_sms)
        num_parts = 2 * num_splits  # of halves of each tile
        limit = self.limit if self.parts(pairs) == 2 else self.limit_of_tf32
        params = config.pack(
            pairs, tiles_per_split=tiles, num_parts=num_parts, limit=limit
        )
        root = np.float64(math.sqrt(pairs.q_scale)).tobytes()
        rows = ("row_parts", "norms", 0, pairs.num_rows, pairs.padded_rows, root)
        keys = ("key_parts", 0, "terms", pairs.num_keys, pairs.padded_keys, root)
        weights = "weights" if pairs.has_sums_of_weights else 0
        cut = ("row_parts", "key_parts", "norms", "terms", "key_values")
        results = ("redo", "refs", "parts", params)
        return (
            [
                *self.middle_launches(pairs),
                (self.parts_config(pairs, True), ("x", 0, "centre", *rows)),
                (self.parts_config(pairs, False), ("y", weights, "centre", *keys)),
                (self.config(pairs, num_splits, device), (*cut, *results)),
            ],
            num_parts,
            num_parts,
        )


# Parts of coordinates of a chunk of products.cu.
_CHUNK_PARTS = 64
# Slabs of a cloud that are summed side by side, and points that one is worth it for.
_MOST_SLABS, _SLAB_POINTS = 256, 256
# Slack of results that have fewer digits than float32, and of float64 ones.
_ANY, _SLACK_F64 = 1e30, 2.0
# Pairs below which blocks of direct.cu in float64 are as fast as anything.
_FEW_PAIRS = 1 << 22
# Pairs from which on a choice between series pays; row blocks that it looks at.
_SERIES_PAIRS = 1 << 31
_SAMPLED_BLOCKS = 32

MMA = MmaKernel()
DIRECT = DirectKernel()
PRODUCTS = ProductsKernel()
KERNELS = (MMA, PRODUCTS, DIRECT)
GRADIENT = _Kernel("gradient")  # of moments.py, for gradients by points


def _slabs(num_points):
    return max(1, min(_MOST_SLABS, num_points // _SLAB_POINTS))


def slack(row, pairs: Pairs) -> float:
    """That of points_params_t: an error of a score stays one of a mean."""
    if row is PRODUCTS and row.parts(pairs) == 1:
        return _ANY
    if pairs.num_columns or (pairs.lse_dtype and pairs.dtype == "float32"):
        return 0.0
    return _SLACK_F64 if pairs.dtype == "float64" else row.slack


def select(pairs: Pairs, device: Device):
    """(row, what was refused)."""
    return kernel.select(KERNELS, pairs, device)
