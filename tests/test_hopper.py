"""The Hopper row of the attention table: what it takes, and how it cuts a problem."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from cupyflash import _attention_kernels, _kernels, _source
from cupyflash._attention_kernels import ATTENTION_KERNELS, HopperKernel

HOPPER = _kernels.device_of_arch("sm_90a")
(ROW,) = (row for row in ATTENTION_KERNELS if isinstance(row, HopperKernel))


def problem(dtype="bfloat16", head_dim=64, **options):
    return _attention_kernels._problem(dtype, head_dim, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("bounds", [{}, {"right": 0}, {"left": 5, "right": 3}])
def test_takes(dtype, head_dim, bounds):
    asked = problem(dtype, head_dim, **bounds)
    assert ROW.refusal(asked, HOPPER) is None
    row, refused = _kernels.select(ATTENTION_KERNELS, asked, HOPPER)
    assert row is ROW
    assert refused == ()


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (problem("float32"), HOPPER, "takes float16 and bfloat16, not float32"),
        (problem(head_dim=12), HOPPER, "head_dim 12 is not a multiple of 8"),
        (
            problem(head_dim=264),
            HOPPER,
            "head_dim 264 is not a multiple of 8 up to 256",
        ),
        (problem(no_tensor_map="q starts"), HOPPER, "q starts"),
        (problem(head_dim=256, softcap=3.0), HOPPER, "too few registers"),
        (problem(), _kernels.device_of_arch("sm_80"), "needs sm_90a"),
        (problem(), _kernels.device_of_arch("sm_100"), "needs sm_90a"),
        (problem(), dataclasses.replace(HOPPER, nvrtc=(12, 8)), "NVRTC 12.9"),
        (problem(), dataclasses.replace(HOPPER, smem_optin=49152), "shared memory"),
        (dataclasses.replace(problem(), seqlen_k=0), HOPPER, "no keys"),
        (
            dataclasses.replace(problem("float16"), seqlen_k=(1 << 18) + 1),
            HOPPER,
            "exact enough up to 262144 keys",
        ),
        (dataclasses.replace(problem(), seqlen_q=1 << 31), HOPPER, "32 bits"),
    ],
)
def test_leaves_to_the_next_row(asked, device, reason):
    assert reason in ROW.refusal(asked, device)
    row, refused = _kernels.select(ATTENTION_KERNELS, asked, device)
    assert row is not ROW
    assert refused[0][0] == "hopper"


@pytest.mark.parametrize("num_heads", [1, 7, 64, 1000])
@pytest.mark.parametrize("seqlen", [1, 100, 4096, 200_000])
def test_sections_hold_every_head(num_heads, seqlen):
    asked = dataclasses.replace(
        problem(right=0),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
    )
    plan = ROW.schedule(asked, HOPPER)
    assert plan["num_items"] == plan["num_blocks"] * num_heads
    assert plan["num_blocks"] * ROW.tile(asked).block_m >= seqlen
    assert 1 <= plan["section"] <= num_heads
    # The last section is not much smaller than the others.
    sections = -(-num_heads // plan["section"])
    assert num_heads - (sections - 1) * plan["section"] >= plan["section"] - sections


def test_no_more_blocks_than_multiprocessors():
    (config,) = ROW.configs(problem(), 1, HOPPER)
    assert config.num_blocks == HOPPER.num_sms
    small = dataclasses.replace(problem(), seqlen_q=10, num_heads=3, num_kv_heads=3)
    (config,) = ROW.configs(small, 1, HOPPER)
    assert config.num_blocks == 3


def test_the_instructions_are_as_the_script_writes_them():
    root = Path(__file__).parent.parent
    script = root / "tools" / "wgmma_shapes.py"
    written = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    ).stdout
    assert written == (_source.CUDA_SRC / "ptx" / "wgmma_shapes.cuh").read_text()
