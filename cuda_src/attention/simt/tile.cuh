// SPDX-License-Identifier: MIT
// Tiles of the gradient kernels. A block owns kBlockM rows of one kind, queries or
// keys, and loops over kBlockN rows at a time of the other kind.
//
// Shared  own    kBlockM x kChunk   a tile of the owned rows; with kSingle two,
//                                   loaded once per entry
//         other  kBlockN x kChunk   a tile of the rows looped over
//         w      kBlockM x kBlockN  P or dS
// The threads form kRowThreads rows of kColThreads; a thread owns kRows rows of a tile
// of scores (every kRowThreads-th) and kCols columns (every kColThreads-th).
//
// A head of up to kChunk columns is one chunk (kSingle). A longer one passes through
// shared memory in chunks, and a block computes one chunk of columns of its gradient.
// With SUMS_APART (heads above 256 columns) scores are summed in parts of 64 columns,
// because the rounding error of one long sum grows like the root of its length.
#pragma once

#include "attention/simt/long_sums.cuh"
#include "attention/simt/gradients.cuh"
#include "attention/simt/products.cuh"
#ifdef REPAIRS
#include "ptx/griddepcontrol.cuh"
#endif

#if !defined(CHUNK) || !defined(SINGLE)
#error "CHUNK and SINGLE come from the host"
#endif
constexpr int kChunk = CHUNK;
constexpr bool kSingle = SINGLE;
constexpr bool kSumsApart = IS_GIVEN(SUMS_APART);
constexpr int kColumnsApart = 64;

// A fallback follows kernels that return NaN if hidden numbers are not finite. If its
// flag is set, its few blocks do the work of a whole grid.
#ifdef REPAIRS
constexpr bool kRepairs = true;
#define REPAIR_PARAMETERS const int* __restrict__ is_asked,
#define REPAIR_IS_ASKED is_asked_to_repair(is_asked)
__device__ __forceinline__ bool is_asked_to_repair(const int* is_asked) {
  ptx::griddepcontrol_launch_dependents();
  return *ptx::griddepcontrol_wait(is_asked) != 0;
}
#else
constexpr bool kRepairs = false;
#define REPAIR_PARAMETERS
#define REPAIR_IS_ASKED true
#endif

constexpr int kStride = padded(kChunk), kStrideW = padded(kBlockN);

// A thread's columns of a gradient: kSpans groups of kWide adjacent ones.
constexpr int kWide = wide_of(kChunk);
constexpr int kSpans = kChunk / (kColThreads * kWide);
static_assert(kSpans * kColThreads * kWide == kChunk && kChunk % kVec == 0);

using sums_t = accum_t[kRows][kSpans * kWide];

__device__ __forceinline__ int own_row(int r) { return r * kRowThreads + thread_row(); }
__device__ __forceinline__ int other_row(int c) {
  return c * kColThreads + thread_col();
}

// A column index.
#ifdef LONG_AXES
using column_t = index_t;
#else
using column_t = int;
#endif

// Some rows of a matrix in global memory; num_rows may exceed a tile.
struct rows_t {
  const elem_t* x;
  index_t stride;
  int num_rows;
  column_t dim;

  __device__ rows_t(const elem_t* x, index_t stride, index_t num_rows, index_t dim)
      : x(x),
        stride(stride),
        num_rows(static_cast<int>(clamp(num_rows, 0, 1 << 30))),
        dim(static_cast<column_t>(dim)) {}
};

// Loads kCount rows of the chunk of columns at c0, padded with zeros. Returns 0, or NaN
// if a number was not finite.
template <int kCount>
__device__ __forceinline__ accum_t load_rows(accum_t* smem, const rows_t& rows,
                                             column_t c0) {
  return load_rows<kCount, kChunk, kStride, 2>(smem, rows.x + c0, rows.stride,
                                               rows.num_rows, rows.dim - c0);
}

// s += own other^T over `num_columns` columns of a chunk.
__device__ __forceinline__ void dot_chunk(tile_t& s, const accum_t* own,
                                          const accum_t* other, int num_columns) {
  add_products<kStride>(s, own + thread_row() * kStride, other + thread_col() * kStride,
                        0, num_columns);
}

// The same, summed in parts of kColumnsApart columns.
__device__ __forceinline__ void dot_chunk_apart(tile_t& s, const accum_t* own,
                                                const accum_t* other, int num_columns) {
#pragma unroll 1
  for (int first = 0; first < num_columns; first += kColumnsApart) {
    const int rest = num_columns - first;
    tile_t sum = {};
    dot_chunk(sum, own + first, other + first,
              rest < kColumnsApart ? rest : kColumnsApart);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) s[r][c] += sum[r][c];
    }
  }
}

