// SPDX-License-Identifier: MIT
// Which threads work on which row, and their reductions.
//
// Parameters LANES            threads per row: a power of two; for kernels that do not
//            use
//                             row_max and row_sum also a multiple of 32
//            ROWS_PER_BLOCK   rows per block; 1 if LANES is above 32
//            REDUCED_AXES     number of axes of a row
//            ACC_T            as in softmax/detail/sum.cuh
#pragma once

#include "common/reduce.cuh"
#include "softmax/detail/sum.cuh"

#ifndef LANES
#error "LANES and ROWS_PER_BLOCK come from the host"
#endif
constexpr int kLanes = LANES, kRowsPerBlock = ROWS_PER_BLOCK;
constexpr int kNumThreads = kLanes * kRowsPerBlock;
static_assert(kLanes <= kWarpSize || kRowsPerBlock == 1,
              "a long row has its own block");
static_assert(kNumThreads % kWarpSize == 0, "reductions take whole warps");

// Elements that a lane loads before it needs the first: enough loads in flight to keep
// the memory busy. Indices over several axes would take too many registers.
constexpr int kBatch = REDUCED_AXES == 1 ? 32 / sizeof(acc_t) : 1;
constexpr int kUnroll = REDUCED_AXES == 1 ? 4 : 1;  // the same, left to the compiler

// A block starts at row first_row() and advances by row_step(); lane() of kLanes
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

// Maximum and sum over the lanes of a row.
template <typename T> __device__ __forceinline__ T row_max(T m) {
  return group_reduce<kLanes>(m, larger_t());
}
template <typename T> __device__ __forceinline__ auto row_sum(T l) {
  return group_reduce<kLanes>(total(l), plus_t());
}
