// SPDX-License-Identifier: MIT
// Tiles without tensor cores: the threads of a block form 16 columns, each with kRows x
// kCols numbers of a kBlockM x kBlockN tile; and products of tiles in shared memory.
#pragma once

#include "attention/score/score.cuh"
#include "common/reduce.cuh"

#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(MIN_BLOCKS)
#error "BLOCK_M, BLOCK_N and MIN_BLOCKS come from the host"
#endif
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr int kMinBlocks = MIN_BLOCKS;  // blocks per multiprocessor; limits registers

constexpr int kColThreads = 16;
constexpr int kRowThreads = kNumThreads / kColThreads;
constexpr int kRows = kBlockM / kRowThreads;
constexpr int kCols = kBlockN / kColThreads;
static_assert(kRows * kRowThreads == kBlockM && kCols * kColThreads == kBlockN);

// Shared memory is read in 16-byte vectors. A row is an odd number of vectors long, so
// that consecutive rows lie in different banks.
constexpr int kVec = 16 / sizeof(accum_t);
__device__ constexpr int padded(int n) { return (n / kVec | 1) * kVec; }

// Adjacent columns of a sum over kDim columns that a thread owns.
__device__ constexpr int wide_of(int dim) {
  return dim % (kColThreads * kVec) == 0 ? kVec : dim % (kColThreads * 2) == 0 ? 2 : 1;
}

// Row r is row r * kRowThreads + thread_row, column c is c * kColThreads + thread_col.
using tile_t = accum_t[kRows][kCols];

template <typename T, int kCount> struct alignas(sizeof(T) * kCount) vec_t {
  T x[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ vec_t<T, kCount> load(const T* x) {
  return *reinterpret_cast<const vec_t<T, kCount>*>(x);
}

__device__ __forceinline__ int thread_col() { return threadIdx.x % kColThreads; }
__device__ __forceinline__ int thread_row() { return threadIdx.x / kColThreads; }

// Loads rows [0, num_rows) of a matrix (.., dim) into kCount x kDim numbers of shared
// memory, zero-padded; kUnroll loads at a time. Returns 0, or NaN if one is not finite.
template <int kCount, int kDim, int kStride, int kUnroll, typename Row, typename Column>
__device__ __forceinline__ accum_t load_rows(accum_t* smem, const elem_t* x,
                                             index_t row_stride, Row num_rows,
                                             Column dim) {
  constexpr int kElems = 16 / sizeof(elem_t);  // per 16-byte load
  accum_t nonfinite = 0;
  const bool aligned = (reinterpret_cast<unsigned long long>(x) % 16 |
                        row_stride % kElems | dim % kElems) == 0;
  if (aligned) {
    constexpr int kVectors = kDim / kElems;
#pragma unroll(kUnroll)
    for (int n = threadIdx.x; n < kCount * kVectors; n += kNumThreads) {
      const int row = n / kVectors, col = n % kVectors * kElems;
      vec_t<elem_t, kElems> from = {};
      if (row < num_rows && col < dim) from = load<kElems>(x + row * row_stride + col);
      accum_t* to_row = smem + row * kStride + col;
#pragma unroll
      for (int e = 0; e < kElems; e += kVec) {
        vec_t<accum_t, kVec> part;
#pragma unroll
        for (int f = 0; f < kVec; ++f) {
          part.x[f] = to<accum_t>(from.x[e + f]);
          nonfinite = fma_of(part.x[f], accum_t(0), nonfinite);
        }
        *reinterpret_cast<vec_t<accum_t, kVec>*>(to_row + e) = part;
      }
    }
  } else {
    for (int n = threadIdx.x; n < kCount * kDim; n += kNumThreads) {
      const int row = n / kDim, col = n % kDim;
      accum_t value = 0;
      if (row < num_rows && col < dim) value = to<accum_t>(x[row * row_stride + col]);
      nonfinite = fma_of(value, accum_t(0), nonfinite);
      smem[row * kStride + col] = value;
    }
  }
  return nonfinite;
}

// sum += own other^T over columns [first, last), starting at the thread's first rows.
template <int kStride>
__device__ __forceinline__ void add_products(tile_t& sum, const accum_t* own,
                                             const accum_t* other, int first,
                                             int last) {
#pragma unroll 1
  for (int d = first; d < last; d += kVec) {
    vec_t<accum_t, kVec> other_part[kCols];
#pragma unroll
    for (int c = 0; c < kCols; ++c)
      other_part[c] = load<kVec>(other + c * kColThreads * kStride + d);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto own_part = load<kVec>(own + r * kRowThreads * kStride + d);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
          sum[r][c] = fma_of(own_part.x[e], other_part[c].x[e], sum[r][c]);
        }
      }
    }
  }
}

// sums += w other, summing the products of a tile on their own first. kExact skips
// hidden pairs one by one, for tiles with infinities or NaN; otherwise w = 0 suffices.
template <bool kExact, int kStrideW, int kStride, int kWide, int kCount>
__device__ __forceinline__ void accumulate_tile(accum_t (&sums)[kRows][kCount],
                                                const accum_t* w,
                                                const accum_t* other) {
  w += thread_row() * kStrideW;
  other += thread_col() * kWide;
#pragma unroll
  for (int span = 0; span < kCount / kWide; ++span) {
    accum_t sum[kRows][kWide] = {};
#pragma unroll(kExact ? 1 : 2)
    for (int j = 0; j < kBlockN; j += kVec) {
      vec_t<accum_t, kWide> other_part[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        other_part[e] =
            load<kWide>(other + (j + e) * kStride + span * kColThreads * kWide);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const auto w_part = load<kVec>(w + r * kRowThreads * kStrideW + j);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          if (kExact && is_unseen(w_part.x[e])) continue;
#pragma unroll
          for (int k = 0; k < kWide; ++k) {
            sum[r][k] = fma_of(w_part.x[e], other_part[e].x[k], sum[r][k]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kWide; ++k) sums[r][span * kWide + k] += sum[r][k];
    }
  }
}
