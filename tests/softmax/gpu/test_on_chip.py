"""On-chip configs of rows that are held on chip, with no card in the machine."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from cupyflash._cuda.device import device_of_arch
from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu import registry as softmax_registry
from cupyflash._softmax.gpu.heuristics import on_chip

LADDERS = [
    (on_chip.FORWARD, on_chip.FORWARD_CLUSTERS, 1),
    (on_chip.FORWARD_F64, on_chip.FORWARD_F64_CLUSTERS, 1),
    (on_chip.FORWARD_F64, on_chip.LOG_F64_CLUSTERS, 1),
    (on_chip.FORWARD_SCALED, on_chip.FORWARD_SCALED_CLUSTERS, 1),
    (on_chip.BACKWARD, on_chip.BACKWARD_CLUSTERS, 2),
    (on_chip.BACKWARD_16_BITS, on_chip.BACKWARD_16_BITS_CLUSTERS, 2),
]
# About each power of two, and between.
VECTORS = sorted({
    n + off for p in range(17) for n in (1 << p, 3 << p, 5 << p) for off in (-1, 0, 1)
})  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize(("short", "clusters", "arrays"), LADDERS)
def test_a_tier_has_a_place_for_every_vector(short, clusters, arrays, arch):
    """Up to the longest row, with blocks that a multiprocessor can have."""
    device = device_of_arch(arch)
    ladder = on_chip.ladder(short, clusters, arrays, device)
    longest = max(config.vectors for config in ladder)
    for vectors in (n for n in VECTORS if 0 < n <= longest):
        hold = on_chip.hold(ladder, vectors)
        places = hold.lanes * hold.cluster * (hold.in_registers + hold.in_smem)
        assert places >= vectors
        assert hold.num_threads * hold.min_blocks <= 1024
        in_smem = hold.in_smem * hold.num_threads * on_chip.VECTOR_BYTES * arrays
        assert in_smem <= device.smem_optin - 8192
        assert hold.cluster == 1 or device.cc >= (9, 0)
        assert hold.cluster <= 16
    assert on_chip.hold(ladder, longest + 1) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("rows", [1, 2, 5, 200])
@pytest.mark.parametrize("place", [32, 48, 64])
def test_rings_have_a_place_for_every_vector(arch, rows, place):
    """Of what its blocks take together, beside the loads that are under way."""
    device = device_of_arch(arch)
    fits = [n for n in VECTORS if on_chip.stream(max(n, 1), rows, place, device)]
    if device.smem_optin < 4 * 512 * place:
        assert not fits  # a few steps of all threads
        return
    for vectors in fits:
        found = on_chip.stream(max(vectors, 1), rows, place, device)
        steps = found.ring - found.ahead
        assert found.blocks * found.threads * steps >= vectors
        assert found.blocks * found.groups <= device.num_sms
        assert found.ring * found.threads * place <= device.smem_optin - 8192
    longest = device.num_sms * found.threads * steps
    assert on_chip.stream(longest, rows, place, device).groups == 1
    assert on_chip.stream(longest + 1, rows, place, device) is None


def test_blocks_of_a_row_are_few_and_full():
    """Lengths at which more blocks, or emptier ones, were slower."""
    ladder = on_chip.ladder(
        on_chip.FORWARD, on_chip.FORWARD_CLUSTERS, 1, device_of_arch("sm_90a")
    )
    for vectors, blocks in ((2616, 2), (8192, 4), (8238, 4), (12564, 4), (66027, 16)):
        hold = on_chip.hold(ladder, vectors)
        slots = hold.lanes * (hold.in_registers + hold.in_smem)
        assert hold.cluster == blocks
        assert vectors > 0.93 * slots * blocks


def made_up(function, num_rows, length, dtype="bfloat16"):
    """Rows back to back that no memory holds."""
    names = ("x", "dy", "out") if function.endswith("_vjp") else ("x", "out")
    layout = memory_layout.rows(num_rows, length, names)
    return types.SimpleNamespace(
        function=function,
        num_rows=num_rows,
        row_length=length,
        scale=1,
        method="auto",
        is_complex=False,
        compute_dtype="float64" if dtype == "float64" else "float32",
        dtypes={**dict.fromkeys(names, dtype), "where": None},
        layout=layout,
    )


def held_rows(scale, dtype="float64"):
    """The launches that hold rows of this scale, or why there are none."""
    (row,) = (row for row in softmax_registry.KERNELS if row.name == "tiled")
    problem = made_up("softmax", 1 << 14, 4096, dtype)
    problem.scale, problem.compute_dtype = scale, dtype
    return row.heuristic(problem, device_of_arch("sm_90a"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_scale_leaves_as_many_threads_to_a_multiprocessor(dtype):
    assert held_rows(-0.3, dtype) == held_rows(1, dtype)


@pytest.mark.parametrize("scale", [0.0, 2.0**-101, -(2.0**101)])
def test_rows_with_a_scale_that_units_cannot_hold(scale):
    """Where -inf fills the places beyond a row, 0 would make it NaN."""
    assert "2^-100 and 2^100" in held_rows(scale)


def chosen(problem, arch="sm_90a"):
    """The row of the table that takes a problem, and what relay said, if asked."""
    spec, refused = softmax_registry.select(problem, device_of_arch(arch))
    told = [why for name, why in refused if name == "relay"]
    return spec.name, *told


MB = 1 << 20


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8)])
def test_long_rows_that_are_read_once(function, dtype, size):
    """From 4 MB to 12 MB, if there are two."""
    for row_bytes in (4 * MB, 5 * MB, 9 * MB, 12 * MB):
        length = row_bytes // size
        assert chosen(made_up(function, 2, length, dtype)) == ("relay",)
        assert chosen(made_up(function, 1 << 20, length, dtype)) == ("relay",)
        one = chosen(made_up(function, 1, length, dtype))
        assert one == ("trail", "fewer than 2 rows do not overlap")
    for row_bytes in (4 * MB - size, 12 * MB + size):
        name, told = chosen(made_up(function, 9, row_bytes // size, dtype))
        assert name == "trail"
        assert told == f"a row has {row_bytes} bytes, not 4194304 to 12582912"


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_rows_of_16_bits_that_are_read_once(function, dtype):
    """From 2 MB on; a cluster could hold the shortest of these, and a few take it."""
    assert chosen(made_up(function, 8, 1 << 20, dtype)) == ("relay",)
    few = chosen(made_up(function, 7, 1 << 20, dtype))
    assert few == ("tiled", "fewer than 8 rows do not overlap")
    for length in ((1 << 20) + 8, 3 << 20, 9 << 19, 6 << 20):
        assert chosen(made_up(function, 2, length, dtype)) == ("relay",)
    name, told = chosen(made_up(function, 9, (1 << 20) - 8, dtype))
    assert name == "tiled"
    assert told == "a row has 2097136 bytes, not 2097152 to 12582912"


def test_long_rows_that_are_read_twice():
    mixed = made_up("softmax", 9, 1 << 20, "float32")
    mixed.dtypes["out"] = "float64"
    name, told = chosen(mixed)
    assert name == "trail"
    assert told.endswith("is not one floating-point type")
    scaled = made_up("softmax", 9, 1 << 20, "float32")
    scaled.scale = 2
    assert chosen(scaled) == ("split", "there is a mask or a scale")
    small = chosen(made_up("softmax", 9, 1 << 20, "float32"), "sm_120")
    assert small[0] == "trail"
    assert small[1] == "a block holds 22 chunks of rows, fewer than two rows of 16"


@pytest.mark.parametrize("sms", [33, 78, 114, 132, 148, 160])
@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2), ("float32", 4), ("float64", 8)]
)
def test_a_ring_of_a_relay_has_room(dtype, size, sms):
    """For a row and the next loads, and fewer rows than there are barriers for."""
    (row,) = (row for row in softmax_registry.KERNELS if row.name == "relay")
    device = dataclasses.replace(device_of_arch("sm_90a"), num_sms=sms)
    taken = 0
    least = (2 if size == 2 else 4) * MB
    for row_bytes in range(least, 12 * MB + 1, 50_008):
        found = row.heuristic(made_up("softmax", 8, row_bytes // size, dtype), device)
        if isinstance(found, str):
            assert "fewer than two rows" in found
            continue
        taken += 1
        config = found[1]
        values = dict(config.variant.defines)
        blocks, ring = int(values["BLOCKS"]), int(values["CHUNKS"])
        assert config.grid[0] == blocks
        assert blocks * config.grid[1] <= sms
        lines = -(-row_bytes // 128)
        bounds = [lines * i // blocks for i in range(blocks + 1)]
        chunks = [-(-(b - a) * 128 // 4096) for a, b in itertools.pairwise(bounds)]
        assert max(chunks) <= min(32, ring // 2)
        assert ring < 16 * min(chunks)
        assert config.variant.smem <= device.smem_optin - 8192
    assert taken or sms == 33


@pytest.mark.parametrize("name", ["split", "trail"])
def test_more_parts_than_32_bits_count(name):
    """Left to the next row; the same rows, fewer, are taken."""
    (row,) = (row for row in softmax_registry.KERNELS if row.name == name)
    device = device_of_arch("sm_90a")
    told = row.heuristic(made_up("softmax", 1 << 31, 1 << 20), device)
    assert "are too many" in told
    taken = row.heuristic(made_up("softmax", 1 << 20, 1 << 20), device)
    assert all(config.num_blocks < 1 << 31 for config in taken)


@pytest.mark.parametrize("capturing", [True, False])
def test_scratch_of_a_graph_outlives_its_plan(monkeypatch, capturing):
    """A graph may be replayed when the plan that it was captured with has gone."""
    pytest.importorskip("cupy")
    from cupyflash._cuda import graphs, launch_sequence
    from cupyflash._cuda.kernel import LaunchConfig, Variant

    asked, kept = [], []
    scratch = types.SimpleNamespace(ptr=77)
    monkeypatch.setattr(launch_sequence.cupy.cuda, "alloc", lambda size: scratch)
    monkeypatch.setattr(launch_sequence.runtime, "current_device", lambda: 0)
    monkeypatch.setattr(
        launch_sequence.Launch, "enqueue", lambda self, *args: asked.append(args)
    )
    stream = types.SimpleNamespace(ptr=99)
    monkeypatch.setattr(graphs, "_current_stream", lambda: stream)
    monkeypatch.setattr(graphs, "_is_capturing_on", lambda ptr: capturing)
    monkeypatch.setattr(graphs, "_kept_for_graphs", kept)
    step = (
        LaunchConfig(Variant("a.cu", "a"), (1,), (1,)),
        ("x", "y", "out", "scratch", b""),
    )
    steps = launch_sequence.Steps([step, step], {"scratch": 256})
    result = launch_sequence.Result((4,), np.dtype("f4"))
    plan = launch_sequence.LaunchSequence(0, ("x", "y"), {"out": result}, steps)
    out = types.SimpleNamespace(data=types.SimpleNamespace(ptr=5))
    assert plan((1, 2), out) == (out,)
    assert asked == [(1, 2, 5, 77, b"")] * 2  # the two kernels meet in it
    assert kept == ([scratch] if capturing else [])
