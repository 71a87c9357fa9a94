// SPDX-License-Identifier: MIT
// Products of matrices in float64 on tensor cores: a block computes kBlockM x kBlockN
// numbers of a product, and loops over steps of 16 slots of its sums.
//
// An operand lies in shared memory as it lies in global memory: by rows, of which each
// has all slots of a step, or by slots, of which each has all rows (here: the columns
// of the second operand are its rows, too). Numbers are read one by one: of vectors, a
// product would first have to copy its operands from register to register.
//
// Shared  kStages x (kBlockM + kBlockN) x 16, and 16 factors  stages of a ring
#pragma once

#include "attention/fp64/tile.cuh"
#include "ptx/hold.cuh"

#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(WARP_M) || !defined(WARP_N) || \
    !defined(STAGES) || !defined(MIN_BLOCKS)
#error "BLOCK_M, BLOCK_N, WARP_M, WARP_N, STAGES and MIN_BLOCKS come from the host"
#endif
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kWarpM = WARP_M, kWarpN = WARP_N;  // of a warp
constexpr int kStages = STAGES;
constexpr int kMinBlocks = MIN_BLOCKS;  // blocks per multiprocessor; limits registers
constexpr int kWarpsN = kBlockN / kWarpN;
static_assert(kNumThreads == kWarpSize * kWarpsN * (kBlockM / kWarpM));
static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kStages >= 2);

constexpr int kStep = 16;  // slots
constexpr int kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;
constexpr int kPadding = 4;  // numbers
constexpr int kSecondAt = kBlockM * (kStep + kPadding);
constexpr int kFactorsAt = kSecondAt + kBlockN * (kStep + kPadding);
constexpr int kStageSize = kFactorsAt + kStep;
static_assert(kBlockM % kStep == 0 && kBlockN % kStep == 0);

using sums_t = double[kTilesM][kTilesN][4];  // fragments c

enum layout_t { kByRows, kBySlots };

__device__ __forceinline__ double* stage_at(int n) {
  extern __shared__ __align__(16) unsigned char smem[];
  return reinterpret_cast<double*>(smem) + n * kStageSize;
}

// A half warp reads 4 numbers of 4 lines at a time, which lie in different banks.
template <int kLine> __device__ __forceinline__ int spot(int line, int n) {
  return line * (kLine + kPadding) + n;
}

// Copies of an operand to shared memory, kLines lines of kLine numbers a step, by all
// threads. A thread keeps where it reads next, and little else: registers are scarce,
// and what is computed in a step keeps the tensor cores waiting.
template <int kLines, int kLine> struct copies_t {
  static constexpr int kVectors = kLine / kVec;
  static constexpr int kAtOnce = kNumThreads / kVectors;  // lines
  static_assert(kNumThreads % kVectors == 0);
  const double* next;

  // Where a thread is in the lines.
  struct lane_coord_t {
    int line, at;
    __device__ __forceinline__ lane_coord_t() {
      unsigned thread = threadIdx.x;
      ptx::launder(thread);  // recompute what depends on it
      line = thread / kVectors;
      at = thread % kVectors * kVec;
    }
  };

  __device__ __forceinline__ void begin(const double* x, index_t stride) {
    const lane_coord_t me;
    next = x + me.line * stride + me.at;
  }

  // Starts the copies of a step; lines from `num_lines` and numbers from `num` on are
  // zeros. The next step is `advance` numbers further.
  template <bool kIsWhole = false>
  __device__ __forceinline__ void copy(double* smem, index_t stride, index_t advance,
                                       int num_lines = kLines, int num = kLine) {
    const lane_coord_t me;
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem)) +
                        spot<kLine>(me.line, me.at) * 8;
    const bool aligned =
        kIsWhole ||
        ((reinterpret_cast<unsigned long long>(next) / 8 | stride) & 1) == 0;
    const double* const from = next;
    next += advance;
    if (kLines % kAtOnce == 0 &&
        (kIsWhole || (aligned && num_lines >= kLines && num >= kLine))) {
      const double* x = from;
#pragma unroll
      for (int i = 0; i < kLines; i += kAtOnce) {
        ptx::copy_or_fill<16>(to + spot<kLine>(i, 0) * 8, x, 16);
        if (i + kAtOnce < kLines) x += kAtOnce * stride;
      }
      return;
    }
    const double* const start = from - (me.line * stride + me.at);
    const int left_of_line = min(max(8 * (num - me.at), 0), 16);
#pragma unroll 1
    for (int i = 0; i < kLines; i += kAtOnce) {
      const int line = i + me.line;
      if (kLines % kAtOnce != 0 && line >= kLines) break;
      const int left = line < num_lines ? left_of_line : 0;
      const double* const x = left > 0 ? from + i * stride : start;
      const unsigned into = to + spot<kLine>(i, 0) * 8;
      if (aligned) {
        ptx::copy_or_fill<16>(into, x, left);
      } else {
        ptx::copy_or_fill<8>(into, x, min(left, 8));
        ptx::copy_or_fill<8>(into + 8, left > 8 ? x + 1 : start, max(left - 8, 0));
      }
    }
  }
};

