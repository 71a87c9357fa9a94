"""What memory gives in the orders in which a softmax has to read it: bytes alone.

    python benchmarks/bench_walls.py --json benchmarks/results/softmax_walls_h200.json

One kernel moves 64 KB at a time, computes nothing and waits for nobody. A column has to
be read whole before any of it is written, so blocks go down tiles of neighbouring
columns (`once`: all of a tile stays on chip). A row or a tile that no cluster of blocks
holds is read twice, the second time from L2 (`twice`: what is written lies some bytes
behind what is read first). Each share is one of a plain copy in the same run, and so is
that of cupyflash beside it.
"""

import cupy
import numpy as np
import rates
import timing

import cupyflash
from cupyflash._cli import console

_MB = 1 << 20
_THREADS, _HELD = 256, 16
_PART = _THREADS * _HELD  # vectors of 16 bytes that a block moves at a time

_WALK = r"""
__device__ __forceinline__ uint4 load(const uint4* p, unsigned long long policy) {
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
  return v;
}
__device__ __forceinline__ void store(uint4* p, uint4 v, unsigned long long policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy) : "memory");
}
// Parts lie one below the other in tiles of `width` vectors of rows of `stride`; `lag`
// is how far the parts that are written are behind those that are read before, and 0
// where each is read once.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    walk(const uint4* x, uint4* y, unsigned* ticket, unsigned parts, unsigned lag,
         unsigned parts_of_tile, unsigned width, unsigned stride) {
  __shared__ unsigned next;
  unsigned long long last, first;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first));
  unsigned sum = 0;
  while (true) {
    if (threadIdx.x == 0) next = atomicAdd(ticket, 1);
    __syncthreads();
    const unsigned turn = next;
    __syncthreads();
    if (turn >= (lag ? 2 * parts : parts)) break;
    bool writes = true;
    unsigned part = turn;
    if (lag) {
      writes = turn >= lag && (turn >= 2 * parts - lag || (turn - lag) % 2);
      if (turn >= 2 * parts - lag) part = turn - parts;
      else if (turn >= lag) part = (turn - lag) / 2 + (writes ? 0 : lag);
    }
    const unsigned tile = part / parts_of_tile;
    const long long row = (part % parts_of_tile) * (THREADS * HELD / width);
    const long long at = row * stride + (long long)tile * width;
    uint4 held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      const unsigned v = k * THREADS + threadIdx.x;
      held[k] = load(x + at + v / width * (long long)stride + v % width,
                     writes ? first : last);
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      const unsigned v = k * THREADS + threadIdx.x;
      if (writes) {
        store(y + at + v / width * (long long)stride + v % width, held[k], first);
      } else {
        sum ^= held[k].x ^ held[k].y ^ held[k].z ^ held[k].w;
      }
    }
  }
  if (sum == 0x9e3779b9u) *ticket = sum;
}
"""

# (name, shape, axis, dtypes): the calls whose walls are asked for.
CALLS = (
    ("columns", (1024, 32_768), 0, ("float32", "bfloat16", "float64")),
    ("columns", (8192, 32_768), 0, ("float32", "bfloat16", "float64")),
    ("rows", (1 << 18,), -1, ("float64",)),
    ("rows", (1 << 20,), -1, ("float32", "bfloat16", "float64")),
    ("rows", (1 << 21,), -1, ("float32",)),
)
WIDTHS = (128, 256, 512, 1024)  # bytes of a tile of columns
MARGINS = (4, 6, 8, 12)  # MB between what is read first and what is written
_ROWS_BYTES = 1 << 29


def walks(shape, itemsize):
    """(name, lag, parts of a tile, width, stride) of all orders, in vectors.

    Rows are tiles of one part, side by side.
    """
    is_rows = len(shape) == 1
    row = shape[-1] * itemsize // 16
    if is_rows:
        tile = row // _PART
        return [
            (f"twice, {margin} MB behind", tile + margin * _MB // (_PART * 16), 1,
             _PART, _PART)
            for margin in MARGINS
        ]  # fmt: skip
    found = []
    for bytes_wide in WIDTHS:
        width = bytes_wide // 16
        tile = shape[0] * width // _PART
        if not tile:
            continue
        found.append((f"once, {bytes_wide} bytes wide", 0, tile, width, row))
        for margin in MARGINS[:2]:
            lag = tile + margin * _MB // (_PART * 16)
            name = f"twice, {bytes_wide} bytes wide, {margin} MB behind"
            found.append((name, lag, tile, width, row))
    return found


def addresses_are_right(kernel, blocks):
    """Whether each order copies all of a small array."""
    for shape, nbytes in (((256, 2048), 1 << 21), ((1 << 18,), 1 << 23)):
        x = cupy.random.randint(0, 255, nbytes, dtype=np.uint8)
        for name, *numbers in walks(shape, 4):
            y = cupy.zeros_like(x)
            launch(kernel, blocks, x, y, cupy.zeros(1, "u4"), *numbers)
            if not (x == y).all():
                raise SystemExit(f"{shape}, {name}: not a copy")


def launch(kernel, blocks, x, y, ticket, lag, tile, width, stride):
    """One walk over all of x, in any dtype, into y."""
    parts = x.nbytes // (_PART * 16)
    numbers = [np.uint32(n) for n in (parts, min(lag, parts), tile, width, stride)]
    ticket.data.memset_async(0, 4)
    kernel((blocks,), (_THREADS,), (x, y, ticket, *numbers))


def main():
    """Measure and write the report."""
    args = timing.arguments(__doc__.splitlines()[0]).parse_args()
    options = ("-std=c++17", f"-DTHREADS={_THREADS}", f"-DHELD={_HELD}")
    kernel = cupy.RawKernel(_WALK, "walk", options=options)
    blocks = 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    addresses_are_right(kernel, blocks)
    ticket = cupy.zeros(1, "u4")
    rows = []
    for name, shape, axis, dtypes in CALLS:
        for dtype in dtypes:
            label = f"softmax of {name} {' x '.join(map(str, shape))} {dtype}"
            if args.only not in label:
                continue
            x = matrix(shape, dtype)
            y = cupy.empty_like(x)
            calls = {
                "copy": lambda x=x, y=y: cupy.cuda.runtime.memcpyAsync(
                    y.data.ptr, x.data.ptr, x.nbytes, 3, 0
                ),
                "cupyflash": lambda x=x, y=y, axis=axis: cupyflash.softmax(
                    x, axis, out=y
                ),
            }
            for order, *numbers in walks(shape, x.itemsize):
                calls[order] = lambda x=x, y=y, n=numbers: launch(
                    kernel, blocks, x, y, ticket, *n
                )
            rows += measured(label, calls, args.turns)
            timing.save(args.json, "softmax walls", True, rows=rows)
            del x, y, calls
            cupy.get_default_memory_pool().free_all_blocks()
    console.table(
        ("call", "order", "share of a copy"),
        [(row["call"], row["order"], f"{row['share']:.3f}") for row in rows],
    )


def matrix(shape, dtype):
    """Random numbers; of a row, as many as make half a GB."""
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    if len(shape) == 1:
        shape = (_ROWS_BYTES // np.dtype(dtype).itemsize // shape[0], *shape)
    x = cupy.random.standard_normal(shape, dtype="f4")
    return x.astype(dtype, copy=False)


def measured(label, calls, turns):
    """The rows of a call."""
    found = rates.timed(calls, turns)
    copy = found["copy"][0]
    return [
        {"call": label, "order": order, "seconds": seconds, "best": best,
         "worst": worst, "share": copy / seconds}
        for order, (seconds, best, worst) in found.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
