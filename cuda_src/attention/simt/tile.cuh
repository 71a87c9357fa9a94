// SPDX-License-Identifier: MIT
// Tiles of the gradient kernels. A block owns kBlockM rows of one kind, queries or
// keys, and walks over kBlockN rows at a time of the other kind.
//
// Shared  own    kBlockM x kChunk   a tile of the owned rows; two with kSingle, loaded
//                                   once an entry
//         other  kBlockN x kChunk   a tile of the rows walked over
//         w      kBlockM x kBlockN  P or dS
// Threads stand in kRowThreads rows of kColThreads; one owns kRows rows of a tile of
// scores (every kRowThreads-th) and kCols columns (every kColThreads-th).
//
// A head of up to kChunk columns is one chunk (kSingle). A longer one goes through
// shared memory in chunks, and a block makes one chunk of columns of its gradient. With
// SUMS_APART (heads above 256 columns) a score is summed up from parts of 64 columns:
// the roundings of one long sum grow with the root of its columns.
#pragma once

#include "attention/simt/long_sums.cuh"
#include "attention/simt/gradients.cuh"
#include "common/reduce.cuh"
#ifdef REPAIRS
#include "ptx/griddepcontrol.cuh"
#endif

#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(CHUNK) || !defined(SINGLE) || \
    !defined(MIN_BLOCKS)
#error "BLOCK_M, BLOCK_N, CHUNK, SINGLE and MIN_BLOCKS come from the host"
#endif
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kChunk = CHUNK;
constexpr int kMinBlocks = MIN_BLOCKS;  // of a multiprocessor at once: caps registers
constexpr bool kSingle = SINGLE;
#ifdef SUMS_APART
constexpr bool kSumsApart = true;
#else
constexpr bool kSumsApart = false;
#endif
constexpr int kColumnsApart = 64;

// A repair follows kernels that give NaN where something that is not seen is not
// finite. Its few blocks go through all that blocks of a whole grid would do, if they
// are asked.
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

constexpr int kColThreads = 16;
constexpr int kRowThreads = kNumThreads / kColThreads;
constexpr int kRows = kBlockM / kRowThreads;
constexpr int kCols = kBlockN / kColThreads;
static_assert(kRows * kRowThreads == kBlockM && kCols * kColThreads == kBlockN);

// Shared memory is read 16 bytes at a time. The stride of a row is an odd number of
// such vectors, so that rows side by side lie in different banks.
constexpr int kVec = 16 / sizeof(accum_t);
__device__ constexpr int padded(int n) { return (n / kVec | 1) * kVec; }
constexpr int kStride = padded(kChunk), kStrideW = padded(kBlockN);

// A gradient's columns of a thread: kSpans times kWide side by side.
constexpr int kWide = kChunk % (kColThreads * kVec) == 0 ? kVec
                      : kChunk % (kColThreads * 2) == 0  ? 2
                                                         : 1;
constexpr int kSpans = kChunk / (kColThreads * kWide);
static_assert(kSpans * kColThreads * kWide == kChunk && kChunk % kVec == 0);

using tile_t = accum_t[kRows][kCols];
using sums_t = accum_t[kRows][kSpans * kWide];

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) vec_t {
  T x[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ vec_t<T, kCount> load(const T* x) {
  return *reinterpret_cast<const vec_t<T, kCount>*>(x);
}

__device__ __forceinline__ int thread_col() { return threadIdx.x % kColThreads; }
__device__ __forceinline__ int thread_row() { return threadIdx.x / kColThreads; }
__device__ __forceinline__ int own_row(int r) { return r * kRowThreads + thread_row(); }
__device__ __forceinline__ int other_row(int c) {
  return c * kColThreads + thread_col();
}

// A column, and the number of them.
#ifdef LONG_AXES
using column_t = index_t;
#else
using column_t = int;
#endif

// Some rows of a matrix in global memory; num_rows may be more than a tile has.
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

__device__ __forceinline__ index_t smaller(index_t a, index_t b) {
  return a < b ? a : b;
}

// Loads kCount rows of the chunk of columns that starts at c0, zeros where there is
// nothing. Returns 0, or NaN if a number was not finite.
template <int kCount>
__device__ __forceinline__ accum_t load_rows(accum_t* smem,
                                             const rows_t& rows,
                                             column_t c0) {
  constexpr int kElems = 16 / sizeof(elem_t);  // of a 16-byte load
  const elem_t* const x = rows.x + c0;
  const column_t dim = rows.dim - c0;
  accum_t nonfinite = 0;
  const bool aligned = (reinterpret_cast<unsigned long long>(x) % 16 |
                        rows.stride % kElems | dim % kElems) == 0;
  if (aligned) {
    constexpr int kVectors = kChunk / kElems;
#pragma unroll 2
    for (int n = threadIdx.x; n < kCount * kVectors; n += kNumThreads) {
      const int row = n / kVectors, col = n % kVectors * kElems;
      vec_t<elem_t, kElems> from = {};
      if (row < rows.num_rows && col < dim)
        from = load<kElems>(x + row * rows.stride + col);
#pragma unroll
      for (int e = 0; e < kElems; e += kVec) {
        vec_t<accum_t, kVec> part;
#pragma unroll
        for (int f = 0; f < kVec; ++f) {
          part.x[f] = to<accum_t>(from.x[e + f]);
          nonfinite = fma_of(part.x[f], accum_t(0), nonfinite);
        }
        *reinterpret_cast<vec_t<accum_t, kVec>*>(smem + row * kStride + col + e) = part;
      }
    }
  } else {
    for (int n = threadIdx.x; n < kCount * kChunk; n += kNumThreads) {
      const int row = n / kChunk, col = n % kChunk;
      accum_t value = 0;
      if (row < rows.num_rows && col < dim)
        value = to<accum_t>(x[row * rows.stride + col]);
      nonfinite = fma_of(value, accum_t(0), nonfinite);
      smem[row * kStride + col] = value;
    }
  }
  return nonfinite;
}

// s += own other^T over `num_columns` columns of a chunk.
__device__ __forceinline__ void dot_chunk(tile_t& s,
                                          const accum_t* own,
                                          const accum_t* other,
                                          int num_columns) {
  own += thread_row() * kStride;
  other += thread_col() * kStride;
#pragma unroll 1
  for (int d = 0; d < num_columns; d += kVec) {
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
          s[r][c] = fma_of(own_part.x[e], other_part[c].x[e], s[r][c]);
        }
      }
    }
  }
}

