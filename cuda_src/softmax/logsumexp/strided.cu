// SPDX-License-Identifier: MIT
// softmax_logsumexp: log |sum_i b_i exp(a_i)| of each row, in one pass.
//
// Algorithm  the online recurrence of softmax_online with a weight b_i:
//                m' = max(m, a_i),  l = l exp(m - m') + b_i exp(a_i - m')
//            and at the end  out = m + log |l|,  sign = sign of l.
//            b_i == 0 drops its element, whatever a_i is. A result near 0 is the log of
//            a sum near 1, which swallowed its small terms: such a row is read again,
//            with out = a_max + log1p(sum of the others). So is a
//            row whose weights have a sum that overflows, with more subtracted.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     a and b once, one number per row is written; any strides
// Numbers    exponentials in acc_t of exact differences; sums and log in double
// Limits     none. A negative sum gives NaN unless the sign is asked for.
//
// Parameters B_T               element type of b
//            HAS_B, HAS_WHERE  1 if there are weights, a mask
#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/log_params.cuh"
#include "softmax/detail/online_sum.cuh"

using b_t = B_T;
constexpr bool kHasB = HAS_B, kHasWhere = HAS_WHERE;

// m + log l for l > 0, accurate also where m and log l cancel: a Newton step with the
// residual l exp(m - result) - 1.
__device__ __forceinline__ double shifted_log(double m, double l) {
  const double result = m + log(l);
  if (!is_finite(result)) return result;
  return result + (l * exp_diff_exact(m, result) - 1);
}

// Finite weights may have a sum that overflows. With so much more subtracted from the
// scores, no number of terms does.
constexpr bool kMayOverflow = kHasB && sizeof(b_t) == sizeof(double);
constexpr double kMore = 45;

// An element of a row; a masked one has weight 0 and score -inf.
template <typename T> struct term_t {
  T score;
  double weight;
};

struct row_t {
  const a_t* a;
  const b_t* b;
  const bool* where;
  const layout_t& layout;
  long long length;

  template <typename T> __device__ __forceinline__ term_t<T> term(long long i) const {
    const auto at = locate(layout.reduced, i);
    bool is_selected = i < length;
    if (kHasWhere && is_selected) is_selected = where[at.of[kWhere]];
    double weight = is_selected;
    if (kHasB && is_selected) {
      weight = to<double>(b[at.of[kB]]);
      is_selected = weight != 0;
    }
    return {is_selected ? to<T>(a[at.of[kA]]) : -infinity<T>(), weight};
  }

  // sum b exp(a - m) in double. Called by all lanes of a warp.
  __device__ double sum_beyond(double m) const {
    double sum = 0;
    for (long long i = lane(); i < length; i += kLanes) {
      const term_t<double> t = term<double>(i);
      if (t.weight != 0) sum += t.weight * exp_diff_exact(t.score, m);
    }
    return row_sum(sum);
  }

  // log of the row's sum when that is near 1: the largest score plus log1p of all other
  // terms, which are never added to the 1 that would swallow them. Called by all lanes
  // of a warp.
  __device__ double log_near_one() const {
    double m = -infinity<double>();
    for (long long i = lane(); i < length; i += kLanes) {
      m = larger_finite_t()(m, term<double>(i).score);
    }
    m = group_reduce<kLanes>(m, larger_finite_t());
    double top = 0, rest = 0;
    for (long long i = lane(); i < length; i += kLanes) {
      const term_t<double> t = term<double>(i);
      (t.score == m ? top : rest) += t.weight * exp_diff_exact(t.score, m);
    }
    top = row_sum(top);
    rest = row_sum(rest);
    return m + log1p((top - 1) + rest);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_logsumexp(const a_t* a, const b_t* b, const bool* where, out_t* out,
                      out_t* sign,  // written if layout.returns_sign
                      const __grid_constant__ layout_t layout) {
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const long long row_index = row_of_lane(at);
    const auto base = locate(layout.outer, row_index);
    const row_t row = {a + base.of[kA], b + base.of[kB], where + base.of[kWhere],
                       layout, row_index < layout.num_rows ? layout.row_length : 0};

    running_t<acc_t> sum;
    for (long long i = lane(); i < row.length; i += kBatch * kLanes) {
      // kBatch elements at a time, so that their loads are in flight together.
      term_t<acc_t> terms[kBatch];
      acc_t m = -infinity<acc_t>();
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        terms[k] = row.term<acc_t>(i + k * kLanes);
        m = larger_finite_t()(m, terms[k].score);
      }
      sum.see(m);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const acc_t e = exp_diff_exact(terms[k].score, sum.shift());
        sum.l += kHasB ? terms[k].weight * e : double(e);
      }
    }
    sum = group_reduce<kLanes>(sum, combine_t<>());

    double l = sum.l.value;
    double result = shifted_log(sum.shift(), abs_of(l));
    bool is_large = false;
    if constexpr (kHasB) {
      // Nothing may be subtracted in an infinite sum.
      bool is_infinite = !is_finite(l);
#pragma unroll 1
      for (int step = kMayOverflow ? 0 : 1; step < 2; ++step) {
        if (!(kLanes > kWarpSize ? is_infinite : __any_sync(kFullMask, is_infinite))) {
          break;
        }
        const double m = step == 0 ? sum.shift() + kMore : 0;
        const double again = row.sum_beyond(m);
        if (is_infinite && (step == 1 || is_finite(again))) {
          l = again;
          is_large = step == 0;
          result = is_large ? shifted_log(m, abs_of(l)) : log_of(abs_of(l));
          is_infinite = false;
        }
      }
    }
    // At a distance of 0.5 or more from 0 the digits above suffice.
    const bool is_near_zero = l > 0 && !is_large && abs_of(result) < 0.5;
    if (kLanes > kWarpSize ? is_near_zero : __any_sync(kFullMask, is_near_zero)) {
      const double precise = row.log_near_one();
      if (is_near_zero) result = precise;
    }
    if (l < 0 && !layout.returns_sign) result = nan_value<double>();
    if (lane() == 0 && row.length > 0) {
      out[base.of[kOut]] = to<out_t>(result);
      if (layout.returns_sign) {
        const double of_l = is_nan(l) ? l : double(l > 0) - double(l < 0);
        sign[base.of[kSign]] = to<out_t>(of_l);
      }
    }
  }
}
