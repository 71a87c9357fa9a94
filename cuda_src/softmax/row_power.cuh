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

// As results of softmax are quotients, the unit falls out of them. log_softmax keeps the
// exact difference: next to a single large score its results are nearly 0. Where a
// result has 16 bits a plain difference does.
constexpr bool kInPowers =
    kSame<x_t, acc_t> && !kScaled && !kHasWhere && !kCoarse && !kLog;

// The same names where there are no powers, to be overlooked by the compiler.
template <typename T, bool kInPowers>
struct row_power_t {
  static constexpr bool kTogether = false;
  __device__ __forceinline__ explicit row_power_t(const roots_t<T>&, T) {}
  static __device__ __forceinline__ bool takes(T) { return false; }
  static __device__ __forceinline__ int unit_of(T) { return 0; }
  __device__ __forceinline__ T operator()(T x) const { return x; }
  __device__ __forceinline__ part_t none() const { return {}; }
  static __device__ __forceinline__ void add(part_t&, T) {}
  __device__ __forceinline__ part_t sum_of(part_t sum) const { return sum; }
};

template <>
struct row_power_t<float, true> {
  static constexpr bool kTogether = false;
  power_t power;

  __device__ __forceinline__ row_power_t(const roots_t<float>&, float m) : power(m) {}
  static __device__ __forceinline__ int unit_of(float m) { return int(power_t(m).unit); }
  // Whether scores are near enough to 0, of which `largest` is the largest.
  static __device__ __forceinline__ bool takes(float largest) {
    return power_t::takes(largest);
  }
  __device__ __forceinline__ float operator()(float x) const {
    score_t s;
    s.high = x;
    return power(s);
  }
  __device__ __forceinline__ part_t none() const { return {}; }
  static __device__ __forceinline__ void add(part_t& sum, float e) { sum += e; }
  __device__ __forceinline__ part_t sum_of(part_t sum) const { return sum; }
};

// Of doubles all rows are taken, so that the lanes of a warp, which compute exponentials
// together, always do.
template <>
struct row_power_t<double, true> {
  static constexpr bool kTogether = true;
  // The largest exponential is about 2^kRoom, so that all whose quotient is not 0 are
  // normal numbers.
  static constexpr int kRoom = 512;
  static constexpr double kLargest = 1 << 20;  // beyond, 2^k is not found in this way

  const roots_t<double>& roots;
  // Beyond kLargest scores are taken less the largest, which rounds none that counts.
  double base;
  double round;

  __device__ __forceinline__ row_power_t(const roots_t<double>& roots, double m)
      : roots(roots), base(abs_of(m) <= kLargest ? 0 : m) {
    constexpr double kCount = roots_t<double>::kCount;
    round = detail::range<double>::kRound - kCount * unit_of(m - base);
  }
  static __device__ __forceinline__ bool takes(double) { return true; }
  // For an m that is taken as it is.
  static __device__ __forceinline__ int unit_of(double m) {
    return int(m * kLog2e) - kRoom;
  }

  // exp(score - base) / 2^unit, NaN for infinity; all lanes of a warp call it.
  __device__ __forceinline__ double operator()(double score) const {
    constexpr double kReach = roots_t<double>::kCount * 1020;
    const double x = score - base;
    const double rounded = roots.rounded(x, round);
    const double e = roots.exp_of(x, round, rounded);
    return rounded < detail::range<double>::kRound - kReach ? 0 : e;
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

using power_of_row_t = row_power_t<acc_t, kInPowers>;
