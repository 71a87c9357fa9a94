// SPDX-License-Identifier: MIT
// attention_mma: rows with scores too large for the main loop.
//
// An exponent is s c - m, where m = round(largest s * c) and c is a factor. Beyond
// kLargeLog2, the rounding of m alone pushes all weights out of range. A block that
// ends with such a row starts over. In the second pass the row's scores are replaced by
// differences to the largest one so far, before any scaling, and its reference stays
// fixed; all other rows keep every bit.
#pragma once

#include "attention/sm80/shared_rows.cuh"

// State for the rows of a thread; on the stack, for lack of registers in the loop.
struct centers_t {
  float at[kRows];  // largest score so far; NaN for ordinary rows
  int key[kRows];   // for float32: its key

  __device__ __forceinline__ centers_t() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) at[r] = nan_value<float>();
    ptx::launder(at);
  }
  __device__ __forceinline__ bool has(int r) const { return !is_nan(at[r]); }
};

// Rows whose reference left the range of the main loop, or that saw no score within it.
__device__ __forceinline__ bool is_huge(float reference) {
  return !(fabsf(reference) < kLargeLog2);
}

// Whether query i sees any key.
__device__ __forceinline__ bool sees_any(const scores_t& scores, index_t i) {
  const range_t seen = scores.keys_of(i, i + 1);
  if constexpr (kHidesKeys) {
#pragma unroll 1
    for (index_t j = seen.first; j < seen.last; ++j) {
      if (!scores.hides(i, j)) return true;
    }
    return false;
  }
  return seen.first < seen.last;
}

// After the first pass: marks the rows that need a second one; returns whether any such
// row sees a key, so that a second pass is necessary.
__device__ __forceinline__ bool take_centers(centers_t& centers, const softmax_t& rows,
                                             const scores_t& scores, index_t i0) {
  bool any = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!is_huge(rows.reference[r])) continue;
    centers.at[r] = -infinity<float>();
    any |= sees_any(scores, i0 + lanes_t::warp_row() + 8 * r + lanes_t::lane() / 4);
  }
  return any;
}

// Replaces scores of huge rows by differences to the largest so far; rescales l and o.
__device__ __forceinline__ void center(scores_frag_t& s, out_frag_t& o, softmax_t& rows,
                                       centers_t& centers, row_exchange_t& exchange,
                                       float to_log2, int j0) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    ptx::launder(centers.at);  // one row at a time: registers are scarce
    const float before = centers.at[r];
    float now = before;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      now = fmaxf(now, s[r / 2][n][r % 2 * 2]);
      now = fmaxf(now, s[r / 2][n][r % 2 * 2 + 1]);
    }
    now = fmaxf(now, shuffle_xor(now, 1));
    now = fmaxf(now, shuffle_xor(now, 2));
    if constexpr (kWarpsPerRow > 1) now = fmaxf(now, of_other_warp(exchange, now, r));
    const bool usual = is_nan(before);
    if constexpr (kSplits) {
      int key = -1;
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (s[r / 2][n][r % 2 * 2 + e] == now) key = 8 * n + e;
        }
      }
      if (key >= 0) key += j0 + lanes_t::lane() % 4 * 2;
      key = max(key, __shfl_xor_sync(kFullMask, key, 1));
      key = max(key, __shfl_xor_sync(kFullMask, key, 2));
      if (now != before) centers.key[r] = key;
    }
    // inf - inf is NaN: avoid the difference.
    const float by = usual || now == -infinity<float>() ? 0.f : now;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      s[r / 2][n][r % 2 * 2] -= by;
      s[r / 2][n][r % 2 * 2 + 1] -= by;
    }
    const bool stays = usual || now == before;
    rows.alpha[r] = stays ? 1.f : ptx::ex2_approx_ftz((before - now) * to_log2);
    rows.l[r] = rows.l[r] * rows.alpha[r];
    rows.rest[r] = rows.rest[r] * rows.alpha[r];
    if (!usual) centers.at[r] = now;
  }
  rescale(o, rows);
}
