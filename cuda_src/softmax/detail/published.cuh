// SPDX-License-Identifier: MIT
// Numbers that blocks of one launch publish to each other through global memory.
//
// Each word tells by itself whether it has been published, so no ordering is needed. An
// earlier launch clears them.
#pragma once

#include "ptx/relaxed.cuh"

struct published_t {
  static constexpr unsigned long long kUnpublished =
      ~0ull;  // a NaN that is never published

  static __device__ __forceinline__ void publish(unsigned long long* word, double x) {
    constexpr unsigned long long kNaN = 0x7ffull << 52 | 1ull << 51;
    ptx::store_relaxed(word, x == x ? __double_as_longlong(x) : kNaN);
  }
  // Waits until the word is published.
  static __device__ __forceinline__ double read(const unsigned long long* word) {
    unsigned long long bits;
    do {
      bits = ptx::load_relaxed(word);
    } while (bits == kUnpublished);
    return __longlong_as_double(bits);
  }
};
