// SPDX-License-Identifier: MIT
// Exponentials of a row that is held on chip, in units of a power of two.
//
// exp(s) / 2^unit with a unit near the largest score needs no difference that could be
// rounded, and so a third of the instructions of exp(s - m) of an exact one.
#pragma once

#include "softmax/group.cuh"
#include "softmax/power.cuh"
#include "softmax/power_sum.cuh"
#include "softmax/terms.cuh"

// Beyond kLargest, where 2^k is not found in this way, scores are taken less the
// largest, which rounds none that counts.
template <typename T>
struct of_base_t {
  static constexpr T kLargest = 1 << 20;
  T base;
  __device__ __forceinline__ explicit of_base_t(T m)
      : base(abs_of(m) <= kLargest ? 0 : m) {}
};

template <typename T>
struct row_power_t;

template <>
struct row_power_t<float> : of_base_t<float> {
  static constexpr bool kTogether = false;
  static constexpr int kUnroll = 2;  // of vectors in shared memory
  power_t power;

  __device__ __forceinline__ row_power_t(const roots_t<float>&, float m)
      : of_base_t(m), power(m - base) {}
  // For an m that is taken as it is.
  static __device__ __forceinline__ int unit_of(float m) {
    return int(power_t(m).unit);
  }
  // exp(score - base) / 2^unit.
  __device__ __forceinline__ float operator()(float score) const {
    score_t s;
    s.high = score - base;
    return power(s);
  }
  static __device__ __forceinline__ double none() { return 0; }
  static __device__ __forceinline__ void add(double& sum, float e) { sum += e; }
  static __device__ __forceinline__ double sum_of(double sum) { return sum; }
};

template <>
struct row_power_t<double> : of_base_t<double> {
  // The lanes of a warp compute exponentials together.
  static constexpr bool kTogether = true;
  static constexpr int kUnroll = 1;  // with 2 the tier of 64 registers spills
  // The largest exponential is about 2^kRoom, so that all whose quotient is not 0 are
  // normal numbers.
  static constexpr int kRoom = 512;
  static constexpr double kRound = detail::range<double>::kRound;
  static constexpr int kCount = roots_t<double>::kCount;

  const roots_t<double>& roots;
  double round;

  __device__ __forceinline__ row_power_t(const roots_t<double>& roots, double m)
      : of_base_t(m),
        roots(roots),
        round(kRound - double(kCount) * unit_of(m - base)) {}
  static __device__ __forceinline__ int unit_of(double m) {
    return int(m * kLog2e) - kRoom;
  }
  __device__ __forceinline__ double operator()(double score) const {
    const double x = score - base;
    const double rounded = roots.rounded(x, round);
    const double e = roots.exp_of(x, round, rounded);
    return rounded < kRound - kCount * 1020 ? 0 : e;
  }
  // A sum that begins above all exponentials has the larger part in each addition, and
  // what that rounds away takes three instructions.
  static __device__ __forceinline__ double start() {
    return __hiloint2double((1023 + kRoom + 2) << 20, 0);
  }
  static __device__ __forceinline__ wide_sum_t none() { return {start(), 0}; }
  static __device__ __forceinline__ void add(wide_sum_t& sum, double e) {
    const double high = sum.high + e;
    sum.low += e - (high - sum.high);
    sum.high = high;
  }
  static __device__ __forceinline__ wide_sum_t sum_of(wide_sum_t sum) {
    sum.high -= start();  // exact: both are multiples of one power of two
    return sum;
  }
};

using power_of_row_t = row_power_t<acc_t>;
