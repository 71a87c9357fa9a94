// SPDX-License-Identifier: MIT
// The numbers of softmax and log_softmax: the problem, a score, the last step.
//
// Parameters X_T, OUT_T     element types of x and out
//            LOG            1 for log_softmax
//            HAS_WHERE      1 if a mask says which elements take part
//            SCALED         1 if x is multiplied by a scale first
//            OUTER_AXES, REDUCED_AXES   how many axes are left of each kind
//            ACC_T          as in softmax/sum.cuh
#pragma once

#include "common/math.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"
#include "softmax/log.cuh"
#include "softmax/sum.cuh"

#ifndef X_T
#error "the parameters above come from the host"
#endif
using x_t = X_T;
using out_t = OUT_T;
constexpr bool kLog = LOG, kHasWhere = HAS_WHERE, kScaled = SCALED;

// Where the result is rounded to 16 bits, so are the errors of cheaper exponentials.
constexpr bool kCoarse = sizeof(out_t) == 2 && sizeof(acc_t) == 4;

enum { kX, kWhere, kOut, kNumArrays };

// The problem, as packed by the host.
struct layout_t {
  long long num_rows, row_length;
  double scale;
  axes_t<OUTER_AXES, kNumArrays> outer;      // over the rows
  axes_t<REDUCED_AXES, kNumArrays> reduced;  // over the elements of a row
};

// scale * x, to twice the digits of acc_t: at a score of 80 the rounding of the product
// alone would be a relative error of 5e-6 of its float exponential.
struct score_t {
  acc_t high, low;

  // Of an element that takes no part: exp of it is 0.
  __device__ __forceinline__ score_t() : high(-infinity<acc_t>()), low(0) {}

  __device__ __forceinline__ score_t(acc_t x, const layout_t& layout)
      : high(x), low(0) {
    if constexpr (kScaled) {
      const acc_t scale = acc_t(layout.scale);
      const acc_t scale_low = acc_t(layout.scale - double(scale));
      high = rounded_product(scale, x);
      low = fma_of(scale, x, -high) + scale_low * x;
      // Past 2^24 (float) neighbouring scores are further apart than exp can see.
      if (!(abs_of(low) <= acc_t(1))) low = 0;
    }
  }

  // score - m
  __device__ __forceinline__ pair_t<acc_t> minus(acc_t m) const {
    pair_t<acc_t> d = exact_sum(high, -m);
    if constexpr (kScaled) {
      if (is_finite(d.high)) d = exact_sum(d.high, d.low + low);
    }
    return d;
  }

  // exp(score - m)
  __device__ __forceinline__ acc_t exp_minus(acc_t m) const {
    if constexpr (kCoarse) return exp_fast(kScaled ? high - m + low : high - m);
    return exp_of(minus(m));
  }
};

// What an element that takes no part becomes.
__device__ __forceinline__ acc_t unselected() {
  return kLog ? -infinity<acc_t>() : acc_t(0);
}

// The last step, as SciPy has it: exp(s - m) / l, or (s - m) - log l.
struct finish_t {
  acc_t m;
  acc_t inverse;          // softmax: 1 / l; NaN if the row holds +inf, NaN or only -inf
  pair_t<acc_t> log_sum;  // log_softmax: m + log l, in twice the digits

  finish_t() = default;

  // For float a Newton step is enough, and a quarter of a division.
  static __device__ __forceinline__ acc_t quotient(double weight, double l) {
    if constexpr (sizeof(acc_t) == sizeof(double)) return weight / l;
    const double guess = 1.0f / float(l);
    return acc_t(weight * fma(fma(-l, guess, 1.0), guess, guess));
  }

  // `weight` is exp(m' - m) where the exponentials at hand are those of s - m'.
  __device__ __forceinline__ finish_t(acc_t m, double l, double weight = 1) : m(m) {
    if constexpr (kLog) {
      // log(high) + low / high: a float log, without losing what l has beyond float.
      const acc_t high = acc_t(l);
      const pair_t<acc_t> log_of_high =
          kCoarse ? pair_t<acc_t>{log_of(high), 0} : log_in_parts(high);
      log_sum = exact_sum(m, log_of_high.high);
      log_sum.low += log_of_high.low;
      log_sum.low += acc_t((l - high) / l);
      if (is_nan(log_sum.low)) log_sum.low = 0;  // l is 0, inf or NaN
    } else {
      inverse = l > 0 && is_finite(l) ? quotient(weight, l) : nan_value<acc_t>();
    }
  }

  __device__ __forceinline__ acc_t operator()(score_t s) const {
    if constexpr (kLog) {
      return (s.high - log_sum.high) + (s.low - log_sum.low);
    } else {
      return s.exp_minus(m) * inverse;
    }
  }
};
