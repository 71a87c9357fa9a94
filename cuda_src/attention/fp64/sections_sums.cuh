// SPDX-License-Identifier: MIT
// The end of products that are gradients.
#pragma once

#include "attention/fp64/products.cuh"

// Steps whose products are summed in registers before they are added in memory: sums
// stay short, and so do their roundings.
constexpr int kRunSteps = 64;

// store(row, col, sum) for each that exists.
template <typename Store>
__device__ __forceinline__ void for_each_sum(const sums_t& sums, int num_rows,
                                             int num_cols, Store store) {
  const thread_t me;
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(me, m, h);
      if (row >= num_rows) continue;
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int col = me.col + 8 * n + 2 * me.t + e;
          if (col < num_cols) store(row, col, sums[m][n][2 * h + e]);
        }
      }
    }
  }
}

// Where a block writes its sums.
struct sums_place_t {
  double* to;
  index_t row, col;  // strides
  int num_rows, num_cols;
};

// Writes scale_of(row) times each sum that exists, or adds it to what is there; returns
// whether a term is not finite.
template <typename Scale>
__device__ __forceinline__ bool store_sums(const sums_t& sums,
                                           const sums_place_t& place, bool adds,
                                           Scale scale_of) {
  bool nonfinite = false;
  const bool are_pairs =
      ((reinterpret_cast<unsigned long long>(place.to) / 8 | place.row) & 1) == 0 &&
      place.col == 1 && place.num_cols % 2 == 0;
  if (are_pairs) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const thread_t me;
        const int i = row_of(me, m, h), left = place.num_cols - me.col - 2 * me.t;
        if (i >= place.num_rows) continue;
        double* const to = place.to + i * place.row + me.col + 2 * me.t;
        const double scale = scale_of(i);
        // All are read before one is written: the compiler would take turns.
        double2 x[kTilesN];
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          if (adds && 8 * n < left) x[n] = load2(to + 8 * n);
        }
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          if (8 * n >= left) continue;
          double2 y = {sums[m][n][2 * h] * scale, sums[m][n][2 * h + 1] * scale};
          nonfinite |= !is_finite(y.x) || !is_finite(y.y);
          if (adds) y = {x[n].x + y.x, x[n].y + y.y};
          *reinterpret_cast<double2*>(to + 8 * n) = y;
        }
      }
    }
    return nonfinite;
  }
  for_each_sum(sums, place.num_rows, place.num_cols, [&](int i, int d, double sum) {
    double& x = place.to[i * place.row + d * place.col];
    const double term = sum * scale_of(i);
    nonfinite |= !is_finite(term);
    x = adds ? x + term : term;
  });
  return nonfinite;
}
