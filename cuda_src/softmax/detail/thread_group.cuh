// SPDX-License-Identifier: MIT
// Which threads work on which row, and their reductions.
//
// Parameters LANES            threads per row: a power of two; without row_max and
//                             row_sum any multiple of 32
//            ROWS_PER_BLOCK   rows per block; 1 if LANES is above 32
//            REDUCED_AXES     number of axes of a row
#pragma once

#include "common/reduce.cuh"
#include "common/strides.cuh"
#include "common/vector.cuh"
#include "ptx/opaque.cuh"
#include "softmax/detail/sum.cuh"

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

// The row of this thread's group. Past the last row it is empty: its threads still take
// part in reductions. Element i is the i-th along the reduced axes.
template <typename Layout> struct row_of_group_t {
  const Layout& layout;
  long long length;

  // Offset of element i in one of the arrays, from the start of the row.
  __device__ __forceinline__ long long offset(int array, long long i) const {
    return locate(layout.reduced, i).of[array];
  }
  // The same, for a row that is held on chip.
  __device__ __forceinline__ long long near_offset(int array, int i) const {
    return locate_in_row(layout.reduced, array, i);
  }
};

// Keeps only narrow elements in registers, and not also what was computed from them,
// which would take too many.
template <typename T, int kVector, int kCount>
__device__ __forceinline__ void keep_narrow(
    vector_t<T, kVector> (&in_registers)[kCount]) {
  constexpr int kBytes = sizeof(T) * kVector;
  if constexpr (sizeof(T) < sizeof(acc_t) && kBytes >= 4) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      unsigned* const words = reinterpret_cast<unsigned*>(&in_registers[v]);
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) ptx::launder(words[i]);
    }
  }
}

// Maximum and sum over the lanes of a row.
template <typename T> __device__ __forceinline__ T row_max(T m) {
  return group_reduce<kLanes>(m, larger_t());
}
template <typename T> __device__ __forceinline__ auto row_sum(T l) {
  return group_reduce<kLanes>(total(l), plus_t());
}
