// SPDX-License-Identifier: MIT
// Long sums in two levels.
//
// A sum in registers is rounded whenever a tile joins it. Over n tiles the error grows
// as the root of n, and where tiles are alike as n itself: each is rounded the same
// way. So after kRunTiles tiles a sum joins another one, of two numbers, and begins
// again at 0. The other one lies on the stack, which is asked for once a run: there are
// no registers for it.
//
// Runs end at multiples of their length among all keys (of gradients of keys, among all
// queries), so that the bits of a row do not depend on where its block begins.
#pragma once

#include "common/math.cuh"

constexpr int kRunTiles = 64;

// The sums of a thread: an array of T, of one axis or more, with constant indices only.
// Without kExists there is one run only.
template <typename T, typename Sums, bool kExists = true>
class runs_t {
 public:
  static constexpr int kCount = sizeof(Sums) / sizeof(T);

  // No run has ended.
  __device__ __forceinline__ void begin() { high_[kCount] = 0; }
  __device__ __forceinline__ bool any() const { return high_[kCount] != 0; }

  // A run ends: its sums join those before it, which are multiplied by `factor(n)`
  // first, and begin again at 0.
  template <typename Factor>
  __device__ __forceinline__ void end(Sums& sums, Factor factor) {
    T x[kCount];
    put(x, sums);
    add(x, factor);
    T* const to = reinterpret_cast<T*>(&sums);
#pragma unroll
    for (int n = 0; n < kCount; ++n) to[n] = 0;
  }
  __device__ __forceinline__ void end(Sums& sums) {
    end(sums, [](int) { return T(1); });
  }

  // The sums of the last run become those of all.
  template <typename Factor>
  __device__ __forceinline__ void finish(Sums& sums, Factor factor) {
    if (!any()) return;
    T x[kCount];
    put(x, sums);
    add(x, factor);
    T* const to = reinterpret_cast<T*>(&sums);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // Of a sum that is not finite `low` says nothing.
      to[n] = is_finite(high_[n]) ? high_[n] + low_[n] : high_[n];
    }
  }
  __device__ __forceinline__ void finish(Sums& sums) {
    finish(sums, [](int) { return T(1); });
  }

 private:
  static __device__ __forceinline__ void put(T (&x)[kCount], const Sums& sums) {
    const T* const from = reinterpret_cast<const T*>(&sums);
    // One by one: two at a time have to stand in registers side by side.
    volatile T* const to = x;
#pragma unroll
    for (int n = 0; n < kCount; ++n) to[n] = from[n];
  }

  template <typename Factor>
  __device__ __noinline__ void add(const T (&x)[kCount], Factor factor) {
    const bool any_before = any();
#pragma unroll 1
    for (int n = 0; n < kCount; ++n) {
      pair_t<T> sum = {x[n], 0};
      if (any_before) {
        const T by = factor(n), product = rounded_product(high_[n], by);
        sum = exact_sum(product, x[n]);
        sum.low += fma_of(low_[n], by, fma_of(high_[n], by, -product));
      }
      high_[n] = sum.high;
      low_[n] = sum.low;
    }
    high_[kCount] = 1;
  }

  T high_[kCount + 1], low_[kCount];  // behind the last one: whether a run has ended
};

template <typename T, typename Sums>
class runs_t<T, Sums, false> {
 public:
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ bool any() const { return false; }
  template <typename... Factor>
  __device__ __forceinline__ void end(Sums&, Factor...) {}
  template <typename... Factor>
  __device__ __forceinline__ void finish(Sums&, Factor...) {}
};
