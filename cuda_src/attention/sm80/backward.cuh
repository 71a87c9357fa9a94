// SPDX-License-Identifier: MIT
// Shared by the gradient kernels by mma.sync: tiles, factors, P and dS from products,
// and the arrays that one kernel leaves for the next.
//
// stats  (entries, blocks of queries, 2, kBlockM)  float: lse in log2, and delta
// sums   (slots, blocks of queries, kBlockM * kHeadDim)  float: dq before scaling, in
//        register order: by tile of 16 x 8, the four numbers of each lane. A slot is a
//        head of dq; batch entries that share q add to the same slot
#pragma once

#include "attention/score/mask_bits.cuh"
#include "attention/score/shown_tiles.cuh"

#include "attention/sm80/tile.cuh"
#include "attention/product_factors.cuh"
#include "attention/simt/gradients.cuh"

#if !defined(HEAD_DIM) || !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(MIN_BLOCKS)
#error "HEAD_DIM, BLOCK_M, BLOCK_N and MIN_BLOCKS come from the host"
#endif

// Head dimension of q, k, v and dO rounded up; zeros pad.
constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;  // queries and keys of a tile
constexpr int kMinBlocks = MIN_BLOCKS;
constexpr int kNumWarps = kNumThreads / kWarpSize;
static_assert(kHeadDim % 64 == 0 && kBlockM % 32 == 0 && kBlockN % 16 == 0);

// Whether scores are finished one by one before the exponential, or it scales them.
constexpr bool kHasTerms = kScaleScores || kChangesScores;
// Whether fully visible tiles get a loop of their own; it needs registers.
constexpr bool kHasTwoWays = !kHasTerms && kHeadDim <= 128;
// The mask comes as bits, and scores know nothing of it.
constexpr bool kMaskBits = IS_GIVEN(MASK_BITS);
static_assert(!kMaskBits || !kChangesScores);

// What the kernels of a call report to later ones. Starts as zeros.
struct found_t {
  int nonfinite;        // nonzero: a gradient is not finite, or overflows elem_t
  unsigned largest;     // max |dO|, as the bits of a float
  int still_nonfinite;  // the same after scrubbing (backward_rescan.cuh)
  int unused;
};

// Which pairs see each other by position: as mask_bounds_t for the tile of query 0.
struct seen_t {
  int low, high, num_queries, num_keys;

  __device__ __forceinline__ explicit seen_t(const mask_bounds_t& bounds)
      : low(bounds.low),
        high(bounds.high),
        num_queries(bounds.num_queries),
        num_keys(bounds.num_keys) {}
  // The tile of query i0 and key j0, which counts from the same key.
  __device__ __forceinline__ mask_bounds_t at(int i0, int j0) const {
    return {low + i0 - j0, high + i0 - j0, num_queries - i0, num_keys - j0};
  }
};

// Turns q.k and dP into P and dS, both times their factors, and both 0 where `sees` is
// false. `to_log2` converts products to exponents of 2.
struct differentiate_t {
  float to_log2, factor;

  __device__ __forceinline__ explicit differentiate_t(const params_t& params,
                                                      const found_t* found)
      : to_log2(static_cast<float>((kHasTerms ? 1.0 : params.scale) * kLog2e)),
        factor(factor_of(found)) {}

  // P, and the derivative of the score with respect to scale * q.k. With kShown the
  // mask function is known to show the key.
  template <bool kShown = false>
  __device__ __forceinline__ float weigh(float s, bool sees, const scores_t& scores,
                                         index_t i, index_t j, float lse,
                                         float& derivative) const {
    if constexpr (kHasTerms) {
      if (sees) s = scores.with_derivative<kShown>(s, i, j, derivative);
      sees = sees && s != -infinity<float>();
    }
    const float exponent = fmaf(s, to_log2, -lse);
    return ptx::ex2_approx_ftz(sees ? exponent : -infinity<float>());
  }

  template <bool kShown = false>
  __device__ __forceinline__ void operator()(float& s, float& dp, bool sees,
                                             const scores_t& scores, index_t i,
                                             index_t j, float lse, float delta) const {
    accum_t derivative = 1;
    s = weigh<kShown>(s, sees, scores, i, j, lse, derivative);
    float weight = s;
    if constexpr (kNarrow<elem_t>) weight *= factor;
    if constexpr (kHasDerivative) weight *= derivative;
    dp = weight * (dp - delta);
  }
};

// --- products of tiles ---------------------------------------------------------------

// kRows x kCols accumulators of 16 x 8. Number e of one is in row e / 2 * 8 + lane / 4
// and column lane % 4 * 2 + e % 2.
template <int kRows, int kCols> using frag_t = float[kRows][kCols][4];

template <int kRows, int kCols>
__device__ __forceinline__ void clear(float (&x)[kRows][kCols][4]) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
    }
  }
}

// Recomputed at each use, with all that depends on it: the addresses of all tiles would
// otherwise occupy registers throughout.
__device__ __forceinline__ int thread_index() {
  unsigned index = threadIdx.x;
  ptx::launder(index);
  return static_cast<int>(index);
}
__device__ __forceinline__ int lane_index() { return thread_index() % kWarpSize; }
__device__ __forceinline__ int warp_index() { return thread_index() / kWarpSize; }

