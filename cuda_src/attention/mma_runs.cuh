// SPDX-License-Identifier: MIT
// attention_mma: o of float32 over many keys, a run of tiles at a time.
#pragma once

#include "attention/mma_huge.cuh"
#include "attention/runs.cuh"

// 16 bits and tf32 promise less than their sums lose.
constexpr bool kHasRuns = kParts == 2;

class out_runs_t {
 public:
  __device__ __forceinline__ void begin() { runs_.begin(); }

  // Where o has been multiplied by rows.alpha.
  __device__ __forceinline__ void follow(const softmax_t& rows) {
    if constexpr (kHasRuns) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) since_[r] *= rows.alpha[r];
    }
  }

  // A tile has joined o, and key `next` is the first of the one behind it.
  __device__ __forceinline__ void end_tile(out_frag_t& o, int next, int last) {
    if (!kHasRuns || next % (kRunTiles * kBlockN) != 0 || next >= last) return;
    runs_.end(o, [&](int n) { return since_[row_of(n)]; });
#pragma unroll
    for (int r = 0; r < kRows; ++r) since_[r] = 1;
  }

  __device__ __forceinline__ void finish(out_frag_t& o) {
    runs_.finish(o, [&](int n) { return since_[row_of(n)]; });
  }

 private:
  // Of number n of o.
  static __device__ __forceinline__ int row_of(int n) {
    return n / (kOutTiles * 4) * 2 + n % 4 / 2;
  }

  runs_t<float, out_frag_t, kHasRuns> runs_;
  float since_[kRows];  // by row, how o has been multiplied since a run ended
};
