// SPDX-License-Identifier: MIT
// Reduction of the sum of a long row within one of the blocks that share it.
#pragma once

#include "softmax/detail/thread_group.cuh"
#include "softmax/detail/partial_sum.cuh"

// What the warps of a block exchange. Two of these alternate: one is written while the
// other may still be read.
struct shared_sum_t {
  static constexpr int kWarps = kLanes / kWarpSize;
  double l[kWarps];
  acc_t top[kWarps];
  int shift[kWarps];

  // The sum of the block, in each of its threads.
  __device__ __forceinline__ void join(powers_t& sum) {
    sum.template join<kWarpSize>();
    if (threadIdx.x % kWarpSize == 0) {
      const int warp = threadIdx.x / kWarpSize;
      l[warp] = sum.l.value;
      top[warp] = sum.top;
      shift[warp] = sum.shift;
    }
    __syncthreads();
    const int warp = threadIdx.x % kWarps;
    sum.l.value = l[warp];
    sum.top = top[warp];
    sum.shift = shift[warp];
    sum.template join<kWarps>();
  }
};
