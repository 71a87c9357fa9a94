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
