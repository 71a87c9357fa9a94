// SPDX-License-Identifier: MIT
// What blocks that run at once tell each other of the rows that they share.
//
// Grid       (blocks of a group, groups)
#pragma once

#include "ptx/relaxed.cuh"
#include "softmax/group.cuh"

// kWords numbers a row and block of the group. Each number says by itself whether it
// has been told, so that nothing else has to be ordered.
template <int kWords>
struct board_t {
  static constexpr unsigned long long kUntold = ~0ull;  // a NaN that is never told

  unsigned long long* words;  // (num_rows, blocks of a group, kWords)

  __device__ __forceinline__ unsigned long long* of(long long row, int block) const {
    return words + (row * gridDim.x + block) * kWords;
  }
  static __device__ __forceinline__ unsigned long long bits_of(double x) {
    return x == x ? __double_as_longlong(x) : 0x7ffull << 52 | 1ull << 51;
  }
  static __device__ __forceinline__ double read(const unsigned long long* word) {
    unsigned long long bits;
    do {
      bits = ptx::load_relaxed(word);
    } while (bits == kUntold);
    return __longlong_as_double(bits);
  }

  // Before anything is told: by a launch of its own, of a grid of as many columns.
  __device__ __forceinline__ void clear(long long num_rows) const {
    const long long step = (long long)gridDim.y * kLanes;
    for (long long row = (long long)blockIdx.y * kLanes + lane(); row < num_rows;
         row += step) {
      for (int i = 0; i < kWords; ++i) of(row, blockIdx.x)[i] = kUntold;
    }
  }
  // Number i of this block, by one thread.
  __device__ __forceinline__ void tell(long long row, int i, double x) const {
    ptx::store_relaxed(of(row, blockIdx.x) + i, bits_of(x));
  }
  // Waits until blocks `first`, first + 32, ... have told both their numbers.
  template <int kCount>
  __device__ __forceinline__ void hear_all(long long row,
                                           int first,
                                           double (&a)[kCount],
                                           double (&b)[kCount]) const {
    bool is_told;
    do {
      is_told = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int block = first + i * kWarpSize;
        if (block >= gridDim.x) continue;
        const unsigned long long x = ptx::load_relaxed(of(row, block));
        const unsigned long long y = ptx::load_relaxed(of(row, block) + 1);
        is_told = is_told && x != kUntold && y != kUntold;
        a[i] = __longlong_as_double(x);
        b[i] = __longlong_as_double(y);
      }
    } while (!is_told);
  }
  // Waits until a block has told it.
  __device__ __forceinline__ double hear(long long row, int block, int i) const {
    return read(of(row, block) + i);
  }
};
