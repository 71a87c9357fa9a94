// SPDX-License-Identifier: MIT
// Numbers of twice the digits of float64, for scores so large that their last digit
// shows in a weight. Where the high part is infinite or NaN the low one is 0.
#pragma once

#include "common/math.cuh"

using twofold_t = pair_t<double>;

constexpr double kLog2eLow = 2.0355273740931033e-17;  // log2(e) - kLog2e

__device__ __forceinline__ twofold_t twofold(double high, double low) {
  return {high, is_finite(high) ? low : 0};
}

// a - b
__device__ __forceinline__ twofold_t difference_of(double a, double b) {
  const twofold_t found = exact_sum(a, -b);
  return twofold(found.high, found.low);
}

// a b
__device__ __forceinline__ twofold_t product_of(double a, double b) {
  const double p = rounded_product(a, b);
  return twofold(p, fma(a, b, -p));
}
__device__ __forceinline__ twofold_t product_of(twofold_t a, twofold_t b) {
  const twofold_t p = product_of(a.high, b.high);
  return twofold(p.high, fma(a.high, b.low, fma(a.low, b.high, p.low)));
}

// The square root; its low part is a step of Newton's method.
__device__ __forceinline__ twofold_t root_of(twofold_t q) {
  const double r = sqrt(q.high);
  if (!(r > 0)) return {r, 0};
  return twofold(r, (fma(-r, r, q.high) + q.low) / (2 * r));
}

// total += a^2
__device__ __forceinline__ void add_square(twofold_t& total, twofold_t a) {
  const twofold_t square = product_of(a, a);
  const twofold_t sum = exact_sum(total.high, square.high);
  total = twofold(sum.high, total.low + (sum.low + square.low));
}
