// SPDX-License-Identifier: MIT
// PTX max and min of two numbers, NaN if either is (sm_80 or newer).
#pragma once

namespace ptx {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ __forceinline__ float max_nan_f32(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
__device__ __forceinline__ float min_nan_f32(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}
#endif

}  // namespace ptx
