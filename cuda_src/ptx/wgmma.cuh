// SPDX-License-Identifier: MIT
// PTX wgmma (sm_90a): synchronization of the matrix products of a warpgroup.
#pragma once

namespace ptx {

// Required before a product whose accumulators, or A in registers, other code has
// written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Groups the products issued so far.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups of this warpgroup are in flight.
template <int kPending> __device__ __forceinline__ void wgmma_wait_group() {
  static_assert(0 <= kPending && kPending <= 7);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: keeps reads of `x` after this point. Accumulators need it after the
// wait for their product, which the compiler believes has already written them.
__device__ __forceinline__ void compiler_fence(float& x) {
  asm volatile("" : "+f"(x)::"memory");
}

__device__ __forceinline__ void compiler_fence(int& x) {
  asm volatile("" : "+r"(x)::"memory");
}

}  // namespace ptx
