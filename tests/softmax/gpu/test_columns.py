"""Tiles of long columns: whole columns are held, in as wide tiles as can be."""

from types import SimpleNamespace

import pytest

from cupyflash._cuda.device import device_of_arch
from cupyflash._softmax import memory_layout
from cupyflash._softmax.gpu.heuristics import columns

HOPPER = device_of_arch("sm_90a")
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def tile(length, dtype, device=HOPPER, inner=32_768, **more):
    """(threads, {define: number}, shared memory) of columns; None if none hold them."""
    dtypes = {"x": dtype, "out": dtype, "where": None, **more.pop("dtypes", {})}
    problem = SimpleNamespace(
        layout=memory_layout.columns(1, length, inner, names=("x", "out")),
        dtypes=dtypes,
        row_length=length,
        num_rows=inner,
        scale=1,
        compute_dtype="float64" if dtype == "float64" else "float32",
        **more,
    )
    found = columns.hold_columns(problem, device)
    if isinstance(found, str):
        return None
    *_, config = found
    values = {name: int(value) for name, value in config.variant.defines}
    values["grid"] = config.grid
    return config.num_threads, values, config.variant.smem


@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize("length", [1000, 1024, 2048, 3001, 4096, 5000, 8192])
def test_a_tile_holds_its_columns(dtype, length):
    threads, values, smem = tile(length, dtype)
    rows = (
        values["DEEP"]
        * (values["IN_REGISTERS"] + values["IN_SMEM"])
        * values["CLUSTER"]
    )
    assert rows >= length
    assert values["CLUSTER"] <= 16
    assert values["SIDE"] * values["DEEP"] <= threads
    # Shared memory of what is parked, for as many blocks as are to run together.
    assert smem * values["RESIDENT"] <= HOPPER.smem_optin - 32 * 1024


def width(values, dtype):
    """Bytes of neighbouring columns in a tile."""
    return values["SIDE"] * values["VECTOR"] * ITEMSIZES[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_columns_of_16_bits_have_large_blocks(dtype):
    threads, values, _ = tile(8192, dtype)
    assert (threads, values["CLUSTER"], values["RESIDENT"]) == (512, 8, 2)
    assert width(values, dtype) == 128
    threads, _, _ = tile(4096, dtype)
    assert threads == 256
    threads, _, _ = tile(8192, dtype, dtypes={"where": "bool"}) or (256, 0, 0)
    assert threads == 256


def test_wide_slabs_of_doubles_have_wide_tiles():
    for inner, expected in ((32_768, 256), (1024, 128)):
        threads, values, _ = tile(2048, "float64", inner=inner)
        assert (threads, width(values, "float64")) == (256, expected)


@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize("length", [1024, 4096, 8192])
def test_a_block_fits_into_a_small_shared_memory(dtype, length):
    device = device_of_arch("sm_120")
    if found := tile(length, dtype, device):
        threads, _, smem = found
        assert threads == 256
        assert smem <= device.smem_optin - 32 * 1024


def test_without_clusters_a_block_holds_a_column():
    for length in (300, 1024, 2048):
        found = tile(length, "float32", device_of_arch("sm_80"))
        if found is not None:
            threads, values, _ = found
            assert (threads, values["CLUSTER"]) == (256, 1)


@pytest.mark.parametrize("dtype", ITEMSIZES)
@pytest.mark.parametrize(
    "more", [{}, {"dtypes": {"where": "bool"}}, {"dtypes": {"dy": "float32"}}]
)
@pytest.mark.parametrize("length", [70_000, 262_144])
def test_teams_hold_longer_columns(dtype, more, length):
    """All blocks run at once: those of a team have all rows of a tile."""
    for inner in (7, 16, 48):
        found = tile(length, dtype, inner=inner, **more)
        if found is None:  # too many bytes to be on chip at once
            assert length * inner * ITEMSIZES[dtype] > 12e6
            continue
        threads, values, smem = found
        team, teams, _ = values["grid"]
        slots = values["IN_REGISTERS"] + values["IN_SMEM"]
        assert values["TEAMS"] == 1
        assert team * values["DEEP"] * slots >= length
        assert (team - 1) * values["DEEP"] * slots < length
        assert team * teams <= HOPPER.num_sms * values["RESIDENT"]
        assert values["SIDE"] * values["DEEP"] <= threads == 256
        assert (smem + 6 * 1024) * values["RESIDENT"] <= HOPPER.smem_optin


def test_tall_arrays_are_read_twice():
    """But where teams fill all lines of memory, and several take turns."""
    assert tile(65_536, "float32", inner=1024)[1]["grid"] == (94, 4, 1)
    assert tile(65_536, "float32", inner=1000) is None
    assert tile(65_536, "float64", inner=1024) is None
    assert tile(262_144, "float32", inner=1024) is None
    assert tile(4_000_000, "float32", inner=16) is None


@pytest.mark.parametrize("inner", [7, 128, 1024])
def test_gradients_of_tall_arrays_are_read_once(inner):
    for length in (20_000, 100_000, 1 << 20):
        found = tile(length, "float32", inner=inner, dtypes={"dy": "float32"})
        assert found[1]["TEAMS"] == 1
