// SPDX-License-Identifier: MIT
// PTX mbarrier (sm_90): barriers in shared memory that count arrivals and bytes.
// Addresses are 32-bit shared memory addresses.
#pragma once

namespace ptx {

__device__ __forceinline__ unsigned shared_address(const void* x) {
  return static_cast<unsigned>(__cvta_generic_to_shared(x));
}

// A phase completes after `count` arrivals and the expected bytes.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// Makes initialized barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives if `condition` holds, without a branch.
__device__ __forceinline__ void mbarrier_arrive_if(bool condition, unsigned barrier) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0;"
      "@p mbarrier.arrive.shared::cta.b64 _, [%1];}" ::"r"(static_cast<int>(condition)),
      "r"(barrier)
      : "memory");
}

// Arrives and adds `bytes` to what TMA must deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier,
                                                          unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Whether the phase of the given parity has completed; waits for a short time.
__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned barrier,
                                                         unsigned parity) {
  unsigned over;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
      "selp.b32 %0, 1, 0, p;}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over;
}

}  // namespace ptx
