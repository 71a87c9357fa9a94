"""No counter of the softmax family wraps: found from its tables, without a card."""

import ctypes
import math
import re
import types
from math import prod

import numpy as np
import pytest

from cupyflash._cuda import source
from cupyflash._cuda.device import device_of_arch
from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu import config as softmax_config
from cupyflash._softmax.gpu import limits
from cupyflash._softmax.gpu import registry as softmax_registry

FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "softmax_vjp", "log_softmax_vjp")
HUGE = [(1 << 31) - 4096, (1 << 31) - 1, 1 << 31, (1 << 31) + 8, (1 << 32) + 8,
        1 << 35, (1 << 36) + 1, 1 << 40]  # fmt: skip
SMALL = (1, 2, 3, 8, 33, 1000, 70_000)
DEVICES = [device_of_arch(arch) for arch in ("sm_80", "sm_90a", "sm_120")]


def problem_of(function, dtype, shape, reduced, broadcast=(), method="auto", **options):
    """Arrays that no memory holds; inputs are broadcast along some axes."""
    inputs = {"softmax_vjp": ("x", "dy"), "logsumexp": ("x",)}.get(
        function.removeprefix("log_"), ("x",)
    )
    dense = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    given = [0 if axis in broadcast else step for axis, step in enumerate(dense)]
    strides = {name: given for name in inputs}
    strides |= {name: [0] * len(shape) for name in ("b", "where")}
    kept = [0 if axis in reduced else 1 for axis in range(len(shape))]
    one_a_row = [
        prod(n for n, k in zip(shape[axis + 1 :], kept[axis + 1 :], strict=True) if k)
        * kept[axis]
        for axis in range(len(shape))
    ]
    is_sum = function == "logsumexp"
    strides["out"] = one_a_row if is_sum else dense
    if is_sum:
        strides["sign"] = one_a_row
    full = [*inputs, *([] if is_sum else ["out"])]
    layout = memory_layout.of(shape, reduced, strides, full)
    dtypes = {**dict.fromkeys((*inputs, "out"), dtype), "where": None, "b": None}
    return types.SimpleNamespace(
        function=function,
        num_rows=layout.num_rows,
        row_length=layout.row_length,
        scale=1.0,
        is_complex=False,
        method=method,
        dtypes=dtypes | options,
        compute_dtype="float64" if dtype == "float64" else "float32",
        layout=layout,
    )


def huge_problems():
    """Each axis in turn, in memory or broadcast, of rows and of columns."""
    for n in HUGE:
        for m in SMALL:
            yield (m, n), (1,), ()  # long rows
            yield (n, m), (1,), ()  # many rows
            yield (m, n), (1,), (0,)  # a long row, broadcast
            yield (n, m), (1,), (0,)
            if m > 1:
                yield (n, m), (0,), ()  # long columns
                yield (m, n), (0,), ()  # many columns
                yield (n, m), (0,), (0,)
                for k in (2, 100):
                    yield (n, k, m), (1,), ()  # many slabs of columns
                    yield (n, k, m), (1,), (0,)
                    yield (k, n, m), (1,), ()
                    yield (k, m, n), (0, 2), ()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_count_fits(function, device):
    """Of the row that is chosen, and of each other one that takes the problem."""
    met = set()
    for shape, reduced, broadcast in huge_problems():
        for dtype in ("float16", "float64"):
            problem = problem_of(function, dtype, shape, reduced, broadcast)
            chosen, _ = softmax_registry.select(problem, device)
            met.add(chosen.name)
            for row in softmax_registry.KERNELS:
                if row.functions and function not in row.functions:
                    continue
                if row.unsupported_reason(problem, device):
                    continue
                for config in row.configs(problem, device):
                    assert_grid(config)
                    for what, most in limits.counts(row.name, problem, config):
                        assert 0 <= most < 1 << 31, (row.name, what, most)
    assert len(met) > 2


def assert_grid(config):
    """Limits of CUDA, and whole clusters."""
    x, y, z = config.grid
    assert 1 <= x <= limits.MOST_BLOCKS[0]
    assert 1 <= y <= limits.MOST_BLOCKS[1]
    assert z == 1
    assert 1 <= prod(config.block) <= 1024
    assert x % config.variant.cluster == 0


def test_a_problem_beyond_the_counters_is_left_to_others():
    """Rows of more vectors, and columns of more tiles, than an int counts."""
    device = device_of_arch("sm_90a")
    for shape, reduced, broadcast, row, count in (
        ((1000, 1 << 36), (1,), (0,), "logsumexp_rows", "vectors of a row"),
        ((1 << 31, 200, 2), (1,), (), "logsumexp_columns", "tiles"),
        ((1 << 44, 2), (0,), (0,), "logsumexp_columns", "rows of a thread"),
    ):
        problem = problem_of("logsumexp", "float16", shape, reduced, broadcast)
        chosen, refused = softmax_registry.select(problem, device)
        assert chosen.name == "logsumexp"
        assert count in dict(refused)[row]


