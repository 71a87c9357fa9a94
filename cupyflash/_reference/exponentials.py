"""The exponentials of the kernels beside exp: all floats, and a sample of doubles."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import LaunchConfig, Variant

_SOURCE = "check/exponentials.cu"
_NUM_THREADS = 256  # kNumThreads of the source
_NUM_BLOCKS = 4096

# Functions that the source knows -> units in the last place that they may be off. The
# fast ones stand before a rounding to 16 bits, so 2^-16 relative will do.
FLOATS = {
    "exp_of": 2.0,
    "exp_fast": 128.0,
    "exp_in_sum": 1.0,
    "exp_in_sum_fast": 128.0,
}
DOUBLES = {"exp_of": 1.0}

_RANGES = ("all up to 0", "all above 0, and NaN")  # as the kernel tells them apart

_SAMPLE = 1 << 22  # doubles


@dataclass(frozen=True)
class Finding:
    """The largest error of one function over one range."""

    function: str
    dtype: str
    arguments: str
    ulps: float
    at: float
    allowed: float

    @property
    def is_good(self) -> bool:
        """Whether the error is one that the kernels may have."""
        return self.ulps <= self.allowed


def measure() -> list[Finding]:
    """Run all functions on the current device; some seconds at most."""
    findings = []
    for function, allowed in FLOATS.items():
        findings += _of_all_floats(function, allowed)
    for function, allowed in DOUBLES.items():
        findings.append(_of_doubles(function, allowed))
    return findings


def _of_all_floats(function, allowed):
    import cupy

    from cupyflash._cuda import launch as _launch
    from cupyflash._cuda import runtime

    worst = cupy.zeros(2, np.uint64)
    config = LaunchConfig(_variant(function), (_NUM_BLOCKS,), (_NUM_THREADS,))
    launch = _launch.Launch(config, runtime.current_device())
    launch(worst)
    for word, arguments in zip(worst.get(), _RANGES, strict=True):
        ulps, at = (_float_of(int(word) >> shift & 0xFFFFFFFF) for shift in (32, 0))
        yield Finding(function, "float32", arguments, ulps, at, allowed)


def _of_doubles(function, allowed):
    """Against the long double of the host, where that is wider than a double."""
    import cupy

    from cupyflash._cuda import launch as _launch
    from cupyflash._cuda import runtime

    x = doubles(_SAMPLE)
    device_x, device_y = cupy.asarray(x), cupy.empty(x.shape)
    variant = _variant(function, "exponentials_of_doubles")
    grid = (-(-x.size // _NUM_THREADS),)
    config = LaunchConfig(variant, grid, (_NUM_THREADS,))
    launch = _launch.Launch(config, runtime.current_device())
    launch(device_x, device_y, x.size)
    ulps = ulps_of_doubles(x, device_y.get())
    worst = int(ulps.argmax())
    arguments = f"{x.size} up to 0"
    return Finding(
        function, "float64", arguments, float(ulps[worst]), float(x[worst]), allowed
    )


def doubles(size: int) -> np.ndarray:
    """Arguments up to 0 whose exponential is a normal number, and the special values.

    Half of them are spread evenly, half over the powers of two.
    """
    rng = np.random.default_rng(0)
    even = rng.uniform(-708, 0, size // 2)
    powers = -np.exp2(rng.uniform(-60, np.log2(708), size - size // 2))
    special = [0.0, -0.0, -1e-300, -np.inf, -1e300, -800.0, np.nan]
    powers[: len(special)] = special
    return np.concatenate([even, powers])


def ulps_of_doubles(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Errors of y = exp(x) in units in the last place; inf for what is of no use."""
    with np.errstate(under="ignore"):
        exact = np.exp(x.astype(np.longdouble))
    tiny = np.finfo(np.float64).tiny
    unit = np.spacing(np.maximum(exact.astype(np.float64), tiny))
    ulps = (np.abs(y - exact) / unit).astype(np.float64)
    ulps[(exact < tiny) & (y >= 0) & (y <= tiny)] = 0  # kernels may flush to zero
    ulps[np.isnan(x)] = np.where(np.isnan(y[np.isnan(x)]), 0, np.inf)
    return np.where(np.isnan(ulps), np.inf, ulps)


def _float_of(bits):
    return float(np.uint32(bits).view(np.float32))


def _variant(function, entry="exponentials"):
    return Variant(_SOURCE, entry, (("ACC_T", "float"), ("EXPONENTIAL", function)))


def compile_list(device: Device, everything: bool) -> list[tuple[str, Any]]:
    """All kernels of this module, for `python -m cupyflash compile`."""
    del device, everything  # the same for each
    variants = [_variant(function) for function in FLOATS]
    variants += [_variant(f, "exponentials_of_doubles") for f in DOUBLES]
    return [("exponentials", variant) for variant in variants]
