// SPDX-License-Identifier: MIT
// PTX mbarrier (sm_80 or newer): barriers in shared memory at which threads arrive
// directly, or when their copies complete.
#pragma once

namespace ptx {

using copy_barrier_t = unsigned long long;

// A phase completes after `count` arrivals. Other threads need a barrier to see it.
__device__ __forceinline__ void copy_barrier_init(copy_barrier_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(
                   unsigned(__cvta_generic_to_shared(barrier))),
               "r"(count)
               : "memory");
}

// Invalidates a barrier that no thread uses any more.
__device__ __forceinline__ void copy_barrier_end(copy_barrier_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(
                   unsigned(__cvta_generic_to_shared(barrier)))
               : "memory");
}

__device__ __forceinline__ void copy_barrier_arrive(copy_barrier_t* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(
                   unsigned(__cvta_generic_to_shared(barrier)))
               : "memory");
}

// Arrives when all cp.async of this thread so far have completed.
__device__ __forceinline__ void copy_barrier_arrive_after_copies(
    copy_barrier_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                   unsigned(__cvta_generic_to_shared(barrier)))
               : "memory");
}

// Whether the phase of the given parity has completed.
__device__ __forceinline__ bool copy_barrier_test(copy_barrier_t* barrier, int parity) {
  unsigned over;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2;"
      "selp.b32 %0, 1, 0, p;}"
#else
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
      "selp.b32 %0, 1, 0, p;}"
#endif
      : "=r"(over)
      : "r"(unsigned(__cvta_generic_to_shared(barrier))), "r"(parity)
      : "memory");
  return over;
}

}  // namespace ptx
