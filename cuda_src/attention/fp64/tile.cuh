// SPDX-License-Identifier: MIT
// Tiles and fragments of float64 attention and its gradients on tensor cores: the
// layout of rows in shared memory, copies to it, and products of 16 rows, 8 columns, 16
// slots.
//
// The products sum over slots, which stand for columns of q and k, or for keys, in any
// order that both operands share. Here slot t + 4 i of 16 is number 8 (i / 2) + 2 t + i
// % 2: a lane reads its operands in 16-byte vectors, and its part of the scores as a
// result is the part of the weights that it needs as an operand.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"
#include "ptx/copy_fill.cuh"
#include "ptx/mma_f64.cuh"
#include "ptx/opaque.cuh"

constexpr int kWarpRows = 16;  // rows owned by a warp

// Shared memory is read in 16-byte vectors, by 8 lanes at a time. The index of a vector
// in its row is XORed with swizzle(row), so that two rows x 4 vectors (k), and 4 rows
// of one parity x 2 vectors (v), lie in different banks.
constexpr int kVec = 2;  // numbers per vector
__device__ __forceinline__ int swizzle(int row) { return (row & 6) ^ (row & 1) << 2; }

template <int kDim> __device__ __forceinline__ int place(int row, int vector) {
  return row * kDim + (vector ^ swizzle(row)) * kVec;
}

// Position of a lane in the fragments of ptx/mma_f64.cuh.
__device__ __forceinline__ int lane_g() { return threadIdx.x % kWarpSize / 4; }
__device__ __forceinline__ int lane_t() { return threadIdx.x % 4; }

// c += a b of 16 rows, 8 columns and 16 slots.
__device__ __forceinline__ void add_product(double (&c)[4], const double (&a)[8],
                                            const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::mma_m16n8k16(c, a, b);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ptx::mma_m8n8k4(c[2 * h], c[2 * h + 1], a[2 * i + h], b[i]);
    }
  }
#endif
}

__device__ __forceinline__ double2 load2(const double* x) {
  return *reinterpret_cast<const double2*>(x);
}

template <bool kValue> struct flag_t {
  static constexpr bool value = kValue;
};

// Whether rows end inside of a tile or begin between 16-byte vectors.
#ifdef PARTIAL_ROWS
constexpr bool kPartialRows = true;
#else
constexpr bool kPartialRows = false;
#endif

// Starts copies of kNumbers neighbouring numbers by each of kLanes lanes, kStep rows at
// a time; `x` is the first row of this lane, and `num_left` rows are left from it on.
template <int kRows, int kDim, int kCols, int kNumbers, int kLanes, int kStep>
__device__ __forceinline__ void copy_partial_rows(unsigned to, const double* x,
                                                  index_t stride, int first_row,
                                                  int lane, int num_left, int dim) {
  x += lane * kNumbers;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kStep, x += kStep * stride) {
    if (kRows % kStep != 0 && row + first_row >= kRows) break;
    const int row_dim = row < num_left ? dim : 0;
#pragma unroll 4
    for (int n = 0; n < kCols / kNumbers / kLanes; ++n) {
      const int col = (n * kLanes + lane) * kNumbers;
      const int at = place<kDim>(row + first_row, col / kVec) + col % kVec;
      ptx::copy_or_fill<8 * kNumbers>(to + at * 8, x + n * kLanes * kNumbers,
                                      8 * min(max(row_dim - col, 0), kNumbers));
    }
  }
}