// A lane's base addresses in a tile, for rows from `row` on and columns from 8 `chunk`
// on. left: the A operand. right: the B operand, if its rows are the columns of the
// result. summed: the B operand, if its rows are summed over. left_trans: the A
// operand, if its rows are summed over.
template <int kDim>
__device__ __forceinline__ tile_t<kDim> left(unsigned tile, int row, int chunk = 0) {
  const int lane = lane_index();
  return {tile, row + lane % 16, chunk + lane / 16};
}
template <int kDim>
__device__ __forceinline__ tile_t<kDim> right(unsigned tile, int row, int chunk = 0) {
  const int lane = lane_index();
  return {tile, row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2};
}
template <int kDim>
__device__ __forceinline__ tile_t<kDim> summed(unsigned tile, int row, int chunk = 0) {
  return left<kDim>(tile, row, chunk);
}
template <int kDim>
__device__ __forceinline__ tile_t<kDim> left_trans(unsigned tile, int row,
                                                   int chunk = 0) {
  return right<kDim>(tile, row, chunk);
}
// The address where a lane stores the first number of an accumulator's row.
template <int kDim>
__device__ __forceinline__ tile_t<kDim> stored(unsigned tile, int row, int chunk = 0) {
  return {tile, row + lane_index() / 4, chunk};
}

// s = a b^T, over kDim columns.
template <int kDim, int kRows, int kCols>
__device__ __forceinline__ void multiply_scores(float (&s)[kRows][kCols][4],
                                                const tile_t<kDim>& a,
                                                const tile_t<kDim>& b) {
  static_assert(kCols % 2 == 0);
  clear(s);
#pragma unroll(kDim <= 128 ? kDim / 16 : kHasTerms ? 1 : 4)
  for (int step = 0; step < kDim / 16; ++step) {
    unsigned x[kRows][4];
#pragma unroll
    for (int m = 0; m < kRows; ++m) ptx::ldmatrix_x4(x[m], a.at(16 * m, 2 * step));
#pragma unroll
    for (int n = 0; n < kCols; n += 2) {
      unsigned y[4];
      ptx::ldmatrix_x4(y, b.at(8 * n, 2 * step));
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        pair16_t::mma(s[m][n], x[m], y[0], y[1]);
        pair16_t::mma(s[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

// sums += a b over kSummed rows of b; `load_a(x, step)` loads 16 columns of a.
template <int kSummed, int kDim, int kRows, int kCols, typename LoadA>
__device__ __forceinline__ void multiply_sums(float (&sums)[kRows][kCols][4],
                                              LoadA load_a, const tile_t<kDim>& b) {
  static_assert(kCols % 2 == 0);
#pragma unroll
  for (int step = 0; step < kSummed / 16; ++step) {
    unsigned x[kRows][4];
    load_a(x, step);
#pragma unroll
    for (int n = 0; n < kCols; n += 2) {
      unsigned y[4];
      ptx::ldmatrix_x4_trans(y, b.at(16 * step, n));
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        pair16_t::mma(sums[m][n], x[m], y[0], y[1]);
        pair16_t::mma(sums[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

// Accumulators of two adjacent tiles, as 16 columns of an A operand.
template <int kRows, int kCols>
__device__ __forceinline__ void as_operand(unsigned (&x)[kRows][4],
                                           const float (&s)[kRows][kCols][4],
                                           int step) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float (&tile)[4] = s[m][2 * step + n / 2];
      x[m][n] = pair16_t::from(tile[n % 2 * 2], tile[n % 2 * 2 + 1]);
    }
  }
}

// Stores sums * factor to rows [0, num_rows) and columns [0, dim) of a gradient.
// `row_0` and `column_0` are this warp's. Returns NaN if a number is not finite, or
// does not fit into 16 bits, else 0.
template <int kRows, int kCols>
__device__ __forceinline__ float store_sums(grad_t* gradient, index_t row_step,
                                            index_t col_step,
                                            const float (&sums)[kRows][kCols][4],
                                            float factor, int row_0, int column_0,
                                            int num_rows, int dim) {
  float nonfinite = 0;
  const int lane = lane_index();
  const bool as_pairs =
      col_step == 1 && row_step % 2 == 0 &&
      reinterpret_cast<unsigned long long>(gradient) % (2 * sizeof(grad_t)) == 0;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_0 + 16 * m + 8 * r + lane / 4;
      if (row >= num_rows) continue;
      grad_t* const target = gradient + row * row_step;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        const int column = column_0 + 8 * n + lane % 4 * 2;
        const float x = sums[m][n][2 * r] * factor, y = sums[m][n][2 * r + 1] * factor;
        nonfinite =
            fmaf(sums[m][n][2 * r], 0, fmaf(sums[m][n][2 * r + 1], 0, nonfinite));
        if (as_pairs && column + 1 < dim) {
          if constexpr (sizeof(grad_t) == 2) {
            *reinterpret_cast<unsigned*>(target + column) = pair16_t::from(x, y);
          } else {
            *reinterpret_cast<float2*>(target + column) = make_float2(x, y);
          }
        } else {
          if (column < dim) target[column * col_step] = to<grad_t>(x);
          if (column + 1 < dim) target[(column + 1) * col_step] = to<grad_t>(y);
        }
      }
    }
  }
  return nonfinite;
}
