// SPDX-License-Identifier: MIT
// attention_hopper: online softmax of a warpgroup's tile of scores, in registers.
#pragma once

#include "attention/sm90/tile_scheduler.cuh"
#include "common/reduce.cuh"
#include "ptx/math.cuh"

// An accumulator of wgmma with n columns has n / 2 numbers per thread. Number e is in
// row (e / 2) % 2 * 8 + lane / 4 of the warp's 16 rows, and in column e / 4 * 8 + lane
// % 4 * 2 + e % 2 (PTX ISA, "register fragments for wgmma.mma_async.m64nNk16").
constexpr int kScores = kBlockN / 2, kOutputs = kHeadDimV / 2;
__device__ constexpr int row_of(int e) { return e / 2 % 2; }  // of the thread's two
__device__ constexpr int column_of(int e) { return e / 4 * 8 + e % 2; }  // for lane 0

// P stays below 2^kLazyLog2, or just above: the reference m moves only when a score
// exceeds it by that much. Any m is mathematically exact, because o, l and p share it.
// Same as _LAZY_LOG2 in _attention/gpu/sm90/forward.py.
constexpr float kLazyLog2 = 8;

constexpr int kLeastInt = -2147483647 - 1;

// Beyond this exponent, rounding of m * to_log2 alone could push weights out of range.
constexpr float kLargeLog2 = 1 << 20;

// State of a thread's two rows during the loop over keys.
struct softmax_t {
  float m[2];
  float l[2], rest[2];  // sum of the weights, and its rounding error
  float alpha[2];       // exp(old m - new m), valid where raise() says so
  float m_log2[2];      // m * to_log2, rounded; subtracted unless raise() did

  // m starts at a finite number: -inf - m needs no guard. Scores below count as -inf.
  __device__ explicit softmax_t(float to_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = -1e38f * fminf(ptx::rcp_approx_ftz(to_log2), 1);
      l[r] = 0;
      rest[r] = 0;
    }
  }
};

// The largest number of each of a thread's rows and the smallest of both, from their
// bit patterns: floats >= 0 compare like signed integers, above all negative ones, and
// floats < 0 compare by magnitude as unsigned. Integers have a three-input maximum.
struct extremes_t {
  int top[2];
  unsigned bottom;

  __device__ __forceinline__ explicit extremes_t(const float (&s)[kScores]) {
    top[0] = __float_as_int(s[0]);
    top[1] = __float_as_int(s[2]);
#pragma unroll
    for (int e = 4; e < kScores; e += 4) {
      top[0] = max(max(top[0], __float_as_int(s[e])), __float_as_int(s[e + 1]));
      top[1] = max(max(top[1], __float_as_int(s[e + 2])), __float_as_int(s[e + 3]));
    }
    top[0] = max(top[0], __float_as_int(s[1]));
    top[1] = max(top[1], __float_as_int(s[3]));
    bottom = __float_as_uint(s[0]);
#pragma unroll
    for (int e = 2; e < kScores; e += 2) {
      bottom = max(max(bottom, __float_as_uint(s[e - 1])), __float_as_uint(s[e]));
    }
    bottom = max(bottom, __float_as_uint(s[kScores - 1]));
  }
};

// Maps the numbers of a tile to scores, for raise(): here they are scores already.
struct identity_t {
  static constexpr bool kHasLimit = false;
  __device__ bool is_passed(const extremes_t&) const { return false; }
  // An upper bound of the score of x >= 0.
  __device__ float bound(float x) const { return x; }
  __device__ float operator()(float x) const { return x; }
};

// What raise() reports, the same for all lanes of a warp.
struct raised_t {
  bool moves;   // m changed: o must be scaled by alpha
  bool passes;  // some number exceeds the limit of `score`
};

