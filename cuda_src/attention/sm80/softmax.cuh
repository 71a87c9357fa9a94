// SPDX-License-Identifier: MIT
// attention_mma: online softmax of a warp's scores, in registers.
#pragma once

#include "attention/sm80/forward.cuh"

// Weights stay below 2^(kShift + kLazyLog2): the reference of a row moves only when a
// score exceeds it by that much. Any reference is mathematically exact, because o, l
// and p share it. Weights that are split into float16 are shifted to the top of its
// range, so that what is cut off is small compared with the largest weight.
constexpr float kLazyLog2 = kSplits ? 1 : 8;
constexpr float kShift = kSplits ? 14 : 0;
constexpr float kLargestWeight = kSplits ? 1 << 14 : 1;  // at the reference

// Beyond this exponent, rounding of a reference alone could push weights out of range.
constexpr float kLargeLog2 = 1 << 20;

// Rows per thread: row 2 m + r is row r * 8 + lane / 4 of tile m.
constexpr int kRows = 2 * kRowTiles;

struct softmax_t {
  float reference[kRows];        // the exponent of 2 that is subtracted
  kept_t l[kRows], rest[kRows];  // sum of the weights, and its rounding error
  float alpha[kRows];            // 2^(old - new reference), valid where raise() says so

  // The reference starts at a finite number, so that -inf minus it needs no guard.
  // Scores below it count as -inf, unless there are no others (large_scores.cuh).
  __device__ __forceinline__ softmax_t() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = -kLargeLog2;
      l[r] = 0;
      rest[r] = 0;
    }
  }
};

// The exponent of 2 of a weight. `to_log2` converts scores to exponents of 2.
__device__ __forceinline__ float exponent(float s, float to_log2, float reference) {
  return fmaf(s, to_log2, -reference);
}

// Raises references where needed, and rescales l. Returns, for all lanes of the warp,
// whether o must be scaled by alpha.
__device__ __forceinline__ bool raise(softmax_t& rows, const scores_frag_t& s,
                                      float to_log2) {
  float largest[kRows];
  bool passes = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    largest[r] = s[r / 2][0][r % 2 * 2];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      largest[r] = fmaxf(largest[r], s[r / 2][n][r % 2 * 2]);
      largest[r] = fmaxf(largest[r], s[r / 2][n][r % 2 * 2 + 1]);
    }
    // Each lane compares its own columns only.
    passes |= exponent(largest[r], to_log2, rows.reference[r]) > kShift + kLazyLog2;
  }
  const bool moves = __any_sync(kFullMask, passes);
  if (moves) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = fmaxf(largest[r], shuffle_xor(largest[r], 1));
      largest[r] = fmaxf(largest[r], shuffle_xor(largest[r], 2));
      // Decided per row, so that its bits do not depend on the other rows of the warp.
      const bool own =
          exponent(largest[r], to_log2, rows.reference[r]) > kShift + kLazyLog2;
      const float next =
          own ? rounded_product(largest[r], to_log2) - kShift : rows.reference[r];
      // inf - inf is NaN: avoid the difference.
      rows.alpha[r] = own ? ptx::ex2_approx_ftz(rows.reference[r] - next) : 1.f;
      rows.reference[r] = next;
      rows.l[r] = rows.l[r] * rows.alpha[r];
      rows.rest[r] = rows.rest[r] * rows.alpha[r];
    }
  }
  return moves;
}

__device__ __forceinline__ void rescale(out_frag_t& o, const softmax_t& rows) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][n][e] *= rows.alpha[2 * m + e / 2];
    }
  }
}

// Turns s into p = exp(s - reference), and adds this thread's columns to l. A tile is
// summed on its own and added with Kahan compensation.
__device__ __forceinline__ void exponentiate(softmax_t& rows, scores_frag_t& s,
                                             float to_log2) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float tile = rows.rest[r];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
        float& x = s[r / 2][n][e];
        x = ptx::ex2_approx_ftz(exponent(x, to_log2, rows.reference[r]));
        tile += x;
      }
    }
    const float sum = rows.l[r] + tile;
    rows.rest[r] = tile - (sum - rows.l[r]);
    rows.l[r] = sum;
  }
}

