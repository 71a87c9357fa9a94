// SPDX-License-Identifier: MIT
// softmax_online: two passes over each row, with a sum that follows the running
// maximum.
//
// Algorithm  Milakov and Gimelshein 2018. The first pass keeps
//                m' = max(m, s_i),  l = l exp(m - m') + exp(s_i - m')
//            and the second writes out_i = exp(s_i - m) / l
//            (log_softmax: out_i = (s_i - m) - log l), s = scale * x.
//            Each lane keeps a pair (m, l); pairs merge in the same way. m moves in
//            steps (softmax/detail/online_sum.cuh).
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     x twice, out once; any strides
// Numbers    exponentials in acc_t of exact differences, sums in double, rounded once;
//            for 16-bit results plain differences and the fast exponential
// Limits     none
#include "softmax/detail/row.cuh"
#include "softmax/detail/online_sum.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_online(const x_t* x, const bool* where, out_t* out,
                   const __grid_constant__ layout_t layout) {
  const keys_t keys(layout);
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const row_t row(x, where, out, layout, at);

    // kBatch elements at a time, so that their loads are in flight together.
    score_t s[kBatch];
    running_t<acc_t> sum;
    for (long long i = lane(); i < row.length; i += kBatch * kLanes) {
      acc_t m = -infinity<acc_t>();
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        s[k] = row.score(i + k * kLanes);
        m = larger_finite_t()(m, s[k].key);
      }
      sum.see(m, keys);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) sum.l += s[k].exp_minus(sum.shift());
    }
    sum = group_reduce<kLanes>(sum, combine_t(keys));

    const finish_t finish(sum.shift(), sum.l.value);
    for (long long i = lane(); i < row.length; i += kBatch * kLanes) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) s[k] = row.score(i + k * kLanes);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const long long j = i + k * kLanes;
        if (j < row.length) row.store(j, row.selected(j) ? finish(s[k]) : unselected());
      }
    }
  }
}
