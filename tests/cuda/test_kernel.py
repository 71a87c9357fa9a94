"""The choice of a row: with made-up devices, and over the tables themselves."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest

from cupyflash._attention.gpu import backward_coverage
from cupyflash._attention.gpu import coverage as attention_coverage
from cupyflash._core import dtypes
from cupyflash._cuda import device as _device
from cupyflash._cuda import kernel
from cupyflash._cuda.device import Device
from cupyflash._cuda.kernel import Variant
from cupyflash._softmax.gpu import coverage as softmax_coverage
from cupyflash._softmax.gpu import registry as softmax_registry

ARCHS = tuple(f"sm_{a}{b}" for a, b in _device.SMEM_OPTIN)
TABLES = {
    "softmax": softmax_coverage,
    "attention": attention_coverage,
    "attention_vjp": backward_coverage,
}


@dataclass(frozen=True)
class FakeProblem:
    method: str = "auto"
    size: int = 1


@dataclass(frozen=True)
class FakeRow:
    name: str
    methods: tuple[str, ...]
    limit: float = math.inf
    min_cc: tuple[int, int] = (0, 0)

    def unsupported_reason(self, problem, device):
        if device.cc < self.min_cc:
            return f"needs {self.min_cc}"
        return None if problem.size <= self.limit else f"size over {self.limit}"


ROWS = (
    FakeRow("fast", ("auto", "tiled"), limit=10, min_cc=(9, 0)),
    FakeRow("steady", ("auto", "tiled")),
    FakeRow("naive", ("naive",), limit=5),
)
HOPPER = _device.device_of_arch("sm_90a")
TURING = _device.device_of_arch("sm_75")


@pytest.mark.parametrize(
    ("problem", "device", "name", "refused"),
    [
        (FakeProblem(), HOPPER, "fast", ()),
        (FakeProblem(size=11), HOPPER, "steady", (("fast", "size over 10"),)),
        (FakeProblem(), TURING, "steady", (("fast", "needs (9, 0)"),)),
        (FakeProblem("naive"), HOPPER, "naive", ()),
    ],
)
def test_the_first_row_that_does_not_refuse(problem, device, name, refused):
    row, reasons = kernel.select(ROWS, problem, device)
    assert row.name == name
    assert reasons == refused


def test_no_row_says_why_not():
    with pytest.raises(NotImplementedError, match="no kernel for method='naive'") as e:
        kernel.select(ROWS, FakeProblem("naive", 6), HOPPER)
    assert "sm_90" in str(e.value)
    assert "naive: size over 5" in str(e.value)


@pytest.mark.parametrize("arch", ARCHS)
def test_devices_of_every_architecture(arch):
    device = _device.device_of_arch(arch)
    assert device.arch == arch
    assert device.cc >= _device.MIN_CC
    assert device.smem_optin == _device.SMEM_OPTIN[device.cc]


@pytest.mark.parametrize(
    ("arch", "cc"),
    [("sm_90a", (9, 0)), ("sm_100", (10, 0)), ("sm_120f", (12, 0)), ("sm_75", (7, 5))],
)
def test_architectures_are_read(arch, cc):
    assert _device.device_of_arch(arch).cc == cc


def test_by_threshold():
    ladder = {32: "warp", 1024: "block", math.inf: "grid"}
    sizes = (0, 32, 33, 1024, 1025, 10**12)
    steps = [kernel.by_threshold(ladder, n) for n in sizes]
    assert steps == ["warp", "warp", "block", "block", "grid", "grid"]


def test_options_of_a_variant():
    variant = Variant("a.cu", "a", (("HEAD_DIM", "64"), ("T", "half_t")), "sm_90a", 64)
    assert variant.options == (
        "-std=c++17",
        "-lineinfo",
        "-DHEAD_DIM=64",
        "-DT=half_t",
        "-arch=sm_90a",
    )
    assert "-arch" not in "".join(dataclasses.replace(variant, arch=None).options)
    # The switches as text, so that all kernels have the same options.
    assert variant.flags == ("-std=c++17", "-lineinfo", "-arch=sm_90a")
    assert variant.prelude == "#define HEAD_DIM 64\n#define T half_t\n"


def test_switches_in_the_text_are_those_of_the_options():
    """The same machine code, line information included."""
    pytest.importorskip("cupy")
    from cupyflash._cli import nvrtc
    from cupyflash._cuda import source
    from cupyflash._softmax.gpu import registry

    if reason := nvrtc.unusable():
        pytest.skip(reason)
    variant = Variant(
        registry._SOURCES["online"],
        "softmax_online",
        (
            *(("X_T", "float"), ("OUT_T", "float"), ("ACC_T", "float")),
            *((name, "0") for name in ("HAS_WHERE", "SCALED", "LOG")),
            *((name, "1") for name in ("OUTER_AXES", "REDUCED_AXES")),
            *(("LANES", "32"), ("ROWS_PER_BLOCK", "4")),
        ),
    )
    text = source.load(variant.source, variant.generated)
    forms = ((text, variant.options), (variant.prelude + text, variant.flags))
    found = [
        nvrtc.compile_text(text, "k.cu", (*options, *nvrtc._OF_CUPY, "-arch=sm_80"))
        for text, options in forms
    ]
    assert [error for error, _, _ in found] == ["", ""]
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize(
    "num_blocks", [1, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, 1 << 40]
)
def test_a_grid_has_all_blocks(num_blocks):
    """Of kernels that count their blocks along two axes."""
    config = kernel.LaunchConfig.over(Variant("a.cu", "a"), num_blocks, 128)
    along, across = config.grid
    assert num_blocks <= along * across < num_blocks + along
    assert along < 1 << 31


def test_bfloat16_is_refused_before_ampere():
    assert "bfloat16 needs sm_80" in kernel.refuse_old_device("bfloat16", TURING)
    assert kernel.refuse_old_device("bfloat16", HOPPER) is None
    assert kernel.refuse_old_device("float16", TURING) is None


def test_every_dtype_has_a_cuda_type():
    assert set(dtypes.FLOATS) <= set(dtypes.CUDA_TYPES)
    for name in set(dtypes.CUDA_TYPES) - {"bfloat16"}:
        assert np.dtype(name).itemsize == dtypes.ITEMSIZE[name]


# --- the tables ----------------------------------------------------------------------


@pytest.mark.parametrize("operation", TABLES)
@pytest.mark.parametrize("arch", ARCHS)
def test_variants_fit_the_device(operation, arch):
    """Shared memory within the limit; entries and files named by the rule."""
    device = _device.device_of_arch(arch)
    variants = TABLES[operation].compile_list(device, False)
    assert variants
    for _, variant in variants:
        own = operation.removesuffix("_vjp")
        assert variant.source.startswith((f"{own}/", "copy/"))
        assert variant.entry.isidentifier()
        assert 0 <= variant.smem <= device.smem_optin
        if variant.arch is not None:
            assert variant.arch.rstrip("af") == device.arch
    assert len(variants) == len(set(variants))


def test_every_row_of_softmax_is_compiled():
    """Its made-up shapes lead to a launch of it."""
    device = _device.device_of_arch("sm_90a")
    compiled = {row for row, _ in TABLES["softmax"].compile_list(device, False)}
    assert {row.name for row in softmax_registry.KERNELS} <= compiled


@pytest.mark.parametrize("operation", TABLES)
def test_a_device_with_little_shared_memory(operation):
    """A made-up card with the least that CUDA guarantees still gets every method."""
    device = Device("small", (8, 0), 4, 48 * 1024, (12, 4))
    variants = TABLES[operation].compile_list(device, False)
    assert all(variant.smem <= device.smem_optin for _, variant in variants)


@pytest.mark.parametrize("operation", TABLES)
def test_everything_holds_what_is_representative(operation):
    device = _device.device_of_arch("sm_90a")
    few = set(TABLES[operation].compile_list(device, False))
    everything = set(TABLES[operation].compile_list(device, True))
    assert few <= everything


@pytest.mark.parametrize("operation", TABLES)
def test_bfloat16_is_compiled_from_ampere_on(operation):
    def types(arch):
        device = _device.device_of_arch(arch)
        variants = TABLES[operation].compile_list(device, True)
        return {value for _, variant in variants for _, value in variant.defines}

    assert "bfloat16_t" in types("sm_80")
    assert "bfloat16_t" not in types("sm_75")
