// SPDX-License-Identifier: MIT
// PTX ld and st of what other multiprocessors write or read meanwhile.
//
// Each access is whole by itself and goes to the L2 cache. Relaxed ones order no other;
// an acquiring load comes before all that stands behind it.
#pragma once

namespace ptx {

__device__ __forceinline__ void store_relaxed(unsigned long long* p,
                                              unsigned long long x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

__device__ __forceinline__ unsigned long long load_relaxed(
    const unsigned long long* p) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}

__device__ __forceinline__ void store_relaxed(int* p, int x) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ int load_relaxed(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// What this thread has written or seen so far comes before what it writes or reads from
// here on, for all threads of the device that take note of it in the same way.
__device__ __forceinline__ void fence_acq_rel_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

}  // namespace ptx
