// SPDX-License-Identifier: MIT
// Sums of a row or column that several blocks share: partial sums and the last step.
#pragma once

#include "softmax/detail/exp2_units.cuh"
#include "softmax/detail/scaled_sum.cuh"
#include "softmax/detail/online_sum.cuh"
#include "softmax/detail/params.cuh"
#include "softmax/detail/published_sum.cuh"

// Sums in powers of two take fewer instructions than those of softmax_online. Not for
// doubles, which would lose their last digit.
constexpr bool kSumsPowers = sizeof(acc_t) == 4;
using powers_t = power_sum_t<acc_t, kCoarse>;

// Adds some scores, moving the unit first if needed.
template <int kCount>
__device__ __forceinline__ void take_scores(powers_t& sum, const score_t (&s)[kCount],
                                            keys_t keys) {
  const auto key = [&](int e) { return s[e].key; };
  const acc_t largest = powers_t::template largest<kCount>(key);
  if constexpr (kScaled) {
    sum.see(rounded_product(s[0].factor.high, largest));
    if constexpr (kCoarse) {
      sum.template add_keys<kCount>(key, keys.unit);
      return;
    }
    sum.template add<kCount>([&](int e) { return s[e].value().high; },
                             [&](int e) { return s[e].value().low; });
  } else {
    sum.see(largest);
    sum.template add<kCount>(key);
  }
}
template <int kCount>
__device__ __forceinline__ void take_scores(running_t<acc_t>& sum,
                                            const score_t (&s)[kCount], keys_t keys) {
  acc_t m = -infinity<acc_t>();
#pragma unroll
  for (int e = 0; e < kCount; ++e) m = larger_finite_t()(m, s[e].key);
  sum.see(m, keys);
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum.l += s[e].exp_minus(sum.shift());
}

// l for a common m, which is at least that of the sum.
__device__ __forceinline__ double scaled_to(const partial_t& sum, double m,
                                            keys_t keys) {
  if (sum.m == m || !is_finite(sum.l)) return sum.l;
  return sum.m == -infinity<double>() ? 0 : sum.l * keys.exp_diff_exact(sum.m, m);
}

// Adds sums of all lanes of a warp, in all lanes.
template <int kCount>
__device__ __forceinline__ partial_t join(const partial_t (&own)[kCount], keys_t keys) {
  double m = own[0].m;
#pragma unroll
  for (int k = 1; k < kCount; ++k) m = larger_finite_t()(m, own[k].m);
  m = warp_reduce(m, larger_finite_t());
  double l = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) l += scaled_to(own[k], m, keys);
  return {warp_reduce(l, plus_t()), m};
}

// Whether a sum in powers of two is valid, and its published form.
__device__ __forceinline__ bool is_sum(const powers_t& sum) {
  return abs_of(sum.top) <= powers_t::kLargestTop;
}
__device__ __forceinline__ partial_t partial_of(const powers_t& sum, keys_t keys) {
  if constexpr (kScaled) {
    // A key whose score is close to the largest one.
    const double m = acc_t(sum.top / keys.factor.high);
    const pair_t<double> top = keys.factor * pair_t<double>{m, 0};
    return {sum.l.value * powers_t::power_about(sum.shift, top.high), m};
  }
  return {sum.l.value * powers_t::power_about(sum.shift, sum.top), double(sum.top)};
}
__device__ __forceinline__ partial_t partial_of(const running_t<acc_t>& sum, keys_t) {
  return {sum.l.value, double(sum.m)};
}

// A published sum in a form that can be merged with others.
__device__ __forceinline__ running_t<acc_t> sum_of(const partial_t& partial) {
  running_t<acc_t> sum;
  sum.l.value = partial.l;
  sum.m = acc_t(partial.m);
  return sum;
}

// The last step in powers of two: a third of the instructions of finish_t.
struct finish_in_powers_t {
  static constexpr bool kTakes = sizeof(acc_t) == 4 && !kLog && !kScaled && !kCoarse;
  power_t power;
  float inverse;

  finish_in_powers_t() = default;
  // For a sum l exp(m).
  __device__ __forceinline__ finish_in_powers_t(double l, float m) : power(m) {
    // In units of 2^unit.
    const double weight = power_sum_t<float, false>::power_about(int(power.unit), m);
    inverse = finish_t::quotient(weight, l);
  }
  static __device__ __forceinline__ bool takes(double l, float m) {
    return is_finite(m) && power_t::takes(m) && l > 0 && is_finite(l);
  }
  __device__ __forceinline__ float operator()(score_t s) const {
    return power(s) * inverse;
  }
};
