// SPDX-License-Identifier: MIT
// softmax_short: short contiguous rows that consist of whole vectors.
//
// Algorithm  As softmax_safe, on rows held in registers.
// Grid       1-D; a block of kNumThreads takes kSets * kRowsPerBlock rows at a time
// Tiles      a row in kLanes adjacent threads, with its vectors in memory order:
// kInRegisters
//            16-byte vectors each, of kSets rows
// Memory     x and out once, in vectors
// Numbers    as softmax_tiled, bit for bit for softmax; 16-bit exponentials are
//            computed once, as there is room to keep them
// Limits     contiguous rows of kLanes * IN_REGISTERS elements in x and in out, which
// have the
//            same type and start at whole vectors; no mask and no scale
#include "common/vector.cuh"
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/row_exp.cuh"
#include "softmax/detail/exp_policy.cuh"

constexpr int kVector = 16 / sizeof(x_t), kInRegisters = IN_REGISTERS / kVector,
              kSets = SETS;
constexpr int kLength = kLanes * IN_REGISTERS;
static_assert(IN_REGISTERS % kVector == 0 && kLanes <= kWarpSize,
              "whole vectors in a warp");
static_assert(kSame<x_t, out_t> && !kHasWhere && !kScaled && OUTER_AXES == 1);

// The largest score of a row, of which this thread has `part`.
template <typename T>
__device__ __forceinline__ acc_t
largest_of(const vector_t<T, kVector> (&part)[kInRegisters]) {
  acc_t m = -infinity<acc_t>();
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2) {  // two at a time
    using two_t = vector_t<T, 2>;
    const auto larger = [](unsigned a, unsigned b) {
      return larger_of(two_t{a}, two_t{b}).word;
    };
    auto of_thread = part[0];
#pragma unroll
    for (int v = 1; v < kInRegisters; ++v) of_thread = larger_of(of_thread, part[v]);
    const uint4 word = of_thread.word;
    const unsigned of_four = larger(larger(word.x, word.y), larger(word.z, word.w));
    const two_t of_row = {warp_reduce<kLanes>(of_four, larger)};
    return largest_t()(to<acc_t>(of_row.element[0]), to<acc_t>(of_row.element[1]));
  }
#endif
#pragma unroll
  for (int v = 0; v < kInRegisters; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) m = largest_t()(m, to<acc_t>(part[v].element[k]));
  }
  return warp_reduce<kLanes>(m, largest_t());
}

// Replaces the scores of a row by its results.
__device__ __forceinline__ void softmax_row(
    vector_t<x_t, kVector> (&part)[kInRegisters], const layout_t& layout) {
  const acc_t largest = largest_of(part);
  const acc_t m = shift_by(largest);
  const exp_of_row_t exp_of_row(m);
  acc_t value[kInRegisters][kVector];
  part_t sum = exp_of_row.none();
#pragma unroll
  for (int v = 0; v < kInRegisters; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const acc_t x = to<acc_t>(part[v].element[k]);
      const acc_t e = exp_of_row(score_t(x, layout));
      exp_of_row.add(sum, e);
      value[v][k] = kLog ? x : e;
    }
  }
  sum = warp_reduce<kLanes>(exp_of_row.sum_of(sum), plus_t());
  const finish_t finish(m, total(sum, largest));
#pragma unroll
  for (int v = 0; v < kInRegisters; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const acc_t y = value[v][k];
      value[v][k] = kLog ? finish(score_t(y, layout)) : y * finish.inverse;
    }
    part[v] = to_vector<out_t, kVector>::of(value[v]);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, MIN_BLOCKS)
    softmax_short(const x_t* x, const bool*, out_t* out,
                  const __grid_constant__ layout_t layout) {
  constexpr int kRows = kSets * kRowsPerBlock;  // rows per block at a time
  const int of_block = threadIdx.x / kLanes;
  for (long long at = (long long)blockIdx.x * kRows; at < layout.num_rows;
       at += (long long)gridDim.x * kRows) {
    const auto has = [&](int s) {
      return at + s * kRowsPerBlock + of_block < layout.num_rows;
    };
    // Position of vector v of this thread in set s, from the block's first element on.
    const auto position = [&](int s, int v) {
      return (s * kRowsPerBlock + of_block) * kLength + (v * kLanes + lane()) * kVector;
    };
    const x_t* const from = x + at * kLength;
    out_t* const onto = out + at * kLength;
    vector_t<x_t, kVector> part[kSets][kInRegisters];
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
#pragma unroll
      for (int v = 0; v < kInRegisters; ++v) {
        part[s][v].word = {};
        if (has(s)) part[s][v] = load_vector<kVector>(from + position(s, v));
      }
    }
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      softmax_row(part[s], layout);
#pragma unroll
      for (int v = 0; v < kInRegisters; ++v) {
        if (has(s)) store_vector(onto + position(s, v), part[s][v]);
      }
    }
  }
}
