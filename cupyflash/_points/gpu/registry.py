"""Kernel specs of points: which take a call, and their launches. Best first."""

from dataclasses import dataclass

from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant
from cupyflash._points.gpu import config, series
from cupyflash._points.gpu.config import Pairs

_THREADS = 256


@dataclass(frozen=True)
class DirectKernel:
    """Differences of coordinates: any data, any kernel, any number of dimensions."""

    name: str = "direct"
    methods: tuple[str, ...] = ("auto",)
    fast: bool = True  # must not spill

    def unsupported_reason(self, pairs: Pairs, device: Device) -> str | None:
        """Why this kernel cannot take a call, or None."""
        return None

    def is_wide(self, pairs: Pairs) -> bool:
        """Whether scores are made in float64 at once.

        Where nothing is skipped and no block is large, that is as fast as a look at
        which rows need it.
        """
        few = pairs.num_rows * pairs.num_keys < 1 << 22
        return "float64" in (pairs.dtype, pairs.coord_dtype) or few

    def split_keys(self, pairs: Pairs, device: Device) -> tuple[int, int]:
        """(number of splits of the keys, tiles of each)."""
        rows = 4 * 16 if self.is_wide(pairs) else 8 * 16
        blocks = pairs.batch * pairs.num_chunks * (pairs.padded_rows // rows)
        return config.splits(pairs, blocks, 8 * device.num_sms)

    def config(
        self, pairs: Pairs, num_splits: int, wide: bool, repair: bool
    ) -> LaunchConfig:
        """The launch over so many splits of the keys."""
        rows = 4 if wide else 8
        # Two blocks of a multiprocessor at once, where registers are left for that.
        is_small = pairs.num_sums == 1 and pairs.kernel == "gaussian"
        of_axes = pairs.dim <= 4 or pairs.dim > config.MAX_BOX_DIM
        is_small &= of_axes and not wide
        variant = Variant(
            "points/direct.cu",
            "points_direct",
            config.defines(
                pairs,
                WIDE_T="double" if wide else "float",
                ROWS=rows,
                MIN_BLOCKS=2 if is_small else 1,
                REPAIR=int(repair),
                KERNEL=pairs.gpu_kernel.struct,
            ),
        )
        blocks = pairs.batch * (pairs.padded_rows // (16 * rows))
        return LaunchConfig(
            variant, (blocks, num_splits, pairs.num_chunks), (_THREADS,)
        )

    def launches(self, pairs: Pairs, device: Device, arrays: tuple):
        """([(launch, arguments)], parts of each row, of these without a series)."""
        num_splits, tiles = self.split_keys(pairs, device)
        fields = {"tiles_per_split": tiles, "num_parts": num_splits}
        launch = self.config(pairs, num_splits, self.is_wide(pairs), repair=False)
        arguments = (*arrays, "facts", "redo", "refs", "parts")
        return [(launch, (*arguments, config.pack(pairs, **fields)))], num_splits, num_splits

    def repair(self, pairs: Pairs, num_parts: int, arrays: tuple):
        """The launch that makes rows once more whose digits are not certain."""
        tiles = -(-pairs.num_tiles // num_parts)
        fields = {"tiles_per_split": tiles, "num_parts": num_parts}
        launch = self.config(pairs, num_parts, wide=True, repair=True)
        arguments = (*arrays, "facts", "redo", "refs", "parts")
        return launch, (*arguments, config.pack(pairs, **fields))

    def needs_repair(self, pairs: Pairs) -> bool:
        """Whether rows may have to be made once more."""
        if self.is_wide(pairs):
            skips = pairs.gpu_kernel.has_exponent and pairs.dim <= config.MAX_BOX_DIM
            return skips and not pairs.has_sums_of_weights
        return True


@dataclass(frozen=True)
class MmaKernel:
    """Gaussian scores by products of float16 parts, and smooth tiles as series."""

    name: str = "mma"
    methods: tuple[str, ...] = ("auto",)
    fast: bool = True
    max_dim: int = 7
    # Squared reach of a block's rows, in bits: beyond it float16 parts lose digits.
    limit: float = 24.0
    block_rows: int = 512
    polynomials: int = 4  # of 16 exponentials

    def unsupported_reason(self, pairs: Pairs, device: Device) -> str | None:
        """Why this kernel cannot take a call, or None."""
        if pairs.kernel != "gaussian":
            return f"takes the gaussian kernel, not {pairs.kernel}"
        if pairs.dtype != "float32":
            return f"takes float32, not {pairs.dtype}"
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
        variant = Variant(
            source,
            entry,
            config.defines(pairs, KERNEL=pairs.gpu_kernel.struct, **switches),
        )
        grid = self._blocks(pairs), num_splits, pairs.num_chunks
        return LaunchConfig(variant, grid, (_THREADS,))

    def config(self, pairs: Pairs, num_splits: int) -> LaunchConfig:
        """The launch that takes tiles pair by pair."""
        return self._launch(
            pairs,
            "points/mma.cu",
            "points_mma",
            num_splits,
            POLY=self.polynomials,
            MIN_BLOCKS=self._min_blocks(pairs),
        )

    def _min_blocks(self, pairs):
        """Blocks of a multiprocessor at once: as many as registers allow."""
        if pairs.dim <= 3:
            by_sums = (3, 2, 2, 2, 1)
        else:
            by_sums = (2, 2, 1, 1, 1)
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
        variant = Variant(
            "points/choose.cu",
            "points_choose",
            config.defines(pairs, KERNEL=pairs.gpu_kernel.struct),
        )
        blocks = min(pairs.padded_rows // self.block_rows, _SAMPLED_BLOCKS)
        return LaunchConfig(variant, (blocks, pairs.batch), (_THREADS,))

    def degrees(self, pairs: Pairs) -> tuple[int, ...]:
        """The series that are worth a look, none for clouds of few pairs."""
        if pairs.dim > 3 or pairs.num_rows * pairs.num_keys < _SERIES_PAIRS:
            return ()
        return series.DEGREES

    def launches(self, pairs: Pairs, device: Device, arrays: tuple):
        """([(launch, arguments)], parts of each row, of these without a series)."""
        blocks = self._blocks(pairs) * pairs.num_chunks
        num_splits, tiles = config.splits(pairs, blocks, 12 * device.num_sms)
        degrees = self.degrees(pairs)
        more, tiles_of_series = 0, 0
        if degrees:
            more, tiles_of_series = config.splits(
                pairs, blocks, 8 * device.num_sms, least=32
            )
        common = {"num_parts": num_splits + more, "limit": self.limit}
        results = ("refs", "parts")
        found = []
        if degrees:
            boxes = ("row_boxes", "key_boxes", "facts", "tallies")
            cuts = series.pack_degrees(degrees, pairs.dim, pairs.q_scale)
            params = config.pack(pairs, **common)
            found.append((self.choose_config(pairs), (*boxes, params, cuts)))
        params = config.pack(pairs, tiles_per_split=tiles, **common)
        arguments = (*arrays, "facts", "redo", *results, params)
        found.append((self.config(pairs, num_splits), arguments))
        for degree in degrees:
            params = config.pack(
                pairs,
                tiles_per_split=tiles_of_series,
                first_part=num_splits,
                **common,
            )
            coefficients = series.pack_coefficients(degree, pairs.dim)
            arguments = (*arrays, "facts", *results, params, coefficients)
            found.append((self.series_config(pairs, degree, more), arguments))
        return found, num_splits + more, num_splits

    def needs_repair(self, pairs: Pairs) -> bool:
        """Whether rows may have to be made once more."""
        return True


# Pairs from which on a choice between series pays; row blocks that it looks at.
_SERIES_PAIRS = 1 << 31
_SAMPLED_BLOCKS = 32

MMA = MmaKernel()
DIRECT = DirectKernel()
KERNELS = (MMA, DIRECT)


def select(pairs: Pairs, device: Device):
    """(row, what was refused)."""
    return kernel.select(KERNELS, pairs, device)
