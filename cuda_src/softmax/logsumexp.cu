// SPDX-License-Identifier: MIT
// softmax_logsumexp: log |sum_i b_i exp(a_i)| of each row, by one read.
//
// Algorithm  the online recurrence of softmax_online with a weight b_i:
//                m' = max(m, a_i),  l = l exp(m - m') + b_i exp(a_i - m')
//            and at the end  out = m + log |l|,  sign = sign of l.
//            b_i == 0 drops its element, whatever a_i is.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     a and b once, one number a row is written; any strides
// Numbers    exponentials in acc_t of exact differences; sums and the logarithm in
// double Limits     none. A negative sum gives NaN unless the sign is asked for.
//
// Parameters A_T, B_T, OUT_T   element types of a, b, and of out and sign
//            HAS_B, HAS_WHERE  1 if there are weights, a mask
//            OUTER_AXES, REDUCED_AXES   how many axes are left of each kind
//            ACC_T, LANES, ROWS_PER_BLOCK   as in softmax/group.cuh
#include "common/math.cuh"
#include "common/strides.cuh"
#include "common/types.cuh"
#include "softmax/group.cuh"
#include "softmax/running.cuh"

#ifndef A_T
#error "the parameters above come from the host"
#endif
using a_t = A_T;
using b_t = B_T;
using out_t = OUT_T;
constexpr bool kHasB = HAS_B, kHasWhere = HAS_WHERE;

enum { kA, kB, kWhere, kOut, kSign, kNumArrays };

// The problem, as packed by the host.
struct layout_t {
  long long num_rows, row_length;
  long long returns_sign;
  axes_t<OUTER_AXES, kNumArrays> outer;
  axes_t<REDUCED_AXES, kNumArrays> reduced;  // out and sign have stride 0 here
};

// m + log l for l > 0, to the last digits also where m and log l cancel: a Newton step
// with the residual l exp(m - result) - 1.
__device__ __forceinline__ double shifted_log(double m, double l) {
  const double result = m + log(l);
  if (!is_finite(result)) return result;
  return result + (l * exp_diff_exact(m, result) - 1);
}

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_logsumexp(const a_t* a,
                      const b_t* b,
                      const bool* where,
                      out_t* out,
                      out_t* sign,  // written if layout.returns_sign
                      const __grid_constant__ layout_t layout) {
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const long long row = row_of_lane(at);
    const long long length = row < layout.num_rows ? layout.row_length : 0;
    const auto base = locate(layout.outer, row);

    running_t<acc_t> sum;
    for (long long i = lane(); i < length; i += kBatch * kLanes) {
      // kBatch elements at a time, so that their loads are under way together. What
      // takes no part has a weight and an exponential of 0.
      acc_t s[kBatch], m = -infinity<acc_t>();
      double weight[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const long long j = i + k * kLanes;
        const auto offset = locate(layout.reduced, j);
        bool is_selected = j < length;
        if (kHasWhere && is_selected) {
          is_selected = where[base.of[kWhere] + offset.of[kWhere]];
        }
        weight[k] = is_selected;
        if (kHasB && is_selected) {
          weight[k] = to<double>(b[base.of[kB] + offset.of[kB]]);
          is_selected = weight[k] != 0;
        }
        s[k] = is_selected ? to<acc_t>(a[base.of[kA] + offset.of[kA]])
                           : -infinity<acc_t>();
        m = larger_finite_t()(m, s[k]);
      }
      sum.see(m);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const acc_t e = exp_diff_exact(s[k], sum.shift());
        sum.l += kHasB ? weight[k] * e : double(e);
      }
    }
    sum = group_reduce<kLanes>(sum, merge_t());

    if (lane() == 0 && length > 0) {
      const double l = sum.l.value;
      double result = shifted_log(sum.shift(), abs_of(l));
      if (l < 0 && !layout.returns_sign) result = nan_value<double>();
      out[base.of[kOut]] = to<out_t>(result);
      if (layout.returns_sign) {
        const double of_l = is_nan(l) ? l : double(l > 0) - double(l < 0);
        sign[base.of[kSign]] = to<out_t>(of_l);
      }
    }
  }
}
