// SPDX-License-Identifier: MIT
// The online sum of exponentials: one pass, no overflow, for any input.
#pragma once

#include "common/reduce.cuh"
#include "softmax/detail/sum.cuh"

// Differences of scores, for scores that are plain numbers.
struct plain_t {
  // exp(x - m), with 0 where both are -inf.
  __device__ __forceinline__ double exp_diff(double x, double m) const {
    return ::exp_diff(x, m);
  }
  // Whether a score exceeds m by more than `slack`.
  template <typename T>
  __device__ __forceinline__ bool is_above(T x, T m, double slack) const {
    return x > m + T(slack);
  }
};

// l = sum of weight * exp(score - m) so far. m follows the largest finite score in
// steps: it moves only when a score exceeds it by more than kSlack. Each move rounds l,
// and for rising scores the moves of the plain recurrence would add up to more than all
// other errors.
template <typename T> struct running_t {
  static constexpr double kSlack = 8;  // exp(8) = 2981 cannot overflow a sum

  T m = -infinity<T>();
  sum_t l;

  // What must be subtracted from a score.
  __device__ __forceinline__ T shift() const { return shift_by(m); }

  // Moves m up to `larger`.
  template <typename Keys = plain_t>
  __device__ __forceinline__ void rescale(T larger, Keys keys = Keys()) {
    // An infinite l (from an infinite score or weight) is kept.
    if (is_finite(l.value)) {
      const double factor = keys.exp_diff(double(m), double(larger));
      l.value *= factor;
      l.lost *= factor;
    }
    m = larger;
  }

  // Adds another sum. For many sums in sequence, this loses less than combine_t.
  template <typename Keys = plain_t>
  __device__ __forceinline__ void take(running_t other, Keys keys = Keys()) {
    if (m < other.m) rescale(other.m, keys);
    if (other.m < m) other.rescale(m, keys);
    l += other.l.value;
  }

  // Makes room for scores whose largest finite one is `largest`.
  template <typename Keys = plain_t>
  __device__ __forceinline__ void see(T largest, Keys keys = Keys()) {
    if (keys.is_above(largest, m, kSlack)) rescale(largest, keys);
  }
};

// The sum of both. The one with the larger m is not scaled, so that the result has the
// same bits in either order.
template <typename Keys = plain_t> struct combine_t {
  Keys keys;

  __device__ __forceinline__ explicit combine_t(Keys keys = Keys()) : keys(keys) {}
  template <typename T>
  __device__ __forceinline__ running_t<T> operator()(running_t<T> a,
                                                     running_t<T> b) const {
    if (a.m < b.m) a.rescale(b.m, keys);
    if (b.m < a.m) b.rescale(a.m, keys);
    a.l.value += b.l.value;
    return a;
  }
};

template <typename T>
__device__ __forceinline__ running_t<T> shuffle_xor(running_t<T> value, int mask) {
  value.m = shuffle_xor(value.m, mask);
  value.l.value = shuffle_xor(value.l.value, mask);
  return value;
}
