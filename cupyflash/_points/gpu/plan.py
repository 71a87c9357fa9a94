"""Plans of points: clouds in order, the parts of each row, and what they combine to."""

import numpy as np

from cupyflash._cuda import runtime
from cupyflash._cuda.launch_sequence import (
    LaunchSequence,
    Result,
    Steps,
    num_bytes,
    sections,
)
from cupyflash._points.gpu import config, registry
from cupyflash._points.gpu.config import Pairs

INPUTS = ("x", "y", "weights", "values", "x_order", "y_order", "axis_scales")


def _arranged(pairs: Pairs) -> tuple[list, dict[str, int]]:
    """The launches that bring both clouds into order, and the memory for them."""
    size = np.dtype(pairs.coord_dtype).itemsize
    values_size = np.dtype(pairs.dtype).itemsize
    columns = pairs.num_chunks * pairs.columns_of_chunk
    batch, rows, keys = pairs.batch, pairs.padded_rows, pairs.padded_keys
    has_weights = pairs.has_sums_of_weights
    memory = {
        "rows": num_bytes((batch, pairs.dim, rows), "u1") * size,
        "keys": num_bytes((batch, pairs.dim, keys), "u1") * size,
        "key_weights": 8 * batch * keys if has_weights else 8,
        "key_values": max(8, values_size * batch * columns * keys),
        "row_boxes": 4 * batch * pairs.num_groups * pairs.box_floats,
        "key_boxes": 4 * batch * pairs.num_tiles * pairs.box_floats,
    }
    key_weights = "key_weights" if has_weights else 0
    key_values = "key_values" if columns else 0
    scales = "axis_scales" if pairs.has_axis_scales else 0
    x_order, y_order = ("x_order", "y_order") if pairs.is_sorted else (0, 0)
    launches = [
        (
            config.arrange_config(pairs, rows),
            ("x", 0, 0, x_order, "rows", 0, 0, pairs.num_rows, rows, 0, 0),
        ),
        (
            config.arrange_config(pairs, keys),
            (
                "y",
                "weights",
                "values",
                y_order,
                "keys",
                key_weights,
                key_values,
                pairs.num_keys,
                keys,
                pairs.num_columns,
                columns,
            ),
        ),
        (
            config.boxes_config(pairs, rows, config.GROUP),
            ("rows", 0, 0, scales, "row_boxes", 0, rows, 0),
        ),
        (
            config.boxes_config(pairs, keys, config.TILE_KEYS),
            (
                "keys",
                key_weights,
                key_values,
                scales,
                "key_boxes",
                "facts",
                keys,
                columns,
            ),
        ),
    ]
    return launches, memory


def steps(pairs: Pairs, device) -> Steps:
    """All launches of a call."""
    row, _ = registry.select(pairs, device)
    launches, memory = _arranged(pairs)
    order = "x_order" if pairs.is_sorted else 0
    out = "out" if pairs.num_columns else 0
    lse = "lse" if pairs.reduction == "logsumexp" or pairs.return_lse else 0

    def combined(repair):
        arguments = ("refs", "parts", order, "facts", "redo", out, lse)
        params = config.pack(
            pairs,
            num_parts=num_parts,
            first_part=without_series,
            slack=registry.slack(row, pairs),
            repair=repair,
        )
        return config.combine_config(pairs), (*arguments, params)

    main, num_parts, without_series = row.launches(pairs, device)
    launches += main
    launches.append(combined(False))
    if row.needs_repair(pairs):
        launches.append(registry.DIRECT.repair(pairs, num_parts))
        launches.append(combined(True))
    num_rows = pairs.num_chunks * pairs.batch * num_parts * pairs.padded_rows
    scratch = {
        "facts": config.FACTS_BYTES * pairs.batch,
        "tallies": config.TALLY_BYTES * pairs.batch,
        "redo": 4 * pairs.batch * pairs.num_groups,
    }
    _, cleared = sections(*scratch.values())
    scratch |= memory | row.memory(pairs)
    scratch["refs"] = 8 * num_rows
    scratch["parts"] = np.dtype(pairs.dtype).itemsize * pairs.num_sums * num_rows
    return Steps(launches, scratch, cleared)


class PointsPlan(LaunchSequence):
    """The launches of a reduction, but for the order of the clouds."""

    def __init__(self, pairs: Pairs, device_id: int):
        dtype = np.dtype(pairs.dtype)
        results: dict[str, Result | None] = {}
        if pairs.num_columns:
            shape = pairs.batch, pairs.num_rows, pairs.num_columns
            results["out"] = Result(shape, dtype)
        if pairs.reduction == "logsumexp" or pairs.return_lse:
            of_lse = np.dtype(pairs.lse_dtype) if pairs.lse_dtype else dtype
            results["lse"] = Result((pairs.batch, pairs.num_rows), of_lse)
        device = runtime.device(device_id)
        super().__init__(device_id, INPUTS, results, steps(pairs, device))