// s = own other^T; smem_own already holds the owned rows if kOwnIsLoaded. Returns 0, or
// NaN if a number of `other` was not finite. The last chunk of `other` stays in
// smem_other, which threads may still be reading.
template <bool kOwnIsLoaded>
__device__ __forceinline__ accum_t dot(tile_t& s, const rows_t& own, accum_t* smem_own,
                                       const rows_t& other, accum_t* smem_other) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) s[r][c] = 0;
  }
  accum_t nonfinite = 0;
  for (column_t c0 = 0; c0 < own.dim; c0 += kChunk) {
    __syncthreads();  // all threads have read the old contents
    if (!kOwnIsLoaded) load_rows<kBlockM>(smem_own, own, c0);
    nonfinite += load_rows<kBlockN>(smem_other, other, c0);
    __syncthreads();  // the tiles are complete
    if constexpr (kSumsApart) {
      const int rest = own.dim - c0 < kChunk ? own.dim - c0 : kChunk;
      dot_chunk_apart(s, smem_own, smem_other, rest);
    } else {
      dot_chunk(s, smem_own, smem_other, own.dim - c0 < kChunk ? own.dim - c0 : kChunk);
    }
  }
  return nonfinite;
}

// Stores a tile of P or dS, for the threads of its rows.
__device__ __forceinline__ void store_tile(accum_t* w, const tile_t& tile) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      w[own_row(r) * kStrideW + other_row(c)] = tile[r][c];
    }
  }
}

// sums += w other for a chunk of columns of `other` from c0 on, which smem_other
// already holds if kOtherIsLoaded. `nonfinite` is NaN if it has a nonfinite number.
template <bool kOtherIsLoaded>
__device__ __forceinline__ void accumulate(sums_t& sums, const accum_t* w,
                                           const rows_t& other, column_t c0,
                                           accum_t* smem_other, accum_t nonfinite) {
  if (!kOtherIsLoaded) {
    __syncthreads();  // all threads have read the old tile
    nonfinite = c0 < other.dim ? load_rows<kBlockN>(smem_other, other, c0) : accum_t(0);
  }
  // w and the tile are complete; vote on whether it contains an infinity or NaN.
  const bool any_nonfinite = __syncthreads_or(nonfinite != 0);
  if (c0 >= other.dim) return;
  if (any_nonfinite) {
    accumulate_tile<true, kStrideW, kStride, kWide>(sums, w, smem_other);
  } else {
    accumulate_tile<false, kStrideW, kStride, kWide>(sums, w, smem_other);
  }
}

// Turns a raw score q.k and dP into P and dS, both -0 for hidden keys. With kOfBias, dS
// is not multiplied by the derivative of the score.
template <bool kOfBias = false>
__device__ __forceinline__ void differentiate(accum_t& s, accum_t& dp, bool in_bounds,
                                              const scores_t& scores, index_t i,
                                              index_t j, accum_t lse, accum_t delta) {
  accum_t derivative = 1;
  if (in_bounds) s = scores.with_derivative(s, i, j, derivative);
  if (!in_bounds || s == -infinity<accum_t>()) {
    s = dp = accum_t(-0.0);
    return;
  }
  s = exp_of(s - lse);
  dp = s * (dp - delta);
  if (kHasDerivative && !kOfBias) dp *= derivative;
}

// Whether a run of a two-level sum ends before row `next`; the last run ends after the
// loop.
__device__ __forceinline__ bool run_ends_before(index_t next, index_t last) {
  return kTwoLevelSums && (next % (kRunTiles * kBlockN) == 0 || next >= last);
}

// Stores a chunk of columns of a gradient, from c0 on.
__device__ __forceinline__ void store_sums(grad_t* gradient, index_t row_stride,
                                           index_t col_stride, const sums_t& sums,
                                           accum_t factor, index_t num_rows,
                                           index_t dim, index_t c0) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (own_row(r) >= num_rows) continue;
#pragma unroll
    for (int n = 0; n < kSpans * kWide; ++n) {
      const index_t column =
          c0 + (n / kWide * kColThreads + thread_col()) * kWide + n % kWide;
      if (column < dim) {
        gradient[own_row(r) * row_stride + column * col_stride] =
            to<grad_t>(sums[r][n] * factor);
      }
    }
  }
}
