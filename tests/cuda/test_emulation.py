"""The emulation of CUDA kernels: what it sees, and rows of the tables on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import emulation
import numpy as np
import pytest
from emulation import compile as compile_cpp
from emulation import stand_in

PTX = Path(emulation.__file__).with_name("ptx")
RUN = Path(emulation.__file__).with_name("run.py")

pytestmark = pytest.mark.skipif(
    emulation.missing() is not None, reason=str(emulation.missing())
)

# --- rows ----------------------------------------------------------------------------

# Architecture, row, kind of tests/support/rows.py, dtypes: calls that together take
# some seconds. python tests/support/emulation/run.py runs all the others.
ROWS = [
    ("sm_75", "attention/tiled", "odd", "float16"),
    ("sm_75", "attention/tiled", "empty parts", "float32"),
    ("sm_75", "attention/online", "odd", "float32"),
    ("sm_75", "attention/safe", "odd", "float32"),
    ("sm_75", "attention_vjp/tiled", "odd", "float16"),
    ("sm_75", "attention/gemv", "few queries", "float32"),
    ("sm_75", "attention_vjp/gemv", "few queries", "float32"),
    ("sm_80", "attention/mma_short", "short", "bfloat16"),
    ("sm_80", "attention_vjp/mma_short", "short", "float16"),
    ("sm_75", "attention/tiny", "tiny odd", "float16"),
    ("sm_75", "attention_vjp/tiny", "tiny odd", "float32"),
    ("sm_80", "attention/mma_short", "few keys odd", "float32"),
    ("sm_80", "attention/mma", "odd", "float16"),
    ("sm_80", "attention/tiled_f64", "odd parts", "float64"),
    ("sm_80", "attention/short_f64", "few keys odd", "float64"),
    ("sm_80", "attention_vjp/short_f64", "few keys odd", "float64"),
    ("sm_80", "attention_vjp/few_f64", "several queries", "float64"),
    ("sm_80", "attention_vjp/sections_f64", "wide heads", "float64"),
    ("sm_90a", "attention/hopper", "odd parts", "float16"),
    ("sm_90a", "softmax/tiled", "shortest rows", "bfloat16"),
    ("sm_90a", "softmax/vjp_split", "short whole rows", "bfloat16"),
]


# Rows of points, and how many problems of tests/support/fuzz_points.py from which on.
POINTS = [
    ("direct", 3, 1),
    ("mma", 16, 1),
    ("products", 9, 1),
    ("tf32", 14, 1),
    ("tf32", 126, 1),
    ("series", 16, 1),
]


@pytest.mark.parametrize(("row", "seed", "count"), POINTS)
def test_points(row, seed, count):
    of_points(row, seed, count)


def of_points(row, seed, count=1):
    done = run_rows(
        "--arch", "sm_80", "--sms", "8", "--rows", f"points/{row}",
        "--seed", str(seed), "--fuzz", str(count), "--points", "600",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == count
    assert all("points_combine" in line for line in lines)


def test_doubtful_rows_leave_no_other_row_unwritten():
    # A mean in float64 of far points: one row of a group of 64 names the group for a
    # repair; other warps took that as having no parts.
    of_points("direct", 2)


@pytest.mark.parametrize(
    "seed",
    [
        70219,  # float32 sums below 1e-36
        70699,  # the same in 20 axes
        70328,  # float64, a bandwidth of each axis, 1e6 bandwidths from the origin
        70836,  # a float64 mean over scores of 1e4 and more
    ],
)
def test_problems_that_lost_digits(seed):
    of_points("direct", seed)


def test_products_of_one_sign():
    # Points on lines in 64 axes: tensor cores cut off each product at digits of the sum
    # so far, and so all of them to one side.
    of_points("products", 70810)


@pytest.mark.parametrize(
    ("arch", "file", "which"),
    [
        ("sm_80", "points/gpu/test_kernels.py", "function_of_d2 and rational"),
        ("sm_80", "cuda/test_gpu.py", "repeated_calls_with_every_option"),
        (
            "sm_90",
            "attention/gpu/sm90/test_sm90_functions.py",
            "more_splits_than_a_list_fills and 65 and 1025",
        ),
        (
            "sm_90",
            "attention/gpu/sm90/test_sm90_backward_mask.py",
            "every_length and all and seqlens4 and bfloat16",
        ),
        (
            "sm_90",
            "attention/gpu/sm90/test_sm90_backward_wide.py",
            "options_of_all_rows and 8-softcap or all_options_at_once and 64-keys",
        ),
    ],
)
def test_on_a_gpu_that_is_not_there(arch, file, which):
    of_a_gpu(arch, file, which)


def of_a_gpu(arch, file, which, **environment):
    """Run tests of a GPU."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "emulation.plugin",
            "-m", "gpu", str(Path(emulation.__file__).parents[2] / file), "-k", which,
        ],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(RUN.parents[1]), "CUPYFLASH_EMULATION": arch}
        | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


