// SPDX-License-Identifier: MIT
// PTX wgmma (sm_90a): what orders the matrix products of a warpgroup.
#pragma once

namespace ptx {

// Before a product whose accumulators, or A in registers, other code has written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// The products issued so far become one group.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups of this warpgroup are in flight.
template <int kPending> __device__ __forceinline__ void wgmma_wait_group() {
  static_assert(0 <= kPending && kPending <= 7);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: what follows reads `x` after what stands before. An accumulator needs
// it behind the wait for its product, which the compiler takes for its only writer.
__device__ __forceinline__ void compiler_fence(float& x) {
  asm volatile("" : "+f"(x)::"memory");
}

__device__ __forceinline__ void compiler_fence(int& x) {
  asm volatile("" : "+r"(x)::"memory");
}

}  // namespace ptx
