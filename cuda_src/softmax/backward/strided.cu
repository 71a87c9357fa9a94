// SPDX-License-Identifier: MIT
// softmax_vjp: the gradient of a softmax or log_softmax from its output y.
//
// Algorithm  softmax       c = sum_i y_i dy_i,  dx_i = scale y_i (dy_i - c)
//            log_softmax   c = sum_i dy_i,      dx_i = scale (dy_i - exp(y_i) c),
//                          and 0 where y_i is -inf (a masked element)
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     y and dy twice, the second time mostly from cache; dx once; any strides
// Numbers    sums in double, dy - c in acc_t with c to twice its digits, rounded once
// Limits     none
#include "softmax/detail/backward.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_vjp(const y_t* y, const dy_t* dy, out_t* dx,
                const __grid_constant__ layout_t layout) {
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const row_t row(y, dy, dx, layout, at);

    sum_t sum;
#pragma unroll kUnroll
    for (long long i = lane(); i < row.length; i += kLanes) {
      const auto offset = locate(layout.reduced, i);
      const double g = to<double>(row.dy[offset.of[kDy]]);
      sum += kLog ? g : to<double>(row.y[offset.of[kY]]) * g;
    }
    const gradient_t gradient(row_sum(sum), layout);

    for (long long i = lane(); i < row.length; i += kUnroll * kLanes) {
      // dx may be y or dy itself: a batch is read before it is written.
      acc_t p[kUnroll], g[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const long long j = i + k * kLanes;
        if (j >= row.length) break;
        const auto offset = locate(layout.reduced, j);
        p[k] = to<acc_t>(row.y[offset.of[kY]]);
        g[k] = to<acc_t>(row.dy[offset.of[kDy]]);
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const long long j = i + k * kLanes;
        if (j >= row.length) break;
        row.dx[row.offset(kOut, j)] = to<out_t>(gradient(p[k], g[k]));
      }
    }
  }
}
