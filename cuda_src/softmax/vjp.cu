// SPDX-License-Identifier: MIT
// softmax_vjp: the gradient of a softmax or log_softmax from its output y.
//
// Algorithm  softmax       c = sum_i y_i dy_i,  dx_i = scale y_i (dy_i - c)
//            log_softmax   c = sum_i dy_i,      dx_i = scale (dy_i - exp(y_i) c),
//                          and 0 where y_i is -inf (an element that took no part)
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     y and dy twice, the second time mostly from cache; dx once; any strides
// Numbers    sums in double, dy - c in acc_t with c to twice its digits, one rounding
// Limits     none
//
// Parameters Y_T, DY_T, OUT_T   element types of y, dy and dx
//            LOG                1 for log_softmax
//            OUTER_AXES, REDUCED_AXES   how many axes are left of each kind
//            ACC_T, LANES, ROWS_PER_BLOCK   as in softmax/group.cuh
#include "common/math.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"
#include "softmax/group.cuh"

#ifndef Y_T
#error "the parameters above come from the host"
#endif
using y_t = Y_T;
using dy_t = DY_T;
using out_t = OUT_T;
constexpr bool kLog = LOG;

enum { kY, kDy, kOut, kNumArrays };

// The problem, as packed by the host.
struct layout_t {
  long long num_rows, row_length;
  double scale;
  axes_t<OUTER_AXES, kNumArrays> outer;
  axes_t<REDUCED_AXES, kNumArrays> reduced;
};

extern "C" __global__ void __launch_bounds__(kNumThreads) softmax_vjp(
    const y_t* y, const dy_t* dy, out_t* dx, const __grid_constant__ layout_t layout) {
  const acc_t scale = acc_t(layout.scale);
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const long long row = row_of_lane(at);
    const long long length = row < layout.num_rows ? layout.row_length : 0;
    const auto base = locate(layout.outer, row);
    const y_t* y_row = y + base.of[kY];
    const dy_t* dy_row = dy + base.of[kDy];
    out_t* dx_row = dx + base.of[kOut];

    sum_t sum;
#pragma unroll kUnroll
    for (long long i = lane(); i < length; i += kLanes) {
      const auto offset = locate(layout.reduced, i);
      const double g = to<double>(dy_row[offset.of[kDy]]);
      sum += kLog ? g : to<double>(y_row[offset.of[kY]]) * g;
    }
    const double c = row_sum(sum);
    const acc_t c_high = acc_t(c);
    const acc_t c_low = is_finite(c_high) ? acc_t(c - c_high) : acc_t(0);

    for (long long i = lane(); i < length; i += kUnroll * kLanes) {
      // dx may be y or dy itself: what a batch writes, it has read before.
      acc_t p[kUnroll], g[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const long long j = i + k * kLanes;
        if (j >= length) break;
        const auto offset = locate(layout.reduced, j);
        p[k] = to<acc_t>(y_row[offset.of[kY]]);
        g[k] = to<acc_t>(dy_row[offset.of[kDy]]);
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const long long j = i + k * kLanes;
        if (j >= length) break;
        acc_t value;
        if (kLog) {
          value = p[k] == -infinity<acc_t>() ? acc_t(0)
                                             : fma_of(-exp_of(p[k]), c_high, g[k]);
        } else {
          value = p[k] * ((g[k] - c_high) - c_low);
        }
        dx_row[locate(layout.reduced, j).of[kOut]] = to<out_t>(scale * value);
      }
    }
  }
}
