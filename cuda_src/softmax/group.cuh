// SPDX-License-Identifier: MIT
// Which threads work on which row, and what they do together.
//
// Parameters LANES            threads a row, a power of two
//            ROWS_PER_BLOCK   rows a block; 1 if LANES is above 32
//            REDUCED_AXES     axes that a row runs over
//            ACC_T            float or double: of maxima and exponentials
#pragma once

#include "common/math.cuh"
#include "common/reduce.cuh"

#ifndef LANES
#error "LANES and ROWS_PER_BLOCK come from the host"
#endif
constexpr int kLanes = LANES, kRowsPerBlock = ROWS_PER_BLOCK;
constexpr int kNumThreads = kLanes * kRowsPerBlock;
static_assert(kLanes <= kWarpSize || kRowsPerBlock == 1,
              "a long row has its own block");
static_assert(kNumThreads % kWarpSize == 0, "reductions take whole warps");

using acc_t = ACC_T;

// Elements that a lane asks for before it needs the first: enough loads are then under
// way to keep the memory busy. Indices over several axes take too many registers for
// it.
constexpr int kBatch = REDUCED_AXES == 1 ? 32 / sizeof(acc_t) : 1;
constexpr int kUnroll = REDUCED_AXES == 1 ? 4 : 1;  // the same, left to the compiler

// The sum of one lane. It runs in double, also for float: a lane adds thousands of
// terms one by one, and a float sum of them would lose more than the exponentials do.
// For double itself, Kahan's correction keeps what each addition has rounded away.
struct sum_t {
  double value = 0, lost = 0;

  __device__ __forceinline__ void operator+=(double x) {
    if constexpr (sizeof(acc_t) == sizeof(double)) {
      const double y = x - lost, sum = value + y;
      lost = is_finite(sum) ? (sum - value) - y : 0;
      value = sum;
    } else {
      value += x;
    }
  }
};

// A block starts at row first_row() and goes on by row_step(); lane() of kLanes
// threads.
__device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
__device__ __forceinline__ long long first_row() {
  return (long long)blockIdx.x * kRowsPerBlock;
}
__device__ __forceinline__ long long row_step() {
  return (long long)gridDim.x * kRowsPerBlock;
}
// The row of this thread while the block is at `block_row`.
__device__ __forceinline__ long long row_of_lane(long long block_row) {
  return block_row + threadIdx.x / kLanes;
}

// The larger of two; a NaN is passed over here, since the sum will meet it.
struct larger_t {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct larger_finite_t {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a && b < infinity<T>() ? b : a;
  }
};

struct plus_t {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Maximum and sum over the lanes of a row.
template <typename T>
__device__ __forceinline__ T row_max(T m) {
  return group_reduce<kLanes>(m, larger_t());
}
template <typename T>
__device__ __forceinline__ T row_sum(T l) {
  return group_reduce<kLanes>(l, plus_t());
}
__device__ __forceinline__ double row_sum(sum_t l) { return row_sum(l.value); }

// What is subtracted from the scores of a row with maximum m. An infinite one is not:
// the sum then comes out as 0 (all -inf), inf or NaN, which tells the cases apart.
template <typename T>
__device__ __forceinline__ T shift_by(T m) {
  return is_finite(m) ? m : T(0);
}