// The same, parts of kColumnsApart columns apart.
__device__ __forceinline__ void dot_chunk_apart(tile_t& s,
                                                const accum_t* own,
                                                const accum_t* other,
                                                int num_columns) {
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

// s = own other^T, where smem_own already holds the owned rows if kOwnIsLoaded. Returns
// 0, or NaN if a number of `other` was not finite; the last chunk of it stays in
// smem_other, which all threads may still be reading.
template <bool kOwnIsLoaded>
__device__ __forceinline__ accum_t dot(tile_t& s,
                                       const rows_t& own,
                                       accum_t* smem_own,
                                       const rows_t& other,
                                       accum_t* smem_other) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) s[r][c] = 0;
  }
  accum_t nonfinite = 0;
  for (column_t c0 = 0; c0 < own.dim; c0 += kChunk) {
    __syncthreads();  // all have read what stands in shared memory
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

// sums += w other. kExact leaves out the pairs that do not see each other one by one,
// for tiles that hold an infinity or NaN; elsewhere w = 0 does it.
template <bool kExact>
__device__ __forceinline__ void accumulate_tile(sums_t& sums,
                                                const accum_t* w,
                                                const accum_t* other) {
  w += thread_row() * kStrideW;
  other += thread_col() * kWide;
#pragma unroll
  for (int span = 0; span < kSpans; ++span) {
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

// sums += w other, for a chunk of columns of `other` from c0 on that smem_other holds
// if kOtherIsLoaded. `nonfinite` is NaN if that holds a number that is not finite.
template <bool kOtherIsLoaded>
__device__ __forceinline__ void accumulate(sums_t& sums,
                                           const accum_t* w,
                                           const rows_t& other,
                                           column_t c0,
                                           accum_t* smem_other,
                                           accum_t nonfinite) {
  if (!kOtherIsLoaded) {
    __syncthreads();  // all have read the tile that stands there
    nonfinite = c0 < other.dim ? load_rows<kBlockN>(smem_other, other, c0) : accum_t(0);
  }
  // w and the tile are complete; a vote whether it holds an infinity or NaN.
  const bool any_nonfinite = __syncthreads_or(nonfinite != 0);
  if (c0 >= other.dim) return;
  if (any_nonfinite) {
    accumulate_tile<true>(sums, w, smem_other);
  } else {
    accumulate_tile<false>(sums, w, smem_other);
  }
}

// A raw score q.k and dP become P and dS, both -0 where the query does not see the key.
// With kOfBias dS is not yet multiplied by the derivative of the score.
template <bool kOfBias = false>
__device__ __forceinline__ void differentiate(accum_t& s,
                                              accum_t& dp,
                                              bool in_bounds,
                                              const scores_t& scores,
                                              index_t i,
                                              index_t j,
                                              accum_t lse,
                                              accum_t delta) {
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

// Whether a run of sums ends before row `next` of those walked over: the last one ends
// behind them.
__device__ __forceinline__ bool run_ends_before(index_t next, index_t last) {
  return kTwoLevelSums && (next % (kRunTiles * kBlockN) == 0 || next >= last);
}

// Writes a gradient's chunk of columns from c0 on.
__device__ __forceinline__ void store_sums(grad_t* gradient,
                                           index_t row_stride,
                                           index_t col_stride,
                                           const sums_t& sums,
                                           accum_t factor,
                                           index_t num_rows,
                                           index_t dim,
                                           index_t c0) {
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
