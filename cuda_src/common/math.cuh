// SPDX-License-Identifier: MIT
// Constants, special values and exponentials, for float and double alike.
#pragma once

#include "common/types.cuh"

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <typename T> __device__ __forceinline__ T infinity();
template <> __device__ __forceinline__ float infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <> __device__ __forceinline__ double infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000);
}

template <typename T> __device__ __forceinline__ T nan_value() {
  return infinity<T>() - infinity<T>();
}

template <typename T> __device__ __forceinline__ bool is_nan(T x) { return x != x; }

template <typename T> __device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

// The larger of two; NaN if either is NaN (fmax would drop it).
template <typename T> __device__ __forceinline__ T max_nan(T a, T b) {
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
__device__ __forceinline__ float fma_of(float x, float y, float z) {
  return fmaf(x, y, z);
}
__device__ __forceinline__ double fma_of(double x, double y, double z) {
  return fma(x, y, z);
}

// exp(x) to about 2^-21, for results that are rounded to 16 bits.
__device__ __forceinline__ float exp_fast(float x) { return exp2f(x * float(kLog2e)); }

// A product that the compiler must not fuse with a following sum.
__device__ __forceinline__ float rounded_product(float x, float y) {
  return __fmul_rn(x, y);
}
__device__ __forceinline__ double rounded_product(double x, double y) {
  return __dmul_rn(x, y);
}

// A sum that the compiler must not fuse with a product among its operands.
__device__ __forceinline__ float rounded_sum(float x, float y) {
  return __fadd_rn(x, y);
}
__device__ __forceinline__ double rounded_sum(double x, double y) {
  return __dadd_rn(x, y);
}

// The number high + low, with |low| at most half an ulp of high. If high is not finite,
// low is NaN and meaningless.
template <typename T> struct pair_t {
  T high, low;
};

// x + y without rounding (Knuth's TwoSum). If x is a product, it must have been
// rounded: fused with the sums, its rounding error would be in the result, and again
// where the caller adds it.
template <typename T> __device__ __forceinline__ pair_t<T> exact_sum(T x, T y) {
  const T sum = rounded_sum(x, y);
  const T x_part = rounded_sum(sum, -y);
  const T y_part = rounded_sum(sum, -x_part);
  return {sum, rounded_sum(rounded_sum(x, -x_part), rounded_sum(y, -y_part))};
}

// exp(high + low) to first order in low: exp(high) (1 + low).
template <typename T> __device__ __forceinline__ T exp_of(pair_t<T> x) {
  const T y = exp_of(x.high);
  const T corrected = fma_of(y, x.low, y);
  return is_nan(corrected) ? y : corrected;  // y is inf, or high was not finite
}

// exp(x - m), with 0 where both are -inf: the weight of what has not been seen yet.
// Only this function guards against exp(-inf - -inf), which would be NaN.
template <typename T> __device__ __forceinline__ T exp_diff(T x, T m) {
  return x == -infinity<T>() ? T(0) : exp_of(x - m);
}

// exp(x - m), accurate for any spread of the numbers: the rounding error of the
// difference, up to half an ulp, would otherwise become the relative error of the
// exponential.
template <typename T> __device__ __forceinline__ T exp_diff_exact(T x, T m) {
  return exp_of(exact_sum(x, -m));
}
