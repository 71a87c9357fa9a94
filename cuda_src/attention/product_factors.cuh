// SPDX-License-Identifier: MIT
// float16 has a narrow range: P and dS are multiplied by powers of two before they are
// rounded to it. P by 2^15; dS so that 65536 stands for 2^7 times max |dO|.
#pragma once

#include "attention/score/score.cuh"

template <typename T> constexpr bool kNarrow = false;
template <> constexpr bool kNarrow<half_t> = true;
constexpr float kFactorP = kNarrow<elem_t> ? 32768.f : 1.f;
constexpr float kLog2FactorP = kNarrow<elem_t> ? 15.f : 0.f;

// The factor from P times kFactorP to dS times its own factor.
template <typename Found>
__device__ __forceinline__ float factor_of(const Found* found) {
  if constexpr (!kNarrow<elem_t>) return 1;
  // 2^exponent exceeds max |dO|, within the range of float16.
  const int exponent = min(max(static_cast<int>(found->largest >> 23) - 126, -24), 16);
  return __int_as_float((127 - 6 - exponent) << 23);
}
// The factor that undoes these in sums over dS.
__device__ __forceinline__ float unfactor_of(float factor, float scale) {
  return scale / (factor * kFactorP);
}