@pytest.mark.parametrize(("arch", "row", "kind", "dtype"), ROWS)
def test_row(arch, row, kind, dtype):
    done = run_rows("--arch", arch, "--rows", row, "--kinds", kind, "--dtypes", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    _, _, kernels = line.partition(" s, ")
    assert kernels, line


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_long_rows_through_a_ring(dtype):
    # Of 40 blocks: their threads must all run beside each other. Slices end within a
    # chunk; what lies behind it in shared memory is NaN.
    done = run_rows("--rows", "softmax/relay", "--dtypes", dtype, "--sms", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2  # softmax and log_softmax
    assert all(x.endswith(" s, softmax_relay_clear softmax_relay") for x in lines)


def test_many_long_rows_through_a_ring():
    of_a_gpu("sm_90a", "softmax/gpu/test_relay.py", "", CUPYFLASH_EMULATION_SMS="6")


def test_teams_of_blocks_share_columns():
    # Columns of -inf alone need subnormal numbers to be 0, which they are not here.
    of_a_gpu(
        "sm_90a",
        "softmax/gpu/test_teams.py",
        "float32 and not special",
        CUPYFLASH_EMULATION_SMS="24",
    )


def run_rows(*arguments):
    # In a process of its own, where no other CuPy has been imported.
    return subprocess.run(
        [sys.executable, str(RUN), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


# --- the emulation itself ------------------------------------------------------------


def launch(text, *args, block=64, grid=1, smem=0, headers=()):
    """Run the kernel `f` of a text, behind headers of ptx/."""
    headers = [(PTX / f"{name}.cuh").read_text() for name in headers]
    text = "".join([*headers, 'extern "C" __global__ void f(', text])
    kernel = stand_in.RawKernel(text, "f", (9, 0))
    kernel.max_dynamic_shared_size_bytes = smem
    kernel((grid,), (block,), args, smem)


def zeros(*shape, dtype=np.int32):
    x = stand_in.empty(shape, dtype)
    x[...] = 0
    return x


def test_threads_meet_at_barriers_and_shuffles():
    x = zeros(2, 64)
    launch(
        """int* x) {
          __shared__ int numbers[64], total;
          numbers[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
          if (threadIdx.x == 0) total = 0;
          __syncthreads();
          int n = numbers[63 - threadIdx.x];
          for (int lanes = 1; lanes < 32; lanes *= 2) {
            n += __shfl_xor_sync(0xffffffffu, n, lanes);
          }
          if (threadIdx.x % 32 == 0) atomicAdd(&total, n);
          __syncthreads();
          x[blockIdx.x * 64 + threadIdx.x] =
              total + int(__ballot_sync(0xffffffffu, threadIdx.x % 32 < 3));
        }""",
        x,
        grid=2,
    )
    each = np.array([[63 * 32 + 7], [63 * 32 + 6400 + 7]])
    np.testing.assert_array_equal(x.get(), np.broadcast_to(each, (2, 64)))


WRONG = {
    "touches what is not its memory": (
        "int* x) { x[-1 - int(threadIdx.x)] = 0; }",
        "no memory, or not aligned",
    ),
    "writes behind the end": (
        "int* x) { x[64 + threadIdx.x] = 0; }",
        "byte 0 behind the 256 bytes",
    ),
    "writes behind dynamic shared memory": (
        "int* x) { extern __shared__ int s[]; s[threadIdx.x + 1] = 0; }",
        "wrote byte 256 of 256 bytes",
    ),
    "a vector that is not aligned": (
        "int* x) { *reinterpret_cast<int4*>(x + 1) = int4{0, 0, 0, 0}; }",
        "undefined behaviour",
    ),
    "a barrier that half of a warp comes to": (
        "int* x) { if (threadIdx.x & 1) __syncwarp(); else __syncthreads(); }",
        "wait for what never comes",
    ),
    "lanes of a mask that ended": (
        "int* x) { if (threadIdx.x & 1) __syncwarp(); }",
        "have ended",
    ),
    "a lane beside its mask": (
        "int* x) { __shfl_sync(0xffffu, 1, 0); }",
        "not in the mask",
    ),
    "an endless wait": (
        "volatile int* x) { while (x[0] == 0) __nanosleep(1); }",
        "wait for what never comes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_kernel_may_not_do_is_told(name):
    text, said = WRONG[name]
    with pytest.raises(RuntimeError, match=said):
        launch(text, zeros(64), smem=256)


def test_a_missing_barrier_shows():
    # Threads run one after the other up to a barrier: without one they read poison.
    text = """int* x) {{
      __shared__ int numbers[64];
      numbers[threadIdx.x] = threadIdx.x;
      {barrier}
      x[threadIdx.x] = numbers[(threadIdx.x + 1) % 64];
    }}"""
    x = zeros(64)
    launch(text.format(barrier="__syncthreads();"), x)
    np.testing.assert_array_equal(x.get(), np.roll(np.arange(64), -1))
    launch(text.format(barrier=""), x)
    assert (x.get() == -1).any()


def test_a_copy_that_is_not_waited_for_shows():
    x, y = zeros(256), zeros(256)
    x[...] = 5
    text = """const int4* x, int4* y) {{
      __shared__ int4 numbers[64];
      ptx::copy_async<16>(numbers + threadIdx.x, x + threadIdx.x);
      {wait}
      y[threadIdx.x] = numbers[threadIdx.x];
    }}"""
    for wait, expected in (("ptx::wait_copies();", 5), ("", -1)):
        launch(text.format(wait=wait), x, y, headers=("copy",))
        assert (y.get() == expected).all()


def test_a_division_by_zero_goes_on():
    x = zeros(4, dtype=np.int64)
    x.set(np.array([7, 0, -7, 9]))
    launch(
        """long long* x) {
          if (threadIdx.x) return;
          const unsigned n = x[0], m = x[1];
          x[0] = n / m;
          x[1] = n % m;
          x[2] = x[2] % (x[1] - 7);
          x[3] = int(x[3]) % int(m);
        }""",
        x,
    )
    np.testing.assert_array_equal(x.get(), [0xFFFFFFFF, 7, -7, 9])


def test_blocks_that_wait_for_others_run_beside_them():
    x = zeros(8)
    launch(
        """volatile int* x) {
          const int n = blockIdx.x;
          if (threadIdx.x == 0) {
            while (n < 7 && x[n + 1] == 0) __nanosleep(1);
            x[n] = n < 7 ? x[n + 1] + 1 : 1;
          }
        }""",
        x,
        grid=8,
    )
    np.testing.assert_array_equal(x.get(), np.arange(8, 0, -1))


@pytest.mark.parametrize("path", sorted(PTX.glob("*.cuh")), ids=lambda p: p.stem)
def test_headers_of_ptx_have_the_functions_of_cuda_src(path):
    true = (compile_cpp.CUDA_SRC / "ptx" / path.name).read_text()
    theirs = set(re.findall(r"__forceinline__ [\w&* ]*?(\w+)\(", true))
    theirs |= set(re.findall(r"struct (?:alignas\(\d+\) )?(\w+)", true))
    assert theirs
    assert theirs - {"name"} <= set(re.findall(r"\w+", path.read_text()))
