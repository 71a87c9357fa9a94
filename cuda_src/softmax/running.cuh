// SPDX-License-Identifier: MIT
// The running sum of exponentials: one read, no overflow, whatever comes.
#pragma once

#include "common/reduce.cuh"
#include "softmax/sum.cuh"

// l = sum of weight * exp(score - m) over what was seen. m follows the largest finite
// score in steps: it moves only when a score is more than kSlack above it. Each move
// rounds l, and in a row of rising scores the moves of the plain recurrence would add
// up to more than all other errors.
template <typename T>
struct running_t {
  static constexpr double kSlack = 8;  // exp(8) = 2981: no danger to any sum

  T m = -infinity<T>();
  sum_t l;

  // What is to be subtracted from a score.
  __device__ __forceinline__ T shift() const { return shift_by(m); }

  // Moves m up to `larger`.
  __device__ __forceinline__ void rescale(T larger) {
    // An infinite l (of a score or weight that is infinite) stays what it is.
    if (is_finite(l.value)) {
      const double factor = exp_diff(double(m), double(larger));
      l.value *= factor;
      l.lost *= factor;
    }
    m = larger;
  }

  // Takes in another sum. Of many, one after the other, less is lost than by merge_t.
  __device__ __forceinline__ void take(running_t other) {
    if (m < other.m) rescale(other.m);
    if (other.m < m) other.rescale(m);
    l += other.l.value;
  }

  // Makes room for scores, of which `largest` is the largest finite one.
  __device__ __forceinline__ void see(T largest) {
    if (largest > m + T(kSlack)) rescale(largest);
  }
};

// The sum over what either has seen. The one with the larger m is not scaled, so that
// the result is the same bits whichever comes first.
struct merge_t {
  template <typename T>
  __device__ __forceinline__ running_t<T> operator()(running_t<T> a,
                                                     running_t<T> b) const {
    if (a.m < b.m) a.rescale(b.m);
    if (b.m < a.m) b.rescale(a.m);
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
