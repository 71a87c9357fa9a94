// SPDX-License-Identifier: MIT
// softmax_naive: the textbook formula, in the precision of the input.
//
// Algorithm  l = sum_i exp(s_i),  out_i = exp(s_i) / l
//            (log_softmax: out_i = s_i - log l), s = scale * x.
//            No maximum is subtracted: exp overflows from s = 11.09 in float16, 88.7 in
//            float32 and bfloat16, 709.8 in float64, and the row becomes NaN or 0.
// Grid       1-D; a block of kNumThreads takes kRowsPerBlock rows at a time
// Memory     x twice, out once; any strides
// Numbers    every operation rounds to the type of x (float64 if x holds integers)
// Limits     none; wrong for large scores, on purpose
#include "softmax/detail/row.cuh"

// The result of a step, rounded to the type of x if that is narrower.
__device__ __forceinline__ acc_t rounded(acc_t value) {
  if constexpr (kHasInfinity<x_t> && sizeof(x_t) <= 4) return to<acc_t>(to<x_t>(value));
  return value;
}

struct rounded_plus_t {
  __device__ __forceinline__ acc_t operator()(acc_t a, acc_t b) const {
    return rounded(a + b);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads)
    softmax_naive(const x_t* x, const bool* where, out_t* out,
                  const __grid_constant__ layout_t layout) {
  const acc_t scale = rounded(acc_t(layout.scale));
  for (long long at = first_row(); at < layout.num_rows; at += row_step()) {
    const row_t row(x, where, out, layout, at);

    acc_t l = 0;
    for (long long i = lane(); i < row.length; i += kLanes) {
      if (!row.selected(i)) continue;
      l = rounded(l + rounded(exp_of(rounded(scale * row.load(i)))));
    }
    l = group_reduce<kLanes>(l, rounded_plus_t());

    const acc_t log_l = rounded(log_of(l));
    for (long long i = lane(); i < row.length; i += kLanes) {
      acc_t value = unselected();
      if (row.selected(i)) {
        const acc_t s = rounded(scale * row.load(i));
        value = rounded(kLog ? s - log_l : rounded(exp_of(s)) / l);
      }
      row.store(i, value);
    }
  }
}
