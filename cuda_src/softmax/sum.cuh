// SPDX-License-Identifier: MIT
// How numbers are summed and compared, whoever holds them.
//
// Parameters ACC_T            float or double: of maxima and exponentials
#pragma once

#include "common/math.cuh"

using acc_t = ACC_T;

// The sum of one lane. It runs in double, also for float: a lane adds thousands of
// terms one by one, and a float sum of them would lose more than the exponentials do.
// For double itself, Kahan's correction keeps what each addition has rounded away.
struct sum_t {
  double value = 0, lost = 0;

  __device__ __forceinline__ void operator+=(double x) {
    if constexpr (sizeof(acc_t) == sizeof(double)) {
      const double y = x - lost, sum = value + y;
      lost = is_finite(sum) ? (sum - value) - y : 0;
      value = sum;
    } else {
      value += x;
    }
  }
};

// The sum of the few doubles that one thread holds, to twice the digits: what each
// addition rounds away would show beside exponentials that are exact to a last bit.
struct wide_sum_t {
  double high = 0, low = 0;

  __device__ __forceinline__ void operator+=(double x) {
    const pair_t<double> sum = exact_sum(high, x);
    high = sum.high;
    low += sum.low;
  }
};

// The one number that a sum comes to.
__device__ __forceinline__ double total(sum_t l) { return l.value; }
__device__ __forceinline__ double total(wide_sum_t l) {
  return is_finite(l.high) ? l.high + l.low : l.high;
}
template <typename T>
__device__ __forceinline__ T total(T l) {
  return l;
}

// The sum of the terms of type T that one thread holds: a double is enough for floats,
// and a float where the result has 16 bits.
template <typename T, bool kIsCoarse>
struct few {
  using type = double;
};
template <>
struct few<float, true> {
  using type = float;
};
template <>
struct few<double, false> {
  using type = wide_sum_t;
};

// The larger of two; a NaN is passed over here, since the sum will meet it.
struct larger_t {
  __device__ __forceinline__ float operator()(float a, float b) const {
    return fmaxf(a, b);
  }
  __device__ __forceinline__ double operator()(double a, double b) const {
    return a > b ? a : b;
  }
};

struct larger_finite_t {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a && b < infinity<T>() ? b : a;
  }
};

struct plus_t {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// What is subtracted from the scores of a row with maximum m. An infinite one is not:
// the sum then comes out as 0 (all -inf), inf or NaN, which tells the cases apart.
template <typename T>
__device__ __forceinline__ T shift_by(T m) {
  return is_finite(m) ? m : T(0);
}
