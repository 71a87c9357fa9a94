// SPDX-License-Identifier: MIT
// A team of blocks that share tiles of columns and meet through memory.
//
// All blocks run at once. Each tells the others a number a column, or two floats, in a
// word of memory that says by itself whether it has been told, so that nothing else has
// to be ordered; a launch before this one clears the words.
//
// Parameters as in softmax/columns.cuh, TEAM above all
#pragma once

#include "ptx/relaxed.cuh"
#include "softmax/columns.cuh"

#if TEAM > 1
// What a block has heard of a tile. A place more than there are blocks, so that threads
// with a column each meet different banks.
struct heard_t {
  unsigned long long word[kColumns][kTeam | 1];
};

struct board_t {
  static constexpr unsigned long long kUntold = ~0ull;  // NaNs that are never told
  static constexpr int kWords = kColumns * kTeam;       // of a tile

  unsigned long long* words;  // (tiles, numbers a column, kColumns, kTeam), at a tile

  __device__ __forceinline__ unsigned long long* of(int what) const {
    return words + what * kWords;
  }
  __device__ __forceinline__ void tell_word(int what,
                                            int c,
                                            unsigned long long word) const {
    ptx::store_relaxed(of(what) + c * kTeam + block_rank(), word);
  }
  static __device__ __forceinline__ unsigned bits_of(float x) {
    return x == x ? __float_as_uint(x) : 0x7fc00000u;
  }

  // By one thread of this block, for column c.
  __device__ __forceinline__ void tell(int what, int c, double x) const {
    tell_word(what, c, x == x ? __double_as_longlong(x) : 0x7ff8ull << 48);
  }
  __device__ __forceinline__ void tell(int what, int c, float low, float high) const {
    const unsigned long long upper = bits_of(high);
    tell_word(what, c, upper << 32 | bits_of(low));
  }

  // Waits for what all blocks tell of all columns; by all threads, and a barrier has to
  // follow.
  __device__ __forceinline__ void hear(int what, heard_t& heard) const {
    constexpr int kAtOnce = 8;
    const unsigned long long* const from = of(what);
#pragma unroll 1
    for (int first = threadIdx.x; first < kWords; first += kAtOnce * kNumThreads) {
      unsigned long long word[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * kNumThreads;
        if (i < kWords) word[k] = ptx::load_relaxed(from + i);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * kNumThreads;
        if (i >= kWords) continue;
        while (word[k] == kUntold) word[k] = ptx::load_relaxed(from + i);
        heard.word[i / kTeam][i % kTeam] = word[k];
      }
    }
  }

  // Before anything is told: by a launch of its own, of any grid.
  static __device__ __forceinline__ void clear(unsigned long long* words,
                                               long long count) {
    const long long step = (long long)gridDim.x * gridDim.y * kNumThreads;
    const long long block = blockIdx.y * (long long)gridDim.x + blockIdx.x;
    for (long long i = block * kNumThreads + threadIdx.x; i < count; i += step) {
      words[i] = kUntold;
    }
  }
};
#endif