# --- the arithmetic of a column's threads, in C's types and in Python's ---------------


def place(long, problem, config, block, thread, array):
    """place_t: first row, rows and offset of one thread.

    `long` is the type of rows and offsets; the rest are ints.
    """
    values = {
        key: int(value) for key, value in config.variant.defines if value.isdigit()
    }
    side, deep, vector = (values[name] for name in ("SIDE", "DEEP", "VECTOR"))
    group = side * deep
    pieces = config.grid[1] if values.get("SPLITS") else values["CLUSTER"]
    length = long(problem.row_length)
    piece = long(long(length + pieces - 1) // pieces)
    first_row = long(block * piece)
    last = long(first_row + piece)
    last = last if last < length else length
    row = long(first_row + thread % group // side)
    rows = (last - row + deep - 1) // deep if row < last else 0
    rows = ctypes.c_int(rows).value
    stride = problem.layout.reduced_strides[array][0]
    at = ctypes.c_longlong(row * stride).value
    step = ctypes.c_longlong(deep * stride).value
    end = ctypes.c_longlong(at + (rows - 1) * step).value if rows else at
    return row, rows, at, end, vector


@pytest.mark.parametrize("name", ["split_columns", "logsumexp_columns"])
@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("inner", [2, 8, 33])
def test_places_in_columns(name, length, inner):
    """Those of all pieces are in 64 bits what they are without bounds."""
    (row,) = (row for row in softmax_registry.KERNELS if row.name == name)
    problem = problem_of(row.functions[0], "float16", (length, inner), (0,))
    device = device_of_arch("sm_90a")
    if reason := row.unsupported_reason(problem, device):
        pytest.skip(reason)
    configs = row.configs(problem, device)
    wrapped = 0
    for config in configs:
        values = dict(config.variant.defines)
        pieces = config.grid[1] if "SPLITS" in values else config.variant.cluster
        seen = 0
        for block in {0, 1, pieces // 2, pieces - 1} & set(range(pieces)):
            for thread in (0, config.num_threads - 1):
                found = [
                    place(kind, problem, config, block, thread, "x")
                    for kind in (lambda n: ctypes.c_longlong(n).value, int)
                ]
                assert found[0] == found[1]
                narrow = place(
                    lambda n: ctypes.c_int(n).value, problem, config, block, thread, "x"
                )
                wrapped += narrow != found[1]
                seen = max(seen, found[1][3])
        assert seen >= (length - int(values["DEEP"]) * 2) * inner
    if length > 1 << 31:
        assert wrapped  # the test sees what an int does


# --- what the host packs --------------------------------------------------------------


def test_fields_of_the_host_have_64_bits():
    for shape, reduced, broadcast in huge_problems():
        layout = problem_of("softmax", "float16", shape, reduced, broadcast).layout
        fields = {
            "num_rows": layout.num_rows,
            "row_length": layout.row_length,
            "outer": (layout.outer_size, tuple(layout.outer_strides.values())),
            "reduced": (layout.reduced_size, tuple(layout.reduced_strides.values())),
        }
        sizes = {
            "OUTER_AXES": len(layout.outer_size),
            "REDUCED_AXES": len(layout.reduced_size),
            "kNumArrays": len(layout.outer_strides),
        }
        struct = softmax_config.LAYOUTS["softmax"]
        (packed,) = np.frombuffer(struct.pack(fields, **sizes), struct.dtype(**sizes))
        assert packed.dtype.itemsize % 8 == 0
        for name in ("num_rows", "row_length"):
            assert packed[name] == fields[name]
        for name in ("outer", "reduced"):
            for part, value in zip(("size", "stride"), fields[name], strict=True):
                assert packed[name][part].tolist() == np.asarray(value, object).tolist()


# --- what the device narrows ----------------------------------------------------------

# Each cast of a number of the problem to 32 bits, and what bounds it: a count of
# _softmax_limits, or words.
OF_VECTOR = "fewer than a vector"
NARROWED = {
    "detail/column_tile.cuh": {
        "int(left)": "columns of a tile, fewer than kColumns",
        "Row(layout.row_length)": "rows of a column",
        "int((last - row + kDeep - 1) / kDeep)": "rows of a thread",
        "tile_index_t(layout.outer.size[axis])": "tiles",
        "tile_index_t(is_power_of_two(kColumns) ? last / kColumns : "
        "divide(last, kColumns))": "tiles",
    },
    "detail/row_tile.cuh": {
        "int(length)": "elements of a row",
        "int(reinterpret_cast<unsigned long long>(out) / sizeof(T) % kVector)": (
            OF_VECTOR
        ),
        "int(start / sizeof(T) % kVector)": OF_VECTOR,
    },
    "detail/tile_queue.cuh": {
        "unsigned((row_length + elements - 1) / elements)": "parts of rows",
        "unsigned(num_rows)": "parts of rows",
        "int(aligned.num_vectors)": "elements of a row",
        "int(part * kPart)": "elements of a row",
    },
    "logsumexp/rows.cu": {
        "int(length)": OF_VECTOR,
        "int((length - head) / kVector)": "vectors of a row",
        "int(length - head - (long long)vectors * kVector)": OF_VECTOR,
        "int(layout.row_length)": "elements of a block",
        "int(left)": "rows of a block",
    },
    "logsumexp/columns_balanced.cu": {
        "int(tile * layout.row_length / share)": "a warp, one of kShares",
        "int(last / share)": "a warp, one of kShares",
        "int((layout.row_length - 1) / share)": "warps, at most kShares",
        "int((rows - own + kDeep - 1) / kDeep)": "rows of a lane",
    },
    "logsumexp/packed_rows.cu": {"int(rows_left)": "rows of a span"},
    "detail/aligned_span.cuh": {
        "int(length)": OF_VECTOR,
        "int(length - p.head - p.num_vectors * kVector)": OF_VECTOR,
        "int(-reinterpret_cast<unsigned long long>(p) / sizeof(T))": OF_VECTOR,
    },
    "rows/packed.cu": {
        "int(layout.row_length)": "elements of a span",
        "int(rows_left)": "rows of a span",
    },
    "detail/packed_rows.cuh": {
        "int(reinterpret_cast<unsigned long long>(global) / sizeof(T) % kVector)": (
            OF_VECTOR
        ),
    },
    "detail/row_ring.cuh": {
        "int((length / kVector + at_once - 1) / at_once)": "steps of a row",
    },
    "rows/relay.cu": {
        "unsigned(layout.num_rows)": "chunks of a block",
        "int(min(lines * block / kBlocks * kLine, layout.row_length))": (
            "elements of a row"
        ),
        "int(aligned.num_vectors)": "elements of a row",
    },
    "rows/cached_two_pass.cu": {
        "unsigned(layout.num_rows)": "parts of rows",
    },
    "copy/transpose.cu": {
        "int(min(turn.size[0] - first[0], (long long)kTile))": "elements of a tile",
        "int(min(turn.size[1] - first[1], (long long)kTile))": "elements of a tile",
    },
    "backward/packed.cu": {
        "int(layout.row_length)": "elements of a span",
        "int(rows_left)": "rows of a span",
    },
    "backward/cached_two_pass.cu": {
        "unsigned(layout.num_rows)": "parts of rows",
    },
}
OF_PROBLEM = re.compile(
    r"num_rows|row_length|length|size\[|vectors|left|last|first|rows|total|share|tile"
    r"|stride|\bparts?\b|\brow\b|reinterpret_cast|start"
)


def casts_of(text):
    """Each int(...), unsigned(...) and the like of a source, on one line."""
    text = re.sub(r"//[^\n]*", "", text)
    for match in re.finditer(r"\b(?:int|unsigned|tile_index_t|Row)\(", text):
        end, depth = match.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        inside = text[match.end() : end - 1]
        if OF_PROBLEM.search(inside) and not inside.startswith("sizeof"):
            yield " ".join(text[match.start() : end].split())


def test_each_cast_to_32_bits_is_known():
    """Whoever adds one says here what bounds it."""
    folder = source.CUDA_SRC / "softmax"
    paths = [*folder.rglob("*.cu*"), folder.parent / "copy" / "transpose.cu"]
    found = {}
    for path in paths:
        parent = folder if folder in path.parents else folder.parent
        casts = set(casts_of(path.read_text(encoding="utf-8")))
        if casts:
            found[path.relative_to(parent).as_posix()] = casts
    assert found == {name: set(casts) for name, casts in NARROWED.items()}


def test_each_bound_is_one_of_the_table():
    """Words that name a count name one that there is."""
    device = device_of_arch("sm_90a")
    names = set()
    for function in FUNCTIONS:
        for shape, reduced in (
            ((1000, 1 << 20), (1,)),
            ((1, 1 << 20), (1,)),
            ((1 << 20, 4), (1,)),
            ((1 << 20, 7), (1,)),
            ((1 << 10, 1000), (1,)),
            ((1 << 20, 128), (0,)),
            ((1000, 128), (0,)),
            ((1 << 10, 1 << 17), (0,)),
            ((50, 20_000, 33), (1,)),
        ):
            problem = problem_of(function, "float32", shape, reduced)
            for row in softmax_registry.KERNELS:
                for config in row.configs(problem, device):
                    counts = limits.counts(row.name, problem, config)
                    names |= {what for what, _ in counts}
    bounds = {bound for casts in NARROWED.values() for bound in casts.values()}
    counted = {bound for bound in bounds if "," not in bound} - {
        OF_VECTOR, "rows of a block", "rows of a span", "elements of a tile",
    }  # fmt: skip
    assert counted <= names
    assert math.log2(limits.MOST + 1) == 31
