// SPDX-License-Identifier: MIT
// What a row of scores adds to the gradient of its sink:
//     -exp(sink - lse) delta,  delta = sum(dO * out) - dlse.
//
// Where the sink has nearly all the weight, or values are tiny, a float16 `out` is
// below the normal numbers, and delta is lost in its rounding. The kernels that compute
// delta write kLostTerm then, and attention_vjp_sinks puts the term in its place.
#pragma once

#include "attention/product_factors.cuh"
#include "common/reduce.cuh"

constexpr bool kMayLoseTerms = kHasSinks && kNarrow<elem_t>;

// Half the distance of subnormal numbers of float16, and its unit roundoff.
constexpr accum_t kSubnormalRounding = 0x1p-25f, kRounding = 0x1p-11f;

// A NaN that no arithmetic returns.
constexpr unsigned kLostTerm = 0x7fc51e4bu;
__device__ __forceinline__ bool is_lost(float term) {
  return __float_as_uint(term) == kLostTerm;
}

// The sums of |dO * out| and |dO| over a row, which tell what rounding `out` may cost.
struct out_rounding_t {
  accum_t products = 0, dout = 0;

  __device__ void add(accum_t o, accum_t d) {
    if constexpr (kMayLoseTerms) {
      products += abs_of(o * d);
      dout += abs_of(d);
    }
  }
  template <int kLanes = kWarpSize> __device__ void reduce() {
    if constexpr (kMayLoseTerms) {
      const auto plus = [](accum_t a, accum_t b) { return a + b; };
      products = warp_reduce<kLanes>(products, plus);
      dout = warp_reduce<kLanes>(dout, plus);
    }
  }
  // Whether subnormal numbers may cost more than the rounding of normal ones. What is
  // not finite may be lost as well: `out` = 0 hides it.
  __device__ bool loses_delta() const {
    return !(kSubnormalRounding * dout <= kRounding * products);
  }
};

// The term of row i, or kLostTerm.
__device__ __forceinline__ accum_t sink_term(const scores_t& scores, index_t i,
                                             accum_t lse, accum_t delta,
                                             out_rounding_t rounding = {}) {
  if (!scores.is_query(i) || scores.sink() == -infinity<accum_t>()) return 0;
  const accum_t weight = exp_diff_exact(scores.sink(), lse);
  if constexpr (kMayLoseTerms) {
    if (weight != 0 && rounding.loses_delta()) return __uint_as_float(kLostTerm);
  }
  return -weight * delta;
}
