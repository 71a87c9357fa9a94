// SPDX-License-Identifier: MIT
// Functions called by the generated text of score and mask functions; its operators are
// those of C++. Integers are int_t: 64 bits, or 32 where the host proved that all
// values fit.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"
#include "expr/element.cuh"

namespace expr {

#ifdef EXPR_SHORT_INTEGERS
using int_t = int;
#else
using int_t = long long;
#endif

// Limit of the integers that floats convert to.
constexpr int kFarthest = 2147483647;

template <typename T> __device__ __forceinline__ T absolute(T x) {
  return x < 0 ? -x : (x == 0 ? T(0) : x);
}

template <typename T> __device__ __forceinline__ T sign(T x) {
  return x > 0 ? T(1) : (x < 0 ? T(-1) : x);
}

// The smaller and the larger of two; NaN if either is NaN, which fmin and fmax would
// drop.
template <typename T> __device__ __forceinline__ T minimum(T a, T b) {
  return a < b || a != a ? a : b;
}
template <typename T> __device__ __forceinline__ T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}

template <typename T> __device__ __forceinline__ bool is_nan(T x) { return x != x; }
template <typename T> __device__ __forceinline__ bool is_finite(T x) {
  return x - x == 0;
}

// Rounds down, with a remainder of the sign of b, as in Python; 0 if b is 0.
template <typename Int> __device__ __forceinline__ Int floor_div(Int a, Int b) {
  if (b == 0) return 0;
  const Int quotient = a / b;
  return quotient - (quotient * b != a && (a < 0) != (b < 0));
}
template <typename Int> __device__ __forceinline__ Int floor_mod(Int a, Int b) {
  return b == 0 ? 0 : a - floor_div(a, b) * b;
}

// The same of floats, as NumPy has it: NaN if b is 0.
template <typename T> __device__ __forceinline__ T float_mod(T a, T b) {
  const T rest = fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ float floor_mod(float a, float b) { return float_mod(a, b); }
__device__ __forceinline__ double floor_mod(double a, double b) {
  return float_mod(a, b);
}
template <typename T> __device__ __forceinline__ T float_div(T a, T b) {
  return b == 0 ? a / b : rint((a - float_mod(a, b)) / b);
}
__device__ __forceinline__ float floor_div(float a, float b) { return float_div(a, b); }
__device__ __forceinline__ double floor_div(double a, double b) {
  return float_div(a, b);
}

// Truncates; NaN becomes 0.
__device__ __forceinline__ int_t to_int(bool x) { return x; }
template <typename T> __device__ __forceinline__ int_t to_int(T x) {
  if (x != x) return 0;
  if (x <= T(-kFarthest)) return -kFarthest;
  return x >= T(kFarthest) ? kFarthest : static_cast<int_t>(x);
}

// Clamps an index to an axis.
__device__ __forceinline__ int_t within(int_t index, long long size) {
  const int_t last = static_cast<int_t>(size) - 1;
  return index < 0 ? 0 : (index < last ? index : last);
}

}  // namespace expr
