// SPDX-License-Identifier: MIT
// Shared by kernels that hold their part of a row in registers.
#pragma once

#include "softmax/detail/params.cuh"

#ifdef IN_SMEM
constexpr bool kUsesSmem = IN_SMEM > 0;
#else
constexpr bool kUsesSmem = false;
#endif

// How the exponentials of a row are computed: kOfScore as in score_t; kByTable for
// doubles, by a warp together with a table in its lanes, in 25 float64 instructions
// where exp() takes 35 (log_softmax has registers for it only with parked elements);
// kOfFloats in 18 instructions where exp() of an exact difference takes 25.
enum class exps { kOfScore, kByTable, kOfFloats };
constexpr bool kHasTable = kSame<x_t, double> && !kHasWhere && (!kLog || kUsesSmem);
constexpr exps kExps = kSame<acc_t, float>
                           ? (kCoarse ? exps::kOfScore : exps::kOfFloats)
                           : (kHasTable ? exps::kByTable : exps::kOfScore);
// Whether a sum may miss a NaN or infinity that the maximum sees.
constexpr bool kSumIsBlind = kSame<acc_t, float>;

// The sum of one thread's elements, and of all threads of a row: accurate enough that
// the order, which depends on strides and alignment, does not show in the result.
using part_t = few<acc_t>::type;

__device__ __forceinline__ double as_term(acc_t e) {
  if constexpr (kCoarse) return widened(e);
  return e;
}

// The largest score, or NaN where the sum may miss it.
struct largest_t {
  __device__ __forceinline__ acc_t operator()(acc_t a, acc_t b) const {
    if constexpr (kSumIsBlind) return detail::largest_nan(a, b);
    return larger_t()(a, b);
  }
};

// The sum of a row whose largest score is `largest`.
__device__ __forceinline__ double total(part_t sum, acc_t largest) {
  if (kSumIsBlind && !is_finite(largest)) {
    return largest == -infinity<acc_t>() ? 0 : largest;
  }
  return total(sum);
}
