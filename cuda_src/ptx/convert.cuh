// SPDX-License-Identifier: MIT
// PTX cvt: float16 and bfloat16, kept as their bits, to and from wider types.
#pragma once

namespace ptx {

__device__ __forceinline__ float f32_from_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short f16_from_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned short f16_from_f64(double value) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}

// Of any float; needs one instruction more where the compiler flushes subnormals.
__device__ __forceinline__ double f64_from_f32(float value) {
  double wide;
  asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
  return wide;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// sm_80 or newer.
__device__ __forceinline__ unsigned short bf16_from_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

}  // namespace ptx
