"""What kernels count in 32 bits, and the problems that are too large for it.

Offsets in memory have 64 bits everywhere. Most counters have 32, since those of loops
are faster: of the vectors of a row, of the rows of a column, of tiles. Each row of the
table that has such a counter is listed here with the most that it comes to; a problem
beyond that is left to a later row. The last rows of the table count in 64 bits.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from cupyflash._cuda.kernel import LaunchConfig
from cupyflash._softmax.gpu import config as softmax_config
from cupyflash._softmax.gpu.heuristics import on_chip

MOST = (1 << 31) - 1
MOST_BLOCKS = MOST, 65_535  # of a grid's first and second axis

Count = tuple[str, int]


def unsupported_reason(
    name: str, problem: Any, configs: Iterable[LaunchConfig]
) -> str | None:
    """Why the row `name` cannot count what a problem has, or None."""
    for config in configs:
        for what, most in counts(name, problem, config):
            if most > MOST:
                return f"{most} {what} are more than 32 bits count"
    return None


def counts(name: str, problem: Any, config: LaunchConfig) -> Iterator[Count]:
    """What a launch counts in an int, and the most that each comes to."""
    yield "blocks", config.grid[0]
    if name in _COUNTS:
        values = {
            key: int(value) for key, value in config.variant.defines if value.isdigit()
        }
        yield from _COUNTS[name](problem, config, values)


def _of_columns(problem, config, values):
    """place_t of softmax/detail/column_tile.cuh."""
    side, deep = values["SIDE"], values["DEEP"]
    group, inner = side * deep, problem.layout.inner
    pieces, beside = values["CLUSTER"], config.grid[0]
    if values.get("SPLITS"):
        pieces = config.grid[1]
    if values.get("TEAMS"):
        pieces, beside = config.grid[:2]
    piece = -(-problem.row_length // pieces)
    # A loop goes on by a batch of rows, or two, beyond the last.
    yield "rows of a thread", -(-piece // deep) + 2 * (values["IN_REGISTERS"] + deep)
    tiles = problem.num_rows // inner * -(-inner // (side * values["VECTOR"]))
    if group > on_chip.WARP or group & (group - 1):  # else they have 64 bits
        yield "tiles", tiles + beside


def _of_columns_on_chip(problem, config, values):
    yield from _of_columns(problem, config, values)
    yield "rows of a column", problem.row_length


def _of_shares(problem, config, values):
    """Warps have equal shares of all rows, and one may read a tile again."""
    yield from _of_columns(problem, config, values)
    inner = problem.layout.inner
    tiles = problem.num_rows // inner * -(-inner // (values["SIDE"] * values["VECTOR"]))
    share = -(-tiles * problem.row_length // values["SHARES"])
    rows = problem.row_length if values["WHOLE"] else min(problem.row_length, share)
    deep = on_chip.WARP // values["SIDE"]
    yield "rows of a lane", -(-rows // deep) + 2 * (values["IN_REGISTERS"] + deep)


def _of_rows_on_chip(problem, config, values):
    """thread_map_t: positions in a row, also of slots beyond it."""
    slots = (
        values["CLUSTER"]
        * values["LANES"]
        * (values["IN_REGISTERS"] + values["IN_SMEM"])
    )
    yield "elements of a row", problem.row_length + slots


def _of_spans(problem, config, values):
    yield "elements of a span", values["SPAN_ROWS"] * problem.row_length


def _of_summed_rows(problem, config, values):
    """piece_t of softmax/logsumexp/rows.cu, or its rows that are held."""
    if values["SETS"]:
        rows = values["ROWS_PER_BLOCK"] * values["SETS"]
        yield "elements of a block", rows * problem.row_length
        return
    vector = on_chip.VECTOR_BYTES // softmax_config.itemsize_of(problem.dtypes["x"])
    part = -(-problem.row_length // values["PARTS"])
    together = values["IN_REGISTERS"] // vector * values["LANES"]
    yield "vectors of a row", -(-part // vector) + 1 + together


def _of_queue(problem, config, values):
    """tile_queue_t of softmax/detail/tile_queue.cuh, and positions in a row."""
    vector = on_chip.VECTOR_BYTES // softmax_config.widest_of(problem)
    part = values["LANES"] * values["IN_REGISTERS"] * vector
    parts = problem.num_rows * -(-problem.row_length // part)
    yield "parts of rows", 2 * parts + values["MARGIN"]
    yield "elements of a row", problem.row_length + part


def _of_rings(problem, config, values):
    """num_steps of softmax/detail/row_ring.cuh."""
    vector = on_chip.VECTOR_BYTES // softmax_config.widest_of(problem)
    at_once = config.grid[0] * values["LANES"]
    yield "steps of a row", -(-problem.row_length // (vector * at_once)) + 1


def _of_relay(problem, config, values):
    """slice_t of softmax/rows/relay.cu, and positions in a row."""
    vector = on_chip.VECTOR_BYTES // softmax_config.widest_of(problem)
    chunk = on_chip.WARP * vector  # or more
    slice_ = -(-problem.row_length // values["BLOCKS"]) + on_chip.VECTOR_BYTES * vector
    yield "chunks of a block", problem.num_rows * (slice_ // chunk + 1)
    yield "elements of a row", problem.row_length + chunk


# Rows that are not here have 64 bits for all that grows with a problem.
_COUNTS = {
    "columns": _of_columns_on_chip,
    "vjp_columns": _of_columns_on_chip,
    "split_columns": _of_columns,
    "logsumexp_columns": _of_columns,
    "logsumexp_shares": _of_shares,
    "span": _of_spans,
    "vjp_span": _of_spans,
    "logsumexp_span": _of_spans,
    "relay": _of_relay,
    "tiled": _of_rows_on_chip,
    "vjp_tiled": _of_rows_on_chip,
    "trail": _of_queue,
    "vjp_trail": _of_queue,
    "vjp_stream": _of_rings,
    "logsumexp_rows": _of_summed_rows,
}
