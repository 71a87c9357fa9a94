"""The clock and the ceilings of the table in bench_softmax.py, on the GPU.

A turn is some launches of one candidate back to back between two events; candidates
take turns in rotating order, and the median of the turns counts. Arrays are larger
than the L2 cache, so launches are not slowed down by flushing it.
"""

import math
from statistics import median

import cupy
import numpy as np

_TURN_SECONDS = 1e-3
_MOST_LAUNCHES = 4
_SLOW_SECONDS = 4e-3  # such candidates get fewer turns: they are not close to others

# The start of a turn waits until the host has enqueued all of it.
_SPIN = cupy.RawKernel(
    """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}""",
    "spin",
)
_SPIN_CYCLES = np.int64(150_000)

_READ = r"""
// Reads x once, 16 bytes an access, eight of them under way in each thread.
extern "C" __global__ void __launch_bounds__(512)
    read_words(const uint4* __restrict__ x, unsigned* sink, long long size) {
  unsigned sum = 0;
  const long long step = 512ll * 8;
  for (long long at = blockIdx.x * step + threadIdx.x; at < size;
       at += gridDim.x * step) {
    uint4 word[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      word[k] = at + k * 512 < size ? __ldcs(x + at + k * 512) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) sum ^= word[k].x ^ word[k].y ^ word[k].z ^ word[k].w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

#if __CUDA_ARCH__ >= 900
constexpr int kMostStages = 16;

// The same by TMA of each multiprocessor, into a ring in shared memory.
extern "C" __global__ void __launch_bounds__(32)
    read_bulk(const char* __restrict__ x, unsigned* sink, long long num_chunks,
              int chunk, int stages) {
  extern __shared__ __align__(128) char ring[];
  __shared__ unsigned long long barrier[kMostStages];
  const unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  if (threadIdx.x != 0) return;
  for (int s = 0; s < stages; ++s) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar + 8 * s));
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  long long ahead = blockIdx.x;
  auto fetch = [&](int s) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     bar + 8 * s),
                 "r"(chunk)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(to + s * chunk),
        "l"(x + ahead * chunk), "r"(chunk), "r"(bar + 8 * s)
        : "memory");
    ahead += gridDim.x;
  };
  for (int s = 0; s < stages && ahead < num_chunks; ++s) fetch(s);
  int stage = 0;
  unsigned phase = 0;
  for (long long at = blockIdx.x; at < num_chunks; at += gridDim.x) {
    unsigned done = 0;
    while (!done) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(bar + 8 * stage), "r"(phase)
          : "memory");
    }
    if (ahead < num_chunks) fetch(stage);
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  if (x == nullptr) *sink = ring[0];
}
#endif
"""

# What the ceiling is the best of: blocks a multiprocessor, and for copies by the engine
# their bytes and how many are under way in a block.
_WORDS = (2, 4, 8, 16)
_BULK = (
    (1, 16384, 12),
    (2, 8192, 12),
    (2, 16384, 6),
    (2, 32768, 3),
    (4, 8192, 6),
    (4, 16384, 3),
    (1, 32768, 6),
)


def timed(calls, turns):
    """Seconds of each call: {name: (median, best, worst)}."""
    launches, rounds = {}, {}
    for name, call in calls.items():
        call()
        estimate = _turn(call, 2)
        launches[name] = max(
            1, min(_MOST_LAUNCHES, math.ceil(_TURN_SECONDS / estimate))
        )
        rounds[name] = turns if estimate < _SLOW_SECONDS else min(turns, 2)
    names = list(calls)
    samples = {name: [] for name in names}
    for turn in range(turns):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if turn < rounds[name]:
                samples[name].append(_turn(calls[name], launches[name]))
    return {name: (median(t), min(t), max(t)) for name, t in samples.items()}


def _turn(call, launches):
    """Seconds of one of so many launches."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    _SPIN((1,), (1,), (_SPIN_CYCLES,))
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) * 1e-3 / launches


class ReadSweep:
    """read(x) reads an array once and writes nothing: the ceiling of a reduction.

    The best of some ways is taken; `name` says which.
    """

    def __init__(self):
        device = cupy.cuda.Device()
        self._module = cupy.RawModule(code=_READ, options=("-std=c++17",))
        self._sink = cupy.zeros(1, np.uint32)
        self._num_sms = device.attributes["MultiProcessorCount"]
        ways = {f"words, {blocks}": self._words(blocks) for blocks in _WORDS}
        if int(device.compute_capability) >= 90:
            ways |= {f"bulk, {way}": self._bulk(*way) for way in _BULK}
        x = cupy.ones(512 << 20, np.uint8)
        calls = {name: lambda read=read: read(x) for name, read in ways.items()}
        seconds = timed(calls, 5)
        self.name = min(seconds, key=seconds.get)
        self.rates = {name: x.nbytes / t[0] for name, t in seconds.items()}
        self._read = ways[self.name]

    def __call__(self, x):
        self._read(x)

    def _words(self, blocks):
        kernel = self._module.get_function("read_words")
        grid = (self._num_sms * blocks,)
        return lambda x: kernel(grid, (512,), (x, self._sink, x.nbytes // 16))

    def _bulk(self, blocks, chunk, stages):
        kernel = self._module.get_function("read_bulk")
        kernel.max_dynamic_shared_size_bytes = max(c * s for _, c, s in _BULK)
        grid, sizes = (self._num_sms * blocks,), (np.int32(chunk), np.int32(stages))
        return lambda x: kernel(
            grid,
            (32,),
            (x, self._sink, x.nbytes // chunk, *sizes),
            shared_mem=chunk * stages,
        )
