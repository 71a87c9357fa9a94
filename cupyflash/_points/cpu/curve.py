"""Points in the order of a space-filling curve, so that tiles of them are small."""

import numpy as np

_BITS = 62
# More axes than this leave tiles as large as the cloud.
MOST_AXES = 8


def z_order(*clouds: np.ndarray) -> list[np.ndarray]:
    """For each cloud the order of its points along one Z-order curve.

    Each coordinate becomes a whole number of the box round all clouds; the bits of all
    coordinates take turns in the code that is sorted by (G. M. Morton, 1966).
    """
    dim = clouds[0].shape[1]
    low = np.min([cloud.min(axis=0) for cloud in clouds], axis=0)
    high = np.max([cloud.max(axis=0) for cloud in clouds], axis=0)
    bits = min(_BITS // dim, 20)
    side = high - low
    unit = (2**bits - 1) / np.where(side > 0, side, 1.0)
    return [
        np.argsort(_codes(cloud, low, unit, bits), kind="stable") for cloud in clouds
    ]


def _codes(cloud, low, unit, bits):
    with np.errstate(invalid="ignore"):
        cells = ((cloud - low) * unit).astype(np.int64)
    codes = np.zeros(len(cloud), np.int64)
    for bit in reversed(range(bits)):
        for axis in range(cloud.shape[1]):
            codes = (codes << 1) | ((cells[:, axis] >> bit) & 1)
    return codes