// Starts copies of the first kCols columns of kRows rows to shared memory, in which
// rows are kDim long; rows from `num_rows` and columns from `dim` on are zeros. Whole
// tiles, or partial rows, take a fast way, unless the code must be short.
template <int kRows, int kDim, int kCols = kDim, bool kShort = false>
__device__ __forceinline__ void copy_rows(double* smem, const double* x, index_t stride,
                                          index_t num_rows, int dim) {
  constexpr int kVectors = kCols / kVec;
  // A multiple of 8 rows at a time if possible: these have the same swizzle.
  constexpr int kMost = kNumThreads / 8 > 8 ? kNumThreads / 8 : 8;
  constexpr int kLanes = kVectors % 32 == 0 && kMost >= 32   ? 32
                         : kVectors % 16 == 0 && kMost >= 16 ? 16
                                                             : 8;
  constexpr int kStep = kNumThreads / kLanes;  // rows at a time
  unsigned thread = threadIdx.x;
  // Recompute addresses, rather than keep them in registers.
  ptx::launder(thread);
  ptx::launder(stride);
  const int first_row = thread / kLanes, lane = thread % kLanes;
  const int num_left = static_cast<int>(clamp(num_rows, 0, kRows)) - first_row;
  const bool aligned = (reinterpret_cast<unsigned long long>(x) % 16 | stride % 2) == 0;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  if constexpr (kPartialRows && !kShort) {
    x += first_row * stride;
    if (aligned) {
      copy_partial_rows<kRows, kDim, kCols, kVec, kLanes, kStep>(
          to, x, stride, first_row, lane, num_left, dim);
    } else {
      copy_partial_rows<kRows, kDim, kCols, 1, kLanes, kStep>(to, x, stride, first_row,
                                                              lane, num_left, dim);
    }
    return;
  }
  x += first_row * stride + lane * kVec;
  if (!kShort && aligned && num_rows >= kRows && dim >= kCols && kRows % kStep == 0) {
#pragma unroll
    for (int row = 0; row < kRows; row += kStep, x += kStep * stride) {
#pragma unroll
      for (int n = 0; n < kVectors / kLanes; ++n) {
        const unsigned at = to + place<kDim>(row + first_row, n * kLanes + lane) * 8;
        ptx::copy_or_fill<16>(at, x + n * kLanes * kVec, 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = 0; row < kRows; row += kStep, x += kStep * stride) {
    if (kRows % kStep != 0 && row + first_row >= kRows) break;
    const int row_dim = row < num_left ? dim : 0;
#pragma unroll 1
    for (int n = 0; n < kVectors / kLanes; ++n) {
      const int vector = n * kLanes + lane, left = 8 * (row_dim - vector * kVec);
      const unsigned at = to + place<kDim>(row + first_row, vector) * 8;
      if (aligned) {
        ptx::copy_or_fill<16>(at, x + n * kLanes * kVec, min(max(left, 0), 16));
      } else {
        ptx::copy_or_fill<8>(at, x + n * kLanes * kVec, min(max(left, 0), 8));
        ptx::copy_or_fill<8>(at + 8, x + n * kLanes * kVec + 1, left > 8 ? 8 : 0);
      }
    }
  }
}

// Rows owned by a warp, or shared by neighbouring warps, are stored in the order in
// which lanes read them: the fragment a of a step is 4 vectors per lane, each a pair of
// rows g and g + 8; lanes are adjacent.
constexpr int kStepSize = kWarpRows * 16;

template <int kDim, int kNumOwners = 1>
__device__ __forceinline__ void copy_own(double* smem, const double* x, index_t stride,
                                         int num_rows, int dim) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  constexpr int kLanes = kWarpSize * kNumOwners;
  unsigned first = threadIdx.x % kLanes;
  ptx::launder(first);  // as above
#pragma unroll 4
  for (int n = first; n < kWarpRows * kDim; n += kLanes) {
    const int row = n / kDim, col = n % kDim;
    const int slot = col % 16, i = slot / 8 * 2 + slot % 2, t = slot % 8 / 2;
    const int at = col / 16 * kStepSize + i * 2 * kWarpSize + (row % 8 * 4 + t) * 2;
    const bool exists = row < num_rows && col < dim;
    ptx::copy_or_fill<8>(to + (at + row / 8) * 8, x + row * stride + col,
                         exists ? 8 : 0);
  }
}

__device__ __forceinline__ void load_own(double (&a)[8], const double* own_lane,
                                         int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double2 x = load2(own_lane + step * kStepSize + i * 2 * kWarpSize);
    a[2 * i] = x.x;
    a[2 * i + 1] = x.y;
  }
}
