"""Plans of gradients by points: sums of differences of all pairs of two clouds."""

import numpy as np

from cupyflash._cuda import runtime
from cupyflash._cuda.launch_sequence import (
    LaunchSequence,
    Result,
    Steps,
    num_bytes,
    sections,
)
from cupyflash._points.gpu import config
from cupyflash._points.gpu.moments import Moments, gradient_config, join_config

INPUTS = (
    *("x", "y", "row_terms", "key_terms", "row_values", "key_values"),
    *("x_order", "y_order", "axis_scales"),
)
# Bits of a distance up to which float32 gives a weight its digits.
_LIMIT = 12.0


def _arranged(moments: Moments):
    """The launches that bring both clouds into order, and the memory for them."""
    pairs, columns = moments.pairs, moments.stored_columns
    size = np.dtype(pairs.coord_dtype).itemsize
    of_values = np.dtype(pairs.dtype).itemsize * columns
    batch, rows, keys = pairs.batch, pairs.padded_rows, pairs.padded_keys
    memory = {
        "sorted_rows": num_bytes((batch, pairs.dim, rows), "u1") * size,
        "sorted_keys": num_bytes((batch, pairs.dim, keys), "u1") * size,
        "sorted_row_values": of_values * batch * rows,
        "sorted_key_values": of_values * batch * keys,
        "row_boxes": 4 * batch * pairs.num_groups * pairs.box_floats,
        "key_boxes": 4 * batch * pairs.num_tiles * pairs.box_floats,
    }
    row_terms: int | str = 0
    key_terms: int | str = 0
    if pairs.has_sums_of_weights:
        memory["sorted_row_terms"] = 8 * batch * rows
        memory["sorted_key_terms"] = 8 * batch * keys
        row_terms, key_terms = "sorted_row_terms", "sorted_key_terms"
    scales = "axis_scales" if pairs.has_axis_scales else 0
    x_order, y_order = ("x_order", "y_order") if pairs.is_sorted else (0, 0)
    given = pairs.num_columns, columns
    clouds = (
        ("x", "row_terms", "row_values", x_order, "sorted_rows", row_terms,
         "sorted_row_values", pairs.num_rows, rows, *given),
        ("y", "key_terms", "key_values", y_order, "sorted_keys", key_terms,
         "sorted_key_values", pairs.num_keys, keys, *given),
    )  # fmt: skip
    boxes = (
        ("sorted_rows", 0, "sorted_row_values", scales, "row_boxes", "row_facts",
         rows, columns),
        ("sorted_keys", key_terms, "sorted_key_values", scales, "key_boxes", "facts",
         keys, columns),
    )  # fmt: skip
    launches = [
        (config.arrange_config(pairs, rows), clouds[0]),
        (config.arrange_config(pairs, keys), clouds[1]),
        (config.boxes_config(pairs, rows, config.GROUP), boxes[0]),
        (config.boxes_config(pairs, keys, config.TILE_KEYS), boxes[1]),
    ]
    return launches, memory


def steps(moments: Moments, device) -> Steps:
    """All launches of a call."""
    pairs = moments.pairs
    with_weights = pairs.has_sums_of_weights
    launches, memory = _arranged(moments)
    blocks = pairs.batch * moments.num_chunks * (pairs.padded_rows // moments.rows)
    num_splits, tiles = config.splits(pairs, blocks, 8 * device.num_sms)
    num_parts = num_splits * (1 + moments.has_far_pairs)
    terms = ("sorted_row_terms", "sorted_key_terms") if with_weights else (0, 0)
    scales = "axis_scales" if pairs.has_axis_scales else 0
    arrays = (
        *("sorted_rows", "sorted_keys", *terms),
        *("sorted_row_values", "sorted_key_values", "row_boxes", "key_boxes"),
        *("facts", "row_facts", "redo", scales, "parts"),
    )
    unit = 1.0 if pairs.has_axis_scales else pairs.scale
    numbers = [np.float64(x).tobytes() for x in (moments.factor, unit)]

    def params(**fields):
        known = {"num_parts": num_parts, "tiles_per_split": tiles, "limit": np.inf}
        known |= {"num_columns": moments.stored_columns, "drop": moments.drop}
        return config.pack(pairs, **{**known, **fields})

    def launch(wide, **fields):
        kernel = gradient_config(moments, num_splits, wide, "limit" not in fields)
        launches.append((kernel, (*arrays, params(**fields), pairs.numbers)))

    def join(**fields):
        found = "facts", "row_facts", "redo", "moments", squares
        arguments = ("parts", order, *found, *numbers, params(**fields))
        launches.append((join_config(moments), arguments))

    order = "x_order" if pairs.is_sorted else 0
    squares = "squares" if moments.squares else 0
    limit = _LIMIT if moments.has_far_pairs else np.inf
    launch(moments.is_wide, limit=limit)
    if moments.has_far_pairs:
        launch(True, limit=limit, repair=1, first_part=num_splits)
    join()
    if moments.needs_repair:
        launch(True, repair=1)
        join(repair=1)
    scratch = {
        "facts": config.FACTS_BYTES * pairs.batch,
        "row_facts": config.FACTS_BYTES * pairs.batch,
        "redo": 4 * pairs.batch * pairs.num_groups,
    }
    _, cleared = sections(*scratch.values())
    scratch |= memory
    num_rows = moments.num_chunks * pairs.batch * num_parts * pairs.padded_rows
    scratch["parts"] = 8 * moments.num_moments * num_rows
    return Steps(launches, scratch, cleared)


class MomentsPlan(LaunchSequence):
    """The launches of a call, but for the order of the clouds."""

    def __init__(self, moments: Moments, device_id: int):
        pairs = moments.pairs
        size = pairs.batch, pairs.num_rows
        results: dict[str, Result | None] = {
            "moments": Result((*size, pairs.dim), np.dtype(pairs.dtype))
        }
        if moments.squares:
            shape = *size, 1 if moments.squares == 1 else pairs.dim
            results["squares"] = Result(shape, np.dtype(np.float64))
        device = runtime.device(device_id)
        super().__init__(device_id, INPUTS, results, steps(moments, device))
