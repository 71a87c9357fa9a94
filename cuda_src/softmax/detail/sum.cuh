// SPDX-License-Identifier: MIT
// How numbers are summed and compared.
//
// Parameters ACC_T            float or double: type of maxima and exponentials
#pragma once

#include "common/math.cuh"
#include "common/reduce.cuh"
#include "ptx/max.cuh"

using acc_t = ACC_T;

template <typename A, typename B> constexpr bool kSame = false;
template <typename A> constexpr bool kSame<A, A> = true;

// A or B.
template <bool kIsA, typename A, typename B> struct conditional {
  using type = A;
};
template <typename A, typename B> struct conditional<false, A, B> {
  using type = B;
};

template <typename T>
constexpr bool kHasInfinity =
    kSame<T, float> || kSame<T, double> || kSame<T, half_t> || kSame<T, bfloat16_t>;

// Value of missing elements: -inf adds nothing. Types without infinities use 0, and
// must track which elements are valid.
template <typename T> __device__ __forceinline__ T padding() {
  if constexpr (kHasInfinity<T>) return to<T>(-infinity<float>());
  return T();
}

// Whether maxima of 16-bit numbers are taken two at a time, without a conversion.
#if __CUDA_ARCH__ >= 800
template <typename T, int kVector>
constexpr bool kMaxInPairs = sizeof(T) == 2 && kVector % 2 == 0;
#else
template <typename T, int kVector> constexpr bool kMaxInPairs = false;
#endif

// The sum of one lane, in double even for float: a lane adds thousands of terms one by
// one, and a float sum would lose more than the exponentials do. For double itself,
// Kahan compensation keeps the rounding errors.
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

// The sum of the doubles of several threads, to twice the digits: rounding errors of
// additions would show next to exponentials that are accurate to the last bit, and so
// would the order of the additions, which depends on the address of a row.
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

// A sum as one number.
__device__ __forceinline__ double total(sum_t l) { return l.value; }
__device__ __forceinline__ double total(wide_sum_t l) {
  return is_finite(l.high) ? l.high + l.low : l.high;
}
template <typename T> __device__ __forceinline__ T total(T l) { return l; }

// Type of the sum of one thread's terms of type T: double suffices for floats and, for
// columns, float for 16-bit results.
template <typename T, bool kIsCoarse = false> struct few {
  using type = double;
};
template <> struct few<float, true> {
  using type = float;
};
template <> struct few<double, false> {
  using type = wide_sum_t;
};

// Converts a float in [0, 1] to double by shifting its bits, since the conversion units
// are few. 0 becomes 2^-127, negligible next to the 1 of the largest exponential.
__device__ __forceinline__ double widened(float x) {
  const int bits = __float_as_int(x);
  return __hiloint2double((bits >> 3) + ((1023 - 127) << 20), bits << 29);
}

// The larger of two; NaN is ignored here, because the sum will see it.
struct larger_t {
  __device__ __forceinline__ float operator()(float a, float b) const {
    return fmaxf(a, b);
  }
  __device__ __forceinline__ double operator()(double a, double b) const {
    return a > b ? a : b;
  }
};

namespace detail {

// The larger of two, or NaN.
__device__ __forceinline__ float largest_nan(float a, float b) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return ptx::max_nan_f32(a, b);
#else
  return max_nan(a, b);
#endif
}
__device__ __forceinline__ double largest_nan(double a, double b) {
  return max_nan(a, b);
}

}  // namespace detail

struct largest_nan_t {
  template <typename T> __device__ __forceinline__ T operator()(T a, T b) const {
    return detail::largest_nan(a, b);
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

// What is subtracted from the scores of a row with maximum m. Not an infinite m: the
// sum then becomes 0 (all -inf), inf or NaN, which tells the cases apart.
template <typename T> __device__ __forceinline__ T shift_by(T m) {
  return is_finite(m) ? m : T(0);
}
