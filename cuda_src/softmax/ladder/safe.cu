// SPDX-License-Identifier: MIT
// softmax_safe: three passes over each row, with its maximum subtracted.
//
// Algorithm  m = max_i s_i,  l = sum_i exp(s_i - m),  out_i = exp(s_i - m) / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x.
//            No exponent is above 0, so nothing overflows, and l is at least 1.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     x three times, out once; any strides
// Numbers    exponentials in acc_t of exact differences, sums in double, rounded once;
//            for 16-bit results plain differences and the fast exponential
// Limits     none
#include "softmax/detail/row.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_safe(const x_t* x, const bool* where, out_t* out,
                 const __grid_constant__ layout_t layout) {
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const row_t row(x, where, out, layout, at);

    acc_t m = -infinity<acc_t>();
#pragma unroll kUnroll
    for (long long i = lane(); i < row.length; i += kLanes) {
      m = larger_t()(m, row.score(i).key);
    }
    m = shift_by(row_max(m));

    sum_t sum;
#pragma unroll kUnroll
    for (long long i = lane(); i < row.length; i += kLanes) {
      sum += row.score(i).exp_minus(m);
    }
    const double l = row_sum(sum);

    const finish_t finish(m, l);
#pragma unroll kUnroll
    for (long long i = lane(); i < row.length; i += kLanes) {
      row.store(i, row.selected(i) ? finish(row.score(i)) : unselected());
    }
  }
}