// Raises m where needed, and rescales l. `to_log2` converts scores to exponents of 2,
// and `margin` is kLazyLog2 in the unit of scores. Scores of rows with a large m are
// replaced by score - m, one instruction more per score. `score` maps the numbers in s
// to scores; it is monotonic and keeps signs.
template <typename Score = identity_t>
__device__ __forceinline__ raised_t raise(softmax_t& row, float (&s)[kScores],
                                          float to_log2, float margin,
                                          const Score& score = Score()) {
  const extremes_t extremes(s);
  const int (&top)[2] = extremes.top;
  float largest[2] = {__int_as_float(top[0]), __int_as_float(top[1])};
  // One vote covers all rare cases: a score far above m, an m so negative that the
  // integer order fails, large scores. Its right-hand side is known before the products
  // are, and each lane compares its own columns only.
  bool rare = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row.m_log2[r] = rounded_product(row.m[r], to_log2);
    const int most = __float_as_int(row.m[r] + margin);
    const bool large = !kCapOnly && fabsf(row.m_log2[r]) > kLargeLog2;
    const bool always = (most < 0) | large;
    rare |= __float_as_int(score.bound(largest[r])) >= (always ? kLeastInt : most);
  }
  const bool passed = score.is_passed(extremes);
  if (!__any_sync(kFullMask, rare | passed)) return {false, false};
  const bool passes = Score::kHasLimit && __any_sync(kFullMask, passed);
  if (Score::kHasLimit && !__any_sync(kFullMask, rare)) return {false, passes};
  // If m and all scores of a row are negative, recompute the maximum in floats.
  const bool negative =
      ((top[0] < 0) & (row.m[0] < 0)) | ((top[1] < 0) & (row.m[1] < 0));
  if (__any_sync(kFullMask, negative)) {
    largest[0] = s[0];
    largest[1] = s[2];
#pragma unroll
    for (int e = 1; e < kScores; ++e) {
      if (e != 2) largest[row_of(e)] = fmaxf(largest[row_of(e)], s[e]);
    }
  }
  bool moves = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], shuffle_xor(largest[r], 1));
    largest[r] = fmaxf(largest[r], shuffle_xor(largest[r], 2));
    largest[r] = score(largest[r]);
    // Decided per row, so that its bits do not depend on the other rows of the warp.
    const bool own = (largest[r] - row.m[r]) * to_log2 > kLazyLog2;
    const float m = own ? largest[r] : row.m[r];
    // From the rounded products, because exponentiate() subtracts these.
    const float before = row.m_log2[r], now = rounded_product(m, to_log2);
    const bool large = fmaxf(fabsf(before), fabsf(now)) > kLargeLog2;
    const float by = large ? (row.m[r] - m) * to_log2 : before - now;
    // inf - inf is NaN: avoid the difference.
    row.alpha[r] = own ? ptx::ex2_approx_ftz(by) : 1.f;
    row.m[r] = m;
    row.m_log2[r] = now;
    row.l[r] *= row.alpha[r];
    row.rest[r] *= row.alpha[r];
    moves |= own;
    // Exponents of 2 need no multiplication and are not rounded.
    if (!kCapOnly && fabsf(now) > kLargeLog2) {
#pragma unroll
      for (int e = 2 * r; e < kScores; e += 4) {
        s[e] -= m;
        s[e + 1] -= m;
      }
      row.m_log2[r] = 0;
    }
  }
  return {__any_sync(kFullMask, moves) != 0, passes};
}

// Turns s into p = 2^exponent(s, m), and adds this thread's columns to l. A tile is
// summed on its own and added with Kahan compensation: sums of millions stay accurate.
template <typename Exponent>
__device__ __forceinline__ void exponentiate(softmax_t& row, float (&s)[kScores],
                                             const Exponent& exponent) {
  float tile[2] = {row.rest[0], row.rest[1]};
#pragma unroll
  for (int e = 0; e < kScores; ++e) {
    s[e] = ptx::ex2_approx_ftz(exponent(s[e], row.m_log2[row_of(e)]));
    tile[row_of(e)] += s[e];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = row.l[r] + tile[r];
    row.rest[r] = tile[r] - (sum - row.l[r]);
    row.l[r] = sum;
  }
}
__device__ __forceinline__ void exponentiate(softmax_t& row, float (&s)[kScores],
                                             float to_log2) {
  exponentiate(row, s, [=](float x, float m_log2) { return x * to_log2 - m_log2; });
}

// p as the A operand of the next product; step k uses numbers 8 k to 8 k + 7.
__device__ __forceinline__ void round_to(unsigned (&p)[kBlockN / 16][4],
                                         const float (&s)[kScores]) {
#pragma unroll
  for (int e = 0; e < kScores; e += 2)
    p[e / 8][e / 2 % 4] = pair16_t::from(s[e + 1], s[e]);
}
