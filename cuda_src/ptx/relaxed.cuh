// SPDX-License-Identifier: MIT
// PTX ld and st of data that other multiprocessors access concurrently.
//
// Each access is atomic and goes to the L2 cache; none orders any other.
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

}  // namespace ptx
