// SPDX-License-Identifier: MIT
// PTX ld.acquire and st.release: flags between thread blocks.
#pragma once

namespace ptx {

// Other blocks that see x by load_acquire() also see all that this thread wrote or saw
// before.
__device__ __forceinline__ void store_release(int* p, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Orders what this thread has acquired before copies and sums by TMA that it starts
// later.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace ptx