// --- 16-bit scores without options: weights before the maximum is known -------------

// Weights are computed with the current reference. Only if a thread's sum of a tile
// exceeds this, or is NaN, are they computed again with a new one. A weight is at most
// the sum, so it fits into 16 bits. Needs registers next to s and o: sm_10x spills.
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr bool kWeighsAtOnce = false;
#else
constexpr bool kWeighsAtOnce =
    kWarpsPerRow == 1 && !kSplits && !kHasTerms && kHeadDim <= 64 && kHeadDimV <= 64;
#endif
constexpr float kLargestSum = 4096;

// Turns s into p = exp(s - reference) for tiles [first, last) of 8 columns. `sums` are
// those of this thread's columns, including the earlier rounding error.
__device__ __forceinline__ void weigh(const softmax_t& rows, scores_frag_t& s,
                                      float to_log2, float (&sums)[kRows],
                                      int first = 0, int last = kScoreTiles) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first == 0) sums[r] = rows.rest[r];
#pragma unroll
    for (int n = first; n < last; ++n) {
#pragma unroll
      for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
        float& x = s[r / 2][n][e];
        x = ptx::ex2_approx_ftz(exponent(x, to_log2, rows.reference[r]));
        sums[r] += x;
      }
    }
  }
}

// Adds the sums of a tile to l with Kahan compensation.
__device__ __forceinline__ void add(softmax_t& rows, const float (&sums)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = rows.l[r] + sums[r];
    rows.rest[r] = sums[r] - (sum - rows.l[r]);
    rows.l[r] = sum;
  }
}

__device__ __forceinline__ bool are_small(const float (&sums)[kRows]) {
  bool all = true;
#pragma unroll
  for (int r = 0; r < kRows; ++r) all &= sums[r] <= kLargestSum;
  return all;
}

// The largest of this warp's scores of row r.
__device__ __forceinline__ float largest_of(const scores_frag_t& s, int r) {
  float largest = s[r / 2][0][r % 2 * 2];
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
    largest = fmaxf(largest, s[r / 2][n][r % 2 * 2]);
    largest = fmaxf(largest, s[r / 2][n][r % 2 * 2 + 1]);
  }
  largest = fmaxf(largest, shuffle_xor(largest, 1));
  return fmaxf(largest, shuffle_xor(largest, 2));
}

// Whether one of the threads that share a row has too large a sum.
__device__ __forceinline__ bool has_large_sum(float sum) {
  const unsigned large = __ballot_sync(kFullMask, !(sum <= kLargestSum));
  return (large >> (lanes_t::lane() & ~3) & 15) != 0;
}

// Moves the reference of row r to its largest score, if allowed and needed.
__device__ __forceinline__ void move(softmax_t& rows, int r, float largest, bool may,
                                     float to_log2) {
  // Decided per row, so that its bits do not depend on the other rows of the warp.
  const bool own = may && exponent(largest, to_log2, rows.reference[r]) > kLazyLog2;
  const float next = own ? rounded_product(largest, to_log2) : rows.reference[r];
  // inf - inf is NaN: avoid the difference.
  rows.alpha[r] = own ? ptx::ex2_approx_ftz(rows.reference[r] - next) : 1.f;
  rows.reference[r] = next;
  rows.l[r] = rows.l[r] * rows.alpha[r];
  rows.rest[r] = rows.rest[r] * rows.alpha[r];
}

// Moves the reference of each row with too large a sum, as raise() does.
__device__ __forceinline__ void raise_where(softmax_t& rows, const scores_frag_t& s,
                                            float to_log2, const float (&sums)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    move(rows, r, largest_of(s, r), has_large_sum(sums[r]), to_log2);
  }
}
