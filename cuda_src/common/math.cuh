// SPDX-License-Identifier: MIT
// Constants, special values and the exponentials, for float and double alike.
#pragma once

#include "common/types.cuh"

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <typename T>
__device__ __forceinline__ T infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000);
}

template <typename T>
__device__ __forceinline__ T nan_value() {
  return infinity<T>() - infinity<T>();
}

template <typename T>
__device__ __forceinline__ bool is_nan(T x) {
  return x != x;
}

template <typename T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

// The larger of two; NaN when either is NaN (fmax would drop it).
template <typename T>
__device__ __forceinline__ T max_nan(T a, T b) {
  return (a > b || is_nan(a)) ? a : b;
}

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float abs_of(float x) { return fabsf(x); }
__device__ __forceinline__ double abs_of(double x) { return fabs(x); }

// exp(x - m), with 0 where both are -inf: the weight of what has not been seen yet. The
// one home of this guard: exp(-inf - -inf) would be NaN.
template <typename T>
__device__ __forceinline__ T exp_diff(T x, T m) {
  return x == -infinity<T>() ? T(0) : exp_of(x - m);
}

// exp(x - m) for any spread: the rounding error of the difference (Knuth's TwoSum) is
// added back to first order, exp(d + e) = exp(d) (1 + e).
template <typename T>
__device__ __forceinline__ T exp_diff_exact(T x, T m) {
  const T d = x - m;
  const T back = d + m;  // what of x survived
  const T e = (x - back) - (m - (back - d));
  const T y = exp_of(d);
  // e is NaN when d is not finite; exp(d) is then exact already.
  return is_finite(d) ? y + y * e : y;
}
