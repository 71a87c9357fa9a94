// SPDX-License-Identifier: MIT
// How numbers are summed and compared, whoever holds them.
//
// Parameters ACC_T            float or double: of maxima and exponentials
#pragma once

#include "common/math.cuh"
#include "common/reduce.cuh"

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

// The sum of doubles that threads hold, to twice the digits: what each addition rounds
// away would show beside exponentials that are exact to a last bit, and the order of
// the additions, which depends on where a row lies in memory, would show in the result.
struct wide_sum_t {
  double high, low;

  __device__ __forceinline__ void operator+=(double x) {
    const pair_t<double> sum = exact_sum(high, x);
    high = sum.high;
    low += sum.low;
  }
};
__device__ __forceinline__ wide_sum_t shuffle_xor(wide_sum_t l, int mask) {
  wide_sum_t other;
  other.high = shuffle_xor(l.high, mask);
  other.low = shuffle_xor(l.low, mask);
  return other;
}

// The one number that a sum comes to.
__device__ __forceinline__ double total(sum_t l) { return l.value; }
__device__ __forceinline__ double total(wide_sum_t l) {
  return is_finite(l.high) ? l.high + l.low : l.high;
}
template <typename T> __device__ __forceinline__ T total(T l) { return l; }

// The sum of the terms of type T that one thread holds: a double is enough for floats,
// and, for columns, a float where the result has 16 bits.
template <typename T, bool kIsCoarse = false> struct few {
  using type = double;
};
template <> struct few<float, true> {
  using type = float;
};
template <> struct few<double, false> {
  using type = wide_sum_t;
};

// A float that is not negative and not above 1 as a double, by shifts of its bits,
// since the conversion has few units. 0 becomes 2^-127, which is nothing beside the 1
// of the largest exponential.
__device__ __forceinline__ double widened(float x) {
  const int bits = __float_as_int(x);
  return __hiloint2double((bits >> 3) + ((1023 - 127) << 20), bits << 29);
}

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
  template <typename T> __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a && b < infinity<T>() ? b : a;
  }
};

struct plus_t {
  template <typename T> __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
  __device__ __forceinline__ wide_sum_t operator()(wide_sum_t a, wide_sum_t b) const {
    const pair_t<double> sum = exact_sum(a.high, b.high);
    wide_sum_t both;
    both.high = sum.high;
    both.low = (a.low + b.low) + sum.low;
    return both;
  }
};

// What is subtracted from the scores of a row with maximum m. An infinite one is not:
// the sum then comes out as 0 (all -inf), inf or NaN, which tells the cases apart.
template <typename T> __device__ __forceinline__ T shift_by(T m) {
  return is_finite(m) ? m : T(0);
}
