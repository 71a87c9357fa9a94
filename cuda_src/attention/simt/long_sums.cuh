// SPDX-License-Identifier: MIT
// Two-level sums.
//
// A sum in registers is rounded whenever a tile is added. Over n tiles the error grows
// like sqrt(n), and like n where tiles are alike and all round the same way. If sums
// are long (RUN_TILES), the sum is added to a second one, kept as two numbers, after
// each run of so many tiles, and restarts at 0. The second one is on the stack: there
// are no registers for it.
//
// Runs end at multiples of their length among all keys (among all queries for gradients
// of keys), so that the bits of a row do not depend on where its block starts.
#pragma once

#include "common/math.cuh"
#include "ptx/opaque.cuh"

#ifdef RUN_TILES
constexpr bool kTwoLevelSums = true;
constexpr int kRunTiles = RUN_TILES;
#else
constexpr bool kTwoLevelSums = false;  // a single run
constexpr int kRunTiles = 1;
#endif

// The sums of a thread: an array of T of any rank, indexed by constants only, unless
// they are on the stack meanwhile (kOnStack).
template <typename T, typename Sums, bool kExists = kTwoLevelSums,
          bool kOnStack = false>
class two_level_sum_t {
 public:
  static constexpr int kCount = sizeof(Sums) / sizeof(T);

  // Starts: no run has ended yet.
  __device__ __forceinline__ void begin() {
    ptx::keep_in_memory(high_);
    ptx::keep_in_memory(low_);
    ptx::keep_in_memory(&any_);
    any_ = 0;
  }
  __device__ __forceinline__ bool any() const { return any_ != 0; }

  // Ends a run: adds its sums to those of earlier runs, which are first multiplied by
  // `factor(n)`, and restarts them at 0.
  template <typename Factor>
  __device__ __forceinline__ void end(Sums& sums, Factor factor) {
    join(sums, factor, [&](T& x, int n, T high, T low) {
      high_[n] = high;
      low_[n] = low;
      x = 0;
    });
    any_ = 1;
  }
  __device__ __forceinline__ void end(Sums& sums) {
    end(sums, [](int) { return T(1); });
  }

  // Turns the sums of the last run into those of all runs.
  template <typename Factor>
  __device__ __forceinline__ void finish(Sums& sums, Factor factor) {
    if (!any()) return;
    // If a sum is not finite, `low` is meaningless.
    join(sums, factor,
         [](T& x, int, T high, T low) { x = is_finite(high) ? high + low : high; });
  }
  __device__ __forceinline__ void finish(Sums& sums) {
    finish(sums, [](int) { return T(1); });
  }

 private:
  template <typename Factor, typename Store>
  __device__ __forceinline__ void join(Sums& sums, Factor factor, Store store) {
    constexpr int kAtOnce = 32 / sizeof(T);  // loads from the stack in flight
    T* const x = reinterpret_cast<T*>(&sums);
    const bool has_sums = any();
    constexpr int kUnroll = kOnStack ? 1 : (kCount + kAtOnce - 1) / kAtOnce;
#pragma unroll kUnroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      T high[kAtOnce] = {}, low[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (has_sums && first + i < kCount) {
          high[i] = high_[first + i];
          low[i] = low_[first + i];
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i;
        if (n >= kCount) break;
        const T by = has_sums ? factor(n) : T(1);
        const T product = rounded_product(high[i], by);
        const pair_t<T> sum = exact_sum(product, x[n]);
        const T rest = fma_of(low[i], by, fma_of(high[i], by, -product));
        store(x[n], n, sum.high, sum.low + rest);
      }
    }
  }

  // Volatile, because the compiler would keep them in registers.
  volatile T high_[kCount], low_[kCount];
  volatile int any_;
};

template <typename T, typename Sums, bool kOnStack>
class two_level_sum_t<T, Sums, false, kOnStack> {
 public:
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ bool any() const { return false; }
  template <typename... Factor> __device__ __forceinline__ void end(Sums&, Factor...) {}
  template <typename... Factor>
  __device__ __forceinline__ void finish(Sums&, Factor...) {}
};
