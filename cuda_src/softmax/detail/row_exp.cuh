// SPDX-License-Identifier: MIT
// Exponentials of the scores of a row held on chip, and their sum.
#pragma once

#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/scaled_sum.cuh"
#include "softmax/detail/exp_policy.cuh"

template <exps kHow> struct row_exp_t {
  static constexpr bool kTogether = false;
  acc_t m;

  __device__ __forceinline__ explicit row_exp_t(acc_t m, exp_unit_t = exp_unit_t())
      : m(m) {}
  // exp(score - m)
  __device__ __forceinline__ acc_t operator()(score_t score) const {
    return score.exp_minus(m);
  }
  static __device__ __forceinline__ part_t none() { return {}; }
  static __device__ __forceinline__ void add(part_t& sum, acc_t e) {
    sum += as_term(e);
  }
  static __device__ __forceinline__ part_t sum_of(part_t sum) { return sum; }
};

template <> struct row_exp_t<exps::kOfFloats> : row_exp_t<exps::kOfScore> {
  using range = detail::range<float>;
  exp_unit_t unit;

  __device__ __forceinline__ explicit row_exp_t(float m, exp_unit_t unit = exp_unit_t())
      : row_exp_t<exps::kOfScore>(m), unit(unit) {}

  // exp(score - m), for score <= m; undefined for NaN, which m reveals
  template <typename S> __device__ __forceinline__ float operator()(S score) const {
    const pair_t<float> d = difference(score);
    const float rounded = fma_of(d.high, unit.high, range::kRound);
    const float k = rounded - range::kRound;  // also in the low bits of `rounded`
    const float low = fma_of(d.high, unit.rest, d.low);
    const float r = fma_of(low, unit.high, fma_of(d.high, unit.high, -k));
    const float e = range::times_power(exp2f(r), range::low_bits(rounded));
    return d.high < unit.lowest ? 0.0f : e;
  }

 private:
  // key - m, exactly. If it is known which operand is larger in magnitude, two
  // operations suffice for the rounding error: as key <= m, the smaller one of key and
  // -m.
  template <typename S>
  __device__ __forceinline__ pair_t<float> difference(S score) const {
    const float larger = fminf(score.key, -m), smaller = fmaxf(score.key, -m);
    const float sum = score.key - m;
    return {sum, smaller - (sum - larger)};
  }
};

template <> struct row_exp_t<exps::kByTable> {
  static constexpr bool kTogether = true;
  // The largest exponential is 2^kRoom, so that all with a nonzero quotient are normal
  // numbers. The factor cancels in quotients.
  static constexpr int kRoom = 512;
  static constexpr int kCount = roots_t<double>::kCount;
  static constexpr double kRound = detail::range<double>::kRound;

  roots_t<double> roots;
  double m;
  exp_unit_t unit;

  __device__ __forceinline__ explicit row_exp_t(double m,
                                                exp_unit_t unit = exp_unit_t())
      : m(m), unit(unit) {}
  // exp(score - m) 2^kRoom
  template <typename S> __device__ __forceinline__ double operator()(S score) const {
    constexpr double kZero = kRound + double(kCount) * kRoom;
    const pair_t<double> d = exact_sum(score.key, -m);
    const double high = kCount * unit.high;
    const double rounded = fma(d.high, high, kZero);
    const double f = fma(d.high, high, kZero - rounded);
    const double low = fma(d.high, unit.rest, d.low);
    const double e = roots.exp2_of(fma(low, high, f), rounded);
    return rounded < kRound - kCount * 1020 ? 0 : e;
  }
  // A sum that starts above all exponentials is the larger operand of every addition,
  // so that its rounding error takes three instructions.
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
    sum.high -= start();  // exact: both are multiples of the same power of two
    if constexpr (kLog) {
      const double unit = __hiloint2double((1023 - kRoom) << 20, 0);
      sum.high *= unit;
      sum.low *= unit;
    }
    return sum;
  }
};

using exp_of_row_t = row_exp_t<kExps>;
