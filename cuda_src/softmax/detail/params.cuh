// SPDX-License-Identifier: MIT
// Parameters of softmax and log_softmax: the problem, a score, the last step.
//
// Parameters X_T, OUT_T     element types of x and out
//            LOG            1 for log_softmax
//            HAS_WHERE      1 if a mask selects elements
//            SCALED         1 if x is multiplied by a scale first
//            OUTER_AXES, REDUCED_AXES   number of axes of each kind
#pragma once

#include "common/math.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"
#include "softmax/detail/log.cuh"
#include "softmax/detail/sum.cuh"

using x_t = X_T;
using out_t = OUT_T;
constexpr bool kLog = LOG, kHasWhere = HAS_WHERE, kScaled = SCALED;

// With 16-bit results, rounding hides the errors of cheaper exponentials.
constexpr bool kCoarse = sizeof(out_t) == 2 && sizeof(acc_t) == 4;

// Elements per 16-byte access to rows.
constexpr int kRowVector =
    16 / (sizeof(x_t) > sizeof(out_t) ? sizeof(x_t) : sizeof(out_t));

enum { kX, kWhere, kOut, kNumArrays };

// The problem, packed by the host.
struct layout_t {
  long long num_rows, row_length;
  double scale;
  // scale * (x - m) = factor * (key_factor * x - key_factor * m). key_factor is 0 or,
  // up to its sign, a power of two of at most 1, which is exact.
  double key_factor, factor;
  double unit, unit_rest;  // factor * log2(e) = unit (1 + unit_rest); unit as an acc_t
  axes_t<OUTER_AXES, kNumArrays> outer;      // over the rows
  axes_t<REDUCED_AXES, kNumArrays> reduced;  // over the elements of a row
};

// The factor of differences of keys, to twice the digits of T.
template <typename T, bool kIsOne> struct factor_t {
  static constexpr T high = 1;

  factor_t() = default;
  __device__ __forceinline__ explicit factor_t(const layout_t&) {}
  __device__ __forceinline__ T operator*(T d) const { return d; }
  __device__ __forceinline__ pair_t<T> operator*(pair_t<T> d) const { return d; }
};
template <typename T> struct factor_t<T, false> {
  T high, low;

  factor_t() = default;
  __device__ __forceinline__ explicit factor_t(const layout_t& layout)
      : high(T(layout.factor)), low(T(layout.factor - double(high))) {}
  __device__ __forceinline__ T operator*(T d) const { return high * d; }
  __device__ __forceinline__ pair_t<T> operator*(pair_t<T> d) const {
    const T product = rounded_product(high, d.high);
    T rest = fma_of(high, d.high, -product);
    rest = fma_of(high, d.low, rest);
    if constexpr (sizeof(T) < sizeof(double)) rest = fma_of(low, d.high, rest);
    return {product, rest};
  }
};

// exp(score - m) = 2^(high (1 + rest) d) for an exact difference d of keys: the scale
// becomes part of the factor of the exponent and costs nothing.
template <typename T, bool kIsOne> struct unit_t {
  static constexpr double kLog2eLow = 2.0355273740931033e-17;  // rest of kLog2e
  static constexpr T high = T(kLog2e);
  static constexpr T rest = T((kLog2e - double(high) + kLog2eLow) / double(high));
  static constexpr T lowest = T(-126.4) * T(kLn2);  // below, floats are subnormal

  unit_t() = default;
  __device__ __forceinline__ explicit unit_t(const layout_t&) {}
};
template <typename T> struct unit_t<T, false> {
  T high, rest, lowest;

  unit_t() = default;
  __device__ __forceinline__ explicit unit_t(const layout_t& layout)
      : high(T(layout.unit)),
        rest(T(layout.unit_rest)),
        lowest(T(__fdividef(-126.4f, float(high)))) {}
};
using exp_unit_t = unit_t<acc_t, !kScaled>;

// A score, scale * x, represented by a key: the scale multiplies differences of keys,
// which are exact. Otherwise exp would see the rounding error of the product: at a
// score of 80 a relative error of 5e-6 in float, and beyond 2^53 no correct digits.
struct score_t {
  acc_t key;
  factor_t<acc_t, !kScaled> factor;

