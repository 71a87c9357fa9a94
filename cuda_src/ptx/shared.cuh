// SPDX-License-Identifier: MIT
// PTX ld, st and stmatrix on shared memory, by 32-bit addresses.
#pragma once

namespace ptx {

__device__ __forceinline__ float load_shared_f32(unsigned address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ unsigned short load_shared_u16(unsigned address) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ unsigned load_shared_u8(unsigned address) {
  unsigned x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float2 load_shared_f32x2(unsigned address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(address));
  return x;
}

__device__ __forceinline__ float4 load_shared_f32x4(unsigned address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ int4 load_shared_s32x4(unsigned address) {
  int4 x;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ int load_shared_s32(unsigned address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ uint4 load_shared_u32x4(unsigned address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_s32(unsigned address, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_s32x2(unsigned address, int x, int y) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void store_shared_f32x4(unsigned address, float a, float b,
                                                   float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit numbers: lane l gives the address of row l % 8
// of matrix l / 8; word n of all lanes forms matrix n, in the layout of wgmma and mma.
__device__ __forceinline__ void stmatrix_x4(unsigned address, unsigned a, unsigned b,
                                            unsigned c, unsigned d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// The same, transposed.
__device__ __forceinline__ void stmatrix_x4_trans(unsigned address, unsigned a,
                                                  unsigned b, unsigned c, unsigned d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
          address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

}  // namespace ptx
