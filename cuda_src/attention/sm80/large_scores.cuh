// SPDX-License-Identifier: MIT
// attention_mma: rows whose scores are too large for the loop's way to weigh them.
//
// An exponent is s c - m, where m = round(largest c) and c is a factor. Above
// kLargeLog2 the rounding of m is a factor of all weights that leaves their range. A
// block that ends with such a row begins again. Then the row's scores become
// differences to the largest one so far, before any product, and its reference stands
// still; all other rows keep every bit.
#pragma once

#include "attention/sm80/shared_rows.cuh"

// By row of a thread, on the stack, since the loop has no registers for it.
struct centers_t {
  float at[kRows];  // the largest score so far; NaN where the row goes the usual way
  int key[kRows];   // of float32: where it was

  __device__ __forceinline__ centers_t() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) at[r] = nan_value<float>();
    ptx::launder(at);
  }
  __device__ __forceinline__ bool has(int r) const { return !is_nan(at[r]); }
};

// Rows that the loop could not weigh, or that saw no score that it could.
__device__ __forceinline__ bool is_huge(float reference) {
  return !(fabsf(reference) < kLargeLog2);
}

// Whether query i sees some key.
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

// At the end of a first walk: which rows want a second one; whether some row here sees
// a key, so that there has to be one.
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

// Scores of huge rows become differences to the largest so far, which l and o follow.
__device__ __forceinline__ void center(scores_frag_t& s, out_frag_t& o, softmax_t& rows,
                                       centers_t& centers, row_exchange_t& exchange,
                                       float to_log2, int j0) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    ptx::launder(centers.at);  // a row at a time: there are few registers
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
    // Infinities have no difference.
    const float by = usual || now == -infinity<float>() ? 0.f : now;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      s[r / 2][n][r % 2 * 2] -= by;
      s[r / 2][n][r % 2 * 2 + 1] -= by;
    }
    const bool stays = usual || now == before;
    rows.alpha[r] = stays ? 1.f : ptx::ex2_approx_ftz((before - now) * to_log2);
    rows.l[r] *= rows.alpha[r];
    rows.rest[r] *= rows.alpha[r];
    if (!usual) centers.at[r] = now;
  }
  rescale(o, rows);
}
