// SPDX-License-Identifier: MIT
// PTX on two numbers of 16 bits in one word.
#pragma once

namespace ptx {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// sm_80 or newer.
__device__ __forceinline__ unsigned f16x2_from_f32(float low, float high) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ unsigned bf16x2_from_f32(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// The larger of each two, NaN if either is.
__device__ __forceinline__ unsigned max_f16x2(unsigned a, unsigned b) {
  unsigned word;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

__device__ __forceinline__ unsigned max_bf16x2(unsigned a, unsigned b) {
  unsigned word;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}
#endif

}  // namespace ptx
