// SPDX-License-Identifier: MIT
// PTX ld and st on global memory, 8 and 16 bytes at a time.
//
// Stores are written out since the compiler takes a predicated one of a vector apart.
#pragma once

namespace ptx {

__device__ __forceinline__ void store_global(uint4* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_global(uint2* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}

// Reads what other multiprocessors have written, from the L2 cache.
__device__ __forceinline__ float4 load_global_cg(const float* p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

}  // namespace ptx
