"""Clouds in the order of a Hilbert curve, so that neighbours in memory are near."""

from dataclasses import replace

import cupy
import numpy as np

from cupyflash._cuda import plan_cache
from cupyflash._cuda.launch import Launch
from cupyflash._points.gpu import config
from cupyflash._points.gpu.config import Pairs

# Pairs below which sorting costs more than it saves.
_FEW_PAIRS = 1 << 24


def sorted_where_worth(pairs: Pairs) -> Pairs:
    """The same call, with both clouds sorted where tiles of them can be skipped."""
    is_worth = (
        pairs.gpu_kernel.has_exponent
        and pairs.dim <= config.MAX_BOX_DIM
        and pairs.num_rows * pairs.num_keys >= _FEW_PAIRS
        and min(pairs.num_rows, pairs.num_keys) >= config.TILE_KEYS
    )
    return replace(pairs, is_sorted=is_worth)


def order(x):
    """The order of points (batch, points, axes) along a curve, (batch, points)."""
    batch, num_points, dim = x.shape
    bounds = cupy.zeros((batch, 2, dim), np.uint32)
    codes = cupy.empty((batch, num_points), np.uint64)
    key = x.dtype.name, dim, num_points, batch, x.data.device_id
    launches = _launches.get(key)
    if launches is None:
        configs = config.curve_configs(*key[:-1])
        launches = [Launch(one, x.data.device_id) for one in configs]
        _launches.put(key, launches)
    find_bounds, place = launches
    find_bounds.enqueue(x.data.ptr, bounds.data.ptr, num_points)
    place.enqueue(x.data.ptr, bounds.data.ptr, codes.data.ptr, num_points)
    return cupy.argsort(codes, axis=-1)


_launches = plan_cache.PlanCache()