// Position of a thread.
struct thread_t {
  int g, t, row, col;  // `row` and `col` are those of its warp

  __device__ __forceinline__ thread_t() {
    unsigned index = threadIdx.x;
    ptx::launder(index);  // recompute what depends on it
    const int warp = index / kWarpSize;
    g = index % kWarpSize / 4;
    t = index % 4;
    row = warp / kWarpsN * kWarpM;
    col = warp % kWarpsN * kWarpN;
  }
};

// The row of elements 2 h and 2 h + 1 of tile m of `sums`.
__device__ __forceinline__ int row_of(const thread_t& me, int m, int h) {
  return me.row + 16 * m + me.g + 8 * h;
}

__device__ __forceinline__ void clear(sums_t& sums) {
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0;
    }
  }
}

// The ring of stages. `fetch(stage, step)` starts the copies of a step.
struct ring_t {
  int num_steps, stage;

  template <typename Fetch> __device__ __forceinline__ void begin(int n, Fetch fetch) {
    num_steps = n;
    stage = 0;
#pragma unroll 1
    for (int step = 0; step < kStages; ++step) {
      if (step < num_steps) fetch(stage_at(step), step);
      ptx::commit_copy_group();
    }
    ptx::wait_copy_groups<kStages - 1>();
    __syncthreads();  // the first stage has arrived
  }

  // All warps have read the stage, and the next one has arrived.
  __device__ __forceinline__ void advance() {
    ptx::wait_copy_groups<kStages - 2>();
    __syncthreads();
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }

  // Refills the stage of `step`, which was before the current one.
  template <typename Fetch>
  __device__ __forceinline__ void refill(int step, Fetch fetch) {
    const int previous = stage > 0 ? stage - 1 : kStages - 1;
    if (step + kStages < num_steps) fetch(stage_at(previous), step + kStages);
    ptx::commit_copy_group();
  }

  // Before other copies begin in the same memory.
  __device__ __forceinline__ void end() {
    ptx::wait_copy_groups<0>();
    __syncthreads();
  }
};

// sums += first second^T over steps [step, last) of the ring. With kScaled, each slot
// of the second operand has a factor in the stage. Holds enclose each product, together
// with the loads for later ones; those of a kernel have numbers from kHold on.
template <layout_t kFirst, layout_t kSecond, bool kScaled, int kHold, typename Fetch>
__device__ __forceinline__ void multiply(sums_t& sums, ring_t& ring, int step, int last,
                                         Fetch fetch) {
  double a[2][8], b[kTilesN][4], factor[4];
  int of_a, of_b, of_factors;  // slot t of row g
  {
    const thread_t me;
    of_a = kFirst == kByRows ? spot<kStep>(me.row + me.g, me.t)
                             : spot<kBlockM>(me.t, me.row + me.g);
    of_b = kSecond == kByRows ? spot<kStep>(me.col + me.g, me.t)
                              : spot<kBlockN>(me.t, me.col + me.g);
    of_b += kSecondAt;
    of_factors = kFactorsAt + me.t;
  }
  const auto load_a = [&](int m) {
    const double* const from = stage_at(ring.stage) + of_a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * (m % kTilesM) + 8 * h, slot = 4 * i;
        const int at =
            kFirst == kByRows ? spot<kStep>(row, slot) : spot<kBlockM>(slot, row);
        a[m % 2][2 * i + h] = ptx::load_one_here(from + at);
      }
    }
  };
  const auto load_b = [&](int n) {
    const double* const from = stage_at(ring.stage) + of_b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int col = 8 * n, slot = 4 * i;
      const int at =
          kSecond == kByRows ? spot<kStep>(col, slot) : spot<kBlockN>(slot, col);
      b[n][i] = ptx::load_one_here(from + at);
    }
  };
  const auto load_factors = [&] {
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        factor[i] = ptx::load_one_here(stage_at(ring.stage) + of_factors + 4 * i);
      }
    }
  };
  if (step >= last) return;
  load_a(0);
  load_factors();
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) load_b(n);
#pragma unroll 1
  for (; step < last; ++step) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      const bool is_last = m + 1 == kTilesM;
      if (is_last) ring.advance();
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        ptx::hold(step, kHold + m * kTilesN + n);
        // Not before the first product of a tile: the previous product may still be
        // reading these registers.
        if (n == 1) load_a(m + 1);
        // A tile is free two products after its last one.
        if (is_last && n > 1) load_b(n - 2);
        if (is_last && n + 1 == kTilesN) ring.refill(step, fetch);
        if (kScaled && m == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) b[n][i] *= factor[i];
        }
        add_product(sums[m][n], a[m % 2], b[n]);
      }
    }
    ptx::hold(step, kHold + kTilesM * kTilesN);
    load_b(kTilesN - 2);
    load_b(kTilesN - 1);
    load_factors();
    if constexpr (kTilesM % 2 == 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) a[0][i] = a[1][i];
    }
  }
}
