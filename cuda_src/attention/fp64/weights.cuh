// SPDX-License-Identifier: MIT
// From products to weights, and which of them count, for the float64 gradients on
// tensor cores.
#pragma once

#include "attention/score/score.cuh"
#include "common/exp2_f64.cuh"

// Whether scores have options other than a scale.
constexpr bool kTerms = kChangesScores;

// Bounds relative to `row` queries and `col` keys further on.
__device__ __forceinline__ mask_bounds_t moved(const mask_bounds_t& bounds, int row,
                                               int col) {
  return {bounds.low - col + row, bounds.high - col + row, bounds.num_queries - row,
          bounds.num_keys - col};
}

// Whether some of the first `rows` queries may see some of the first `cols` keys.
__device__ __forceinline__ bool sees_any(const mask_bounds_t& bounds, int rows,
                                         int cols) {
  rows = min(rows, bounds.num_queries);
  cols = min(cols, bounds.num_keys);
  return rows > 0 && cols > 0 && bounds.low < cols && 1 - rows < bounds.high;
}

// exp(s - lse) of a raw score q.k, or -0 for a hidden key; `derivative` is that of the
// score. NaN if it is far from any weight; NaN in a gradient triggers the fallback.
template <bool kCheck>
__device__ __forceinline__ double weight_of(double q_dot_k, bool in_bounds,
                                            const exp2_t& exp2, const scores_t& scores,
                                            double scale, index_t i, index_t j,
                                            double lse, double& derivative) {
  constexpr double kLargest = 700;  // logarithms below this do not overflow
  derivative = 1;
  double x;
  bool unseen = kCheck && !in_bounds;
  if constexpr (kTerms) {
    double s = -infinity<double>();
    if (!unseen) s = scores.with_derivative(q_dot_k, i, j, derivative);
    unseen = s == -infinity<double>();
    x = s - lse;
  } else {
    x = fma_of(q_dot_k, scale, -lse);
  }
  // All lanes of the warp take part.
  double p = exp2(x);
  // Compares high words as floats; also true for NaN and infinities.
  if (!(high_word_as_float(x) <= high_word_as_float(kLargest))) p = nan_value<double>();
  return unseen ? -0.0 : p;
}
