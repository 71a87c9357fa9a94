// SPDX-License-Identifier: MIT
// The running sum of exponentials: one read, no overflow, whatever comes.
#pragma once

#include "common/reduce.cuh"
#include "softmax/detail/sum.cuh"

// How differences of scores are taken: of scores that are numbers themselves.
struct plain_t {
  // exp(x - m), with 0 where both are -inf.
  __device__ __forceinline__ double exp_diff(double x, double m) const {
    return ::exp_diff(x, m);
  }
  // Whether a score is so far above m.
  template <typename T>
  __device__ __forceinline__ bool is_above(T x, T m, double slack) const {
    return x > m + T(slack);
  }
};

// l = sum of weight * exp(score - m) over what was seen. m follows the largest finite
// score in steps: it moves only when a score is more than kSlack above it. Each move
// rounds l, and in a row of rising scores the moves of the plain recurrence would add
// up to more than all other errors.
template <typename T> struct running_t {
  static constexpr double kSlack = 8;  // exp(8) = 2981: no danger to any sum

  T m = -infinity<T>();
  sum_t l;

  // What is to be subtracted from a score.
  __device__ __forceinline__ T shift() const { return shift_by(m); }

  // Moves m up to `larger`.
  template <typename Keys = plain_t>
  __device__ __forceinline__ void rescale(T larger, Keys keys = Keys()) {
    // An infinite l (of a score or weight that is infinite) stays what it is.
    if (is_finite(l.value)) {
      const double factor = keys.exp_diff(double(m), double(larger));
      l.value *= factor;
      l.lost *= factor;
    }
    m = larger;
  }

  // Takes in another sum. Of many, one after the other, less is lost than by merge_t.
  template <typename Keys = plain_t>
  __device__ __forceinline__ void take(running_t other, Keys keys = Keys()) {
    if (m < other.m) rescale(other.m, keys);
    if (other.m < m) other.rescale(m, keys);
    l += other.l.value;
  }

  // Makes room for scores, of which `largest` is the largest finite one.
  template <typename Keys = plain_t>
  __device__ __forceinline__ void see(T largest, Keys keys = Keys()) {
    if (keys.is_above(largest, m, kSlack)) rescale(largest, keys);
  }
};

// The sum over what either has seen. The one with the larger m is not scaled, so that
// the result is the same bits whichever comes first.
template <typename Keys = plain_t> struct merge_t {
  Keys keys;

  __device__ __forceinline__ explicit merge_t(Keys keys = Keys()) : keys(keys) {}
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
