// SPDX-License-Identifier: MIT
// attention_mma: two-level sums of o in float32 over many keys.
#pragma once

#include "attention/sm80/large_scores.cuh"
#include "attention/simt/long_sums.cuh"

class two_level_out_t {
 public:
  __device__ __forceinline__ void begin() { sum_.begin(); }

  // o was multiplied by rows.alpha.
  __device__ __forceinline__ void follow(const softmax_t& rows) {
    if constexpr (kTwoLevelSums) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) since_[r] = since_[r] * rows.alpha[r];
    }
  }

  // The tile at key j0 was added to o; the next one is at `next`.
  __device__ __forceinline__ void end_tile(out_frag_t& o, int j0, int next, int last) {
    if constexpr (kTwoLevelSums) {
      constexpr int kRun = kRunTiles * kBlockN;
      const bool goes_on =
          kHasMaskFunction ? next / kRun == j0 / kRun : next % kRun != 0;
      if (goes_on || next >= last) return;
      const factors_t factors(since_);
      with_room(o, [&](out_frag_t& x) {
        sum_.end(x, [&](int n) { return factors.of[row_of(n)]; });
      });
#pragma unroll
      for (int r = 0; r < kRows; ++r) since_[r] = 1;
    }
  }

  __device__ __forceinline__ void finish(out_frag_t& o) {
    if constexpr (kTwoLevelSums) {
      const factors_t factors(since_);
      with_room(o, [&](out_frag_t& x) {
        sum_.finish(x, [&](int n) { return factors.of[row_of(n)]; });
      });
    }
  }

 private:
  // Calls `change` with o, which is on the stack meanwhile if it leaves few registers.
  template <typename Change>
  static __device__ __forceinline__ void with_room(out_frag_t& o, Change change) {
    if constexpr (kWide) {
      out_frag_t on_stack;
      float* const numbers = &on_stack[0][0][0];
      put<kOutTiles>(numbers, o);
      ptx::launder(numbers);
      change(on_stack);
      ptx::launder(numbers);
      get<kOutTiles>(o, numbers);
    } else {
      change(o);
    }
  }

  struct factors_t {
    float of[kRows];
    __device__ __forceinline__ explicit factors_t(const volatile float* since) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) of[r] = since[r];
    }
  };

  // The row of number n of o.
  static __device__ __forceinline__ constexpr int row_of(int n) {
    return n / (kOutTiles * 4) * 2 + n % 4 / 2;
  }

  two_level_sum_t<float, out_frag_t, kTwoLevelSums, kWide> sum_;
  // For each row, the product of factors since a run ended.
  volatile float since_[kTwoLevelSums ? kRows : 1];
};
