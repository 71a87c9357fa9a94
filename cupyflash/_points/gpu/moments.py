"""Moments of points, which gradients are: numbers of a call and their kernels."""

import math
from typing import Any, NamedTuple

from cupyflash._core.dtypes import CUDA_TYPES
from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._points.gpu import config
from cupyflash._points.gpu.config import Pairs

_THREADS = 256
_SOURCE = "points/gradient.cu"
# Pairs below which blocks in float64 are as fast as anything.
_FEW_PAIRS = 1 << 22
# Columns that stay in shared memory, and those of more that are there at a time.
_FEW_COLUMNS, _COLUMNS_AT_ONCE = 4, 8
_MOST_AXES = {0: 64, 1: 64, 2: 32}  # in one chunk, by `squares`


class Moments(NamedTuple):
    """A call: pairs whose kernel is a slope, and which squares are summed.

    `pairs.num_columns` are those of the products of values, `squares` 0 for none, 1
    for one number a row, 2 for one per axis. `factor` is that of the moments.
    """

    pairs: Pairs
    squares: int
    factor: float

    @property
    def is_wide(self) -> bool:
        """Whether scores are made in float64 at once."""
        pairs = self.pairs
        few = pairs.num_rows * pairs.num_keys < _FEW_PAIRS
        return "float64" in (pairs.dtype, pairs.coord_dtype) or few

    @property
    def is_whole(self) -> bool:
        """Whether a thread has all axes of its pairs."""
        return self.pairs.dim <= config.MAX_BOX_DIM

    @property
    def axes(self) -> int:
        """Axes of a chunk."""
        if self.is_whole:
            return self.pairs.dim
        return min(self.pairs.dim, _MOST_AXES[self.squares])

    @property
    def num_chunks(self) -> int:
        return -(-self.pairs.dim // self.axes)

    @property
    def num_moments(self) -> int:
        """Sums of a row in one chunk."""
        return self.axes * (1 + (self.squares == 2)) + (self.squares == 1)

    @property
    def knows_distances(self) -> bool:
        """Whether a weight depends on digits of a distance."""
        return self.pairs.gpu_kernel.has_exponent or bool(self.pairs.function)

    @property
    def has_far_pairs(self) -> bool:
        """Whether a second launch takes pairs that float32 has no digits for."""
        with_weights = self.pairs.has_sums_of_weights
        return with_weights and not self.is_wide and self.knows_distances

    @property
    def needs_repair(self) -> bool:
        """Whether sums may have to be made once more in float64."""
        is_sum = not self.pairs.has_sums_of_weights
        return is_sum and (self.knows_distances or not self.is_wide)

    @property
    def rows(self) -> int:
        """Rows of a block that all launches agree on."""
        return 16 * _rows(self, self.is_wide)

    @property
    def stored_columns(self) -> int:
        """Columns of values, padded to what a launch takes at a time."""
        columns = self.pairs.num_columns
        if columns <= _FEW_COLUMNS:
            return columns
        return -(-columns // _COLUMNS_AT_ONCE) * _COLUMNS_AT_ONCE

    @property
    def drop(self) -> float:
        """That of points_params_t, for terms that have a difference as a factor.

        A gradient may be 2^-16 of its largest value, whatever the weights sum to.
        """
        pairs = self.pairs
        bits = pairs.drop + 16 * pairs.has_sums_of_weights
        if not pairs.gpu_kernel.has_exponent:
            return bits
        # log2 of the distance at which the exponent is `bits`, in bandwidths.
        distance = math.log2(bits / pairs.gpu_kernel.factor) / 2
        if pairs.gpu_kernel.struct != "gaussian":
            distance += math.log2(bits) / 2
        return bits + max(distance, 0) * (1 + (self.squares > 0))


def _rows(moments: Moments, wide: bool) -> int:
    """Rows of a thread."""
    return 4 if wide or moments.is_whole else 8


def _sums(moments: Moments) -> int:
    """Numbers of a row that a thread holds or reads at a time."""
    return moments.num_moments + min(moments.stored_columns, _COLUMNS_AT_ONCE)


def _min_blocks(moments: Moments, wide: bool) -> int:
    """Blocks of a multiprocessor at once: as many as registers allow."""
    is_large = _sums(moments) > 8 if moments.is_whole else moments.axes > 8
    return 1 if wide or moments.pairs.function or is_large else 2


def gradient_config(
    moments: Moments, num_splits: int, wide: bool, repair: bool = False
) -> LaunchConfig:
    """The launch over so many splits of the keys."""
    pairs = moments.pairs
    rows = _rows(moments, wide)
    is_many = pairs.num_columns > _FEW_COLUMNS
    is_sum = not pairs.has_sums_of_weights
    sums = "double" if repair and is_sum else CUDA_TYPES[pairs.dtype]
    blocks = pairs.batch * (pairs.padded_rows // (16 * rows))
    # A caller's function needs registers of its own, and so do many sums or columns.
    needs_more = wide and (pairs.function or _sums(moments) > 7)
    keys = 4 if moments.is_whole and not needs_more else 2
    if wide and moments.is_whole and moments.num_moments > 13:
        keys = 1
    return config.launch(
        pairs,
        _SOURCE,
        "points_gradient",
        (blocks, num_splits, moments.num_chunks),
        _THREADS,
        generated=pairs.function,
        COLUMNS=_COLUMNS_AT_ONCE if is_many else pairs.num_columns,
        MANY=int(is_many),
        SUM_T=sums,
        WIDE_T="double" if wide else "float",
        SCALED=int(pairs.has_axis_scales),
        SQUARES=moments.squares,
        ROWS=rows,
        RULE_ROWS=moments.rows,
        KEYS=keys,
        MIN_BLOCKS=_min_blocks(moments, wide),
        KERNEL=pairs.gpu_kernel.struct,
        FUNCTION=int(bool(pairs.function)),
    )


def join_config(moments: Moments) -> LaunchConfig:
    """The launch that adds parts."""
    pairs = moments.pairs
    grid = -(-pairs.batch * pairs.padded_rows // _THREADS), moments.num_chunks
    source, entry = "points/gradient_join.cu", "points_gradient_join"
    coord = CUDA_TYPES[pairs.dtype]  # whatever the coordinates are
    more: Any = {"COORD_T": coord, "SQUARES": moments.squares}
    return config.launch(pairs, source, entry, grid, _THREADS, COLUMNS=0, **more)


def launches(moments: Moments) -> list[LaunchConfig]:
    """Those of a call, with one split of the keys."""
    pairs = moments.pairs
    found = [
        config.arrange_config(pairs, pairs.padded_rows),
        config.arrange_config(pairs, pairs.padded_keys),
        config.boxes_config(pairs, pairs.padded_rows, config.GROUP),
        config.boxes_config(pairs, pairs.padded_keys, config.TILE_KEYS),
        gradient_config(moments, 1, moments.is_wide),
        join_config(moments),
    ]
    if moments.has_far_pairs:
        found.append(gradient_config(moments, 1, wide=True))
    if moments.needs_repair:
        found.append(gradient_config(moments, 1, wide=True, repair=True))
    return found
