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
