// SPDX-License-Identifier: MIT
// PTX st on global memory, 8 and 16 bytes at a time.
//
// Written as PTX, because the compiler splits predicated vector stores.
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

}  // namespace ptx
