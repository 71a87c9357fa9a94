// SPDX-License-Identifier: MIT
// What kernels share that hold their part of a row in registers.
#pragma once

#include "softmax/score.cuh"

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename T>
constexpr bool kHasInfinity =
    kSame<T, float> || kSame<T, double> || kSame<T, half_t> || kSame<T, bfloat16_t>;

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

// The sum of what one thread holds, and of all threads of a row.
using part_t = few<acc_t, kCoarse>::type;
using total_t = decltype(total(part_t()));
