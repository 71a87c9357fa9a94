// SPDX-License-Identifier: MIT
// The sum of exponentials of one column in one thread.
//
// l 2^unit as in power_sum_t, with less work for the few scores that a thread has per
// column at a time: their maximum is merged once, and the unit is a number of type T,
// from which limits follow in one instruction.
#pragma once

#include "softmax/detail/scaled_sum.cuh"

template <typename T, bool kIsCoarse> struct column_sum_t {
  using joined_t = power_sum_t<T, kIsCoarse>;
  using range = detail::range<T>;

  T top = -infinity<T>();          // the largest score; NaN if there was one
  T unit = T(joined_t::kNothing);  // an integer
  typename conditional<kIsCoarse, float, sum_t>::type l = {};  // float for 16 bits

  __device__ __forceinline__ stored_sum_t<T> stored() const {
    return {total(l), top, int(unit)};
  }
  // Whether a score can be added before the unit must move; true for NaN.
  __device__ __forceinline__ bool has_room(T m) const {
    return !(m > fma_of(unit, T(kLn2), T(joined_t::kSlack * kLn2)));
  }
  __device__ __forceinline__ void make_room(T m) {
    if (has_room(m)) return;
    const int other = joined_t::shift_of(m);
    const int count = int(unit) - other;
    unit = T(other);
    if constexpr (kIsCoarse) {
      l *= exp2f(float(count));
    } else {
      const double factor = count < -1000 ? 0.0 : detail::times_power(1.0, count);
      l.value *= factor;
      l.lost *= factor;
    }
  }

  // Adds the exponentials of score(0), ..., score(kCount - 1), which must have room;
  // empty slots hold -inf.
  template <int kCount, typename Score>
  __device__ __forceinline__ void add(Score score) {
    const T lowest = fma_of(unit, T(kLn2), T(-joined_t::kReach * kLn2));
    const T round = range::kRound - unit;
    l += tree<kCount>([&](int k) {
      const T x = larger_t()(score(k), lowest);
      const T rounded = fma_of(x, T(kLog2e), round);  // k - unit, in its low bits
      const T whole = rounded - round;
      T r = fma_of(whole, -range::kLn2High, x);
      r = fma_of(whole, -range::kLn2Low, r);
      const double e = 1 + detail::widened_term(detail::expm1_reduced(r));
      return detail::times_power(e, range::low_bits(rounded));
    });
  }
  // One term to about 2^-21, for 16-bit results.
  __device__ __forceinline__ float term(float score) const {
    return exp2f(fma_of(score, float(kLog2e), -unit));
  }

 private:
  // The sum of term(0), ..., term(kCount - 1) as a tree, so that few additions depend
  // on each other.
  template <int kCount, typename Term>
  static __device__ __forceinline__ auto tree(Term term) {
    decltype(term(0)) terms[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) terms[k] = term(k);
#pragma unroll
    for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
      for (int k = 0; k + step < kCount; k += 2 * step) terms[k] += terms[k + step];
    }
    return terms[0];
  }
};
