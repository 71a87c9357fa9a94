// SPDX-License-Identifier: MIT
// PTX createpolicy, and ld and st of global memory with an L2 cache policy (sm_80 or
// newer).
#pragma once

namespace ptx {

// Lines that should be evicted last, and lines that should be evicted first.
__device__ __forceinline__ unsigned long long policy_evict_last() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ unsigned long long policy_evict_first() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Loads and stores of 4, 8 and 16 bytes that bypass L1; stores also of 2.
__device__ __forceinline__ unsigned load_global(const unsigned* p,
                                                unsigned long long policy) {
  unsigned v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.b32 %0, [%1], %2;"
               : "=r"(v)
               : "l"(p), "l"(policy)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_global(const uint2* p,
                                             unsigned long long policy) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p), "l"(policy)
               : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_global(const uint4* p,
                                             unsigned long long policy) {
  uint4 v;
  asm volatile(
      "ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "l"(policy)
      : "memory");
  return v;
}

__device__ __forceinline__ void store_global(unsigned short* p, unsigned short v,
                                             unsigned long long policy) {
  asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(p), "h"(v),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_global(unsigned* p, unsigned v,
                                             unsigned long long policy) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(p), "r"(v),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_global(uint2* p, uint2 v,
                                             unsigned long long policy) {
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(v.x),
               "r"(v.y), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_global(uint4* p, uint4 v,
                                             unsigned long long policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}

}  // namespace ptx
