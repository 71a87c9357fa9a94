// SPDX-License-Identifier: MIT
// float16 has few exponents: P and dS, rounded to it, are first multiplied by powers of
// two. P by 2^15; dS so that 65536 stands for 2^7 times the largest dO.
#pragma once

#include "attention/score/score.cuh"

template <typename T> constexpr bool kNarrow = false;
template <> constexpr bool kNarrow<half_t> = true;
constexpr float kFactorP = kNarrow<elem_t> ? 32768.f : 1.f;
constexpr float kLog2FactorP = kNarrow<elem_t> ? 15.f : 0.f;

// What P times kFactorP is multiplied by to get dS times its factor.
template <typename Found>
__device__ __forceinline__ float factor_of(const Found* found) {
  if constexpr (!kNarrow<elem_t>) return 1;
  // 2^exponent is above the largest dO, and in the range of float16.
  const int exponent = min(max(static_cast<int>(found->largest >> 23) - 126, -24), 16);
  return __int_as_float((127 - 6 - exponent) << 23);
}
// What sums over dS times its factor are multiplied by.
__device__ __forceinline__ float unfactor_of(float factor, float scale) {
  return scale / (factor * kFactorP);
}
