// SPDX-License-Identifier: MIT
// Reductions over a warp and over a block, in an order that never changes.
#pragma once

constexpr int kWarpSize = 32;

// Every lane gets the result of `combine` over the kLanes lanes of its group.
template <int kLanes = kWarpSize, typename T, typename Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}
