// SPDX-License-Identifier: MIT
// Exponentials of floats in units of a power of two.
#pragma once

#include "softmax/detail/params.cuh"

// exp(x) = 2^k 2^r with k = round(x / ln 2). In units of a power of two near the
// largest of them, exponentials need no difference that could be rounded, and a third
// of the instructions.
struct power_t {
  static constexpr float kLargest = 1 << 20;  // beyond, this way of finding k fails
  static constexpr float kHigh = float(kLog2e), kLow = float(kLog2e - double(kHigh));

  float unit, round, lowest;

  power_t() = default;
  __device__ __forceinline__ power_t(float m) {
    unit = m == -infinity<float>() ? 0.0f : rintf(m * kHigh);
    // Adding this rounds to an integer and leaves k - unit in the low bits.
    round = 12582912.0f - unit;  // 1.5 * 2^23
    // Here and below, the result is subnormal and flushed to 0 on use.
    lowest = (unit - 126.75f) * float(kLn2);
  }
  static __device__ __forceinline__ bool takes(float m) {
    return abs_of(m) <= kLargest || m == -infinity<float>();
  }
  __device__ __forceinline__ double shift() const { return unit * kLn2; }
  // 2^(unit - of_all), exactly.
  __device__ __forceinline__ double weight(float of_all) const {
    const int count = int(unit - of_all);
    return count < -1000 ? 0.0 : __hiloint2double((1023 + count) << 20, 0);
  }
  __device__ __forceinline__ float operator()(score_t s) const {
    const float x = fmaxf(s.key, lowest);
    const float rounded = fmaf(x, kHigh, round);
    const float k = rounded - round;
    const float r = fmaf(x, kLow, fmaf(x, kHigh, -k));
    return __int_as_float((__float_as_int(rounded) << 23) + __float_as_int(exp2f(r)));
  }
};