  score_t() = default;
  __device__ __forceinline__ score_t(acc_t x, const layout_t& layout)
      : key(kScaled ? rounded_product(x, acc_t(layout.key_factor)) : x),
        factor(layout) {}
  // For a masked element: its exp is 0.
  static __device__ __forceinline__ score_t absent(const layout_t& layout) {
    score_t score(0, layout);
    score.key = -infinity<acc_t>();
    return score;
  }

  // Score minus that of key m.
  __device__ __forceinline__ pair_t<acc_t> minus(acc_t m) const {
    return factor * exact_sum(key, -m);
  }

  // exp of the same.
  __device__ __forceinline__ acc_t exp_minus(acc_t m) const {
    if constexpr (kCoarse) return exp_fast(factor * (key - m));
    return exp_of(minus(m));
  }

  // The score as a number and its rounding error.
  __device__ __forceinline__ pair_t<acc_t> value() const {
    pair_t<acc_t> product = factor * pair_t<acc_t>{key, 0};
    // Beyond 2^24 (float) neighbouring scores are further apart than exp can resolve.
    if (!(abs_of(product.low) <= acc_t(1))) product.low = 0;
    return product;
  }
};

// Differences of keys (softmax/detail/online_sum.cuh).
struct keys_t {
  factor_t<double, !kScaled> factor;
  exp_unit_t unit;

  __device__ __forceinline__ explicit keys_t(const layout_t& layout)
      : factor(layout), unit(layout) {}
  __device__ __forceinline__ double exp_diff(double x, double m) const {
    return x == -infinity<double>() ? 0 : exp_of(factor * (x - m));
  }
  // The same to the last digits, for finite x.
  __device__ __forceinline__ double exp_diff_exact(double x, double m) const {
    return exp_of(factor * exact_sum(x, -m));
  }
  // Whether the score of key x exceeds that of m by more than `slack`.
  template <typename T>
  __device__ __forceinline__ bool is_above(T x, T m, double slack) const {
    if constexpr (kScaled) return T(factor.high) * (x - m) > T(slack);
    return x > m + T(slack);
  }
};

// The result for a masked element.
__device__ __forceinline__ acc_t unselected() {
  return kLog ? -infinity<acc_t>() : acc_t(0);
}

// The last step, as in SciPy: exp(s - m) / l, or (s - m) - log l.
struct finish_t {
  acc_t m;
  acc_t inverse;          // softmax: 1 / l; NaN if the row holds +inf, NaN or only -inf
  pair_t<acc_t> log_sum;  // log_softmax: m + log l, in twice the digits; scaled: log l

  finish_t() = default;

  // For float a Newton step suffices, and costs a quarter of a division.
  static __device__ __forceinline__ acc_t quotient(double weight, double l) {
    if constexpr (sizeof(acc_t) == sizeof(double)) return weight / l;
    const double guess = 1.0f / float(l);
    return acc_t(weight * fma(fma(-l, guess, 1.0), guess, guess));
  }

  // `weight` is exp(m' - m) if the available exponentials are those of s - m'.
  __device__ __forceinline__ finish_t(acc_t m, double l, double weight = 1) : m(m) {
    if constexpr (kLog) {
      // log(high) + low / high: a float log without losing the digits of l beyond
      // float.
      const acc_t high = acc_t(l);
      const pair_t<acc_t> log_of_high =
          kCoarse ? pair_t<acc_t>{log_of(high), 0} : log_in_parts(high);
      log_sum = exact_sum(kScaled ? acc_t(0) : m, log_of_high.high);
      log_sum.low += log_of_high.low;
      log_sum.low += acc_t((l - high) / l);
      if (is_nan(log_sum.low)) log_sum.low = 0;  // l is 0, inf or NaN
    } else {
      inverse = l > 0 && is_finite(l) ? quotient(weight, l) : nan_value<acc_t>();
    }
  }

  __device__ __forceinline__ acc_t operator()(score_t s) const {
    if constexpr (kLog && kScaled && kCoarse) {
      return (s.factor * (s.key - m) - log_sum.high) - log_sum.low;
    } else if constexpr (kLog && kScaled) {
      const pair_t<acc_t> d = s.minus(m);
      const acc_t y = d.high - log_sum.high;
      return is_finite(y) ? y + (d.low - log_sum.low) : y;
    } else if constexpr (kLog) {
      return (s.key - log_sum.high) - log_sum.low;
    } else {
      return s.exp_minus(m) * inverse;
    }
  }
};
