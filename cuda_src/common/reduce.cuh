// SPDX-License-Identifier: MIT
// Reductions over a warp and over a block, in a fixed order.
#pragma once

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// The value of the lane whose index differs in the bits of `mask`. Types of more than
// one word bring their own overload.
template <typename T> __device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kFullMask, value, mask);
}

// Every lane gets the result of `combine` over the kLanes lanes of its group. All lanes
// of the warp must take part.
template <int kLanes = kWarpSize, typename T, typename Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
  static_assert(kLanes >= 1 && kLanes <= kWarpSize && (kLanes & (kLanes - 1)) == 0);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = combine(value, shuffle_xor(value, offset));
  }
  return value;
}

// As warp_reduce for a group of any power of two: lanes of one warp or, above 32, all
// kLanes threads of the block.
template <int kLanes, typename T, typename Combine>
__device__ __forceinline__ T group_reduce(T value, Combine combine) {
  if constexpr (kLanes <= kWarpSize) {
    return warp_reduce<kLanes>(value, combine);
  } else {
    constexpr int kWarps = kLanes / kWarpSize;
    __shared__ T partial[kWarps];
    value = warp_reduce(value, combine);
    if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = warp_reduce<kWarps>(partial[threadIdx.x % kWarps], combine);
    // All warps have read before the next reduction writes.
    __syncthreads();
    return value;
  }
}
