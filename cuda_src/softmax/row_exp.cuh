// SPDX-License-Identifier: MIT
// Exponentials of the scores of a row that is held on chip, and their sum.
#pragma once

#include "softmax/group.cuh"
#include "softmax/power_sum.cuh"
#include "softmax/terms.cuh"

// Whether a warp computes exponentials of doubles together, by a table in its lanes: 25
// instructions on doubles where exp() takes 35. log_softmax needs only their sum, and
// has fewer registers.
constexpr bool kByTable =
    kSame<x_t, double> && kSame<acc_t, double> && !kHasWhere && !kLog;

template <bool kTable>
struct row_exp_t {
  static constexpr bool kTogether = false;
  acc_t m;

  __device__ __forceinline__ explicit row_exp_t(acc_t m) : m(m) {}
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

template <>
struct row_exp_t<true> {
  static constexpr bool kTogether = true;
  // The largest exponential is 2^kRoom, so that all whose quotient is not 0 are normal
  // numbers. As results are quotients, it falls out of them.
  static constexpr int kRoom = 512;
  static constexpr int kCount = roots_t<double>::kCount;
  static constexpr double kRound = detail::range<double>::kRound;

  roots_t<double> roots;
  double m;

  __device__ __forceinline__ explicit row_exp_t(double m) : m(m) {}
  // exp(score - m) 2^kRoom
  template <typename S>
  __device__ __forceinline__ double operator()(S score) const {
    const pair_t<double> x = score.minus(m);
    const double rounded = roots.rounded(x.high, kRound + double(kCount) * kRoom);
    const double e = roots.exp_of(x, kRound + double(kCount) * kRoom, rounded);
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

using exp_of_row_t = row_exp_t<kByTable>;
