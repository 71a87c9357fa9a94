// SPDX-License-Identifier: MIT
// What kernels share that hold their part of a row in registers.
#pragma once

#include "ptx/max.cuh"
#include "softmax/score.cuh"

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename T>
constexpr bool kHasInfinity =
    kSame<T, float> || kSame<T, double> || kSame<T, half_t> || kSame<T, bfloat16_t>;

// Whether exponentials are counted in units of a power of two (softmax/row_power.cuh).
// As results are quotients, the unit falls out of them. log_softmax keeps the exact
// difference: next to a single large score its results are nearly 0. Where a result has
// 16 bits a plain difference does.
constexpr bool kInPowers =
    kSame<x_t, acc_t> && !kScaled && !kHasWhere && !kCoarse && !kLog;

// What slots beyond the row are filled with: a score of -inf adds nothing to it. A type
// without infinities takes 0, and has to be told apart.
template <typename T>
__device__ __forceinline__ T padding() {
  if constexpr (kHasInfinity<T>) {
    return to<T>(-infinity<float>());
  } else {
    return T(0);
  }
}

// The sum of what one thread holds, and of all threads of a row: exact enough that the
// order, which depends on strides and alignment, leaves no trace in the result.
using part_t = few<acc_t>::type;

__device__ __forceinline__ double as_term(acc_t e) {
  if constexpr (kCoarse) return widened(e);
  return e;
}

// Whether a sum knows of neither NaN nor infinity: one of widened terms, and one of
// floats in powers of two.
constexpr bool kOverlooks = kCoarse || (kInPowers && sizeof(acc_t) == sizeof(float));

// The largest score, or NaN where the sum would overlook it.
struct largest_t {
  __device__ __forceinline__ acc_t operator()(acc_t a, acc_t b) const {
    if constexpr (kOverlooks) {
#if __CUDA_ARCH__ >= 800
      return ptx::max_nan_f32(a, b);
#else
      return max_nan(a, b);
#endif
    }
    return larger_t()(a, b);
  }
};

// The sum of a row whose largest score is `largest`.
__device__ __forceinline__ double total(part_t sum, acc_t largest) {
  if (kOverlooks && !is_finite(largest)) {
    return largest == -infinity<acc_t>() ? 0 : largest;
  }
  return total(sum);
}
